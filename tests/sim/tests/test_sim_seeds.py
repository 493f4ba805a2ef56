"""A short range of seeds; scripts/sim runs long ones.

A push has the profiles that have something which no other has; all faults of the rest are among
those of `mixed`, and dangers of each kind have their drills. A night has all of them.
"""

import os
import re
import subprocess
import sys
from functools import cache
from itertools import cycle, product
from pathlib import Path
from random import Random

import pytest

from sim.checking.calm import are_clocks_right, is_calm_when_set_back
from sim.plans import ingress
from sim.plans.faults import FAULTS
from sim.plans.ingress_faults import INGRESS_FAULTS
from sim.plans.plan import Action, Plan, Request, Step
from sim.plans.profiles import PROFILES, draw
from sim.plans.run import Choice, Outcome, run_seed
from sim.plans.shrink import shrink
from sim.plans.stage import Stage
from support.process.night import NIGHT

TESTS = Path(__file__).parents[2]
PRINT_DIGEST = """
import sys
from sim.plans.run import Choice, Outcome, run_seed
print(run_seed(Choice(profile=sys.argv[1]), int(sys.argv[2])).digest)
"""

SHORT = (9, 27, 59)
"""Seeds with the shortest plans of the first 60, and three nodes, in nearly every profile."""
SEEDS = dict(zip(sorted(PROFILES), cycle(SHORT), strict=False)) | {"brokers": 59}
PUSHED = frozenset(
    ("ahead", "calm", "changes", "halves", "ingress", "media", "members", "mixed", "own_topics")
)
IN_DRILLS = frozenset(
    (
        *("coordinator_moves", "leaders_move", "lose_end", "mute", "old_release", "put_back"),
        "slow_first_init",
    )
)
"""Faults that are drawn by no profile: each has a meaning at one moment alone."""
RUN = PROFILES.keys() if NIGHT else PUSHED


@cache
def outcome_of(profile: str, seed: int) -> Outcome:
    """How a seed ends; two tests look at one of them."""
    return run_seed(Choice(profile=profile), seed)


@pytest.mark.parametrize("profile", sorted(RUN))
def test_all_checks_hold(profile: str) -> None:
    outcome = outcome_of(profile, SEEDS[profile])
    assert not outcome.violations, outcome.command
    assert outcome.delivered


def test_a_push_may_draw_every_fault() -> None:
    all_draws, pushed = (
        {draw for name in names for draw in PROFILES[name].draws} for names in (PROFILES, PUSHED)
    )
    assert pushed == all_draws


def test_every_fault_is_drawn_by_a_profile_or_is_a_drills_own() -> None:
    draws = {each for profile in PROFILES.values() for each in profile.draws}
    draws |= {*ingress.OFTEN, *ingress.SELDOM}
    steps: list[Step] = []
    for number in range(40):
        stage = Stage(Random(number), ("a", "b", "c"), 30_000, 10_000, "a")
        steps += (action for one in draws for action in one(stage))
    for number, name in product(range(5), ("halves", "members")):  # what these draw beside
        steps += draw(number, profile=name).steps
    drawn = {step.kind for step in steps if isinstance(step, Action)}
    assert FAULTS.keys() | INGRESS_FAULTS.keys() == drawn | IN_DRILLS
    assert not drawn & IN_DRILLS
    drills = "".join(file.read_text() for file in (TESTS / "sim" / "drills").glob("*.py"))
    assert not [name for name in IN_DRILLS if not re.search(rf'"{name}"|script\.{name}\(', drills)]


def test_a_seed_is_one_run_whatever_the_hashes() -> None:
    """This process has hashes of its own, and another one has those of 7."""
    digest = subprocess.check_output(
        [sys.executable, "-c", PRINT_DIGEST, "mixed", str(SEEDS["mixed"])],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(TESTS)},
        text=True,
    )
    assert int(digest) == outcome_of("mixed", SEEDS["mixed"]).digest


def test_a_plan_is_shortened_to_what_makes_it_fail() -> None:
    plan = draw(3, profile="churn")
    action = next(step for step in plan.steps if isinstance(step, Action))
    request = next(step for step in plan.steps if isinstance(step, Request))

    def fails(shorter: Plan) -> bool:
        return action in shorter.steps and request in shorter.steps

    shortest = shrink(plan, fails).steps
    assert len(shortest) == 2
    assert action in shortest
    assert request in shortest


@pytest.mark.parametrize(
    ("steps", "is_calm"),
    [
        ((), True),
        ((Action(500, "clocks_ahead", {"ms": 400}),), True),
        ((Action(500, "clocks_ahead", {"ms": 600}),), False),  # set back to a wrong clock
        ((Action(2_000, "clocks_ahead", {"ms": 100}),), False),  # wrong again later
        ((Action(4_000, "clocks_ahead", {"ms": 100}),), True),  # not yet
        ((Action(500, "isolate", {"ms": 400}),), True),
        ((Action(500, "isolate", {"ms": 600}),), False),
    ],
)
def test_a_w_set_back_is_a_promise_while_clocks_are_right(
    steps: tuple[Action, ...], *, is_calm: bool
) -> None:
    plan = draw(2, profile="calm").only([*steps, Action(1_000, "set_back", {})])
    assert (is_calm_when_set_back(plan) and are_clocks_right(plan, 1_000, 3_000)) == is_calm
