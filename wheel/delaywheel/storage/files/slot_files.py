"""Slot files: created by the first frame that needs them, appended to, deleted whole.

Apart from that, a slot file changes only when a torn tail is cut after a crash and, in a mirror,
when frames beyond the end are cut or a damaged frame is written again in its place, which may take
a new file.
"""

import errno
import threading
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from delaywheel.storage.files.handles import BundleWritten, HandleCache, Placement
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, File
from delaywheel.storage.frames.bundle import FrameBundle
from delaywheel.storage.frames.rows import SLOT_FILE_LIMIT_BYTES

# The number of slots, then the slots.
_ANNOUNCED = np.dtype("<u4")


class SlotFull(Exception):
    """A slot file has no room for a frame; nothing of the group was written."""

    def __init__(self, slot: int) -> None:
        super().__init__(f"slot {slot} of this wheel is full")
        self.slot = slot


@dataclass(slots=True)
class Unsynced:
    """What was written since the last ``SlotFiles.take_unsynced``."""

    slots: set[int] = field(default_factory=set)
    new_hours: set[int] = field(default_factory=set)  # hours in which files were made


class _Ends:
    """Where each slot's file must end, as written: 8 bytes a second, hour by hour."""

    def __init__(self) -> None:
        self._hours: dict[int, NDArray[np.int64]] = {}

    def of(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        ends = np.zeros(len(slots), np.int64)
        for hour, begin, end in _hours_of(slots):
            known = self._hours.get(hour)
            if known is not None:
                ends[begin:end] = known[slots[begin:end] % layout.SECONDS_PER_HOUR]
        return ends

    def put(self, slots: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Sets the ends of slots; the last entry for a slot counts."""
        for hour, begin, end in _hours_of(slots):
            known = self._hours.get(hour)
            if known is None:
                known = self._hours[hour] = np.zeros(layout.SECONDS_PER_HOUR, np.int64)
            known[slots[begin:end] % layout.SECONDS_PER_HOUR] = ends[begin:end]

    def forget_below(self, floor: int) -> None:
        for hour in [hour for hour in self._hours if hour < floor // layout.SECONDS_PER_HOUR]:
            del self._hours[hour]


def _hours_of(slots: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    hours = slots // layout.SECONDS_PER_HOUR
    begins = [0, *((hours[1:] != hours[:-1]).nonzero()[0] + 1).tolist(), len(slots)]
    for begin, end in pairwise(begins):
        if begin < end:
            yield int(hours[begin]), begin, end


class SlotFiles:
    """The slot files of one wheel, for its writer.

    ``append`` is for one thread; the others may run beside it on another.
    """

    def __init__(
        self,
        folder: Path,
        handles: HandleCache,
        *,
        keeps_open: bool = False,
    ) -> None:
        """Opens nothing yet; `keeps_open`: the announcements' file, for a wheel always written."""
        self._folder = folder
        self._keeps_open = keeps_open
        self._announced: File | None = None
        self._handles = handles
        self._owner = handles.new_owner()
        self._many_files = handles.disk.many_files(folder)
        # Ends of slots that were appended to: such a wheel began with no slot at all.
        self._ends = _Ends()
        self._unsynced = Unsynced()
        self._lock = threading.Lock()

    def places(self, slots: NDArray[np.int64], edges: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the offset of each frame of a group: behind all others of its slot.

        Slots ascend. The edges say where each frame begins in the group's bytes, and where the last
        one ends. Raises SlotFull if a slot file would grow beyond what an index row can hold.
        """
        begins = edges[:-1]
        is_first = np.empty(len(slots), bool)
        is_first[:1] = True
        np.not_equal(slots[1:], slots[:-1], out=is_first[1:])
        # Behind those of its slot in the same group, too.
        before = begins - np.maximum.accumulate(np.where(is_first, begins, 0))
        offsets = self._ends.of(slots) + before
        full = offsets + (edges[1:] - begins) > SLOT_FILE_LIMIT_BYTES
        if full.any():
            raise SlotFull(int(slots[full.argmax()]))
        return offsets

    def announce(self, slots: Sequence[int]) -> None:
        """Records which files the next frames go to, before any of them is written.

        If the process dies before their rows are written, recovery need not examine all other
        files. Nothing is synced: after a crash of the machine it does examine all of them.
        """
        if self._announced is None:
            path = layout.writing_path(self._folder)
            self._announced = self._handles.disk.open(path, create=True)
        self._announced.write_at((array("I", (len(slots), *slots)).tobytes(),), 0)
        if not self._keeps_open:
            self._close_announced()

    def append(self, bundle: FrameBundle) -> BundleWritten:
        """Writes a group's frames at the offsets from `places`, until one cannot be written.

        Fails if a file was deleted or cut from outside: at the offsets that would follow, mirrors
        hold other frames.
        """
        wrote = self.write(bundle, Placement.AT_END)
        if wrote.misplaced_at is not None:
            slot, until, _, _ = bundle.rows[wrote.frames].item()
            path = layout.slot_path(self._folder, slot)
            cause = f"it ends at {wrote.misplaced_at} and was written up to {until}"
            wrote.failure = OSError(errno.ESTALE, f"{cause}: deleted or cut?", str(path))
        done = bundle.rows[: wrote.frames]
        slots, offsets = done["slot"].astype(np.int64), done["offset"].astype(np.int64)
        self._ends.put(slots, offsets + done["length"])
        return wrote

    def write(
        self,
        bundle: FrameBundle,
        where: Placement,
        is_over: Callable[[], bool] | None = None,
    ) -> BundleWritten:
        """Writes frames at their places, until one cannot be written; see `HandleCache.write`."""
        wrote = self._handles.write(self._owner, self._folder, bundle, where=where, is_over=is_over)
        self._note_unsynced(wrote.slots, wrote.new_slots)
        return wrote

    def reopen(self, slots: Collection[int]) -> None:
        """Reopens the files of these slots by name at the next write.

        One that is open here may have been deleted from outside, and then nobody can read what it
        gets.
        """
        self._handles.close_slots(self._owner, slots)

    def mark_unsynced(self, slots: Collection[int]) -> None:
        """Notes slots that others wrote and closed: they, and their names, may not be synced."""
        self._note_unsynced(slots, slots)
        self._handles.note_closed_early(self._owner)

    def put_back(self, unsynced: Unsynced) -> None:
        """Takes back what a failed ``sync`` must repeat."""
        with self._lock:
            self._unsynced.slots |= unsynced.slots
            self._unsynced.new_hours |= unsynced.new_hours

    def take_unsynced(self) -> Unsynced:
        """Returns what ``sync`` must make durable, and begins a new record."""
        with self._lock:
            taken, self._unsynced = self._unsynced, Unsynced()
        return taken

    def sync(self, unsynced: Unsynced) -> None:
        """Puts slot files and their names on the medium."""
        disk, folder = self._handles.disk, layout.slots_folder(self._folder)
        self._many_files.sync(
            [layout.slot_path(self._folder, slot) for slot in sorted(unsynced.slots)],
            were_closed=self._handles.take_closed_early(self._owner),
        )
        for hour in sorted(unsynced.new_hours):
            with suppress(FileNotFoundError):  # deleted meanwhile: below the floor
                disk.sync_folder(folder / layout.hour_name(hour))
        if unsynced.new_hours:
            disk.sync_folder(folder)

    def forget_below(self, floor: int) -> None:
        """Closes open files of deleted slots."""
        self._handles.close_below(self._owner, floor)
        with self._lock:
            self._ends.forget_below(floor)

    def close(self) -> None:
        """Closes all open files of this wheel."""
        self._handles.close(self._owner)
        self._close_announced()

    def _note_unsynced(self, slots: Collection[int], new_slots: Collection[int]) -> None:
        """Notes written slots, after the write, so that a concurrent sync does not miss them."""
        with self._lock:
            self._unsynced.slots.update(slots)
            if new_slots:
                hours = {slot // layout.SECONDS_PER_HOUR for slot in new_slots}
                self._unsynced.new_hours.update(hours)

    def _close_announced(self) -> None:
        if self._announced is not None:
            self._announced.close()
            self._announced = None


def list_slots(
    disk: Disk, folder: Path, from_slot: int = 0, to_slot: int | None = None
) -> Iterator[int]:
    """Yields slots that have a file, ascending, ``from_slot`` <= slot < ``to_slot``."""
    slots = layout.slots_folder(folder)
    for name in disk.list_folder(slots):
        hour = layout.hour_of_name(name)
        if hour is None or (hour + 1) * layout.SECONDS_PER_HOUR <= from_slot:
            continue
        if to_slot is not None and hour * layout.SECONDS_PER_HOUR >= to_slot:
            return
        for slot in sorted(filter(None, map(layout.slot_of_name, disk.list_folder(slots / name)))):
            if slot >= from_slot and (to_slot is None or slot < to_slot):
                yield slot


def slot_sizes(disk: Disk, folder: Path) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yields, hour by hour, the slots that have a file, with its length."""
    slots = layout.slots_folder(folder)
    for name in disk.list_folder(slots):
        hour = layout.hour_of_name(name)
        if hour is not None:
            sizes = disk.list_sizes(slots / name)
            named = ((layout.slot_of_name(file), size) for file, size in sizes)
            yield hour, [(slot, size) for slot, size in named if slot is not None]


def announced_slots(disk: Disk, folder: Path) -> list[int]:
    """Returns the slots of the last group, and possibly others; none if nothing was announced."""
    try:
        content = disk.read_file(layout.writing_path(folder))
    except OSError:
        return []
    numbers = np.frombuffer(content, _ANNOUNCED, len(content) // _ANNOUNCED.itemsize).tolist()
    return sorted(set(numbers[1 : numbers[0] + 1])) if numbers else []


def forget_announced(disk: Disk, folder: Path) -> None:
    """Removes the announcement: no group is being written."""
    disk.delete(layout.writing_path(folder))


def delete_slots_below(
    disk: Disk, folder: Path, floor: int, undeletable: Undeletable
) -> Iterator[int]:
    """Deletes the files of slots below ``floor``, and the folders of hours left empty.

    One by one, as the iterator is consumed: deleting a day's files may take a disk many seconds.
    Those that cannot be deleted are passed over, with the folders of their hours, and so are
    folders that the medium cannot list.
    """
    slots = layout.slots_folder(folder)
    for name in disk.list_folder(slots):
        hour = layout.hour_of_name(name)
        if hour is None:
            continue
        if hour * layout.SECONDS_PER_HOUR >= floor:
            break
        files = undeletable.list_folder(disk, slots / name)
        if files is None:
            continue
        is_empty = (hour + 1) * layout.SECONDS_PER_HOUR <= floor
        for slot in sorted(filter(None, map(layout.slot_of_name, files))):
            if slot >= floor:
                break
            if undeletable.delete(disk, slots / name / f"{slot}.slot"):
                yield slot
            else:
                is_empty = False
        if is_empty:
            undeletable.delete(disk, slots / name, is_folder=True)
