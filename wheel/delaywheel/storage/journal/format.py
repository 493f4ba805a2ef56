"""The bytes of a journal's frame, as docs/JOURNAL.md shows them.

A frame is a part of a group, of one kind, with rows of many seconds, sorted by second:

    header, 64 bytes | seconds | first row of each | columns, padded to 8 | topics | blob | zeros

Header and list are the head, under a checksum of its own: who looks for what is near reads heads
alone. The rest is the body. Everything is little-endian, and each column is aligned to its item in
a frame that begins at a multiple of 8. Frames are made in encode.py, and checked in checking.py.

==========  =================================================  ===================================
kind        what it says                                       rows
==========  =================================================  ===================================
1 to 4      see `frames.kinds`                                 one and more
FILL        all frames before it that no earlier one fills     none
            are filled into their seconds
EMPTY       stands for a frame that no member has any more     none; it is as long as the place is
                                                               that is left for it
==========  =================================================  ===================================
"""

import struct
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import Buffer
from delaywheel.storage.frames.columns import ID_LENGTH_BYTES, Columns, content_starts
from delaywheel.storage.frames.format import (
    ALL_FLAGS,
    HAS_PARTITIONS,
    HAS_TIMESTAMPS,
    DamageReason,
    FrameDamaged,
    decode_topics,
    row_length_bytes,
)
from delaywheel.storage.frames.kinds import Kind

VERSION: Final = 1
MAGIC: Final = b"DWjf"
HEADER_LENGTH_BYTES: Final = 64
LIST_ENTRY_BYTES: Final = 8  # a second and its first row
FILL: Final = 9
EMPTY: Final = 10

HEADER: Final[np.dtype[Any]] = np.dtype(
    [
        ("magic", "S4"),
        ("head_checksum", "<u4"),
        ("body_checksum", "<u4"),
        ("version", "u1"),
        ("kind", "u1"),
        ("flags", "<u2"),
        ("wheel_hash", "<u8"),
        ("seq", "<u8"),
        ("accepted_at_ms", "<i8"),
        ("rows", "<u4"),
        ("seconds", "<u4"),
        ("topics", "<u4"),
        ("topics_length", "<u4"),
        ("blob_length", "<u4"),
        ("length_bytes", "<u4"),
    ]
)
_HEADER = struct.Struct("<4sIIBBHQQqIIIIII")
_CHECKSUMS = struct.Struct("<II")
_KIND_AT: Final = 13
CHECKED_FROM: Final = 8  # magic and the head's checksum itself; the magic is compared as it is
_KINDS: Final = frozenset({*Kind, FILL, EMPTY})


class FrameHead(NamedTuple):
    """The fixed part of a head, in the order of its bytes."""

    magic: bytes
    head_checksum: int
    body_checksum: int
    version: int
    kind: int
    flags: int
    wheel_hash: int
    seq: int
    accepted_at_ms: int
    rows: int
    seconds: int
    topics: int
    topics_length: int
    blob_length: int
    length_bytes: int

    @property
    def head_length_bytes(self) -> int:
        """The length of header and list."""
        return HEADER_LENGTH_BYTES + self.seconds * LIST_ENTRY_BYTES

    @property
    def columns_length_bytes(self) -> int:
        """The length of all columns, with the zeros behind them."""
        length = self.rows * row_length_bytes(self.kind, self.flags)
        return length + -length % 8


@dataclass(frozen=True, slots=True, eq=False)
class JournalFrame:
    """A decoded frame, whose columns are views on its bytes.

    Attributes:
        kind: Of its rows; or FILL, or EMPTY.
        seconds: Those that its rows are of, ascending.
        firsts: The first row of each.
        columns: Its rows.
    """

    kind: int
    seq: int
    accepted_at_ms: int
    length_bytes: int
    seconds: NDArray[np.uint32]
    firsts: NDArray[np.uint32]
    columns: Columns


