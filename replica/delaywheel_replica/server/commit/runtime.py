"""The driver in a real process: its environment (see `outside.Outside`), and two threads.

One of them touches the disk, the other never waits for it. The status is written at each tick, and
at once when a thread has something to report. Reports within a few milliseconds share one write;
otherwise writing would use a whole core under load.
"""

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from delaywheel.identity import WheelId
from delaywheel.storage.folder.node_state import NodeState
from delaywheel.storage.folder.status_file import RowWriter
from delaywheel.storage.frames.bundle import WrittenGroup
from delaywheel.storage.frames.columns import Columns
from delaywheel_replica.core.node.events import (
    Acknowledge,
    Broken,
    Closed,
    Event,
    Failed,
    Mirrored,
    Opened,
    Saved,
    Verified,
    WheelDeleted,
)
from delaywheel_replica.core.protocol.codec import to_json
from delaywheel_replica.core.protocol.messages import PeerMessage
from delaywheel_replica.peers.network import PeerNetwork
from delaywheel_replica.peers.states import PeerState
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.commit.committer import Answers
from delaywheel_replica.server.commit.driver import Driver
from delaywheel_replica.server.commit.outside import Job
from delaywheel_replica.server.commit.writing import settle
from delaywheel_replica.server.ledger.rows import Ledger
from delaywheel_replica.server.node.node_view import BEAT_S, monotonic_ms, wall_ms

_ROW_GAP_S: Final = 0.004
_BEFORE_START_S: Final = 0.5

_log = get_logger(__name__)


class StoreThread:
    """Carries out the driver's jobs: in order, by one thread at a time.

    Most jobs cost less than handing them to another thread. So a thread that may wait for the disk
    does them itself if no other thread is at it; all others leave them to this thread.
    """

    def __init__(self) -> None:
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
        """Carries out present jobs, and those they cause, for some time; call it before `start`."""
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

    def do_jobs(self, *, may_wait: bool) -> None:
        """Has the queued jobs carried out: here, if the calling thread may wait for the disk.

        Then it does the present ones alone, because it has a peer to read from.
        """
        if self._driver is None or self._worker == threading.get_ident():
            return  # it begins with them, or continues with them
        if may_wait and self._working.acquire(blocking=False):
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
        """Does nothing before ``start``; `wake` has the cleaner read the status now."""
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


class RealOutside:
    """The driver's `Outside` in a real process: clocks, threads, network, callers and books.

    It also logs what happens to the node's wheels, which operators follow.

    Attributes:
        network: The network to the other nodes; None: there are none, or not yet.
        left: Set while node.json names no wheel as open. For the event loop.
    """

    def __init__(
        self,
        *,
        store_thread: StoreThread,
        heartbeat_thread: HeartbeatThread,
        ledger: Ledger,
        loop: asyncio.AbstractEventLoop,
        has_left: bool,
    ) -> None:
        self.pid = os.getpid()
        self.network: PeerNetwork | None = None
        self.left = asyncio.Event()
        if has_left:
            self.left.set()
        self._store_thread = store_thread
        self._heartbeat_thread = heartbeat_thread
        self._ledger = ledger
        self._loop = loop
        self._spare: WheelId | None = None

    def peers(self) -> dict[str, PeerState]:
        """The state of the connection to each other node."""
        return {} if self.network is None else self.network.states()

    def now_ms(self) -> int:
        """The monotonic clock."""
        return monotonic_ms()

    def wall_ms(self) -> int:
        """The wall clock."""
        return wall_ms()

    def enqueue(self, job: Job) -> None:
        """Appends a job to the queue."""
        self._store_thread.put(job)

    def do_jobs(self, *, may_wait: bool) -> None:
        """Carries out the jobs, on the store's thread unless the caller does it."""
        self._store_thread.do_jobs(may_wait=may_wait)

    def send(self, peer: str, message: PeerMessage) -> None:
        """Sends a message to another node."""
        if self.network is not None:
            self.network.send(peer, message)

    def write_status(self) -> None:
        """Has the status written."""
        self._heartbeat_thread.write_status()

    def acknowledged(self, effect: Acknowledge, answers: Answers) -> None:
        """Answers callers."""
        del effect
        self.answer(answers)

    def answer(self, answers: Answers) -> None:
        """Answers callers, on the event loop."""
        if answers:
            self._loop.call_soon_threadsafe(settle, answers)

    def enter(
        self,
        wheel: WheelId,
        columns: Columns | None,
        group: WrittenGroup,
        accepted_at_ms: int,
    ) -> None:
        """Enters frames into the ledger."""
        self._ledger.enter(wheel, columns, group, accepted_at_ms)

    def happened(self, event: Event) -> None:
        """Logs events of wheels, and refusals of the disk."""
        match event:
            case Opened():
                _log.info("wheel opened", wheel=str(event.wheel))
            case Broken():
                _log.error("wheel broken", wheel=str(event.wheel), cause=event.cause)
            case Closed():
                card, final_seq = event.held.card, event.held.final_seq
                _log.info("wheel closed", wheel=str(card.wheel), final_seq=final_seq)
            case WheelDeleted():
                _log.info("wheel deleted", wheel=str(event.wheel))
            case Failed():
                step = type(event.effect).__name__
                _log.warning("disk refuses", step=step, error=event.cause)
            case Saved():
                self._saved(event.state)
            case Mirrored():
                card = event.held.card
                _log.debug("wheel held", wheel=str(card.wheel), seq=event.held.applied)
            case Verified():
                card = event.held.card
                _log.info("wheel verified", wheel=str(card.wheel), seq=event.held.applied)
            case _:
                pass

    def _saved(self, state: NodeState) -> None:
        spare = None if state.spare is None else state.spare.wheel
        if spare is not None and spare != self._spare:
            _log.info("wheel given", wheel=str(spare))
        self._spare = spare
        self._loop.call_soon_threadsafe(self.left.clear if state.open else self.left.set)
