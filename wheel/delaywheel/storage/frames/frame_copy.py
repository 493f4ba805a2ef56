"""One frame that is copied from one node to another; many form a bundle (bundle.py)."""

from typing import NamedTuple


class FrameCopy(NamedTuple):
    """One frame as its holder has it.

    Attributes:
        seq: Its number in the wheel.
        row: Its index row (``format.INDEX_ROW``, 16 bytes): the mirror writes the same bytes at the
            same offset. Zeros if the holder's index segment is already deleted.
        content: The bytes of the frame; empty if its slot is finished (below the floor) and its
            file deleted: a mirror then takes only the row.
    """

    seq: int
    row: bytes
    content: bytes
