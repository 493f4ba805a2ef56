"""Encodes a group of rows as frames of the journal, in one buffer.

The group is sorted by second and cut by the bounds of a transaction alone, so it is one frame, or
few.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.encode import FRAME_TOPICS, FrameTopics
from delaywheel.storage.frames.format import (
    HAS_PARTITIONS,
    HAS_TIMESTAMPS,
    LONGEST_ROW_BYTES,
    NO_SLOT,
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
from delaywheel.storage.journal.pieces import Pieces


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
    pieces = Pieces(firsts, len(slots))
    headers = np.zeros(len(firsts), HEADER)
    headers["magic"], headers["version"], headers["kind"] = MAGIC, VERSION, kind
    headers["wheel_hash"], headers["accepted_at_ms"] = wheel.hash64, accepted_at_ms
    headers["seq"] = np.arange(first_seq, first_seq + len(headers))
    headers["rows"] = pieces.counts
    pieces.add([bytes(HEADER_LENGTH_BYTES)] * len(headers))
    _add_seconds(pieces, headers, slots)
    _add_rows(pieces, headers, columns, slots)
    edges = [0, *pieces.lengths.cumsum().tolist()]
    headers["length_bytes"] = pieces.lengths
    content = pieces.joined()
    _put_headers(content, edges, headers)
    return EncodedFrames(pieces.counts, edges, content, order)


def _firsts(
    lengths_bytes: NDArray[np.int64], *, max_messages: int, max_bytes: int
) -> NDArray[np.int64]:
    """Returns the first row of each frame."""
    rows, ends = len(lengths_bytes), lengths_bytes.cumsum()
    firsts = [0]
    while True:
        begin = firsts[-1]
        until = int(ends[begin] - lengths_bytes[begin]) + max_bytes
        fitting = max(int(ends.searchsorted(until, side="right")), begin + 1)
        end = min(begin + max_messages, fitting)
        if end >= rows:
            return np.array(firsts)
        firsts.append(end)


def _add_seconds(pieces: Pieces, headers: NDArray[Any], slots: NDArray[np.int64]) -> None:
    """Adds each frame's list."""
    begins = np.ones(len(slots), bool)
    np.not_equal(slots[1:], slots[:-1], out=begins[1:])
    begins[pieces.firsts] = True
    places = begins.nonzero()[0]
    edges = places.searchsorted([*pieces.firsts, len(slots)]).tolist()
    headers["seconds"] = counts = np.diff(edges)
    seconds = slots[places].astype("<u4").tobytes()
    firsts = (places - np.repeat(pieces.firsts, counts)).astype("<u4").tobytes()
    for raw in (seconds, firsts):
        pieces.add([raw[begin * 4 : end * 4] for begin, end in pairwise(edges)], counts * 4)


def _add_rows(
    pieces: Pieces, headers: NDArray[Any], columns: Columns, slots: NDArray[np.int64]
) -> None:
    """Adds columns, topics and content."""
    has_content = int(headers["kind"][0]) == Kind.MESSAGES
    timed = pieces.have((columns.timestamps_ms >= 0) & has_content)
    placed = pieces.have((columns.partitions >= 0) & has_content)
    topics = FrameTopics(len(columns.topics), columns.topic_numbers, pieces.counts)
    pieces.add_column(columns.timestamps_ms, "<i8", timed)
    pieces.add_column(columns.ids, "u1")
    pieces.add_column(topics.numbers, "<u4")
    if has_content:
        for lengths in (columns.key_lengths, columns.value_lengths, columns.headers_lengths):
            pieces.add_column(lengths, "<i4")
    pieces.add_column(columns.partitions, "<i4", placed)
    pieces.add_column(columns.due_ms - slots * 1000, "<u2")
    pieces.pad()
    headers["flags"] = timed * HAS_TIMESTAMPS + placed * HAS_PARTITIONS
    headers["topics"] = np.diff(topics.edges)
    headers["topics_length"] = pieces.add_topics(topics, columns.topics)
    lasts = pieces.firsts + pieces.counts - 1
    begins, ends = columns.starts[pieces.firsts], (columns.starts + columns.lengths_bytes)[lasts]
    headers["blob_length"] = ends - begins
    blob = memoryview(columns.blob)
    edges = zip(begins.tolist(), ends.tolist(), strict=True)
    pieces.add([blob[begin:end] for begin, end in edges], ends - begins)
    pieces.pad()


def _put_headers(content: bytearray, edges: list[int], headers: NDArray[Any]) -> None:
    raw = headers.tobytes()
    lists = (headers["seconds"] * LIST_ENTRY_BYTES + HEADER_LENGTH_BYTES).tolist()
    for number, (begin, end) in enumerate(pairwise(edges)):
        at = number * HEADER_LENGTH_BYTES
        content[begin : begin + HEADER_LENGTH_BYTES] = raw[at : at + HEADER_LENGTH_BYTES]
        put_checksums(content, begin, lists[number], end - begin)
