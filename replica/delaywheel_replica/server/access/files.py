"""Files that are read again when they change: at most once a second, when a call asks for them.

| the file on the disk | at the start | later |
|---|---|---|
| in order | taken | taken; one INFO line |
| not in order | refused, exit code 78 | the earlier content stays; one WARNING |
| cannot be read | refused, exit code 78 | the same, and it is tried again each second |
"""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

from delaywheel.client.exchange.channel import WatchedFiles
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.process.open_files import is_open, open_to_all

_MOST_BYTES: Final = 16 << 20
_Content = TypeVar("_Content")
_log: Final = get_logger(__name__)


class AccessFileError(Exception):
    """A file is not in order. The text begins with the setting's name."""


class FileRead(NamedTuple, Generic[_Content]):
    """What was read, and the SHA-256 of its bytes."""

    content: _Content
    digest: str


class WatchedFile(Generic[_Content]):
    """What a file says now. For any thread."""

    def __init__(self, name: str, path: Path, parse: Callable[[bytes], _Content]) -> None:
        """Reads a setting's file; raises AccessFileError if `parse` raises ValueError."""
        self._name, self._path, self._parse = name, path, parse
        self._files: Final = WatchedFiles([path])
        self._taken = self._read()
        self.refused: str | None = None
        """Why the file on the disk is not taken; None: it is."""

    @property
    def current(self) -> _Content:
        """The last content in order; looks at the file first."""
        self._look()
        return self._taken.content

    @property
    def digest(self) -> str:
        """The SHA-256 of the last content in order; looks at the file first."""
        self._look()
        return self._taken.digest

    def _look(self) -> None:
        if not self._files.have_changed():
            return
        try:
            self._taken = self._read()
        except AccessFileError as error:
            if isinstance(error.__cause__, OSError):
                self._files.read_again()
            if self.refused != str(error):
                self.refused = str(error)
                _log.warning(
                    "file refused", setting=self._name, cause=self.refused, stays="earlier"
                )
        else:
            self.refused = None
            _log.info("file read again", setting=self._name, path=str(self._path))

    def _read(self) -> FileRead[_Content]:
        return read_file(self._name, self._path, self._parse)


def read_file(name: str, path: Path, parse: Callable[[bytes], _Content]) -> FileRead[_Content]:
    """Reads a file once; see `WatchedFile`."""
    try:
        with path.open("rb") as file:
            if is_open(file.fileno()):
                raise AccessFileError(f"{name} {path}: {open_to_all(path)}")
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise AccessFileError(f"{name} {path}: more than {_MOST_BYTES:,} bytes")
        return FileRead(parse(content), sha256(content).hexdigest())
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise AccessFileError(f"{name} {path}: {reason}") from error
    except ValueError as error:
        raise AccessFileError(f"{name} {path}: {error}") from error
