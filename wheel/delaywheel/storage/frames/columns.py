"""Messages as columns: the form of decoded requests, of frames, and of what is forwarded.

Row i of every column is message i. All bytes lie in one blob; those of message i begin at
``starts[i]`` as key, value, headers without gaps. There may be other bytes between messages, so
views on a mapped slot file need no copy.

=================  =======================================================
column             meaning
=================  =======================================================
due_ms             Unix milliseconds UTC; ``due_ms // 1000`` is the slot
ids                16 raw bytes a message
topic_numbers      index into ``topics``
key_lengths        bytes; -1 = null, 0 = empty
value_lengths      bytes; -1 = null, 0 = empty
headers_lengths    bytes of the encoded headers; 0 = none (see headers.py)
partitions         -1 = none asked for
timestamps_ms      the Kafka record's timestamp; -1 = none asked for
=================  =======================================================
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from delaywheel.headers import decode_headers

Blob: TypeAlias = bytes | bytearray | memoryview

ID_LENGTH_BYTES = 16

_Item = TypeVar("_Item", bound=np.generic)


def content_starts(lengths_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns where each message begins when messages of these lengths are concatenated."""
    ends = np.cumsum(lengths_bytes, dtype=np.int64)
    ends -= lengths_bytes
    return ends


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Messages of any slots, as one array for each property."""

    due_ms: NDArray[np.int64]
    ids: NDArray[np.uint8]  # (n, 16)
    topics: tuple[str, ...]
    topic_numbers: NDArray[np.uint32]
    key_lengths: NDArray[np.int32]
    value_lengths: NDArray[np.int32]
    headers_lengths: NDArray[np.int32]
    partitions: NDArray[np.int32]
    timestamps_ms: NDArray[np.int64]
    blob: Blob
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.due_ms)

    @classmethod
    def of_names(
        cls,
        due_ms: NDArray[np.int64],
        ids: NDArray[np.uint8],
        topics: tuple[str, ...],
        topic_numbers: NDArray[np.uint32],
    ) -> Self:
        """Builds columns that only identify messages: no content."""
        rows = len(due_ms)
        null = np.full(rows, -1, dtype=np.int32)
        return cls(
            due_ms=due_ms,
            ids=ids,
            topics=topics,
            topic_numbers=topic_numbers,
            key_lengths=null,
            value_lengths=null,
            headers_lengths=np.zeros(rows, dtype=np.int32),
            partitions=null,
            timestamps_ms=np.full(rows, -1, dtype=np.int64),
            blob=b"",
            starts=np.zeros(rows, dtype=np.int64),
        )

    @property
    def slots(self) -> NDArray[np.int64]:
        """The slot of each message."""
        return self.due_ms // 1000

    @property
    def lengths_bytes(self) -> NDArray[np.int64]:
        """The length of key, value and headers of each message together."""
        lengths = np.maximum(self.key_lengths, 0).astype(np.int64)
        lengths += np.maximum(self.value_lengths, 0)
        lengths += self.headers_lengths
        return lengths

    @staticmethod
    def concat(parts: "Sequence[Columns]") -> "Columns":
        """Concatenates ``parts``, with one dictionary of topics and one blob."""
        if len(parts) == 1:
            return parts[0]
        topics, topic_numbers = _merge_topics(parts)
        blobs, starts = _join_blobs(parts)
        return Columns(
            due_ms=_joined([part.due_ms for part in parts], np.int64),
            ids=np.concatenate(
                [np.empty((0, ID_LENGTH_BYTES), dtype=np.uint8), *(part.ids for part in parts)]
            ),
            topics=topics,
            topic_numbers=topic_numbers,
            key_lengths=_joined([part.key_lengths for part in parts], np.int32),
            value_lengths=_joined([part.value_lengths for part in parts], np.int32),
            headers_lengths=_joined([part.headers_lengths for part in parts], np.int32),
            partitions=_joined([part.partitions for part in parts], np.int32),
            timestamps_ms=_joined([part.timestamps_ms for part in parts], np.int64),
            blob=blobs,
            starts=starts,
        )

    def take(self, rows: NDArray[np.intp]) -> "Columns":
        """Returns the messages ``rows``, in that order, with a blob of their bytes alone."""
        blob, starts = self._gather(rows)
        return Columns(
            due_ms=self.due_ms[rows],
            ids=self.ids[rows],
            topics=self.topics,
            topic_numbers=self.topic_numbers[rows],
            key_lengths=self.key_lengths[rows],
            value_lengths=self.value_lengths[rows],
            headers_lengths=self.headers_lengths[rows],
            partitions=self.partitions[rows],
            timestamps_ms=self.timestamps_ms[rows],
            blob=blob,
            starts=starts,
        )

    def compacted(self) -> "Columns":
        """Returns the same messages without unused topics."""
        is_used = np.bincount(self.topic_numbers, minlength=len(self.topics)) > 0
        if is_used.all():
            return self
        numbers = (np.cumsum(is_used) - 1).astype(np.uint32)
        return replace(
            self,
            topics=tuple(compress(self.topics, is_used.tolist())),
            topic_numbers=numbers[self.topic_numbers],
        )

    def topic(self, row: int) -> str:
        """Returns the topic of one message."""
        return self.topics[int(self.topic_numbers[row])]

    def key(self, row: int) -> bytes | None:
        """Returns the key of one message; None for null."""
        length = int(self.key_lengths[row])
        return None if length < 0 else self._bytes(int(self.starts[row]), length)

    def value(self, row: int) -> bytes | None:
        """Returns the value of one message; None for null."""
        length = int(self.value_lengths[row])
        if length < 0:
            return None
        return self._bytes(int(self.starts[row]) + max(int(self.key_lengths[row]), 0), length)

    def headers(self, row: int) -> list[tuple[str, bytes | None]]:
        """Returns the headers of one message, in order, including duplicates."""
        return decode_headers(self.encoded_headers(row))

    def encoded_headers(self, row: int) -> bytes:
        """Returns the headers of one message as they lie here."""
        length = int(self.headers_lengths[row])
        if length == 0:
            return b""
        start = int(self.starts[row])
        start += max(int(self.key_lengths[row]), 0) + max(int(self.value_lengths[row]), 0)
        return self._bytes(start, length)

    def is_same(self, row: int, others: "Columns", other: int) -> bool:
        """Whether two messages have the same topic, partition, timestamp and contents."""
        return self._properties(row) == others._properties(other)  # noqa: SLF001

    def _properties(self, row: int) -> tuple[object, ...]:
        lengths = (self.key_lengths[row], self.value_lengths[row], self.headers_lengths[row])
        content = self._bytes(int(self.starts[row]), sum(max(int(length), 0) for length in lengths))
        numbers = (*lengths, self.partitions[row], self.timestamps_ms[row])
        return self.topic(row), *map(int, numbers), content

    def _bytes(self, start: int, length: int) -> bytes:
        return bytes(self.blob[start : start + length])

    def _gather(self, rows: NDArray[np.intp]) -> tuple[bytes, NDArray[np.int64]]:
        """Concatenates the bytes of ``rows``; adjacent ones are copied together."""
        lengths = self.lengths_bytes[rows]
        begins = self.starts[rows]
        ends = begins + lengths
        if not len(rows):
            return b"", begins
        is_new = np.empty(len(rows) + 1, bool)
        is_new[0] = is_new[-1] = True
        np.not_equal(begins[1:], ends[:-1], out=is_new[1:-1])
        firsts, lasts = begins[is_new[:-1]].tolist(), ends[is_new[1:]].tolist()
        view = memoryview(self.blob)
        pieces = [view[first:last] for first, last in zip(firsts, lasts, strict=True)]
        return b"".join(pieces), content_starts(lengths)


def _joined(arrays: Sequence[NDArray[_Item]], dtype: type[_Item]) -> NDArray[_Item]:
    return np.concatenate([np.empty(0, dtype=dtype), *arrays])


def _merge_topics(parts: Sequence[Columns]) -> tuple[tuple[str, ...], NDArray[np.uint32]]:
    numbers: dict[str, int] = {}
    renumbered = []
    for part in parts:
        table = np.array(
            [numbers.setdefault(topic, len(numbers)) for topic in part.topics], dtype=np.uint32
        )
        renumbered.append(table[part.topic_numbers] if len(table) else part.topic_numbers)
    return tuple(numbers), _joined(renumbered, np.uint32)


def _join_blobs(parts: Sequence[Columns]) -> tuple[bytes, NDArray[np.int64]]:
    begins = []
    length_bytes = 0
    for part in parts:
        begins.append(part.starts + length_bytes)
        length_bytes += len(part.blob)
    return b"".join([part.blob for part in parts]), _joined(begins, np.int64)
