"""A step's messages for the producer: columns, turned into objects one by one.

A second holds its messages as records of one numpy type (`RECORD`); the blobs stay where they were
read. A step's rows are a copy of some of those records; only iterating over them, at the produce
call, makes Python objects and copies keys and values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from delaywheel.headers import decode_headers
from delaywheel.identity import WheelId
from delaywheel.storage.frames.columns import Blob

STICKY_PARTITIONS = 2
"""So many partitions of a topic the client gives messages without a key that come together: it
changes to another one after `sticky.partitioning.linger.ms`."""

_UNKNOWN = 1 << 62

ABSENT = -1
"""Length of a null key or value, partition or timestamp that the caller left out."""

# `id_low` and `id_high` are the same 16 bytes as `id`, for arithmetic. `ttl`: it may have such a
# header. `half`: a `HalfState`. `released`: the seq of the first release that counts for it; 0: no
# release does. `early_ms`: how long before its due such a release was accepted.
RECORD = np.dtype(
    {
        "names": [
            "due_ms", "id", "id_low", "id_high", "mix", "seq", "accepted_at_ms", "start",
            "timestamp_ms", "row", "wheel", "blob", "topic", "key_length", "value_length",
            "headers_length", "partition", "suspect", "ahead", "ttl", "half", "early_ms",
            "released",
        ],
        "formats": [
            "<i8", "V16", "<u8", "<u8", "<u8", "<i8", "<i8", "<i8",
            "<i8", "<i4", "<i4", "<i4", "<i4", "<i4", "<i4",
            "<i4", "<i4", "?", "?", "?", "u1", "<i4", "<i8",
        ],
        "offsets": [
            0, 8, 8, 16, 24, 32, 40, 48,
            56, 64, 68, 72, 76, 80, 84,
            88, 92, 96, 97, 98, 99, 100, 104,
        ],
        "itemsize": 112,
    }
)  # fmt: skip

AS_BYTES = np.dtype(f"V{RECORD.itemsize}")
"""To copy records: field by field, numpy takes twenty times as long."""

Records: TypeAlias = NDArray[np.void]

_READ_BY_ONE = ("due_ms", "id", "accepted_at_ms", "wheel", "seq", "row")
_READ_OF_DROPPED = ("due_ms", "id", "seq", "accepted_at_ms", "row", "wheel", "topic")


Content: TypeAlias = tuple[
    str, bytes | None, bytes | None, list[tuple[str, bytes | None]], int, int
]
"""Topic, key, value, headers, partition (or ABSENT), timestamp in Unix milliseconds (or ABSENT)."""


@dataclass(frozen=True, slots=True)
class Direct:
    """An ingress partition: stands in for the wheel of a message that was in no wheel."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


MessageSource: TypeAlias = WheelId | Direct
"""Where a message comes from; it has its seq there. In an ingress partition that is its offset."""


class DueMessage(NamedTuple):
    """One message to forward, as it was accepted."""

    topic: str
    partition: int  # ABSENT: left to the partitioner
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    timestamp_ms: int  # ABSENT: the time of forwarding
    due_ms: int
    id: bytes
    accepted_at_ms: int
    wheel: MessageSource
    seq: int
    row: int


