"""Encodes a group of rows as frames of the journal, in one buffer.

The group is sorted by second and cut by the bounds of a transaction alone, so it is one frame, or
few. The bytes of each column are cut into a piece for each frame; all pieces are put in order and
joined once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import Buffer
from delaywheel.storage.frames.columns import ID_LENGTH_BYTES, Columns
from delaywheel.storage.frames.encode import FRAME_TOPICS, FrameTopics
from delaywheel.storage.frames.format import (
    HAS_PARTITIONS,
    HAS_TIMESTAMPS,
    LONGEST_ROW_BYTES,
    NO_SLOT,
    row_length_bytes,
    topic_entry,
)
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.journal.format import (
    HEADER,
    HEADER_LENGTH_BYTES,
    LIST_ENTRY_BYTES,
    MAGIC,
    VERSION,
    put_checksums,
)

_ZEROS: Final = [bytes(count) for count in range(8)]


@dataclass(frozen=True, slots=True, eq=False)
class EncodedFrames:
    """Frames of one group, ready to be appended.

    Attributes:
        counts: Each frame's number of rows.
        edges: Where each frame begins in `content`, and where the last one ends.
        order: The rows of the encoded columns, in the order in which the frames have them.
    """

    counts: NDArray[np.int64]
    edges: list[int]
    content: bytearray
    order: NDArray[np.intp]


def encode_frames(
    columns: Columns,
    *,
    kind: Kind,
    wheel: WheelId,
    first_seq: int,
    accepted_at_ms: int,
    max_frame_messages: int,
    max_frame_bytes: int,
) -> EncodedFrames:
    """Encodes one group of at least one row.

    Rows of one second keep their order. A single row may exceed ``max_frame_bytes``: it then has a
    frame of its own. A frame of a group with many topics has few rows: what came late is forwarded
    frame by frame, each whole, and Kafka takes its time for each topic.

    Raises:
        ValueError: A due is before 1970 or after 2106, which the caller should have refused.
    """
    slots = columns.slots
    order = np.argsort(slots, kind="stable")
    if len(order) > 1:  # a single one is in order, wherever it lies in its blob
        columns, slots = columns.take(order), slots[order]
    if int(slots[0]) < 0 or int(slots[-1]) >= NO_SLOT:
        raise ValueError("a due of no second that a frame can name")
    is_for_many = kind is Kind.MESSAGES and len(columns.topics) > FRAME_TOPICS
    firsts = _firsts(
        columns.lengths_bytes + LONGEST_ROW_BYTES,
        max_messages=min(max_frame_messages, FRAME_TOPICS) if is_for_many else max_frame_messages,
        max_bytes=max_frame_bytes,
    )
    pieces = _Pieces(columns, slots, firsts, kind)
    edges, content = pieces.joined(wheel.hash64, first_seq, accepted_at_ms)
    return EncodedFrames(pieces.counts, edges, content, order)


def _firsts(lengths_bytes: NDArray[np.int64], *, max_messages: int, max_bytes: int) -> list[int]:
    """Returns the first row of each frame."""
    rows, ends = len(lengths_bytes), lengths_bytes.cumsum()
    firsts = [0]
    while True:
        begin = firsts[-1]
        until = int(ends[begin] - lengths_bytes[begin]) + max_bytes
        fitting = max(int(ends.searchsorted(until, side="right")), begin + 1)
        end = min(begin + max_messages, fitting)
        if end >= rows:
            return firsts
        firsts.append(end)


class _Pieces:
    """The pieces of all frames of a sorted group: part by part, one for each frame."""

    def __init__(
        self, columns: Columns, slots: NDArray[np.int64], firsts: list[int], kind: Kind
    ) -> None:
        self._columns = columns
        self._slots = slots
        self._kind = kind
        self._firsts = np.array(firsts)
        self._edges = [*firsts, len(slots)]  # in rows
        self.counts = np.diff(np.array(self._edges))
        self._headers = np.zeros(len(firsts), HEADER)
        self._pieces: list[Iterable[Buffer]] = []

    def joined(
        self, wheel_hash: int, first_seq: int, accepted_at_ms: int
    ) -> tuple[list[int], bytearray]:
        """Returns the edges of all frames, and their bytes."""
        headers = self._headers
        headers["magic"], headers["version"], headers["kind"] = MAGIC, VERSION, self._kind
        headers["wheel_hash"], headers["accepted_at_ms"] = wheel_hash, accepted_at_ms
        headers["seq"] = np.arange(first_seq, first_seq + len(headers))
        headers["rows"] = self.counts
        self._add_seconds()
        self._add_columns()
        self._add_content(self._add_topics())
        raw = headers.tobytes()
        heads = range(0, len(raw), HEADER_LENGTH_BYTES)
        self._pieces.insert(0, [raw[at : at + HEADER_LENGTH_BYTES] for at in heads])
        content = bytearray().join(self._interleaved())
        edges = [0, *headers["length_bytes"].cumsum(dtype=np.int64).tolist()]
        lists = (headers["seconds"] * LIST_ENTRY_BYTES + HEADER_LENGTH_BYTES).tolist()
        for (begin, end), head_length in zip(pairwise(edges), lists, strict=True):
            put_checksums(content, begin, head_length, end - begin)
        return edges, content

    def _interleaved(self) -> list[Buffer]:
        """Orders the pieces frame by frame, as in the format."""
        parts: list[Buffer] = [b""] * (len(self._pieces) * len(self._headers))
        for number, pieces in enumerate(self._pieces):
            parts[number :: len(self._pieces)] = pieces
        return parts

    def _add_seconds(self) -> None:
        """Adds each frame's list."""
        begins = np.ones(len(self._slots), bool)
        np.not_equal(self._slots[1:], self._slots[:-1], out=begins[1:])
        begins[self._firsts] = True
        places = begins.nonzero()[0]
        edges = places.searchsorted(self._edges).tolist()
        counts = np.diff(edges)
        seconds = self._slots[places].astype("<u4").tobytes()
        firsts = (places - np.repeat(self._firsts, counts)).astype("<u4").tobytes()
        for raw in (seconds, firsts):
            self._pieces.append([raw[begin * 4 : end * 4] for begin, end in pairwise(edges)])
        self._headers["seconds"] = counts
        self._headers["length_bytes"] = HEADER_LENGTH_BYTES + counts * LIST_ENTRY_BYTES

    def _add_columns(self) -> None:
        columns, headers = self._columns, self._headers
        has_timestamps = self._frames_with(columns.timestamps_ms)
        has_partitions = self._frames_with(columns.partitions)
        flags = has_timestamps * HAS_TIMESTAMPS + has_partitions * HAS_PARTITIONS
        topics = self._topics = FrameTopics(len(columns.topics), columns.topic_numbers, self.counts)
        self._add(columns.timestamps_ms, "<i8", 8, has_timestamps)
        self._add(columns.ids, "u1", ID_LENGTH_BYTES)
        self._add(topics.numbers, "<u4", 4)
        if self._kind is Kind.MESSAGES:
            for lengths in (columns.key_lengths, columns.value_lengths, columns.headers_lengths):
                self._add(lengths, "<i4", 4)
        self._add(columns.partitions, "<i4", 4, has_partitions)
        self._add(columns.due_ms - self._slots * 1000, "<u2", 2)
        row_bytes = np.array([row_length_bytes(self._kind, each) for each in flags.tolist()])
        length = self.counts * row_bytes
        self._pieces.append([_ZEROS[count] for count in (-length % 8).tolist()])
        headers["flags"] = flags
        headers["length_bytes"] += (length + -length % 8).astype(np.uint32)

    def _frames_with(self, column: NDArray[np.int32] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns 1 for each frame in which a row has a value, else 0."""
        if self._kind is not Kind.MESSAGES:
            return np.zeros(len(self.counts), np.int64)
        return np.logical_or.reduceat(column >= 0, self._firsts).astype(np.int64)

    def _add(
        self,
        column: NDArray[Any],
        dtype: str,
        item_bytes: int,
        present: NDArray[np.int64] | None = None,
    ) -> None:
        """Adds one column; to those frames alone that have it."""
        if present is not None and not present.any():
            return
        raw = column.astype(dtype, copy=False).tobytes()
        edges = [edge * item_bytes for edge in self._edges]
        pieces = [raw[begin:end] for begin, end in pairwise(edges)]
        if present is not None and not present.all():
            pieces = [p if has else b"" for p, has in zip(pieces, present.tolist(), strict=True)]
        self._pieces.append(pieces)

    def _add_topics(self) -> NDArray[np.int64]:
        """Adds each frame's dictionary; returns their lengths."""
        entries = [topic_entry(topic) for topic in self._columns.topics]
        members, edges = self._topics.members.tolist(), self._topics.edges.tolist()
        dictionaries = [
            b"".join([entries[topic] for topic in members[begin:end]])
            for begin, end in pairwise(edges)
        ]
        self._pieces.append(dictionaries)
        lengths = np.array(list(map(len, dictionaries)), np.int64)
        self._headers["topics"] = np.diff(self._topics.edges)
        self._headers["topics_length"] = lengths
        return lengths

    def _add_content(self, topics_lengths: NDArray[np.int64]) -> None:
        """Adds keys, values and headers, and zeros up to a multiple of 8 bytes."""
        columns, headers = self._columns, self._headers
        ends = columns.starts + columns.lengths_bytes
        begins, lasts = columns.starts[self._firsts], ends[np.array(self._edges[1:]) - 1]
        blob = memoryview(columns.blob)
        edges = zip(begins.tolist(), lasts.tolist(), strict=True)
        self._pieces.append([blob[begin:end] for begin, end in edges])
        length = topics_lengths + lasts - begins
        self._pieces.append([_ZEROS[count] for count in (-length % 8).tolist()])
        headers["blob_length"] = lasts - begins
        headers["length_bytes"] += (length + -length % 8).astype(np.uint32)
