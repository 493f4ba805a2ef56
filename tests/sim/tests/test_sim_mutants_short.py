"""Hunts some mutants; ``scripts/sim --mutants`` hunts all of them."""

import time

import pytest

from sim.drills.catalogue import DRILLS
from sim.mutants.hunt import Hunted, fails, hunt, look_on
from sim.plans.run import Choice

QUICK = (
    "a cancel counts beyond V",
    "a mirror answers before it has written",
    "a replaced member counts",
    "closed wheels are not copied",
    "a vote given is no leader heard",
    "an end before V",
    "boots are ignored by the origin",
    "closes a wheel that is named",
    "fills are sent before they are committed",
    "promises are not durable",
    "takes before it holds V",
    "the floor ignores spares",
    "unregisters what is above the floor",
    "what was rescheduled is not withdrawn",
    "older releases are not kept from leading",
    "what was rescheduled is reported cancelled",
    "due from the clock",
    "handed over before it is announced",
    "what is unknown counts as held",
    "the floor passes what is announced",
    "the floor passes what is not read",
)

PATIENCE_S = 300
"""Each takes some seconds on an idle machine."""


@pytest.mark.parametrize("name", QUICK)
def test_a_mutant_is_found_by_the_check_that_is_meant_for_it(name: str) -> None:
    until = time.monotonic() + PATIENCE_S
    hunted = look_on(
        Hunted(name), seconds=PATIENCE_S, until=until, fails_anyway=fails_without_a_mutant
    )
    assert hunted.outcome is not None
    assert hunted.is_as_expected, hunted.why


def fails_without_a_mutant(choice: Choice, seed: int) -> bool:
    """Drills pass with the first seed without mutants: test_sim_drills.py shows it."""
    is_known = choice.profile in DRILLS and choice.steps is None and seed == 1
    return not is_known and fails(choice, seed)


def test_a_hunt_tells_of_each_mutant_once() -> None:
    names = ["the high watermark is of local writes", "takes what is not due"]
    found = list(hunt(names, minutes=1, jobs=1))
    assert [hunted.name for hunted in found] == names
    assert all(hunted.why for hunted in found)


def test_a_hunt_without_time_misses_them() -> None:
    missed = list(hunt(["dedup is off"], minutes=0, jobs=1))
    assert [(hunted.seeds, hunted.outcome) for hunted in missed] == [(0, None)]