def decode_head(buffer: Buffer, offset: int, *, wheel: WheelId) -> FrameHead:
    """Decodes and checks the head at ``offset``; what else there is of the frame does not matter.

    Raises:
        FrameDamaged: SHORT: the buffer ends before the head does. VERSION: a later release wrote
            it. Anything else: it is no head, or of another wheel.
    """
    if len(buffer) - offset < HEADER_LENGTH_BYTES:
        raise FrameDamaged(DamageReason.SHORT, f"{len(buffer) - offset} bytes")
    head = FrameHead._make(_HEADER.unpack_from(buffer, offset))
    if head.magic != MAGIC:
        raise FrameDamaged(DamageReason.MAGIC)
    if head.wheel_hash != wheel.hash64:
        raise FrameDamaged(DamageReason.MISPLACED, f"wheel hash {head.wheel_hash:016x}")
    end = offset + head.head_length_bytes
    if end > len(buffer):
        raise FrameDamaged(DamageReason.SHORT, "its list")
    if crc32c(memoryview(buffer)[offset + CHECKED_FROM : end]) != head.head_checksum:
        raise FrameDamaged(DamageReason.CHECKSUM, "of the head")
    if head.version != VERSION:
        raise FrameDamaged(DamageReason.VERSION, str(head.version))
    if head.kind not in _KINDS:
        raise FrameDamaged(DamageReason.KIND, str(head.kind))
    if not _adds_up(head):
        raise FrameDamaged(DamageReason.LENGTHS, f"a frame of {head.length_bytes} bytes")
    return head


def _adds_up(head: FrameHead) -> bool:
    if head.kind in {FILL, EMPTY}:
        counts = (head.rows, head.seconds, head.topics, head.topics_length, head.blob_length)
        is_fitting = head.length_bytes >= HEADER_LENGTH_BYTES and head.length_bytes % 8 == 0
        is_fitting &= head.kind == EMPTY or head.length_bytes == HEADER_LENGTH_BYTES
        return not any(counts) and not head.flags and is_fitting
    end = head.head_length_bytes + head.columns_length_bytes
    end += head.topics_length + head.blob_length
    is_whole = head.length_bytes == end + -end % 8
    return is_whole and 0 < head.seconds <= head.rows and head.flags & ~ALL_FLAGS == 0


def length_at(buffer: Buffer, offset: int) -> int:
    """Returns the length of a whole frame from its header, unchecked; 0 beyond the buffer's end."""
    return int.from_bytes(
        buffer[offset + HEADER_LENGTH_BYTES - 4 : offset + HEADER_LENGTH_BYTES], "little"
    )


def kind_at(buffer: Buffer, offset: int) -> int:
    """Returns the kind of a whole frame from its header, unchecked."""
    return buffer[offset + _KIND_AT]


def has_body(head: FrameHead, buffer: Buffer, offset: int) -> bool:
    """Whether the body behind a checked head is whole."""
    begin, end = offset + head.head_length_bytes, offset + head.length_bytes
    return end <= len(buffer) and crc32c(memoryview(buffer)[begin:end]) == head.body_checksum


def decode_frame(buffer: Buffer, offset: int = 0, *, wheel: WheelId, seq: int) -> JournalFrame:
    """Decodes the frame at ``offset``, ignoring what follows it; nothing is copied.

    Raises:
        FrameDamaged: The bytes are not that frame.
    """
    head = decode_head(buffer, offset, wheel=wheel)
    if head.seq != seq:
        raise FrameDamaged(DamageReason.MISPLACED, f"seq {head.seq} in place of {seq}")
    if not has_body(head, buffer, offset):
        raise FrameDamaged(DamageReason.CHECKSUM, "of the body")
    at = offset + HEADER_LENGTH_BYTES
    seconds = np.frombuffer(buffer, "<u4", head.seconds, at)
    firsts = np.frombuffer(buffer, "<u4", head.seconds, at + head.seconds * 4)
    columns = _decode_columns(buffer, offset + head.head_length_bytes, head, seconds, firsts)
    return JournalFrame(
        head.kind, head.seq, head.accepted_at_ms, head.length_bytes, seconds, firsts, columns
    )


