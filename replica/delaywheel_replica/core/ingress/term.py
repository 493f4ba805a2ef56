"""All ingress partitions during one term: what a transaction carries, what is handed over.

Each partition is an `Intake` (partition.py). This module holds what concerns all of them: the list
of partitions, the memory they use, and the least slot that floor and seals wait for. A partition
named by the control topic is waited for even before it is found: its topic may be unavailable.

Work follows the partitions that have something under way (`_active`): those that were read since a
plan found nothing to do in them. A thousand others cost nothing. One plan looks at `LOOKED_MOST`
records at most, since it runs on the thread that forwards; the next one continues after them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from delaywheel_replica.core.ingress.moment import Moment, TransactionRoom
from delaywheel_replica.core.ingress.partition import Intake, begun, unread_bound
from delaywheel_replica.core.ingress.reading import CommittedRecord, IngressRules
from delaywheel_replica.core.ingress.underway import (
    IntakeStep,
    RecordAnswer,
    RecordUnderWay,
    SettledRecord,
)
from delaywheel_replica.core.protocol.control import IngressPartition, IngressRecord

HELD_BYTES_MOST: Final = 32 << 20
"""Approximate memory for the records of all partitions; each partition has an equal share.

Once half of it is used, a partition that holds its share is paused: its first record may be waiting
for a server or a topic, and would stop the others. Records that arrive before the pause takes
effect are kept too.
"""

LOOKED_MOST: Final = 1_000
"""How many records under way one plan looks at, beyond those of its last partition."""


class Handed(NamedTuple):
    """A record for the server; its answer goes to `IngressTerm.answered`."""

    at: IngressPartition
    taken: RecordUnderWay


@dataclass(frozen=True, slots=True)
class TermStep:
    """What the next transaction carries, over all partitions.

    Attributes:
        steps: the step of each partition with something to commit.
        abandoned: partitions of recreated topics, with their former control records: what these
            announced was accepted or is lost, which the transaction reports.
        length_bytes: total length of the records that it carries.
    """

    steps: Mapping[IngressPartition, IntakeStep] = field(default_factory=dict)
    settled: tuple[SettledRecord, ...] = ()
    abandoned: Mapping[IngressPartition, IngressRecord] = field(default_factory=dict)
    length_bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def records(self) -> dict[IngressPartition, IngressRecord]:
        """Returns the control records of the step."""
        return {at: step.record for at, step in self.steps.items()}


class IngressTerm:
    """The ingress during one leadership. Each creates its own from the committed records."""

    def __init__(
        self, committed: Mapping[IngressPartition, IngressRecord], rules: IngressRules
    ) -> None:
        self._waited_for = dict(committed)
        self._rules = rules
        self._intakes: dict[IngressPartition, Intake] = {}
        self._abandoned: dict[IngressPartition, IngressRecord] = {}
        self._full: frozenset[IngressPartition] = frozenset()
        self._topic_ids: dict[str, str] = {}
        # Who comes first: the room of a transaction does not always go to the same partitions.
        self._plan_begin = 0
        # The same for the room of a hand-over.
        self._hand_begin = 0
        self._active: set[IngressPartition] = set()
        self._done: set[IngressPartition] = set()
        # How many partitions the latest plan looked at, if it left some out.
        self._looked_at: int | None = None

    def found(
        self, topic: str, topic_id: str, partitions: int, *, only_announced: bool = False
    ) -> dict[IngressPartition, int]:
        """Adds a topic by Kafka's id of it; returns the first offset to read of each new partition.

        A topic that is recreated during this term is found by the next one. `only_announced` takes
        only records that were announced before.
        """
        assert self._topic_ids.setdefault(topic, topic_id) == topic_id
        new: dict[IngressPartition, int] = {}
        for number in range(partitions):
            at = topic, number
            if at in self._intakes:
                continue
            committed = self._waited_for.get(at)
            if only_announced and (committed is None or not committed.announced):
                continue
            intake = self._begin(at, topic_id, only_announced=only_announced)
            if not intake.is_done:
                new[at] = intake.position
        # A recreated topic may have fewer partitions than the former one.
        for at, committed in list(self._waited_for.items()):
            if at[0] == topic and committed.announced and committed.topic_id != topic_id:
                self._begin(at, topic_id)
        return new

    def is_another(self, topic: str, topic_id: str) -> bool:
        """Whether a topic was found before, and was recreated since."""
        return self._topic_ids.get(topic, topic_id) != topic_id

    def _begin(
        self, at: IngressPartition, topic_id: str, *, only_announced: bool = False
    ) -> Intake:
        committed = self._waited_for.pop(at, None)
        record = begun(committed, topic_id, self._rules)
        if committed is not None and committed.topic_id != topic_id:
            self._abandoned[at] = committed
        intake = self._intakes[at] = Intake(record, self._rules, only_announced=only_announced)
        self._note_change(at)
        return intake

    def _note_change(self, at: IngressPartition) -> None:
        self._active.add(at)
        if self._intakes[at].is_done:
            self._done.add(at)

    @property
    def least_ends(self) -> dict[IngressPartition, int]:
        """Returns an offset for each partition; a partition that ends before it is cut off."""
        return {at: intake.least_end for at, intake in self._intakes.items()}

    def ends(self, at: IngressPartition, end: int) -> bool:
        """Notes that a partition ends before its least end; returns whether that is news."""
        intake = self._intakes[at]
        is_news = intake.cut_off is None
        intake.ends(end)
        self._note_change(at)
        return is_news

    @property
    def cut_off(self) -> dict[IngressPartition, int]:
        """Returns the partitions that end too early, and from which offset on none is read.

        Those of topics that were not found yet are among them, as committed before.
        """
        known: dict[IngressPartition, IngressRecord | Intake] = {**self._waited_for}
        ends = {at: each.cut_off for at, each in (known | self._intakes).items()}
        return {at: end for at, end in ends.items() if end is not None}

    @property
    def done(self) -> frozenset[IngressPartition]:
        """Returns the partitions of which everything was read."""
        return frozenset(self._done)

    def come_to_halves(self) -> list[IngressPartition]:
        """Returns the partitions whose next record is a half, or a commit of one."""
        return sorted(at for at in self._active if self._intakes[at].comes_to_a_half)

    def full(self) -> frozenset[IngressPartition]:
        """Returns the partitions that must pause.

        A paused partition resumes at half its share: each pause discards what Kafka's client has
        prefetched.
        """
        share = max(1, HELD_BYTES_MOST // max(1, len(self._intakes)))
        is_much = self.held_bytes >= HELD_BYTES_MOST // 2
        held = ((at, self._intakes[at].held_bytes) for at in self._active)
        self._full = frozenset(
            at
            for at, held_bytes in held
            if (is_much and held_bytes >= share) or (at in self._full and held_bytes >= share // 2)
        )
        return self._full

    @property
    def held_bytes(self) -> int:
        """Returns the approximate memory of the records under way."""
        return sum(self._intakes[at].held_bytes for at in self._active)

    @property
    def partitions(self) -> int:
        """Returns how many partitions are read."""
        return len(self._intakes)

    @property
    def topic_ids(self) -> Mapping[str, str]:
        """Returns Kafka's id of each topic that was found."""
        return self._topic_ids

    def read(
        self,
        at: IngressPartition,
        records: Iterable[CommittedRecord],
        position: int,
        first_kept: int | None = None,
    ) -> None:
        """Adds records that were read of a partition, in order, up to the position after them.

        Kafka has deleted everything before `first_kept`; None: nothing unread was deleted.
        """
        intake = self._intakes[at]
        if first_kept is not None:
            intake.deleted(first_kept)
        intake.read(records, position)
        self._note_change(at)

    def plan(self, moment: Moment, *, room: TransactionRoom) -> TermStep:
        """Returns what the next transaction can carry; nothing changes until it is committed."""
        messages, length_bytes = room
        steps: dict[IngressPartition, IntakeStep] = {}
        settled: list[SettledRecord] = []
        used_bytes = looked = 0
        intakes = self._rotated(self._plan_begin)
        self._looked_at = None
        for number, (at, intake) in enumerate(intakes):
            if looked >= LOOKED_MOST:
                self._looked_at = number
                break
            looked += len(intake)
            left = TransactionRoom(messages - len(settled), length_bytes - used_bytes)
            step = intake.plan(
                moment, room=left if used_bytes < length_bytes else TransactionRoom(0)
            )
            moment = replace(moment, most=step.most) if moment.most else moment
            if step.record != intake.record or at in self._abandoned:
                steps[at] = step
                settled += step.settled
                used_bytes += step.length_bytes
            elif not len(intake) and not intake.record.announced:
                self._active.discard(at)
        if self._looked_at is not None and not steps:
            self._plan_begin += self._looked_at  # the next plan looks at the others
        return TermStep(steps, tuple(settled), dict(self._abandoned), used_bytes)

    def _rotated(self, begin: int) -> list[tuple[IngressPartition, Intake]]:
        intakes = [each for each in self._intakes.items() if each[0] in self._active]
        begin = begin % len(intakes) if intakes else 0
        return intakes[begin:] + intakes[:begin]

    def committed(self, step: TermStep) -> None:
        """Notes that the transaction with the latest step is committed."""
        self._plan_begin += bool(step.settled) if self._looked_at is None else self._looked_at
        for at in step.abandoned:
            self._abandoned.pop(at, None)
        for at, each in step.steps.items():
            self._intakes[at].committed(each)
            self._note_change(at)

    def to_hand(self, room: TransactionRoom) -> list[Handed]:
        """Returns as many records for the server as there is room for, a share per partition.

        Returns none while the record whose turn it is exceeds the room: smaller records of other
        partitions would use up the room again and again.
        """
        if not any(self._intakes[at].waits_to_be_handed for at in self._active):
            return []  # as in most iterations
        most, left_bytes = room
        handed: list[Handed] = []
        waiting = self._rotated(self._hand_begin)
        for left, (at, intake) in zip(range(len(waiting), 0, -1), waiting, strict=True):
            share = -(-(most - len(handed)) // left)
            taken = intake.to_hand(TransactionRoom(share, left_bytes))
            if not taken and not handed and intake.waits_to_be_handed:
                return []
            left_bytes -= sum(each.record.length_bytes for each in taken if each.record)
            handed += [Handed(at, each) for each in taken]
        self._hand_begin += bool(handed)
        return handed

    def answered(self, handed: Handed, answer: RecordAnswer) -> None:
        """Takes in the server's answer to a record."""
        self._intakes[handed.at].answered(handed.taken, answer)

    def bound(self, step: TermStep | None = None) -> int | None:
        """Returns the slot that floor and own seals must not pass, after a step; None: no limit."""
        bounds = [
            unread_bound(self._waited_for.values()),
            *(
                self._intakes[at].bound(None if step is None else step.steps.get(at))
                for at in self._active
            ),
        ]
        return min((bound for bound in bounds if bound is not None), default=None)

    @property
    def leaves_some_out(self) -> bool:
        """Whether the latest plan did not look at all partitions with something under way."""
        return self._looked_at is not None

    @property
    def positions(self) -> dict[IngressPartition, int]:
        """Returns the next offset to read of each partition."""
        return {at: intake.position for at, intake in self._intakes.items()}

    @property
    def offsets(self) -> dict[IngressPartition, int]:
        """Returns the committed next offset of each partition, as the consumer group shows it."""
        return {at: intake.record.next_offset for at, intake in self._intakes.items()}
