"""The bytes of frames, as docs/FORMAT.md shows them; rows.py has those of index rows.

decoding.py reads many frames at once, and places.py, unlisted.py and checking.py what they need of
headers. Frames are made in encode.py.

The header names the frame's wheel, slot and seq, so misplaced bytes are detected; the checksum
covers everything behind it.
"""

import struct
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import Buffer
from delaywheel.storage.frames.bounded import BoundedTable
from delaywheel.storage.frames.columns import ID_LENGTH_BYTES, Columns, content_starts
from delaywheel.storage.frames.kinds import FIRST_VERSIONS, Kind
from delaywheel.storage.frames.rows import INDEX_ROW, MOST_ROWS, index_row, index_rows

VERSION: Final = 3
"""The newest version that this release writes: raised one release after readers know it, see
FORMAT.md. `FIRST_VERSIONS` has that of each kind."""
OLDEST_READ: Final = 1
NEWEST_READ: Final = 3
"""The versions that this release reads, from the first to the last."""
MAGIC: Final = b"DWfr"
MAGIC_NUMBER: Final = int.from_bytes(MAGIC, "little")  # as it is found in a `HEADER`
HEADER_LENGTH_BYTES: Final = 64

HEADER: Final[np.dtype[Any]] = np.dtype(
    [
        ("magic", "<u4"),
        ("checksum", "<u4"),
        ("version", "u1"),
        ("kind", "u1"),
        ("flags", "<u2"),
        ("slot", "<u4"),
        ("wheel_hash", "<u8"),
        ("seq", "<u8"),
        ("accepted_at_ms", "<i8"),
        ("messages", "<u4"),
        ("topics", "<u4"),
        ("columns_length", "<u4"),
        ("topics_length", "<u4"),
        ("blob_length", "<u4"),
        ("length_bytes", "<u4"),
    ]
)
CHECKED_FROM: Final = 8  # magic and checksum itself; the magic is compared as it is

_HEADER = struct.Struct("<4sIBBHIQQqIIIIII")
_TOPIC_LENGTH = struct.Struct("<H")
NO_SLOT: Final = 1 << 32  # above every slot that a frame can hold

# Topics of decoded frames, so that nearly all frames share a few tuples.
_dictionaries = BoundedTable[bytes, tuple[str, ...]](8 << 20)
_LONGEST_MEMO_BYTES = 16 << 10
_MEMO_OVERHEAD_BYTES = 128  # about what Python takes for a string in a tuple, or for an entry

_MOST_ROWS = np.array([0, *(MOST_ROWS[kind] for kind in Kind)])

_Integer = TypeVar("_Integer", np.int32, np.int64)

HAS_PARTITIONS: Final = 1
HAS_TIMESTAMPS: Final = 2
ALL_FLAGS: Final = HAS_PARTITIONS | HAS_TIMESTAMPS

# Bytes of one row in the columns that every frame of its kind has.
NAME_ROW_BYTES: Final = ID_LENGTH_BYTES + 4 + 2
MESSAGE_ROW_BYTES: Final = ID_LENGTH_BYTES + 4 * 4 + 2
PARTITION_BYTES: Final = 4
TIMESTAMP_BYTES: Final = 8
LONGEST_ROW_BYTES: Final = MESSAGE_ROW_BYTES + PARTITION_BYTES + TIMESTAMP_BYTES


def row_length_bytes(kind: int, flags: int) -> int:
    """Returns the bytes of one row in a frame's columns."""
    if kind != Kind.MESSAGES:
        return NAME_ROW_BYTES
    timestamp = TIMESTAMP_BYTES if flags & HAS_TIMESTAMPS else 0
    return MESSAGE_ROW_BYTES + timestamp + (PARTITION_BYTES if flags & HAS_PARTITIONS else 0)


class DamageReason(Enum):
    """Why bytes are not the expected frame."""

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


