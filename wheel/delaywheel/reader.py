"""Reads a wheel that another process may be writing; takes no locks.

The index is the authority: a frame is there when its row is, and a frame that its row speaks of
but that cannot be read is reported as damaged, never passed over. Slot files are mapped no
further than the rows asked for say, so a torn tail that recovery cuts is never under a map.
Returned columns keep their map alive, also when the file is deleted meanwhile.

A slot's rows are found by comparing the slot column of the index. To do that once for many
seconds, the rows of a window of seconds are kept; the window moves on with what is asked for.
"""

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel import layout
from delaywheel.disk import Disk
from delaywheel.format import (
    HOLE_ROW,
    INDEX_ROW,
    DamageReason,
    Frame,
    FrameDamaged,
    cancel_counts,
    decode_frame,
    index_row_of,
    message_counts,
)
from delaywheel.framecopy import FrameCopy
from delaywheel.identity import WheelId
from delaywheel.index import ROWS_PER_SEGMENT, IndexReader, OpenIndexes
from delaywheel.slotfiles import list_slots
from delaywheel.unlisted import with_unlisted

# Seconds whose rows are kept: the index is scanned once for so many.
_WINDOW_SECONDS = 16

# Content up to this is copied instead of mapped.
_COPIED_UP_TO_BYTES = 1024 * 1024

_HOLE = np.frombuffer(HOLE_ROW, dtype=INDEX_ROW)[0]


@dataclass(frozen=True, slots=True)
class DamagedFrame:
    """A frame that has a row but cannot be read."""

    seq: int
    slot: int  # 0 for a hole: it is not known
    messages: int  # as its row says
    cancels: int
    reason: DamageReason
    detail: str


