"""Consumers for an asyncio loop: a loop over messages or batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from typing import Self, TypeVar, Unpack

from delaywheel.consumer.batch import Batch
from delaywheel.consumer.engine.handler_threads import WAIT_S
from delaywheel.consumer.message import HandlerCancelledError, ReceivedMessage
from delaywheel.consumer.records import Partition
from delaywheel.consumer.rules.middleware import (
    HandlersByTopic,
    check_middleware,
    check_topics,
    wrapped_awaited,
)
from delaywheel.consumer.settings import ConsumerSettings, Options, read_settings
from delaywheel.consumer.sync import BaseConsumer
from delaywheel.levels import Duration, length_ms

_T = TypeVar("_T")
_LOG = logging.getLogger("delaywheel.consumer")


async def await_handler(handle: Callable[[_T], Awaitable[object]], given: _T) -> None:
    """Awaits a handler of a message, or batch, in its own task, and raises what it raised.

    A cancellation that is not of the task but of something that the handler awaited is raised as
    HandlerCancelledError.
    """
    try:
        await handle(given)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise HandlerCancelledError("the handler awaited what was cancelled elsewhere") from error


@asynccontextmanager
async def handler_tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """Has a group for the tasks of handlers; what one raises ends the others, and is raised.

    What others raised beside it is logged.
    """
    raised: Sequence[BaseException] = ()
    try:
        async with asyncio.TaskGroup() as handlers:
            yield handlers
    except BaseExceptionGroup as group:
        raised = group.exceptions
    for other in raised[1:]:
        _LOG.error("another handler has raised, too", exc_info=other)
    if raised:
        raise raised[0]


class AwaitedConsumer(BaseConsumer):
    """The common part of consumers for the coroutines of one loop."""

    def __init__(self, settings: ConsumerSettings) -> None:
        super().__init__(settings)
        self._ready = asyncio.Event()
        self._engine.desk.cancel_s = 1.0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            # The loop may be closed before the thread has ended.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._ready.set)

        self._engine.listen(wake)
        self._engine.start()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._engine.stop()
        join = self._engine.join if error is None else self._engine.join_quietly
        await asyncio.shield(asyncio.to_thread(join))

    async def flush(self, timeout_s: float = 30.0) -> bool:
        """See `RetryConsumer.flush`."""
        return await asyncio.to_thread(self._engine.desk.flush, timeout_s)

    async def _received(self, take: Callable[[], _T], timeout_s: float | None) -> _T:
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while True:
            self._ready.clear()
            found = take()
            left_s = WAIT_S if deadline is None else deadline - loop.time()
            if found or left_s <= 0 or self._engine.has_ended:
                return found
            self._engine.check_runs()
            # Not `asyncio.timeout`: see `LoopNews`.
            timer = loop.call_later(min(left_s, WAIT_S), self._ready.set)
            try:
                await self._ready.wait()
            finally:
                timer.cancel()

    async def _run(
        self, handle: Callable[[ReceivedMessage], Awaitable[object]], concurrency: int
    ) -> None:
        """Handles each message within `async with`, up to `concurrency` at once, until `stop`."""
        if concurrency < 1:
            raise ValueError(f"concurrency={concurrency}: at least 1")
        desk, free, freed = self._engine.desk, concurrency, asyncio.Event()
        timeout_ms = self.settings.handler_timeout_ms

        async def limited(message: ReceivedMessage) -> None:
            assert timeout_ms is not None
            limit = asyncio.timeout(timeout_ms / 1000)
            try:
                async with limit:
                    await await_handler(handle, message)
            except TimeoutError as raised:
                if not limit.expired():
                    raise
                desk.time_out(message, raised)

        call = partial(await_handler, handle) if timeout_ms is None else limited

        async def one(message: ReceivedMessage) -> None:
            async with message:
                await call(message)

        def ended(message: ReceivedMessage, task: asyncio.Task[None]) -> None:
            nonlocal free
            self._end(message, task)
            free += 1
            freed.set()

        try:
            async with handler_tasks() as handlers:
                while not self._engine.has_ended:
                    if not free:
                        freed.clear()
                        await freed.wait()
                    take = partial(desk.take_turns, free)
                    for message in await self._received(take, WAIT_S):
                        free -= 1
                        task = handlers.create_task(one(message))
                        task.add_done_callback(partial(ended, message))
        finally:
            desk.end_parking()

    def _end(self, message: ReceivedMessage, task: asyncio.Task[None]) -> None:
        self._engine.desk.end_turn(message)
        if task.cancelled() and not message.has_returned:  # it never began
            self._engine.desk.hand_back([message])


class AsyncRetryConsumer(AwaitedConsumer):
    """`RetryConsumer` for the coroutines of one loop: `async for`, `async with`.

    Messages may be settled in any order, from any coroutine or thread.

    Example:
        Fifty at a time::

            async with AsyncRetryConsumer("orders", group="billing",
                                          bootstrap="localhost:9092") as consumer:
                await consumer.run(charge, concurrency=50)
    """

    def __init__(
        self,
        topics: str | Iterable[str],
        *,
        group: str,
        bootstrap: str,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(read_settings(topics, group, bootstrap, options))
        check_middleware(self.settings.middleware, is_awaited=True)

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        """Yields messages until `stop`."""
        while True:
            message = await self.receive(WAIT_S)
            if message is not None:
                yield message
            elif self._engine.has_ended:
                return

    async def batches(self, most: int = 100, *, wait: Duration = "100ms") -> AsyncIterator[Batch]:
        """See `RetryConsumer.batches`."""
        loop, wait_s = asyncio.get_running_loop(), length_ms(wait) / 1000
        while True:
            batch = await self.receive_batch(most, WAIT_S)
            deadline = loop.time() + wait_s
            with self._giving_back(batch):
                while batch and len(batch) < most and not self._engine.has_ended:
                    left_s = deadline - loop.time()
                    if left_s <= 0:
                        break
                    batch.take((await self.receive_batch(most - len(batch), left_s)).runs)
            batch.drop_unreadable()
            if batch:
                yield batch
            elif self._engine.has_ended:
                return

    async def run_batches(
        self,
        handle: Callable[[Batch], Awaitable[object]],
        most: int = 100,
        *,
        wait: Duration = "100ms",
    ) -> None:
        """See `RetryConsumer.run_batches`."""
        called = wrapped_awaited(handle, self.settings.middleware)
        async for batch in self.batches(most, wait=wait):
            async with batch:
                await await_handler(called, batch)

    async def run(
        self,
        handle: Callable[[ReceivedMessage], Awaitable[object]] | HandlersByTopic,
        *,
        concurrency: int = 1,
    ) -> None:
        """Handles each message within `async with`, up to `concurrency` at once, until `stop`.

        Records of one key are handled one after another, in their order. `handle` is a coroutine
        function, or one for each topic, or pattern, that was given. An exception from a handler
        that means neither retry nor dead is raised: the other handlers are cancelled, and their
        messages delivered again.
        """
        check_topics(handle, self.settings.topics.given)
        await self._run(wrapped_awaited(handle, self.settings.middleware), concurrency)

    async def receive(self, timeout_s: float | None = None) -> ReceivedMessage | None:
        """Returns the next message; None if none came in time, or none will come."""
        return await self._received(self._engine.desk.hand_out_one, timeout_s)

    async def receive_batch(self, most: int, timeout_s: float | None = None) -> Batch:
        """Returns available messages, as soon as there are any, up to this number."""
        return await self._received(lambda: self._engine.desk.hand_out(most), timeout_s)

    async def seek(self, partition: Partition, to: int | datetime) -> None:
        """See `RetryConsumer.seek`."""
        await asyncio.to_thread(self._engine.seek, partition, to)
