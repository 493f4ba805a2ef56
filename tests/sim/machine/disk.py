"""A disk in memory that loses, tears and fails writes on demand.

What it can do to its user:

* end the process before any chosen effect (``crash_at_effect``), or in the middle of a write;
* crash the machine: of each file, every write since its last sync is kept, lost or torn, and
  names of files and folders made or deleted since the last sync of their folder are there or not;
* fail an operation (``faults``) or run full (``capacity_bytes``), after writing a part. What a
  failed sync was about is dropped, as Linux does: it can still be read, later syncs succeed, and
  the medium never gets it, unless it is written again.
* have bad sectors (``spoil``): reading anything of their pages, as Linux does it, fails until they
  are written again, or, if they are worn, for ever, and so does writing;
* return no content for a while (``failing_reads``), or sync no names (``failing_folder_syncs``):
  files are made, replaced and deleted, and a crash of the machine may undo it;
* lose synced content: a part becomes zeros (``zero_somewhere``), or a file vanishes
  (``drop_somewhere``).

An effect is anything that changes what another process could see. After a crash nothing works
until ``restart``; what was opened before stays dead.

Inside, paths are text: a ``Path`` takes long to hash, to compare and to split.
"""

import errno
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel.storage.folder.disk import Buffer, FolderInUseError

SECTOR_LENGTH_BYTES = 512
_PAGE_LENGTH_BYTES = 4096


class Crash(BaseException):
    """The process ended here. Not an ``Exception``: no handler may catch it by accident."""


@dataclass
class Fault:
    """Makes one operation fail: the ``countdown``-th that matches, counted from 0."""

    operation: str  # write, sync, read, open, delete
    error: int = errno.EIO
    path_part: str = ""
    countdown: int = 0
    written_bytes: int = 0  # of a write, before it fails

    def is_due(self, operation: str, path: Path) -> bool:
        if operation != self.operation or self.path_part not in str(path):
            return False
        self.countdown -= 1
        return self.countdown < 0


@dataclass
class _Content:
    """A file: what processes read, what the medium holds, and the writes in between."""

    now: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    unsynced: list[Callable[[bytearray, Random], None]] = field(default_factory=list)
    # (begin, end) of writes since the last sync, and of writes that a failed sync dropped.
    dirty: list[tuple[int, int]] = field(default_factory=list)
    dropped: list[tuple[int, int]] = field(default_factory=list)

    def write(self, data: bytes, offset: int) -> None:
        self.holes += max(0, offset - len(self.now))
        _write_into(self.now, data, offset)
        self.unsynced.append(_lossy_write(data, offset))
        end = offset + len(data)
        self.dirty.append((offset, end))
        self.dropped = [part for each in self.dropped for part in _without(each, offset, end)]

    def truncate(self, length: int) -> None:
        del self.now[length:]
        self.unsynced.append(_lossy_truncate(length))
        self.dropped = [(begin, min(end, length)) for begin, end in self.dropped if begin < length]

    bad_pages: set[int] = field(default_factory=set)
    worn_pages: set[int] = field(default_factory=set)  # bad ones that take no writes either
    holes: int = 0  # bytes that were never written, and take no space

    @property
    def used_bytes(self) -> int:
        return max(0, len(self.now) - self.holes)

    def is_bad(self, offset: int, length: int) -> bool:
        return bool(_touched(self.bad_pages, offset, min(offset + length, len(self.now))))

    def refuses(self, offset: int, length: int) -> bool:
        """Whether a write is refused: a page is read before a part of it is written."""
        end = offset + length
        for page in _touched(self.bad_pages | self.worn_pages, offset, end):
            page_end = min((page + 1) * _PAGE_LENGTH_BYTES, len(self.now))
            is_whole = offset <= page * _PAGE_LENGTH_BYTES and page_end <= end
            if page in self.worn_pages or not is_whole:
                return True
        return False

    def mend(self, offset: int, length: int) -> None:
        self.bad_pages -= _touched(self.bad_pages - self.worn_pages, offset, offset + length)

    def synced(self) -> None:
        durable = bytearray(self.now)
        for begin, end in self.dropped:
            old = self.durable[begin:end]
            durable[begin:end] = old + bytes(end - begin - len(old))
        self.durable = bytes(durable)
        self.unsynced.clear()
        self.dirty.clear()

    def sync_failed(self) -> None:
        self.dropped += self.dirty
        self.unsynced.clear()
        self.dirty.clear()

    def after_machine_crash(self, chance: Random) -> "_Content":
        survived = bytearray(self.durable)
        for change in self.unsynced:
            change(survived, chance)
        return _Content(
            survived,
            bytes(survived),
            bad_pages=self.bad_pages,
            worn_pages=self.worn_pages,
        )


