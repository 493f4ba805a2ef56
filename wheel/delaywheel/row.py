"""One JSON document in a small mapped file, written by one process and read by others.

No locks. The file has two halves; each holds a whole document: ``counter u64, length u32,
crc32c u32`` (of counter, length and content), content. The writer overwrites the older half
and counts one up, so the newer one stays whole while it writes, or when it dies doing so.
A reader takes the half with the greater counter whose checksum is right; it looks again when
the writer overtook it. The space is allocated, so that no access to the map can fail.

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

# With its 16 bytes of counter, length and checksum. A row names every wheel that is not finished,
# and each start of a node leaves one for as long as its last message waits: room for thousands.
DOCUMENT_LENGTH_BYTES = 1024 * 1024

_BYTE = np.dtype(np.uint8)
_HEAD = struct.Struct("<QII")
_COUNTED = struct.Struct("<QI")
_HALVES = (0, DOCUMENT_LENGTH_BYTES)
_FILE_LENGTH_BYTES = 2 * DOCUMENT_LENGTH_BYTES
# A reader is overtaken only if the writer writes twice during one read: once is rare already.
_READ_ATTEMPTS = 100


class RowTooLargeError(ValueError):
    """The document does not fit the row."""


class RowWriter:
    """The one writer of a row."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._map = PosixDisk().map_array(path, _BYTE, _FILE_LENGTH_BYTES, writable=True).data
        newest = _newest(self._map)
        self._counter = newest[0] if newest else 0

    def write(self, document: Mapping[str, Any]) -> None:
        """Replaces the document.

        Raises:
            RowTooLargeError: its JSON is longer than a half of the row.
        """
        content = json.dumps(document, separators=(",", ":")).encode()
        if _HEAD.size + len(content) > DOCUMENT_LENGTH_BYTES:
            raise RowTooLargeError(f"{len(content)} bytes in a row of {DOCUMENT_LENGTH_BYTES}")
        counter = self._counter + 1
        at = _HALVES[counter % 2]
        content_at = at + _HEAD.size
        self._map[content_at : content_at + len(content)] = content
        _HEAD.pack_into(self._map, at, counter, len(content), _checksum(counter, content))
        self._counter = counter


class RowReader:
    """A reader of a row, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: memoryview | None = None
        self._lock = threading.Lock()

    def read(self) -> dict[str, Any] | None:
        """The newest document; None when none was ever written, or none survived a crash."""
        view = self._mapped()
        if view is None:
            return None
        for _ in range(_READ_ATTEMPTS):
            newest = _newest(view)
            if newest is not None:
                return dict(json.loads(newest[1]))
            if not any(_HEAD.unpack_from(view, at)[0] for at in _HALVES):
                return None
        return None

    def _mapped(self) -> memoryview | None:
        with self._lock:
            if self._map is None and self._is_there():
                disk = PosixDisk()
                row = disk.map_array(self._path, _BYTE, _FILE_LENGTH_BYTES, writable=False)
                self._map = row.data
            return self._map

    def _is_there(self) -> bool:
        """Not before it has its full size: a map beyond the end of a file is SIGBUS."""
        try:
            return self._path.stat().st_size >= _FILE_LENGTH_BYTES
        except FileNotFoundError:
            return False


def _newest(view: memoryview) -> tuple[int, bytes] | None:
    """Counter and content of the newer whole document."""
    whole = [document for at in _HALVES if (document := _whole(view, at)) is not None]
    return max(whole, default=None)


def _whole(view: memoryview, at: int) -> tuple[int, bytes] | None:
    counter, length, checksum = _HEAD.unpack_from(view, at)
    if counter == 0 or length > DOCUMENT_LENGTH_BYTES - _HEAD.size:
        return None
    content = bytes(view[at + _HEAD.size : at + _HEAD.size + length])
    return (counter, content) if _checksum(counter, content) == checksum else None


def _checksum(counter: int, content: bytes) -> int:
    return crc32c(content, crc32c(_COUNTED.pack(counter, len(content))))
