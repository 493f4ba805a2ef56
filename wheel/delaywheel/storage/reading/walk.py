"""Walks the headers of a slot file, frame by frame from byte 0."""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import File
from delaywheel.storage.frames.format import (
    CHECKED_FROM,
    HEADER,
    HEADER_LENGTH_BYTES,
    MAGIC,
    MAGIC_NUMBER,
    NEWEST_READ,
    OLDEST_READ,
    FrameDamaged,
    FrameHeader,
    decode_header,
)

# Bytes to read at once: few if the next header lies beyond what was read, twice as many each time
# that small frames lie close together.
_LEAST_PIECE_BYTES = 4 * 1024
_PIECE_BYTES = 64 * 1024
_DENSE_PIECE_BYTES = 256 * 1024  # where many headers are examined together
_length_of = struct.Struct("<I").unpack_from
_fields_of = struct.Struct("<4sIBB2xIQQ8xI16xI").unpack_from  # some of `format.HEADER`
_LENGTH_AT = HEADER.fields["length_bytes"][1]  # type: ignore[index]  # a dtype with fields


def walk_headers(
    file: File, wheel: WheelId, slot: int, begin: int, end: int
) -> Iterator[tuple[int, FrameHeader]]:
    """Yields offsets and headers of the frames that lie in [begin, end).

    Ends at the first place where no frame of this wheel and slot begins, or where one would not
    fit. Only headers are read: nothing proves that a frame, or even its header, is good.

    Raises:
        OSError: The medium reported an error.
    """
    piece, piece_begin, piece_bytes = memoryview(b""), begin, _LEAST_PIECE_BYTES
    offset, wheel_hash = begin, wheel.hash64
    while offset + HEADER_LENGTH_BYTES <= end:
        at = offset - piece_begin
        if at + HEADER_LENGTH_BYTES > len(piece):
            is_close = 0 < at <= len(piece)
            piece_bytes = min(2 * piece_bytes, _PIECE_BYTES) if is_close else _LEAST_PIECE_BYTES
            piece = memoryview(file.read_at(min(piece_bytes, end - offset), offset))
            piece_begin, at = offset, 0
        try:
            header = decode_header(
                piece[at : at + HEADER_LENGTH_BYTES], available_bytes=end - offset
            )
        except FrameDamaged:
            return
        if header.wheel_hash != wheel_hash or header.slot != slot:
            return
        yield offset, header
        offset += header.length_bytes


def walk_together(
    file: File, wheel: WheelId, slot: int, end: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
    """Yields the same from byte 0 on, several at a time: offsets and headers (``format.HEADER``).

    Raises:
        OSError: The medium reported an error.
    """
    begin, piece_bytes = 0, _LEAST_PIECE_BYTES
    while begin + HEADER_LENGTH_BYTES <= end:
        piece = file.read_at(min(piece_bytes, end - begin), begin)
        places, after = _chain(piece, end - begin)
        if not places:
            return
        offsets = np.array(places, np.int64)
        headers = np.frombuffer(
            b"".join([piece[place : place + HEADER_LENGTH_BYTES] for place in places]), HEADER
        )
        wrong = (
            (headers["magic"] != MAGIC_NUMBER)
            | (headers["version"] < OLDEST_READ)
            | (headers["version"] > NEWEST_READ)
            | (headers["wheel_hash"] != wheel.hash64)
            | (headers["slot"] != slot)
        )
        good = int(wrong.argmax()) if wrong.any() else len(wrong)
        if good:
            yield offsets[:good] + begin, headers[:good]
        if good < len(wrong) or after is None:
            return
        is_dense = len(places) > 1
        piece_bytes = min(2 * piece_bytes, _DENSE_PIECE_BYTES) if is_dense else _LEAST_PIECE_BYTES
        begin += after


class WalkedFrame(NamedTuple):
    """A frame with the right checksum, and where it lies."""

    seq: int
    offset: int
    length_bytes: int
    kind: int
    rows: int


def walk_checked(
    content: bytes, wheel: WheelId, slot: int, last_seq: int
) -> list[WalkedFrame] | None:
    """Returns the frames of a whole slot file, up to the first with a later seq.

    Frame by frame, since a numpy call costs as much as some twenty frames do here, and there may
    be as many files as frames.

    Returns:
        None if bytes follow that are no frame of this wheel and slot, or a checksum is wrong.
    """
    frames: list[WalkedFrame] = []
    view, wheel_hash = memoryview(content), wheel.hash64
    at, end = 0, len(content)
    while at + HEADER_LENGTH_BYTES <= end:
        magic, checksum, version, kind, its_slot, its_wheel, seq, rows, length = _fields_of(
            view, at
        )
        is_here = magic == MAGIC and its_slot == slot and its_wheel == wheel_hash
        if not is_here or not OLDEST_READ <= version <= NEWEST_READ:
            return None
        if seq > last_seq:
            return frames
        if not HEADER_LENGTH_BYTES <= length <= end - at:
            return None
        if crc32c(view[at + CHECKED_FROM : at + length]) != checksum:
            return None
        frames.append(WalkedFrame(seq, at, length, kind, rows))
        at += length
    return frames if at == end else None


def _chain(piece: bytes, available_bytes: int) -> tuple[list[int], int | None]:
    """Follows headers by their lengths; returns where they lie, and where the next one does.

    None: the last one states an impossible length, and is not among them.
    """
    places: list[int] = []
    at, last = 0, len(piece) - HEADER_LENGTH_BYTES
    while at <= last:
        (length,) = _length_of(piece, at + _LENGTH_AT)
        if length < HEADER_LENGTH_BYTES or length > available_bytes - at:
            return places, None
        places.append(at)
        at += length
    return places, at
