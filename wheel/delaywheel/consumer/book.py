"""The records that a consumer holds: the state of each, and what to commit next.

They are held as they were fetched, in the blocks of `block.py`; what waits, what is handed out and
what is committed are runs of these. docs/CONSUMER_REFERENCE.md, "How it works", has the states of a
record: waiting, in hand, settled, committed, forgotten.

A partition:

| what happens | records that it holds | reading continues at |
|---|---|---|
| assigned | none | the committed offset |
| a transaction is cut | its settled ones, from the first up to one that is not | |
| it is committed | those become committed, and leave | |
| it failed, or perhaps failed | all stay as they are; once the committed offsets show that it was |
|   | committed after all, as above | |
| it is read to its end, and nothing is held: behind its last record lie ends of transactions |
|   | none | that position, which is committed once |
| revoked or lost | all are forgotten | |

What a handler writes (`ReceivedMessage.produce`) is held beside its record:

| its record | what it has written |
|---|---|
| is in hand | grows, up to what one transaction takes |
| is done | is written in the transaction that has its offset |
| is retried, dead or expired; or is put back, to be handed out again | is dropped |
| is forgotten | is dropped; what it writes later, too |
| is done, and a topic for it is missing, or refuses it once it is alone | is dropped: the record |
|   | has failed, and is retried or dead. With `ordered` it is dead: later ones of its key went on |

It counts as held; while it is as much as may be held altogether, nothing more is handed out but the
record for whose end it waits, and what is of partitions that have written less than their part.

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
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from delaywheel.consumer.block import RecordBlock, RecordRun, runs_of, with_writes, write
from delaywheel.consumer.message import (
    DONE,
    Outcome,
    ReceivedMessage,
    SettledError,
    Settlement,
    State,
)
from delaywheel.consumer.records import FetchedRecords, Partition
from delaywheel.consumer.rules.turns import KeyTurns
from delaywheel.transactional import Outgoing

CUT_RECORDS = 5_000
CUT_BYTES = 8_000_000
"""The most that one transaction writes, unless what belongs to one record is more. What is only
done needs no record: of that, a transaction takes all."""

MOST_REASONS = 50
OTHER_REASON = "OTHER"
"""The reason under which dead letters are counted beyond so many reasons."""


@dataclass(slots=True)
class Counts:
    """The numbers of records by outcome, since the consumer was made.

    Attributes:
        done: Records whose handling is committed.
        dead: Without expired ones.
        skipped: Records of another route.
        parked: Records that were sent to come back because an earlier one of their key will.
        forwarded: Records that another one was written for, to the ingress topic: committed halves.
        forgotten: Records that were held here and are delivered again.
        commits: Transactions that were committed.
        failed_commits: Transactions that failed, or may have.
        produced: Records that handlers have written beside the outcomes of theirs.
        restarts: Partitions that were read from their beginning since their offsets went back: the
            topic was recreated, or has lost its end.
    """

    done: int = 0
    retried: int = 0
    dead: int = 0
    skipped: int = 0
    expired: int = 0
    parked: int = 0
    forwarded: int = 0
    produced: int = 0
    forgotten: int = 0
    commits: int = 0
    failed_commits: int = 0
    restarts: int = 0


_IN_HAND: Final = bytes((State.IN_HAND,))
_SETTLED: Final = bytes((State.SETTLED,))
_COMMITTED: Final = bytes((State.COMMITTED,))
_FORGOTTEN: Final = bytes((State.FORGOTTEN,))
_SETTLES: Final = bytes(State.SETTLED if n == State.IN_HAND else n for n in range(256))
"""Gives each state the one that it has once what is in hand is settled."""


@dataclass(slots=True)
class Cut:
    """What one transaction commits: outcomes of records, and the offsets after them.

    Attributes:
        runs: Whose outcomes.
        offsets: The next offset of each partition.
        most: How many records it may settle; `count` is how many it does.
        is_counted: Whether it writes the counts of its records, too.
        name: The transaction's, said beside its offsets: who reads it there knows that it is
            committed. Offsets alone prove nothing: they may be of before, or another member's.
    """

    runs: list[RecordRun] = field(default_factory=list)
    records: list[Outgoing] = field(default_factory=list)
    offsets: dict[Partition, int] = field(default_factory=dict)
    length_bytes: int = 0
    count: int = 0
    most: int = sys.maxsize
    is_counted: bool = False
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def is_full(self) -> bool:
        """Whether the transaction is full."""
        return (
            len(self.records) >= CUT_RECORDS
            or self.length_bytes >= CUT_BYTES
            or self.count >= self.most
        )

    def add(self, block: RecordBlock, begin: int, end: int) -> int:
        """Adds settled records, as many as it takes; returns the index behind the last of them."""
        end = min(end, begin + self.most - self.count)
        for index in sorted(block.settlements) if block.settlements else ():
            if begin <= index < end and self._write(block.settlements[index]):
                end = index + 1
                break
        self.runs.append(RecordRun(block, begin, end))
        self.count += end - begin
        self.offsets[block.at] = block.offsets[end - 1] + 1
        return end

    def _write(self, settlement: Settlement) -> bool:
        """Adds what an outcome writes; returns whether the transaction is full then."""
        written = [] if settlement.writes is None else [*settlement.writes.records]
        if settlement.record is not None:
            written.append(settlement.record)
        for record in (*written, *settlement.order, *settlement.answers):
            self.records.append(record)
            self.length_bytes += record.length_bytes
        return self.is_full

    def settled(self) -> Iterator[tuple[RecordBlock, int, Settlement]]:
        """Yields the outcomes of its records that are not merely done."""
        for block, begin, end in self.runs:
            for index in sorted(block.settlements):
                if begin <= index < end:
                    yield block, index, block.settlements[index]

    def leave_out_others(self, partitions: AbstractSet[Partition]) -> None:
        """Drops what is of other partitions."""
        self.offsets = {at: offset for at, offset in self.offsets.items() if at in partitions}
        self.runs = [run for run in self.runs if run.block.at in partitions]
        self.count = sum(run.size for run in self.runs)


class _Shelf:
    """The uncommitted records of one partition, by offset."""

    __slots__ = (
        *("blocks", "count", "held_bytes", "kept", "limit"),
        *("passed", "position", "written_bytes"),
    )

    def __init__(self, position: int | None) -> None:
        self.position = position
        self.passed = position or 0  # what is committed
        # Records from this offset on are kept back; the last ones of `blocks`.
        self.limit: int | None = None
        self.kept: deque[RecordRun] = deque()
        self.blocks: deque[RecordBlock] = deque()
        self.count = 0
        self.held_bytes = 0
        self.written_bytes = 0

    @property
    def all_bytes(self) -> int:
        """The length of what is held, and of what handlers have written beside it."""
        return self.held_bytes + self.written_bytes

    @property
    def first_state(self) -> State | None:
        """The state of the first record; None: there is none."""
        if not self.blocks:
            return None
        first = self.blocks[0]
        return State(first.states[first.begin])


class Book:
    """All records that a consumer holds."""

    def __init__(self, *, max_held: int, max_held_bytes: int) -> None:
        self.turns = KeyTurns()
        self.counts = Counts()
        self.dead_reasons: dict[str, int] = {}
        self._max_held = max_held
        self._max_held_bytes = max_held_bytes
        self._shelves: dict[Partition, _Shelf] = {}
        self._waiting: deque[RecordRun] = deque()
        # Of paused partitions, what is not waiting until they are resumed.
        self._aside: dict[Partition, deque[RecordRun]] = {}
        self._paused: set[Partition] = set()
        self._withheld: AbstractSet[str] = frozenset()
        self.held_up: AbstractSet[Partition] = frozenset()
        """The partitions of which nothing is cut now: a topic does not answer their outcomes."""
        self.held = 0
        """How many records are held."""
        self._held_bytes = 0
        self._written_bytes = 0
        self._settled = 0
        self.taken = 0
        """How many blocks were taken in since it was made."""

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
        """The length of all held keys, values and headers, and of what handlers have written."""
        return self._held_bytes + self._written_bytes

    @property
    def room(self) -> int:
        """How many more records may be fetched."""
        return max(0, self._max_held - self.held)

    @property
    def is_full(self) -> bool:
        """Whether nothing more may be fetched, whoever has written what."""
        return self.held >= self._max_held or self._held_bytes >= self._max_held_bytes

    @property
    def is_overwritten(self) -> bool:
        """Whether so much is written, and not committed, that few handlers may begin.

        Those of records for whose end such writes wait: otherwise they would wait for ever. And
        those of partitions that have written little: one whose writes stay here stops no other.
        """
        return self._written_bytes >= self._max_held_bytes

    def crowded(self, before: AbstractSet[Partition]) -> set[Partition]:
        """Returns the partitions that are to be read no further for now.

        Half of the room is shared by those who ask first; the other half is reserved for the
        partitions in equal parts. So one whose records stay here stops no other. For those that
        were crowded `before`, more must be free again.
        """
        if self.is_full:
            return set(self._shelves)
        part, part_bytes = self._parts
        shelves = self._shelves.values()
        used = self.held + sum(max(0, part - shelf.count) for shelf in shelves)
        used_bytes = self.held_bytes + sum(
            max(0, part_bytes - shelf.all_bytes) for shelf in shelves
        )
        return {
            partition
            for partition, shelf in self._shelves.items()
            for most in (0.75 if partition in before else 1.0,)
            if (used >= most * self._max_held and shelf.count >= most * part)
            or (used_bytes >= most * self._max_held_bytes and shelf.all_bytes >= most * part_bytes)
        }

    @property
    def _parts(self) -> tuple[int, int]:
        """What is reserved for each partition: records, and bytes."""
        parts = 2 * max(1, len(self._shelves))
        return max(1, self._max_held // parts), self._max_held_bytes // parts

    @property
    def has_waiting(self) -> bool:
        """Whether any record can be handed out."""
        return self._place_to_go_on() is not None if self.is_overwritten else bool(self._waiting)

    @property
    def can_cut(self) -> bool:
        """Whether a transaction would have anything to commit."""
        return bool(self.settled_topics)

    @property
    def has_ended_records(self) -> bool:
        """Whether anything could be committed, if no topic were withheld."""
        shelves = self._shelves.values()
        return any(shelf.first_state is State.SETTLED for shelf in shelves)

    @property
    def settled_topics(self) -> frozenset[str]:
        """The topics of which a transaction would have something to commit."""
        return frozenset(
            at.topic
            for at, shelf in self._shelves.items()
            if shelf.first_state is State.SETTLED and self._may_cut(at)
        )

    def _may_cut(self, partition: Partition) -> bool:
        return not self.is_withheld(partition) and partition not in self.held_up

    @property
    def is_worth_a_commit(self) -> bool:
        """Whether so much is settled that the room it takes is better free."""
        return (
            self._settled * 4 >= self._max_held or self._written_bytes * 4 >= self._max_held_bytes
        )

    def settled_ends(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Returns the offsets behind what is settled, and could be committed, of each of these."""
        ends: dict[Partition, int] = {}
        for at in partitions:
            for block in self._shelves[at].blocks:
                end = block.settled_end()
                if end > block.begin:
                    ends[at] = block.offsets[end - 1] + 1
                if end < len(block):
                    break
        return ends

    def firsts(self) -> Iterator[ReceivedMessage]:
        """Yields the first held record of each partition: all others are committed after it."""
        for shelf in self._shelves.values():
            if shelf.blocks:
                yield shelf.blocks[0].message(shelf.blocks[0].begin)

    def unended(self, partition: Partition) -> int:
        """Returns how many offsets were read of a partition that have not ended."""
        shelf = self._shelves.get(partition)
        if shelf is None or not shelf.blocks or shelf.position is None:
            return 0
        first = shelf.blocks[0]
        return shelf.position - first.offsets[first.begin]

    def in_hand_since(self, before_s: float) -> list[ReceivedMessage]:
        """Returns what handlers have had since before this time."""
        return [
            block.message(index)
            for shelf in self._shelves.values()
            for block in shelf.blocks
            if block.states.count(State.IN_HAND, block.begin)
            for index in range(block.begin, len(block))
            if block.states[index] == State.IN_HAND and block.handed_s[index] < before_s
        ]

    def in_hand(self, partitions: Iterable[Partition]) -> int:
        """Returns how many records of these partitions handlers have."""
        shelves = (self._shelves.get(partition) for partition in partitions)
        return sum(
            block.states.count(State.IN_HAND, block.begin)
            for shelf in shelves
            if shelf is not None
            for block in shelf.blocks
        )

    def is_awaited(self, partitions: Iterable[Partition]) -> bool:
        """Whether any handler still has a record of these partitions.

        Not one whose block was left by what is no outcome: such a record stays in hand.
        """
        return any(
            block.states.count(State.IN_HAND, block.begin)
            > sum(one.has_returned and one.state is State.IN_HAND for one in block.made())
            for shelf in map(self._shelves.get, partitions)
            if shelf is not None
            for block in shelf.blocks
        )

    def assign(self, positions: Mapping[Partition, int | None]) -> list[ReceivedMessage]:
        """Assigns partitions from these offsets on; forgets the records held of them.

        One that was ours and is paused stays so. Returns what was in hand of them, as far as there
        are objects of it.
        """
        paused = self._paused & positions.keys()
        in_hand = self.forget(positions)
        self._paused |= paused
        for partition, position in positions.items():
            self._shelves[partition] = _Shelf(position)
            if partition in paused or self.is_withheld(partition):
                self._aside[partition] = deque()
        return in_hand

    def forget(self, partitions: Iterable[Partition]) -> list[ReceivedMessage]:
        """Forgets partitions that are no longer assigned; returns what was in hand of them."""
        partitions = list(partitions)
        self.end_parking(partitions)
        in_hand: list[ReceivedMessage] = []
        for partition in partitions:
            shelf = self._shelves.pop(partition, None)
            self._aside.pop(partition, None)
            self._paused.discard(partition)
            if shelf is None:
                continue
            for block in shelf.blocks:
                in_hand += [one for one in block.made() if one.state is State.IN_HAND]
                self._settled -= block.states.count(State.SETTLED, block.begin)
                block.states[block.begin :] = _FORGOTTEN * (len(block) - block.begin)
                block.settlements.clear()
                block.writes.clear()
            self._written_bytes -= shelf.written_bytes
            self.held -= shelf.count
            self._held_bytes -= shelf.held_bytes
            self.counts.forgotten += shelf.count
        self._waiting = deque(
            run for run in self._waiting if run.block.states[run.begin] == State.WAITING
        )
        return in_hand

    def going_back(self, fetched: Iterable[FetchedRecords]) -> set[Partition]:
        """Returns partitions of which a record lies before what was read: they begin again."""
        found: set[Partition] = set()
        positions: dict[Partition, int] = {}
        for one in fetched:
            shelf = self._shelves.get(one.at)
            position = 0 if shelf is None else shelf.position or 0
            if one.offsets[0] < positions.get(one.at, position) or not one.is_ascending:
                found.add(one.at)
            positions[one.at] = one.offsets[-1] + 1
        return found

    def read_to(self, ends: Mapping[Partition, int]) -> None:
        """Takes in up to where partitions were read, though what lay there was no record."""
        for at, end in ends.items():
            shelf = self._shelves.get(at)
            if shelf is not None:
                shelf.position = max(shelf.position or 0, end)

    @property
    def at_rest(self) -> dict[Partition, int]:
        """The uncommitted positions of partitions of which nothing is held."""
        return {
            at: shelf.position
            for at, shelf in self._shelves.items()
            if not shelf.blocks and shelf.position is not None and shelf.position > shelf.passed
            if self._may_cut(at)
        }

    def passed(self, offsets: Mapping[Partition, int]) -> None:
        """Notes that positions are committed."""
        for at, offset in offsets.items():
            self._shelves[at].passed = offset

    def take(self, blocks: Iterable[RecordBlock]) -> None:
        """Holds fetched records, except those that are not of this assignment."""
        for block in blocks:
            shelf = self._shelves.get(block.at)
            if shelf is None:
                continue
            self.taken += 1
            count, length_bytes = len(block), block.length_bytes(0, len(block))
            shelf.position = block.offsets[-1] + 1
            shelf.blocks.append(block)
            shelf.count += count
            shelf.held_bytes += length_bytes
            self.held += count
            self._held_bytes += length_bytes
            goes_out = count
            if shelf.limit is not None:
                goes_out = bisect_left(block.offsets, shelf.limit)
            if goes_out:
                self._queue_of(block.at).append(RecordRun(block, 0, goes_out))
            if goes_out < count:
                shelf.kept.append(RecordRun(block, goes_out, count))

    def limit(self, partition: Partition, offset: int | None) -> None:
        """Hands out records of a partition up to this offset only; None: all of them."""
        shelf = self._shelves[partition]
        shelf.limit = offset
        while shelf.kept:
            block, begin, end = shelf.kept[0]
            until = end
            if offset is not None:
                until = bisect_left(block.offsets, offset, begin, end)
            if until > begin:
                self._queue_of(partition).append(RecordRun(block, begin, until))
            if until < end:
                shelf.kept[0] = RecordRun(block, until, end)
                return
            shelf.kept.popleft()

    def first_kept(self, partition: Partition) -> ReceivedMessage | None:
        """Returns the first held record of a partition if it is kept back by `limit`."""
        shelf = self._shelves[partition]
        if not shelf.kept:
            return None
        block, begin, _ = shelf.kept[0]
        is_first = block is shelf.blocks[0] and begin == block.begin
        return block.message(begin) if is_first and block.states[begin] == State.WAITING else None

    def take_kept(self, partition: Partition) -> None:
        """Keeps the first record no longer that is kept back, and does not hand it out either."""
        kept = self._shelves[partition].kept
        block, begin, end = kept.popleft()
        if begin + 1 < end:
            kept.appendleft(RecordRun(block, begin + 1, end))

    def is_kept_after(self, partition: Partition, offset: int) -> bool:
        """Whether the next held record from this offset on is kept back by `limit`."""
        kept = self._shelves[partition].kept
        return bool(kept) and kept[0].block.offsets[kept[0].begin] >= offset

    def hand_out(self, most: int, now_s: float) -> RecordRun | None:
        """Returns the longest waiting, `most` or fewer, in hand from then on; None: none waits."""
        if self.is_overwritten:
            found = self._hand_out_to_go_on(now_s)
            return None if found is None else runs_of([found])[0]
        if not self._waiting:
            return None
        block, begin, end = run = self._waiting.popleft()
        if end - begin > most:
            self._waiting.appendleft(RecordRun(block, begin + most, end))
            run = RecordRun(block, begin, begin + most)
        block.states[begin : run.end] = _IN_HAND * run.size
        block.handed_s[begin : run.end] = array("d", (now_s,)) * run.size
        return run

    def hand_out_one(self, now_s: float) -> ReceivedMessage | None:
        """Returns the record that waits longest, in hand from then on; None: none waits."""
        if self.is_overwritten:
            return self._hand_out_to_go_on(now_s)
        return self._hand_out_at(0, now_s) if self._waiting else None

    def _hand_out_at(self, place: int, now_s: float) -> ReceivedMessage:
        block, begin, end = self._waiting[place]
        if begin + 1 == end:
            del self._waiting[place]
        else:
            self._waiting[place] = RecordRun(block, begin + 1, end)
        block.states[begin] = State.IN_HAND
        block.handed_s[begin] = now_s
        return block.message(begin)

    def _hand_out_to_go_on(self, now_s: float) -> ReceivedMessage | None:
        """Returns a record that may be handed out though it is overwritten; None: none waits."""
        place = self._place_to_go_on()
        return None if place is None else self._hand_out_at(place, now_s)

    def _place_to_go_on(self) -> int | None:
        _, part_bytes = self._parts
        for place, (block, begin, _) in enumerate(self._waiting):
            shelf = self._shelves[block.at]
            is_first = shelf.blocks[0] is block and block.begin == begin
            is_awaited = is_first and shelf.written_bytes > 0
            if is_awaited or shelf.written_bytes < part_bytes:
                return place
        return None

    @property
    def paused(self) -> AbstractSet[Partition]:
        """The partitions of which nothing is handed out."""
        return self._aside.keys()

    def pause(self, partitions: Iterable[Partition]) -> None:
        """Hands out nothing of these partitions until `resume`, or until they are forgotten."""
        partitions = list(partitions)
        self._paused.update(partitions)
        self._set_aside(partitions)

    def resume(self, partitions: Iterable[Partition]) -> None:
        """Ends `pause`."""
        self._paused -= set(partitions)
        self._hand_out_aside()

    def withhold(self, topics: AbstractSet[str]) -> None:
        """Hands out and cuts nothing of these topics, until they are no longer among them."""
        self._withheld = topics
        self._set_aside(filter(self.is_withheld, self._shelves))
        self._hand_out_aside()

    def is_withheld(self, partition: Partition) -> bool:
        """Whether nothing of a partition is handed out or cut."""
        return partition.topic in self._withheld

    def _set_aside(self, partitions: Iterable[Partition]) -> None:
        new = set(partitions) - self._aside.keys()
        if not new:
            return
        self.end_parking(new)
        self._aside.update((partition, deque()) for partition in new)
        runs, self._waiting = self._waiting, deque()
        for run in runs:
            self._queue_of(run.block.at).append(run)

    def _queue_of(self, partition: Partition) -> deque[RecordRun]:
        """Returns where what waits of a partition is: to be handed out, or aside."""
        return self._aside.get(partition, self._waiting) if self._aside else self._waiting

    def _hand_out_aside(self) -> None:
        """Lets what is neither paused nor withheld be handed out again."""
        for partition in list(self._aside):
            if partition not in self._paused and not self.is_withheld(partition):
                self._waiting.extendleft(reversed(self._aside.pop(partition)))

    def take_back(self, message: ReceivedMessage) -> ReceivedMessage:
        """Takes a record in hand back; returns it as it will be, to be `put_back`.

        What its handler still has is forgotten: it is settled no more.
        """
        self._drop_writes(message)
        return message.block.take_back(message.index)

    def hold_back(self, message: ReceivedMessage) -> None:
        """Notes that a record must not be handed out yet; `put_back` ends that."""
        message.block.states[message.index] = State.WAITING
        self._drop_writes(message)

    def put_back(self, messages: Sequence[ReceivedMessage]) -> None:
        """Returns records to the front of those to be handed out."""
        for run in reversed(runs_of(messages)):
            self._queue_of(run.block.at).appendleft(run)

    def end_parking(self, partitions: Collection[Partition]) -> None:
        """Puts back what is parked of these partitions, in order."""
        parked = self.turns.withdraw(partitions)
        if parked:
            self.put_back(parked)
            # Of a key, the record that is next may be among them already.
            self._waiting = deque(sorted(self._waiting, key=attrgetter("first_offset")))

    def write(self, message: ReceivedMessage, record: Outgoing) -> bool:
        """Holds what the handler of a record writes, until that is done; otherwise as `write`."""
        length_bytes = write(message, record)
        if length_bytes:
            self._count_written(message.at, length_bytes)
        return length_bytes > 0

    def _count_written(self, at: Partition, length_bytes: int) -> None:
        self._shelves[at].written_bytes += length_bytes
        self._written_bytes += length_bytes

    def _drop_writes(self, message: ReceivedMessage) -> None:
        writes = message.block.writes.pop(message.index, None)
        if writes is not None:
            self._count_written(message.at, -writes.length_bytes)

    def settle(self, message: ReceivedMessage, settlement: Settlement) -> bool:
        """Notes a record's outcome; False: it is forgotten. SettledError: it has one already."""
        if message.state is State.FORGOTTEN:
            return False
        if message.is_settled:
            raise SettledError.of(message)
        message.block.states[message.index] = State.SETTLED
        if settlement.outcome is Outcome.DONE:
            settlement = with_writes(message.block, message.index, settlement)
        else:
            self._drop_writes(message)
        self._note(message, settlement)
        self._settled += 1
        return True

    @staticmethod
    def _note(message: ReceivedMessage, settlement: Settlement) -> None:
        if settlement is not DONE:
            message.block.settlements[message.index] = settlement

    def settle_one_done(self, message: ReceivedMessage) -> None:
        """Settles a record as done that a handler has. Not if order is kept."""
        message.block.states[message.index] = State.SETTLED
        if message.block.writes:
            self._note(message, with_writes(message.block, message.index, DONE))
        self._settled += 1

    def settle_done(self, run: RecordRun) -> int:
        """Settles those as done that handlers have; returns how many. Not if order is kept."""
        block, begin, end = run
        for index in [one for one in block.writes if begin <= one < end]:
            block.settlements[index] = with_writes(block, index, DONE)
        count = block.states.count(State.IN_HAND, begin, end)
        if count == end - begin:
            block.states[begin:end] = _SETTLED * count
        elif count:
            block.states[begin:end] = block.states[begin:end].translate(_SETTLES)
        self._settled += count
        return count

    def resettle(self, message: ReceivedMessage, settlement: Settlement) -> None:
        """Gives a settled record another outcome: no transaction with the former one succeeded."""
        assert message.state is State.SETTLED
        before = message.block.settlements.get(message.index, DONE)
        if before.writes is not None and settlement.writes is None:
            self._count_written(message.at, -before.writes.length_bytes)
        self._note(message, settlement)

    def cut(
        self,
        most: int | None = None,
        before: Mapping[Partition, int] | None = None,
        only: Collection[Partition] = (),
    ) -> Cut | None:
        """Returns what the next transaction should commit; None: nothing. Changes nothing here.

        At most `most` records; with `before`, of its partitions alone, and only what is before
        these offsets; with `only`, of these alone, though they are held up.
        """
        cut = Cut() if most is None else Cut(most=most)
        for at, shelf in self._shelves.items():
            is_left_out = before is not None and at not in before
            is_left_out |= self.is_withheld(at) if only else not self._may_cut(at)
            is_left_out |= bool(only) and at not in only
            for block in () if is_left_out else shelf.blocks:
                end = block.settled_end()
                if before is not None:
                    end = min(end, bisect_left(block.offsets, before[at]))
                if end > block.begin:
                    end = cut.add(block, block.begin, end)
                if end < len(block) or cut.is_full:
                    break
            if cut.is_full:
                break
        return cut if cut.runs else None

    def committed(self, cut: Cut) -> None:
        """Notes that the transaction was committed."""
        counted = Counter({Outcome.DONE: cut.count})
        produced = 0
        for block, _, settlement in cut.settled():
            if settlement.writes is not None:
                produced += len(settlement.writes.records)
                self._count_written(block.at, -settlement.writes.length_bytes)
            counted[Outcome.DONE] -= 1
            counted[settlement.outcome] += 1
            if settlement.outcome is Outcome.DEAD:
                self._count_reason(settlement.reason)
        for run in cut.runs:
            self._leave(run)
        self.passed(cut.offsets)
        self._settled -= cut.count
        counts = self.counts
        counts.produced += produced
        counts.commits += 1
        counts.done += counted[Outcome.DONE]
        counts.retried += counted[Outcome.RETRIED]
        counts.dead += counted[Outcome.DEAD]
        counts.skipped += counted[Outcome.SKIPPED]
        counts.expired += counted[Outcome.EXPIRED]
        counts.parked += counted[Outcome.PARKED]
        counts.forwarded += counted[Outcome.FORWARDED]

    def _count_reason(self, reason: str) -> None:
        """Counts a dead letter by its reason; handlers may name many, and a metric must not."""
        if reason not in self.dead_reasons and len(self.dead_reasons) >= MOST_REASONS:
            reason = OTHER_REASON
        self.dead_reasons[reason] = self.dead_reasons.get(reason, 0) + 1

    def _leave(self, run: RecordRun) -> None:
        """Drops records that are committed: the first ones of their partition."""
        block, begin, end = run
        shelf = self._shelves[block.at]
        assert shelf.blocks[0] is block
        assert block.begin == begin
        block.states[begin:end] = _COMMITTED * run.size
        if block.settlements:
            block.settlements = {at: one for at, one in block.settlements.items() if at >= end}
        block.begin = end
        if end == len(block):
            shelf.blocks.popleft()
        length_bytes = block.length_bytes(begin, end)
        shelf.count -= run.size
        shelf.held_bytes -= length_bytes
        self.held -= run.size
        self._held_bytes -= length_bytes
