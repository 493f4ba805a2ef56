"""One JSON document in a small mapped file, written by one process and read by others.

No locks. The file has two halves; each holds a whole document: ``counter u64, length u32,
crc32c u32`` (of counter, length and content), content. The writer overwrites the older half
and counts one up, so the newer one stays whole while it writes, or when it dies doing so.
A reader takes the half with the greater counter whose checksum is right; it looks again when
the writer overtook it. The space is allocated, so that no access to the map can fail.

A document that does not fit goes into a file with halves of twice the length, or more, which takes
the place of the old one whole; readers see by the file's number that there is another.

``RowWriter.write`` is for one thread; ``RowReader.read`` may be called from any.
"""

import json
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from delaywheel.disk import PosixDisk

HALF_LENGTH_BYTES = 1024 * 1024
"""Of a new row, with the 16 bytes of counter, length and checksum."""
MAX_HALF_LENGTH_BYTES = 256 * 1024 * 1024
"""A document that is longer is a defect: what goes into rows is bounded far below."""

_BYTE = np.dtype(np.uint8)
_HEAD = struct.Struct("<QII")
_COUNTED = struct.Struct("<QI")
# A reader is overtaken only if the writer writes twice during one read: once is rare already.
_READ_ATTEMPTS = 100


class RowTooLargeError(ValueError):
    """The document does not fit any row."""


class RowWriter:
    """The one writer of a row."""

    def __init__(self, path: Path) -> None:
        """Goes on with what there is, or makes the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        try:
            length = path.stat().st_size
        except FileNotFoundError:
            length = 0
        if not _is_row(length):
            length = 2 * HALF_LENGTH_BYTES
        self._map = _mapped(path, length, writable=True)
        newest = _newest(self._map)
        self._counter = newest[0] if newest else 0

    def write(self, document: Mapping[str, Any]) -> None:
        """Replaces the document.

        Raises:
            RowTooLargeError: its JSON is longer than any row may be.
            OSError: it needs a larger file, and the medium refused that.
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
        _HEAD.pack_into(view, at, counter, len(content), _checksum(counter, content))
        self._counter = counter


class RowReader:
    """A reader of a row, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        """Opens nothing yet."""
        self._path = path
        self._map: memoryview | None = None
        self._file: tuple[int, int] | None = None  # number and length of the one that is mapped
        self._lock = threading.Lock()

    def read(self) -> dict[str, Any] | None:
        """The newest document; None when none was ever written, or none survived a crash."""
        for _ in range(_READ_ATTEMPTS):
            view = self._newest_file()
            if view is None:
                return None
            newest = _newest(view)
            if newest is not None:
                return dict(json.loads(newest[1]))
            if not any(_HEAD.unpack_from(view, at)[0] for at in _halves(view)):
                return None
        return None

    def _newest_file(self) -> memoryview | None:
        """Not before it has its full size: a map beyond the end of a file is SIGBUS."""
        with self._lock:
            try:
                found = self._path.stat()
            except FileNotFoundError:
                return self._map
            file = found.st_ino, found.st_size
            if file != self._file and _is_row(found.st_size):
                # Another file that took its place since is as large as this one, or larger.
                self._map = _mapped(self._path, found.st_size, writable=False)
                self._file = file
            return self._map


def _is_row(length_bytes: int) -> bool:
    half, odd = divmod(length_bytes, 2 * HALF_LENGTH_BYTES)
    return half > 0 and not odd


def _mapped(path: Path, length_bytes: int, *, writable: bool) -> memoryview:
    return PosixDisk().map_array(path, _BYTE, length_bytes, writable=writable).data


def _halves(view: memoryview) -> tuple[int, int]:
    return 0, len(view) // 2


def _newest(view: memoryview) -> tuple[int, bytes] | None:
    """Counter and content of the newer whole document."""
    whole = [document for at in _halves(view) if (document := _whole(view, at)) is not None]
    return max(whole, default=None)


def _whole(view: memoryview, at: int) -> tuple[int, bytes] | None:
    counter, length, checksum = _HEAD.unpack_from(view, at)
    if counter == 0 or length > len(view) // 2 - _HEAD.size:
        return None
    content = bytes(view[at + _HEAD.size : at + _HEAD.size + length])
    return (counter, content) if _checksum(counter, content) == checksum else None


def _checksum(counter: int, content: bytes) -> int:
    return crc32c(content, crc32c(_COUNTED.pack(counter, len(content))))
