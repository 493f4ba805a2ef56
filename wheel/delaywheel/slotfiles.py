"""Slot files: created by the first frame that needs them, appended to, deleted whole.

Nothing else ever happens to a slot file but the cutting of a torn tail after a crash and, in a
mirror, of frames beyond the end, and the writing again of a damaged frame in its place. Handles
are opened when needed and kept in one bounded cache for all wheels of the node; what lies far
ahead is closed first, since slots near the pointer are about to take frames of short delays.
"""

import errno
import threading
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from delaywheel import layout
from delaywheel.disk import Buffer, Disk, File
from delaywheel.format import NO_SLOT, SLOT_FILE_LIMIT_BYTES, EncodedFrame
from delaywheel.index import OpenIndexes

# Handles of slots up to this many seconds ahead of the pointer are spared when one must go...
_NEAR_SECONDS = 60
# ...as long as one that need not be spared is found among so many.
_SPARED_AT_MOST = 16

# How many slots, then the slots.
_ANNOUNCED = np.dtype("<u4")


class SlotFull(Exception):  # noqa: N818 - the condition is the name
    """A slot file has no room for a frame; nothing of the group was written."""

    def __init__(self, slot: int) -> None:
        super().__init__(f"slot {slot} of this wheel is full")
        self.slot = slot


@dataclass(slots=True)
class _Handle:
    file: File
    end: int  # the file's length: where the next frame goes


