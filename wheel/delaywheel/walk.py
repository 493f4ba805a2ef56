"""The headers of a slot file, one frame behind the other from byte 0."""

from collections.abc import Iterator

from delaywheel.disk import File
from delaywheel.format import HEADER_LENGTH_BYTES, FrameDamaged, FrameHeader, decode_header
from delaywheel.identity import WheelId

# Read at once: little where the next header lies beyond what was read, twice as much each time that
# small frames lie close together.
_LEAST_PIECE_BYTES = 4 * 1024
_PIECE_BYTES = 64 * 1024


def walk_headers(
    file: File, wheel: WheelId, slot: int, begin: int, end: int
) -> Iterator[tuple[int, FrameHeader]]:
    """Offsets and headers of the frames that lie in [begin, end).

    Ends at the first place where no frame of this wheel and slot begins, or where one would not
    fit. Only headers are looked at: nothing proves that a frame is good, or that a header is.

    Raises:
        OSError: the medium refused.
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
