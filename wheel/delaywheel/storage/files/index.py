"""A wheel's index: row n says where the frame with seq n + 1 lies.

It is cut into segments of a fixed number of rows. The writer appends rows only after the bytes that
they refer to, so if a row can be read, so can its frame; readers ignore a torn row at the end. A
segment is deleted once its greatest slot is below the floor; the last one stays, because it shows
how far the wheel goes. How many were deleted is noted durably before that (`Checkpoint`).

====================================================  ==============================================
a row of                                              is read as
====================================================  ==============================================
a segment below the first one that exists             gone: its slot is finished
any other missing segment, or behind a short one's    a hole: the medium has lost it
end with others after it
zeros, or with a wrong check value                    a hole: the medium has lost it
a page, or segment, that the medium cannot read       unreadable, as few as its pages allow
====================================================  ==============================================

Holes are restored from slot files (writing/restoring.py) or repaired from another node's copy, and
rewriting rows repairs the medium. If it does not, the segment moves to a new file of the same name;
readers that have the old one open find it with their next look. If a segment cannot even be opened,
all its rows are unreadable, as many as its length allows; opening is tried twice, because a first
failure may be transient.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.pages import read_around
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, File, is_medium_error
from delaywheel.storage.frames.rows import (
    GONE_ROW,
    HOLE_ROW,
    INDEX_ROW,
    INDEX_ROW_LENGTH_BYTES,
    UNREADABLE_ROW,
    checked_rows,
    filled_with,
    is_gone,
    is_hole,
    raw_rows,
)

ROWS_PER_SEGMENT = 65_536

OPEN_INDEXES = 256


class OpenIndexes:
    """The index segments that one thread has open: a bounded number for any number of wheels.

    The least recently used one is closed; it is opened again when needed.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit or OPEN_INDEXES
        self._used: dict[IndexWriter | IndexReader, None] = {}  # in the order of their last use

    def use(self, index: "IndexWriter | IndexReader") -> None:
        """Notes that a segment is open and in use."""
        self._used.pop(index, None)
        self._used[index] = None
        while len(self._used) > self._limit:
            next(iter(self._used)).close()

    def closed(self, index: "IndexWriter | IndexReader") -> None:
        """Notes that a segment is closed."""
        self._used.pop(index, None)


