"""Regular work for the disk: checkpoints, measuring free space, the cache of topics.

On a thread of its own: a checkpoint waits for the medium, for seconds if necessary, and nothing
waits for a checkpoint. It only saves work at the next start after a crash of the machine.
"""

import threading
from collections.abc import Callable
from typing import Final

from delaywheel_replica.process.logs import get_logger

_EVERY_S: Final = 1.0
_CHECKPOINT_EVERY: Final = 5

_log = get_logger(__name__)


class Upkeep:
    """Does regular work for the disk, on its own thread."""

    def __init__(
        self,
        *,
        look: Callable[[], object],
        checkpoint: Callable[[], None],
        written: Callable[[], object],
    ) -> None:
        """Does nothing before ``start``.

        `written` says how far everything is written: while that stays, no checkpoint is made.
        """
        self._look = look
        self._checkpoint = checkpoint
        self._written = written
        self._noted: object = None
        self._jobs: list[Callable[[], object]] = [look]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)

    def start(self) -> None:
        """Measures the disk once, then starts the thread."""
        self._look()
        self._thread.start()

    def end(self) -> None:
        """Ends the thread after its present work, without waiting for it."""
        self._ended.set()

    def stop(self) -> None:
        """Ends the thread."""
        self.end()
        self._thread.join()

    def add(self, job: Callable[[], object]) -> None:
        """Adds a function to be called once a second."""
        self._jobs.append(job)

    def _run(self) -> None:
        rounds = 0
        while not self._ended.wait(_EVERY_S):
            rounds += 1
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
