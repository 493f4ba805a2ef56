"""One JSON document in a small mapped file, written by one process and read by others.

No locks. The file has two halves, each with a whole document: ``counter u64, length u32, crc32c
u32`` (of counter, length and content), content. The writer overwrites the older half and increments
the counter, so the newer one stays intact during the write, even if the writer dies. A reader takes
the half with the greater counter whose checksum is right; it reads again if the writer overtook it.
The space is allocated, so that no access to the map can fail.

A document that does not fit goes into a new file with halves of at least twice the length, which
replaces the old one as a whole; readers notice by the file's number. A status file that exists only
in memory, named by a descriptor (`in_memory`), has room for any document from the start, and its
writer never waits for a disk.

``RowWriter.write`` is for one thread; ``RowReader.read`` may be called from any.
"""

import json
import mmap
import os
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from crc32c import crc32c

from delaywheel.storage.folder.disk import is_medium_error

HALF_LENGTH_BYTES = 1024 * 1024
"""The length of a half in a new file, including 16 bytes of counter, length and checksum."""
MAX_HALF_LENGTH_BYTES = 256 * 1024 * 1024
"""A longer document is a defect: what goes into status files is bounded far below this."""

_DESCRIPTORS = Path("/proc/self/fd")
_HEAD = struct.Struct("<QII")
_COUNTED = struct.Struct("<QI")
# A reader is overtaken only if the writer writes twice during one read: even once is rare.
_READ_ATTEMPTS = 100

_T = TypeVar("_T")


class RowTooLargeError(ValueError):
    """The document does not fit any row."""


def in_memory(descriptor: int) -> Path:
    """Returns the path of a status file in memory, for a process that has its descriptor."""
    return _DESCRIPTORS / str(descriptor)


class RowWriter:
    """The one writer of a row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.parent == _DESCRIPTORS:
            length = 2 * MAX_HALF_LENGTH_BYTES
            self._take(_mapped(path, length, writable=True, allocates=False))
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            length = path.stat().st_size
        except FileNotFoundError:
            length = 0
        if not _is_row(length):
            length = 2 * HALF_LENGTH_BYTES
        try:
            self._take(_mapped(path, length, writable=True))
        except OSError as error:
            if not is_medium_error(error):
                raise
            path.unlink()  # what it said is read again elsewhere
            self._take(_mapped(path, 2 * HALF_LENGTH_BYTES, writable=True))

    def _take(self, view: memoryview) -> None:
        newest = _newest(view)
        self._map = view
        self._counter = newest[0] if newest else 0

    def write(self, document: Mapping[str, Any]) -> None:
        """Replaces the document.

        Raises:
            RowTooLargeError: Its JSON is longer than any half may be.
            OSError: It needs a larger file, and the medium reported an error.
        """
        content = json.dumps(document, separators=(",", ":")).encode()
        length = _HEAD.size + len(content)
        half = len(self._map) // 2
        if length <= half:
            self._put(self._map, content)
            return
        while half < length:
            half *= 2
        if half > MAX_HALF_LENGTH_BYTES:
            raise RowTooLargeError(f"{length} bytes in a row of {MAX_HALF_LENGTH_BYTES}")
        larger = self._path.with_name(self._path.name + ".new")
        larger.unlink(missing_ok=True)
        grown = _mapped(larger, 2 * half, writable=True)
        self._put(grown, content)
        larger.replace(self._path)
        self._map = grown

    def _put(self, view: memoryview, content: bytes) -> None:
        counter = self._counter + 1
        at = _halves(view)[counter % 2]
        content_at = at + _HEAD.size
        view[content_at : content_at + len(content)] = content
        view[at : at + _HEAD.size] = _head(counter, content)
        self._counter = counter


class RowReader(Generic[_T]):
    """A reader of a status file, which need not exist yet."""

    def __init__(self, path: Path, decode: Callable[[dict[str, Any]], _T]) -> None:
        """Opens nothing yet; `decode` is called once for a document, however often it is read."""
        self._path = path
        self._decode = decode
        self._map: memoryview | None = None
        self._file: tuple[int, int] | None = None  # number and length of the mapped one
        self._head: bytes | None = None  # of the document that was decoded last
        self._decoded: _T | None = None
        self._lock = threading.Lock()

    def read(self) -> _T | None:
        """Returns the newest document; None if none was ever written, or none survived a crash.

        Returns the same object as long as nothing was written, and raises an error of `decode`
        again.
        """
        with self._lock:
            for _ in range(_READ_ATTEMPTS):
                view = self._newest_file()
                if view is None:
                    return None
                # The counter comes first, and is written last: this is the newer half as it was
                # begun.
                head = max((bytes(view[at : at + _HEAD.size]) for at in _halves(view)), key=_count)
                if head == self._head:
                    return self._decoded
                newest = _newest(view)
                if newest is not None:
                    self._head = None
                    self._decoded = self._decode(dict(json.loads(newest[1])))
                    self._head = _head(*newest)
                    return self._decoded
                if not _count(head):
                    return None
            return None

    def _newest_file(self) -> memoryview | None:
        """Opens the file only at its full size: reading a map beyond a file's end raises SIGBUS."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return self._map
        file = found.st_ino, found.st_size
        if file != self._file and _is_row(found.st_size):
            # Another file that replaced it since is as large as this one, or larger.
            try:
                self._map = _mapped(self._path, found.st_size, writable=False)
            except OSError as error:
                if not is_medium_error(error):
                    raise
                self._map = None  # its writer replaces it at its next start
            self._file = file
        return self._map


