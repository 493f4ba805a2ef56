"""Hunts some mutants; ``scripts/sim --mutants`` hunts all of them."""

import gc
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest

from delaywheel_replica.cleaner.leadership import Leadership
from local.sim import _hunt
from sim.drills.catalogue import DRILLS
from sim.mutants.catalogue import MUTANTS
from sim.mutants.mutant import Mutant, instead
from sim.plans.hunt import Hunted, fails, hunt, look_on
from sim.plans.run import Choice

QUICK = (
    "cancelled is answered without a row",
    "every commit is left to the check",
    "what was cancelled becomes a dead letter",
    "limits are sent before they are committed",
    "promises are not durable",
    "takes before it holds V",
    "the floor ignores spares",
    "what was rescheduled is not withdrawn",
    "due from the clock",
    "handed over before it is announced",
    "the floor passes what is announced",
    "takes what is not due",
)
"""One or two for each kind of check, beside the two of `test_a_hunt_tells_of_each_mutant_once`."""

PATIENCE_S = 300
"""Each takes some seconds on an idle machine."""


NOT_BEGUN = "coroutine .* was never awaited"

pytestmark = pytest.mark.filterwarnings(f"ignore:{NOT_BEGUN}:RuntimeWarning")


@pytest.fixture(autouse=True)
def runs_are_forgotten() -> Iterator[None]:
    """A run that a check ends leaves calls that were not begun, to be collected here."""
    yield
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", NOT_BEGUN, RuntimeWarning)
        gc.collect()


@pytest.mark.parametrize("name", QUICK)
def test_a_mutant_is_found_by_the_check_that_is_meant_for_it(name: str) -> None:
    until = time.monotonic() + PATIENCE_S
    hunted = look_on(
        Hunted(name), seconds=PATIENCE_S, until=until, fails_anyway=fails_without_a_mutant
    )
    assert hunted.outcome is not None
    assert hunted.is_as_expected, hunted.why


def fails_without_a_mutant(choice: Choice, seed: int) -> bool:
    """Drills pass with the first seed, and calm runs do: test_sim_drills.py, test_sim_seeds.py."""
    is_known = choice.profile in DRILLS and choice.steps is None and seed == 1
    return not is_known and choice.profile != "calm" and fails(choice, seed)


def test_a_hunt_tells_of_each_mutant_once() -> None:
    names = ["boots are ignored by the origin", "closes a wheel that is named"]
    found = list(hunt(names, minutes=1, jobs=1))
    assert [hunted.name for hunted in found] == names
    assert all(hunted.why for hunted in found)


def test_a_mutant_that_crashes_a_run_is_not_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exception shows nothing of what a check would have seen."""

    def crashes(_: Leadership) -> None:
        raise KeyError("not a check")

    mutant = Mutant("is broken", lambda: [instead(Leadership, "view", crashes)], "seen by a check")
    monkeypatch.setitem(MUTANTS, "is broken", mutant)
    hunted = look_on(
        Hunted("is broken"), seconds=PATIENCE_S, until=inf, fails_anyway=lambda *_: False
    )
    monkeypatch.setattr("local.sim.hunt", lambda *_, **__: [hunted])
    assert _hunt(["is broken"], minutes=1, jobs=1) == 1
    printed = capsys.readouterr().out
    assert "CRASHED KeyError: 'not a check'" in printed
    assert "0 of 1 mutants found" in printed
    meant = replace(mutant, symptom="KeyError: 'not a check'")
    monkeypatch.setitem(MUTANTS, "is broken", meant)
    assert _hunt(["is broken"], minutes=1, jobs=1) == 0


def test_a_hunt_without_time_misses_them() -> None:
    missed = list(hunt(["dedup is off"], minutes=0, jobs=1))
    assert [(hunted.seeds, hunted.outcome) for hunted in missed] == [(0, None)]