def _touched(pages: set[int], begin: int, end: int) -> set[int]:
    """Returns which of these pages hold any of these bytes."""
    first = begin // _PAGE_LENGTH_BYTES
    return {each for each in pages if first <= each and each * _PAGE_LENGTH_BYTES < end}


def _without(part: tuple[int, int], begin: int, end: int) -> list[tuple[int, int]]:
    """Returns what is left of a part of a file when another is taken out of it."""
    left = [(part[0], min(part[1], begin)), (max(part[0], end), part[1])]
    return [(low, high) for low, high in left if low < high]


def _write_into(content: bytearray, data: bytes, offset: int) -> None:
    if len(content) < offset + len(data):
        content.extend(bytes(offset + len(data) - len(content)))
    content[offset : offset + len(data)] = data


def _lossy_write(data: bytes, offset: int) -> Callable[[bytearray, Random], None]:
    def apply(content: bytearray, chance: Random) -> None:
        fate = chance.choice(["kept", "kept", "lost", "torn", "zeros"])
        if fate == "kept":
            _write_into(content, data, offset)
        elif fate == "zeros":  # the length reached the medium, the content did not
            _write_into(content, bytes(len(data)), offset)
        elif fate == "torn":
            for begin in range(0, len(data), SECTOR_LENGTH_BYTES):
                if chance.random() < 0.5:
                    sector = data[begin : begin + SECTOR_LENGTH_BYTES]
                    _write_into(content, sector, offset + begin)

    return apply


def _lossy_truncate(length: int) -> Callable[[bytearray, Random], None]:
    def apply(content: bytearray, chance: Random) -> None:
        if chance.random() < 0.5:
            del content[length:]

    return apply


