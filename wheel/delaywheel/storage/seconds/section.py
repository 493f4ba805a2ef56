"""The bytes of a section: what one fill adds to a slot file.

    header, 64 bytes | columns, padded to 8 | topics | blob | zeros

Rows are ordered by kind, seq and place in their frame, so a section follows from frames and fill
records alone: it is the same bytes on every member. The checksum covers everything behind it, and
the header says where in its file the section lies.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import Buffer
from delaywheel.storage.frames.columns import ID_LENGTH_BYTES
from delaywheel.storage.frames.encode import FrameTopics
from delaywheel.storage.frames.format import (
    HAS_PARTITIONS,
    HAS_TIMESTAMPS,
    DamageReason,
    FrameDamaged,
)
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.journal.pieces import Pieces
from delaywheel.storage.seconds.rows import PlacedRows

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
        ("releases", "<u4"),
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
        releases: Those of these that are releases.
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
    releases: int
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
    """

    slots: list[int]
    headers: NDArray[Any]
    pieces: Pieces

    def placed(self, offsets: Sequence[int]) -> Iterator[tuple[bytearray, SectionHead]]:
        """Returns the bytes of each section, which is to lie at that offset, and its head."""
        self.headers["offset"] = offsets
        raw = self.headers.tobytes()
        for at, content in zip(
            range(0, len(raw), HEADER_LENGTH_BYTES), self.pieces.each(), strict=True
        ):
            content[:HEADER_LENGTH_BYTES] = raw[at : at + HEADER_LENGTH_BYTES]
            checksum = crc32c(memoryview(content)[_CHECKED_FROM:])
            struct.pack_into("<I", content, 4, checksum)
            yield content, SectionHead._make(_HEADER.unpack_from(content))


def encode_sections(rows: PlacedRows, *, wheel: WheelId, fill: int) -> Sections:
    """Encodes rows, sorted by second, as a section for each second."""
    slots, columns = rows.slots, rows.columns
    begins = np.ones(len(slots), bool)
    np.not_equal(slots[1:], slots[:-1], out=begins[1:])
    pieces = Pieces(begins.nonzero()[0], len(slots))
    headers = np.zeros(len(pieces.firsts), _HEADER_ROWS)
    is_name = rows.kinds != Kind.MESSAGES
    names = np.add.reduceat(is_name, pieces.firsts, dtype=np.int64)
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
    is_release = rows.kinds == Kind.RELEASES
    headers["releases"] = np.add.reduceat(is_release, pieces.firsts, dtype=np.int64)
    headers["flags"] = timed * HAS_TIMESTAMPS + placed * HAS_PARTITIONS + (names > 0) * HAS_NAMES
    headers["length_bytes"] = pieces.lengths
    return Sections(slots[pieces.firsts].tolist(), headers, pieces)


def decode_section_head(
    buffer: Buffer, at: int, *, wheel: WheelId, slot: int, begin: int = 0
) -> SectionHead:
    """Decodes and checks the section at a place of its file, without decoding its rows.

    Args:
        begin: Where the buffer begins in that file.

    Raises:
        FrameDamaged: No whole section of this wheel and second lies there.
    """
    place, left = at - begin, len(buffer) - (at - begin)
    if left < HEADER_LENGTH_BYTES:
        raise FrameDamaged(DamageReason.SHORT, f"{left} bytes")
    head = SectionHead._make(_HEADER.unpack_from(buffer, place))
    if head.magic != MAGIC:
        raise FrameDamaged(DamageReason.MAGIC)
    if (head.wheel_hash, head.slot, head.offset) != (wheel.hash64, slot, at):
        raise FrameDamaged(DamageReason.MISPLACED, f"slot {head.slot} at {head.offset}")
    if head.length_bytes > left or head.length_bytes < HEADER_LENGTH_BYTES:
        raise FrameDamaged(DamageReason.SHORT, f"{left} of {head.length_bytes} bytes")
    content = memoryview(buffer)[place + _CHECKED_FROM : place + head.length_bytes]
    if crc32c(content) != head.checksum:
        raise FrameDamaged(DamageReason.CHECKSUM)
    if head.version != VERSION:
        raise FrameDamaged(DamageReason.VERSION, str(head.version))
    length = HEADER_LENGTH_BYTES + head.columns_length_bytes
    length += head.topics_length + head.blob_length
    if length + -length % 8 != head.length_bytes or head.rows < head.names:
        raise FrameDamaged(DamageReason.LENGTHS, "section")
    return head


def sections_in(
    content: Buffer, end: int, *, wheel: WheelId, slot: int, begin: int = 0
) -> Iterator[SectionHead]:
    """Decodes and checks sections one after another, up to a place of their file.

    Args:
        begin: Where the content begins in that file, with a section.

    Raises:
        FrameDamaged: The next one is not whole.
    """
    at = begin
    while at < end:
        head = decode_section_head(content, at, wheel=wheel, slot=slot, begin=begin)
        yield head
        at += head.length_bytes


def section_length_at(buffer: Buffer, place: int) -> int:
    """Returns the length of a section from its header, unchecked; 0 beyond the buffer's end."""
    return int.from_bytes(
        buffer[place + HEADER_LENGTH_BYTES - 4 : place + HEADER_LENGTH_BYTES], "little"
    )


def empty_section(*, wheel: WheelId, slot: int, fill: int, offset: int, length_bytes: int) -> bytes:
    """Encodes a section without rows, in place of one that no member has any more."""
    blob_length = length_bytes - HEADER_LENGTH_BYTES
    fields = (VERSION, 0, 0, slot, wheel.hash64, fill, offset, 0, 0, 0, 0, blob_length)
    content = bytearray(_HEADER.pack(MAGIC, 0, *fields, length_bytes)) + bytes(blob_length)
    struct.pack_into("<I", content, 4, crc32c(memoryview(content)[_CHECKED_FROM:]))
    return bytes(content)
