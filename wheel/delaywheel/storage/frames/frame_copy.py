"""One frame that is copied from one node to another; many form a bundle (bundle.py)."""

from typing import NamedTuple


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
