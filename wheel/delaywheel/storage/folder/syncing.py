"""Puts many files on the medium at once, by Linux's ``syncfs``.

A group of messages with random dues touches as many slot files as it has messages. Syncing 3,600
files one by one takes 0.2 s of CPU and 8 s; syncing their file system takes 2 ms of CPU and 0.03 s,
if no other process writes much there.

The kernel reports once to each descriptor that something on its file system could not be written,
and not which file. So that no writer misses a failure reported to another one:

* all syncs of one file system go through one descriptor, one after another;
* failures are counted, and each `ManyFiles` remembers the count at the end of its last sync: a
  failure reported to another one counts as its own too.

A failed write is also noted at the file itself, as long as the kernel knows that file: one that
nobody has open may be forgotten, and a descriptor opened later hears of nothing. So files that were
closed between their last write and their sync are synced with the whole file system.

Counting failures errs on the safe side: a failure that concerned only others is reported as well.
Before Linux 5.8 ``syncfs`` reported no failures at all; there, and on anything but ext4 and xfs,
files are synced one by one.
"""

import ctypes
import errno
import os
import platform
import re
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, Protocol

FEW_FILES: Final = 32
"""Up to this many are synced one by one: others may write much more to the same file system."""

_REPORTS_FAILURES_SINCE = 5, 8
_MOUNTS: Final = Path("/proc/self/mountinfo")
_KNOWN = {"ext4", "xfs"}


class ManyFiles(Protocol):
    """The files of one writer. Make it before writing the first of them."""

    def sync(self, paths: Collection[Path], *, were_closed: bool = False) -> None:
        """Returns when contents and lengths of these are on the medium; deleted ones are skipped.

        Args:
            were_closed: Some were closed since they were written: the kernel may have forgotten
                them, with a failure that only their file system still knows.

        Raises:
            OSError: The medium reported an error, now or since the last sync.
        """


def keeps_its_word(device: int) -> bool:
    """Whether syncing this file system as a whole is known to work, and to report failures.

    Layers in between may do neither: FUSE does not forward the request, overlayfs no failure.
    """
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        # Folders' names in it are any bytes, whatever encoding the environment asks for.
        mounts = _MOUNTS.read_bytes().decode("utf-8", "replace").split("\n")
    except OSError:
        return False
    # In a line of it the third word is the device, and the first one after a dash is the type.
    kinds = {line.partition(" - ")[2].split()[0] for line in mounts if line.split()[2:3] == [name]}
    return bool(kinds) and kinds <= _KNOWN


def syncfs() -> Callable[[int], None] | None:
    """Returns the call, which raises OSError for a failure; None if none can be trusted."""
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    if platform.system() != "Linux" or release is None:
        return None
    if (int(release[1]), int(release[2])) < _REPORTS_FAILURES_SINCE:
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if function is None:
        return None

    def call(descriptor: int) -> None:
        if function(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    return call


class FileSystem:
    """One file system that is synced as a whole, and how many syncs failed. For any thread."""

    def __init__(self, descriptor: int, sync: Callable[[int], None]) -> None:
        """Takes over the descriptor of a file or folder on it; `sync` is `syncfs`, or like it."""
        self._descriptor = descriptor
        self._sync = sync
        self.failures = 0
        self._lock = threading.Lock()

    def sync(self) -> tuple[int, OSError | None]:
        """Syncs the file system; returns how many syncs have failed, and this one's error."""
        with self._lock:
            try:
                self._sync(self._descriptor)
            except OSError as error:
                self.failures += 1
                return self.failures, error
            return self.failures, None

    def __del__(self) -> None:
        os.close(self._descriptor)


class PosixManyFiles:
    """See ``ManyFiles``. For one thread at a time."""

    def __init__(self, file_system: FileSystem | None) -> None:
        """Remembers how many syncs have failed so far; None: files are always synced one by one."""
        self._file_system = file_system
        self._known_failures = 0 if file_system is None else file_system.failures

    def sync(self, paths: Collection[Path], *, were_closed: bool = False) -> None:
        """See ``ManyFiles``."""
        if self._file_system is None or (len(paths) <= FEW_FILES and not were_closed):
            for path in paths:
                _sync_file(path)
            return
        known = self._known_failures
        self._known_failures, error = self._file_system.sync()
        if error is not None:
            raise error
        if self._known_failures != known:
            raise OSError(errno.EIO, "an earlier sync of this file system failed")


def _sync_file(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
