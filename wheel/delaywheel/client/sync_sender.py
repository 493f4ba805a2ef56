"""The background of `Client.produce_async`: a bounded queue and the threads that send from it."""

from collections.abc import Callable, Sequence
from math import inf
from threading import Condition, Lock, Thread, current_thread
from time import monotonic
from typing import Final

from delaywheel.client.exchange.batching import Accumulator
from delaywheel.client.exchange.pending import PendingResult, SendBatch
from delaywheel.client.exchange.settings import Queue
from delaywheel.client.lifetime import FLUSHED_AT_EXIT
from delaywheel.errors import ClientClosedError
from delaywheel.message import Message, Result

Deliver = Callable[[Sequence[Message], float], Sequence[Result]]


class Sender:
    """Takes messages from any thread; `queue.in_flight` threads deliver them in batches."""

    def __init__(self, queue: Queue, timeout_s: float, deliver: Deliver) -> None:
        self._queue: Final = queue
        self._timeout_s: Final = timeout_s
        self._deliver: Final = deliver
        self._gathered: Final = Accumulator(queue, timeout_s, self._expedite)
        lock = Lock()
        self._work: Final = Condition(lock)  # there may be a batch to send, or none any more
        self._room: Final = Condition(lock)  # a batch was settled
        self._threads: Final[list[Thread]] = []
        self._watched_s = inf  # until when a thread waits for a batch's linger to end
        self._closed = False

    def put(self, message: Message, deadline_s: float) -> PendingResult:
        """Queues a message, once there is room; if that raises TimedOutError, it is not queued."""
        with self._room:
            while not self._gathered.has_room(message.length_bytes) and not self._closed:
                self._expedite_open()
                if not self._room.wait(deadline_s - monotonic()):
                    raise self._gathered.full(message)
            if self._closed:
                raise ClientClosedError(failed=message)
            if not self._threads:
                self._start()
            now_s = monotonic()
            before_s = self._gathered.wait_s(now_s)
            pending = self._gathered.add(message, now_s, deadline_s)
            wait_s = self._gathered.wait_s(now_s)
            if wait_s is not None and (not wait_s or before_s is None or wait_s < before_s):
                self._work.notify()
        return pending

    def flush(self, deadline_s: float) -> bool:
        """Waits until all earlier messages are settled; False on timeout."""
        with self._room:
            self._expedite_open()
            before = self._gathered.unsettled()
            while not before.isdisjoint(self._gathered.unsettled()):
                if not self._room.wait(deadline_s - monotonic()):
                    return False
        return True

    def flush_at_exit(self) -> set[SendBatch]:
        """Sends what is unsettled, within the client's timeout; returns its batches."""
        with self._room:
            unsettled = self._gathered.unsettled()
        self.flush(monotonic() + self._timeout_s)
        return unsettled

    def close(self) -> None:
        """Accepts no further messages; the threads end when everything is settled."""
        with self._room:
            self._closed = True
            self._expedite_open()
            self._room.notify_all()
            self._work.notify_all()

    def join(self) -> None:
        """Waits for all threads to end except the calling one, which may be in a callback."""
        for thread in self._threads:
            if thread is not current_thread():
                thread.join()

    def _expedite(self, batch: SendBatch) -> None:
        with self._work:
            if self._gathered.expedite(batch, monotonic()):
                self._work.notify()

    def _expedite_open(self) -> None:
        if self._gathered.expedite(None, monotonic()):
            self._work.notify()

    def _start(self) -> None:
        FLUSHED_AT_EXIT.add(self)
        for number in range(self._queue.in_flight):
            thread = Thread(target=self._send, name=f"delaywheel-sender-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _send(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                batch.settle(self._deliver(batch.messages, batch.deadline_s))
            except Exception as defect:  # noqa: BLE001  it must reach waiting callers
                batch.settle_defective(defect)
            with self._room:
                self._gathered.finished(batch)
                self._room.notify_all()
                if self._closed:
                    self._work.notify_all()

    def _next_batch(self) -> SendBatch | None:
        with self._work:
            while (batch := self._gathered.next_batch(now_s := monotonic())) is None:
                if self._closed and not self._gathered.messages:
                    return None
                wait_s = self._gathered.wait_s(now_s)
                if wait_s is None or now_s + wait_s >= self._watched_s:
                    self._work.wait()
                else:
                    self._watch(now_s + wait_s, wait_s)
        return batch

    def _watch(self, until_s: float, wait_s: float) -> None:
        """Waits on one thread for a batch's linger to end, so that the others are not woken."""
        self._watched_s = until_s
        self._work.wait(wait_s)
        if self._watched_s == until_s:
            self._watched_s = inf
