"""Encodes a group of messages as the frames of one group commit, in one buffer.

What the bytes mean is in format.py and docs/FORMAT.md.

The group is sorted by slot, and the bytes of each column are cut into one piece per frame. The
pieces are put in order and joined once: no Python object is made per frame. Lengths and counts are
computed for all frames at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import Buffer
from delaywheel.storage.frames.columns import ID_LENGTH_BYTES, Columns
from delaywheel.storage.frames.format import (
    CHECKED_FROM,
    HAS_PARTITIONS,
    HAS_TIMESTAMPS,
    HEADER,
    HEADER_LENGTH_BYTES,
    LONGEST_ROW_BYTES,
    MAGIC_NUMBER,
    MESSAGE_ROW_BYTES,
    NAME_ROW_BYTES,
    NO_SLOT,
    PARTITION_BYTES,
    TIMESTAMP_BYTES,
    topic_entry,
)
from delaywheel.storage.frames.kinds import FIRST_VERSIONS, Kind
from delaywheel.storage.frames.rows import MOST_ROWS

_DUE_BYTES = 2
_ZEROS = [bytes(count) for count in range(8)]

FRAME_TOPICS: Final = 32
"""In a group of messages for more topics than this, each frame has at most so many of them.

A frame is in one transaction, which takes up to 8 ms for each partition on a busy broker.
"""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedGroup:
    """Frames ready to be written, ordered by slot.

    Attributes:
        counts: Each frame's number of rows.
        edges: Where each frame begins in `content`, and where the last one ends.
        order: The rows of the encoded columns, in the order in which the frames hold them.
    """

    kind: Kind
    slots: NDArray[np.int64]
    counts: NDArray[np.int64]
    edges: NDArray[np.int64]
    content: bytearray
    order: NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.slots)


def encode_group(
    columns: Columns,
    *,
    kind: Kind,
    wheel: WheelId,
    first_seq: int,
    accepted_at_ms: int,
    max_frame_messages: int,
    max_frame_bytes: int,
) -> EncodedGroup:
    """Encodes one group: one frame for each slot, or more if bounds require it.

    There is at least one message. Messages of one slot keep their order. Frames are ordered by slot
    and have seqs from ``first_seq`` on. A single message may exceed ``max_frame_bytes``: it then
    has a frame of its own. A frame of a group with many topics has few messages: what came late is
    forwarded frame by frame, each whole, and Kafka takes its time for each topic.

    Raises:
        ValueError: A due is before 1970 or after 2106, which the caller should have refused.
    """
    slots = columns.slots
    order = np.argsort(slots, kind="stable")
    if len(order) > 1:  # a single one is in order, wherever it lies in its blob
        columns, slots = columns.take(order), slots[order]
    if int(slots[0]) < 0 or int(slots[-1]) >= NO_SLOT:
        raise ValueError("a due that no slot file can hold")
    lengths = columns.lengths_bytes
    is_for_many = kind is Kind.MESSAGES and len(columns.topics) > FRAME_TOPICS
    firsts = _frame_firsts(
        slots,
        lengths + LONGEST_ROW_BYTES,
        max_messages=min(
            max_frame_messages,
            FRAME_TOPICS if is_for_many else MOST_ROWS[kind],
        ),
        max_bytes=max_frame_bytes,
    )
    frames = _FramePieces(columns, slots, lengths, firsts, kind)
    edges, content = frames.joined(
        wheel_hash=wheel.hash64, first_seq=first_seq, accepted_at_ms=accepted_at_ms
    )
    return EncodedGroup(kind, slots[firsts], frames.counts, edges, content, order)


def _frame_firsts(
    slots: NDArray[np.int64],
    lengths_bytes: NDArray[np.int64],
    *,
    max_messages: int,
    max_bytes: int,
) -> NDArray[np.int64]:
    """Returns the first row of each frame: one for each slot, split where it is too large.

    There is at least one row; slots ascend. A single row may exceed `max_bytes`.
    """
    rows = len(slots)
    begins = np.empty(rows, bool)
    begins[0] = True
    np.not_equal(slots[1:], slots[:-1], out=begins[1:])
    firsts = begins.nonzero()[0]
    if rows <= max_messages and int(lengths_bytes.sum()) <= max_bytes:
        return firsts
    lasts = np.append(firsts[1:], rows)
    ends = np.cumsum(lengths_bytes)
    before = ends[firsts] - lengths_bytes[firsts]
    too_much = (lasts - firsts > max_messages) | (ends[lasts - 1] - before > max_bytes)
    if not too_much.any():
        return firsts
    added = [firsts]
    for slot in np.flatnonzero(too_much).tolist():
        begin, last = int(firsts[slot]), int(lasts[slot])
        while begin < last:
            added.append(np.array([begin]))
            until = int(ends[begin] - lengths_bytes[begin]) + max_bytes
            fitting = int(np.searchsorted(ends, until, side="right"))
            begin = min(begin + max_messages, max(fitting, begin + 1))
    return np.unique(np.concatenate(added))


def _frame_topics(
    topics: int, topic_numbers: NDArray[np.uint32], counts: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]:
    """Makes each frame's dictionary from each row's topic, in the sorted group, of so many topics.

    `counts` is each frame's number of rows. Returns for each row the entry of its frame's
    dictionary that is its topic; the entries of all dictionaries, as topic numbers of the group;
    and where each frame's entries begin among these, and where the last ones end.
    """
    frames = len(counts)
    if topics <= 1:
        numbers, members = np.zeros(len(topic_numbers), np.uint32), np.zeros(frames * topics, int)
        return numbers, members, np.arange(frames + 1) * topics
    of_rows = np.repeat(np.arange(frames), counts)
    pairs, inverse = np.unique(of_rows * topics + topic_numbers, return_inverse=True)
    edges = np.searchsorted(pairs, np.arange(frames + 1) * topics)
    return (inverse - edges[of_rows]).astype(np.uint32), pairs % topics, edges


class _FramePieces:
    """The pieces of all frames of a sorted group: column by column, one for each frame."""

    def __init__(
        self,
        columns: Columns,
        slots: NDArray[np.int64],
        lengths: NDArray[np.int64],
        firsts: NDArray[np.int64],
        kind: Kind,
    ) -> None:
        self._columns = columns
        self._slots = slots
        self._lengths = lengths
        self._kind = kind
        self._firsts = firsts
        self._edges = [*firsts.tolist(), len(slots)]  # in rows
        lasts = np.array(self._edges[1:])
        self._lasts = lasts - 1
        self.counts = lasts - firsts
        self._pieces: list[Iterable[Buffer]] = []
        self._headers = np.zeros(len(firsts), HEADER)

    def joined(
        self, *, wheel_hash: int, first_seq: int, accepted_at_ms: int
    ) -> tuple[NDArray[np.int64], bytearray]:
        headers = self._headers
        self._add_columns()
        self._add_topics()
        self._add_content()
        headers["magic"] = MAGIC_NUMBER
        headers["version"] = FIRST_VERSIONS[self._kind]
        headers["kind"] = self._kind
        headers["slot"] = self._slots[self._firsts]
        headers["wheel_hash"] = wheel_hash
        headers["seq"] = np.arange(first_seq, first_seq + len(headers))
        headers["accepted_at_ms"] = accepted_at_ms
        headers["messages"] = self.counts
        raw = headers.tobytes()
        ends = range(HEADER_LENGTH_BYTES, len(raw) + 1, HEADER_LENGTH_BYTES)
        self._pieces.insert(0, [raw[end - HEADER_LENGTH_BYTES : end] for end in ends])
        edges = np.zeros(len(headers) + 1, np.int64)
        headers["length_bytes"].cumsum(out=edges[1:])
        kinds = len(self._pieces)
        parts: list[Buffer] = [b""] * (kinds * len(headers))
        for number, pieces in enumerate(self._pieces):  # frame by frame, as in the format
            parts[number::kinds] = pieces
        content = bytearray().join(parts)
        view, places = memoryview(content), edges.tolist()
        checksums = [crc32c(view[begin + CHECKED_FROM : end]) for begin, end in pairwise(places)]
        np.frombuffer(content, "<u4")[(edges[:-1] >> 2) + 1] = checksums
        return edges, content

    def _add_columns(self) -> None:
        columns, headers, counts = self._columns, self._headers, self.counts
        row_bytes: int | NDArray[np.int64] = NAME_ROW_BYTES
        has_partitions = None
        if self._kind is Kind.MESSAGES:
            row_bytes = MESSAGE_ROW_BYTES
            has_timestamps = self._frames_with(columns.timestamps_ms)
            has_partitions = self._frames_with(columns.partitions)
            if has_timestamps is not None:
                headers["flags"] = has_timestamps * HAS_TIMESTAMPS
                row_bytes = row_bytes + has_timestamps * TIMESTAMP_BYTES
                self._add(columns.timestamps_ms, "<i8", TIMESTAMP_BYTES, has_timestamps)
            if has_partitions is not None:
                headers["flags"] |= (has_partitions * HAS_PARTITIONS).astype(np.uint16)
                row_bytes = row_bytes + has_partitions * PARTITION_BYTES
        self._add(columns.ids, "u1", ID_LENGTH_BYTES)
        topics = _frame_topics(len(columns.topics), columns.topic_numbers, counts)
        numbers, self._members, self._topic_edges = topics
        self._add(numbers, "<u4", 4)
        if self._kind is Kind.MESSAGES:
            for lengths in (columns.key_lengths, columns.value_lengths, columns.headers_lengths):
                self._add(lengths, "<i4", 4)
            if has_partitions is not None:
                self._add(columns.partitions, "<i4", PARTITION_BYTES, has_partitions)
        self._add(columns.due_ms - self._slots * 1000, "<u2", _DUE_BYTES)
        length = counts * row_bytes
        padding = -length % 8
        self._pieces.append([_ZEROS[count] for count in padding.tolist()])
        headers["columns_length"] = length + padding

    def _frames_with(
        self, column: NDArray[np.int32] | NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        """Returns 1 for each frame in which a row has a value, else 0; None if no row has one."""
        given = column >= 0
        if not given.any():
            return None
        return np.logical_or.reduceat(given, self._firsts).astype(np.int64)

    def _add(
        self,
        column: NDArray[Any],
        dtype: str,
        item_bytes: int,
        present: NDArray[np.int64] | None = None,
    ) -> None:
        """Adds one column, skipping frames without it."""
        raw = column.astype(dtype, copy=False).tobytes()
        edges = [edge * item_bytes for edge in self._edges]
        pieces = [raw[begin:end] for begin, end in pairwise(edges)]
        if present is not None and not present.all():
            pieces = [p if has else b"" for p, has in zip(pieces, present.tolist(), strict=True)]
        self._pieces.append(pieces)

    def _add_topics(self) -> None:
        entries = [topic_entry(topic) for topic in self._columns.topics]
        members, edges = self._members.tolist(), self._topic_edges.tolist()
        if len(entries) == 1:
            dictionaries = entries * len(self.counts)
        else:
            dictionaries = [
                b"".join([entries[topic] for topic in members[begin:end]])
                for begin, end in pairwise(edges)
            ]
        self._pieces.append(dictionaries)
        self._headers["topics"] = np.diff(self._topic_edges)
        self._headers["topics_length"] = list(map(len, dictionaries))

    def _add_content(self) -> None:
        """Adds keys, values and headers, and padding to a multiple of 8 bytes."""
        headers, starts = self._headers, self._columns.starts
        begins, ends = starts[self._firsts], (starts + self._lengths)[self._lasts]
        blob = memoryview(self._columns.blob)
        edges = zip(begins.tolist(), ends.tolist(), strict=True)
        self._pieces.append([blob[begin:end] for begin, end in edges])
        blob_lengths = ends - begins
        length = headers["topics_length"] + blob_lengths
        padding = -length % 8
        self._pieces.append([_ZEROS[count] for count in padding.tolist()])
        headers["blob_length"] = blob_lengths
        headers["length_bytes"] = HEADER_LENGTH_BYTES + headers["columns_length"] + length + padding
