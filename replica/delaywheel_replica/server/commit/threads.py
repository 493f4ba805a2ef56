"""The server's two own threads: the one that touches the disk, and the one that never waits for it.

The row is written at each tick, and at once, by whoever has something to tell. What many have to
tell within some milliseconds becomes one row, or rows would take a core under load.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from delaywheel.storage.folder.status_file import RowWriter
from delaywheel_replica.server.commit.driver import Driver
from delaywheel_replica.server.commit.outside import Job
from delaywheel_replica.server.node.node_view import BEAT_S

_ROW_GAP_S: Final = 0.004
_BEFORE_START_S: Final = 0.5


class StoreThread:
    """Carries out the driver's jobs: in order, by one thread at a time.

    Most jobs cost less than handing them to another thread. So a thread that may wait for the disk
    does them itself, if nobody is at it; for all others there is a thread.
    """

    def __init__(self) -> None:
        """Prepares; ``start`` starts the thread."""
        self._jobs: deque[Job] = deque()
        self.put = self._jobs.append
        self._driver: Driver | None = None
        # Held by who works. Who finds it held leaves it to the holder, who looks again afterwards.
        self._turn = threading.Lock()
        self._worker: int | None = None
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._has_ended = False
        self._thread: threading.Thread | None = None

    def do_some(self, driver: Driver) -> None:
        """Carries out the jobs there are, and those they cause; before `start`.

        What is left when some time has passed is for the thread: it is about old wheels.
        """
        until = time.monotonic() + _BEFORE_START_S
        while self._jobs and time.monotonic() < until:
            driver.do(self._jobs.popleft())

    def start(self, driver: Driver) -> None:
        """Starts the thread with the jobs there are."""
        self._driver = driver
        self._wakes.put(None)
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Blocks until all jobs that were put before are done, then ends the thread."""
        self._has_ended = True
        self._wakes.put(None)
        if self._thread is not None:
            self._thread.join()

    def do_jobs(self, *, here: bool) -> None:
        """Has the queued jobs carried out.

        Args:
            here: the caller may wait for the disk. It does the jobs that are there by now, and
                leaves to the thread what is put meanwhile: it has a peer to listen to.
        """
        if self._driver is None or self._worker == threading.get_ident():
            return  # it begins with them; or goes on with them
        if here and self._turn.acquire(blocking=False):
            self._do(self._driver, len(self._jobs))
        if self._jobs and not self._turn.locked():
            self._wakes.put(None)

    def _run(self) -> None:
        assert self._driver is not None
        while not self._has_ended:
            self._wakes.get()
            self._do_rest(self._driver)
        with self._turn:  # whoever is at it ends it
            pass
        self._do_rest(self._driver)

    def _do_rest(self, driver: Driver) -> None:
        while self._jobs:  # others may have done them until it is our turn
            self._turn.acquire()
            self._do(driver, len(self._jobs))

    def _do(self, driver: Driver, most: int) -> None:
        """Carries out jobs while holding the turn, which it then returns."""
        self._worker = threading.get_ident()
        try:
            for _ in range(most):
                driver.do(self._jobs.popleft())
        finally:
            self._worker = None
            self._turn.release()


class HeartbeatThread:
    """Ticks, and writes ``server.row``. ``tell`` may be called on any thread."""

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
        """Starts to tick and to write the status."""
        self._driver = driver
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._ended = True
        self._told.set()
        self._thread.join()

    def tell(self) -> None:
        """Has the status written now; see `outside.Outside`."""
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
        """Writes the status under the lock, so that no older one follows a newer one."""
        if self._driver is None:
            return
        with self._lock:
            self._row.write(self._driver.status().to_json())
            self._written_at = time.monotonic()
