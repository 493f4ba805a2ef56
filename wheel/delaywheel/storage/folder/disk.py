"""The disk as a small port, and its implementation on POSIX systems.

All files of a data folder are reached through ``Disk``, so that a simulated one can lose
unsynced writes, tear them, or fail. What the port promises:

* a completed write is seen by every later read and map, of every process;
* it survives the process; a crash of the machine only after ``sync_data``, and its name only
  after ``sync_folder``;
* ``replace_file`` is all or nothing and durable when it returns. If it fails, either file may have
  the name, and the new one perhaps for now only: so whoever remembers what the file holds writes
  it again, even if that is what was there before.
"""

import errno
import fcntl
import mmap
import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from delaywheel.storage.folder.syncing import (
    FileSystem,
    ManyFiles,
    PosixManyFiles,
    keeps_its_word,
    syncfs,
)

Buffer: TypeAlias = bytes | bytearray | memoryview

MEDIUM_ERRORS: Final = frozenset(
    {
        errno.EIO,
        errno.EUCLEAN,  # EFSCORRUPTED: the file system's own structures are damaged
        errno.EBADMSG,  # EFSBADCRC: a checksum of the file system is wrong
        errno.ENODATA,  # a sector that the medium cannot read
        errno.EILSEQ,  # a block's protection data are wrong
        errno.EREMOTEIO,  # the target of a network disk failed
        errno.ETIMEDOUT,  # the device did not answer
        errno.ENXIO,  # the device is gone
    }
)
"""Errors of the medium, or of the file system on it.

Such an error concerns the bytes that were asked for: they are damaged, or cannot be read for now,
while others can be read. Any other error, such as a lack of descriptors, memory or rights, says
nothing about these bytes, and is raised.
"""

_BUFFERS_PER_CALL = os.sysconf("SC_IOV_MAX")


def is_medium_error(error: BaseException) -> bool:
    """Whether an error came from the medium or the file system on it."""
    return isinstance(error, OSError) and error.errno in MEDIUM_ERRORS


class FolderInUseError(Exception):
    """Another process holds the lock."""


