"""Runs many seeds on several processes, and reports which failed and how to see why."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sim.drills.catalogue import DRILLS
from sim.nodes.world import Result, run
from sim.plans.plan import Plan
from sim.plans.profiles import draw
from sim.plans.shrink import shrink


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan that a seed stands for.

    Attributes:
        nodes: the number of nodes; None: chosen by the seed.
        steps: limit for the number of steps.
        profile: one of `PROFILES` or `DRILLS`; None: chosen by the seed.
    """

    nodes: int | None = None
    steps: int | None = None
    profile: str | None = None

    def plan(self, seed: int) -> Plan:
        """The plan of a seed."""
        if self.profile in DRILLS:
            plan = DRILLS[self.profile].plan(seed)
        else:
            plan = draw(seed, profile=self.profile, nodes=self.nodes)
        return plan if self.steps is None else plan.first(self.steps)

    def command(self, seed: int) -> str:
        """The command that runs this seed again."""
        words = [f"scripts/sim --seeds {seed}..{seed}"]
        words += [
            f"--{name} {value}"
            for name, value in (
                ("nodes", self.nodes),
                ("steps", self.steps),
                ("profile", self.profile),
            )
            if value is not None
        ]
        return " ".join([*words, "--trace"])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a seed.

    Attributes:
        seed: the seed.
        profile: of its plan.
        violations: empty: the run was good.
        digest: of the run.
        simulated_s: its simulated duration.
        took_s: its real duration.
        delivered: how many messages became visible.
        command: the command that runs it again.
    """

    seed: int
    profile: str
    violations: tuple[str, ...]
    digest: int
    simulated_s: float
    took_s: float
    delivered: int
    command: str


def run_seed(choice: Choice, seed: int) -> Outcome:
    """Runs one seed."""
    began = time.monotonic()
    result = run(choice.plan(seed))
    return Outcome(
        seed=seed,
        profile=result.plan.profile,
        violations=result.violations,
        digest=result.digest,
        simulated_s=result.seconds,
        took_s=time.monotonic() - began,
        delivered=result.delivered,
        command=choice.command(seed),
    )


def run_seeds(runs: Iterable[tuple[Choice, int]], *, jobs: int) -> Iterator[Outcome]:
    """Runs seeds, as many at a time as there are jobs; yields results as they end."""
    if jobs <= 1:
        yield from map(_run, runs)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _prepare) as pool:
        yield from pool.imap_unordered(_run, runs)


def shrunk(result: Result) -> Result:
    """Runs the shortest plan found that fails like this one."""

    def fails(plan: Plan) -> bool:
        return bool(run(plan).violations)

    return run(shrink(result.plan, fails))


def _prepare() -> None:
    """Exempts what was imported from garbage collection, which took a tenth of each run."""
    gc.freeze()


def _run(run: tuple[Choice, int]) -> Outcome:
    return run_seed(*run)
