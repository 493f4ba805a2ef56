"""Invariants of what is held up: for how long, and that the leader says so.

Topics in trouble delay messages for others no longer than troubles.py says:

| what is measured | in which runs | over |
|---|---|---|
| how long a leader says that it waits for topics | all | one process, all its terms |
| how long messages for topics that are well wait after their dues | those in which | the whole |
|   | nothing but topics is in trouble | run |

The second sees what the first cannot: failed transactions, elections and searches, and other nodes.

A node whose medium returns nothing holds nobody up either, while two others hold all: where nothing
else happens, no message waits longer than it takes to find that out, and to elect another leader.

A leader that forwards reports that messages are late, if its w is far behind its clock while a
message waits; and if that lasts, it reports why, and names a topic of ours that refuses records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from delaywheel_replica.cleaner.delivery.dead_letters import ANSWER_S, DeadLetters, Hold, Plan
from delaywheel_replica.cleaner.delivery.deferring import partition_of
from delaywheel_replica.cleaner.delivery.troubles import PATIENCE_S, REGAIN_S
from delaywheel_replica.cleaner.due.rows import DueRows
from delaywheel_replica.cleaner.row_keeper import View
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import Role
from sim.checking.calm import is_calm_beside
from sim.kafka.topic_troubles import TopicTrouble
from sim.machine.clocks import EPOCH_MS
from sim.machine.scheduler import US_PER_MS, US_PER_S
from sim.plans.plan import Action

if TYPE_CHECKING:
    from sim.checking.book import Entry
    from sim.nodes.node import SimNode
    from sim.nodes.world import World

SLACK_S = 2.5
"""An iteration, in which a commit may be waited for."""

STRETCH_S = 1.5
"""How much longer than `PATIENCE_S` messages may wait at a stretch."""

FOUND_S = 6.0
"""It takes less to find a topic: a transaction that fails, perhaps an election, two trials."""

NAMED = (TopicTrouble.LEADERLESS, TopicTrouble.SHRUNK)
"""Kafka says of which partitions they are."""

LATE_S = 1.0
"""Messages are not late by more in health, once there is a leader."""

FIRST_LEADER_US = 3 * US_PER_S
"""There is a leader by then."""


UNREADABLE_S = 8.0
"""A leader that cannot read what is due gives way sooner: two fetches, its lag, an election."""

BEHIND_MS = 600
"""A w that is further behind is reported, where no commit is slow."""

NAMED_US = 8 * US_PER_S
"""A topic of ours that refuses records is named by then."""


class _Wait(NamedTuple):
    """A time during which messages for topics that are well were due."""

    begin_us: int
    end_us: int

    @property
    def seconds(self) -> float:
        return (self.end_us - self.begin_us) / US_PER_S


def held_up(world: World) -> Iterator[str]:
    """Checks a finished run: nothing waited too long for topics in trouble."""
    spells = world.kafka.troubles.spells
    if not spells or not is_calm_beside(world.plan, "topic_trouble"):
        return
    waits = [wait for wait in _waits(world) if wait.seconds > LATE_S]
    for wait in waits:
        begun = sum(
            wait.begin_us - FOUND_S * US_PER_S < spell.began_us < wait.end_us for spell in spells
        )
        allowed_s = PATIENCE_S + STRETCH_S + max(0, begun - 1) * FOUND_S
        if wait.seconds > allowed_s:
            yield f"topics in trouble held up the others for {wait.seconds:.1f} s in a row"
    total_s = sum(wait.seconds for wait in waits)
    first_us = min(spell.began_us for spell in spells)
    regained_s = (world.scheduler.now_us - first_us) / US_PER_S * PATIENCE_S / REGAIN_S
    if total_s > PATIENCE_S + SLACK_S + regained_s + (len(spells) - 1) * FOUND_S:
        yield f"topics in trouble held up the others for {total_s:.1f} s in all"


def held_up_by_media(world: World) -> Iterator[str]:
    """Checks a finished run: nothing waited for the medium of one node that returned nothing."""
    plan = world.plan
    kinds = [step for step in plan.steps if isinstance(step, Action) and step.kind == "unreadable"]
    is_alone = len({step.arguments["node"] for step in kinds}) == 1
    if not (is_alone and is_calm_beside(plan, "unreadable")):
        return
    if plan.settings.min_insync < len(plan.settings.nodes) - 1 or plan.settings.min_insync < 2:
        return
    for wait in _waits(world):
        if wait.seconds > UNREADABLE_S:
            yield f"messages waited {wait.seconds:.1f} s for a medium that others do not need"


def wrong_report(world: World, node: SimNode, view: View) -> Iterator[str]:
    """Checks the status of a cleaner."""
    progress = view.state.progress
    if view.role is not Role.LEADING or progress is None:
        return
    now_ms = node.clock.wall_ms()
    is_behind = view.unreadable and now_ms - progress.due_ms > BEHIND_MS
    if is_behind and not view.lateness_ms and is_calm_beside(world.plan, "bit_flip", "mute"):
        yield f"{node.name} reports no lateness, and cannot read what is due"
    cause = "" if view.standstill is None else view.standstill.cause
    if view.standstill is not None and not cause:
        yield f"{node.name} reports that progress stands still, and not why"
    refusing = [
        spell
        for spell in world.kafka.troubles.spells
        if spell.topic in {world.names.outcomes, world.names.dead}
        and spell.trouble.refusal is not None
        and spell.ended_us is None
        and spell.began_us < world.scheduler.now_us - NAMED_US
    ]
    codes = {spell.trouble.refusal for spell in refusing}
    if cause.partition(":")[0] in codes and is_calm_beside(
        world.plan, "topic_trouble", "own_topic_trouble"
    ):
        yield f"{node.name} reports {cause}, and not which topic of ours that is"


def _waits(world: World) -> list[_Wait]:
    """Returns, joined, when messages waited though they went where no trouble ever was."""
    spells = world.kafka.troubles.spells
    wholes = {each.topic for each in spells if each.partition is None or each.trouble not in NAMED}
    parts = {(each.topic, each.partition) for each in spells}
    found = sorted(
        _Wait(max((entry.due_ms - EPOCH_MS) * US_PER_MS, entry.acknowledged_us), entry.visible_us)
        for entry in world.book.by_key.values()
        if entry.is_visible
        and entry.acknowledged_us > FIRST_LEADER_US
        and entry.topic not in wholes
        and (entry.topic, _partition(world, entry)) not in parts
    )
    joined: list[_Wait] = []
    for wait in found:
        if joined and wait.begin_us <= joined[-1].end_us:
            joined[-1] = joined[-1]._replace(end_us=max(joined[-1].end_us, wait.end_us))
        else:
            joined.append(wait)
    return joined


def _partition(world: World, entry: Entry) -> int | None:
    """The partition that a message goes to by its key; None: to any."""
    partitions, key = len(world.kafka.partitions(entry.topic)), entry.record_key
    return None if key is None else partition_of(key, partitions)


class WatchedDeadLetters(DeadLetters):
    """The real class, which also measures how long it delays other messages."""

    def __init__(self, world: World, *ports: Any, **rest: Any) -> None:
        super().__init__(*ports, **rest)
        self._world = world
        self._clock: Callable[[], float] = rest["clock"].monotonic
        self._began = self._at = self._clock()
        self._holding = False
        self._held_s = 0.0

    def begin_term(self, progress: Progress | None) -> None:
        """Holds nothing up between two terms; what it did before counts."""
        super().begin_term(progress)
        self._holding = False

    def plan(self, rows: DueRows, ahead: Callable[[], Iterable[str]] = tuple) -> Plan | Hold:
        """See `DeadLetters`."""
        now = self._clock()
        if self._holding:
            self._held_s += now - self._at
            allowed_s = PATIENCE_S + (now - self._began) * PATIENCE_S / REGAIN_S
            allowed_s += ANSWER_S * len(rows.topic_names()) + SLACK_S
            if self._held_s > allowed_s:
                self._world.violation(
                    f"topics in trouble held up everything for {self._held_s:.1f} s"
                )
                self._held_s = 0.0
        plan = super().plan(rows, ahead)
        self._at, self._holding = now, isinstance(plan, Hold) and bool(plan.topics)
        return plan
