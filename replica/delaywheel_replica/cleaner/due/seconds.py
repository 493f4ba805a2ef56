"""One second's admitted messages and what names them, and the outcome of each.

A `Second` holds exactly the frames of its slot up to a bound per wheel that its owner keeps (what
is *admitted*). It decides which of the messages that a step takes are forwarded:

=====================================  ==========================================
a taken message that                   is
=====================================  ==========================================
repeats one taken in an earlier step   a duplicate of that one; of several, of the one done
                                       ahead of w, then of the first in position
repeats one before it in position      a duplicate of the first
is named by a cancel with seq <= V'    cancelled
is withdrawn: it has another due       cancelled
is a half, and no commit or release    asked: its group decides
with seq <= V' names it
is anything else                       forwarded
=====================================  ==========================================

This applies only to frames <= V', the V that the step leads to. What was done ahead of w
(core/protocol/progress.py) was taken in an earlier step, though it is due only later: no step takes
it.

A half is taken before its due by the step in which V passes a release of it that lies behind it in
its own wheel (core/leader/halves.py). Once that is admitted, the half is no longer among what falls
due. That is safe: w moves only together with V' = all that is admitted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delaywheel.record_headers import HALF_GROUP, LONGEST_GROUP_BYTES, LONGEST_TTL_VALUE_BYTES
from delaywheel.storage.frames.columns import Blob, Columns
from delaywheel.storage.frames.header_checks import rows_that_may_have
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.decoding import FrameBatch
from delaywheel_replica.cleaner.due.duplicates import (
    KEY,
    contents_differ,
    first_of_equals,
    mix_keys,
    spread_ranges,
)
from delaywheel_replica.cleaner.due.rows import (
    AS_BYTES,
    RECORD,
    DueRows,
    HalfState,
    MessageOutcome,
    Records,
)
from delaywheel_replica.cleaner.due.runs import NO_ROWS, Runs, WheelNumbers
from delaywheel_replica.core.protocol.progress import Done, Position
from delaywheel_replica.core.protocol.reschedules import MessageKey

FORWARDED = 0
"""Beside the `MessageOutcome` values: the message is neither a duplicate nor cancelled."""

# Roughly what they take in memory besides the messages' own bytes, with buffers grown by doubling.
_ROW_BYTES = 256
_BATCH_BYTES = 512
_TAKEN_OVER = (
    ("start", "starts"),
    ("timestamp_ms", "timestamps_ms"),
    ("key_length", "key_lengths"),
    ("value_length", "value_lengths"),
    ("headers_length", "headers_lengths"),
    ("partition", "partitions"),
)
_COMMITTING = frozenset({Kind.COMMITS, Kind.RELEASES})
_NO_SEQS: NDArray[np.int64] = np.empty(0, np.int64)
_EARLIEST_MS = 86_400_000
"""Holds are of seconds: more is the doing of a clock."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The two states between which a step lies; arrays by wheel number."""

    due_ms: int  # w before the step
    seqs_before: NDArray[np.int64]  # V before
    seqs_after: NDArray[np.int64]  # V after
    ahead: Sequence[Done] = ()  # done ahead of w before
    withdrawn: frozenset[MessageKey] = frozenset()  # whatever frames say


class Released(NamedTuple):
    """Halves that a wheel's releases let go: row numbers, and the seq of each one's release."""

    rows: NDArray[np.intp]
    seqs: NDArray[np.int64]


_NOTHING_RELEASED = Released(NO_ROWS, _NO_SEQS)


