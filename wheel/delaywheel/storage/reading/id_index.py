"""An index of the ids in those seconds that callers ask about: built when asked, then kept up.

Messages are found by id and second; reading a whole second for one of them costs more the more it
holds. So a second is read once, its ids stay in memory, and from then on only the rows that the
wheels' indexes have gained are read, those of all seconds that are asked about together. What a
*fresh scan* would find, which reads the second's
frames in each wheel up to its limit, the index finds too, and reports the same frames as damaged or
missing. For each wheel it is *followed* up to a seq, and this holds at the end of `follow`:

    a second that is kept has all rows of the second's frames up to there, of every wheel,
    in its runs or unread in the journal; but for the frames that it lists as damaged.

A frame that was read once does not change: a seq has the same bytes wherever it is, for ever. What
may change is which frames can be read, and what rows say:

===============================================  =================================================
what happens to a wheel                          is seen by, and leads to
===============================================  =================================================
frames are appended                              new index rows; those of seconds that are kept go
                                                 to the journal, and are read when the second is
                                                 asked about
a frame of a kept second cannot be read          reading; it is listed as damaged, and tried again
                                                 whenever the second is asked about
a damaged frame was repaired, or its row moved   that; the second is read again
rows became holes, or holes were filled          the set of holes differs; nothing is kept
a new row is a hole, or all zeros                its length; nothing is kept, since the frame may
                                                 lie in any second's file
it was cut, or is no longer held                 the limit falls; nothing is kept
a wheel is new, and long; or was not looked at   more new rows than would be examined; nothing is
for long                                         kept
a second is deleted                              nothing: it is not asked about any more, and goes
                                                 as the least recently asked for
a file that was read goes bad                    nothing: what was read stays true
reading fails                                    the error; the second is read again
===============================================  =================================================

"Nothing is kept" costs each second that is asked about again one more scan, as without an index.
Ids are kept whole: callers may send some that share a half, and a cancel of another would count.
Nor are they in a file beside the wheel's: 24 bytes a message, written for all and read for few.

Memory is bounded: the least recently asked for goes first, as do seconds with too many unread
frames. A second that alone exceeds the bound is read for each question, and only rows that
matter to the question are kept meanwhile.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.frames.rows import Places
from delaywheel.storage.reading.decoding import IdBatch
from delaywheel.storage.reading.ids import (
    NONE_FOUND,
    ROW_LENGTH_BYTES,
    FoundIds,
    IdRow,
    Ids,
    SoughtIds,
)
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader

MOST_BYTES: Final = 64 << 20
"""What all seconds together take in memory, roughly."""
SECOND_BYTES: Final = 512
"""About what a second takes in memory beside its rows."""
NEW_ROWS_AT_MOST: Final = 1 << 16
"""So many new rows of a wheel are examined; beyond, the seconds are read again."""
UNREAD_AT_MOST: Final = 1 << 16
"""So many frames of seconds that are kept may be unread."""
_PARTS: Final = 16
"""So many parts of a wheel's unread frames are joined."""

_SPARED: Final = 7 / 8
"""Of the bound, what is kept when seconds have to go: each time costs a pass through all rows."""


@dataclass(frozen=True, slots=True)
class _Followed:
    seq: int
    holes: SeqSet  # rows without a frame, wherever the frames lie


@dataclass(slots=True)
class _KeptSecond:
    rows: int
    damaged: set[tuple[WheelId, int]]  # frames that could not be read

    @property
    def length_bytes(self) -> int:
        return SECOND_BYTES + ROW_LENGTH_BYTES * self.rows


@dataclass(slots=True)
class Look:
    """What was found in some seconds.

    Attributes:
        rows: Those that have a sought id, in no order; perhaps also rows of other seconds that do.
        begun: The same of sought beginnings.
        damaged: Frames that could not be read, by second: wheel and seq.
        missing: Frames that may be of any second, by wheel.
    """

    rows: FoundIds = NONE_FOUND
    begun: list[IdRow] = field(default_factory=list)
    damaged: dict[int, set[tuple[WheelId, int]]] = field(default_factory=dict)
    missing: dict[WheelId, SeqSet] = field(default_factory=dict)

    def add(self, ids: Ids, sought: SoughtIds) -> None:
        """Adds what is among these ids."""
        self.rows = FoundIds.joined([self.rows, ids.find(sought)])
        self.begun += ids.find_beginning(sought.begins)

    def note_missing(self, missing: Mapping[WheelId, SeqSet]) -> None:
        """Adds frames that may be of any second."""
        for wheel, seqs in missing.items():
            self.missing[wheel] = self.missing.get(wheel, NO_SEQS) | seqs


