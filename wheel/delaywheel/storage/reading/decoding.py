"""Decodes frames of one slot together into columns over all their messages.

It accepts exactly what `format.decode_frame` accepts, as a test checks. A numpy call costs as much
for a thousand frames as for one; only checksums and the lookups of topics' dictionaries are done
for each frame. If any frame is not as expected, all are decoded one by one, which shows what is
wrong, and with which.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.frames.checking import has_wrong_sums, headers_at, is_misplaced
from delaywheel.storage.frames.columns import ID_LENGTH_BYTES, Columns
from delaywheel.storage.frames.format import (
    CHECKED_FROM,
    HAS_PARTITIONS,
    HAS_TIMESTAMPS,
    HEADER_LENGTH_BYTES,
    PARTITION_BYTES,
    TIMESTAMP_BYTES,
    Frame,
    FrameDamaged,
    decode_topics,
)
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import Places, flawed_rows, kinds_of

_ID_WORDS: Final = np.arange(ID_LENGTH_BYTES // 8)
_LENGTHS: Final = 3  # of key, value and headers


@dataclass(frozen=True, slots=True, eq=False)
class FrameBatch:
    """Frames of one wheel, slot and kind, in order of seqs.

    Attributes:
        counts: How many of the rows belong to each frame.
        columns: The rows of all frames, frame after frame.
    """

    kind: Kind
    wheel: WheelId
    slot: int
    seqs: NDArray[np.int64]
    accepted_at_ms: NDArray[np.int64]
    counts: NDArray[np.int64]
    lengths_bytes: NDArray[np.int64]
    columns: Columns

    @classmethod
    def of(cls, frame: Frame) -> Self:
        """Builds a batch of one frame."""
        return cls(
            frame.kind,
            frame.wheel,
            frame.slot,
            np.array([frame.seq], np.int64),
            np.array([frame.accepted_at_ms], np.int64),
            np.array([len(frame.columns)], np.int64),
            np.array([frame.length_bytes], np.int64),
            frame.columns,
        )

    def __len__(self) -> int:
        return len(self.seqs)

    def ids(self) -> "IdBatch":
        """Returns what identifies the rows; views on this batch."""
        return IdBatch(
            self.wheel,
            np.repeat(self.seqs, self.counts),
            _numbers_within(self.counts),
            np.full(len(self.columns), int(self.kind), np.uint8),
            self.columns.ids,
            self.columns.due_ms,
            self.columns.topics,
            self.columns.topic_numbers,
        )

    def frames_with(self, rows: NDArray[np.intp]) -> Iterator[tuple[Frame, list[int]]]:
        """Yields the frames of some rows, ascending, each with these rows as numbers within it."""
        ends = np.cumsum(self.counts)
        numbers = ends.searchsorted(rows, side="right")
        for number in np.unique(numbers).tolist():
            begin = int(ends[number] - self.counts[number])
            within = np.arange(begin, int(ends[number]))
            frame = Frame(
                self.kind,
                self.wheel,
                self.slot,
                int(self.seqs[number]),
                int(self.accepted_at_ms[number]),
                int(self.lengths_bytes[number]),
                self.columns.take(within),
            )
            yield frame, (rows[numbers == number] - begin).tolist()

    def take(self, chosen: NDArray[np.bool_]) -> Self:
        """Returns some of the frames, with only their own bytes."""
        if chosen.all():
            return self
        return type(self)(
            self.kind,
            self.wheel,
            self.slot,
            self.seqs[chosen],
            self.accepted_at_ms[chosen],
            self.counts[chosen],
            self.lengths_bytes[chosen],
            self.columns.take(np.flatnonzero(np.repeat(chosen, self.counts))),
        )


@dataclass(frozen=True, slots=True, eq=False)
class IdBatch:
    """What identifies the rows of some frames, of one wheel, and of any seconds and kinds.

    Attributes:
        seqs: The seq of each row's frame.
        rows: Each row's number in its frame.
        kinds: The `Kind` of each.
        ids: (n, 16).
        topic_numbers: Which of the topics is each row's.
    """

    wheel: WheelId
    seqs: NDArray[np.int64]
    rows: NDArray[np.int64]
    kinds: NDArray[np.uint8]
    ids: NDArray[np.uint8]
    due_ms: NDArray[np.int64]
    topics: tuple[str, ...]
    topic_numbers: NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class PassedOver:
    """Frames that were checked, but not decoded: what is sought is not among their bytes.

    Of the messages `last_messages` are in the last frame.
    """

    wheel: WheelId
    seqs: list[int]
    messages: int
    last_messages: int
    length_bytes: int


def decode_together(
    content: bytes,
    begin: int,
    places: Places,
    *,
    wheel: WheelId,
    slot: int,
    kind: Kind,
    may_hold: Callable[[bytes], bool] | None = None,
) -> FrameBatch | PassedOver | None:
    """Decodes frames of one kind; None unless all of them match their rows.

    The content of the batch are views on ``content``: no byte of it is copied.

    Args:
        content: The bytes of a slot file from `begin` on.
        places: Seqs and rows of the frames, ascending; at least one.
        may_hold: Whether what is sought may be among these bytes; None: decode them anyway.
    """
    seqs, rows = places
    begins = rows["offset"].astype(np.int64) - begin
    headers = _checked_headers(content, begins, places, wheel, slot, int(kind))
    if headers is None:
        return None
    if may_hold is not None and not may_hold(content):
        messages = headers["messages"]
        length_bytes = int(rows["length"].sum(dtype=np.int64))
        return PassedOver(
            wheel, seqs.tolist(), int(messages.sum()), int(messages[-1]), length_bytes
        )
    frames = _Frames(content, begins, headers)
    columns = frames.messages() if kind is Kind.MESSAGES else frames.names()
    if columns is None:
        return None
    return FrameBatch(
        kind,
        wheel,
        slot,
        seqs,
        headers["accepted_at_ms"].copy(),
        frames.counts,
        rows["length"].astype(np.int64),
        columns,
    )


def decode_ids(
    content: bytes, begins: NDArray[np.int64], places: Places, wheel: WheelId
) -> IdBatch | None:
    """Decodes only what identifies rows; None unless all frames match their index rows.

    Args:
        content: The bytes of frames, of any seconds and kinds.
        begins: Where each frame begins in it; multiples of 8.
        places: Seqs and rows of the frames; at least one.
    """
    seqs, rows = places
    kinds = kinds_of(rows)
    headers = _checked_headers(content, begins, places, wheel, rows["slot"], kinds)
    if headers is None:
        return None
    frames = _Frames(content, begins, headers)
    names = frames.names()
    if names is None:
        return None
    return IdBatch(
        wheel,
        np.repeat(seqs, frames.counts),
        _numbers_within(frames.counts),
        np.repeat(kinds, frames.counts),
        names.ids,
        names.due_ms,
        names.topics,
        names.topic_numbers,
    )


def _checked_headers(
    content: bytes,
    begins: NDArray[np.int64],
    places: Places,
    wheel: WheelId,
    slot: int | NDArray[Any],
    kind: int | NDArray[Any],
) -> NDArray[Any] | None:
    """Returns the headers of frames with the right checksums; None unless all match their rows.

    Slot and kind are those of all frames, or of each.
    """
    seqs, rows = places
    ends = begins + rows["length"]
    if (
        int(ends.max()) > len(content)
        or int(begins.min()) < 0
        or np.count_nonzero((begins | ends) & 7)
    ):
        return None
    if np.count_nonzero((rows["length"] < HEADER_LENGTH_BYTES) | flawed_rows(rows)):
        return None
    headers = headers_at(content, begins)
    wrong = is_misplaced(headers, wheel, rows, seqs) | has_wrong_sums(headers)
    if np.count_nonzero(wrong | (headers["slot"] != slot) | (headers["kind"] != kind)):
        return None
    view = memoryview(content)
    edges = zip((begins + CHECKED_FROM).tolist(), ends.tolist(), strict=True)
    checksums = [crc32c(view[first:end]) for first, end in edges]
    if headers["checksum"].tolist() != checksums:
        return None
    return headers


class _Frames:
    """Frames with valid headers and checksums, and where their columns lie.

    Columns are aligned to the length of their items: each is gathered from one view on all bytes.
    """

    def __init__(self, content: bytes, begins: NDArray[np.int64], headers: NDArray[Any]) -> None:
        self._content = content
        self._headers = headers
        self.counts = headers["messages"].astype(np.int64)
        self._rows = int(self.counts.sum())
        self._within = _numbers_within(self.counts)
        self._slots_ms = headers["slot"].astype(np.int64) * 1000
        # Which columns frames have, and where each begins.
        self._has_timestamps = (headers["flags"] & HAS_TIMESTAMPS) != 0
        self._has_partitions = (headers["flags"] & HAS_PARTITIONS) != 0
        self._timestamps_at = begins + HEADER_LENGTH_BYTES
        timestamps_bytes = self._has_timestamps * self.counts * TIMESTAMP_BYTES
        self._ids_at = self._timestamps_at + timestamps_bytes
        self._numbers_at = self._ids_at + self.counts * ID_LENGTH_BYTES
        lengths = np.where(headers["kind"] == int(Kind.MESSAGES), _LENGTHS, 0)
        self._partitions_at = self._numbers_at + self.counts * 4 * (1 + lengths)
        partitions_bytes = self._has_partitions * self.counts * PARTITION_BYTES
        self._dues_at = self._partitions_at + partitions_bytes
        self._topics_at = begins + HEADER_LENGTH_BYTES + headers["columns_length"]

    def names(self) -> Columns | None:
        """Returns what identifies the rows of frames of all kinds; None as `messages`."""
        topics = self._topics()
        return None if topics is None else Columns.of_names(self._dues_ms(), self._ids(), *topics)

    def messages(self) -> Columns | None:
        """Returns the columns of frames of messages; None if lengths or numbers do not add up."""
        lengths = [
            self._column("<i4", self._numbers_at + self.counts * 4 * place)
            for place in range(1, 1 + _LENGTHS)
        ]
        starts = self._starts(lengths, self._topics_at + self._headers["topics_length"])
        topics = self._topics()
        if starts is None or topics is None:
            return None
        return Columns(
            due_ms=self._dues_ms(),
            ids=self._ids(),
            topics=topics[0],
            topic_numbers=topics[1],
            key_lengths=lengths[0],
            value_lengths=lengths[1],
            headers_lengths=lengths[2],
            partitions=self._sparse_column("<i4", self._partitions_at, self._has_partitions),
            timestamps_ms=self._sparse_column("<i8", self._timestamps_at, self._has_timestamps),
            blob=self._content,
            starts=starts,
        )

    def _column(self, item: str, at: NDArray[np.int64]) -> NDArray[Any]:
        """Returns the column that begins at these places, one item for each row."""
        return self._items(item).take(self._places(item, at))

    def _sparse_column(
        self, item: str, at: NDArray[np.int64], has: NDArray[np.bool_]
    ) -> NDArray[Any]:
        """Returns an optional column, with -1 for frames without it."""
        column = np.full(self._rows, -1, np.dtype(item))
        if has.any():
            chosen = np.repeat(has, self.counts)
            column[chosen] = self._items(item).take(self._places(item, at)[chosen])
        return column

    def _items(self, item: str) -> NDArray[Any]:
        dtype = np.dtype(item)
        return np.frombuffer(self._content, dtype, len(self._content) // dtype.itemsize)

    def _places(self, item: str, at: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.repeat(at // np.dtype(item).itemsize, self.counts) + self._within

    def _ids(self) -> NDArray[np.uint8]:
        first = np.repeat(self._ids_at // 8, self.counts) + len(_ID_WORDS) * self._within
        ids = self._items("<u8").take(first[:, np.newaxis] + _ID_WORDS)
        return ids.view(np.uint8).reshape(self._rows, ID_LENGTH_BYTES)

    def _dues_ms(self) -> NDArray[np.int64]:
        return self._column("<u2", self._dues_at) + np.repeat(self._slots_ms, self.counts)

    def _starts(
        self, lengths: Sequence[NDArray[np.int32]], blobs_at: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        """Returns where each message's bytes start; None if a frame's blob has the wrong length."""
        ends = np.cumsum(sum(np.maximum(part, 0).astype(np.int64) for part in lengths))
        starts = np.zeros(self._rows + 1, np.int64)
        starts[1:] = ends
        edges = starts[np.concatenate(([0], np.cumsum(self.counts)))]
        if (np.diff(edges) != self._headers["blob_length"]).any():
            return None
        return starts[:-1] + np.repeat(blobs_at - edges[:-1], self.counts)

    def _topics(self) -> tuple[tuple[str, ...], NDArray[np.uint32]] | None:
        """Returns all topics and each row's number; None if a frame's dictionary is invalid."""
        numbers = self._column("<u4", self._numbers_at)
        blobs_at = self._topics_at + self._headers["topics_length"]
        known: dict[bytes, int] = {}
        edges = zip(self._topics_at.tolist(), blobs_at.tolist(), strict=True)
        content = self._content
        which = [known.setdefault(content[begin:end], len(known)) for begin, end in edges]
        try:
            parts = [decode_topics(dictionary) for dictionary in known]
        except FrameDamaged:
            return None
        named = np.array([len(part) for part in parts])[which]
        if (named != self._headers["topics"]).any():
            return None
        if (numbers >= np.repeat(named, self.counts)).any():
            return None
        if len(parts) == 1:
            return parts[0], numbers
        firsts = np.cumsum([0, *(len(part) for part in parts[:-1])])[which]
        shifted = numbers + np.repeat(firsts, self.counts)
        return tuple(topic for part in parts for topic in part), shifted.astype(np.uint32)


def _numbers_within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the number of each row in its frame, frame after frame."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
