"""An index of the ids in those seconds that callers ask about: built when asked, then kept up.

Messages are found by id and second; reading a whole second for one of them costs more the more it
holds. So a second is read once, its ids stay in memory, and from then on only the rows that the
wheels' indexes have gained are read. What a *fresh scan* would find, which reads the second's
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
a damaged frame was repaired, or its row moved   that; the second is read anew
rows became holes, or holes were filled          the set of holes differs; nothing is kept
a new row is a hole, or all zeros                its length; nothing is kept, since the frame may
                                                 lie in any second's file
it was cut, or is no longer held                 the limit falls; nothing is kept
a wheel is new, and long; or was not looked at   more new rows than would be examined; nothing is
for long                                         kept
a second is deleted                              nothing: it is not asked about any more, and goes
                                                 as the least recently asked for
a file that was read goes bad                    nothing: what was read stays true
reading fails                                    the error; the second is read anew
===============================================  =================================================

"Nothing is kept" costs each second that is asked about again one more scan, as without an index.

Memory is bounded: the least recently asked for goes first, as do seconds with too many unread
frames. A second that alone exceeds the bound is read for each question, and only rows that
matter to the question are kept meanwhile.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.frames.rows import INDEX_ROW
from delaywheel.storage.reading.decoding import FrameBatch
from delaywheel.storage.reading.ids import SecondIds, Sought
from delaywheel.storage.reading.places import Places
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader

MOST_BYTES: Final = 64 << 20
"""What all seconds together take in memory, roughly."""
NEW_ROWS_AT_MOST: Final = 1 << 16
"""So many new rows of a wheel are examined; beyond, the seconds are read anew."""
UNREAD_AT_MOST: Final = 1 << 16
"""So many frames of seconds that are kept may be unread."""

_NO_SLOT: Final = (1 << 32) - 1
_UNREAD: Final = np.dtype([("slot", "<u4"), ("wheel", "<u4"), ("seq", "<i8"), ("row", INDEX_ROW)])


@dataclass(frozen=True, slots=True)
class _Followed:
    """How far a wheel was followed."""

    seq: int
    holes: SeqSet  # rows without a frame, wherever the frames lie


class IdIndex:
    """The ids of seconds, of all wheels of a folder. For one thread.

    Attributes:
        missing: After `follow`: frames that may be of any second, by wheel; no wheel without any.
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
            reader: Returns the reader of a wheel.
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
        self._seconds: dict[int, SecondIds] = {}  # the least recently asked for first
        self._slots = np.empty(0, np.uint32)  # of these seconds, ascending
        self.missing: dict[WheelId, SeqSet] = {}
        self.length_bytes = 0
        self.built = 0
        """How many seconds were read as a whole."""

    def __len__(self) -> int:
        """The number of seconds that are kept."""
        return len(self._seconds)

    def follow(self, limits: Mapping[WheelId, int], lost: Callable[[WheelId], SeqSet]) -> None:
        """Notes what is new.

        Args:
            limits: The wheels, each with the last seq to consider.
            lost: The frames of a wheel that no node can read any more.
        """
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

    def second(self, slot: int, sought: Sought) -> SecondIds:
        """Returns the ids of a second, as far as the wheels were followed.

        Args:
            slot: The second.
            sought: What the caller will look for. If the second is too long to be kept, there is
                nothing else in the result.
        """
        second, unread = self._seconds.pop(slot, None), self._journal.take(slot)
        if second is not None:
            self.length_bytes -= second.length_bytes
            self._slots = self._slots[self._slots != slot]
            if not (self._is_as_damaged(second) and self._read_new(second, unread)):
                second = None
        is_sure = True
        if second is None:
            second, is_sure = self._read(slot, sought)
        if second.only is None and second.length_bytes > self._most_bytes:
            second.reduce(sought)
        if second.only is None and is_sure:
            self._keep(second)
        return second

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
        """Notes new frames of seconds that are kept; False if these must be read anew."""
        if not self._seconds or last_seq < first_seq:
            return True
        rows = reader.rows(first_seq, last_seq)
        if not rows["length"].all():
            return False
        places = self._slots.searchsorted(rows["slot"])
        places[places == len(self._slots)] = 0
        at = np.flatnonzero(self._slots[places] == rows["slot"])
        for slot in self._journal.add(reader.wheel, first_seq + at, rows[at]):
            self._forget(slot)
        return True

    # --- reading

    def _is_as_damaged(self, second: SecondIds) -> bool:
        """Whether all frames that could not be read still cannot."""
        for wheel, seq in second.damaged:
            reader = self._reader(wheel)
            frame = reader.frame(seq) if reader.has(seq) else None
            if not isinstance(frame, DamagedFrame) or frame.slot != second.slot:
                return False
        return True

    def _read_new(self, second: SecondIds, unread: list[tuple[WheelId, Places]]) -> bool:
        """Reads a second's new frames; False if one of them cannot be read."""
        for wheel, places in unread:
            for batch in self._reader(wheel).batches(second.slot, places):
                if isinstance(batch, DamagedFrame):
                    return False
                second.add(batch)
        return True

    def _read(self, slot: int, sought: Sought) -> tuple[SecondIds, bool]:
        """Reads a whole second; also returns whether no hole was filled or seen meanwhile."""
        self.built += 1
        second, is_sure = SecondIds(slot), True
        for wheel, followed in sorted(self._followed.items()):
            reader, lost = self._reader(wheel), self._lost(wheel)
            for batch in self._of_wheel(second, reader, followed):
                second.add(batch)
                if second.only is None and second.length_bytes > self._most_bytes:
                    second.reduce(sought)
            # Reading may have revealed more of them. What was one before may lie in this second.
            holes = reader.holes_anywhere(followed.seq, lost)
            if holes != followed.holes:
                is_sure = False
                self._forget_all()
                self._followed[wheel] = _Followed(followed.seq, holes)
                self._note_missing(wheel, holes | followed.holes)
        return second, is_sure

    def _of_wheel(
        self, second: SecondIds, reader: WheelReader, followed: _Followed
    ) -> Iterator[FrameBatch]:
        lost = self._lost(reader.wheel)
        for batch in reader.slot_batches(second.slot, followed.seq, lost=lost):
            if isinstance(batch, DamagedFrame):
                # Also a row that became a hole after it was read; it may be of this second.
                second.damaged.add((reader.wheel, batch.seq))
            else:
                yield batch

    # --- keeping

    def _keep(self, second: SecondIds) -> None:
        self._seconds[second.slot] = second
        self.length_bytes += second.length_bytes
        at = int(self._slots.searchsorted(second.slot))
        self._slots = np.insert(self._slots, at, second.slot)
        while self.length_bytes > self._most_bytes:
            self._forget(next(iter(self._seconds)))

    def _forget(self, slot: int) -> None:
        self.length_bytes -= self._seconds.pop(slot).length_bytes
        self._slots = self._slots[self._slots != slot]
        self._journal.take(slot)

    def _forget_all(self) -> None:
        self._seconds.clear()
        self._journal.clear()
        self._slots = np.empty(0, np.uint32)
        self.length_bytes = 0