@dataclass(frozen=True, slots=True)
class DueRows:
    """Messages of a step, in order of due, wheel, seq and row; late and released ones first."""

    records: Records
    topics: Sequence[str]
    """Topic names; `topic_numbers` index them. May hold more names than these rows use."""
    wheels: Sequence[MessageSource]
    blobs: Sequence[Blob]

    def __len__(self) -> int:
        return len(self.records)

    @property
    def length_bytes(self) -> int:
        """The total length of keys, values and headers."""
        return int(self.lengths_bytes.sum())

    @property
    def lengths_bytes(self) -> NDArray[np.int64]:
        """The length of key, value and headers of each row."""
        return record_lengths_bytes(self.records)

    @property
    def topic_numbers(self) -> NDArray[np.int32]:
        """The index in `topics` of each row's topic."""
        return self.records["topic"]

    @property
    def partitions(self) -> NDArray[np.int32]:
        """The requested partition of each row, or ABSENT."""
        return self.records["partition"]

    @property
    def dues_ms(self) -> NDArray[np.int64]:
        """The due of each row."""
        return self.records["due_ms"]

    @property
    def expected_ms(self) -> NDArray[np.int64]:
        """When each row is to arrive: at its due; a half that a release lets go, at its commit."""
        expected: NDArray[np.int64] = self.records["due_ms"] - self.records["early_ms"]
        return expected

    def topic_names(self) -> set[str]:
        """The topics that these rows go to."""
        if not len(self.records):
            return set()
        return {self.topics[number] for number in np.unique(self.topic_numbers).tolist()}

    def partitions_touched(self, most: Mapping[str, int]) -> tuple[int, int, int]:
        """Returns how many partitions all rows may go to, half of them, and a quarter.

        Those are drawn at random, always the same: topics may follow any pattern. Of a topic that
        `most` does not give a number for, each row may go to another partition.
        """
        topics, of_topic = np.unique(self.topic_numbers, return_inverse=True)
        counts = np.array([most.get(self.topics[n], _UNKNOWN) for n in topics.tolist()], np.int64)
        has_no_key = self.records["key_length"] <= 0  # an empty one always goes to the same
        given = np.where(self.partitions >= 0, self.partitions + 2, np.where(has_no_key, 1, 0))
        places, rows = np.unique(of_topic << 32 | given, return_inverse=True)
        kind = places & 0xFFFF_FFFF
        bounds = np.minimum(
            counts[places >> 32], np.array([_UNKNOWN, STICKY_PARTITIONS, 1])[np.minimum(kind, 2)]
        )
        drawn = np.random.default_rng(0).random(len(rows))
        drawn[:1] = 0  # a quarter of few is not none
        all_, half, quarter = (
            int(np.minimum(np.bincount(rows[drawn < part], minlength=len(places)), bounds).sum())
            for part in (1, 1 / 2, 1 / 4)
        )
        return all_, half, quarter

    def take(self, rows: slice | NDArray[np.intp] | NDArray[np.bool_]) -> DueRows:
        """Returns some of the rows, for instance one half, or those of one topic."""
        return DueRows(self.records[rows], self.topics, self.wheels, self.blobs)

    def of_topics(self, names: Collection[str]) -> DueRows:
        """Returns those of the rows that go to these topics."""
        numbers = [number for number, topic in enumerate(self.topics) if topic in names]
        return self.take(np.isin(self.topic_numbers, numbers))

    def contents(self) -> Iterator[Content]:
        """Yields a copy of what is sent to Kafka for each message."""
        records = self.records
        starts, key_lengths, value_lengths = (
            records[name] for name in ("start", "key_length", "value_length")
        )
        values_at = starts + np.maximum(key_lengths, 0)
        headers_at = values_at + np.maximum(value_lengths, 0)
        columns = (
            records["topic"], records["blob"], starts, key_lengths, values_at, value_lengths,
            headers_at, headers_at + records["headers_length"], records["partition"],
            records["timestamp_ms"],
        )  # fmt: skip
        topics, blobs = self.topics, self.blobs
        for (
            topic, blob, start, key_length, value_at, value_length, header_at, end, partition,
            timestamp_ms,
        ) in zip(*[column.tolist() for column in columns], strict=True):  # fmt: skip
            content = blobs[blob]
            yield (
                topics[topic],
                None if key_length < 0 else bytes(content[start:value_at]),
                None if value_length < 0 else bytes(content[value_at:header_at]),
                decode_headers(bytes(content[header_at:end])) if end > header_at else [],
                partition,
                timestamp_ms,
            )

    def headers(self) -> Iterator[list[tuple[str, bytes | None]]]:
        """Copies the headers of each message."""
        records, blobs = self.records, self.blobs
        begins = records["start"] + np.maximum(records["key_length"], 0)
        begins += np.maximum(records["value_length"], 0)
        ends = begins + records["headers_length"]
        columns = (records["blob"], begins, ends)
        for blob, begin, end in zip(*[column.tolist() for column in columns], strict=True):
            yield decode_headers(bytes(blobs[blob][begin:end]))

    def keys(self) -> Iterator[bytes | None]:
        """Copies the key of each message."""
        records = self.records
        columns = (records["blob"], records["start"], records["key_length"])
        for blob, start, length in zip(*[column.tolist() for column in columns], strict=True):
            yield None if length < 0 else bytes(self.blobs[blob][start : start + length])

    def __iter__(self) -> Iterator[DueMessage]:
        if not len(self.records):
            return
        others = self.records[list(_READ_BY_ONE)].tolist()
        for content, (due_ms, id_, accepted_at_ms, wheel, seq, row) in zip(
            self.contents(), others, strict=True
        ):
            topic, key, value, headers, partition, timestamp_ms = content
            yield DueMessage(
                topic, partition, key, value, headers, timestamp_ms, due_ms, id_,
                accepted_at_ms, self.wheels[wheel], seq, row,
            )  # fmt: skip


