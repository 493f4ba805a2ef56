"""What the disk needs now and then: checkpoints, a look at its free space, the cache of topics.

On a thread of its own: a checkpoint waits for the medium, for seconds if it must, and nothing
waits for a checkpoint. It spares the next start after a crash of the machine, no more.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from delaywheel.disk import Disk

_EVERY_S: Final = 1.0
_CHECKPOINT_EVERY: Final = 5
# A slot file is an inode; some are left for forwarding, which needs none, and for the operator.
_INODE_RESERVE: Final = 1_000

_log = structlog.get_logger(__name__)


class Upkeep:
    """Looks after the disk."""

    def __init__(
        self,
        disk: Disk,
        data: Path,
        *,
        reserve_bytes: int,
        checkpoint: Callable[[], None],
        written: Callable[[], object],
    ) -> None:
        """Prepares; ``start`` starts the thread.

        Args:
            disk: where the data folder lies.
            data: the data folder.
            reserve_bytes: with less free than that, no more messages are taken.
            checkpoint: makes one.
            written: says how far everything is written: while that rests, no checkpoint is made.
        """
        self._disk = disk
        self._data = data
        self._reserve_bytes = reserve_bytes
        self._checkpoint = checkpoint
        self._written = written
        self._noted: object = None
        self._jobs: list[Callable[[], object]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)
        # Why no more messages are taken; None: there is room.
        self.full: str | None = None

    def start(self) -> None:
        """Looks at the disk once, then starts the thread."""
        self.look()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join()

    def also(self, job: Callable[[], object]) -> None:
        """Adds what is to be done once a second."""
        self._jobs.append(job)

    def look(self) -> None:
        """Sees whether the disk is at its reserve."""
        free_bytes = self._disk.free_bytes(self._data)
        free_inodes = self._disk.free_inodes(self._data)
        full = None
        if free_bytes < self._reserve_bytes:
            full = f"{free_bytes} bytes are free, the reserve is {self._reserve_bytes}"
        elif free_inodes is not None and free_inodes < _INODE_RESERVE:
            full = f"{free_inodes} inodes are free, the reserve is {_INODE_RESERVE}"
        if (full is None) != (self.full is None):
            _log.warning("disk", full=full or "no more")
        self.full = full

    def _run(self) -> None:
        rounds = 0
        while not self._ended.wait(_EVERY_S):
            rounds += 1
            self.look()
            jobs = list(self._jobs)
            if rounds % _CHECKPOINT_EVERY == 0:
                jobs.append(self._make_checkpoint)
            for job in jobs:
                try:
                    job()
                except OSError as error:
                    _log.warning("disk refuses", error=str(error))

    def _make_checkpoint(self) -> None:
        written = self._written()
        if written != self._noted:
            self._checkpoint()
            self._noted = written
