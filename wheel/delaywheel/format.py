"""The bytes of frames and index rows. No other module knows them; docs/FORMAT.md shows them.

A frame is what one group commit adds to one slot file:

    header, 64 bytes | columns, padded to 8 | topic dictionary | blob | zeros up to 8

The header says which wheel, slot and seq the frame is, so bytes in a wrong place are caught;
the checksum covers everything behind it. Columns come in the order of falling item size, which
keeps each aligned to its own size in a frame that begins at a multiple of 8.

Everything is little-endian. Encoding loops over frames, never over messages: a group of single
messages over a thousand slots is the common case.
"""

import struct
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delaywheel.bounded import BoundedTable
from delaywheel.columns import ID_LENGTH_BYTES, Columns, content_starts
from delaywheel.disk import Buffer
from delaywheel.grouping import FrameTopics, frame_bounds
from delaywheel.identity import WheelId

VERSION: Final = 1
"""What this release writes. It is raised a release after the newest that is read, see FORMAT.md."""
OLDEST_READ: Final = 1
NEWEST_READ: Final = 1
"""What this release reads: all versions between, these two included."""
MAGIC: Final = b"DWfr"
HEADER_LENGTH_BYTES: Final = 64

# Row n of a wheel's index is the frame with seq n + 1. Of ``messages`` the low 20 bits say how
# many, the top bit that they are cancels, and the 11 bits between are a check value of the row. A
# row whose length is 0 has no frame: HOLE_ROW = its place was lost in a crash of the machine, or
# its row does not check out; all zeros = its segment of the index is gone, being wholly below the
# floor.
INDEX_ROW: Final[np.dtype[Any]] = np.dtype(
    [("slot", "<u4"), ("offset", "<u4"), ("length", "<u4"), ("messages", "<u4")]
)
INDEX_ROW_LENGTH_BYTES: Final = 16
SLOT_FILE_LIMIT_BYTES: Final = 1 << 32  # what an index row's offset can say

_HEADER = struct.Struct("<4sIBBHIQQqIIIIII")
_CHECKED_FROM = 8  # magic and checksum itself; the magic is compared as it is
_INDEX_ROW = struct.Struct("<IIII")
_CANCELS_BIT = 1 << 31
_CHECK_SHIFT = 20
_COUNT_MASK = (1 << _CHECK_SHIFT) - 1
_CHECK_MASK = 0x7FF
FRAME_MESSAGES_LIMIT: Final = _COUNT_MASK  # what an index row can say
_TOPIC_LENGTH = struct.Struct("<H")
NO_SLOT: Final = 1 << 32  # above every slot that a frame can say

# Topics of decoded frames, so that nearly all frames share a few tuples.
_dictionaries = BoundedTable[bytes, tuple[str, ...]](8 << 20)
_LONGEST_MEMO_BYTES = 16 << 10
_MEMO_OVERHEAD_BYTES = 128  # about what Python takes for a string in a tuple, or for an entry

_ZEROS = [bytes(count) for count in range(8)]
_Integer = TypeVar("_Integer", np.int32, np.int64)

HOLE_ROW: Final = _INDEX_ROW.pack(0, (1 << 32) - 1, 0, 0)

_HAS_PARTITIONS = 1
_HAS_TIMESTAMPS = 2

# Bytes of one message in the columns that every frame has.
_CANCEL_ROW_BYTES = ID_LENGTH_BYTES + 2
_MESSAGE_ROW_BYTES = ID_LENGTH_BYTES + 4 * 4 + 2
_PARTITION_BYTES = 4
_TIMESTAMP_BYTES = 8
_LONGEST_ROW_BYTES = _MESSAGE_ROW_BYTES + _PARTITION_BYTES + _TIMESTAMP_BYTES


class Kind(IntEnum):
    """What a frame's rows are."""

    MESSAGES = 1
    CANCELS = 2


_KINDS: Final = frozenset(int(kind) for kind in Kind)