class HandleCache:
    """Open slot files of all wheels, at most ``capacity`` of them. Thread-safe.

    ``indexes`` bounds the open index files of copies, for the thread that writes them.
    """

    def __init__(self, disk: Disk, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("a cache of handles needs room for one")
        self.disk = disk
        self.capacity = capacity
        self.indexes = OpenIndexes()
        # The slot of the wall clock, told by the writer with each group.
        self.pointer_slot = 0
        self._handles: dict[tuple[int, int], _Handle] = {}  # in the order of their last use
        self._lock = threading.Lock()
        self._next_owner = 0

    def __len__(self) -> int:
        return len(self._handles)

    def new_owner(self) -> int:
        """A number that keeps the slots of one user apart from those of others."""
        with self._lock:
            self._next_owner += 1
            return self._next_owner

    def append(self, owner: int, slot: int, folder: Path, buffer: Buffer, end: int) -> None:
        """Appends to a slot file, which is made if it is missing.

        Raises:
            OSError: the medium refused, or the file does not end at ``end``.
        """
        with self._lock:
            handle = self._used(owner, slot, folder)
            if handle.end != end:
                # Mirrors have other frames at the offsets that would come now.
                path = layout.slot_path(folder, slot)
                cause = f"it ends at {handle.end} and was written up to {end}: deleted or cut?"
                raise OSError(errno.ESTALE, cause, str(path))
            handle.file.write_at((buffer,), end)
            handle.end = end + len(buffer)

    def write(self, owner: int, slot: int, folder: Path, buffer: Buffer, offset: int) -> int:
        """Writes at a place of a slot file, which is made if it is missing.

        If that fails, the file is not longer than before, as far as the medium allows.

        Returns:
            The file's length before.
        """
        with self._lock:
            handle = self._used(owner, slot, folder)
            end = handle.end
            try:
                handle.file.write_at((buffer,), offset)
            except OSError:
                with suppress(OSError):
                    handle.file.truncate(end)
                raise
            handle.end = max(end, offset + len(buffer))
            return end

    def length(self, owner: int, slot: int, folder: Path) -> int:
        """The length of a slot file; 0 when it is not there."""
        path = layout.slot_path(folder, slot)
        with self._lock:
            if (owner, slot) not in self._handles and not self.disk.exists(path):
                return 0
            return self._used(owner, slot, folder).end

    def close(self, owner: int) -> None:
        """Closes all handles of one owner."""
        self.close_below(owner, NO_SLOT)

    def close_below(self, owner: int, floor: int) -> None:
        """Closes the handles of one owner's slots below ``floor``."""
        with self._lock:
            keys = [key for key in self._handles if key[0] == owner and key[1] < floor]
            for key in keys:
                self._handles.pop(key).file.close()

    def close_slots(self, owner: int, slots: Collection[int]) -> None:
        """Closes the handles of some of one owner's slots."""
        with self._lock:
            for slot in slots:
                handle = self._handles.pop((owner, slot), None)
                if handle is not None:
                    handle.file.close()

    def _used(self, owner: int, slot: int, folder: Path) -> _Handle:
        """A handle, now the one last used."""
        key = (owner, slot)
        handle = self._handles.pop(key, None)
        if handle is None:
            handle = self._open(layout.slot_path(folder, slot))
        self._handles[key] = handle
        return handle

    def _open(self, path: Path) -> _Handle:
        while len(self._handles) >= self.capacity:
            self._handles.pop(self._least_needed()).file.close()
        file = self.disk.open(path, create=True)
        return _Handle(file, file.size())

    def _least_needed(self) -> tuple[int, int]:
        """The handle longest not used of those not near the pointer, if one is soon found."""
        oldest = None
        for spared, key in enumerate(self._handles):
            oldest = oldest or key
            ahead_seconds = key[1] - self.pointer_slot
            if not 0 <= ahead_seconds <= _NEAR_SECONDS:
                return key
            if spared == _SPARED_AT_MOST:
                break
        assert oldest is not None
        return oldest


@dataclass(slots=True)
class Unsynced:
    """What was written since the last ``SlotFiles.take_unsynced``."""

    slots: set[int] = field(default_factory=set)
    new_hours: set[int] = field(default_factory=set)  # hours in which files were made


class _Ends:
    """Where each slot's file must end, as it was written: 8 bytes a second, hour by hour."""

    def __init__(self) -> None:
        self._hours: dict[int, array[int]] = {}

    def __getitem__(self, slot: int) -> int:
        hour, second = divmod(slot, layout.SECONDS_PER_HOUR)
        ends = self._hours.get(hour)
        return 0 if ends is None else ends[second]

    def __setitem__(self, slot: int, end: int) -> None:
        hour, second = divmod(slot, layout.SECONDS_PER_HOUR)
        if hour not in self._hours:
            self._hours[hour] = array("q", bytes(8 * layout.SECONDS_PER_HOUR))
        self._hours[hour][second] = end

    def forget_below(self, floor: int) -> None:
        for hour in [hour for hour in self._hours if hour < floor // layout.SECONDS_PER_HOUR]:
            del self._hours[hour]


class SlotFiles:
    """The slot files of one wheel, for its writer.

    ``append`` is for one thread; the others may run beside it on another.
    """

    def __init__(
        self,
        folder: Path,
        handles: HandleCache,
        *,
        limit_bytes: int = SLOT_FILE_LIMIT_BYTES,
        keeps_open: bool = False,
    ) -> None:
        """Opens nothing yet.

        Args:
            folder: of the wheel.
            handles: the node's cache of open slot files.
            limit_bytes: no slot file becomes longer.
            keeps_open: the file of announcements stays open: for a wheel written all the time.
        """
        self._folder = folder
        self._keeps_open = keeps_open
        self._announced: File | None = None
        self._handles = handles
        self._owner = handles.new_owner()
        self._limit_bytes = limit_bytes
        # Of what was appended; a wheel that is appended to began with no slot at all.
        self._ends = _Ends()
        self._unsynced = Unsynced()
        self._lock = threading.Lock()

    def refuse_full(self, frames: Sequence[EncodedFrame]) -> None:
        """Looks before anything is written whether all frames fit.

        Raises:
            SlotFull: a slot file would grow beyond what an index row can say.
        """
        lengths: dict[int, int] = {}
        for frame in frames:
            length = lengths.get(frame.slot) or self._ends[frame.slot]
            lengths[frame.slot] = length + len(frame.buffer)
            if lengths[frame.slot] > self._limit_bytes:
                raise SlotFull(frame.slot)

    def announce(self, slots: Sequence[int]) -> None:
        """Says which files the next frames go to, before any of them is written.

        Should the process die before their rows, recovery need not look at all the others. Nothing
        is synced: after a crash of the machine it does look at all of them.

        Raises:
            OSError: the medium refused.
        """
        if self._announced is None:
            path = layout.writing_path(self._folder)
            self._announced = self._handles.disk.open(path, create=True)
        self._announced.write_at((array("I", (len(slots), *slots)).tobytes(),), 0)
        if not self._keeps_open:
            self._close_announced()

    def append(self, slot: int, buffer: Buffer) -> int:
        """Writes one frame behind the others of its slot; returns its offset.

        Raises:
            OSError: the medium refused, or somebody deleted or cut the file.
        """
        offset = self._ends[slot]
        self._handles.append(self._owner, slot, self._folder, buffer, offset)
        with self._lock:  # after the write: a sync in between must not take it as done
            self._ends[slot] = offset + len(buffer)
            self._unsynced.slots.add(slot)
            if offset == 0:
                self._unsynced.new_hours.add(slot // layout.SECONDS_PER_HOUR)
        return offset

    def write(self, slot: int, buffer: Buffer, offset: int) -> None:
        """Writes one frame at its place, wherever the others of its slot end."""
        end = self._handles.write(self._owner, slot, self._folder, buffer, offset)
        self.mark_unsynced([slot], new=end == 0)

    def reopen(self, slots: Collection[int]) -> None:
        """Has the next write of these slots go to the files that have their names by then.

        Somebody may have deleted a file that is open here: nobody else can read what goes there.
        """
        self._handles.close_slots(self._owner, slots)

    def length(self, slot: int) -> int:
        """The length of a slot's file; 0 when it is not there."""
        return self._handles.length(self._owner, slot, self._folder)

    def mark_unsynced(self, slots: Collection[int], *, new: bool) -> None:
        """These slots, if ``new`` with their names, may not be on the medium yet."""
        with self._lock:
            self._unsynced.slots.update(slots)
            if new:
                self._unsynced.new_hours.update(slot // layout.SECONDS_PER_HOUR for slot in slots)

    def put_back(self, unsynced: Unsynced) -> None:
        """A ``sync`` failed: it is to be done again."""
        with self._lock:
            self._unsynced.slots |= unsynced.slots
            self._unsynced.new_hours |= unsynced.new_hours

    def take_unsynced(self) -> Unsynced:
        """What ``sync`` must make durable; from now on a new record is kept."""
        with self._lock:
            taken, self._unsynced = self._unsynced, Unsynced()
        return taken

    def sync(self, unsynced: Unsynced) -> None:
        """Puts slot files and their names on the medium.

        It opens the files itself: the cache may have closed them, and must not be held up.
        """
        disk = self._handles.disk
        for slot in sorted(unsynced.slots):
            try:
                file = disk.open(layout.slot_path(self._folder, slot))
            except FileNotFoundError:
                continue  # deleted meanwhile: below the floor
            try:
                file.sync_data()
            finally:
                file.close()
        folder = layout.slots_folder(self._folder)
        for hour in sorted(unsynced.new_hours):
            with suppress(FileNotFoundError):  # deleted meanwhile: below the floor
                disk.sync_folder(folder / layout.hour_name(hour))
        if unsynced.new_hours:
            disk.sync_folder(folder)

    def forget_below(self, floor: int) -> None:
        """Closes what may be open of slots that are deleted."""
        self._handles.close_below(self._owner, floor)
        with self._lock:
            self._ends.forget_below(floor)

    def close(self) -> None:
        """Closes what is open of this wheel."""
        self._handles.close(self._owner)
        self._close_announced()

    def _close_announced(self) -> None:
        if self._announced is not None:
            self._announced.close()
            self._announced = None


def list_slots(
    disk: Disk, folder: Path, from_slot: int = 0, to_slot: int | None = None
) -> Iterator[int]:
    """The slots that have a file, ascending, ``from_slot`` <= slot < ``to_slot``."""
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
    """Hour by hour: the slots that have a file, and its length."""
    slots = layout.slots_folder(folder)
    for name in disk.list_folder(slots):
        hour = layout.hour_of_name(name)
        if hour is not None:
            sizes = disk.list_sizes(slots / name)
            named = ((layout.slot_of_name(file), size) for file, size in sizes)
            yield hour, [(slot, size) for slot, size in named if slot is not None]


def announced_slots(disk: Disk, folder: Path) -> list[int]:
    """The slots to which the last group went, and perhaps others; none if nobody said so."""
    try:
        content = disk.read_file(layout.writing_path(folder))
    except OSError:
        return []
    numbers = np.frombuffer(content, _ANNOUNCED, len(content) // _ANNOUNCED.itemsize).tolist()
    return sorted(set(numbers[1 : numbers[0] + 1])) if numbers else []


def forget_announced(disk: Disk, folder: Path) -> None:
    """No group is being written."""
    disk.delete(layout.writing_path(folder))


def delete_slots_below(disk: Disk, folder: Path, floor: int) -> Iterator[int]:
    """Deletes the files of slots below ``floor``, and folders of hours that have none left.

    One by one, as the iterator is gone through: deleting a day's may take a disk many seconds.
    """
    slots = layout.slots_folder(folder)
    for name in disk.list_folder(slots):
        hour = layout.hour_of_name(name)
        if hour is None:
            continue
        if hour * layout.SECONDS_PER_HOUR >= floor:
            break
        for slot in list_slots(disk, folder, hour * layout.SECONDS_PER_HOUR, floor):
            if slot // layout.SECONDS_PER_HOUR != hour:
                break
            disk.delete(slots / name / f"{slot}.slot")
            yield slot
        if (hour + 1) * layout.SECONDS_PER_HOUR <= floor:
            disk.delete_folder(slots / name)