class IdIndex:
    """The ids of seconds, of all wheels of a folder. For one thread.

    After `follow`, `missing` has frames that may be of any second, by wheel; no wheel without any.
    """

    def __init__(
        self,
        reader: Callable[[WheelId], WheelReader],
        *,
        most_bytes: int = MOST_BYTES,
        new_rows: int = NEW_ROWS_AT_MOST,
        unread: int = UNREAD_AT_MOST,
    ) -> None:
        """Begins with nothing read.

        Args:
            most_bytes: The bound on memory.
            new_rows: How many new rows of one wheel are examined.
            unread: How many frames may be unread.
        """
        self._reader = reader
        self._most_bytes = most_bytes
        self._new_rows = new_rows
        self._journal = _Journal(unread)
        self._followed: dict[WheelId, _Followed] = {}
        self._lost: Callable[[WheelId], SeqSet] = lambda _: NO_SEQS
        self._ids = Ids()  # of the seconds that are kept, and no others
        self._seconds: dict[int, _KeptSecond] = {}  # the least recently asked for first
        self._slots: NDArray[np.uint32] | None = None  # of these, ascending; None: has changed
        self.missing: dict[WheelId, SeqSet] = {}
        self.built = 0
        """How many seconds were read as a whole."""

    def __len__(self) -> int:
        return len(self._seconds)

    def __contains__(self, slot: int) -> bool:
        """Whether a second is kept; for any thread."""
        return slot in self._seconds

    @property
    def length_bytes(self) -> int:
        """About what is kept takes in memory."""
        return SECOND_BYTES * len(self._seconds) + ROW_LENGTH_BYTES * len(self._ids)

    def follow(self, limits: Mapping[WheelId, int], lost: Callable[[WheelId], SeqSet]) -> None:
        """Notes what is new in each wheel up to its limit, but for the frames that are lost."""
        self._lost = lost
        if gone := self._followed.keys() - limits.keys():
            self._forget_all()
            for wheel in gone:
                del self._followed[wheel]
                self.missing.pop(wheel, None)
        for wheel, limit in limits.items():
            known = self._followed.get(wheel)
            if known is None or known.seq != limit or known.holes:
                self._follow(wheel, limit, known)

    def look(self, slots: Collection[int], sought: SoughtIds) -> Look:
        """Finds rows of some seconds, as far as the wheels were followed.

        Ids are sought in whichever of these seconds, and beginnings of ids.
        """
        found = Look()
        found.note_missing(self.missing)
        kept = [slot for slot in slots if slot in self._seconds]
        self._forget([slot for slot in kept if not self._is_as_damaged(slot)])
        self._read_new([slot for slot in kept if slot in self._seconds])
        for slot in kept:
            if (second := self._seconds.pop(slot, None)) is not None:
                self._seconds[slot] = second  # the most recently asked for
                if second.damaged:
                    found.damaged[slot] = second.damaged.copy()
        others = [slot for slot in slots if slot not in self._seconds]
        if len(others) < len(slots):
            found.add(self._ids, sought)
        for slot in others:
            self._read_second(slot, sought, found)
        self._shrink(self._most_bytes)
        found.note_missing(self.missing)
        return found

    # --- following

    def _follow(self, wheel: WheelId, limit: int, known: _Followed | None) -> None:
        reader, lost = self._reader(wheel), self._lost(wheel)
        holes, end = reader.holes_anywhere(limit, lost), min(limit, reader.last_seq())
        self._note_missing(wheel, holes)
        if (
            known is None
            or end < known.seq
            or end - known.seq > self._new_rows
            or holes != known.holes
            or not self._note_rows(reader, known.seq + 1, end)
        ):
            self._forget_all()
        self._followed[wheel] = _Followed(end, holes)

    def _note_missing(self, wheel: WheelId, holes: SeqSet) -> None:
        missing, _ = self._reader(wheel).lying_nowhere(holes)
        if missing:
            self.missing[wheel] = missing
        else:
            self.missing.pop(wheel, None)

    def _note_rows(self, reader: WheelReader, first_seq: int, last_seq: int) -> bool:
        """Notes new frames of seconds that are kept; False if these must be read again."""
        if not self._seconds or last_seq < first_seq:
            return True
        rows = reader.rows(first_seq, last_seq)
        if not rows["length"].all():
            return False
        if self._slots is None:
            self._slots = np.sort(_numbers(self._seconds))
        places = self._slots.searchsorted(rows["slot"])
        places[places == len(self._slots)] = 0
        at = np.flatnonzero(self._slots[places] == rows["slot"])
        self._forget(self._journal.add(reader.wheel, (first_seq + at, rows[at])))
        return True

    # --- reading

    def _is_as_damaged(self, slot: int) -> bool:
        """Whether all frames that could not be read still cannot."""
        for wheel, seq in self._seconds[slot].damaged:
            reader = self._reader(wheel)
            frame = reader.frame(seq) if reader.has(seq) else None
            if not isinstance(frame, DamagedFrame) or frame.slot != slot:
                return False
        return True

    def _read_new(self, slots: Collection[int]) -> None:
        """Reads new frames of seconds that are kept; drops these if one cannot be read."""
        try:
            for wheel, (seqs, rows) in self._journal.take(slots):
                still = np.isin(rows["slot"], _numbers(self._seconds))
                batches = list(self._reader(wheel).id_batches((seqs[still], rows[still])))
                read = [batch for batch in batches if batch is not None]
                if len(read) < len(batches):  # reading each as a whole shows which it is
                    self._forget(np.unique(rows["slot"][still]).tolist())
                    continue
                for batch in read:
                    self._add(batch)
        except BaseException:  # their new frames are neither unread any more nor read
            self._forget(self._seconds.keys() & set(slots))
            raise

    def _add(self, batch: IdBatch) -> None:
        self._ids.add(batch)
        slots, counts = np.unique(batch.due_ms // 1000, return_counts=True)
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            self._seconds[slot].rows += count

    def _read_second(self, slot: int, sought: SoughtIds, found: Look) -> None:
        """Reads a whole second, finds what is sought, and keeps the second if it may."""
        self.built += 1
        ids, damaged, is_sure, is_whole = Ids(), set[tuple[WheelId, int]](), True, True
        for wheel, followed in sorted(self._followed.items()):
            reader, lost = self._reader(wheel), self._lost(wheel)
            for batch in reader.slot_batches(slot, followed.seq, lost=lost):
                if isinstance(batch, DamagedFrame):
                    # Also a row that became a hole after it was read; it may be of this second.
                    damaged.add((wheel, batch.seq))
                    continue
                ids.add(batch.ids(), only=None if is_whole else sought)
                if is_whole and _KeptSecond(len(ids), damaged).length_bytes > self._most_bytes:
                    is_whole = False
                    ids.reduce(sought)
            # Reading may have revealed more of them. What was one before may lie in this second.
            holes = reader.holes_anywhere(followed.seq, lost)
            if holes != followed.holes:
                is_sure = False
                self._forget_all()
                self._followed[wheel] = _Followed(followed.seq, holes)
                self._note_missing(wheel, holes | followed.holes)
                found.note_missing(self.missing)
        found.add(ids, sought)
        if damaged:
            found.damaged[slot] = damaged.copy()
        if is_sure and is_whole:
            second = _KeptSecond(len(ids), damaged)
            self._shrink(self._most_bytes - second.length_bytes)
            ids.move_to(self._ids)
            self._seconds[slot] = second
            self._slots = None

    # --- keeping

    def _shrink(self, most_bytes: int) -> None:
        """Drops the least recently asked for, if all take more than this."""
        length_bytes = self.length_bytes
        if length_bytes <= most_bytes:
            return
        dropped = []
        for slot, second in self._seconds.items():
            if length_bytes <= most_bytes * _SPARED:
                break
            length_bytes -= second.length_bytes
            dropped.append(slot)
        self._forget(dropped)

    def _forget(self, slots: Iterable[int]) -> None:
        forgotten = list(slots)
        if forgotten:
            for slot in forgotten:
                del self._seconds[slot]
            self._slots = None
            self._ids.drop(forgotten)
            self._journal.take(forgotten)

    def _forget_all(self) -> None:
        self._seconds.clear()
        self._journal.clear()
        self._slots = None
        self._ids.clear()


class _Journal:
    """Index rows of frames that were not read yet, of all seconds together.

    Each question takes some: those that stay are not copied, and a row that was taken has length 0.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._unread = 0
        self._parts: dict[WheelId, list[Places]] = {}

    def add(self, wheel: WheelId, places: Places) -> list[int]:
        """Adds frames; returns the seconds to forget, since too many frames are unread."""
        if not len(places[0]):
            return []
        parts = self._parts.setdefault(wheel, [])
        parts.append(places)
        if len(parts) > _PARTS:
            parts[:] = [_chosen(parts, [rows["length"] > 0 for _, rows in parts])]
        self._unread += len(places[0])
        if self._unread <= self._most:
            return []
        every = [rows for parts in self._parts.values() for _, rows in parts]
        slots: list[int] = np.unique(
            np.concatenate([rows["slot"][rows["length"] > 0] for rows in every])
        ).tolist()
        return slots

    def take(self, slots: Collection[int]) -> list[tuple[WheelId, Places]]:
        """Removes the frames of some seconds, and returns them by wheel, ascending by seq."""
        taken: list[tuple[WheelId, Places]] = []
        wanted = _numbers(slots)
        for wheel, parts in self._parts.items():
            marks = [np.isin(rows["slot"], wanted) & (rows["length"] > 0) for _, rows in parts]
            if any(marked.any() for marked in marks):
                taken.append((wheel, _chosen(parts, marks)))
                for (_, rows), marked in zip(parts, marks, strict=True):
                    rows["length"][marked] = 0
        self._unread -= sum(len(seqs) for _, (seqs, _) in taken)
        if not self._unread:
            self._parts.clear()
        return taken

    def clear(self) -> None:
        self._unread = 0
        self._parts.clear()


def _chosen(parts: list[Places], marks: list[NDArray[np.bool_]]) -> Places:
    """Returns the marked frames, in one part."""
    chosen = [(seqs[at], rows[at]) for (seqs, rows), at in zip(parts, marks, strict=True)]
    return np.concatenate([seqs for seqs, _ in chosen]), np.concatenate([r for _, r in chosen])


def _numbers(slots: Collection[int]) -> NDArray[np.uint32]:
    return np.fromiter(slots, np.uint32, len(slots))
