"""A frame on its way from one copy of a wheel to another."""

import struct
from typing import Final, NamedTuple

_PLACE: Final = struct.Struct("<I4xI4x")
"""Slot and length of an index row, for those who decide without reading what a frame holds."""


class FrameCopy(NamedTuple):
    """One frame as its holder has it.

    Attributes:
        seq: its number in the wheel.
        row: its index row (``format.INDEX_ROW``, 16 bytes): the mirror writes the same bytes at
            the same offset. Zeros when the holder's index segment is deleted already.
        content: the bytes of the frame; empty when its slot is finished (below the floor) and
            its file deleted: a mirror takes only the row.
    """

    seq: int
    row: bytes
    content: bytes

    def place(self) -> tuple[int, int]:
        """Slot and length in bytes, as the row says; (0, 0) when it is no row at all."""
        return _PLACE.unpack(self.row) if len(self.row) == _PLACE.size else (0, 0)