class File(Protocol):
    """An open file."""

    def write_at(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Writes all ``buffers`` consecutively, starting at ``offset``."""

    def read_at(self, length: int, offset: int) -> bytes:
        """Reads up to ``length`` bytes; fewer only at the end of the file."""

    def size(self) -> int:
        """The length in bytes."""

    def is_replaced(self) -> bool:
        """Whether it has no name any more: it was deleted, or another file has its name."""

    def truncate(self, length: int) -> None:
        """Cuts the file."""

    def sync_data(self) -> None:
        """Returns when content and length are on the medium."""

    def close(self) -> None:
        """Closes the file."""


class Folder(Protocol):
    """An open folder, whose files are opened without resolving its path again."""

    def open(self, name: str) -> File:
        """Opens a file for reading and writing; creates it if missing.

        Raises FileNotFoundError if the folder was deleted.
        """

    def close(self) -> None:
        """Closes the folder, but not files opened by it."""


class Lock(Protocol):
    """A held lock."""

    def close(self) -> None:
        """Releases the lock."""


class Disk(Protocol):
    """Files and folders."""

    def open(self, path: Path, *, create: bool = False) -> File:
        """Opens for reading and writing; ``create`` creates missing files and folders.

        Raises FileNotFoundError without it.
        """

    def open_read(self, path: Path) -> File:
        """Opens for reading, or raises FileNotFoundError."""

    def open_folder(self, path: Path) -> Folder:
        """Opens a folder; creates it and its parents if missing."""

    def map_array(
        self, path: Path, dtype: np.dtype[Any], rows: int, *, writable: bool
    ) -> NDArray[Any]:
        """Maps an array in memory that other processes can see, for data that can be rebuilt.

        Never a file on the medium: an unreadable sector under a map ends the process, and a medium
        that hangs under one stops all its threads.

        Writable: it is created, all zeros, and replaces what has this name. Otherwise it must
        exist, made by a living process, with at least this size.
        """

    def read_file(self, path: Path) -> bytes:
        """Reads a whole small file."""

    def replace_file(self, path: Path, content: bytes, *, beside: Path | None = None) -> None:
        """Replaces a whole small file durably, or leaves the old one.

        It is written `beside` before it takes its place, and the death of the process may leave it
        there; None: beside the file, until it is replaced once more.
        """

    def make_folder(self, path: Path) -> None:
        """Makes a folder and its parents, if missing."""

    def many_files(self, folder: Path) -> ManyFiles:
        """Returns what syncs many files below an existing folder, for one writer."""

    def sync_folder(self, path: Path) -> None:
        """Returns when the names created in this folder are on the medium."""

    def list_folder(self, path: Path) -> list[str]:
        """Returns sorted names; empty if there is no such folder."""

    def list_sizes(self, path: Path) -> list[tuple[str, int]]:
        """Returns the sorted names and lengths of a folder's files; empty if there is none."""

    def exists(self, path: Path) -> bool:
        """Whether a file or folder of this name exists, readable or not."""

    def delete(self, path: Path) -> None:
        """Deletes a file if it exists."""

    def delete_folder(self, path: Path) -> None:
        """Deletes a folder with everything in it, if it exists."""

    def free_bytes(self, path: Path) -> int:
        """Returns the space left for this process on the file system of ``path``."""

    def free_inodes(self, path: Path) -> int | None:
        """Returns how many files can still be created; None if there is no such limit."""

    def lock(self, path: Path) -> Lock:
        """Takes the lock file until released or this process ends, or raises FolderInUseError."""


class _Descriptor:
    """An open descriptor; closing it twice is harmless."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class PosixFile(_Descriptor):
    """A file descriptor."""

    __slots__ = ()

    def write_at(self, buffers: Sequence[Buffer], offset: int) -> None:
        """See ``File``; short writes are continued, and Python repeats interrupted ones."""
        if len(buffers) == 1:
            only = buffers[0]
            written = os.pwrite(self._descriptor, only, offset)
            if written == len(only):
                return
            buffers = [memoryview(only)[written:]]
            offset += written
        self._write_rest([memoryview(buffer) for buffer in buffers if len(buffer)], offset)

    def _write_rest(self, views: list[memoryview], offset: int) -> None:
        first = 0
        while first < len(views):
            written = os.pwritev(self._descriptor, views[first : first + _BUFFERS_PER_CALL], offset)
            if written == 0:
                raise OSError(errno.EIO, "a write of more than nothing wrote nothing")
            offset += written
            while first < len(views) and written >= len(views[first]):
                written -= len(views[first])
                first += 1
            if written:
                views[first] = views[first][written:]

    def read_at(self, length: int, offset: int) -> bytes:
        """See ``File``."""
        parts = []
        while length:
            part = os.pread(self._descriptor, length, offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def size(self) -> int:
        """See ``File``."""
        return os.fstat(self._descriptor).st_size

    def is_replaced(self) -> bool:
        """See ``File``."""
        return os.fstat(self._descriptor).st_nlink == 0

    def truncate(self, length: int) -> None:
        """See ``File``."""
        os.ftruncate(self._descriptor, length)

    def sync_data(self) -> None:
        """See ``File``."""
        os.fdatasync(self._descriptor)


class PosixFolder(_Descriptor):
    """A folder's descriptor."""

    __slots__ = ()

    def open(self, name: str) -> PosixFile:
        """See ``Folder``."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        return PosixFile(os.open(name, flags, 0o644, dir_fd=self._descriptor))


class SharedDescriptor:
    """A descriptor that its last user closes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)


