"""Walks the headers of a slot file, frame by frame from byte 0."""

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import File
from delaywheel.storage.frames.checking import are_foreign
from delaywheel.storage.frames.format import (
    HEADER,
    HEADER_LENGTH_BYTES,
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
        wrong = are_foreign(headers, wheel, slot)
        good = int(wrong.argmax()) if wrong.any() else len(wrong)
        if good:
            yield offsets[:good] + begin, headers[:good]
        if good < len(wrong) or after is None:
            return
        is_dense = len(places) > 1
        piece_bytes = min(2 * piece_bytes, _DENSE_PIECE_BYTES) if is_dense else _LEAST_PIECE_BYTES
        begin += after


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