class SimulatedDisk:
    """``Disk`` in memory. Paths are absolute; every folder must be made first."""

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.faults: list[Fault] = []
        self.effects = 0
        self.crash_at_effect: int | None = None
        # Files that cannot be deleted: the medium's error.
        self.undeletable: set[str] = set()
        # Reading files whose path has this part fails with this error: (part, error).
        self.failing_reads: tuple[str, int] | None = None
        # Syncing folders whose path has this part fails with this error: (part, error).
        self.failing_folder_syncs: tuple[str, int] | None = None
        # Called for every file before it is deleted.
        self.on_delete: Callable[[Path], None] | None = None
        # Called for every file before its content is synced.
        self.on_sync: Callable[[Path], None] | None = None
        # How long each operation of a kind takes, and which task waits for it.
        self.delays_us: dict[str, int] = {}
        self.wait: Callable[[int], None] = lambda _us: None
        # How many files each process has open, and which of them works now.
        self.open_files: Counter[str] = Counter()
        self.user: Callable[[], str] = lambda: ""
        # At the write where it crashes, this share of the bytes is written first.
        self.torn_share = 0.0
        self._era = 0
        self._crashed = False
        self._files: dict[str, _Content] = {}
        self._folders: set[str] = {"/"}
        self._names: dict[str, set[str]] = {"/": set()}  # of all that lies in each folder
        self._arrays: dict[str, bytearray] = {}
        self._locked: set[Path] = set()
        # Files without a name; processes that have them open can still write.
        self._unlinked: dict[str, _Content] = {}
        # Names that a crash of the machine may undo: path -> what was there before.
        self._unsynced_names: dict[str, _Content | None] = {}
        # Folders that a crash of the machine may take away, with all that is in them.
        self._unsynced_folders: set[str] = set()

    # --- what tests do

    def crash_after(self, effects: int, *, torn_share: float = 0.0) -> None:
        """Ends the process at the effect after this many more."""
        self.crash_at_effect = self.effects + effects
        self.torn_share = torn_share

    def restart(self, machine_crash: Random | None = None) -> None:
        """Starts a new process, or reboots the machine, with this source of chance."""
        self._era += 1
        self.open_files.clear()
        self._crashed = False
        self.crash_at_effect = None
        self._locked.clear()
        if machine_crash is not None:
            self._lose_unsynced(machine_crash)

    def lose_unsynced(self) -> None:
        """Loses every write, and every name, that was not synced."""
        for name, before in self._unsynced_names.items():
            if before is None:
                self._files.pop(name, None)
            else:
                self._files[name] = before
        self._unsynced_names.clear()
        self._lose_folders(self._unsynced_folders)
        self._unsynced_folders.clear()
        for content in self._files.values():
            content.now = bytearray(content.durable)
            content.unsynced.clear()
            content.dirty.clear()
        self._list_anew()

    def flip_bit(self, path: Path, bit: int) -> None:
        """Damages the medium itself."""
        content = self._files[str(path)]
        content.now[bit // 8] ^= 1 << bit % 8
        content.synced()

    def flip_somewhere(self, kind: str, chance: Random) -> Path | None:
        """Flips a bit in a file of a kind: slot or index; returns which, if there is one."""
        paths = [path for path in self.paths() if self._is_of(kind, path)]
        if not paths:
            return None
        path = chance.choice(paths)
        self.flip_bit(path, chance.randrange(8 * len(self._files[str(path)].now)))
        return path

    def zero_somewhere(self, kind: str, chance: Random) -> Path | None:
        """Turns some sectors of a file of a kind into zeros, on the medium; returns which file."""
        paths = [path for path in self.paths() if self._is_of(kind, path)]
        if not paths:
            return None
        path = chance.choice(paths)
        content = self._files[str(path)]
        begin = chance.randrange(len(content.now)) // SECTOR_LENGTH_BYTES * SECTOR_LENGTH_BYTES
        end = min(begin + chance.choice((1, 2, 8)) * SECTOR_LENGTH_BYTES, len(content.now))
        content.now[begin:end] = bytes(end - begin)
        content.synced()
        return path

    def drop_somewhere(self, kind: str, chance: Random) -> Path | None:
        """Makes a file of a kind vanish, as a repaired file system may; returns which."""
        paths = [path for path in self.paths() if self._is_of(kind, path)]
        if not paths:
            return None
        path = chance.choice(paths)
        del self._files[str(path)]
        self._unsynced_names.pop(str(path), None)
        self._list_anew()
        return path

    def spoil(self, path: Path, begin: int, end: int, *, wears: bool = False) -> None:
        """Makes the pages bad that hold these bytes, or worn."""
        pages = range(begin // _PAGE_LENGTH_BYTES, -(-end // _PAGE_LENGTH_BYTES))
        self._files[str(path)].bad_pages.update(pages)
        if wears:
            self._files[str(path)].worn_pages.update(pages)

    def spoil_somewhere(
        self, kind: str, chance: Random, *, wears: bool = False, page: int | None = None
    ) -> Path | None:
        """Makes a page bad in a file of a kind: slot or index; returns which file, if any.

        Args:
            kind: The kind.
            chance: Chooses the file, and the page.
            wears: It takes no writes either, for ever.
            page: The page; None: it is chosen.
        """
        paths = [path for path in self.paths() if self._is_of(kind, path)]
        if not paths:
            return None
        path = chance.choice(paths)
        begin = chance.randrange(len(self._files[str(path)].now))
        if page is not None:
            begin = page * _PAGE_LENGTH_BYTES
        self.spoil(path, begin, begin + 1, wears=wears)
        return path

    def _is_of(self, kind: str, path: Path) -> bool:
        is_kind = path.suffix == ".slot" if kind == "slot" else kind in path.name
        return is_kind and bool(self._files[str(path)].now)

    def keep_somewhere(self, chance: Random) -> Path | None:
        """Makes some slot file undeletable; returns which, if there was one."""
        paths = [path for path in self.paths() if path.suffix == ".slot"]
        if not paths:
            return None
        path = chance.choice(paths)
        self.undeletable.add(str(path))
        return path

    def unlink_somewhere(self, chance: Random) -> Path | None:
        """Removes the name of some slot file unnoticed; returns which, if there was one.

        Processes that have it open still read and write it, as on Linux.
        """
        paths = [path for path in self.paths() if path.suffix == ".slot"]
        if not paths:
            return None
        path = chance.choice(paths)
        self._unlinked[str(path)] = self._files.pop(str(path))
        self._unsynced_names.pop(str(path), None)
        self._list_anew()
        return path

    def wipe(self) -> None:
        """Loses all contents; open files are dead."""
        self.restart()
        self._files.clear()
        self._folders = {"/"}
        self._arrays.clear()
        self._unsynced_names.clear()
        self._unsynced_folders.clear()
        self._list_anew()

    def copied(self) -> dict[str, bytes | None]:
        """All that it has, as a backup would; None: a folder."""
        files = {name: bytes(content.now) for name, content in self._files.items()}
        return {**dict.fromkeys(self._folders), **files}

    def put_back(self, copy: dict[str, bytes | None]) -> None:
        """Has nothing but what was copied once; open files are dead."""
        self.wipe()
        for name, content in copy.items():
            if content is None:
                self._folders.add(name)
            else:
                self._files[name] = _Content(now=bytearray(content), durable=content)
        self._list_anew()

    def content(self, path: Path) -> bytes:
        """The content of a file."""
        return bytes(self._files[str(path)].now)

    def peek(self, path: Path) -> bytearray | None:
        """The content of a file, without a copy; None: it is missing."""
        content = self._files.get(str(path))
        return None if content is None else content.now

    def is_readable(self, path: Path, begin: int, end: int) -> bool:
        """Whether the medium can read these bytes of a file, as far as it has them."""
        content = self._files.get(str(path))
        return content is None or not content.is_bad(begin, end - begin)

    def is_durable(self, path: Path, begin: int, end: int) -> bool:
        """Whether a crash of the machine keeps these bytes of a file, and its name."""
        content = self._files.get(str(path))
        names = {str(path), *map(str, path.parents)}
        if content is None or names & (self._unsynced_names.keys() | self._unsynced_folders):
            return False
        return content.durable[begin:end] == content.now[begin:end]

    def peek_unlinked(self, path: Path) -> bytearray | None:
        """As `peek`, for the file that had this name until `unlink_somewhere` took it."""
        content = self._unlinked.get(str(path))
        return None if content is None else content.now

    def set_content(self, path: Path, content: bytes) -> None:
        """Replaces the content of a file, unnoticed."""
        self._files[str(path)] = _Content(now=bytearray(content), durable=content)
        self._list_anew()

    def paths(self) -> list[Path]:
        """All files."""
        return [Path(name) for name in self._sorted_files()]

    def file_names(self) -> list[str]:
        """The names of all files."""
        return [_split(name)[1] for name in self._sorted_files()]

    @property
    def used_bytes(self) -> int:
        return sum(content.used_bytes for content in self._files.values())

    # --- the port

    def open(self, path: Path, *, create: bool = False) -> "SimulatedFile":
        self._check("open", path)
        name = str(path)
        if name not in self._files:
            if not create:
                raise _not_found(path)
            self.make_folder(path.parent)
            self._effect()
            self._put(name, _Content())
        return SimulatedFile(self, path, self._files[name], self._era)

    def open_read(self, path: Path) -> "SimulatedFile":
        self._check("open", path)
        name = str(path)
        if name in self._arrays:
            content = _Content(now=bytearray(self._arrays[name]))
        elif name in self._files:
            content = self._files[name]
        else:
            raise _not_found(path)
        return SimulatedFile(self, path, content, self._era)

    def open_folder(self, path: Path) -> "SimulatedFolder":
        self._check("open", path)
        self.make_folder(path)
        return SimulatedFolder(self, path)

    def map_array(
        self, path: Path, dtype: np.dtype[Any], rows: int, *, writable: bool
    ) -> NDArray[Any]:
        self._check("open", path)
        name, length = str(path), dtype.itemsize * rows
        if writable:
            self._effect()
            if name not in self._arrays:
                self._list_anew()
            self._arrays[name] = bytearray(length)
        elif name not in self._arrays:
            raise _not_found(path)
        array = np.frombuffer(self._arrays[name], dtype=dtype, count=rows)
        array.flags.writeable = writable
        return array

    def read_file(self, path: Path) -> bytes:
        return bytes(self._existing(path).now)

    def replace_file(self, path: Path, content: bytes, *, beside: Path | None = None) -> None:
        del beside
        self._check("write", path)
        self.make_folder(path.parent)
        self._effect()
        self._check_space(len(content))
        self._put(str(path), _Content(now=bytearray(content), durable=content))
        self._check("sync", path)
        self._sync_names(path.parent)

    def make_folder(self, path: Path) -> None:
        self._alive()
        if str(path) not in self._folders:
            self._effect()
            new = {str(each) for each in (path, *path.parents)} - self._folders
            self._folders |= new
            # The top ones are there before any process: a volume is mounted there.
            self._unsynced_folders |= {name for name in new if _split(name)[0] != "/"}
            self._list_anew()

    def many_files(self, folder: Path) -> "SimulatedManyFiles":
        assert str(folder) in self._folders, f"{folder} is written before it is made"
        return SimulatedManyFiles(self)

    def sync_folder(self, path: Path) -> None:
        self._check("sync", path)
        if str(path) not in self._folders:
            raise _not_found(path)
        self._sync_names(path)

    def list_folder(self, path: Path) -> list[str]:
        self._check("read", path)
        return self.list_quietly(path)

    def list_sizes(self, path: Path) -> list[tuple[str, int]]:
        files = ((name, self._files.get(f"{path}/{name}")) for name in self.list_folder(path))
        return [(name, len(content.now)) for name, content in files if content is not None]

    def list_quietly(self, path: Path) -> list[str]:
        """As `list_folder`, for tests: never fails."""
        return sorted(self._names.get(str(path), ()))

    def exists(self, path: Path) -> bool:
        self._alive()
        name = str(path)
        return name in self._files or name in self._folders or name in self._arrays

    def delete(self, path: Path) -> None:
        self._check("delete", path)
        name = str(path)
        if name in self.undeletable and name in self._files:
            raise OSError(errno.EUCLEAN, os.strerror(errno.EUCLEAN), name)
        if name in self._files:
            if self.on_delete is not None:
                self.on_delete(path)
            self._effect()
            self._name_changes(name)
            del self._files[name]
            folder, last = _split(name)
            self._names[folder].discard(last)

    def delete_folder(self, path: Path) -> None:
        inside = f"{path}/"
        for each in [each for each in self._files if each.startswith(inside)]:
            self.delete(Path(each))
        self._alive()
        self._effect()
        self._lose_folders({str(path)})
        self._list_anew()

    def free_bytes(self, path: Path) -> int:
        del path
        return 1 << 40 if self.capacity_bytes is None else self.capacity_bytes - self.used_bytes

    def free_inodes(self, path: Path) -> int | None:
        del path
        return None

    def lock(self, path: Path) -> "SimulatedLock":
        self._alive()
        if path in self._locked:
            raise FolderInUseError(str(path))
        self._locked.add(path)
        return SimulatedLock(self._locked, path)

    # --- inside

    def _alive(self, era: int | None = None) -> None:
        if self._crashed or era not in {None, self._era}:
            raise Crash

    def _check(self, operation: str, path: Path) -> None:
        self._alive()
        self._fail_if_due(operation, path)

    def _fail_if_due(self, operation: str, path: Path) -> Fault | None:
        if operation in self.delays_us:
            self.wait(self.delays_us[operation])
            self._alive()
        for fault in self.faults:
            if fault.is_due(operation, path):
                self.faults.remove(fault)
                raise _FaultError(fault, path)
        return None

    @staticmethod
    def _fail_for_a_while(path: Path, failing: tuple[str, int] | None) -> None:
        if failing is not None and failing[0] in str(path):
            raise OSError(failing[1], os.strerror(failing[1]), str(path))

    def _check_space(self, more: int) -> None:
        if self.capacity_bytes is not None and self.used_bytes + more > self.capacity_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _effect(self) -> None:
        """Counts an effect, and ends the process before the chosen one."""
        if self.effects == self.crash_at_effect:
            self._crashed = True
            raise Crash
        self.effects += 1

    def _existing(self, path: Path) -> _Content:
        """A file that is read as a whole."""
        self._check("read", path)
        content = self._files.get(str(path))
        if content is None:
            raise _not_found(path)
        if content.bad_pages:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return content

    def _put(self, name: str, content: _Content) -> None:
        """Lets a name stand for this file from now on."""
        self._name_changes(name)
        self._files[name] = content
        folder, last = _split(name)
        self._names[folder].add(last)

    def _sync_names(self, folder: Path) -> None:
        self._fail_for_a_while(folder, self.failing_folder_syncs)
        self._effect()
        self._names_synced(str(folder))

    def _name_changes(self, name: str) -> None:
        self._unsynced_names.setdefault(name, self._files.get(name))

    def _names_synced(self, folder: str) -> None:
        """Makes names in a folder durable, and deleted folders in it."""
        self._unsynced_folders -= {n for n in self._unsynced_folders if _split(n)[0] == folder}
        inside = folder if folder == "/" else f"{folder}/"
        for name in [name for name in self._unsynced_names if name.startswith(inside)]:
            part, _, rest = name[len(inside) :].partition("/")
            if not rest or inside + part not in self._folders:
                del self._unsynced_names[name]

    def _lose_unsynced(self, chance: Random) -> None:
        for name, before in self._unsynced_names.items():
            if chance.random() < 0.5:
                continue
            if before is None:
                self._files.pop(name, None)
            else:
                self._files[name] = before
        self._unsynced_names.clear()
        self._lose_folders(
            {name for name in sorted(self._unsynced_folders) if chance.random() < 0.5}
        )
        self._unsynced_folders.clear()
        for name in self._sorted_files():
            self._folders.update(map(str, Path(name).parents))
            self._files[name] = self._files[name].after_machine_crash(chance)
        self._list_anew()

    def _lose_folders(self, lost: set[str]) -> None:
        """Takes folders away, with all that is in them."""
        if lost:
            for name in [name for name in self._files if _lies(name, lost)]:
                del self._files[name]
            self._folders = {name for name in self._folders if not _lies(name, lost)}
        self._unsynced_folders &= self._folders

    def _list_anew(self) -> None:
        self._names = {folder: set() for folder in self._folders}
        for name in (*self._files, *self._folders, *self._arrays):
            folder, last = _split(name)
            if last:
                self._names.setdefault(folder, set()).add(last)

    def _sorted_files(self) -> list[str]:
        """Paths in order, compared part by part."""
        return sorted(self._files, key=_parts)


class _FaultError(OSError):
    def __init__(self, fault: Fault, path: Path) -> None:
        super().__init__(fault.error, os.strerror(fault.error), str(path))
        self.fault = fault


class SimulatedFile:
    """``File`` in memory."""

    def __init__(self, disk: SimulatedDisk, path: Path, content: _Content, era: int) -> None:
        self._disk = disk
        self._path = path
        self._content = content
        self._era = era
        self._closed = False
        self._user = disk.user()
        disk.open_files[self._user] += 1

    def write_at(self, buffers: Sequence[Buffer], offset: int) -> None:
        self._usable()
        data = b"".join(buffers)
        try:
            self._disk._fail_if_due("write", self._path)
        except _FaultError as failure:
            self._write(data[: failure.fault.written_bytes], offset)
            raise
        if self._content.refuses(offset, len(data)):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self._path))
        try:
            self._disk._effect()
        except Crash:
            self._write(data[: int(len(data) * self._disk.torn_share)], offset)
            raise
        growth = max(0, offset + len(data) - max(offset, len(self._content.now)))
        try:
            self._disk._check_space(growth)
        except OSError:
            capacity = self._disk.capacity_bytes or 0
            self._write(data[: max(0, capacity - self._disk.used_bytes)], offset)
            raise
        self._write(data, offset)

    def _write(self, data: bytes, offset: int) -> None:
        if data:
            self._content.mend(offset, len(data))
            self._content.write(data, offset)

    def read_at(self, length: int, offset: int) -> bytes:
        self._usable()
        self._disk._fail_if_due("read", self._path)
        self._disk._fail_for_a_while(self._path, self._disk.failing_reads)
        if self._content.bad_pages and self._content.is_bad(offset, length):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self._path))
        return bytes(self._content.now[offset : offset + length])

    def size(self) -> int:
        self._usable()
        return len(self._content.now)

    def is_replaced(self) -> bool:
        self._usable()
        return self._disk._files.get(str(self._path)) is not self._content

    def truncate(self, length: int) -> None:
        self._usable()
        self._disk._effect()
        assert length <= len(self._content.now), "nothing is ever made longer by truncate"
        self._content.truncate(length)

    def sync_data(self) -> None:
        self._usable()
        if self._disk.on_sync is not None:
            self._disk.on_sync(self._path)
        try:
            self._disk._fail_if_due("sync", self._path)
        except OSError:
            self._content.sync_failed()
            raise
        self._disk._effect()
        self._content.synced()

    def close(self) -> None:
        if not self._closed and self._era == self._disk._era:
            self._disk.open_files[self._user] -= 1
        self._closed = True

    def _usable(self) -> None:
        assert not self._closed, f"{self._path} is used after close"
        self._disk._alive(self._era)


