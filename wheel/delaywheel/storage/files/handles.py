"""Open slot files, and the one loop that writes frames into them.

Handles are opened when needed and kept in one bounded cache for all wheels of the node. Those far
ahead of now are closed first, since slots near it are about to take frames of short delays.
A bundle takes the lock once; a frame whose file is open costs one dict lookup and one write.
"""

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from heapq import nsmallest
from pathlib import Path

from delaywheel.storage.files.index import OpenIndexes
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, File, Folder
from delaywheel.storage.frames.bundle import FrameBundle
from delaywheel.storage.frames.format import NO_SLOT

# Handles of slots up to this many seconds ahead of now are spared when others must be closed: this
# share of all.
_NEAR_SECONDS = 60
_CLOSED_SHARE = 8
# Folders of hours that are kept open: files of one hour come together in a group.
_OPEN_FOLDERS = 24


@dataclass(slots=True)
class _Handle:
    file: File
    end: int  # the file's length: where the next frame goes
    used: int  # when it was last used: the number of a bundle


class Placement(Enum):
    """Where frames may be written."""

    AT_END = "where their files end"
    BEHIND = "there, or behind it"
    ANYWHERE = "anywhere"


@dataclass(slots=True)
class BundleWritten:
    """How much of a bundle was written.

    Attributes:
        frames: How many leading frames are where they should be, or have no bytes.
        slots: The slots of those with bytes.
        new_slots: Slots whose files were empty before.
        misplaced_at: The end of the next frame's file, if it must not be written because of that.
        failure: Why the next frame could not be written.
    """

    frames: int = 0
    slots: list[int] = field(default_factory=list)
    new_slots: list[int] = field(default_factory=list)
    misplaced_at: int | None = None
    failure: OSError | None = None


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
        # The slot of the wall clock, given by the writer with each group.
        self.now_slot = 0
        self._handles: dict[tuple[int, int], _Handle] = {}
        self._folders: dict[tuple[int, int], Folder] = {}  # owner and hour; oldest first
        self._bundles = 0
        self._closed_early: set[int] = set()  # owners of files that were not synced before
        self._lock = threading.Lock()
        self._next_owner = 0

    def __len__(self) -> int:
        return len(self._handles)

    def new_owner(self) -> int:
        """Returns a number that separates one user's slots from those of others."""
        with self._lock:
            self._next_owner += 1
            return self._next_owner

    def write(
        self,
        owner: int,
        folder: Path,
        bundle: FrameBundle,
        *,
        where: Placement,
        is_over: Callable[[], bool] | None = None,
    ) -> BundleWritten:
        """Writes frames where their rows say, until one cannot be written; creates missing files.

        If a write fails, the file is no longer than before, as far as the medium allows. `is_over`
        is called after each frame; if true, no more are written.
        """
        wrote, rows, content = BundleWritten(), bundle.rows, bundle.content
        # Single numpy elements are slow.
        places = zip(rows["slot"].tolist(), rows["offset"].tolist(), strict=True)
        edges = bundle.edges.tolist()
        behind, anywhere = where is Placement.BEHIND, where is Placement.ANYWHERE
        with self._lock:
            self._bundles += 1
            handles, number = self._handles, self._bundles
            for at, (slot, offset) in enumerate(places):
                begin, stop = edges[at], edges[at + 1]
                if begin < stop:
                    try:
                        handle = handles.get((owner, slot)) or self._open(owner, slot, folder)
                    except OSError as error:
                        wrote.failure = error
                        break
                    handle.used = number
                    end = handle.end
                    if offset != end and not (offset > end and behind) and not anywhere:
                        wrote.misplaced_at = end
                        break
                    try:
                        handle.file.write_at((content[begin:stop],), offset)
                    except OSError as error:
                        with suppress(OSError):
                            handle.file.truncate(end)
                        wrote.failure = error
                        break
                    handle.end = max(end, offset + stop - begin)
                    wrote.slots.append(slot)
                    if not end:
                        wrote.new_slots.append(slot)
                wrote.frames += 1
                if is_over is not None and is_over():
                    break
        return wrote

    def note_closed_early(self, owner: int) -> None:
        """Notes that a file of an owner was written and closed, and is not synced yet."""
        with self._lock:
            self._closed_early.add(owner)

    def take_closed_early(self, owner: int) -> bool:
        """Returns whether files of an owner were closed before a sync since the last call."""
        with self._lock:
            was_closed = owner in self._closed_early
            self._closed_early.discard(owner)
            return was_closed

    def close(self, owner: int) -> None:
        """Closes all handles of one owner."""
        self.close_below(owner, NO_SLOT)

    def close_below(self, owner: int, floor: int) -> None:
        """Closes the handles of an owner's slots below ``floor``."""
        with self._lock:
            keys = [key for key in self._handles if key[0] == owner and key[1] < floor]
            for key in keys:
                self._handles.pop(key).file.close()
            hour = -(-floor // layout.SECONDS_PER_HOUR)
            folders = [key for key in self._folders if key[0] == owner and key[1] < hour]
            for key in folders:
                self._folders.pop(key).close()

    def close_slots(self, owner: int, slots: Collection[int]) -> None:
        """Closes the handles of some of an owner's slots, which may not be synced yet."""
        with self._lock:
            for slot in slots:
                handle = self._handles.pop((owner, slot), None)
                if handle is not None:
                    handle.file.close()
                    self._closed_early.add(owner)

    def _open(self, owner: int, slot: int, folder: Path) -> _Handle:
        if len(self._handles) >= self.capacity:
            self._make_room()
        file = self._open_file(owner, slot, folder)
        handle = self._handles[owner, slot] = _Handle(file, file.size(), self._bundles)
        return handle

    def _open_file(self, owner: int, slot: int, folder: Path) -> File:
        name, hour = layout.slot_name(slot), slot // layout.SECONDS_PER_HOUR
        known = self._folders.get((owner, hour))
        if known is not None:
            try:
                return known.open(name)
            except FileNotFoundError:  # deleted: another file may have its name by now
                self._folders.pop((owner, hour)).close()
        while len(self._folders) >= min(_OPEN_FOLDERS, self.capacity):
            self._folders.pop(next(iter(self._folders))).close()
        opened = self.disk.open_folder(layout.hour_folder(folder, hour))
        self._folders[owner, hour] = opened
        return opened.open(name)

    def _make_room(self) -> None:
        """Closes the least recently used handles, sparing those near now if possible.

        Several at once: looking for one takes as long.
        """
        now_slot, handles = self.now_slot, self._handles

        def need(key: tuple[int, int]) -> tuple[bool, int]:
            return 0 <= key[1] - now_slot <= _NEAR_SECONDS, handles[key].used

        for key in nsmallest(max(1, self.capacity // _CLOSED_SHARE), handles, key=need):
            handles.pop(key).file.close()
            self._closed_early.add(key[0])