class _Journal:
    """Index rows of frames that were not read yet, of all seconds together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows = np.empty(0, _UNREAD)  # grown by doubling; `_count` are valid
        self._slots = np.empty(0, np.uint32)  # of the rows; `_NO_SLOT` once they are taken
        self._count = 0
        self._wheels: list[WheelId] = []

    def add(self, wheel: WheelId, seqs: NDArray[np.int64], rows: NDArray[Any]) -> list[int]:
        """Adds frames; returns the seconds to forget, since too many frames are unread."""
        if not len(seqs):
            return []
        if wheel not in self._wheels:
            self._wheels.append(wheel)
        if self._count + len(seqs) > len(self._rows):
            self._make_room(len(seqs))
        added = self._rows[self._count : self._count + len(seqs)]
        added["slot"], added["row"], added["seq"] = rows["slot"], rows, seqs
        added["wheel"] = self._wheels.index(wheel)
        self._slots[self._count : self._count + len(seqs)] = rows["slot"]
        self._count += len(seqs)
        unread = self._slots[: self._count]
        unread = unread[unread != _NO_SLOT]
        return np.unique(unread).tolist() if len(unread) > self._most else []

    def take(self, slot: int) -> list[tuple[WheelId, Places]]:
        """Removes a second's frames, and returns them by wheel, ascending by seq."""
        at = np.flatnonzero(self._slots[: self._count] == slot)
        taken = self._rows[at]
        self._slots[at] = _NO_SLOT
        by_wheel = [taken[taken["wheel"] == number] for number in np.unique(taken["wheel"])]
        return [
            (self._wheels[int(part["wheel"][0])], (part["seq"], part["row"])) for part in by_wheel
        ]

    def clear(self) -> None:
        """Removes everything."""
        self._count = 0
        self._wheels.clear()

    def _make_room(self, more: int) -> None:
        """Makes room for this many, after dropping what was taken."""
        kept = np.flatnonzero(self._slots[: self._count] != _NO_SLOT)
        room = 2 * (len(kept) + more)
        rows, slots = np.empty(room, _UNREAD), np.empty(room, np.uint32)
        rows[: len(kept)], slots[: len(kept)] = self._rows[kept], self._slots[kept]
        self._rows, self._slots, self._count = rows, slots, len(kept)
