"""The bytes of a section: what one fill adds to a slot file.

    header, 64 bytes | columns, padded to 8 | topics | blob | zeros

Rows are ordered by kind, seq and place in their frame, so a section follows from frames and fill
records alone: it is the same bytes on every member. The checksum covers everything behind it, and
the header says where in its file the section lies.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import Buffer
from delaywheel.storage.frames.columns import ID_LENGTH_BYTES, Columns, content_starts
from delaywheel.storage.frames.encode import FrameTopics
from delaywheel.storage.frames.format import (
    HAS_PARTITIONS,
    HAS_TIMESTAMPS,
    DamageReason,
    FrameDamaged,
    decode_topics,
)
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.journal.pieces import Pieces
from delaywheel.storage.seconds.rows import FilledRows

VERSION: Final = 1
MAGIC: Final = b"DWsc"
HEADER_LENGTH_BYTES: Final = 64
_CHECKED_FROM: Final = 8
HAS_NAMES: Final = 4  # beside the flags of frames: a column of kinds

_HEADER: Final = struct.Struct("<4sIBBHIQQQIIIIII")
_HEADER_ROWS: Final[np.dtype[Any]] = np.dtype(
    [
        ("magic", "S4"),
        ("checksum", "<u4"),
        ("version", "u1"),
        ("unused", "u1"),
        ("flags", "<u2"),
        ("slot", "<u4"),
        ("wheel_hash", "<u8"),
        ("fill", "<u8"),
        ("offset", "<u8"),
        ("rows", "<u4"),
        ("names", "<u4"),
        ("topics", "<u4"),
        ("topics_length", "<u4"),
        ("blob_length", "<u4"),
        ("length_bytes", "<u4"),
    ]
)


class SectionHead(NamedTuple):
    """The fixed part of a section, in the order of its bytes.

    Attributes:
        fill: The seq of the record that filled it.
        offset: Where it lies in its file.
        rows: All its rows.
        names: Those of them that are no messages.
    """

    magic: bytes
    checksum: int
    version: int
    unused: int
    flags: int
    slot: int
    wheel_hash: int
    fill: int
    offset: int
    rows: int
    names: int
    topics: int
    topics_length: int
    blob_length: int
    length_bytes: int

    @property
    def columns_length_bytes(self) -> int:
        """The length of all columns, with the zeros behind them."""
        row = 8 + 8 + ID_LENGTH_BYTES + 4 + 4 + 12 + 2
        row += 8 if self.flags & HAS_TIMESTAMPS else 0
        row += 4 if self.flags & HAS_PARTITIONS else 0
        row += 1 if self.flags & HAS_NAMES else 0
        return self.rows * row + -self.rows * row % 8


@dataclass(frozen=True, slots=True, eq=False)
class Sections:
    """The sections of one fill, before they are placed.

    Attributes:
        slots: The second of each, ascending.
        messages: How many messages each has.
        names: How many other rows.
        releases: How many of these are releases.
    """

    slots: NDArray[np.int64]
    messages: NDArray[np.int64]
    names: NDArray[np.int64]
    releases: NDArray[np.int64]
    headers: NDArray[Any]
    pieces: Pieces

    def placed(self, offsets: NDArray[np.int64]) -> Iterator[tuple[bytearray, int]]:
        """Returns the bytes of each section, which is to lie at that offset, and its checksum."""
        self.headers["offset"] = offsets
        raw = self.headers.tobytes()
        for at, content in zip(
            range(0, len(raw), HEADER_LENGTH_BYTES), self.pieces.each(), strict=True
        ):
            content[:HEADER_LENGTH_BYTES] = raw[at : at + HEADER_LENGTH_BYTES]
            checksum = crc32c(memoryview(content)[_CHECKED_FROM:])
            struct.pack_into("<I", content, 4, checksum)
            yield content, checksum


def encode_sections(rows: FilledRows, *, wheel: WheelId, fill: int) -> Sections:
    """Encodes rows, sorted by second, as a section for each second."""
    slots, columns = rows.slots, rows.columns
    begins = np.ones(len(slots), bool)
    np.not_equal(slots[1:], slots[:-1], out=begins[1:])
    pieces = Pieces(begins.nonzero()[0], len(slots))
    headers = np.zeros(len(pieces.firsts), _HEADER_ROWS)
    is_name = rows.kinds != Kind.MESSAGES
    names = np.add.reduceat(is_name, pieces.firsts, dtype=np.int64)
    releases = np.add.reduceat(rows.kinds == Kind.RELEASES, pieces.firsts, dtype=np.int64)
    timed, placed = pieces.have(columns.timestamps_ms >= 0), pieces.have(columns.partitions >= 0)
    topics = FrameTopics(len(columns.topics), columns.topic_numbers, pieces.counts)
    pieces.add([bytes(HEADER_LENGTH_BYTES)] * len(headers))
    pieces.add_column(rows.seqs, "<i8")
    pieces.add_column(rows.accepted_at_ms, "<i8")
    pieces.add_column(columns.timestamps_ms, "<i8", timed)
    pieces.add_column(columns.ids, "u1")
    pieces.add_column(rows.places, "<u4")
    pieces.add_column(topics.numbers, "<u4")
    for lengths in (columns.key_lengths, columns.value_lengths, columns.headers_lengths):
        pieces.add_column(lengths, "<i4")
    pieces.add_column(columns.partitions, "<i4", placed)
    pieces.add_column(columns.due_ms - slots * 1000, "<u2")
    pieces.add_column(rows.kinds, "u1", names > 0)
    pieces.pad()
    headers["topics_length"] = pieces.add_topics(topics, columns.topics)
    before = pieces.lengths.copy()
    pieces.add(rows.content(pieces.firsts))
    headers["blob_length"] = pieces.lengths - before
    pieces.pad()
    headers["magic"], headers["version"], headers["wheel_hash"] = MAGIC, VERSION, wheel.hash64
    headers["slot"], headers["fill"] = slots[pieces.firsts], fill
    headers["rows"], headers["names"] = pieces.counts, names
    headers["topics"] = np.diff(topics.edges)
    headers["flags"] = timed * HAS_TIMESTAMPS + placed * HAS_PARTITIONS + (names > 0) * HAS_NAMES
    headers["length_bytes"] = pieces.lengths
    return Sections(slots[pieces.firsts], pieces.counts - names, names, releases, headers, pieces)


def decode_section_head(buffer: Buffer, at: int, *, wheel: WheelId, slot: int) -> SectionHead:
    """Decodes and checks the section at a place of its file, without decoding its rows.

    Raises:
        FrameDamaged: No whole section of this wheel and second lies there.
    """
    if len(buffer) - at < HEADER_LENGTH_BYTES:
        raise FrameDamaged(DamageReason.SHORT, f"{len(buffer) - at} bytes")
    head = SectionHead._make(_HEADER.unpack_from(buffer, at))
    if head.magic != MAGIC:
        raise FrameDamaged(DamageReason.MAGIC)
    if (head.wheel_hash, head.slot, head.offset) != (wheel.hash64, slot, at):
        raise FrameDamaged(DamageReason.MISPLACED, f"slot {head.slot} at {head.offset}")
    end = at + head.length_bytes
    if end > len(buffer) or head.length_bytes < HEADER_LENGTH_BYTES:
        raise FrameDamaged(DamageReason.SHORT, f"{len(buffer) - at} of {head.length_bytes} bytes")
    if crc32c(memoryview(buffer)[at + _CHECKED_FROM : end]) != head.checksum:
        raise FrameDamaged(DamageReason.CHECKSUM)
    if head.version != VERSION:
        raise FrameDamaged(DamageReason.VERSION, str(head.version))
    length = HEADER_LENGTH_BYTES + head.columns_length_bytes
    length += head.topics_length + head.blob_length
    if length + -length % 8 != head.length_bytes or not 0 < head.rows >= head.names:
        raise FrameDamaged(DamageReason.LENGTHS, "section")
    return head


def decode_rows(buffer: Buffer, head: SectionHead) -> FilledRows:
    """Decodes the rows of a section that was checked; their content is not copied."""
    rows, at = head.rows, head.offset + HEADER_LENGTH_BYTES

    def column(dtype: str, items: int = 1) -> NDArray[Any]:
        nonlocal at
        found = np.frombuffer(buffer, dtype, rows * items, at)
        at += found.nbytes
        return found

    seqs, accepted_at_ms = column("<i8"), column("<i8")
    none = np.full(rows, -1, np.int64)
    timestamps = column("<i8") if head.flags & HAS_TIMESTAMPS else none
    ids = column("u1", ID_LENGTH_BYTES)
    places, numbers, lengths = column("<u4"), column("<u4"), column("<i4", 3).reshape(3, rows)
    partitions = column("<i4") if head.flags & HAS_PARTITIONS else none.astype(np.int32)
    due_ms = column("<u2") + np.int64(head.slot * 1000)
    kinds = column("u1") if head.flags & HAS_NAMES else np.ones(rows, np.uint8)
    topics_at = head.offset + HEADER_LENGTH_BYTES + head.columns_length_bytes
    blob_at = topics_at + head.topics_length
    topics = decode_topics(bytes(buffer[topics_at:blob_at]))
    content = np.maximum(lengths, 0).sum(axis=0, dtype=np.int64)
    if len(topics) != head.topics or int(numbers.max()) >= head.topics:
        raise FrameDamaged(DamageReason.LENGTHS, "topics")
    if int(content.sum()) != head.blob_length:
        raise FrameDamaged(DamageReason.LENGTHS, "blob")
    columns = Columns(
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
    return FilledRows(columns, seqs, accepted_at_ms, places, kinds)