class DamageReason(Enum):
    """Why bytes are not the frame that they should be."""

    SHORT = "the bytes end before the frame does"
    MAGIC = "no frame begins here"
    VERSION = "a version that this program does not know"
    CHECKSUM = "the checksum is wrong"
    MISPLACED = "a frame of another wheel, slot or seq"
    LENGTHS = "lengths or numbers do not add up"
    KIND = "a kind that this program does not know"
    HOLE = "the place of the frame was lost in a crash of the machine"
    GONE = "the slot file or index segment is not there"
    UNREADABLE = "the medium reports an error"


class FrameDamaged(Exception):  # noqa: N818 - the condition is the name
    """The bytes are not the frame that they should be."""

    def __init__(self, reason: DamageReason, detail: str = "") -> None:
        super().__init__(f"{reason.value}{': ' if detail else ''}{detail}")
        self.reason = reason


class EncodedFrame(NamedTuple):
    """A frame ready to be written."""

    slot: int
    seq: int
    kind: Kind
    messages: int
    buffer: Buffer
    rows: NDArray[np.intp]  # which rows of the encoded columns, in the frame's order

    @property
    def length_bytes(self) -> int:
        """Of the whole frame."""
        return len(self.buffer)

    def index_row(self, offset: int) -> bytes:
        """The frame's row in the index when it lies at ``offset`` of its slot file."""
        return _index_row(self.kind, self.slot, offset, len(self.buffer), self.messages)


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A frame as it was read; its columns are views on the bytes it was read from."""

    kind: Kind
    wheel: WheelId
    slot: int
    seq: int
    accepted_at_ms: int
    length_bytes: int
    columns: Columns


class FrameHeader(NamedTuple):
    """The fixed part of a frame, in the order of its bytes."""

    magic: bytes
    checksum: int
    version: int
    kind: int
    flags: int
    slot: int
    wheel_hash: int
    seq: int
    accepted_at_ms: int
    messages: int
    topics: int
    columns_length: int
    topics_length: int
    blob_length: int
    length_bytes: int


def message_counts(rows: NDArray[Any]) -> NDArray[np.int64]:
    """Messages of each index row; 0 where it is a frame of cancels."""
    counts = rows["messages"].astype(np.int64)
    return np.where(counts >= _CANCELS_BIT, 0, counts & _COUNT_MASK)


def cancel_counts(rows: NDArray[Any]) -> NDArray[np.int64]:
    """Cancels of each index row; 0 where it is a frame of messages."""
    counts = rows["messages"].astype(np.int64)
    return np.where(counts >= _CANCELS_BIT, counts & _COUNT_MASK, 0)


def index_row_of(frame: Frame, offset: int) -> bytes:
    """The row of a frame that was read at ``offset`` of its slot file."""
    rows = len(frame.columns)
    return _index_row(frame.kind, frame.slot, offset, frame.length_bytes, rows)


def index_row_of_header(header: FrameHeader, offset: int) -> bytes:
    """The row of a frame whose header was read at ``offset`` of its slot file.

    Raises:
        FrameDamaged: no frame has such a header.
    """
    if header.kind not in _KINDS or header.messages > FRAME_MESSAGES_LIMIT:
        raise FrameDamaged(DamageReason.KIND, f"{header.kind} with {header.messages} rows")
    kind = Kind(header.kind)
    return _index_row(kind, header.slot, offset, header.length_bytes, header.messages)


def _index_row(kind: Kind, slot: int, offset: int, length: int, rows: int) -> bytes:
    marked = rows | _CANCELS_BIT if kind is Kind.CANCELS else rows
    check = crc32c(_INDEX_ROW.pack(slot, offset, length, marked)) >> 21
    return _INDEX_ROW.pack(slot, offset, length, marked | check << _CHECK_SHIFT)


def raw_rows(content: bytes) -> NDArray[Any]:
    """The index rows in these bytes, not checked yet (see `checked_rows`). Torn tails are cut."""
    return np.frombuffer(content, INDEX_ROW, len(content) // INDEX_ROW_LENGTH_BYTES)


def decode_rows(content: bytes) -> NDArray[Any]:
    """The index rows in these bytes; one that does not check out is a hole. Torn tails are cut."""
    return checked_rows(raw_rows(content))


def checked_rows(rows: NDArray[Any]) -> NDArray[Any]:
    """These rows, but that one that does not check out is a hole."""
    if not len(rows):
        return rows
    flawed = _flawed(rows)
    if flawed.any():
        rows = rows.copy()
        rows[flawed] = np.frombuffer(HOLE_ROW, INDEX_ROW)
    return rows


def _flawed(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows were not written so: their check value is wrong."""
    raw = rows.view(np.uint8).reshape(len(rows), INDEX_ROW_LENGTH_BYTES).copy()
    raw[:, 14] &= 0x0F
    raw[:, 15] &= 0x80
    checks = np.bitwise_xor.reduce(_CHECK_TABLES[_CHECK_PLACES, raw], axis=1) ^ _CHECK_OF_ZEROS
    wrong = checks != (rows["messages"] >> _CHECK_SHIFT) & _CHECK_MASK
    if not wrong.any():
        return wrong  # type: ignore[no-any-return]  # numpy's stubs
    has_none = (rows["length"] == 0) & (rows["messages"] == 0) & (rows["slot"] == 0)
    has_none &= (rows["offset"] == 0) | (rows["offset"] == (1 << 32) - 1)
    return wrong & ~has_none  # type: ignore[no-any-return]  # numpy's stubs