class Second:
    """The admitted messages of one slot, and the rows that name them."""

    def __init__(
        self, slot: int, wheels: WheelNumbers, ahead: Sequence[Done], ttl_header: str
    ) -> None:
        self.slot = slot
        self._ttl_header = ttl_header
        self._ahead = ahead
        self.length_bytes = 0
        """About what it takes in memory."""
        self._wheels = wheels
        self._records: Records = np.empty(0, RECORD)  # grown by doubling; `_count` are valid
        self._count = 0
        self._runs = Runs(slot, wheels)
        # Key, mix, wheel, seq; ascending by mix. Releases are among the commits.
        self._cancels: Records = np.empty(0, RECORD)
        self._commits: Records = np.empty(0, RECORD)
        self._has_released = False
        self._topics: list[str] = []
        self._topic_numbers: dict[str, int] = {}
        self._destinations: set[str] = set()
        self._blobs: list[Blob] = []

    def __len__(self) -> int:
        return self._count

    @property
    def topics(self) -> Collection[str]:
        """The topics of all its messages."""
        return self._destinations

    def add(self, batches: Iterable[FrameBatch]) -> Released:
        """Adds frames of this slot, by wheel and seq; returns the halves that releases let go."""
        begin = self._count
        naming: list[FrameBatch] = []
        for batch in batches:
            if batch.kind is Kind.MESSAGES:
                self._append(batch)
            else:
                naming.append(batch)
        if self._count > begin:
            records = self._records[: self._count]
            _set_mixes(records[begin:])
            records["ahead"][begin:] = self._were_done_ahead(records[begin:], self._ahead)
            self._runs.add(records, begin)
        if not naming:
            return _NOTHING_RELEASED
        cancels = self._named(batch for batch in naming if batch.kind is Kind.CANCELS)
        commits = self._named(batch for batch in naming if batch.kind in _COMMITTING)
        self._cancels = _by_mix(self._cancels, cancels)
        self._commits = _by_mix(self._commits, commits)
        releases = [batch for batch in naming if batch.kind is Kind.RELEASES]
        return self._release(self._named(releases)) if releases else _NOTHING_RELEASED

    def due(
        self, after_ms: int, position: Position | None, upto_ms: int, limit: int
    ) -> NDArray[np.intp]:
        """Returns the first `limit` rows beyond a progress and due by `upto_ms`, in order.

        Without those that are released: a release takes them, or has.
        """
        records = self._records[: self._count]
        skips = records["released"] > 0 if self._has_released else None
        return self._runs.after(records, after_ms, position, upto_ms, limit, skips)

    def due_between(self, begin: int, end: int, upto_ms: int) -> NDArray[np.intp]:
        """Returns those of the rows [begin, end) that are due by `upto_ms`."""
        due: NDArray[np.intp] = np.flatnonzero(self._records["due_ms"][begin:end] <= upto_ms)
        return due + begin

    def later_than(self, rows: NDArray[np.intp], due_ms: int) -> NDArray[np.intp]:
        """Returns those of these rows that are due after `due_ms`, and not done ahead of it."""
        records = self.records(rows)
        later: NDArray[np.intp] = rows[(records["due_ms"] > due_ms) & ~records["ahead"]]
        return later

    def next_due_ms(self, after_ms: int) -> int | None:
        """Returns the earliest due beyond `after_ms`; without those that are released, as `due`."""
        released = self._records["released"] if self._has_released else None
        return self._runs.next_due_ms(after_ms, released)

    def in_order(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Returns these rows in order of due and position."""
        records = self.records(rows)
        return rows[self._wheels.sort(records, records["due_ms"])]

    def records(self, rows: NDArray[np.intp]) -> Records:
        """Copies the records of some rows."""
        return self._records.take(rows)

    def messages(self, records: Records) -> DueRows:
        """Returns some records, ready to be made into messages."""
        return DueRows(records, self._topics, self._wheels.names, self._blobs)

    def outcomes(
        self, rows: NDArray[np.intp], records: Records, bounds: Bounds
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Returns the outcomes of rows that a step takes, and duplicates that differ in content."""
        outcomes = np.full(len(rows), FORWARDED, np.uint8)
        differ = np.zeros(len(rows), np.bool_)
        asked = np.flatnonzero(records["half"])
        if len(asked):
            outcomes[asked] = MessageOutcome.ASKED
            outcomes[asked[_named_by(self._commits, records.take(asked), bounds)]] = FORWARDED
        if len(self._cancels):
            outcomes[_named_by(self._cancels, records, bounds)] = MessageOutcome.CANCELLED
        for key in bounds.withdrawn:
            if key.due_ms // 1000 == self.slot:
                outcomes[self._with_key(records, key)] = MessageOutcome.CANCELLED
        suspects = np.flatnonzero(records["suspect"])
        if len(suspects):
            originals = self._originals(rows[suspects], bounds)
            repeats = originals != rows[suspects]
            duplicates = suspects[repeats]
            outcomes[duplicates] = MessageOutcome.DUPLICATE
            differ[duplicates] = contents_differ(
                records.take(duplicates), self.records(originals[repeats]), self._blobs
            )
        return outcomes, differ

    def has(self, key: MessageKey, seqs: NDArray[np.int64]) -> bool:
        """Whether a copy of this message lies in a frame up to these seqs, by wheel number."""
        records = self._records[: self._count]
        found = records[self._with_key(records, key)]
        return bool((found["seq"] <= seqs[found["wheel"]]).any())

    def _originals(self, rows: NDArray[np.intp], bounds: Bounds) -> NDArray[np.intp]:
        """Returns, for each row, the one that represents its key among frames <= V'."""
        members = self._runs.with_mixes(self._records["mix"][rows])
        records = self.records(members)
        inside = records["seq"] <= bounds.seqs_after[records["wheel"]]
        members, records = members[inside], records[inside]
        before, after = (seqs[records["wheel"]] for seqs in (bounds.seqs_before, bounds.seqs_after))
        released = records["released"]
        taken = (records["seq"] <= before) & (records["due_ms"] <= bounds.due_ms)
        taken |= (released > 0) & (released <= before)
        # A copy that is not released is not taken now, unless it is due by now as well.
        kept = (released == 0) | (released > after)
        ahead = self._were_done_ahead(records, bounds.ahead)
        ranks = np.empty(len(members), np.intp)
        ranks[self._wheels.sort(records, kept, ~taken, ~ahead)] = np.arange(len(members))
        originals: NDArray[np.intp] = members[first_of_equals(records, ranks)]
        chosen: NDArray[np.intp] = originals[members.searchsorted(rows)]
        return chosen

    def _were_done_ahead(self, records: Records, ahead: Sequence[Done]) -> NDArray[np.bool_]:
        found = np.zeros(len(records), np.bool_)
        for done in ahead:
            seqs = np.array([done.seq(wheel) for wheel in self._wheels.names], np.int64)
            is_done = records["due_ms"] <= done.due_ms
            if done.position is not None:
                in_order = self._wheels.up_to(records, done.position)
                is_done |= (records["due_ms"] == done.due_ms + 1) & in_order
            found |= is_done & (records["seq"] <= seqs[records["wheel"]])
        return found

    def _append(self, batch: FrameBatch) -> None:
        columns, counts = batch.columns, batch.counts
        self._destinations.update(columns.topics)
        records = self._room(len(columns))
        self._set_keys(records, batch)
        records["accepted_at_ms"] = np.repeat(batch.accepted_at_ms, counts)
        records["row"] = np.arange(len(records)) - np.repeat(np.cumsum(counts) - counts, counts)
        records["blob"] = len(self._blobs)
        self._blobs.append(columns.blob)
        self.length_bytes += len(columns.blob) + _BATCH_BYTES + _ROW_BYTES * len(records)
        records["ttl"] = bool(self._ttl_header) and rows_that_may_have(
            columns, self._ttl_header, LONGEST_TTL_VALUE_BYTES
        )
        for name, column in _TAKEN_OVER:
            records[name] = getattr(columns, column)
        records["half"] = HalfState.NONE
        records["released"] = records["early_ms"] = 0
        may_be = rows_that_may_have(columns, HALF_GROUP, LONGEST_GROUP_BYTES)
        if may_be.any():
            self._mark_halves(records, np.flatnonzero(may_be))

    def _mark_halves(self, records: Records, rows: NDArray[np.intp]) -> None:
        """Marks those of these rows that have the header: its bytes may also lie in another one."""
        each = DueRows(records.take(rows), self._topics, self._wheels.names, self._blobs).headers()
        are = [any(name == HALF_GROUP for name, _ in headers) for headers in each]
        records["half"][rows[np.array(are, np.bool_)]] = HalfState.HALF

    def _room(self, rows: int) -> Records:
        """Returns the next `rows` records, to be filled in."""
        begin, end = self._count, self._count + rows
        if end > len(self._records):
            grown = np.empty(max(end, 2 * len(self._records)), RECORD)
            grown.view(AS_BYTES)[:begin] = self._records.view(AS_BYTES)[:begin]
            self._records = grown
        self._count = end
        return self._records[begin:end]

    def _topics_of(self, columns: Columns) -> NDArray[np.int32]:
        """Returns this second's number of each row's topic."""
        numbers = []
        for topic in columns.topics:
            number = self._topic_numbers.setdefault(topic, len(self._topics))
            if number == len(self._topics):
                self._topics.append(topic)
            numbers.append(number)
        topics: NDArray[np.int32] = np.array(numbers, np.int32)[columns.topic_numbers]
        return topics

    def _named(self, batches: Iterable[FrameBatch]) -> list[Records]:
        """Returns the rows of frames that name messages: key, mix, wheel and seq of each."""
        parts = []
        for batch in batches:
            added = np.zeros(len(batch.columns), RECORD)
            self._set_keys(added, batch)
            added["accepted_at_ms"] = np.repeat(batch.accepted_at_ms, batch.counts)
            _set_mixes(added)
            self.length_bytes += _ROW_BYTES * len(added)
            parts.append(added)
        return parts

    def _release(self, parts: list[Records]) -> Released:
        """Notes the first release of each half that lies behind it in its own wheel."""
        releases = _by_mix(np.empty(0, RECORD), parts)
        members = self._runs.with_mixes(releases["mix"])
        numbers, places = _pairs(releases, self.records(members))
        found = members[numbers]
        records, named = self.records(found), releases.take(places)
        counts = (records["half"] == HalfState.HALF) & (records["wheel"] == named["wheel"])
        counts &= (records["seq"] < named["seq"]) & (records["released"] == 0)
        found, named = found[counts], named[counts]
        order = np.lexsort((named["seq"], found))
        rows, first = np.unique(found[order], return_index=True)
        named = named[order[first]]
        seqs: NDArray[np.int64] = named["seq"]
        early_ms = self._records["due_ms"][rows] - named["accepted_at_ms"]
        self._records["early_ms"][rows] = np.clip(early_ms, 0, _EARLIEST_MS)
        self._records["released"][rows] = seqs
        self._has_released |= bool(len(rows))
        return Released(rows, seqs)

    def _set_keys(self, records: Records, batch: FrameBatch) -> None:
        halves = batch.columns.ids.view("<u8")
        records["id_low"] = halves[:, 0]
        records["id_high"] = halves[:, 1]
        records["due_ms"] = batch.columns.due_ms
        records["topic"] = self._topics_of(batch.columns)
        records["seq"] = np.repeat(batch.seqs, batch.counts)
        records["wheel"] = self._wheels.add(batch.wheel)

    def _with_key(self, records: Records, key: MessageKey) -> NDArray[np.bool_]:
        """Which of the records are this message."""
        low, high = np.frombuffer(key.id, "<u8")
        same: NDArray[np.bool_] = records["due_ms"] == key.due_ms
        same &= (records["id_low"] == low) & (records["id_high"] == high)
        same &= records["topic"] == self._topic_numbers.get(key.topic, -1)
        return same


def _by_mix(rows: Records, more: list[Records]) -> Records:
    """Returns these rows with others, ascending by mix."""
    if not more:
        return rows
    joined = np.concatenate([rows, *more])
    ordered: Records = joined.take(np.argsort(joined["mix"]))
    return ordered


def _pairs(naming: Records, records: Records) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Returns pairs (number of a message, place of a row that names it); `naming` is by mix."""
    mixes = naming["mix"]
    first = mixes.searchsorted(records["mix"])
    end = mixes.searchsorted(records["mix"], side="right")
    numbers, places = spread_ranges(first, end)
    rows, named = naming.take(places), records.take(numbers)
    same = np.ones(len(numbers), np.bool_)
    for name in KEY:
        same &= rows[name] == named[name]
    return numbers[same], places[same]


def _named_by(naming: Records, records: Records, bounds: Bounds) -> NDArray[np.intp]:
    """Returns the numbers of messages that one of these rows with seq <= V' names."""
    numbers, places = _pairs(naming, records)
    rows = naming.take(places)
    counting: NDArray[np.intp] = numbers[rows["seq"] <= bounds.seqs_after[rows["wheel"]]]
    return counting


def _set_mixes(records: Records) -> None:
    records["mix"] = mix_keys(
        records["due_ms"].copy(),
        records["id_low"].copy(),
        records["id_high"].copy(),
        records["topic"],
    )
