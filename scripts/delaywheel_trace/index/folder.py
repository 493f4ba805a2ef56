"""The folder of an index, on any file system of pyarrow: lists it, and puts files there whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import fs

from delaywheel_replica.hiding import shown
from delaywheel_trace.index.layout import Layout

_OBJECT_STORES: Final = {"s3", "gcs", "abfs"}
"""Where a file appears when its stream is closed, even by a failure, and moving copies."""
_ASIDE: Final = "aside"
_COPIED_BYTES: Final = 1 << 20
UNREACHED: Final = (OSError, pa.ArrowException)
"""What a file system raises that fails."""


class IndexUnreadableError(Exception):
    """The folder does not answer, or is none."""


class IndexFolder:
    """A folder: any thread may use it, but what it writes aside one at a time by name.

    Attributes:
        uri: Where it is.
        filesystem: Of pyarrow.
        root: Its path there.
    """

    def __init__(self, uri: str) -> None:
        """Finds the file system.

        Raises:
            IndexUnreadableError: Pyarrow does not understand the URI.
        """
        self.uri = uri
        try:
            if "://" in uri:
                self.filesystem, root = fs.FileSystem.from_uri(uri)
            else:
                self.filesystem, root = fs.LocalFileSystem(), str(Path(uri).absolute())
        except (*UNREACHED, ValueError) as error:
            raise IndexUnreadableError(f"{shown(uri)}: {error}") from None
        self.root: Final = root.rstrip("/")
        self.is_local = self.filesystem.type_name == "local"

    def listing(self) -> Layout:
        """Returns what is there; an index that is not there is empty.

        Raises:
            IndexUnreadableError: The place does not answer.
        """
        try:
            return Layout.of(self.paths())
        except UNREACHED as error:
            raise IndexUnreadableError(f"{shown(self.uri)}: {error}") from error

    def paths(self) -> Iterator[str]:
        """Returns the paths of all files, below the folder; the checkpoint's not."""
        skipped = {"checkpoint", _ASIDE}
        for top in self._infos(self.root):
            if top.type == fs.FileType.Directory and top.base_name not in skipped:
                for info in self._infos(top.path):
                    if info.is_file:
                        yield f"{top.base_name}/{info.base_name}"

    def full(self, path: str) -> str:
        """Returns a path that this file system knows."""
        return f"{self.root}/{path}"

    def put(self, path: str, write: Callable[[Any], object]) -> None:
        """Puts a file in place: whole or not at all, and durably; one of this name is replaced.

        Args:
            path: Below the folder.
            write: Writes its content to a stream.
        """
        final, aside = self.full(path), self.full(f"{_ASIDE}/{path.replace('/', '~')}")
        for folder in (final, aside):
            self.filesystem.create_dir(folder.rpartition("/")[0], recursive=True)
        with self.filesystem.open_output_stream(aside) as stream:
            write(stream)
        if self.filesystem.type_name in _OBJECT_STORES:
            self.filesystem.copy_file(aside, final)
            self.filesystem.delete_file(aside)
            return
        self._move(aside, final)

    def put_file(self, path: str, file: Path) -> None:
        """Puts a file of this machine in place as `put` does; here it is moved."""
        if not self.is_local:
            with file.open("rb") as source:
                self.put(path, lambda stream: shutil.copyfileobj(source, stream, _COPIED_BYTES))
            file.unlink()
            return
        final = self.full(path)
        self.filesystem.create_dir(final.rpartition("/")[0], recursive=True)
        self._move(str(file), final)

    @contextmanager
    def room(self) -> Iterator[Path]:
        """Returns a folder of this machine for what is being made; its files can be moved."""
        beside = Path(self.full(_ASIDE)) if self.is_local else Path(tempfile.gettempdir())
        beside.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="sorting-", dir=beside))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def delete(self, path: str) -> None:
        """Deletes a file, if it is there."""
        with suppress(FileNotFoundError):
            self.filesystem.delete_file(self.full(path))

    def delete_folder(self, name: str) -> None:
        """Deletes a folder with all that is in it, if it is there."""
        with suppress(FileNotFoundError):
            self.filesystem.delete_dir(self.full(name))

    def clear_aside(self) -> None:
        """Deletes what a crash has left half-written."""
        self.delete_folder(_ASIDE)

    def _infos(self, folder: str) -> list[fs.FileInfo]:
        found: list[fs.FileInfo] = self.filesystem.get_file_info(
            fs.FileSelector(folder, allow_not_found=True)
        )
        return found

    def _move(self, path: str, final: str) -> None:
        self._sync(path)
        self.filesystem.move(path, final)
        self._sync(final.rpartition("/")[0])
        self._sync(self.root)

    def _sync(self, path: str) -> None:
        if not self.is_local:
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
