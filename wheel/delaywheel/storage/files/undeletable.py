"""Files that the medium refuses to delete.

One damaged inode, or one entry of a folder, is enough for a file that cannot be deleted, or for a
folder whose files nobody knows. Everything else is deleted all the same; such a file is tried
again, ever less often: each try may take a disk seconds.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from delaywheel.storage.folder.disk import Disk, is_medium_error

FIRST_PAUSE_MS: Final = 10_000
LONGEST_PAUSE_MS: Final = 600_000


class Undeletable:
    """The files of one data folder that could not be deleted.

    `paths` is for any thread, the rest for one.
    """

    def __init__(
        self,
        now_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
        on_refused: Callable[[OSError, int], object] = lambda _error, _pause_ms: None,
    ) -> None:
        """Begins with none.

        `on_refused` is called with each failure, and the pause until the next try.
        """
        self._now_ms = now_ms
        self._on_refused = on_refused
        self._tries: dict[Path, tuple[int, int]] = {}  # when again, and the pause before that
        self._unlisted: set[Path] = set()

    @property
    def paths(self) -> list[Path]:
        """The files and folders that could not be deleted, or listed."""
        return sorted(self._tries)

    def forget_gone(self, disk: Disk) -> None:
        """Forgets files that somebody else has deleted, as soon as their pause is over."""
        now_ms = self._now_ms()
        over = [path for path, (again_ms, _) in self._tries.items() if again_ms <= now_ms]
        for path in over:
            with contextlib.suppress(OSError):
                if not disk.exists(path):
                    self._unlisted.discard(path)
                    del self._tries[path]

    def delete(self, disk: Disk, path: Path, *, is_folder: bool = False) -> bool:
        """Deletes a file, or a folder with all that is in it; returns whether it is gone.

        One that could not be deleted is left alone until its pause is over.
        """
        if self._is_paused(path):
            return False
        try:
            if is_folder:
                disk.delete_folder(path)
            else:
                disk.delete(path)
        except OSError as error:
            self._refused(path, error)
            return False
        self._tries.pop(path, None)
        return True

    def list_folder(self, disk: Disk, path: Path) -> list[str] | None:
        """Returns the names in a folder; None if the medium cannot read it, as in `delete`."""
        if self._is_paused(path):
            return None
        try:
            names = disk.list_folder(path)
        except OSError as error:
            if not is_medium_error(error):
                raise
            self._unlisted.add(path)
            self._refused(path, error)
            return None
        if path in self._unlisted:
            self._unlisted.remove(path)
            self._tries.pop(path, None)
        return names

    def _is_paused(self, path: Path) -> bool:
        again_ms, pause_ms = self._tries.get(path, (0, 0))
        return bool(pause_ms) and self._now_ms() < again_ms

    def _refused(self, path: Path, error: OSError) -> None:
        _, pause_ms = self._tries.get(path, (0, 0))
        pause_ms = min(2 * pause_ms or FIRST_PAUSE_MS, LONGEST_PAUSE_MS)
        self._tries[path] = self._now_ms() + pause_ms, pause_ms
        self._on_refused(error, pause_ms)