class PosixDisk:
    """``Disk`` on the file system of this machine."""

    def __init__(self) -> None:
        self._shared: list[SharedDescriptor] = []
        self._syncfs = syncfs()
        self._file_systems: dict[int, FileSystem | None] = {}  # by device
        self._lock = threading.Lock()

    def open(self, path: Path, *, create: bool = False) -> PosixFile:
        """See ``Disk``."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        try:
            return PosixFile(os.open(path, flags, 0o644))
        except FileNotFoundError:
            if not create:
                raise
            path.parent.mkdir(parents=True, exist_ok=True)
            return PosixFile(os.open(path, flags, 0o644))

    def open_read(self, path: Path) -> PosixFile:
        """See ``Disk``."""
        return PosixFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def open_folder(self, path: Path) -> PosixFolder:
        """See ``Disk``."""
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            return PosixFolder(os.open(path, flags))
        except FileNotFoundError:
            path.mkdir(parents=True, exist_ok=True)
            return PosixFolder(os.open(path, flags))

    def map_array(
        self, path: Path, dtype: np.dtype[Any], rows: int, *, writable: bool
    ) -> NDArray[Any]:
        """See ``Disk``; the name is a link to the descriptor of this process."""
        length = dtype.itemsize * rows
        if not writable:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                mapped = mmap.mmap(descriptor, length, prot=mmap.PROT_READ)
            finally:
                os.close(descriptor)
            return np.frombuffer(mapped, dtype=dtype, count=rows)
        descriptor = os.memfd_create(path.name)
        try:
            os.ftruncate(descriptor, length)
            mapped = mmap.mmap(descriptor, length)
            self._link(path, Path(f"/proc/{os.getpid()}/fd/{descriptor}"))
        except BaseException:
            os.close(descriptor)
            raise
        # Open for other processes as long as this object lives; for ours as long as the array does.
        self._shared.append(SharedDescriptor(descriptor))
        return np.frombuffer(mapped, dtype=dtype, count=rows)

    def _link(self, path: Path, target: Path) -> None:
        beside = path.with_name(path.name + ".tmp")
        beside.unlink(missing_ok=True)
        beside.symlink_to(target)
        beside.replace(path)

    def read_file(self, path: Path) -> bytes:
        """See ``Disk``."""
        return path.read_bytes()

    def replace_file(self, path: Path, content: bytes, *, beside: Path | None = None) -> None:
        """See ``Disk``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = beside or path.with_name(path.name + ".tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            with closing(PosixFile(descriptor)) as file:
                file.write_at([content], 0)
                os.fsync(descriptor)
            temporary.replace(path)
        except OSError:
            with suppress(OSError):  # on a full disk what is left of it would be in the way
                temporary.unlink()
            raise
        self.sync_folder(path.parent)

    def make_folder(self, path: Path) -> None:
        """See ``Disk``."""
        path.mkdir(parents=True, exist_ok=True)

    def many_files(self, folder: Path) -> ManyFiles:
        """See ``Disk``."""
        device = folder.stat().st_dev
        with self._lock:
            if device not in self._file_systems:
                self._file_systems[device] = self._file_system(folder, device)
            return PosixManyFiles(self._file_systems[device])

    def _file_system(self, folder: Path, device: int) -> FileSystem | None:
        if self._syncfs is None or not keeps_its_word(device):
            return None
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return FileSystem(descriptor, self._syncfs)

    def sync_folder(self, path: Path) -> None:
        """See ``Disk``."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def list_folder(self, path: Path) -> list[str]:
        """See ``Disk``."""
        try:
            return sorted(os.listdir(path))  # noqa: PTH208 - names are all that is needed
        except FileNotFoundError:
            return []

    def list_sizes(self, path: Path) -> list[tuple[str, int]]:
        """See ``Disk``."""
        try:
            with os.scandir(path) as entries:
                return sorted((entry.name, entry.stat().st_size) for entry in entries)
        except FileNotFoundError:
            return []

    def exists(self, path: Path) -> bool:
        """See ``Disk``."""
        # Not Path.exists: since Python 3.14 that takes any error for "no", and a wheel whose
        # meta.json cannot be read would be passed over.
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            if not is_medium_error(error):
                raise
        return True

    def delete(self, path: Path) -> None:
        """See ``Disk``."""
        path.unlink(missing_ok=True)

    def delete_folder(self, path: Path) -> None:
        """See ``Disk``."""
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            return

    def free_bytes(self, path: Path) -> int:
        """See ``Disk``."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def free_inodes(self, path: Path) -> int | None:
        """See ``Disk``."""
        status = os.statvfs(path)
        return status.f_favail if status.f_files else None

    def lock(self, path: Path) -> Lock:
        """See ``Disk``; a flock, which the kernel releases when the process ends for any reason."""
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise FolderInUseError(f"{path} is held by another process") from error
        return _Descriptor(descriptor)