class FrameDamaged(Exception):
    """The bytes are not the expected frame."""

    def __init__(self, reason: DamageReason, detail: str = "") -> None:
        super().__init__(f"{reason.value}{': ' if detail else ''}{detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A decoded frame, whose columns are views on its bytes."""

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


def index_row_of(frame: Frame, offset: int) -> bytes:
    """Returns the row of a frame that was read at ``offset`` of its slot file."""
    rows = len(frame.columns)
    return index_row(
        frame.slot,
        offset,
        frame.length_bytes,
        rows,
        kind=frame.kind,
    )


def index_rows_of_headers(headers: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[Any]:
    """Returns the rows of frames from headers (``HEADER``) and offsets, or raises FrameDamaged."""
    kinds = headers["kind"].astype(np.int64)
    unfit = (kinds < 1) | (kinds >= len(_MOST_ROWS))
    unfit |= headers["messages"] > _MOST_ROWS[np.where(unfit, 0, kinds)]
    if np.count_nonzero(unfit):
        kind, count = headers["kind"][unfit][0], headers["messages"][unfit][0]
        raise FrameDamaged(DamageReason.KIND, f"{kind} with {count} rows")
    rows = np.empty(len(headers), INDEX_ROW)
    for kind in Kind:
        chosen = kinds == kind
        if np.count_nonzero(chosen):
            part = headers[chosen]
            columns = (part[name].astype(np.int64) for name in ("slot", "length_bytes", "messages"))
            slots, lengths, counts = columns
            rows[chosen] = index_rows(slots, offsets[chosen], lengths, counts, kind=kind)
    return rows


def topic_entry(topic: str) -> bytes:
    """Encodes a topic for a frame's dictionary."""
    encoded = topic.encode()
    return _TOPIC_LENGTH.pack(len(encoded)) + encoded


# --- decoding


def decode_header(buffer: Buffer, *, available_bytes: int) -> FrameHeader:
    """Decodes the fixed part, checking only magic and version.

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
    """Decodes the frame at the beginning of ``buffer``, ignoring what follows.

    The columns are views on ``buffer``: no byte of content is copied, no message looped over.
    Raises FrameDamaged if the bytes are not that frame; any seq will do if that is None.
    """
    try:
        header = decode_header(buffer, available_bytes=len(buffer))
    except FrameDamaged as damage:
        if damage.reason is DamageReason.VERSION and not _has_checksum(buffer):
            raise FrameDamaged(DamageReason.CHECKSUM) from None
        raise
    checksum = crc32c(memoryview(buffer)[CHECKED_FROM : header.length_bytes])
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
    if header.version < FIRST_VERSIONS[kind]:  # they said of no topic
        raise FrameDamaged(DamageReason.VERSION, f"{header.version} of {kind.name.lower()}")
    if kind is Kind.MESSAGES:
        columns = _decode_messages(buffer, header)
    else:
        columns = _decode_names(buffer, header)
    return Frame(kind, wheel, slot, header.seq, header.accepted_at_ms, header.length_bytes, columns)


def _has_checksum(buffer: Buffer) -> bool:
    """Whether the bytes are a whole frame of some version: each has these two fields there."""
    header = FrameHeader._make(_HEADER.unpack_from(buffer))
    content = memoryview(buffer)[CHECKED_FROM : header.length_bytes]
    return len(content) == header.length_bytes - CHECKED_FROM and crc32c(content) == header.checksum


def _decode_names(buffer: Buffer, header: FrameHeader) -> Columns:
    rows = header.messages
    _check_columns_length(header)
    ids_end = HEADER_LENGTH_BYTES + rows * ID_LENGTH_BYTES
    ids = np.frombuffer(buffer, np.uint8, rows * ID_LENGTH_BYTES, HEADER_LENGTH_BYTES)
    numbers = np.frombuffer(buffer, "<u4", rows, ids_end)
    due_offsets = np.frombuffer(buffer, "<u2", rows, ids_end + rows * 4)
    _, topics = _decode_tail(buffer, header, np.zeros(rows, np.int64), numbers)
    due_ms = due_offsets + np.int64(header.slot * 1000)
    return Columns.of_names(due_ms, ids.reshape(rows, ID_LENGTH_BYTES), topics, numbers)


def _decode_messages(buffer: Buffer, header: FrameHeader) -> Columns:
    rows = header.messages
    at = HEADER_LENGTH_BYTES
    timestamps = _none_of(rows, np.int64)
    partitions = _none_of(rows, np.int32)
    _check_columns_length(header)
    if header.flags & HAS_TIMESTAMPS:
        timestamps = np.frombuffer(buffer, "<i8", rows, at)
        at += rows * TIMESTAMP_BYTES
    ids = np.frombuffer(buffer, np.uint8, rows * ID_LENGTH_BYTES, at)
    at += rows * ID_LENGTH_BYTES
    numbers = np.frombuffer(buffer, "<u4", rows, at)
    lengths = np.frombuffer(buffer, "<i4", rows * 3, at + rows * 4).reshape(3, rows)
    at += rows * 16
    if header.flags & HAS_PARTITIONS:
        partitions = np.frombuffer(buffer, "<i4", rows, at)
        at += rows * PARTITION_BYTES
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
    """Returns where each message's bytes start in ``buffer``, and the topics, both checked."""
    topics_at = HEADER_LENGTH_BYTES + header.columns_length
    blob_at = topics_at + header.topics_length
    end = blob_at + header.blob_length
    starts = content_starts(content)
    blob_length = int(starts[-1] + content[-1]) if len(content) else 0
    if end + -end % 8 != header.length_bytes or blob_length != header.blob_length:
        raise FrameDamaged(DamageReason.LENGTHS, "blob")
    topics = decode_topics(bytes(buffer[topics_at:blob_at]))
    if len(topics) != header.topics or (header.messages and int(numbers.max()) >= header.topics):
        raise FrameDamaged(DamageReason.LENGTHS, "topics")
    starts += blob_at
    return starts, topics


def _check_columns_length(header: FrameHeader) -> None:
    length = header.messages * row_length_bytes(header.kind, header.flags)
    end = HEADER_LENGTH_BYTES + header.columns_length + header.topics_length + header.blob_length
    if header.columns_length != length + -length % 8 or end > header.length_bytes:
        raise FrameDamaged(DamageReason.LENGTHS, "columns")


def decode_topics(dictionary: bytes) -> tuple[str, ...]:
    """Decodes a frame's topics; cached, since most frames share a few short dictionaries."""
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