NO_DUE_ROWS: Final = DueRows(np.zeros(0, RECORD), (), (), [])


class HalfState(IntEnum):
    """Whether a message is a half, see core/leader/halves.py, and what is sent of it."""

    NONE = 0
    """It is no half."""
    HALF = 1
    """It is one, as it was accepted."""
    PASSED_ON = 2
    """What is sent goes to the ingress topic: the message is due later."""
    DEFERRED = 3
    """The same, of any message, as its topic takes nothing now. Its last header says when it was
    due at first."""


class MessageOutcome(IntEnum):
    """Why a finished message was not forwarded."""

    CANCELLED = 1
    DUPLICATE = 2
    ASKED = 3
    """It is a half that nobody committed: its group is asked."""


_OUTCOMES = {outcome.value: outcome for outcome in MessageOutcome}


class Dropped(NamedTuple):
    """One message that a step takes without forwarding it."""

    outcome: MessageOutcome
    content_differs: bool
    """A duplicate whose bytes are not those of the message it repeats."""
    topic: str
    due_ms: int
    id: bytes
    accepted_at_ms: int
    wheel: MessageSource
    seq: int
    row: int


@dataclass(frozen=True, slots=True)
class DroppedRows:
    """Messages that a step takes without forwarding them; iterates as `Dropped`."""

    rows: DueRows
    outcomes: NDArray[np.uint8]
    content_differs: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def asked(self) -> DueRows:
        """The halves about which their groups are asked."""
        if not len(self.rows):
            return self.rows
        return self.rows.take(self.outcomes == MessageOutcome.ASKED)

    @property
    def others(self) -> DroppedRows:
        """All but these."""
        others = self.outcomes != MessageOutcome.ASKED
        return DroppedRows(
            self.rows.take(others), self.outcomes[others], self.content_differs[others]
        )

    def __iter__(self) -> Iterator[Dropped]:
        if not len(self.rows):
            return
        topics, wheels = self.rows.topics, self.rows.wheels
        records = self.rows.records[list(_READ_OF_DROPPED)].tolist()
        marks = zip(self.outcomes.tolist(), self.content_differs.tolist(), records, strict=True)
        for outcome, differs, (due_ms, id_, seq, accepted_at_ms, row, wheel, topic) in marks:
            yield Dropped(
                _OUTCOMES[outcome], differs, topics[topic], due_ms, id_, accepted_at_ms,
                wheels[wheel], seq, row,
            )  # fmt: skip


def record_lengths_bytes(records: Records) -> NDArray[np.int64]:
    """Returns the length of key, value and headers of each record; null counts as 0."""
    lengths: NDArray[np.int64] = np.maximum(records["key_length"], 0).astype(np.int64)
    lengths += np.maximum(records["value_length"], 0)
    lengths += records["headers_length"]
    return lengths


def join_rows(parts: Sequence[DueRows], wheels: Sequence[MessageSource]) -> DueRows:
    """Concatenates rows whose wheels have the same numbers."""
    if len(parts) == 1:
        return parts[0]
    records = np.empty(sum(len(part) for part in parts), RECORD)
    numbers: dict[str, int] = {}
    blobs: list[Blob] = []
    begin = 0
    for part in parts:
        end = begin + len(part)
        joined = records[begin:end]
        joined.view(AS_BYTES)[:] = part.records.view(AS_BYTES)
        renumbered = [numbers.setdefault(topic, len(numbers)) for topic in part.topics]
        joined["topic"] = np.array(renumbered, np.int32)[joined["topic"]]
        joined["blob"] += len(blobs)
        blobs += part.blobs
        begin = end
    return DueRows(records, tuple(numbers), wheels, blobs)