class SimulatedManyFiles:
    """Syncs one file after another; a failure leaves the rest unsynced."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk

    def sync(self, paths: Collection[Path], *, were_closed: bool = False) -> None:
        del were_closed  # nothing is forgotten here
        for path in paths:
            try:
                file = self._disk.open(path)
            except FileNotFoundError:
                continue
            try:
                file.sync_data()
            finally:
                file.close()


class SimulatedFolder:
    """``Folder`` in memory: its name, even if the folder was replaced since it was opened."""

    def __init__(self, disk: SimulatedDisk, path: Path) -> None:
        self._disk = disk
        self._path = path

    def open(self, name: str) -> SimulatedFile:
        if str(self._path) not in self._disk._folders:
            self._disk._alive()
            raise _not_found(self._path)
        return self._disk.open(self._path / name, create=True)

    def close(self) -> None:
        pass


class SimulatedLock:
    """``Lock`` in memory."""

    def __init__(self, locked: set[Path], path: Path) -> None:
        self._locked = locked
        self._path = path

    def close(self) -> None:
        self._locked.discard(self._path)


def _split(name: str) -> tuple[str, str]:
    """The folder of a path, and its last part."""
    folder, _, last = name.rpartition("/")
    return folder or "/", last


def _lies(name: str, folders: set[str]) -> bool:
    """Whether a path is one of these folders, or in one of them."""
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)


def _parts(name: str) -> list[str]:
    return name.split("/")


def _not_found(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
