"""New frames, found by following the wheels' indexes.

What is *admitted* of a wheel is a seq A >= V: every frame up to A is accounted for, in one of
four ways. A step may lead to V' = A; it may not lead beyond.

====================================  ====================================================
a frame <= A, its slot                is
====================================  ====================================================
below the floor, or it is lost        skipped: done, or told as lost
past or covered (see window.py)       in its second in memory
future                                in its file: read with its whole second
unreadable                            kept here as lost, to be told by the step whose V' has it
====================================  ====================================================

Frames > V with messages due by w are *late*: they are kept here in order, for a step must take
them together with their seq. A frame whose second is not in memory yet holds up its wheel, and
only its wheel, until that is loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delaywheel.disk import Disk
from delaywheel.format import HOLE_ROW, INDEX_ROW, Kind, message_counts
from delaywheel.identity import WheelId
from delaywheel.reader import DamagedFrame, WheelReader
from delaywheel_replica.cleaner.rows import LostFrame
from delaywheel_replica.cleaner.seconds import Second
from delaywheel_replica.cleaner.window import Window
from delaywheel_replica.core.progress import Progress

_ROWS_AT_ONCE = 65_536
_HOLE = np.frombuffer(HOLE_ROW, INDEX_ROW)
LATE_MESSAGES = 100_000
"""No more frames are admitted while so many late messages wait for their steps."""


class LateFrame(NamedTuple):
    """A frame with messages due by w, as rows [begin, end) of its second."""

    seq: int
    second: Second
    begin: int
    end: int


class Tail:
    """What is admitted of each wheel."""

    def __init__(self, disk: Disk, data: Path, window: Window) -> None:
        self._disk = disk
        self._data = data
        self._window = window
        self._late_messages = 0
        self.readers: dict[WheelId, WheelReader] = {}
        self.admitted: dict[WheelId, int] = {}
        self.late: dict[WheelId, deque[LateFrame]] = {}
        self.unreadable: dict[tuple[WheelId, int], LostFrame] = {}
        self.lost: set[tuple[WheelId, int]] = set()

    def start(self, progress: Progress) -> None:
        """Begin anew: admitted is what progress covers."""
        self.admitted = dict(progress.seqs)
        self.late.clear()
        self.unreadable.clear()
        self._late_messages = 0

    def follow(self, wheel: WheelId) -> None:
        """Read this wheel's index from now on."""
        if wheel not in self.readers:
            self.readers[wheel] = WheelReader(self._disk, self._data, wheel)
        self.admitted.setdefault(wheel, 0)

    def forget(self, wheel: WheelId) -> None:
        """This wheel is unregistered."""
        self.admitted.pop(wheel, None)
        reader = self.readers.pop(wheel, None)
        if reader is not None:
            reader.close()

    def admit(self, limits: Mapping[WheelId, int], progress: Progress) -> None:
        """Admit new frames, up to the limit of each wheel."""
        for wheel, limit in limits.items():
            while self.admitted[wheel] < limit and self._admit_some(wheel, limit, progress):
                pass

    def drop_taken(self, progress: Progress) -> None:
        """Progress stands here now: what it covers is late or unreadable no more."""
        for wheel, late in self.late.items():
            while late and late[0].seq <= progress.seq(wheel):
                taken = late.popleft()
                self._late_messages -= taken.end - taken.begin

    def unreadable_up_to(self, seqs: Mapping[WheelId, int]) -> tuple[LostFrame, ...]:
        """The frames up to these seqs that cannot be read, in order."""
        frames = self.unreadable.values()
        return tuple(sorted(lost for lost in frames if lost.seq <= seqs.get(lost.wheel, 0)))

    def lose(self, frames: Collection[tuple[WheelId, int]]) -> None:
        """It is committed that these are lost: they are not looked at again."""
        for frame in frames:
            self.lost.add(frame)
            self.unreadable.pop(frame, None)

    def keep_unreadable(self, wheel: WheelId, frame: DamagedFrame, progress: Progress) -> None:
        """A frame could not be read: something is lost, unless all of it was done."""
        is_done = frame.seq <= progress.seq(wheel) and frame.slot * 1000 + 999 <= progress.due_ms
        if not is_done and (wheel, frame.seq) not in self.lost:
            self.unreadable[wheel, frame.seq] = LostFrame(
                wheel, frame.seq, frame.slot, frame.messages, frame.cancels, frame.reason.name
            )

    def close(self) -> None:
        """Close the indexes."""
        for reader in self.readers.values():
            reader.close()

    def late_slots(self) -> set[int]:
        """Slots of late frames."""
        return {frame.second.slot for frames in self.late.values() for frame in frames}

    def _admit_some(self, wheel: WheelId, limit: int, progress: Progress) -> bool:
        """Admit the frames of some index rows; False: no more for now."""
        first = self.admitted[wheel] + 1
        rows = self.readers[wheel].rows(first, min(limit, first + _ROWS_AT_ONCE - 1))
        self._window.note(rows["slot"])
        numbers = self._touched(wheel, first, rows, progress)
        slots = rows["slot"][numbers]
        end = self._first_to_wait(numbers, rows, progress)
        late: list[LateFrame] = []
        for slot in set(slots.tolist()):
            chosen = numbers[(slots == slot) & (numbers < end)]
            late += self._admit_frames(
                wheel, slot, (chosen + first).tolist(), rows[chosen], progress
            )
        if late:
            self.late.setdefault(wheel, deque()).extend(sorted(late, key=itemgetter(0)))
            self._late_messages += sum(frame.end - frame.begin for frame in late)
        self.admitted[wheel] = first + end - 1
        return end == len(rows) > 0

    def _touched(
        self, wheel: WheelId, first: int, rows: NDArray[np.void], progress: Progress
    ) -> NDArray[np.intp]:
        """Which of the rows from seq `first` on are for past or covered slots, or are holes."""
        slots = rows["slot"]
        # The second of w may lie beyond what is covered, just after a start.
        edge = max(self._window.covered_to, progress.due_ms // 1000)
        touched = (slots <= edge) & (slots >= progress.floor)
        if not rows["length"].all():
            for number in np.flatnonzero(rows == _HOLE).tolist():
                self._keep_hole(wheel, first + number, progress)
        numbers = np.flatnonzero(touched)
        if self.lost:
            known = [(wheel, first + number) in self.lost for number in numbers.tolist()]
            numbers = numbers[~np.array(known, np.bool_)]
        return numbers

    def _keep_hole(self, wheel: WheelId, seq: int, progress: Progress) -> None:
        frame = self.readers[wheel].frame(seq)
        assert isinstance(frame, DamagedFrame)
        self.keep_unreadable(wheel, frame, progress)

    def _first_to_wait(
        self, numbers: NDArray[np.intp], rows: NDArray[np.void], progress: Progress
    ) -> int:
        """The first row that cannot be admitted yet, or how many rows there are."""
        late = numbers[rows["slot"][numbers] <= progress.due_ms // 1000]
        if not len(late):
            return len(rows)
        slots = rows["slot"][late]
        waiting = [slot for slot in set(slots.tolist()) if self._window.open(slot) is None]
        before = np.cumsum(message_counts(rows[late])) + self._late_messages
        before[1:] = before[:-1]
        before[:1] = self._late_messages
        held = late[np.isin(slots, waiting) | (before >= LATE_MESSAGES)]
        return int(held[0]) if len(held) else len(rows)

    def _admit_frames(
        self,
        wheel: WheelId,
        slot: int,
        seqs: list[int],
        rows: NDArray[np.void],
        progress: Progress,
    ) -> list[LateFrame]:
        """Admit frames of one past or covered slot; those that are late are returned."""
        frames = []
        for frame in self.readers[wheel].frames(slot, seqs, rows):
            if isinstance(frame, DamagedFrame):
                self.keep_unreadable(wheel, frame, progress)
            else:
                frames.append(frame)
        second = self._window.open(slot)
        if second is None:
            self._window.put_aside(frames)
            return []
        late = []
        if slot * 1000 <= progress.due_ms:
            end = len(second)
            for frame in frames:
                if frame.kind is Kind.MESSAGES:
                    begin, end = end, end + len(frame.columns)
                    late.append(LateFrame(frame.seq, second, begin, end))
        second.add(frames)
        return late