def _check_tables() -> NDArray[np.uint16]:
    """What each byte adds to the check value: a CRC is linear, so rows are checked all at once."""
    tables = np.zeros((INDEX_ROW_LENGTH_BYTES, 256), np.uint16)
    for place in range(INDEX_ROW_LENGTH_BYTES):
        for value in range(256):
            row = bytearray(INDEX_ROW_LENGTH_BYTES)
            row[place] = value
            tables[place, value] = (crc32c(row) >> 21) ^ _CHECK_OF_ZEROS
    return tables


_CHECK_OF_ZEROS: Final = crc32c(bytes(INDEX_ROW_LENGTH_BYTES)) >> 21
_CHECK_TABLES: Final = _check_tables()
_CHECK_PLACES: Final = np.arange(INDEX_ROW_LENGTH_BYTES)


# --- encoding


def encode_group(
    columns: Columns,
    *,
    kind: Kind,
    wheel: WheelId,
    first_seq: int,
    accepted_at_ms: int,
    max_frame_messages: int,
    max_frame_bytes: int,
) -> list[EncodedFrame]:
    """Turns one group into frames, one a slot unless the bounds ask for more.

    Messages of one slot keep their order. Frames come in the order of slots and have the seqs
    from ``first_seq`` on. A single message may exceed ``max_frame_bytes``: it is then alone.

    Raises:
        ValueError: a due is before 1970 or after 2106, which no caller should let through.
    """
    if not len(columns):
        return []
    slots = columns.slots
    if int(slots.min()) < 0 or int(slots.max()) >= NO_SLOT:
        raise ValueError("a due that no slot file can hold")
    order = np.argsort(slots, kind="stable")
    group = _Group(columns.take(order), kind, max_frame_messages, max_frame_bytes)
    wheel_hash = wheel.hash64
    frames = []
    for number in range(len(group.bounds)):
        seq = first_seq + number
        first, last, buffer = group.frame(
            number, wheel_hash=wheel_hash, seq=seq, accepted_at_ms=accepted_at_ms
        )
        slot = group.slots[first]
        frames.append(EncodedFrame(slot, seq, kind, last - first, buffer, order[first:last]))
    return frames


