"""Files that are read again when they change: at most once a second, when a call asks for them.

| the file on the disk | at the start | later |
|---|---|---|
| in order | taken | taken; one INFO line |
| not in order | refused, exit code 78 | the earlier content stays; one WARNING |
"""

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Final, Generic, TypeVar

from delaywheel_replica.process.logs import get_logger

_LOOK_EVERY_S: Final = 1.0
_MOST_BYTES: Final = 16 << 20
_Content = TypeVar("_Content")
_log: Final = get_logger(__name__)


class AccessFileError(Exception):
    """A file is not in order. The text begins with the setting's name."""


class WatchedFile(Generic[_Content]):
    """What a file says now. For any thread."""

    def __init__(self, name: str, path: Path, parse: Callable[[bytes], _Content]) -> None:
        """Reads the file.

        Args:
            name: The setting that names it.
            path: Where it is.
            parse: Reads its content; raises ValueError, with what is wrong.

        Raises:
            AccessFileError: It is not in order.
        """
        self._name, self._path, self._parse = name, path, parse
        self._lock: Final = Lock()
        self._stamp = _stamp(path)
        self._current = self._read()
        self._look_at_s = time.monotonic() + _LOOK_EVERY_S
        self.refused: str | None = None
        """Why the file on the disk is not taken; None: it is."""

    @property
    def current(self) -> _Content:
        """The last content in order; looks at the file first."""
        if time.monotonic() >= self._look_at_s:
            with self._lock:
                self._look()
        return self._current

    def _look(self) -> None:
        self._look_at_s = time.monotonic() + _LOOK_EVERY_S
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._current = self._read()
        except AccessFileError as error:
            self.refused = str(error)
            _log.warning("file refused", setting=self._name, cause=self.refused, stays="earlier")
        else:
            self.refused = None
            _log.info("file read again", setting=self._name, path=str(self._path))

    def _read(self) -> _Content:
        return read_file(self._name, self._path, self._parse)


def read_file(name: str, path: Path, parse: Callable[[bytes], _Content]) -> _Content:
    """Reads a file once; see `WatchedFile`."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & stat.S_IRWXO:
                raise AccessFileError(f"{name} {path}: everybody may use it: chmod o= {path}")
            content = file.read(_MOST_BYTES)
        return parse(content)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise AccessFileError(f"{name} {path}: {reason}") from error
    except ValueError as error:
        raise AccessFileError(f"{name} {path}: {error}") from error


def _stamp(path: Path) -> object:
    """Tells whether the file was replaced or written."""
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode
