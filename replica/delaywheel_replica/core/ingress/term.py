"""All ingress partitions during one term: what goes with a transaction, what is handed over.

Each partition is an `Intake` (partition.py); here is what concerns all of them: which there are,
how much of them is held in memory, and the least slot that floor and seals wait for. A partition
that the control topic names is waited for though nobody has found it yet: its topic may be away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from delaywheel_replica.core.ingress.moment import Moment, Room
from delaywheel_replica.core.ingress.partition import Intake, begun, unread_bound
from delaywheel_replica.core.ingress.reading import Incoming, Rules
from delaywheel_replica.core.ingress.underway import Answer, IntakeStep, Settled, Taken
from delaywheel_replica.core.protocol.control import IngressPartition, IngressRecord

HELD_BYTES_MOST: Final = 32 << 20
"""About so much of all partitions is held at once; each has its share.

From half of that on, no more is read of one that holds its share: its first record may wait for a
server or a topic, and would stop the others. What was read before it is told is held too.
"""

LEAST_SHARE_BYTES: Final = 256 << 10


class Handed(NamedTuple):
    """A record for the server, to be answered with `Term.answered`."""

    at: IngressPartition
    taken: Taken


@dataclass(frozen=True, slots=True)
class TermStep:
    """What the next transaction carries, over all partitions.

    Attributes:
        steps: of each partition of which it carries something.
        settled: what goes with it.
        abandoned: partitions of topics that were made anew, as they were committed before: what
            they announced may have been accepted, or is lost, which goes with it as well.
        length_bytes: of the records that go with it.
    """

    steps: Mapping[IngressPartition, IntakeStep] = field(default_factory=dict)
    settled: tuple[Settled, ...] = ()
    abandoned: Mapping[IngressPartition, IngressRecord] = field(default_factory=dict)
    length_bytes: int = 0

    def __bool__(self) -> bool:
        """Whether it carries anything."""
        return bool(self.steps)

    @property
    def records(self) -> dict[IngressPartition, IngressRecord]:
        """Returns the control records of the step."""
        return {at: step.record for at, step in self.steps.items()}


class Term:
    """The ingress during one leadership. Created anew for each, from what is committed."""

    def __init__(self, committed: Mapping[IngressPartition, IngressRecord], rules: Rules) -> None:
        """Begins without partitions.

        Args:
            committed: of each partition that was ever read.
            rules: what the cluster takes now.
        """
        self._waited_for = dict(committed)
        self._rules = rules
        self._intakes: dict[IngressPartition, Intake] = {}
        self._abandoned: dict[IngressPartition, IngressRecord] = {}
        self._full: frozenset[IngressPartition] = frozenset()
        self._topic_ids: dict[str, str] = {}
        # Which one has its turn: the room of a transaction is not always for the same partitions.
        self._turn = 0
        # The same for the room of a hand-over.
        self._hand_turn = 0

    def found(
        self, topic: str, topic_id: str, partitions: int, *, only_announced: bool = False
    ) -> dict[IngressPartition, int]:
        """Takes a topic with so many partitions; returns where to read the new ones from.

        A topic that was made anew while this term lasts is found by the next one.

        Args:
            topic: its name.
            topic_id: Kafka's.
            partitions: how many it has.
            only_announced: no more is taken of it than what was announced before.
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
        # One that was made anew may have fewer partitions than the former one.
        for at, committed in list(self._waited_for.items()):
            if at[0] == topic and committed.announced and committed.topic_id != topic_id:
                self._begin(at, topic_id)
        return new

    def is_another(self, topic: str, topic_id: str) -> bool:
        """Whether a topic was found before, and was made anew since."""
        return self._topic_ids.get(topic, topic_id) != topic_id

    def _begin(
        self, at: IngressPartition, topic_id: str, *, only_announced: bool = False
    ) -> Intake:
        committed = self._waited_for.pop(at, None)
        record = begun(committed, topic_id, self._rules)
        if committed is not None and committed.topic_id != topic_id:
            self._abandoned[at] = committed
        intake = self._intakes[at] = Intake(record, self._rules, only_announced=only_announced)
        return intake

    @property
    def least_ends(self) -> dict[IngressPartition, int]:
        """Returns of each partition an offset; one that ends before that is cut off."""
        return {at: intake.least_end for at, intake in self._intakes.items()}

    def ends(self, at: IngressPartition, end: int) -> bool:
        """Notes that a partition ends before its least end; returns whether that is news."""
        intake = self._intakes[at]
        is_news = intake.cut_off is None
        intake.ends(end)
        return is_news

    @property
    def cut_off(self) -> frozenset[IngressPartition]:
        """Returns the partitions that end too early, of which no more is read."""
        return frozenset(at for at, intake in self._intakes.items() if intake.cut_off is not None)

    @property
    def done(self) -> frozenset[IngressPartition]:
        """Returns the partitions of which nothing more is to be read."""
        return frozenset(at for at, intake in self._intakes.items() if intake.is_done)

    def full(self) -> frozenset[IngressPartition]:
        """Returns the partitions of which no more may be read now.

        One goes on at half its share: to stop and go on costs what Kafka's client had fetched.
        """
        share = max(HELD_BYTES_MOST // max(1, len(self._intakes)), LEAST_SHARE_BYTES)
        is_much = self.held_bytes >= HELD_BYTES_MOST // 2
        self._full = frozenset(
            at
            for at, intake in self._intakes.items()
            if (is_much and intake.held_bytes >= share)
            or (at in self._full and intake.held_bytes >= share // 2)
        )
        return self._full

    @property
    def held_bytes(self) -> int:
        """Returns about how much memory takes what is under way."""
        return sum(intake.held_bytes for intake in self._intakes.values())

    @property
    def partitions(self) -> int:
        """Returns how many partitions are read."""
        return len(self._intakes)

    @property
    def topic_ids(self) -> Mapping[str, str]:
        """Returns the topics that were found, and Kafka's ids of them."""
        return self._topic_ids

    def read(
        self,
        at: IngressPartition,
        records: Iterable[Incoming],
        position: int,
        first_kept: int | None = None,
    ) -> None:
        """Takes records that were read of a partition.

        Args:
            at: which one.
            records: committed ones, in order.
            position: the offset behind them.
            first_kept: Kafka has deleted what came before; None: nothing that was next.
        """
        intake = self._intakes[at]
        if first_kept is not None:
            intake.deleted(first_kept)
        intake.read(records, position)

    def plan(self, moment: Moment, *, room: Room | int) -> TermStep:
        """Returns what the next transaction can carry; nothing changes until it is committed.

        Args:
            moment: when.
            room: so much may go with it, or so many messages.
        """
        messages, length_bytes = room if isinstance(room, Room) else Room(room)
        steps: dict[IngressPartition, IntakeStep] = {}
        settled: list[Settled] = []
        used_bytes = 0
        for at, intake in self._in_turn(self._turn):
            left = Room(messages - len(settled), length_bytes - used_bytes)
            step = intake.plan(moment, room=left if used_bytes < length_bytes else Room(0))
            moment = replace(moment, most=step.most) if moment.most else moment
            if step.record != intake.record or at in self._abandoned:
                steps[at] = step
                settled += step.settled
                used_bytes += step.length_bytes
        return TermStep(steps, tuple(settled), dict(self._abandoned), used_bytes)

    def _in_turn(self, turn: int) -> list[tuple[IngressPartition, Intake]]:
        intakes = list(self._intakes.items())
        begin = turn % len(intakes) if intakes else 0
        return intakes[begin:] + intakes[:begin]

    def committed(self, step: TermStep) -> None:
        """Notes that the transaction with the newest step is committed."""
        self._turn += bool(step.settled)
        for at in step.abandoned:
            self._abandoned.pop(at, None)
        for at, each in step.steps.items():
            self._intakes[at].committed(each)

    def to_hand(self, room: Room | int) -> list[Handed]:
        """Returns records for the server for which there is room, a share of each partition.

        None, while the record that has its turn is larger than the room: smaller ones of others
        would take what becomes free, again and again.
        """
        most, left_bytes = room if isinstance(room, Room) else Room(room)
        handed: list[Handed] = []
        waiting = self._in_turn(self._hand_turn)
        for left, (at, intake) in zip(range(len(waiting), 0, -1), waiting, strict=True):
            share = -(-(most - len(handed)) // left)
            taken = intake.to_hand(Room(share, left_bytes))
            if not taken and not handed and intake.waits_to_be_handed:
                return []
            left_bytes -= sum(each.record.length_bytes for each in taken if each.record)
            handed += [Handed(at, each) for each in taken]
        self._hand_turn += bool(handed)
        return handed

    def answered(self, handed: Handed, answer: Answer) -> None:
        """Takes the server's answer about a record."""
        self._intakes[handed.at].answered(handed.taken, answer)

    def bound(self, step: TermStep | None = None) -> int | None:
        """Returns the slot that floor and own seals must not pass; None if there is none.

        Args:
            step: for the transaction that carries it; None: as it is committed.
        """
        bounds = [unread_bound(self._waited_for.values())]
        for at, intake in self._intakes.items():
            bounds.append(intake.bound(None if step is None else step.steps.get(at)))
        return min((bound for bound in bounds if bound is not None), default=None)

    @property
    def positions(self) -> dict[IngressPartition, int]:
        """Returns the offset of each partition that is read next."""
        return {at: intake.position for at, intake in self._intakes.items()}

    @property
    def offsets(self) -> dict[IngressPartition, int]:
        """Returns the committed next offset of each partition: what the group is told."""
        return {at: intake.record.next_offset for at, intake in self._intakes.items()}
