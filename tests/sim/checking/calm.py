"""What an undisturbed cluster must not do: the checks of calm runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from delaywheel.identity import WheelId
from delaywheel.storage.folder import layout
from delaywheel_replica.core.protocol.control import required_answers
from delaywheel_replica.core.protocol.status_files import Role
from sim.machine.scheduler import US_PER_MS
from sim.plans.plan import Action, Plan

if TYPE_CHECKING:
    from sim.nodes.world import World

HARMLESS = frozenset(
    {
        "checker_dies",
        "coordinator_moves",
        "leaders_move",
        "ledger_away",
        "lost_answers",
        "slow_first_init",
    }
)
"""None of these faults gives a node a reason to stand, or to leave a wheel."""

INITS_AGAIN = frozenset({"coordinator_moves", "leaders_move", "slow_first_init"})
"""But these may have an id inited again."""

CALM_AFTER_MS = 1_500
"""So long after a fault has ended nodes still may feel it."""

FOREVER_MS = 1_000_000

CLOCKS_ALONE = HARMLESS | {"clocks_ahead", "set_back"}

SLOW_CANDIDACIES = 2
"""The first, and one that follows a term which slow ends have ended."""

FULL_DISK = frozenset({"lost_answers", "disk_full"})
"""While only one node is disturbed, the cluster continues to delete."""

UNDELETED_S = 25
"""A file this far below the floor is deleted, unless it is known to be undeletable."""

EXCHANGED = "exchanged_in_turn"
"""The drill in which each replaced disk has time to be filled before the next one."""

LEADERS = frozenset({Role.RESTING, Role.LEADING})

CLOCKS_AND_DEATHS = ("clocks_ahead", "set_back", "kill_cleaner", "kill_server")

LEADERLESS_MS = 20_000
"""After clocks were corrected a node comes to lead sooner, also one that must ask Kafka again."""

OVERDUE_MS = 6_000
"""A leader's end, and another one's beginning."""

FLOOR_BEHIND_S = 15
"""The floor lags the late window by less: transactions, seals, the books, and a leader's end."""


def is_calm(plan: Plan) -> bool:
    """Whether nothing happens to the cluster that it would notice."""
    return all(step.kind in HARMLESS for step in plan.steps if isinstance(step, Action))


def is_calm_from(plan: Plan, from_us: int) -> bool:
    """Whether all faults were over some time before this, and none follows."""
    actions = [step for step in plan.steps if isinstance(step, Action)]
    return all(
        step.kind in HARMLESS
        or (step.at_ms + step.arguments.get("ms", FOREVER_MS) + CALM_AFTER_MS) * US_PER_MS < from_us
        for step in actions
    )


def is_calm_beside(plan: Plan, *kinds: str) -> bool:
    """Whether nothing but faults of these kinds happens to it."""
    return all(
        step.kind in kinds or step.kind in HARMLESS
        for step in plan.steps
        if isinstance(step, Action)
    )


def is_slow(plan: Plan) -> bool:
    """Whether nothing happens to it, except that the brokers are slow with commits."""
    harms = [step for step in plan.steps if isinstance(step, Action) and step.kind not in HARMLESS]
    return all(
        step.kind == "kafka_faults" and step.arguments["changes"].keys() == {"commit_us"}
        for step in harms
    )


def is_calm_when_set_back(plan: Plan) -> bool:
    """Whether all faults but changing clocks are over when w is set back last."""
    actions = [step for step in plan.steps if isinstance(step, Action)]
    last_ms = max((step.at_ms for step in actions if step.kind == "set_back"), default=-1)
    return all(
        step.kind in CLOCKS_ALONE or step.at_ms + step.arguments.get("ms", 0) < last_ms
        for step in actions
    )


def are_clocks_right(plan: Plan, from_ms: float, to_ms: float) -> bool:
    """Whether no clocks are ahead, or corrected, in this time.

    A w that is set back to a wrong clock is ahead again once that is corrected.
    """
    return not any(
        step.kind == "clocks_ahead"
        and step.at_ms <= to_ms
        and step.at_ms + step.arguments["ms"] >= from_ms
        for step in plan.steps
        if isinstance(step, Action)
    )


