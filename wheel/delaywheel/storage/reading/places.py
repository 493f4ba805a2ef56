"""Finds a second's frames in time that depends on that second alone.

The slot table (slot_table.py) holds, up to a seq, how many frames a slot has and where the last one
ends; a bounded number of later index rows is kept here. The headers in the slot file show where its
frames lie. If they match table and rows, these are the frames of the second:

===================================================  =============================================
frames that lie in the file from byte 0 on           must be
===================================================  =============================================
as many as the entry counts                          ascending; the last with the entry's last seq
                                                     and end
those behind                                         what the index rows behind the table say
behind those, up to the last row of the index        none
behind those, while the index has holes              nothing but later frames
===================================================  =============================================

If anything differs, everything is read again, since it may have changed meanwhile; then the
index is scanned for the slot, and shows what is missing. That happens only with damage: it takes
some 5 ms for each million rows.

A hole in the index does not show which slot is missing a frame. Which rows are holes is known from
the table's head and from the rows behind it, each of which is checked once; see unlisted.py.
"""

from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import ROWS_PER_SEGMENT, IndexReader, find_holes, read_raw_rows
from delaywheel.storage.files.slot_table import (
    ENTRY,
    UNIT_BYTES,
    TableHead,
    load_head,
    read_entries,
    slots_with_frames,
)
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, File, is_medium_error
from delaywheel.storage.folder.steps import Steps, finish
from delaywheel.storage.frames.format import (
    FrameDamaged,
    index_rows_of_headers,
)
from delaywheel.storage.frames.rows import (
    INDEX_ROW,
    Places,
    checked_rows,
    is_hole,
    leading,
    row_counts,
)
from delaywheel.storage.reading.unlisted import walk_headers, with_unlisted

# A table further behind than this is still being made: the index is scanned instead.
_ROWS_BEHIND_AT_MOST = 8 * ROWS_PER_SEGMENT

KNOWN: Final[np.dtype[Any]] = np.dtype(
    [
        ("number", np.int64),  # of its slot
        ("place", np.int64),  # in the order in which the slot's frames lie
        ("seq", np.int64),
        ("end", np.int64),
        ("rows", np.int64),  # -1: not known
    ]
)
"""A frame that must lie at this place."""


class Stated(NamedTuple):
    """What table and rows say of some slots, side by side.

    Attributes:
        is_known: Of which of them it can be relied on.
        frames: How many frames each has.
        ends: Where the last one of each ends.
        last_seqs: Frames with a later seq may lie behind these.
        known: Of some frames, what they must be (``KNOWN``): of each slot the last one that the
            table counts, and all behind it.
    """

    slots: NDArray[np.int64]
    is_known: NDArray[np.bool_]
    frames: NDArray[np.int64]
    ends: NDArray[np.int64]
    last_seqs: NDArray[np.int64]
    known: NDArray[Any]

    def first(self, slots: int) -> "Stated":
        """Returns what is said of the first slots."""
        return Stated(
            self.slots[:slots],
            self.is_known[:slots],
            self.frames[:slots],
            self.ends[:slots],
            self.last_seqs[:slots],
            self.known[self.known["number"] < slots],
        )


