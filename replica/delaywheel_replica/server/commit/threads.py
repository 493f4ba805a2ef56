"""The server's two own threads: one touches the disk, the other never waits for it.

The status is written at each tick, and at once when a thread has something to report. Reports
within a few milliseconds share one write; otherwise writing would use a whole core under load.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from delaywheel.storage.folder.status_file import RowWriter
from delaywheel_replica.core.protocol.codec import to_json
from delaywheel_replica.server.commit.driver import Driver
from delaywheel_replica.server.commit.outside import Job
from delaywheel_replica.server.node.node_view import BEAT_S

_ROW_GAP_S: Final = 0.004
_BEFORE_START_S: Final = 0.5


class StoreThread:
    """Carries out the driver's jobs: in order, by one thread at a time.

    Most jobs cost less than handing them to another thread. So a thread that may wait for the disk
    does them itself if no other thread is at it; all others leave them to this thread.
    """

    def __init__(self) -> None:
        """Does nothing before ``start``."""
        self._jobs: deque[Job] = deque()
        self.put = self._jobs.append
        self._driver: Driver | None = None
        # Held by the working thread. A thread that finds it held leaves its job to the holder,
        # which looks again afterwards.
        self._working = threading.Lock()
        self._worker: int | None = None
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._has_ended = False
        self._thread: threading.Thread | None = None

    def do_some(self, driver: Driver) -> None:
        """Carries out the present jobs, and those they cause; call it before `start`.

        What is left after some time is done on the thread: it concerns old wheels.
        """
        until = time.monotonic() + _BEFORE_START_S
        while self._jobs and time.monotonic() < until:
            driver.do(self._jobs.popleft())

    def start(self, driver: Driver) -> None:
        """Starts the thread with the present jobs."""
        self._driver = driver
        self._wakes.put(None)
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Blocks until all jobs queued before are done, then ends the thread."""
        self._has_ended = True
        self._wakes.put(None)
        if self._thread is not None:
            self._thread.join()

    def do_jobs(self, *, here: bool) -> None:
        """Has the queued jobs carried out.

        Args:
            here: The caller may wait for the disk. It does the present jobs, and leaves those
                queued meanwhile to the thread, because it has a peer to read from.
        """
        if self._driver is None or self._worker == threading.get_ident():
            return  # it begins with them, or continues with them
        if here and self._working.acquire(blocking=False):
            self._do(self._driver, len(self._jobs))
        if self._jobs and not self._working.locked():
            self._wakes.put(None)

    def _run(self) -> None:
        assert self._driver is not None
        while not self._has_ended:
            self._wakes.get()
            self._do_rest(self._driver)
        with self._working:  # its holder finishes
            pass
        self._do_rest(self._driver)

    def _do_rest(self, driver: Driver) -> None:
        while self._jobs:  # others may have done them meanwhile
            self._working.acquire()
            self._do(driver, len(self._jobs))

    def _do(self, driver: Driver, most: int) -> None:
        """Carries out jobs while holding the lock, then releases it."""
        self._worker = threading.get_ident()
        try:
            for _ in range(most):
                driver.do(self._jobs.popleft())
        finally:
            self._worker = None
            self._working.release()


class HeartbeatThread:
    """Ticks, and writes ``server.row``. ``write_status`` may be called on any thread."""

    def __init__(self, path: Path, *, wake: Callable[[], object]) -> None:
        """Does nothing before ``start``.

        Args:
            wake: Wakes the cleaner, so that it reads the status now.
        """
        self._row = RowWriter(path)
        self._wake = wake
        self._lock = threading.Lock()
        self._written_at = 0.0
        self._wanted = threading.Event()
        self._ended = False
        self._driver: Driver | None = None
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def start(self, driver: Driver) -> None:
        """Starts to tick and to write the status."""
        self._driver = driver
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._ended = True
        self._wanted.set()
        self._thread.join()

    def write_status(self) -> None:
        """Writes the status now; see `outside.Outside`."""
        if time.monotonic() - self._written_at < _ROW_GAP_S:
            self._wanted.set()
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
            if self._wanted.wait(max(0.0, tick_at - time.monotonic())):
                time.sleep(_ROW_GAP_S)
                self._wanted.clear()
                self._write()
                self._wake()

    def _write(self) -> None:
        """Writes the status under the lock, so that no older one follows a newer one."""
        if self._driver is None:
            return
        with self._lock:
            self._row.write(to_json(self._driver.status()))
            self._written_at = time.monotonic()