def _is_row(length_bytes: int) -> bool:
    half, odd = divmod(length_bytes, 2 * HALF_LENGTH_BYTES)
    return half > 0 and not odd


def _mapped(path: Path, length_bytes: int, *, writable: bool, allocates: bool = True) -> memoryview:
    """Maps the file; for writing, it gets its full length first.

    Space is allocated, since a full disk under a map means SIGBUS; but not where no disk is
    involved. So does a sector that cannot be read: the file is read once by calls, which leaves its
    pages in the page cache.
    """
    access = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
    descriptor = os.open(path, access | os.O_CLOEXEC, 0o644)
    try:
        if writable:
            os.ftruncate(descriptor, length_bytes)
        if writable and allocates:
            os.posix_fallocate(descriptor, 0, length_bytes)
        if not path.is_relative_to("/proc"):  # those are in memory
            _read_through(descriptor, length_bytes)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return memoryview(mmap.mmap(descriptor, length_bytes, prot=protection))
    finally:
        os.close(descriptor)


def _read_through(descriptor: int, length_bytes: int) -> None:
    for offset in range(0, length_bytes, HALF_LENGTH_BYTES):
        os.pread(descriptor, HALF_LENGTH_BYTES, offset)


def _halves(view: memoryview) -> tuple[int, int]:
    return 0, len(view) // 2


def _newest(view: memoryview) -> tuple[int, bytes] | None:
    """Returns counter and content of the newer whole document."""
    whole = [document for at in _halves(view) if (document := _intact(view, at)) is not None]
    return max(whole, default=None)


def _intact(view: memoryview, at: int) -> tuple[int, bytes] | None:
    counter, length, checksum = _HEAD.unpack_from(view, at)
    if counter == 0 or length > len(view) // 2 - _HEAD.size:
        return None
    content = bytes(view[at + _HEAD.size : at + _HEAD.size + length])
    return (counter, content) if _checksum(counter, content) == checksum else None


def _head(counter: int, content: bytes) -> bytes:
    return _HEAD.pack(counter, len(content), _checksum(counter, content))


def _count(head: bytes) -> int:
    return int.from_bytes(head[:8], "little")


def _checksum(counter: int, content: bytes) -> int:
    return crc32c(content, crc32c(_COUNTED.pack(counter, len(content))))