class WheelReader:
    """One wheel, for one thread."""

    def __init__(
        self, disk: Disk, data: Path, wheel: WheelId, *, opened: OpenIndexes | None = None
    ) -> None:
        """Opens nothing yet.

        Args:
            disk: where the data folder lies.
            data: the data folder.
            wheel: which one.
            opened: shared by all readers of a thread, it bounds how many files they keep open.
        """
        self._disk = disk
        self._folder = layout.wheel_folder(data, wheel)
        self._index = IndexReader(disk, self._folder, opened=opened)
        self._window = _Window(self._index)
        self.wheel = wheel

    def last_seq(self) -> int:
        """The last frame that is there; 0 = none."""
        return self._index.last_seq()

    def has(self, seq: int) -> bool:
        """Whether the frame is there, readable or not."""
        return 1 <= seq <= self.last_seq()

    def rows(self, first_seq: int, last_seq: int) -> NDArray[Any]:
        """The index rows (``INDEX_ROW``) of ``first_seq`` to the lesser of last_seq and the end.

        All zeros where the segment is deleted.
        """
        return self._index.rows(first_seq, min(last_seq, self.last_seq()))

    def frame(self, seq: int) -> Frame | DamagedFrame:
        """One frame, found by its row.

        Raises:
            IndexError: the wheel has no such seq yet.
        """
        if not self.has(seq):
            raise IndexError(f"wheel {self.wheel} has no frame {seq}")
        rows = self._index.rows(seq, seq)
        if int(rows["length"][0]) == 0:
            is_hole = rows[0] == _HOLE
            damage = FrameDamaged(DamageReason.HOLE if is_hole else DamageReason.GONE)
            return _damaged(seq, rows[0], damage)
        slot = int(rows["slot"][0])
        return next(read_frames(self._disk, self._folder, self.wheel, slot, ([seq], rows)))

    def copies(
        self, first_seq: int, last_seq: int, *, floor: int
    ) -> Iterator[FrameCopy | DamagedFrame]:
        """The frames that there are, one after the other, checked, for another copy of the wheel.

        Those of slots below ``floor``, and of deleted index segments, have no content.
        """
        rows = self.rows(first_seq, last_seq)
        for seq, row in enumerate(rows, first_seq):
            yield self._copy(seq, row, floor)

    def _copy(self, seq: int, row: NDArray[Any], floor: int) -> FrameCopy | DamagedFrame:
        slot, offset, length, _ = row.item()
        if row == _HOLE:
            return _damaged(seq, row, FrameDamaged(DamageReason.HOLE))
        if length == 0 or slot < floor:
            return FrameCopy(seq, row.tobytes(), b"")
        path = layout.slot_path(self._folder, slot)
        try:
            content = bytes(_content(self._disk, path, offset, offset + length)[:length])
            check_copy(self.wheel, FrameCopy(seq, row.tobytes(), content))
        except FrameDamaged as damage:
            return _damaged(seq, row, damage)
        return FrameCopy(seq, row.tobytes(), content)

    def frames(
        self, slot: int, seqs: list[int], rows: NDArray[Any]
    ) -> Iterator[Frame | DamagedFrame]:
        """Frames of one slot whose rows, none of them a hole, the caller has read before."""
        return read_frames(self._disk, self._folder, self.wheel, slot, (seqs, rows))

    def slot_frames(self, slot: int, up_to_seq: int) -> Iterator[Frame | DamagedFrame]:
        """All frames of a slot with seqs up to ``up_to_seq``, in their order.

        Also those that the index does not speak of as it should (see unlisted.py).
        """
        last_seq = min(up_to_seq, self.last_seq())
        listed = self._window.rows_of(slot, last_seq)
        path = layout.slot_path(self._folder, slot)
        seqs, rows = with_unlisted(self._disk, path, self.wheel, slot, listed, last_seq)
        return read_frames(self._disk, self._folder, self.wheel, slot, (seqs.tolist(), rows))

    def slots(self, from_slot: int = 0, to_slot: int | None = None) -> list[int]:
        """The slots that have a file, ``from_slot`` <= slot < ``to_slot``, from folder names."""
        return list(list_slots(self._disk, self._folder, from_slot, to_slot))

    def indexed_slots(self, from_slot: int, to_slot: int) -> NDArray[np.int64]:
        """The slots that index rows speak of, ``from_slot`` <= slot < ``to_slot``, in no order.

        Whether there is a file or not: one that is gone takes nothing from what is promised.
        """
        found, seq, last_seq = [], 0, self.last_seq()
        while seq < last_seq:
            first, seq = seq + 1, min(last_seq, (seq // ROWS_PER_SEGMENT + 1) * ROWS_PER_SEGMENT)
            rows = self._index.rows(first, seq)
            inside = (rows["slot"] >= from_slot) & (rows["slot"] < to_slot) & (rows["length"] > 0)
            found.append(np.unique(rows["slot"][inside]))
        return np.concatenate(found or [np.empty(0, np.uint32)]).astype(np.int64)

    def close(self) -> None:
        """Closes the index; columns already returned stay good."""
        self._index.close()


def check_copy(wheel: WheelId, copy: FrameCopy) -> Frame:
    """Decodes a frame of which row and content must be each other's.

    Raises:
        FrameDamaged: they are not, or not this wheel's, or not of this seq.
    """
    slot, offset, _, _ = np.frombuffer(copy.row, dtype=INDEX_ROW)[0].item()
    frame = decode_frame(copy.content, wheel=wheel, slot=slot, seq=copy.seq)
    if index_row_of(frame, offset) != copy.row:
        raise FrameDamaged(DamageReason.LENGTHS, "its index row says otherwise")
    return frame


def read_frames(
    disk: Disk, folder: Path, wheel: WheelId, slot: int, places: tuple[list[int], NDArray[Any]]
) -> Iterator[Frame | DamagedFrame]:
    """Reads frames of one slot, given their seqs and rows, through one map or copy."""
    seqs, rows = places
    if not seqs:
        return
    try:
        begin = int(rows["offset"].min())
        end = int((rows["offset"].astype(np.int64) + rows["length"]).max())
        content = _content(disk, layout.slot_path(folder, slot), begin, end)
    except FrameDamaged as damage:
        for seq, row in zip(seqs, rows, strict=True):
            yield _damaged(seq, row, damage)
        return
    # Lists of int: a scalar taken out of a numpy row costs more than decoding a column.
    offsets, lengths = rows["offset"].tolist(), rows["length"].tolist()
    for seq, offset, length, row in zip(seqs, offsets, lengths, rows, strict=True):
        part = content[offset - begin : offset - begin + length]
        try:
            frame = decode_frame(part, wheel=wheel, slot=slot, seq=seq)
        except FrameDamaged as damage:
            yield _damaged(seq, row, damage)
            continue
        if index_row_of(frame, offset) == row.tobytes():
            yield frame
        else:
            disagreement = FrameDamaged(DamageReason.LENGTHS, "its index row says otherwise")
            yield _damaged(seq, row, disagreement)


def _content(disk: Disk, path: Path, begin: int, end: int) -> memoryview:
    """The bytes [begin, end) of a slot file, or what there is of them.

    A map keeps a file descriptor of its own as long as it lives, so what is small is copied.

    Raises:
        FrameDamaged: GONE or UNREADABLE.
        OSError: anything but the medium's word: a lack of descriptors or memory is no damage.
    """
    try:
        file = disk.open_read(path)
        try:
            if end - begin <= _COPIED_UP_TO_BYTES:
                return memoryview(file.read_at(end - begin, begin))
            size = file.size()
        finally:
            file.close()
        return disk.map_read(path, min(end, size))[begin:]
    except FileNotFoundError as error:
        raise FrameDamaged(DamageReason.GONE, str(path)) from error
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise FrameDamaged(DamageReason.UNREADABLE, str(error)) from error


class _Window:
    """The rows of some seconds of one wheel, up to a seq: what the last scans found."""

    def __init__(self, index: IndexReader) -> None:
        self._index = index
        self._from_slot = 0
        self._scanned_seq = 0
        self._seqs = np.empty(0, dtype=np.int64)
        self._rows = np.empty(0, dtype=INDEX_ROW)

    def rows_of(self, slot: int, up_to_seq: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Seqs and rows of a slot's frames up to ``up_to_seq``."""
        if not self._from_slot <= slot < self._from_slot + _WINDOW_SECONDS:
            self._from_slot = slot
            self._scanned_seq = 0
            self._seqs = self._seqs[:0]
            self._rows = self._rows[:0]
        self._scan(up_to_seq)
        found = (self._rows["slot"] == slot) & (self._seqs <= up_to_seq)
        return self._seqs[found], self._rows[found]

    def _scan(self, up_to_seq: int) -> None:
        seqs, rows = [self._seqs], [self._rows]
        while self._scanned_seq < up_to_seq:
            first = self._scanned_seq + 1
            segment_end = (self._scanned_seq // ROWS_PER_SEGMENT + 1) * ROWS_PER_SEGMENT
            self._scanned_seq = min(up_to_seq, segment_end)
            part = self._index.rows(first, self._scanned_seq)
            # Slots wrap below zero to large numbers: one comparison instead of two.
            inside = np.flatnonzero(
                (part["slot"] - np.uint32(self._from_slot) < _WINDOW_SECONDS) & (part["length"] > 0)
            )
            seqs.append(first + inside)
            rows.append(part[inside])
        if len(seqs) > 1:
            self._seqs = np.concatenate(seqs)
            self._rows = np.concatenate(rows)


def _damaged(seq: int, row: NDArray[Any], damage: FrameDamaged) -> DamagedFrame:
    return DamagedFrame(
        seq=seq,
        slot=int(row["slot"]),
        messages=int(message_counts(row)),
        cancels=int(cancel_counts(row)),
        reason=damage.reason,
        detail=str(damage),
    )
