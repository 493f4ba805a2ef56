"""The background of `AsyncClient.produce_async`: a bounded queue and the tasks that send."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from time import monotonic
from typing import Final

from delaywheel.client.exchange.batching import Accumulator
from delaywheel.client.exchange.pending import PendingResult, SendBatch
from delaywheel.client.exchange.settings import Queue
from delaywheel.client.lifetime import FLUSHED_AT_EXIT
from delaywheel.client.transport.loop import LoopNews
from delaywheel.errors import ClientClosedError
from delaywheel.message import Message, Result

_EARLIER_S: Final = 0.001
"""Timers are not rescheduled for differences below this."""
_AGAIN_S: Final = 1.0
"""When a batch is sent whose task was cancelled: later than a loop needs to end, if that is why."""

DeliverAsync = Callable[[Sequence[Message], float], Awaitable[Sequence[Result]]]


class AioSender:
    """Takes messages in its event loop; at most `queue.in_flight` tasks deliver them in batches.

    Only `_pump` starts tasks. It runs whenever something may have changed: a message came, a caller
    waits, a batch was settled, the linger is over. A program that ends may cancel all tasks there
    are, as `asyncio.run` does, these among them: what they have not sent `close` sends.
    """

    def __init__(self, queue: Queue, timeout_s: float, deliver: DeliverAsync) -> None:
        self._deliver: Final = deliver
        self._gathered: Final = Accumulator(queue, timeout_s, self._expedite_threadsafe)
        self._news = LoopNews()  # of the next batch that is settled, or that the client is closed
        self._tasks: Final[set[asyncio.Task[None]]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # known once there is a message
        self._closed = False

    async def put(self, message: Message, deadline_s: float) -> PendingResult:
        """Queues a message, once there is room; if that raises TimedOutError, it is not queued."""
        if not self._has_room(message) and not await self._until(
            lambda: self._has_room(message), deadline_s
        ):
            raise self._gathered.full(message)
        if self._closed:
            raise ClientClosedError(failed=message)
        if self._loop is None:
            self._loop = self._gathered.loop = asyncio.get_running_loop()
            FLUSHED_AT_EXIT.add(self)
        pending = self._gathered.add(message, monotonic(), deadline_s)
        self._pump()
        if pending.first:  # otherwise a loop that only puts would keep the tasks from starting
            await asyncio.sleep(0)
        return pending

    async def flush(self, deadline_s: float) -> bool:
        """Waits until all earlier messages are settled; False on timeout."""
        before = self._gathered.unsettled()
        return await self._until(lambda: before.isdisjoint(self._gathered.unsettled()), deadline_s)

    def flush_at_exit(self) -> set[SendBatch]:
        """Returns the batches that are unsettled: without the loop nothing is sent."""
        return self._gathered.unsettled()

    async def close(self) -> None:
        """Accepts no further messages."""
        self._closed = True
        self._tell()

    async def join(self) -> None:
        """Waits until everything is settled."""
        await self._until(lambda: not self._gathered.messages, float("inf"))

    def _has_room(self, message: Message) -> bool:
        return self._closed or self._gathered.has_room(message.length_bytes)

    async def _until(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        """Waits for a batch to be settled; False if the deadline came first."""
        self._gathered.expedite(None, monotonic())
        while not condition():
            news = self._news
            self._pump()
            left_s = deadline_s - monotonic()
            if left_s <= 0:
                return False
            await news.wait(left_s)
        return True

    def _tell(self) -> None:
        told, self._news = self._news, LoopNews()
        told.tell()

    def _expedite_threadsafe(self, batch: SendBatch) -> None:
        """Results may be waited for on other threads, and in other loops."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._expedite, batch)

    def _expedite(self, batch: SendBatch) -> None:
        if self._gathered.expedite(batch, monotonic()):
            self._pump()

    def _pump(self) -> None:
        now_s = monotonic()
        while (batch := self._gathered.next_batch(now_s)) is not None:
            task = asyncio.create_task(self._send(batch), name="delaywheel-sender")
            self._tasks.add(task)
            task.add_done_callback(partial(self._sent, batch))
        wait_s = self._gathered.wait_s(now_s)
        if wait_s is not None:
            self._wake_by(asyncio.get_running_loop(), wait_s)

    def _wake_by(self, loop: asyncio.AbstractEventLoop, wait_s: float) -> None:
        at_s = loop.time() + wait_s
        if self._timer is not None:
            if at_s > self._timer.when() - _EARLIER_S:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at_s, self._lingered)

    def _lingered(self) -> None:
        self._timer = None
        self._pump()

    def _sent(self, batch: SendBatch, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self._gathered.put_back(batch)
            self._tell()
            self._wake_by(asyncio.get_running_loop(), _AGAIN_S)

    async def _send(self, batch: SendBatch) -> None:
        try:
            batch.settle(await self._deliver(batch.messages, batch.deadline_s))
        except Exception as defect:  # noqa: BLE001  it must reach waiting callers
            batch.settle_defective(defect)
        self._gathered.finished(batch)
        self._pump()
        self._tell()
