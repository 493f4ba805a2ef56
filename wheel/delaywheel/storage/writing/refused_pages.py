"""Moves a slot file away from pages that the medium neither returns nor takes.

A page that cannot be read cannot be written in part either: the kernel would have to read the rest
of it first. So frames that share such a page cannot be repaired one by one, and nothing can be
appended behind them. They are kept here until all frames of the page have come from other copies;
then the whole file is rewritten, and replaces the old one.

Until then the old file stays: the medium may return the page after all. A file that is larger than
`MOST_BYTES` stays in any case. So does one with an unreadable page while the index has holes whose
frames were not sought in all files: such a frame may lie in the page, and perhaps nowhere else.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel.storage.files.pages import PAGE_BYTES, read_around
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.frames.bundle import FrameCopy

_AT_ONCE_BYTES = 64 * PAGE_BYTES

MOST_BYTES = 16 << 20
"""A larger file would hold up what else the disk has to do for too long.

So no more than this is kept of frames that wait for others of their pages, in each copy of a wheel.
"""

Extent = tuple[int, int]
"""The first byte, and the one behind the last."""


class RefusedFrames:
    """Frames of one copy that the medium did not take, until their pages are whole."""

    def __init__(self) -> None:
        self._copies: dict[int, FrameCopy] = {}
        self._bytes = 0

    def put(self, copy: FrameCopy) -> None:
        """Keeps a frame; the oldest ones make room for it."""
        if copy.seq in self._copies:
            self._drop(copy.seq)
        self._copies[copy.seq] = copy
        self._bytes += len(copy.content)
        while self._bytes > MOST_BYTES:
            self._drop(next(iter(self._copies)))

    def of_slot(self, slot: int) -> list[FrameCopy]:
        """Returns those of one slot."""
        return [copy for copy in self._copies.values() if copy.slot == slot]

    def drop_below(self, floor: int) -> None:
        """Drops those of finished slots."""
        self._drop_all(lambda copy: copy.slot < floor)

    def drop_slot(self, slot: int) -> None:
        """Drops those of one slot, which was moved."""
        self._drop_all(lambda copy: copy.slot == slot)

    def cut_behind(self, last_seq: int) -> None:
        """Drops those beyond the end of the wheel."""
        self._drop_all(lambda copy: copy.seq > last_seq)

    def _drop_all(self, goes: Callable[[FrameCopy], bool]) -> None:
        for seq in [seq for seq, copy in self._copies.items() if goes(copy)]:
            self._drop(seq)

    def _drop(self, seq: int) -> None:
        self._bytes -= len(self._copies.pop(seq).content)


def read_file(disk: Disk, path: Path, length: int) -> tuple[bytearray, list[Extent]] | None:
    """Reads a file but for the pages that the medium does not return; None: it is too large.

    Returns the content, with zeros in their place and up to the length if it is shorter, and where
    they are. Raises OSError if it cannot be opened, or the medium is not the cause.
    """
    with closing(disk.open_read(path)) as file:
        size = file.size()
        if max(size, length) > MOST_BYTES:
            return None
        content, unread = bytearray(max(size, length)), list[Extent]()
        for begin in range(0, size, _AT_ONCE_BYTES):
            end = min(begin + _AT_ONCE_BYTES, size)
            for first, last, piece in read_around(file, begin, end):
                if piece is None:
                    unread.append((first, last))
                else:
                    content[first:last] = piece
        return content, unread


def meeting(rows: NDArray[Any], extents: list[Extent]) -> NDArray[np.bool_]:
    """Marks the rows whose frames lie, at least in part, in one of these extents."""
    begins = rows["offset"].astype(np.int64)
    ends = begins + rows["length"]
    meets = np.zeros(len(rows), np.bool_)
    for begin, end in extents:
        meets |= (begins < end) & (ends > begin)
    return meets
