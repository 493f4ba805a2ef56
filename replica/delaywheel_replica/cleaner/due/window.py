"""Which seconds are in memory: that of the progress, the next ones, and some past ones.

With w the millisecond up to which all is done, a second is

=========  ========================================  =====================================
           slots                                     in memory
=========  ========================================  =====================================
past       < (w + 1) // 1000, wholly done            when a late frame needs it; the last few,
                                                     within `PAST` and not below the floor
covered    from there up to `covered_to`             all that exist, or being loaded
future     beyond                                    those that are wanted early, for a release
=========  ========================================  =====================================

A second with a frame that cannot be read is *blocked*: it is not in memory, but is loaded again
once its frames can be read or are lost. If it is covered, w rests in front of it and nothing
beyond is loaded; if it is past, the late frames that want it wait.

Of the seconds that late frames and releases want, the earliest is loaded first: the wheel that is
furthest behind must not wait for the others. While w is behind the clock, those beyond what is
covered and the next covered ones are loaded in turn. Otherwise a backlog of half messages, of which
each second has some that were released, would have what is due wait until all of it was read.

Seconds that exist are found an hour at a time: those that index rows refer to, so that a missing
slot file is noticed, and those that have a file, because a row may be missing as well. If both are
gone the index has a hole, and every second is read as if it existed: none is passed before it is
known where that frame lies, or that no node has it. `note` announces later frames. The seconds up
to a little beyond now are loaded, and in a catch-up no more than `AHEAD` says, so memory does not
grow with the backlog. In a backlog seconds that are wanted early have a bound of the same size: a
wheel waits with a release for a second beyond it. Otherwise what is behind such a release may be
due before it, so there is room for all that is due within the holds of halves: at 40 MB a second,
for instance, with holds of 10 s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from heapq import merge
from itertools import takewhile
from operator import attrgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.reading.decoding import FrameBatch
from delaywheel.storage.reading.reader import WheelReader
from delaywheel_replica.cleaner.due.kept_seconds import Bound, KeptSeconds
from delaywheel_replica.cleaner.due.loading import Loader
from delaywheel_replica.cleaner.due.runs import WheelNumbers
from delaywheel_replica.cleaner.due.seconds import Second
from delaywheel_replica.cleaner.due.unreadable import AwaitedFrames
from delaywheel_replica.core.protocol.frames import FrameRange, FrameSet
from delaywheel_replica.core.protocol.progress import Progress

PRELOAD_MS = 1500
"""A second is loaded when its first millisecond is this near: half a second or more ahead."""
AHEAD = Bound(seconds=256, messages=200_000, length_bytes=64 << 20)
"""Once the seconds after the one where progress stands hold this, no other is loaded."""
EARLY = Bound(seconds=256, messages=2_000_000, length_bytes=512 << 20)
"""Once the seconds that are in memory early hold this, releases wait, with all behind them in their
wheel. In a backlog, where all of that is late anyway, `AHEAD` is enough."""
PAST = Bound(seconds=64, messages=200_000, length_bytes=32 << 20)
"""Past seconds stay until those after them hold this: late frames mostly want the newest."""
_HOUR = 3600


class KnownSlots:
    """Which seconds of the current hour hold anything."""

    def __init__(self) -> None:
        self._begin = 0
        self._marks = np.zeros(0, np.bool_)  # of the slots from _begin on

    def forget(self) -> None:
        """Discards the list, so that it is read again."""
        self._marks = np.zeros(0, np.bool_)

    def note(self, slots: NDArray[np.int64]) -> None:
        """Notes slots that have received frames."""
        near = slots[(slots >= self._begin) & (slots < self._begin + len(self._marks))]
        self._marks[near - self._begin] = True

    def next(self, first: int, last: int, readers: Collection[WheelReader]) -> int | None:
        """Returns the first slot of [first, last] that holds anything."""
        while first <= last:
            if not self._begin <= first < self._begin + len(self._marks):
                self._list(first, readers)
            marks = self._marks[first - self._begin : last + 1 - self._begin]
            if marks.any():
                return first + int(marks.argmax())
            first += len(marks)
        return None

    def _list(self, first: int, readers: Collection[WheelReader]) -> None:
        self._begin = first
        self._marks = np.zeros(_HOUR - first % _HOUR, np.bool_)
        for reader in readers:
            end = first + len(self._marks)
            self._marks[reader.indexed_slots(first, end) - first] = True
            self._marks[np.array(reader.slots(first, end), np.int64) - first] = True


class Window:
    """The seconds in memory, and the loading of the next ones."""

    def __init__(
        self, disk: Disk, data: Path, wheels: WheelNumbers, *, ttl_header: str, thread: bool
    ) -> None:
        self._wheels = wheels
        self._ttl_header = ttl_header
        self._loader = Loader(disk, data, wheels, ttl_header=ttl_header, thread=thread)
        self._known = KnownSlots()
        self._seconds = KeptSeconds()
        self._blocked: dict[int, AwaitedFrames] = {}
        self._arrived: list[FrameBatch] = []  # frames admitted for the second being loaded
        # The earliest second that a late frame waits for: a past one, or one that has a release.
        self._wanted: int | None = None
        self._was_early = False  # the one that was loaded last
        self._progress = Progress(due_ms=-1, position=None)
        self._first = 0  # the first slot that is not past
        self.covered_to = -1

    def start(self, progress: Progress) -> None:
        """Starts again at a progress, with nothing in memory."""
        self._loader.drop()
        self._known.forget()
        self._seconds.clear()
        self._blocked.clear()
        self._arrived.clear()
        self._wanted = None
        self._progress = progress
        self._first = (progress.due_ms + 1) // 1000
        self.covered_to = self._first - 1

    def advance(self, progress: Progress, pinned: AbstractSet[int]) -> None:
        """Takes a new progress; frees past seconds beyond the bounds, except `pinned` ones."""
        self._progress = progress
        self._first = (progress.due_ms + 1) // 1000
        self.covered_to = max(self.covered_to, self._first - 1)
        self._blocked = {s: a for s, a in self._blocked.items() if s >= progress.floor}
        self._seconds.free_past(self._first, progress.floor, PAST, pinned)

    def present(self) -> Iterator[Second]:
        """The seconds in memory that are not past, in order."""
        return self._seconds.from_slot(self._first)

    def loaded_to_ms(self) -> int:
        """Returns the last due up to which everything admitted is in memory."""
        absent = [slot for slot in (self._loader.slot, *self._blocked) if slot is not None]
        return min([self.covered_to + 1, *(s for s in absent if s >= self._first)]) * 1000 - 1

    def is_waited_for(self, now_ms: int, *, has_late: bool) -> bool:
        """Whether the second being loaded is needed now.

        It does not delay what is in memory and can go, as late frames or releases (`has_late`),
        unless w is behind the clock.
        """
        slot = self._loader.slot
        if slot is None or self.covered_to >= slot > now_ms // 1000:
            return False
        if self.is_behind(now_ms):
            return True
        next_ms = self.next_due_ms(self._progress.due_ms)
        return not has_late and (next_ms is None or next_ms > now_ms)

    def is_behind(self, now_ms: int) -> bool:
        """Whether seconds that are past are not covered yet: there is a backlog."""
        return (self.covered_to + 1) * 1000 <= now_ms

    def early(self) -> list[int]:
        """The seconds beyond the covered ones that are in memory, or being loaded."""
        slots = [second.slot for second in self._seconds.from_slot(self.covered_to + 1)]
        loading = self._loader.slot
        return slots if loading is None or loading <= self.covered_to else [*slots, loading]

    def next_due_ms(self, due_ms: int) -> int | None:
        """Returns the earliest due beyond `due_ms` in memory, or `due_ms` for a late frame.

        Behind a blocked second nothing is taken at its due.
        """
        loaded = self._loader.peek()
        if loaded is not None and not self._first <= loaded.second.slot <= self.covered_to:
            return due_ms
        blocked = min((slot for slot in self._blocked if slot >= self._first), default=None)
        ready = () if loaded is None else (loaded.second,)
        for second in merge(self.present(), ready, key=attrgetter("slot")):
            if blocked is not None and second.slot > blocked:
                return None
            next_ms = second.next_due_ms(due_ms)
            if next_ms is not None:
                return next_ms
        return None

    def has_read(self, due_ms: int) -> bool:
        """Whether all that is admitted up to this due is in memory, or ready to be taken there."""
        loaded = self._loader.peek()
        if loaded is not None and loaded.second.slot == due_ms // 1000:
            return True
        return self.loaded_to_ms() >= due_ms

    def get(self, slot: int) -> Second | None:
        """Returns a second in memory."""
        return self._seconds.get(slot)

    def note(self, slots: NDArray[np.int64]) -> None:
        """Notes that the wheels have frames for these slots."""
        self._known.note(slots)

    def open(self, slot: int) -> Second | None:
        """Returns the second of a past or covered slot; None while it is loaded for that."""
        second = self._seconds.get(slot)
        if second is not None or slot == self._loader.slot or slot in self._blocked:
            return second
        if slot < self._first:
            self._want(slot)
            return None
        if slot > self.covered_to:
            return None
        second = Second(slot, self._wheels, self._progress.ahead, self._ttl_header)
        self._seconds.put(second)
        return second

    def wanted(self, slot: int) -> Second | None:
        """Returns the second of a late frame, also a future one; None while it is loaded for it."""
        second = self.open(slot)
        if second is None and slot > self.covered_to and slot not in self._blocked:
            self._want(slot)
        return second

    def want_none(self) -> None:
        """Forgets what was wanted: whoever still waits wants it again."""
        self._wanted = None

    def _want(self, slot: int) -> None:
        self._wanted = slot if self._wanted is None else min(slot, self._wanted)

    def put_aside(self, slot: int, batches: list[FrameBatch]) -> None:
        """Keeps frames admitted for a second that is being loaded, to be added afterwards.

        A blocked one is read with everything admitted by then.
        """
        if slot not in self._blocked:
            assert slot == self._loader.slot
            self._arrived += batches

    def take(self, wait_s: float) -> bool:
        """Takes the loaded second; False if it is not ready, or none was started."""
        loaded = self._loader.take(wait_s)
        if loaded is None:
            return False
        if loaded.damaged:
            self._blocked[loaded.second.slot] = AwaitedFrames(loaded.damaged)
        else:
            loaded.second.add(
                sorted(self._arrived, key=lambda batch: (batch.wheel, int(batch.seqs[0])))
            )
            self._seconds.put(loaded.second)
        self._arrived = []
        return True

    def unreadable(self) -> Iterator[FrameRange]:
        """The frames that block seconds."""
        for awaited in self._blocked.values():
            yield from awaited.reported()

    def look_again(self, readers: Mapping[WheelId, WheelReader], lost: FrameSet) -> None:
        """Checks whether blocked seconds can be loaded now."""
        for awaited in self._blocked.values():
            awaited.look_again(readers, lost, floor=self._progress.floor)

    def begin(
        self,
        now_ms: int,
        readers: Mapping[WheelId, WheelReader],
        seqs: Mapping[WheelId, int],
        lost: FrameSet,
    ) -> bool:
        """Starts to load the next second, unless one is being loaded.

        Call it when everything is admitted that can be: what is loaded too early, before the index
        was followed to its end, would grow without bound as the rest is admitted.
        """
        if self._loader.slot is not None:
            return False
        slot = self._next_to_load(now_ms, readers, seqs, lost)
        if slot is None:
            return False
        ahead = self._progress.ahead
        self._loader.begin(slot, seqs, lost, ahead, is_urgent=slot * 1000 <= now_ms)
        return True

    def _next_to_load(
        self,
        now_ms: int,
        readers: Mapping[WheelId, WheelReader],
        seqs: Mapping[WheelId, int],
        lost: FrameSet,
    ) -> int | None:
        is_behind = self.is_behind(now_ms)
        wanted, covered = self._take_wanted(AHEAD if is_behind else EARLY), None
        is_early = wanted is not None and wanted > self.covered_to
        if wanted is None or (is_early and self._was_early and is_behind):
            covered = self._next_covered((now_ms + PRELOAD_MS) // 1000, readers, seqs, lost)
        self._was_early = covered is None and is_early
        return wanted if covered is None else covered

    def _take_wanted(self, bound: Bound) -> int | None:
        """Returns the second that a frame waits for; one that is left out is wanted again.

        Once the seconds that are in memory early hold the bound, no other becomes so.
        """
        slot, self._wanted = self._wanted, None
        if slot is None or self._seconds.get(slot) is not None:
            return None
        if slot > self.covered_to:
            early = self._seconds.from_slot(self.covered_to + 1)
            return None if bound.is_reached(early) else slot
        return slot

    def _next_covered(
        self,
        last: int,
        readers: Mapping[WheelId, WheelReader],
        seqs: Mapping[WheelId, int],
        lost: FrameSet,
    ) -> int | None:
        for slot, awaited in self._blocked.items():
            if not awaited:
                del self._blocked[slot]
                self._loader.drop_readers()
                return slot
        is_blocked = any(self._first <= slot <= self.covered_to for slot in self._blocked)
        if is_blocked or last <= self.covered_to:
            return None
        has_holes = any(
            readers[wheel].may_have_holes(seqs[wheel], lost.seqs(wheel)) for wheel in seqs
        )
        while last > self.covered_to and not AHEAD.is_reached(self._covered_ahead()):
            # If w was set back, the floor may be beyond it: deleted files are not read.
            first = max(self.covered_to + 1, self._progress.floor)
            found = first if has_holes else self._known.next(first, last, readers.values())
            self.covered_to = last if found is None else found
            if found is not None and self._seconds.get(found) is None:
                return None if found in self._blocked else found  # it may be there, or bad, early
        return None

    def _covered_ahead(self) -> Iterator[Second]:
        """Returns the covered seconds after the one where progress stands."""
        ahead = self._seconds.from_slot(self._first + 1)
        return takewhile(lambda second: second.slot <= self.covered_to, ahead)

    def close(self) -> None:
        """Ends the thread."""
        self._loader.close()