class _Group:
    """A group sorted by slot, every column as bytes to be sliced frame by frame."""

    def __init__(
        self, columns: Columns, kind: Kind, max_frame_messages: int, max_frame_bytes: int
    ) -> None:
        self._kind = kind
        slots = columns.slots
        self.slots: list[int] = slots.tolist()
        lengths = columns.lengths_bytes
        self._starts: list[int] = [0, *np.cumsum(lengths).tolist()]
        self.bounds = frame_bounds(
            slots,
            lengths + _LONGEST_ROW_BYTES,
            max_messages=min(max_frame_messages, FRAME_MESSAGES_LIMIT),
            max_bytes=max_frame_bytes,
        )
        self._due_offsets = (columns.due_ms - slots * 1000).astype("<u2").tobytes()
        self._ids = columns.ids.tobytes()
        self._blob = memoryview(columns.blob)
        if kind is Kind.MESSAGES:
            self._prepare_messages(columns)

    def _prepare_messages(self, columns: Columns) -> None:
        self._keys, self._values, self._headers = (
            lengths.astype("<i4", copy=False).tobytes()
            for lengths in (columns.key_lengths, columns.value_lengths, columns.headers_lengths)
        )
        self._partitions = columns.partitions.astype("<i4", copy=False).tobytes()
        self._timestamps = columns.timestamps_ms.astype("<i8", copy=False).tobytes()
        self._partitions_before = _running_count(columns.partitions >= 0)
        self._timestamps_before = _running_count(columns.timestamps_ms >= 0)
        self._topics = FrameTopics(columns, self.bounds)
        self._topic_numbers = self._topics.numbers.astype("<u4", copy=False).tobytes()
        self._topic_entries = [_topic_entry(topic) for topic in columns.topics]

    def frame(
        self, number: int, *, wheel_hash: int, seq: int, accepted_at_ms: int
    ) -> tuple[int, int, bytearray]:
        """First row, last row (exclusive) and bytes of frame ``number`` of the group."""
        first, last = self.bounds[number]
        start, end = self._starts[first], self._starts[last]
        if self._kind is Kind.MESSAGES:
            flags, columns_length, parts = self._message_columns(first, last)
            topics = self._topics.of_frame(number)
            dictionary = b"".join([self._topic_entries[topic] for topic in topics])
        else:
            flags, columns_length, parts = self._cancel_columns(first, last)
            topics, dictionary = [], b""
        tail_length = len(dictionary) + end - start
        padding = -tail_length % 8
        header = _HEADER.pack(
            MAGIC,
            0,  # the checksum, below
            VERSION,
            self._kind,
            flags,
            self.slots[first],
            wheel_hash,
            seq,
            accepted_at_ms,
            last - first,
            len(topics),
            columns_length,
            len(dictionary),
            end - start,
            HEADER_LENGTH_BYTES + columns_length + tail_length + padding,
        )
        buffer = bytearray().join(
            (header, *parts, dictionary, self._blob[start:end], _ZEROS[padding])
        )
        buffer[4:8] = crc32c(memoryview(buffer)[_CHECKED_FROM:]).to_bytes(4, "little")
        return first, last, buffer

    def _cancel_columns(self, first: int, last: int) -> tuple[int, int, list[bytes]]:
        """Flags, padded length and bytes of the columns, in the order of the format."""
        length = (last - first) * _CANCEL_ROW_BYTES
        ids = self._ids[first * ID_LENGTH_BYTES : last * ID_LENGTH_BYTES]
        padding = -length % 8
        return 0, length + padding, [ids, self._due_offsets[first * 2 : last * 2], _ZEROS[padding]]

    def _message_columns(self, first: int, last: int) -> tuple[int, int, list[bytes]]:
        """Flags, padded length and bytes of the columns, in the order of the format."""
        flags = 0
        row_bytes = _MESSAGE_ROW_BYTES
        parts = []
        if self._timestamps_before and (
            self._timestamps_before[last] > self._timestamps_before[first]
        ):
            flags |= _HAS_TIMESTAMPS
            row_bytes += _TIMESTAMP_BYTES
            parts.append(self._timestamps[first * 8 : last * 8])
        begin, end = first * 4, last * 4
        parts += [
            self._ids[first * ID_LENGTH_BYTES : last * ID_LENGTH_BYTES],
            self._topic_numbers[begin:end],
            self._keys[begin:end],
            self._values[begin:end],
            self._headers[begin:end],
        ]
        if self._partitions_before and (
            self._partitions_before[last] > self._partitions_before[first]
        ):
            flags |= _HAS_PARTITIONS
            row_bytes += _PARTITION_BYTES
            parts.append(self._partitions[begin:end])
        length = (last - first) * row_bytes
        padding = -length % 8
        parts += [self._due_offsets[first * 2 : last * 2], _ZEROS[padding]]
        return flags, length + padding, parts


