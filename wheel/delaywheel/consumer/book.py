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
| it fails, or perhaps failed | all are forgotten, in all partitions | the committed offset |
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

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from delaywheel.consumer.message import Outcome, ReceivedMessage, SettledError, Settlement, State
from delaywheel.consumer.records import Outgoing, Partition

CUT_RECORDS = 5_000
CUT_BYTES = 8_000_000
"""The most that one transaction commits, unless a single record is larger."""


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


@dataclass(slots=True)
class Cut:
    """What one transaction commits: outcomes of records, and the offsets after them."""

    messages: list[ReceivedMessage] = field(default_factory=list)
    records: list[Outgoing] = field(default_factory=list)
    offsets: dict[Partition, int] = field(default_factory=dict)
    length_bytes: int = 0

    @property
    def is_full(self) -> bool:
        """Whether the transaction is full."""
        return len(self.messages) >= CUT_RECORDS or self.length_bytes >= CUT_BYTES


class _Shelf:
    """The uncommitted records of one partition, by offset."""

    __slots__ = ("position", "records")

    def __init__(self, position: int | None) -> None:
        self.position = position
        self.records: deque[ReceivedMessage] = deque()


class Book:
    """All records that a consumer holds."""

    def __init__(self, *, max_held: int, max_held_bytes: int) -> None:
        self.counts = Counts()
        self._max_held = max_held
        self._max_held_bytes = max_held_bytes
        self._shelves: dict[Partition, _Shelf] = {}
        self._waiting: deque[ReceivedMessage] = deque()
        self._held = 0
        self._held_bytes = 0

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

    @property
    def has_room(self) -> bool:
        """Whether fetching may resume after the book was full: half of it is free again."""
        return self._held * 2 <= self._max_held and self._held_bytes * 2 <= self._max_held_bytes

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

    def in_hand(self, partitions: Iterable[Partition]) -> int:
        """Returns how many records of these partitions handlers have."""
        shelves = (self._shelves.get(partition) for partition in partitions)
        return sum(
            message.state is State.IN_HAND
            for shelf in shelves
            if shelf is not None
            for message in shelf.records
        )

    def assign(self, positions: Mapping[Partition, int | None]) -> None:
        """Assigns partitions from these offsets on; forgets the records held of them."""
        self.forget(positions)
        for partition, position in positions.items():
            self._shelves[partition] = _Shelf(position)

    def forget(self, partitions: Iterable[Partition]) -> None:
        """Forgets partitions that are no longer assigned."""
        for partition in list(partitions):
            shelf = self._shelves.pop(partition, None)
            if shelf is None:
                continue
            for message in shelf.records:
                message.state = State.FORGOTTEN
                message.settlement = None
                self._leave(message)
            self.counts.forgotten += len(shelf.records)
        self._waiting = deque(one for one in self._waiting if one.state is State.WAITING)

    def take(self, message: ReceivedMessage) -> bool:
        """Holds a fetched record; returns False if it is not of this assignment."""
        place = message.place
        shelf = self._shelves.get(Partition(place.topic, place.partition))
        if shelf is None or (shelf.position is not None and place.offset < shelf.position):
            return False
        shelf.position = place.offset + 1
        shelf.records.append(message)
        self._waiting.append(message)
        self._held += 1
        self._held_bytes += message.length_bytes
        return True

    def hand_out(self) -> ReceivedMessage | None:
        """Returns the longest waiting record, which is in hand from then on; None if none waits."""
        if not self._waiting:
            return None
        message = self._waiting.popleft()
        message.state = State.IN_HAND
        return message

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
        return True

    def cut(self) -> Cut | None:
        """Returns what the next transaction should commit, without any change; None if nothing."""
        cut = Cut()
        for partition, shelf in self._shelves.items():
            for message in shelf.records:
                if message.state is not State.SETTLED or cut.is_full:
                    break
                assert message.settlement is not None
                cut.messages.append(message)
                cut.offsets[partition] = message.place.offset + 1
                for record in (message.settlement.record, message.settlement.order):
                    if record is not None:
                        cut.records.append(record)
                        cut.length_bytes += record.length_bytes
        return cut if cut.messages else None

    def committed(self, cut: Cut) -> None:
        """Notes that the transaction was committed."""
        counted = [0] * len(Outcome)
        for message in cut.messages:
            assert message.settlement is not None
            place = message.place
            first = self._shelves[Partition(place.topic, place.partition)].records.popleft()
            assert first is message
            message.state = State.COMMITTED
            counted[message.settlement.outcome] += 1
            message.settlement = None
            self._leave(message)
        counts = self.counts
        counts.commits += 1
        counts.done += counted[Outcome.DONE]
        counts.retried += counted[Outcome.RETRIED]
        counts.dead += counted[Outcome.DEAD]
        counts.skipped += counted[Outcome.SKIPPED]
        counts.expired += counted[Outcome.EXPIRED]
        counts.parked += counted[Outcome.PARKED]

    def _leave(self, message: ReceivedMessage) -> None:
        self._held -= 1
        self._held_bytes -= message.length_bytes