class IndexWriter:
    """Appends rows to an index, from ``last_seq`` on. ``append`` is for one thread."""

    def __init__(self, disk: Disk, folder: Path, *, opened: OpenIndexes | None = None) -> None:
        self._disk = disk
        self._open_indexes = opened or OpenIndexes()
        self._folder = folder
        self._segment = -1
        self._file: File | None = None
        self._unsynced: set[int] = set()
        self._lock = threading.Lock()
        self._known_top: tuple[int, int] | None = None  # of a segment, which no rewriting changes
        self.last_seq = 0

    def append(self, rows: NDArray[Any]) -> None:
        """Writes rows for the next seqs; ``last_seq`` moves with every segment written."""
        while len(rows):
            segment, row = divmod(self.last_seq, ROWS_PER_SEGMENT)
            part = rows[: ROWS_PER_SEGMENT - row]
            file = self._opened(segment)
            try:
                file.write_at((part.tobytes(),), row * INDEX_ROW_LENGTH_BYTES)
            finally:
                # After the write: a concurrent sync must not count it as done. And after a failed
                # one: rows that it wrote nevertheless count once they are seen (`look_again`).
                self.mark_unsynced((segment,))
            self.last_seq += len(part)
            rows = rows[len(part) :]

    def rewrite(self, seq: int, row: bytes) -> None:
        """Replaces the row of a seq up to ``last_seq``, unless its segment is deleted."""
        segment, place = divmod(seq - 1, ROWS_PER_SEGMENT)
        try:
            file = self._disk.open(layout.index_path(self._folder, segment))
        except FileNotFoundError:
            return
        try:
            file.write_at((row,), place * INDEX_ROW_LENGTH_BYTES)
        finally:
            self.mark_unsynced((segment,))  # a failed write may have written it
            file.close()

    def delete_below(
        self, floor: int, note: Callable[[int], object], undeletable: Undeletable
    ) -> Iterator[int]:
        """Deletes the leading segments all of whose slots are below ``floor``, never the last.

        One by one: yields the number of each. Only leading ones, so that one unbroken run of seqs
        is left: one that cannot be deleted stays, with all behind it. `note` is called before a
        segment is deleted, with the number of the next one: it must be durable when this returns.
        """
        # Listed again each time: meanwhile the wheel may have been cut, and what was last be gone.
        while len(segments := list_segments(self._disk, self._folder)) > 1:
            segment = segments[0]
            top = self._top(segment)
            if top is None or top >= floor:
                return
            note(segment + 1)
            if not undeletable.delete(self._disk, layout.index_path(self._folder, segment)):
                return
            yield segment

    def _top(self, segment: int) -> int | None:
        """Returns the greatest slot of a segment; None: of a hole it is not known."""
        if self._known_top is None or self._known_top[0] != segment:
            length = ROWS_PER_SEGMENT * INDEX_ROW_LENGTH_BYTES
            raw = raw_rows(_read_once(self._disk, self._folder, segment, 0, length) or b"")
            is_bare = (raw["length"] == 0) & ~is_gone(raw)  # at once, for holes that stay
            if len(raw) < ROWS_PER_SEGMENT or is_bare.any() or is_hole(checked_rows(raw)).any():
                return None
            self._known_top = segment, int(raw["slot"].max())
        return self._known_top[1]

    def look_again(self) -> None:
        """Sets ``last_seq`` to what can be read from the files."""
        self.last_seq = last_seq_of(self._disk, self._folder)

    def take_unsynced(self) -> set[int]:
        """Returns the segments that ``sync`` must make durable."""
        with self._lock:
            taken, self._unsynced = self._unsynced, set()
        return taken

    def mark_unsynced(self, segments: Iterable[int]) -> None:
        """Notes segments that may not be on the medium yet."""
        with self._lock:
            self._unsynced.update(segments)

    def sync(self, segments: set[int]) -> None:
        """Puts segments and their names on the medium."""
        for segment in sorted(segments):
            try:
                file = self._disk.open(layout.index_path(self._folder, segment))
            except FileNotFoundError:
                continue  # deleted meanwhile: below the floor
            with closing(file):
                file.sync_data()
        if segments:
            self._disk.sync_folder(self._folder)

    def close(self) -> None:
        """Closes the segment in use."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._segment = -1
            self._open_indexes.closed(self)

    def _opened(self, segment: int) -> File:
        if self._file is None or self._segment != segment:
            self.close()
            self._file = self._disk.open(layout.index_path(self._folder, segment), create=True)
            self._segment = segment
        self._open_indexes.use(self)
        return self._file


class IndexReader:
    """Reads an index that another process may be writing."""

    def __init__(self, disk: Disk, folder: Path, *, opened: OpenIndexes | None = None) -> None:
        self._disk = disk
        self._folder = folder
        self._open_indexes = opened or OpenIndexes()
        self._segment = 0
        self._file: File | None = None  # of _segment, the last one when we looked

    def last_seq(self) -> int:
        """Returns the seq of the last whole row; 0 if there is none.

        Raises OSError if the medium returns neither content nor length of the last segment.
        """
        try:
            return self._last_seq()
        except OSError as error:
            if not is_medium_error(error):
                raise
            segments = list_segments(self._disk, self._folder)
            if not segments:
                raise
            length_bytes = _length_bytes(self._disk, self._folder, segments[-1], error)
        return segments[-1] * ROWS_PER_SEGMENT + length_bytes // INDEX_ROW_LENGTH_BYTES

    def _last_seq(self) -> int:
        while True:
            if self._file is None and not self._open_last():
                return 0
            assert self._file is not None
            if self._file.is_replaced() and not self._open(self._segment):
                self.close()  # the wheel is deleted
                continue
            self._open_indexes.use(self)
            rows = self._file.size() // INDEX_ROW_LENGTH_BYTES
            if rows < ROWS_PER_SEGMENT or not self._open_last(above=self._segment):
                return self._segment * ROWS_PER_SEGMENT + min(rows, ROWS_PER_SEGMENT)

    def rows(self, first_seq: int, last_seq: int) -> NDArray[Any]:
        """Returns the rows of ``first_seq`` to ``last_seq``, which must not exceed ``last_seq()``.

        Each is that of a frame, a hole, unreadable, or gone.
        """
        return checked_rows(self.raw_rows(first_seq, last_seq))

    def raw_rows(self, first_seq: int, last_seq: int) -> NDArray[Any]:
        """Returns the same rows, unchecked."""
        rows = np.empty(max(last_seq - first_seq + 1, 0), INDEX_ROW)
        at = first_seq - 1
        while at < last_seq:
            segment, row = divmod(at, ROWS_PER_SEGMENT)
            count = min(last_seq - at, ROWS_PER_SEGMENT - row)
            part = self._read(segment, row, count)
            begin = at - first_seq + 1
            rows[begin : begin + len(part)] = part
            if len(part) < count:
                rows[begin + len(part) : begin + count] = filled_with(HOLE_ROW, count - len(part))
            at += count
        return rows

    def still_holes(self, seqs: SeqSet) -> SeqSet:
        """Returns which of these seqs are still holes."""
        holes = NO_SEQS
        for first, last in seqs.spans:
            holes |= SeqSet.where(first, is_hole(self.rows(first, last)))
        return holes

    def close(self) -> None:
        """Closes the segment in use."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._open_indexes.closed(self)

    def _read(self, segment: int, row: int, count: int) -> NDArray[Any]:
        offset, length = row * INDEX_ROW_LENGTH_BYTES, count * INDEX_ROW_LENGTH_BYTES
        if self._file is not None and segment == self._segment:
            if not self._file.is_replaced():
                return raw_rows(_read_around(self._file, offset, length))
            self.close()  # it has moved, or was deleted
        content = _read_once(self._disk, self._folder, segment, offset, length)
        if content is None:
            is_gone = _is_deleted(self._disk, self._folder, segment)
            return filled_with(GONE_ROW if is_gone else HOLE_ROW, count)
        return raw_rows(content)

    def _open_last(self, above: int = -1) -> bool:
        """Opens the last segment, if it is above one that is full: not each on the way there."""
        try:
            segments = list_segments(self._disk, self._folder)
        except OSError as error:
            if above < 0 or not is_medium_error(error):
                raise
            segments = [above + 1]  # without the list: one after the other
        return bool(segments) and segments[-1] > above and self._open(segments[-1])

    def _open(self, segment: int) -> bool:
        try:
            file = _open_read(self._disk, self._folder, segment)
        except FileNotFoundError:
            return False
        self.close()
        self._file = file
        self._segment = segment
        return True


