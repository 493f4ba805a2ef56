"""The server's two own threads: the one that touches the disk, and the one that never waits for it.

The row is written at each tick, and at once, by whoever has something to tell. What many have to
tell within some milliseconds becomes one row, or rows would take a core under load.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from delaywheel.row import RowWriter
from delaywheel_replica.server.driver import Driver
from delaywheel_replica.server.jobs import Job
from delaywheel_replica.server.status import BEAT_S

_ROW_GAP_S: Final = 0.004


class StoreThread:
    """Does the driver's jobs, in order. ``put`` is for any thread."""

    def __init__(self) -> None:
        """Prepares; ``start`` starts the thread."""
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.put = self._jobs.put
        self._thread: threading.Thread | None = None

    def do_all(self, driver: Driver) -> None:
        """Does the jobs that are there, and those that come of them; before the start."""
        while not self._jobs.empty():
            job = self._jobs.get()
            assert job is not None, "it was stopped"
            driver.do(job)

    def start(self, driver: Driver) -> None:
        """Begins with the jobs that are there."""
        self._thread = threading.Thread(target=self._run, args=(driver,), name="store", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Blocks until all jobs that were put before are done, then ends the thread."""
        self.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self, driver: Driver) -> None:
        while (job := self._jobs.get()) is not None:
            driver.do(job)


class BeatThread:
    """Ticks, and writes ``server.row``. ``tell`` is for any thread."""

    def __init__(self, path: Path, *, wake: Callable[[], object]) -> None:
        """Prepares; ``start`` starts the thread.

        Args:
            path: of the row.
            wake: has the cleaner look at the row now.
        """
        self._row = RowWriter(path)
        self._wake = wake
        self._lock = threading.Lock()
        self._written_at = 0.0
        self._told = threading.Event()
        self._ended = False
        self._driver: Driver | None = None
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def start(self, driver: Driver) -> None:
        """Begins to tick and to tell."""
        self._driver = driver
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._ended = True
        self._told.set()
        self._thread.join()

    def tell(self) -> None:
        """Has the row written now; see ``jobs.Outside``."""
        if time.monotonic() - self._written_at < _ROW_GAP_S:
            self._told.set()
            return
        self._write()
        self._wake()

    def _run(self) -> None:
        assert self._driver is not None
        tick_at = time.monotonic()
        while not self._ended:
            if time.monotonic() >= tick_at:
                tick_at = time.monotonic() + BEAT_S
                self._driver.tick()
                self._write()
            if self._told.wait(max(0.0, tick_at - time.monotonic())):
                time.sleep(_ROW_GAP_S)
                self._told.clear()
                self._write()
                self._wake()

    def _write(self) -> None:
        """The status is made under the lock: no older row ever follows a newer one."""
        if self._driver is None:
            return
        with self._lock:
            self._row.write(self._driver.status().to_json())
            self._written_at = time.monotonic()
