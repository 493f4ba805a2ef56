"""Rows that recovery puts in their places, and segments that the medium has lost."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel.storage.files.index import ROWS_PER_SEGMENT, list_segments, read_raw_rows
from delaywheel.storage.files.slot_files import list_slots
from delaywheel.storage.files.wheel_folder import Checkpoint
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, is_medium_error
from delaywheel.storage.folder.steps import Steps
from delaywheel.storage.frames.rows import (
    HOLE_ROW,
    INDEX_ROW,
    INDEX_ROW_LENGTH_BYTES,
    raw_rows,
)
from delaywheel.storage.writing.restoring import move_rows

_SEGMENT_BYTES = ROWS_PER_SEGMENT * INDEX_ROW_LENGTH_BYTES
# Rows that are gathered before they are written: some 40 MB.
_GATHERED_ROWS = 1 << 20


class FoundRows:
    """Rows of whole frames, gathered and put in their places; holds a bounded number of them."""

    def __init__(self, disk: Disk, folder: Path, safe_seq: int) -> None:
        self._disk = disk
        self._folder = folder
        self._safe_seq = safe_seq
        self._seqs: list[int] = []
        self._rows: list[bytes] = []
        self._marks: dict[int, NDArray[np.bool_]] = {}  # by segment
        self.last_seq = 0

    def add(self, seq: int, row: bytes) -> None:
        """Adds the row of a frame, if it lies behind the safe ones."""
        if seq <= self._safe_seq:
            return
        segment, place = divmod(seq - 1, ROWS_PER_SEGMENT)
        marks = self._marks.get(segment)
        if marks is None:
            marks = self._marks[segment] = np.zeros(ROWS_PER_SEGMENT, np.bool_)
        marks[place] = True
        self.last_seq = max(self.last_seq, seq)
        self._seqs.append(seq)
        self._rows.append(row)

    @property
    def is_full(self) -> bool:
        """Whether `put` must be called."""
        return len(self._seqs) >= _GATHERED_ROWS

    def put(self) -> Steps[None]:
        """Writes the gathered rows where the index has others; the caller syncs them."""
        if not self._seqs:
            return
        seqs, rows = np.array(self._seqs, np.int64), raw_rows(b"".join(self._rows))
        self._seqs, self._rows = [], []
        order = np.argsort(seqs, kind="stable")
        seqs, rows = seqs[order], rows[order]
        segments, firsts = np.unique((seqs - 1) // ROWS_PER_SEGMENT, return_index=True)
        for segment, first, end in zip(
            segments.tolist(), firsts.tolist(), [*firsts[1:].tolist(), len(seqs)], strict=True
        ):
            places = (seqs[first:end] - 1) % ROWS_PER_SEGMENT
            _put(self._disk, self._folder, segment, places, rows[first:end])
            yield

    def marks(self, first_seq: int, count: int) -> NDArray[np.bool_]:
        """Marks the seqs, of one segment, whose rows were added."""
        segment, place = divmod(first_seq - 1, ROWS_PER_SEGMENT)
        marks = self._marks.get(segment)
        return np.zeros(count, np.bool_) if marks is None else marks[place : place + count]


def _put(
    disk: Disk, folder: Path, segment: int, places: NDArray[np.int64], rows: NDArray[Any]
) -> None:
    """Writes rows of one segment that it has not already; rows before them may become zeros."""
    first_seq = segment * ROWS_PER_SEGMENT + 1
    there = np.frombuffer(HOLE_ROW * (int(places[-1]) + 1), INDEX_ROW).copy()
    for _, found in read_raw_rows(disk, folder, first_seq, first_seq + len(there) - 1):
        there[: len(found)] = found
    changed = np.flatnonzero(there[places] != rows)
    if not len(changed):
        return
    runs = np.split(changed, np.flatnonzero(np.diff(places[changed]) != 1) + 1)
    file = disk.open(layout.index_path(folder, segment), create=True)
    try:
        for run in runs:
            offset = int(places[run[0]]) * INDEX_ROW_LENGTH_BYTES
            file.write_at((rows[run].tobytes(),), offset)
    except OSError as error:
        if not is_medium_error(error):
            raise
        move_rows(disk, folder, {first_seq + int(places[n]): rows[n].tobytes() for n in changed})
    finally:
        file.close()


def lost_behind(
    disk: Disk, folder: Path, known: Checkpoint | None, end_seq: int, *, at_start: bool
) -> int | None:
    """Returns the seq behind which the medium may have lost a segment, or a part; None: it has not.

    Where the index, which must go to `end_seq`, is full to the end of a segment, or has none, the
    next one may be lost. Frames behind it may also be what a death before their rows left: then
    nobody was told of them, and it does no harm that they count.

    Args:
        known: The checkpoint; without one the first existing segment is the first.
        at_start: What an earlier process wrote is not known.
    """
    lengths = dict(disk.list_sizes(folder))
    segments = list_segments(disk, folder)
    first = None if known is None else known.first_segment
    first = min(segments, default=0) if first is None else first
    if not segments and any(True for _ in list_slots(disk, folder)):
        return first * ROWS_PER_SEGMENT
    last = max([first, *segments])
    for segment in range(first, last + 1):
        length = lengths.get(layout.index_path(folder, segment).name, 0)
        end = segment * ROWS_PER_SEGMENT + min(length, _SEGMENT_BYTES) // INDEX_ROW_LENGTH_BYTES
        needed = end_seq if segment == last else (segment + 1) * ROWS_PER_SEGMENT
        if end < needed or (at_start and end == (last + 1) * ROWS_PER_SEGMENT):
            return end
    return None


def whole_segments(disk: Disk, folder: Path, first_seq: int, last_seq: int) -> Steps[None]:
    """Makes every segment from one seq to another as long as it must be, and syncs it.

    What is added reads as holes. The first segment is made even if it gets no row: without it, what
    a later one that was kept stands behind would seem deleted.
    """
    first = (first_seq - 1) // ROWS_PER_SEGMENT
    for segment in range(first, max(first + 1, -(-last_seq // ROWS_PER_SEGMENT))):
        rows = min(last_seq - segment * ROWS_PER_SEGMENT, ROWS_PER_SEGMENT)
        with closing(disk.open(layout.index_path(folder, segment), create=True)) as file:
            if file.size() < rows * INDEX_ROW_LENGTH_BYTES:
                try:
                    file.write_at((HOLE_ROW,), (rows - 1) * INDEX_ROW_LENGTH_BYTES)
                except OSError as error:
                    if not is_medium_error(error):
                        raise
                    move_rows(disk, folder, {segment * ROWS_PER_SEGMENT + rows: HOLE_ROW})
                yield
            file.sync_data()
        yield