def _decode_columns(
    buffer: Buffer,
    at: int,
    head: FrameHead,
    seconds: NDArray[np.uint32],
    firsts: NDArray[np.uint32],
) -> Columns:
    """Decodes the body, which begins at ``at``."""
    rows, blob_at = head.rows, at + head.columns_length_bytes + head.topics_length
    topics = _topics(buffer, at + head.columns_length_bytes, head)
    timestamps, partitions = np.full(rows, -1, np.int64), np.full(rows, -1, np.int32)
    if head.flags & HAS_TIMESTAMPS:
        timestamps = np.frombuffer(buffer, "<i8", rows, at)
        at += rows * 8
    ids = np.frombuffer(buffer, np.uint8, rows * ID_LENGTH_BYTES, at)
    at += rows * ID_LENGTH_BYTES
    numbers = np.frombuffer(buffer, "<u4", rows, at)
    at += rows * 4
    lengths = np.array([[-1], [-1], [0]], np.int32).repeat(rows, axis=1)
    if head.kind == Kind.MESSAGES:
        lengths = np.frombuffer(buffer, "<i4", rows * 3, at).reshape(3, rows)
        at += rows * 12
    if head.flags & HAS_PARTITIONS:
        partitions = np.frombuffer(buffer, "<i4", rows, at)
        at += rows * 4
    due_ms = np.frombuffer(buffer, "<u2", rows, at) + _slots(seconds, firsts, rows) * 1000
    if rows and int(numbers.max()) >= head.topics:
        raise FrameDamaged(DamageReason.LENGTHS, "topics")
    content = np.maximum(lengths, 0).sum(axis=0, dtype=np.int64)
    if int(content.sum()) != head.blob_length:
        raise FrameDamaged(DamageReason.LENGTHS, "blob")
    return Columns(
        due_ms=due_ms,
        ids=ids.reshape(rows, ID_LENGTH_BYTES),
        topics=topics,
        topic_numbers=numbers,
        key_lengths=lengths[0],
        value_lengths=lengths[1],
        headers_lengths=lengths[2],
        partitions=partitions,
        timestamps_ms=timestamps,
        blob=memoryview(buffer),
        starts=content_starts(content) + blob_at,
    )


def _topics(buffer: Buffer, at: int, head: FrameHead) -> tuple[str, ...]:
    topics = decode_topics(bytes(buffer[at : at + head.topics_length]))
    if len(topics) != head.topics:
        raise FrameDamaged(DamageReason.LENGTHS, "topics")
    return topics


def _slots(seconds: NDArray[np.uint32], firsts: NDArray[np.uint32], rows: int) -> NDArray[np.int64]:
    """Returns the second of each row."""
    edges = np.append(firsts.astype(np.int64), rows)
    counts = np.diff(edges)
    is_sorted = bool((np.diff(seconds.astype(np.int64)) > 0).all())
    if not is_sorted or edges[0] or (counts <= 0).any():
        if rows:
            raise FrameDamaged(DamageReason.LENGTHS, "seconds")
        return np.empty(0, np.int64)
    return np.repeat(seconds.astype(np.int64), counts)


def bare_frame(
    kind: int, *, wheel: WheelId, seq: int, accepted_at_ms: int, length_bytes: int
) -> bytes:
    """Encodes a frame without rows: FILL or EMPTY.

    Args:
        length_bytes: A multiple of 8; of FILL that of a header.
    """
    body = bytes(length_bytes - HEADER_LENGTH_BYTES)
    counts = (0, 0, 0, 0, 0, length_bytes)
    of_body = crc32c(body)
    header = bytearray(
        _HEADER.pack(
            MAGIC, 0, of_body, VERSION, kind, 0, wheel.hash64, seq, accepted_at_ms, *counts
        )
    )
    put_checksums(header, 0, HEADER_LENGTH_BYTES, HEADER_LENGTH_BYTES, of_body)
    return bytes(header) + body


def put_checksums(
    content: bytearray, offset: int, head_length: int, length: int, of_body: int | None = None
) -> None:
    """Puts both checksums into the frame at ``offset``.

    Args:
        of_body: The body's, where its bytes are not there; None: it is computed.
    """
    view = memoryview(content)[offset : offset + length]
    if of_body is None:
        of_body = crc32c(view[head_length:])
    _CHECKSUMS.pack_into(content, offset + 4, 0, of_body)
    struct.pack_into("<I", content, offset + 4, crc32c(view[CHECKED_FROM:head_length]))