def _running_count(marks: NDArray[np.bool_]) -> list[int] | None:
    """How many marks lie before each row; None when there are none at all."""
    return [0, *np.cumsum(marks).tolist()] if marks.any() else None


def _topic_entry(topic: str) -> bytes:
    encoded = topic.encode()
    return _TOPIC_LENGTH.pack(len(encoded)) + encoded


# --- decoding


def decode_header(buffer: Buffer, *, available_bytes: int) -> FrameHeader:
    """Reads the fixed part, of which nothing is proven yet but magic and version.

    Args:
        buffer: at least the header.
        available_bytes: how many bytes there are from its beginning on.

    Raises:
        FrameDamaged: SHORT, MAGIC, VERSION or LENGTHS.
    """
    if len(buffer) < HEADER_LENGTH_BYTES:
        raise FrameDamaged(DamageReason.SHORT, f"{len(buffer)} bytes")
    header = FrameHeader._make(_HEADER.unpack_from(buffer))
    if header.magic != MAGIC:
        raise FrameDamaged(DamageReason.MAGIC)
    if not OLDEST_READ <= header.version <= NEWEST_READ:
        raise FrameDamaged(DamageReason.VERSION, str(header.version))
    if header.length_bytes < HEADER_LENGTH_BYTES:
        raise FrameDamaged(DamageReason.LENGTHS, f"a frame of {header.length_bytes} bytes")
    if header.length_bytes > available_bytes:
        raise FrameDamaged(DamageReason.SHORT, f"{available_bytes} of {header.length_bytes} bytes")
    return header


def decode_frame(buffer: Buffer, *, wheel: WheelId, slot: int, seq: int | None) -> Frame:
    """Reads the frame at the beginning of ``buffer``; what follows it is not looked at.

    The columns are views on ``buffer``: no byte of content is copied, no message looped over.

    Args:
        buffer: at least the whole frame.
        wheel: whose frame it must be.
        slot: in whose file it was found.
        seq: which one it must be; None = any.

    Raises:
        FrameDamaged: the bytes are not that frame.
    """
    header = decode_header(buffer, available_bytes=len(buffer))
    checksum = crc32c(memoryview(buffer)[_CHECKED_FROM : header.length_bytes])
    if checksum != header.checksum:
        raise FrameDamaged(DamageReason.CHECKSUM)
    if header.wheel_hash != wheel.hash64 or header.slot != slot or seq not in {None, header.seq}:
        raise FrameDamaged(
            DamageReason.MISPLACED,
            f"slot {header.slot}, seq {header.seq}, wheel hash {header.wheel_hash:016x}",
        )
    try:
        kind = Kind(header.kind)
    except ValueError:
        raise FrameDamaged(DamageReason.KIND, str(header.kind)) from None
    if kind is Kind.CANCELS:
        columns = _decode_cancels(buffer, header)
    else:
        columns = _decode_messages(buffer, header)
    return Frame(kind, wheel, slot, header.seq, header.accepted_at_ms, header.length_bytes, columns)


def _decode_cancels(buffer: Buffer, header: FrameHeader) -> Columns:
    rows = header.messages
    _check_columns_length(header, rows * _CANCEL_ROW_BYTES)
    ids_end = HEADER_LENGTH_BYTES + rows * ID_LENGTH_BYTES
    ids = np.frombuffer(buffer, np.uint8, rows * ID_LENGTH_BYTES, HEADER_LENGTH_BYTES)
    due_offsets = np.frombuffer(buffer, "<u2", rows, ids_end)
    due_ms = due_offsets + np.int64(header.slot * 1000)
    return Columns.of_cancels(due_ms, ids.reshape(rows, ID_LENGTH_BYTES))


