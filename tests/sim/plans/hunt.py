"""Hunts mutants: runs seeds with each until a check fails.

A seed that also fails without the mutant proves nothing about it.

Each mutant gets a little time, then those not found get twice as much, and so on: easy ones do
not wait for hard ones, and hard ones get the time that is left.
"""

from __future__ import annotations

import itertools
import multiprocessing
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from sim.mutants.catalogue import MUTANTS
from sim.plans.run import Choice, Outcome, run_seed

FIRST_ROUND_S = 15.0
CRASH = "Traceback (most recent call last)"
"""Is in the violation that an exception leaves."""


@dataclass(frozen=True, slots=True)
class Hunted:
    """How far the search for one mutant is.

    Attributes:
        name: one of `MUTANTS`.
        seeds: the number of seeds that were run.
        took_s: the time that they took.
        choice: the seed that failed.
        outcome: its result; None: none has failed.
    """

    name: str
    seeds: int = 0
    took_s: float = 0.0
    choice: Choice | None = None
    outcome: Outcome | None = None

    @property
    def why(self) -> str:
        """The check that failed, as a line."""
        if self.outcome is None:
            return ""
        return self.outcome.violations[0].strip().splitlines()[-1]

    @property
    def is_as_expected(self) -> bool:
        """Whether the check that is meant for it has found it."""
        text = "\n".join(() if self.outcome is None else self.outcome.violations)
        return re.search(MUTANTS[self.name].symptom, text) is not None

    @property
    def has_crashed(self) -> bool:
        """Whether an exception that is not meant for it has ended the run, and no check."""
        violations = () if self.outcome is None else self.outcome.violations
        return not self.is_as_expected and any(CRASH in text for text in violations)


def hunt(names: Iterable[str], *, minutes: float, jobs: int) -> Iterator[Hunted]:
    """Hunts mutants, and reports each once: when it is found, or when time is up.

    Args:
        names: names of `MUTANTS`.
        minutes: the time for all of them.
        jobs: the number of processes.
    """
    until = time.monotonic() + 60 * minutes
    waiting, round_s = [Hunted(name) for name in names], FIRST_ROUND_S
    with _mapper(jobs) as run_all:
        while waiting and time.monotonic() < until:
            look = partial(look_on, seconds=round_s, until=until)
            missed = []
            for hunted in run_all(look, waiting):
                if hunted.outcome is None:
                    missed.append(hunted)
                else:
                    yield hunted
            waiting, round_s = missed, 2 * round_s
    yield from waiting


def fails(choice: Choice, seed: int) -> bool:
    """Whether a seed fails without any mutant."""
    return bool(run_seed(choice, seed).violations)


def look_on(
    hunted: Hunted,
    *,
    seconds: float,
    until: float,
    fails_anyway: Callable[[Choice, int], bool] = fails,
) -> Hunted:
    """Continues to hunt one mutant: its own profiles in turns, sometimes any.

    Args:
        hunted: how far the search is.
        seconds: the time to spend.
        until: the end by the clock, however much time is left.
        fails_anyway: whether a seed also fails without the mutant.
    """
    mutant, began = MUTANTS[hunted.name], time.monotonic()
    choices = [Choice(profile=profile, nodes=mutant.nodes) for profile in mutant.profiles]
    rotation = [Choice(nodes=mutant.nodes), *(choices * 4)]
    for seed in itertools.count(hunted.seeds + 1):
        choice = rotation[seed % len(rotation)]
        with mutant():
            outcome = run_seed(choice, seed)
        took_s = time.monotonic() - began
        if outcome.violations and not fails_anyway(choice, seed):
            return Hunted(hunted.name, seed, hunted.took_s + took_s, choice, outcome)
        if took_s > seconds or time.monotonic() > until:
            return Hunted(hunted.name, seed, hunted.took_s + took_s)
    raise AssertionError("seeds do not end")


@contextmanager
def _mapper(jobs: int) -> Iterator[Callable[..., Iterator[Hunted]]]:
    """Maps in processes, yielding results as they end; with one job, in this process."""
    if jobs <= 1:
        yield map
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield pool.imap_unordered
