"""The records that a consumer holds: the state of each, and what to commit next.

A record:

| state | meaning | next |
|---|---|---|
| waiting | fetched, not handed out | in hand; settled, if it is skipped or expired; forgotten |
| in hand | a handler has it | settled, forgotten |
| settled | its outcome is known only here | committed, forgotten |
| committed | a transaction holds its outcome and the next offset | none |
| forgotten | no longer ours: it is delivered again, here or elsewhere | none |

A partition:

| what happens | records that it holds | reading continues at |
|---|---|---|
| assigned | none | the committed offset |
| a transaction is cut | its settled ones, from the first up to one that is not | |
| it is committed | those become committed, and leave | |
| it failed, or perhaps failed | all stay as they are; once the committed offsets show that it was |
|   | committed after all, as above | |
| revoked or lost | all are forgotten | |

Invariants, which make each outcome the only one:

1. What is written for a record and the offset behind that record are in one transaction. So
   nothing is written for a record whose offset is not passed: records behind an unsettled one of
   their partition wait for it, even if they are settled.
2. Offsets are committed only for records held here since the partition was assigned, with the
   membership of that assignment. A consumer that was away too long cannot commit.
3. A forgotten record cannot be settled; if it was settled before, nothing is written for it.

No I/O, no clock, no lock.
"""

from __future__ import annotations

import sys
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import dataclass, field

from delaywheel.consumer.message import (
    DONE,
    Outcome,
    ReceivedMessage,
    SettledError,
    Settlement,
    State,
)
from delaywheel.consumer.records import Outgoing, Partition, Place

CUT_RECORDS = 5_000
CUT_BYTES = 8_000_000
"""The most that one transaction writes, unless a single record is larger. What is only done needs
no record: of that, a transaction takes all."""


MOST_REASONS = 50
OTHER_REASON = "OTHER"
"""The reason under which dead letters are counted beyond so many reasons."""


@dataclass(slots=True)
class Counts:
    """The numbers of records by outcome, since the consumer was made.

    Attributes:
        done: Records whose handling is committed.
        retried: Records that were sent to come back later.
        dead: Records that became dead letters, except expired ones.
        skipped: Records of another route.
        expired: Records whose time to live was over.
        parked: Records that were sent to come back because an earlier one of their key will.
        forgotten: Records that were held here and are delivered again.
        commits: Transactions that were committed.
        failed_commits: Transactions that failed, or may have.
        restarts: Partitions that were read from their beginning since their offsets went back: the
            topic was made anew, or has lost its end.
    """

    done: int = 0
    retried: int = 0
    dead: int = 0
    skipped: int = 0
    expired: int = 0
    parked: int = 0
    forgotten: int = 0
    commits: int = 0
    failed_commits: int = 0
    restarts: int = 0


@dataclass(slots=True)
class Cut:
    """What one transaction commits: outcomes of records, and the offsets after them.

    Attributes:
        name: The transaction's, said beside its offsets: who reads it there knows that it is
            committed. Offsets alone prove nothing: they may be of before, or another member's.
    """

    messages: list[ReceivedMessage] = field(default_factory=list)
    records: list[Outgoing] = field(default_factory=list)
    offsets: dict[Partition, int] = field(default_factory=dict)
    length_bytes: int = 0
    most: int = sys.maxsize
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def is_full(self) -> bool:
        """Whether the transaction is full."""
        return (
            len(self.records) >= CUT_RECORDS
            or self.length_bytes >= CUT_BYTES
            or len(self.messages) >= self.most
        )


class _Shelf:
    """The uncommitted records of one partition, by offset."""

    __slots__ = ("held_bytes", "kept", "limit", "position", "records")

    def __init__(self, position: int | None) -> None:
        self.position = position
        # Records from this offset on are kept back; the last ones of `records`.
        self.limit: int | None = None
        self.kept: deque[ReceivedMessage] = deque()
        self.records: deque[ReceivedMessage] = deque()
        self.held_bytes = 0