def last_seq_of(disk: Disk, folder: Path) -> int:
    """Returns how far an index goes."""
    with closing(IndexReader(disk, folder)) as reader:
        return reader.last_seq()


def list_segments(disk: Disk, folder: Path) -> list[int]:
    """Returns the numbers of existing segments, ascending."""
    numbers = map(layout.index_segment, disk.list_folder(folder))
    return sorted(number for number in numbers if number is not None)


def read_segments(disk: Disk, folder: Path) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yields the first seq and the rows of every segment from the first existing one on."""
    for first_seq, rows in read_raw_rows(disk, folder, 1, 1 << 62):
        yield first_seq, checked_rows(rows)


def read_raw_rows(
    disk: Disk, folder: Path, first_seq: int, last_seq: int
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yields the first seq and the unchecked rows of each segment, between two seqs.

    From the first existing segment on; rows that a segment before the last one lacks are holes.
    """
    segments = list_segments(disk, folder)
    for segment in range(segments[0], segments[-1] + 1) if segments else ():
        begin = max(first_seq - 1 - segment * ROWS_PER_SEGMENT, 0)
        end = min(last_seq - segment * ROWS_PER_SEGMENT, ROWS_PER_SEGMENT)
        if begin < end:
            offset, length = (n * INDEX_ROW_LENGTH_BYTES for n in (begin, end - begin))
            content = _read_once(disk, folder, segment, offset, length)
            if content is None and _is_deleted(disk, folder, segment):
                continue
            rows = raw_rows(content or b"")
            if segment < segments[-1] and len(rows) < end - begin:
                rows = np.concatenate((rows, filled_with(HOLE_ROW, end - begin - len(rows))))
            yield segment * ROWS_PER_SEGMENT + begin + 1, rows


def find_holes(disk: Disk, folder: Path, first_seq: int, last_seq: int) -> SeqSet:
    """Returns the holes between two seqs, from the whole index."""
    holes = NO_SEQS
    for begin, rows in read_raw_rows(disk, folder, first_seq, last_seq):
        holes |= SeqSet.where(begin, is_hole(checked_rows(rows)))
    return holes


def top_slot_of(rows: NDArray[Any], least: int) -> int:
    """Returns the greatest slot in unchecked rows, or ``least``."""
    above = checked_rows(rows[(rows["slot"].astype(np.int64) > least) & (rows["length"] > 0)])
    return int(above["slot"].astype(np.int64).max(initial=least))


def _is_deleted(disk: Disk, folder: Path, segment: int) -> bool:
    """Whether a missing segment was deleted because it, or its whole wheel, was finished."""
    return segment < min(list_segments(disk, folder), default=segment + 1)


def _read_once(disk: Disk, folder: Path, segment: int, offset: int, length: int) -> bytes | None:
    """Returns these bytes of a segment, as far as it has them; None if it is missing."""
    try:
        file = _open_read(disk, folder, segment)
    except FileNotFoundError:
        return None
    except OSError as error:
        if not is_medium_error(error):
            raise
        there = _length_bytes(disk, folder, segment, error) - offset
        return UNREADABLE_ROW * (min(length, there) // INDEX_ROW_LENGTH_BYTES)
    with closing(file):
        return _read_around(file, offset, length)


def _open_read(disk: Disk, folder: Path, segment: int) -> File:
    path = layout.index_path(folder, segment)
    try:
        return disk.open_read(path)
    except OSError as error:
        if not is_medium_error(error):
            raise
    return disk.open_read(path)


def _length_bytes(disk: Disk, folder: Path, segment: int, error: OSError) -> int:
    """Returns the length of a segment that cannot be opened; raises the given error if unknown."""
    lengths_bytes = dict(disk.list_sizes(folder))
    length_bytes = lengths_bytes.get(layout.index_path(folder, segment).name)
    if length_bytes is None:
        raise error
    return min(length_bytes, ROWS_PER_SEGMENT * INDEX_ROW_LENGTH_BYTES)


def _read_around(file: File, offset: int, length: int) -> bytes:
    """Reads rows; those that the medium cannot read become unreadable ones.

    Raises any OSError but the medium's.
    """
    there = file.size() // INDEX_ROW_LENGTH_BYTES * INDEX_ROW_LENGTH_BYTES
    end = max(offset, min(offset + length, there))
    return b"".join(
        UNREADABLE_ROW * ((last - first) // INDEX_ROW_LENGTH_BYTES) if piece is None else piece
        for first, last, piece in read_around(file, offset, end)
    )
