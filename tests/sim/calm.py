"""What a cluster must not do while nothing is done to it: the checks of undisturbed runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from delaywheel.identity import WheelId
from delaywheel_replica.core.quorum import required_answers
from sim.plan import Action, Plan

if TYPE_CHECKING:
    from sim.world import World

HARMLESS = frozenset({"lost_answers", "ledger_away", "slow_first_init"})
"""None of these gives a node a reason to stand, or to leave a wheel."""


def is_calm(plan: Plan) -> bool:
    """Whether nothing is done to the cluster that it would notice."""
    return all(step.kind in HARMLESS for step in plan.steps if isinstance(step, Action))


def wrong_closes(world: World, wheel: WheelId) -> Iterator[str]:
    """A wheel is closed: nobody had a reason to leave it."""
    if is_calm(world.plan):
        yield f"{wheel} is closed, and nothing was done to {wheel.node}"


def wrong_candidacies(world: World) -> Iterator[str]:
    """A run is over: whoever stood first leads, and nobody else has stood.

    Where R is 1 nobody asks for votes: two may stand at the same time.
    """
    asks = required_answers(len(world.members), world.min_insync) > 1
    if asks and is_calm(world.plan) and world.kafka.last_epoch > 0:
        yield f"{world.kafka.last_epoch + 1} candidacies, and no reason for a second one"
