"""One second's admitted messages and cancels, and the outcome of each.

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
is anything else                       forwarded
=====================================  ==========================================

This applies only to frames <= V', the V that the step leads to. What was done ahead of w
(core/protocol/progress.py) was taken in an earlier step, though it is due only later: no step takes
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from delaywheel.headers import rows_that_may_have
from delaywheel.storage.frames.columns import Blob, Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.decoding import FrameBatch
from delaywheel.ttl import LONGEST_TTL_VALUE_BYTES
from delaywheel_replica.cleaner.due.duplicates import (
    contents_differ,
    first_of_equals,
    mix_keys,
    spread_ranges,
)
from delaywheel_replica.cleaner.due.rows import AS_BYTES, RECORD, DueRows, MessageOutcome, Records
from delaywheel_replica.cleaner.due.runs import Runs, WheelNumbers
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
_KEY = ("due_ms", "id_low", "id_high")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The two states between which a step lies; arrays by wheel number."""

    due_ms: int  # w before the step
    seqs_before: NDArray[np.int64]  # V before
    seqs_after: NDArray[np.int64]  # V after
    ahead: Sequence[Done] = ()  # done ahead of w before
    withdrawn: frozenset[MessageKey] = frozenset()  # whatever frames say


class Second:
    """The admitted messages and cancels of one slot."""

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
        self._cancels: Records = np.empty(0, RECORD)  # key, mix, wheel, seq; ascending by mix
        self._topics: list[str] = []
        self._topic_numbers: dict[str, int] = {}
        self._blobs: list[Blob] = []

    def __len__(self) -> int:
        return self._count

    @property
    def topics(self) -> Sequence[str]:
        """The topics of all its messages."""
        return self._topics

    def add(self, batches: Iterable[FrameBatch]) -> None:
        """Adds frames of this slot, in order of wheel and seq, each kind separately."""
        begin = self._count
        cancels = []
        for batch in batches:
            if batch.kind is Kind.CANCELS:
                cancels.append(batch)
            elif batch.kind is Kind.MESSAGES:
                self._append(batch)
        if self._count > begin:
            records = self._records[: self._count]
            _set_mixes(records[begin:])
            records["ahead"][begin:] = self._were_done_ahead(records[begin:], self._ahead)
            self._runs.add(records, begin)
        if cancels:
            self._add_cancels(cancels)

    def due(
        self, after_ms: int, position: Position | None, upto_ms: int, limit: int
    ) -> NDArray[np.intp]:
        """Returns the first `limit` rows beyond a progress and due by `upto_ms`, in order."""
        return self._runs.after(self._records[: self._count], after_ms, position, upto_ms, limit)

    def due_between(self, begin: int, end: int, upto_ms: int) -> NDArray[np.intp]:
        """Returns those of the rows [begin, end) that are due by `upto_ms`."""
        due: NDArray[np.intp] = np.flatnonzero(self._records["due_ms"][begin:end] <= upto_ms)
        return due + begin

    def next_due_ms(self, after_ms: int) -> int | None:
        """Returns the earliest due beyond `after_ms`."""
        return self._runs.next_due_ms(after_ms)

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
        if len(self._cancels):
            outcomes[self._cancelled(records, bounds)] = MessageOutcome.CANCELLED
        for id_, due_ms in bounds.withdrawn:
            if due_ms // 1000 == self.slot:
                outcomes[_with_key(records, id_, due_ms)] = MessageOutcome.CANCELLED
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

    def has(self, id_: bytes, due_ms: int, seqs: NDArray[np.int64]) -> bool:
        """Whether a copy of this message lies in a frame up to these seqs, by wheel number."""
        records = self._records[: self._count]
        found = records[_with_key(records, id_, due_ms)]
        return bool((found["seq"] <= seqs[found["wheel"]]).any())

    def _originals(self, rows: NDArray[np.intp], bounds: Bounds) -> NDArray[np.intp]:
        """Returns, for each row, the one that represents its key among frames <= V'."""
        members = self._runs.with_mixes(self._records["mix"][rows])
        records = self.records(members)
        inside = records["seq"] <= bounds.seqs_after[records["wheel"]]
        members, records = members[inside], records[inside]
        taken = records["seq"] <= bounds.seqs_before[records["wheel"]]
        taken &= records["due_ms"] <= bounds.due_ms
        ahead = self._were_done_ahead(records, bounds.ahead)
        ranks = np.empty(len(members), np.intp)
        ranks[self._wheels.sort(records, ~taken, ~ahead)] = np.arange(len(members))
        originals: NDArray[np.intp] = members[first_of_equals(records, ranks)]
        chosen: NDArray[np.intp] = originals[members.searchsorted(rows)]
        return chosen

    def _cancelled(self, records: Records, bounds: Bounds) -> NDArray[np.intp]:
        """Marks messages that a cancel with seq <= V' names."""
        mixes = self._cancels["mix"]
        first = mixes.searchsorted(records["mix"])
        end = mixes.searchsorted(records["mix"], side="right")
        numbers, places = spread_ranges(first, end)
        cancels, named = self._cancels.take(places), records.take(numbers)
        counts = cancels["seq"] <= bounds.seqs_after[cancels["wheel"]]
        for name in _KEY:
            counts &= cancels[name] == named[name]
        cancelled: NDArray[np.intp] = numbers[counts]
        return cancelled

    def _were_done_ahead(self, records: Records, ahead: Sequence[Done]) -> NDArray[np.bool_]:
        """Marks messages that were done ahead of w."""
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
        records = self._room(len(columns))
        self._set_keys(records, batch)
        records["accepted_at_ms"] = np.repeat(batch.accepted_at_ms, counts)
        records["row"] = np.arange(len(records)) - np.repeat(np.cumsum(counts) - counts, counts)
        records["blob"] = len(self._blobs)
        self._blobs.append(columns.blob)
        self.length_bytes += len(columns.blob) + _BATCH_BYTES + _ROW_BYTES * len(records)
        records["topic"] = self._topics_of(columns)
        records["ttl"] = bool(self._ttl_header) and rows_that_may_have(
            columns, self._ttl_header, LONGEST_TTL_VALUE_BYTES
        )
        for name, column in _TAKEN_OVER:
            records[name] = getattr(columns, column)

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
        """Returns this second's number of each message's topic."""
        numbers = []
        for topic in columns.topics:
            number = self._topic_numbers.setdefault(topic, len(self._topics))
            if number == len(self._topics):
                self._topics.append(topic)
            numbers.append(number)
        topics: NDArray[np.int32] = np.array(numbers, np.int32)[columns.topic_numbers]
        return topics

    def _add_cancels(self, batches: list[FrameBatch]) -> None:
        parts = [self._cancels]
        for batch in batches:
            added = np.zeros(len(batch.columns), RECORD)
            self._set_keys(added, batch)
            _set_mixes(added)
            self.length_bytes += _ROW_BYTES * len(added)
            parts.append(added)
        joined = np.concatenate(parts)
        self._cancels = joined.take(np.argsort(joined["mix"]))

    def _set_keys(self, records: Records, batch: FrameBatch) -> None:
        halves = batch.columns.ids.view("<u8")
        records["id_low"] = halves[:, 0]
        records["id_high"] = halves[:, 1]
        records["due_ms"] = batch.columns.due_ms
        records["seq"] = np.repeat(batch.seqs, batch.counts)
        records["wheel"] = self._wheels.add(batch.wheel)


def _with_key(records: Records, id_: bytes, due_ms: int) -> NDArray[np.bool_]:
    """Which of the messages have this id and due."""
    low, high = np.frombuffer(id_, "<u8")
    same: NDArray[np.bool_] = records["due_ms"] == due_ms
    same &= (records["id_low"] == low) & (records["id_high"] == high)
    return same


def _set_mixes(records: Records) -> None:
    records["mix"] = mix_keys(
        records["due_ms"].copy(), records["id_low"].copy(), records["id_high"].copy()
    )