class Book:
    """All records that a consumer holds."""

    def __init__(self, *, max_held: int, max_held_bytes: int) -> None:
        self.counts = Counts()
        self.dead_reasons: dict[str, int] = {}
        self._max_held = max_held
        self._max_held_bytes = max_held_bytes
        self._shelves: dict[Partition, _Shelf] = {}
        self._waiting: deque[ReceivedMessage] = deque()
        # Of paused partitions, what is not waiting until they are resumed.
        self._aside: dict[Partition, deque[ReceivedMessage]] = {}
        self._held = 0
        self._held_bytes = 0
        self._settled = 0

    @property
    def partitions(self) -> list[Partition]:
        """The assigned partitions."""
        return list(self._shelves)

    @property
    def positions(self) -> dict[Partition, int | None]:
        """The next offset to read of each partition; None: the first existing one."""
        return {partition: shelf.position for partition, shelf in self._shelves.items()}

    @property
    def held_bytes(self) -> int:
        """The length of all held keys, values and headers."""
        return self._held_bytes

    @property
    def room(self) -> int:
        """How many more records may be fetched."""
        return max(0, self._max_held - self._held)

    @property
    def is_full(self) -> bool:
        """Whether nothing more may be fetched."""
        return self._held >= self._max_held or self._held_bytes >= self._max_held_bytes

    def crowded(self, before: AbstractSet[Partition]) -> set[Partition]:
        """Returns the partitions that are to be read no further for now.

        Half of the room is shared by those who ask first; the other half is reserved for the
        partitions in equal parts. So one whose records stay here stops no other.

        Args:
            before: Those that were crowded: for them, more must be free again.
        """
        if self.is_full:
            return set(self._shelves)
        parts = 2 * max(1, len(self._shelves))
        part, part_bytes = max(1, self._max_held // parts), self._max_held_bytes // parts
        shelves = self._shelves.values()
        used = self._held + sum(max(0, part - len(shelf.records)) for shelf in shelves)
        used_bytes = self._held_bytes + sum(
            max(0, part_bytes - shelf.held_bytes) for shelf in shelves
        )
        return {
            partition
            for partition, shelf in self._shelves.items()
            for most in (0.75 if partition in before else 1.0,)
            if (used >= most * self._max_held and len(shelf.records) >= most * part)
            or (used_bytes >= most * self._max_held_bytes and shelf.held_bytes >= most * part_bytes)
        }

    @property
    def has_waiting(self) -> bool:
        """Whether any record can be handed out."""
        return bool(self._waiting)

    @property
    def can_cut(self) -> bool:
        """Whether a transaction would have anything to commit."""
        return any(
            shelf.records and shelf.records[0].state is State.SETTLED
            for shelf in self._shelves.values()
        )

    @property
    def is_worth_a_commit(self) -> bool:
        """Whether so much is settled that the room it takes is better free."""
        return self._settled * 4 >= self._max_held

    def firsts(self) -> Iterator[ReceivedMessage]:
        """Yields the first held record of each partition: all others are committed after it."""
        for shelf in self._shelves.values():
            if shelf.records:
                yield shelf.records[0]

    @property
    def held(self) -> int:
        """How many records are held."""
        return self._held

    def unended(self, partition: Partition) -> int:
        """Returns how many offsets were read of a partition that have not ended."""
        shelf = self._shelves.get(partition)
        if shelf is None or not shelf.records or shelf.position is None:
            return 0
        return shelf.position - shelf.records[0].place.offset

    def in_hand_since(self, before_s: float) -> list[ReceivedMessage]:
        """Returns what handlers have had since before this time."""
        return [
            message
            for shelf in self._shelves.values()
            for message in shelf.records
            if message.state is State.IN_HAND and message.handed_s < before_s
        ]

    def in_hand(self, partitions: Iterable[Partition]) -> int:
        """Returns how many records of these partitions handlers have."""
        shelves = (self._shelves.get(partition) for partition in partitions)
        return sum(
            message.state is State.IN_HAND
            for shelf in shelves
            if shelf is not None
            for message in shelf.records
        )

    def assign(self, positions: Mapping[Partition, int | None]) -> list[ReceivedMessage]:
        """Assigns partitions from these offsets on; forgets the records held of them.

        Returns:
            What was in hand of them.
        """
        in_hand = self.forget(positions)
        for partition, position in positions.items():
            self._shelves[partition] = _Shelf(position)
        return in_hand

    def forget(self, partitions: Iterable[Partition]) -> list[ReceivedMessage]:
        """Forgets partitions that are no longer assigned; returns what was in hand of them."""
        in_hand: list[ReceivedMessage] = []
        for partition in list(partitions):
            shelf = self._shelves.pop(partition, None)
            self._aside.pop(partition, None)
            if shelf is None:
                continue
            for message in shelf.records:
                if message.state is State.IN_HAND:
                    in_hand.append(message)
                elif message.state is State.SETTLED:
                    self._settled -= 1
                message.state = State.FORGOTTEN
                message.settlement = None
                self._leave(message)
            self.counts.forgotten += len(shelf.records)
        self._waiting = deque(one for one in self._waiting if one.state is State.WAITING)
        return in_hand

    def going_back(self, places: Iterable[Place]) -> set[Partition]:
        """Returns partitions of which a record lies before what was read: they begin anew."""
        found: set[Partition] = set()
        at: tuple[str, int] | None = None
        position = 0
        for topic, number, offset, _ in places:
            if (topic, number) != at:
                at = topic, number
                shelf = self._shelves.get(Partition(topic, number))
                position = 0 if shelf is None else shelf.position or 0
            if offset < position:
                found.add(Partition(topic, number))
        return found

    def take(self, messages: Iterable[ReceivedMessage]) -> None:
        """Holds fetched records, except those that are not of this assignment."""
        at: tuple[str, int] | None = None
        shelf: _Shelf | None = None
        for message in messages:
            topic, number, offset, _ = message.place
            if (topic, number) != at:  # records of a partition come together
                at = topic, number
                shelf = self._shelves.get(Partition(topic, number))
            if shelf is None or (shelf.position is not None and offset < shelf.position):
                continue
            length_bytes = message.length_bytes
            shelf.position = offset + 1
            shelf.records.append(message)
            shelf.held_bytes += length_bytes
            if shelf.limit is None or offset < shelf.limit:
                self._waiting.append(message)
            else:
                shelf.kept.append(message)
            self._held += 1
            self._held_bytes += length_bytes

    def limit(self, partition: Partition, offset: int | None) -> None:
        """Hands out records of a partition up to this offset only; None: all of them."""
        shelf = self._shelves[partition]
        shelf.limit = offset
        while shelf.kept and (offset is None or shelf.kept[0].place.offset < offset):
            self._waiting.append(shelf.kept.popleft())

    def first_kept(self, partition: Partition) -> ReceivedMessage | None:
        """Returns the first held record of a partition if it is kept back by `limit`."""
        shelf = self._shelves[partition]
        is_first = shelf.kept and shelf.kept[0] is shelf.records[0]
        return shelf.kept[0] if is_first and shelf.kept[0].state is State.WAITING else None

    def take_kept(self, partition: Partition) -> None:
        """Keeps the first record no longer that is kept back, and does not hand it out either."""
        self._shelves[partition].kept.popleft()

    def is_kept_after(self, partition: Partition, offset: int) -> bool:
        """Whether the next held record from this offset on is kept back by `limit`."""
        kept = self._shelves[partition].kept
        return bool(kept) and kept[0].place.offset >= offset

    def hand_out(self) -> ReceivedMessage | None:
        """Returns the longest waiting record, which is in hand from then on; None if none waits."""
        while self._waiting:
            message = self._waiting.popleft()
            if self._aside and (aside := self._aside.get(message.at)) is not None:
                aside.append(message)
                continue
            message.state = State.IN_HAND
            return message
        return None

    @property
    def paused(self) -> AbstractSet[Partition]:
        """The partitions of which nothing is handed out."""
        return self._aside.keys()

    def pause(self, partitions: Iterable[Partition]) -> None:
        """Hands out nothing of these partitions until `resume`, or until they are forgotten."""
        for partition in partitions:
            self._aside.setdefault(partition, deque())

    def resume(self, partitions: Iterable[Partition]) -> None:
        """Ends `pause`."""
        for partition in partitions:
            self._waiting.extendleft(reversed(self._aside.pop(partition, ())))

    def hand_out_again(self, message: ReceivedMessage) -> ReceivedMessage:
        """Puts a record in hand back, to be handed out first; returns it as it will be.

        What its handler still has is forgotten: it is settled no more.
        """
        again = copy(message)
        again.state = State.WAITING
        records = self._shelves[message.at].records
        records[records.index(message)] = again
        message.state = State.FORGOTTEN
        self._waiting.appendleft(again)
        return again

    def hold_back(self, message: ReceivedMessage) -> None:
        """Notes that a record must not be handed out yet; `put_back` ends that."""
        message.state = State.WAITING

    def put_back(self, messages: Sequence[ReceivedMessage]) -> None:
        """Returns records to the front of those to be handed out."""
        self._waiting.extendleft(reversed(messages))

    def settle(self, message: ReceivedMessage, settlement: Settlement) -> bool:
        """Notes the outcome of a record.

        Returns:
            False: The record is forgotten.

        Raises:
            SettledError: It already has an outcome.
        """
        if message.state is State.FORGOTTEN:
            return False
        if message.is_settled:
            raise SettledError(f"{message!r} was settled before")
        message.settlement = settlement
        message.state = State.SETTLED
        self._settled += 1
        return True

    def settle_done(self, messages: Iterable[ReceivedMessage]) -> None:
        """Settles those as done that handlers have; all of them, as no order is kept."""
        in_hand, settled, count = State.IN_HAND, State.SETTLED, 0
        for message in messages:
            if message.state is in_hand:
                message.settlement = DONE
                message.state = settled
                count += 1
        self._settled += count

    def resettle(self, message: ReceivedMessage, settlement: Settlement) -> None:
        """Gives a settled record another outcome: no transaction with the former one succeeded."""
        assert message.state is State.SETTLED
        message.settlement = settlement

    def cut(self, most: int | None = None) -> Cut | None:
        """Returns what the next transaction should commit, without any change; None if nothing.

        Args:
            most: The most records that it may settle.
        """
        cut = Cut() if most is None else Cut(most=most)
        settled, messages, most_messages = State.SETTLED, cut.messages, cut.most
        for partition, shelf in self._shelves.items():
            last = None
            for message in shelf.records:
                if message.state is not settled or len(messages) >= most_messages:
                    break
                settlement = message.settlement
                assert settlement is not None
                messages.append(message)
                last = message
                if settlement is not DONE:
                    self._add_to(cut, settlement)
                    if cut.is_full:
                        break
            if last is not None:
                cut.offsets[partition] = last.place.offset + 1
            if cut.is_full:
                break
        return cut if cut.messages else None

    @staticmethod
    def _add_to(cut: Cut, settlement: Settlement) -> None:
        written = settlement.order
        if settlement.record is not None:
            written = (settlement.record, *written)
        for record in written:
            cut.records.append(record)
            cut.length_bytes += record.length_bytes

    def committed(self, cut: Cut) -> None:
        """Notes that the transaction was committed."""
        counted = [0] * len(Outcome)
        for partition, next_offset in cut.offsets.items():
            shelf = self._shelves[partition]
            while shelf.records and shelf.records[0].place.offset < next_offset:
                message = shelf.records.popleft()
                shelf.held_bytes -= message.length_bytes
                settlement = message.settlement
                assert settlement is not None
                message.state = State.COMMITTED
                message.settlement = None
                counted[settlement.outcome] += 1
                if settlement.outcome is Outcome.DEAD:
                    self._count_reason(settlement.reason)
                self._leave(message)
        self._settled -= len(cut.messages)
        counts = self.counts
        counts.commits += 1
        counts.done += counted[Outcome.DONE]
        counts.retried += counted[Outcome.RETRIED]
        counts.dead += counted[Outcome.DEAD]
        counts.skipped += counted[Outcome.SKIPPED]
        counts.expired += counted[Outcome.EXPIRED]
        counts.parked += counted[Outcome.PARKED]

    def _count_reason(self, reason: str) -> None:
        """Counts a dead letter by its reason; handlers may name many, and a metric must not."""
        if reason not in self.dead_reasons and len(self.dead_reasons) >= MOST_REASONS:
            reason = OTHER_REASON
        self.dead_reasons[reason] = self.dead_reasons.get(reason, 0) + 1

    def _leave(self, message: ReceivedMessage) -> None:
        self._held -= 1
        self._held_bytes -= message.length_bytes