class SlotPlaces:
    """Finds the frames of one wheel's slots. For one thread."""

    def __init__(self, disk: Disk, folder: Path, wheel: WheelId, index: IndexReader) -> None:
        self._disk = disk
        self._folder = folder
        self._wheel = wheel
        self._index = index
        self._head, self._returned = TableHead(), Returned()
        self._behind = _RowsBehind(index)
        self._hour: tuple[int, int, NDArray[Any], NDArray[np.bool_]] | None = None
        # For a table that is far behind: the holes up to a seq.
        self._scanned_holes = 0, NO_SEQS

    def quick(self, slot: int, last_seq: int) -> Places | None:
        """Returns a slot's frames up to the index's end; None if the index must be scanned."""
        for is_fresh in (False, True):
            if is_fresh:
                self.forget()
            if not self._follow(last_seq):
                return None
            places = self._walked(slot, last_seq)
            if places is not None:
                return places
        return None

    def stated(self, slots: NDArray[np.int64], last_seq: int) -> Stated:
        """Returns what table and rows say of some slots of one hour, ascending."""
        if not self._follow(last_seq):
            entries, is_known = np.zeros(len(slots), ENTRY), np.zeros(len(slots), np.bool_)
        else:
            entries, is_known = self._entries(slots)
        last_seqs = entries["last_seq"].astype(np.int64)
        counted = np.flatnonzero(entries["frames"])
        frames, ends = entries["frames"].astype(np.int64), entries["end"] * np.int64(UNIT_BYTES)
        numbers, seqs, rows = self._behind.of_slots(slots, last_seqs)
        known = np.empty(len(counted) + len(numbers), KNOWN)
        known["number"] = np.concatenate((counted, numbers))
        known["seq"] = np.concatenate((last_seqs[counted], seqs))
        row_ends = rows["offset"].astype(np.int64) + rows["length"]
        known["end"] = np.concatenate((ends[counted], row_ends))
        known["rows"] = np.concatenate((np.full(len(counted), -1), row_counts(rows)))
        behind = np.arange(len(numbers)) - numbers.searchsorted(numbers)
        known["place"] = np.concatenate((frames[counted] - 1, frames[numbers] + behind))
        frames += np.bincount(numbers, minlength=len(slots))
        ends[numbers] = row_ends
        return Stated(slots, is_known, frames, ends, np.maximum(last_seqs, last_seq), known)

    def scanned(self, slot: int, last_seq: int) -> Places:
        """Returns a slot's frames by scanning the index, corrected by what lies in the file."""
        seqs, rows = rows_of_slots(self._disk, self._folder, np.array([slot]), last_seq)
        holes = find_holes(self._disk, self._folder, 1, last_seq)
        path = layout.slot_path(self._folder, slot)
        return with_unlisted(self._disk, path, self._wheel, slot, (seqs, rows), last_seq, holes)

    def slots(self, from_slot: int, to_slot: int, last_seq: int) -> NDArray[np.int64]:
        """Returns the slots in [from_slot, to_slot) that index rows refer to, ascending."""
        if not self._follow(last_seq):
            found = [np.empty(0, np.uint32)]
            for _, part in read_raw_rows(self._disk, self._folder, 1, last_seq):
                rows = checked_rows(part[(part["slot"] >= from_slot) & (part["slot"] < to_slot)])
                found.append(np.unique(rows["slot"][rows["length"] > 0]))
            return np.unique(np.concatenate(found)).astype(np.int64)
        counted, stale = slots_with_frames(self._disk, self._folder, self._head, from_slot, to_slot)
        behind = self._behind.slots(from_slot, to_slot)
        again = [slot for slot in self._returned.slots if from_slot <= slot < to_slot]
        behind = np.concatenate((behind, np.array(again, np.int64)))
        if len(stale):
            _, rows = rows_of_slots(self._disk, self._folder, stale, last_seq)
            behind = np.concatenate((behind, rows["slot"].astype(np.int64)))
        counted = counted[~np.isin(counted, stale)]
        return np.unique(np.concatenate((counted, behind)))

    def holes(self, last_seq: int) -> SeqSet | None:
        """Returns rows up to a seq that were holes when read; None if they were not read."""
        if not self._follow(last_seq):
            return None
        uncounted = self._head.holes - self._returned.seqs
        return (uncounted | self._behind.holes).within(1, last_seq)

    def scanned_holes(self, last_seq: int) -> SeqSet:
        """Returns the same by scanning the index, with each row checked once."""
        seq, holes = self._scanned_holes
        if last_seq > seq:
            holes |= find_holes(self._disk, self._folder, seq + 1, last_seq)
            self._scanned_holes = last_seq, holes
        return holes.within(1, last_seq)

    def forget(self) -> None:
        """Discards everything that was read."""
        self._scanned_holes = 0, NO_SEQS
        self._head, self._returned = TableHead(), Returned()
        self._hour = None
        self._behind.start(0)

    def _follow(self, last_seq: int) -> bool:
        """Reads the rows behind the table up to the last one; False if there are too many."""
        if last_seq - self._head.seq > ROWS_PER_SEGMENT or not self._head.seq:
            head = load_head(self._disk, self._folder)
            if head != self._head:
                self._head, self._returned = head, returned(self._index, head.holes)
                self._behind.start(head.seq)
        if last_seq - self._head.seq > _ROWS_BEHIND_AT_MOST:
            return False
        self._behind.follow(last_seq)
        return True

    def _entries(self, slots: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Returns the entries of slots of one hour, and which of them can be trusted.

        Those of the last hour are kept while the head does not change.
        """
        hour = int(slots[0]) // layout.SECONDS_PER_HOUR
        distrusted = np.isin(slots, [*self._head.stale, *self._returned.slots])
        if hour not in self._head.hours:
            return np.zeros(len(slots), ENTRY), ~distrusted
        if self._hour is None or self._hour[:2] != (hour, self._head.seq):
            read = read_entries(self._disk, self._folder, self._head, hour)
            self._hour = hour, self._head.seq, *read
        _, _, entries, damaged = self._hour
        seconds = slots - hour * layout.SECONDS_PER_HOUR
        return entries[seconds], ~(damaged[seconds] | distrusted)

    def _walked(self, slot: int, last_seq: int) -> Places | None:
        """Returns the frames in the slot's file, if they match table and rows."""
        (entry,), (is_known,) = self._entries(np.array([slot]))
        if not is_known:
            return None
        entry_seq, counted = int(entry["last_seq"]), int(entry["frames"])
        _, behind_seqs, behind_rows = self._behind.of_slots(np.array([slot]), np.array([entry_seq]))
        try:
            with closing(self._disk.open_read(layout.slot_path(self._folder, slot))) as file:
                (seqs, rows), is_whole = self._walk(file, slot, max(last_seq, entry_seq))
        except FileNotFoundError:
            is_empty = counted == 0 and not len(behind_rows)
            return (behind_seqs, behind_rows) if is_empty else None
        except (FrameDamaged, OSError) as error:
            if isinstance(error, OSError) and not is_medium_error(error):
                raise
            return None
        may_lack = not is_whole and bool(self.holes(last_seq))  # behind what ended the walk
        is_as_many = len(seqs) == counted + len(behind_seqs)
        if may_lack or not is_as_many or not (np.diff(seqs) > 0).all():
            return None
        if counted and (seqs[counted - 1], _end(rows[counted - 1])) != (
            entry_seq,
            int(entry["end"]) * UNIT_BYTES,
        ):
            return None
        is_same = np.array_equal(seqs[counted:], behind_seqs)
        is_same = is_same and rows[counted:].tobytes() == behind_rows.tobytes()
        return (seqs, rows) if is_same else None

    def _walk(self, file: File, slot: int, last_seq: int) -> tuple[Places, bool]:
        """Returns seqs and rows of a file's frames, up to one being written, and if one is."""
        seqs, rows = [np.empty(0, np.int64)], [np.empty(0, INDEX_ROW)]
        is_later = False
        for offsets, headers in walk_headers(file, self._wheel, slot):
            found = headers["seq"].astype(np.int64)
            end = leading(found <= last_seq)
            seqs.append(found[:end])
            rows.append(index_rows_of_headers(headers[:end], offsets[:end]))
            if end < len(found):
                is_later = True
                break
        places = np.concatenate(seqs), np.concatenate(rows)
        walked_bytes = _end(places[1][-1]) if len(places[1]) else 0
        return places, is_later or walked_bytes == file.size()


class Returned(NamedTuple):
    """Rows that were holes when the table counted them, and are none when its head is read."""

    seqs: SeqSet = NO_SEQS
    slots: frozenset[int] = frozenset()
    """The slots of their frames, whose entries do not count them."""


def returned(index: IndexReader, holes: SeqSet) -> Returned:
    """Looks again at rows that were holes."""
    seqs, slots = NO_SEQS, set[int]()
    for first, last in holes.spans:
        rows = index.rows(first, last)
        there = ~is_hole(rows)
        seqs |= SeqSet.where(first, there)
        slots.update(rows["slot"][there & (rows["length"] > 0)].tolist())
    return Returned(seqs, frozenset(slots))


class _RowsBehind:
    """Rows of one index after a seq, as far as they were read."""

    def __init__(self, index: IndexReader) -> None:
        self._index = index
        self._first_seq = 1
        self._count = 0
        self._rows = np.empty(0, INDEX_ROW)
        self._slots = np.empty(0, np.uint32)  # of the rows: comparing them side by side is faster
        self.holes = NO_SEQS

    def start(self, seq: int) -> None:
        """Begins after this seq; later rows that were read are kept."""
        drop = seq + 1 - self._first_seq
        if 0 <= drop <= self._count and seq:
            self._rows, self._slots = self._rows[drop:].copy(), self._slots[drop:].copy()
            self._count -= drop
            self.holes = self.holes.within(seq + 1, seq + self._count)
        else:
            self.holes = NO_SEQS
            self._rows, self._slots = np.empty(0, INDEX_ROW), np.empty(0, np.uint32)
            self._count = 0
        self._first_seq = seq + 1

    def follow(self, last_seq: int) -> None:
        missing = last_seq + 1 - self._first_seq - self._count
        if missing <= 0:
            return
        end = self._count + missing
        if end > len(self._rows):
            # They stay for as long as 65,536 frames take to come: little room is left unused.
            room = max(end, len(self._rows) * 9 // 8)
            self._rows.resize(room, refcheck=False)  # nothing else refers to them
            self._slots.resize(room, refcheck=False)
        first_seq = self._first_seq + self._count
        self._rows[self._count : end] = self._index.raw_rows(first_seq, last_seq)
        self._slots[self._count : end] = self._rows["slot"][self._count : end]
        self.holes |= SeqSet.where(first_seq, is_hole(checked_rows(self._rows[self._count : end])))
        self._count = end

    def of_slots(
        self, slots: NDArray[np.int64], behind_seqs: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
        """Returns the frames of ascending slots after a seq of each.

        These are the number of each frame's slot, seqs and rows, slot after slot.
        """
        near = self._slots[: self._count]
        # Beside an int64, numpy would widen all of them first.
        at = np.flatnonzero((near >= int(slots[0])) & (near <= int(slots[-1])))
        seqs, rows = self._first_seq + at, checked_rows(self._rows[at])
        numbers = slots.searchsorted(near[at])
        kept = (
            (slots[numbers] == rows["slot"]) & (seqs > behind_seqs[numbers]) & (rows["length"] > 0)
        )
        order = np.argsort(numbers[kept], kind="stable")
        return tuple(part[kept][order] for part in (numbers, seqs, rows))

    def slots(self, from_slot: int, to_slot: int) -> NDArray[np.int64]:
        """Returns the slots in [from_slot, to_slot) that these rows refer to."""
        slots = self._slots[: self._count]
        at = np.flatnonzero((slots >= from_slot) & (slots < to_slot))
        rows = checked_rows(self._rows[at])
        return rows["slot"][rows["length"] > 0].astype(np.int64)


def rows_of_slots(disk: Disk, folder: Path, slots: NDArray[np.int64], last_seq: int) -> Places:
    """Returns seqs and rows of the frames of some slots up to a seq, from the whole index."""
    return finish(finding_rows(disk, folder, slots, last_seq))


def finding_rows(
    disk: Disk, folder: Path, slots: NDArray[np.int64], last_seq: int
) -> Steps[Places]:
    """Does the same as `rows_of_slots`, segment by segment."""
    seqs, rows = [np.empty(0, np.int64)], [np.empty(0, INDEX_ROW)]
    for first_seq, part in read_raw_rows(disk, folder, 1, last_seq):
        is_wanted = part["slot"] == slots[0] if len(slots) == 1 else np.isin(part["slot"], slots)
        at = np.flatnonzero(is_wanted)
        checked = checked_rows(part[at])
        kept = checked["length"] > 0
        seqs.append(first_seq + at[kept])
        rows.append(checked[kept])
        yield
    return np.concatenate(seqs), np.concatenate(rows)


def _end(row: NDArray[Any]) -> int:
    return int(row["offset"]) + int(row["length"])
