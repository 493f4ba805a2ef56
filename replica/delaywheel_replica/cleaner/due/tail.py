"""Finds new frames by following the wheels' indexes.

What is *admitted* of a wheel is a seq A >= V: every frame up to A is accounted for, in one of three
ways. A step may lead to V' = A, but not beyond.

====================================  ====================================================
a frame <= A, its slot                is
====================================  ====================================================
below the floor, or it is lost        skipped: done, or given up
past or covered (see window.py)       in its second in memory
future, of a second that is in        likewise
memory early
future                                in its file: read with its whole second
====================================  ====================================================

Frames > V with messages due by w are *late*: they are kept here in order, because a step must take
them together with their seq. So are releases, with the halves that they let go, wherever these are
due: their second is loaded early. A frame whose second is not yet in memory delays its wheel, and
only its wheel, until the second is loaded. So does one that cannot be read, until it can be, or is
lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.files.index import OpenIndexes
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import are_releases, is_hole, message_counts
from delaywheel.storage.reading.decoding import FrameBatch
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader
from delaywheel_replica.cleaner.due.seconds import Second
from delaywheel_replica.cleaner.due.unreadable import AwaitedFrames
from delaywheel_replica.cleaner.due.window import Window
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameRange
from delaywheel_replica.core.protocol.progress import Progress

_ROWS_AT_ONCE = 65_536
LATE_MESSAGES = 100_000
LATE_BYTES = 32 << 20
"""No more late frames are admitted while this much of them waits for its steps."""


class LateFrame(NamedTuple):
    """A frame that must be taken together with its seq.

    Its messages are rows [begin, end) of the second. A release has none: it lets others go.
    """

    seq: int
    second: Second
    begin: int
    end: int
    length_bytes: int
    released: NDArray[np.intp] | None = None

    def rows_after(self, due_ms: int) -> NDArray[np.intp]:
        """Returns the rows that a step takes with it from a progress with w = `due_ms`."""
        if self.released is None:
            return self.second.due_between(self.begin, self.end, due_ms)
        return self.second.later_than(self.released, due_ms)

    @property
    def messages(self) -> int:
        """How many messages it may have to take."""
        return self.end - self.begin if self.released is None else len(self.released)


class Tail:
    """How far each wheel is admitted."""

    def __init__(self, disk: Disk, data: Path, window: Window) -> None:
        self._open = partial(WheelReader, disk, data, opened=OpenIndexes())
        self._window = window
        self._late_messages = self._late_bytes = 0
        self.readers: dict[WheelId, WheelReader] = {}
        self.admitted: dict[WheelId, int] = {}
        self.late: dict[WheelId, deque[LateFrame]] = {}
        self._awaited: dict[WheelId, AwaitedFrames] = {}
        self.lost = NO_FRAMES

    def start(self, progress: Progress) -> None:
        """Starts again: what progress covers is admitted."""
        self.admitted = dict(progress.seqs)
        self.late.clear()
        self._awaited.clear()
        self._late_messages = self._late_bytes = 0

    def follow(self, wheel: WheelId) -> None:
        """Follows this wheel's index from now on."""
        if wheel not in self.readers:
            self.readers[wheel] = self._open(wheel)
        self.admitted.setdefault(wheel, 0)

    def forget(self, wheel: WheelId) -> None:
        """Stops following an unregistered wheel."""
        self.admitted.pop(wheel, None)
        self._awaited.pop(wheel, None)
        reader = self.readers.pop(wheel, None)
        if reader is not None:
            reader.close()

    def admit(self, limits: Mapping[WheelId, int], progress: Progress) -> None:
        """Admits new frames, up to each wheel's limit."""
        self._window.want_none()
        for wheel, limit in limits.items():
            while (
                self.admitted[wheel] < limit
                and wheel not in self._awaited
                and self._admit_some(wheel, limit, progress)
            ):
                pass

    def unreadable(self) -> Iterator[FrameRange]:
        """The frames that wheels rest in front of, and some frames after them."""
        for awaited in self._awaited.values():
            yield from awaited.reported()

    def look_again(self, *, floor: int) -> None:
        """Checks whether wheels can continue that rest in front of an unreadable frame."""
        for wheel, awaited in list(self._awaited.items()):
            awaited.look_again(self.readers, self.lost, floor=floor)
            if (wheel, self.admitted[wheel] + 1) not in awaited:
                del self._awaited[wheel]

    def drop_taken(self, progress: Progress) -> None:
        """Takes a new progress, whose messages are no longer late."""
        for wheel, late in self.late.items():
            while late and late[0].seq <= progress.seq(wheel):
                taken = late.popleft()
                self._late_messages -= taken.messages
                self._late_bytes -= taken.length_bytes

    def close(self) -> None:
        """Closes the indexes."""
        for reader in self.readers.values():
            reader.close()

    def late_slots(self) -> set[int]:
        """The slots of late frames."""
        return {frame.second.slot for frames in self.late.values() for frame in frames}

    def _admit_some(self, wheel: WheelId, limit: int, progress: Progress) -> bool:
        """Admits the frames of some index rows; False if none can be admitted for now."""
        first = self.admitted[wheel] + 1
        rows = self.readers[wheel].rows(first, min(limit, first + _ROWS_AT_ONCE - 1))
        if not len(rows):
            return self._pass_lost(wheel, limit)
        self._window.note(rows["slot"])
        numbers = self._touched(wheel, first, rows, progress)
        end = self._admissible_end(numbers, rows, progress)
        batches, unreadable = self._read(wheel, first, rows, numbers[numbers < end])
        if not rows["length"].all():
            unreadable += self._not_lost(wheel, first, np.flatnonzero(is_hole(rows))).tolist()
        if unreadable and min(unreadable) < end:
            end = min(unreadable)
            self._awaited[wheel] = AwaitedFrames([(wheel, first + number) for number in unreadable])
        late: list[LateFrame] = []
        for slot, found in batches.items():
            inside = [batch.take(batch.seqs < first + end) for batch in found]
            inside = [batch for batch in inside if len(batch)]
            if inside:
                late += self._admit_frames(slot, inside, progress)
        if late:
            self.late.setdefault(wheel, deque()).extend(sorted(late, key=itemgetter(0)))
            self._late_messages += sum(frame.messages for frame in late)
            self._late_bytes += sum(frame.length_bytes for frame in late)
        self.admitted[wheel] = first + end - 1
        return end == len(rows)

    def _pass_lost(self, wheel: WheelId, limit: int) -> bool:
        """Admits lost frames that have no row here; False if there are none."""
        before = self.admitted[wheel]
        self.admitted[wheel] = min(limit, self.lost.seqs(wheel).end_from(before))
        return self.admitted[wheel] > before

    def _touched(
        self, wheel: WheelId, first: int, rows: NDArray[np.void], progress: Progress
    ) -> NDArray[np.intp]:
        """Marks rows from seq `first` on that are for past or covered slots."""
        slots = rows["slot"]
        # The second of w may lie beyond what is covered, just after a start.
        edge = max(self._window.covered_to, progress.due_ms // 1000)
        touched = slots <= edge
        if not touched.all():
            touched |= are_releases(rows)
            for slot in self._window.early():
                touched |= slots == slot
        touched &= slots >= progress.floor
        return self._not_lost(wheel, first, np.flatnonzero(touched))

    def _not_lost(self, wheel: WheelId, first: int, numbers: NDArray[np.intp]) -> NDArray[np.intp]:
        """Marks rows whose frames are not given up."""
        lost = self.lost.seqs(wheel)
        if not (lost and len(numbers)):
            return numbers
        return numbers[~lost.marks(first, int(numbers[-1]) + 1)[numbers]]

    def _admissible_end(
        self, numbers: NDArray[np.intp], rows: NDArray[np.void], progress: Progress
    ) -> int:
        """Returns the first row that cannot be admitted yet, or the number of rows.

        Loads the second that it waits for.
        """
        is_late = rows["slot"][numbers] <= progress.due_ms // 1000
        late = numbers[is_late | are_releases(rows[numbers])]
        if not len(late):
            return len(rows)
        messages, lengths = message_counts(rows[late]), rows["length"][late].astype(np.int64)
        is_full = np.cumsum(messages) - messages >= LATE_MESSAGES - self._late_messages
        is_full |= np.cumsum(lengths) - lengths >= LATE_BYTES - self._late_bytes
        end = int(late[is_full.argmax()]) if is_full.any() else len(rows)
        slots, places = np.unique(rows["slot"][late[~is_full]], return_index=True)
        # In the order of the rows, up to the first second that is not there: that one is loaded.
        for place, slot in sorted(zip(places.tolist(), slots.tolist(), strict=True)):
            if self._window.wanted(slot) is None:
                return int(late[place])
        return end

    def _read(
        self, wheel: WheelId, first: int, rows: NDArray[np.void], numbers: NDArray[np.intp]
    ) -> tuple[dict[int, list[FrameBatch]], list[int]]:
        """Reads the frames of some rows by slot, and the rows of unreadable ones."""
        batches: dict[int, list[FrameBatch]] = {}
        unreadable: list[int] = []
        slots = rows["slot"][numbers]
        for slot in sorted(set(slots.tolist())):
            chosen = numbers[slots == slot]
            batches[slot] = []
            for batch in self.readers[wheel].batches(slot, (chosen + first, rows[chosen])):
                if isinstance(batch, DamagedFrame):
                    unreadable.append(batch.seq - first)
                else:
                    batches[slot].append(batch)
        return batches, unreadable

    def _admit_frames(
        self, slot: int, batches: list[FrameBatch], progress: Progress
    ) -> list[LateFrame]:
        """Admits frames of one past or covered slot; returns the late ones."""
        second = self._window.open(slot)
        if second is None:
            self._window.put_aside(slot, batches)
            return []
        late: list[LateFrame] = []
        if slot * 1000 <= progress.due_ms:
            end = len(second)
            for batch in batches:
                if batch.kind is Kind.MESSAGES:
                    columns = (batch.seqs, batch.counts, batch.lengths_bytes)
                    lists = [column.tolist() for column in columns]
                    for seq, count, length_bytes in zip(*lists, strict=True):
                        begin, end = end, end + count
                        late.append(LateFrame(seq, second, begin, end, length_bytes))
        released = second.add(batches)
        for seq in np.unique(released.seqs).tolist():
            rows = released.rows[released.seqs == seq]
            late.append(LateFrame(seq, second, 0, 0, 0, rows))
        return late