def _decode_messages(buffer: Buffer, header: FrameHeader) -> Columns:
    rows = header.messages
    at = HEADER_LENGTH_BYTES
    row_bytes = _MESSAGE_ROW_BYTES
    timestamps = _none_of(rows, np.int64)
    partitions = _none_of(rows, np.int32)
    if header.flags & _HAS_TIMESTAMPS:
        row_bytes += _TIMESTAMP_BYTES
    if header.flags & _HAS_PARTITIONS:
        row_bytes += _PARTITION_BYTES
    _check_columns_length(header, rows * row_bytes)
    if header.flags & _HAS_TIMESTAMPS:
        timestamps = np.frombuffer(buffer, "<i8", rows, at)
        at += rows * _TIMESTAMP_BYTES
    ids = np.frombuffer(buffer, np.uint8, rows * ID_LENGTH_BYTES, at)
    at += rows * ID_LENGTH_BYTES
    numbers = np.frombuffer(buffer, "<u4", rows, at)
    lengths = np.frombuffer(buffer, "<i4", rows * 3, at + rows * 4).reshape(3, rows)
    at += rows * 16
    if header.flags & _HAS_PARTITIONS:
        partitions = np.frombuffer(buffer, "<i4", rows, at)
        at += rows * _PARTITION_BYTES
    due_offsets = np.frombuffer(buffer, "<u2", rows, at)
    present = np.maximum(lengths, 0).astype(np.int64)
    content = present[0] + present[1] + present[2]
    starts, topics = _decode_tail(buffer, header, content, numbers)
    return Columns(
        due_ms=due_offsets + np.int64(header.slot * 1000),
        ids=ids.reshape(rows, ID_LENGTH_BYTES),
        topics=topics,
        topic_numbers=numbers,
        key_lengths=lengths[0],
        value_lengths=lengths[1],
        headers_lengths=lengths[2],
        partitions=partitions,
        timestamps_ms=timestamps,
        blob=memoryview(buffer),
        starts=starts,
    )


def _decode_tail(
    buffer: Buffer, header: FrameHeader, content: NDArray[np.int64], numbers: NDArray[np.uint32]
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Where each message's bytes start in ``buffer``, and the topics, both checked."""
    topics_at = HEADER_LENGTH_BYTES + header.columns_length
    blob_at = topics_at + header.topics_length
    end = blob_at + header.blob_length
    starts = content_starts(content)
    blob_length = int(starts[-1] + content[-1]) if len(content) else 0
    if end + -end % 8 != header.length_bytes or blob_length != header.blob_length:
        raise FrameDamaged(DamageReason.LENGTHS, "blob")
    topics = _decode_topics(bytes(buffer[topics_at:blob_at]))
    if len(topics) != header.topics or (header.messages and int(numbers.max()) >= header.topics):
        raise FrameDamaged(DamageReason.LENGTHS, "topics")
    starts += blob_at
    return starts, topics


def _check_columns_length(header: FrameHeader, length: int) -> None:
    end = HEADER_LENGTH_BYTES + header.columns_length + header.topics_length + header.blob_length
    if header.columns_length != length + -length % 8 or end > header.length_bytes:
        raise FrameDamaged(DamageReason.LENGTHS, "columns")


def _decode_topics(dictionary: bytes) -> tuple[str, ...]:
    """The topics of a frame. Nearly all frames of a wheel have one of a few short dictionaries."""
    known = _dictionaries.get(dictionary)
    if known is None:
        known = _decode_dictionary(dictionary)
        if len(dictionary) <= _LONGEST_MEMO_BYTES:
            length_bytes = 2 * len(dictionary) + _MEMO_OVERHEAD_BYTES * (len(known) + 1)
            _dictionaries.put(dictionary, known, length_bytes)
    return known


def _decode_dictionary(dictionary: bytes) -> tuple[str, ...]:
    topics = []
    at = 0
    try:
        while at < len(dictionary):
            (length,) = _TOPIC_LENGTH.unpack_from(dictionary, at)
            at += _TOPIC_LENGTH.size + length
            topics.append(dictionary[at - length : at].decode())
    except (struct.error, UnicodeDecodeError) as error:
        raise FrameDamaged(DamageReason.LENGTHS, "topics") from error
    if at != len(dictionary):
        raise FrameDamaged(DamageReason.LENGTHS, "topics")
    return tuple(topics)


def _none_of(rows: int, dtype: type[_Integer]) -> NDArray[_Integer]:
    return np.full(rows, -1, dtype=dtype)