def wrong_closes(world: World, wheel: WheelId) -> Iterator[str]:
    """Checks a closed wheel: no node had a reason to leave it."""
    if is_calm(world.plan):
        yield f"{wheel} is closed, and nothing was done to {wheel.node}"


def has_one_full_disk(plan: Plan) -> bool:
    """Whether only the disk of one node fills, which the others can spare."""
    actions = [step for step in plan.steps if isinstance(step, Action)]
    full = {str(step.arguments["node"]) for step in actions if step.kind == "disk_full"}
    others = len(plan.settings.nodes) - len(full)
    return (
        all(step.kind in FULL_DISK for step in actions)
        and len(full) <= 1
        and others >= max(plan.settings.min_insync, 1)
    )


def resting_floor(world: World) -> Iterator[str]:
    """Checks that the cluster deletes finished seconds while at most one disk is full."""
    if world.checks.floor and has_one_full_disk(world.plan):
        now_s = min(node.clock.wall_ms() for node in world.living()) // 1000
        behind_s = now_s - world.settings.late_window_s - world.checks.floor
        if behind_s > FLOOR_BEHIND_S:
            yield f"the floor {world.checks.floor} is {behind_s} s behind the late window"


def undeleted_files(world: World) -> Iterator[str]:
    """Checks that files which can be deleted go soon, while others cannot."""
    if not is_calm_beside(world.plan, "undeletable"):
        return
    for node in world.living():
        if node.server is None:
            continue
        below, waiting = node.server.floor - UNDELETED_S, node.server.store.undeletable.paths
        for path in node.disk.paths():
            slot = layout.slot_of_name(path.name)
            if slot is not None and slot < below and path not in waiting:
                yield f"{node.name} still has {path}, and deletes up to {node.server.floor}"


def lost_in_turn(world: World) -> Iterator[str]:
    """Checks that nothing is lost, or waits for a node, if disks are exchanged in turn."""
    if world.plan.profile != EXCHANGED:
        return
    if world.checks.lost:
        yield f"{world.checks.lost} are lost, and disks were exchanged in turn"
    now_ms = min(node.clock.wall_ms() for node in world.living())
    for entry in world.checks.waiting(now_ms - OVERDUE_MS):
        yield f"{entry} waits, and disks were exchanged in turn"


def leaderless(world: World) -> Iterator[str]:
    """Checks that a node leads, or rests, soon after clocks were wrong and processes died."""
    if not is_calm_beside(world.plan, *CLOCKS_AND_DEATHS):
        return
    now_ms = world.scheduler.now_us / US_PER_MS
    ends_ms = (
        step.at_ms + step.arguments.get("ms", 0)
        for step in world.plan.steps
        if isinstance(step, Action) and step.kind not in HARMLESS and step.at_ms <= now_ms
    )
    since_ms = now_ms - max(ends_ms, default=0)
    cleaners = [node.cleaner for node in world.living() if node.cleaner is not None]
    is_led = any(each.leadership.role in LEADERS for each in cleaners)
    if since_ms > LEADERLESS_MS and not is_led:
        yield f"no node leads {since_ms / 1000:.1f} s after all clocks were corrected"


def wrong_candidacies(world: World) -> Iterator[str]:
    """Checks a finished run: the first candidate leads, and no other node has stood.

    Where R is 1, no votes are needed: two may stand at the same time, and the one that leads inits
    again what the other took. Brokers that become slow end one term: the next candidate learns by
    its marks how long it has to wait. Epochs are more than candidacies: within a term an id is
    inited again where an end is in doubt, as of slow ones, and nowhere else.
    """
    asks = required_answers(len(world.members), world.min_insync) > 1
    candidacies = world.kafka.candidacies
    if asks and is_calm(world.plan) and candidacies > 1:
        yield f"{candidacies} candidacies, and no reason for a second one"
    kinds = {step.kind for step in world.plan.steps if isinstance(step, Action)}
    is_alone = asks or candidacies == 1
    if is_alone and kinds <= HARMLESS - INITS_AGAIN and world.kafka.inited_again:
        yield f"{world.kafka.inited_again} inits within a term, and no end was in doubt"
    if asks and is_slow(world.plan) and candidacies > SLOW_CANDIDACIES:
        yield f"{candidacies} candidacies, for no more than slow commits"
