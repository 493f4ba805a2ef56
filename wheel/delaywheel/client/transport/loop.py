"""The transport for one event loop: grpc.aio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar, cast

import grpc

from delaywheel.client.exchange.channel import CHANNEL_OPTIONS, Credentials
from delaywheel.client.exchange.exchange import CLOSED
from delaywheel.client.exchange.retry import AttemptFailure
from delaywheel.client.transport.port import ItemT, Line, Method, RequestT, ResponseT
from delaywheel.client.transport.wakeups import reading_all_wakeups
from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelStub

ReturnT = TypeVar("ReturnT")


class LoopTransport:
    """For calls that are awaited."""

    blocks: Final = False

    def __init__(self) -> None:
        self._asking: Final[set[asyncio.Task[None]]] = set()
        self._begun: Final[set[asyncio.Task[None]]] = set()
        self._aside: Final = asyncio.Semaphore(4)

    def open(self, address: str, credentials: Credentials) -> Line:
        return _LoopLine(address, credentials, self._asking)

    def news(self) -> LoopNews:
        return LoopNews()

    async def aside(self, work: Callable[[], ReturnT]) -> ReturnT:
        # The loop's own threads may all be busy with what the program has for them.
        thread = ThreadPoolExecutor(1, "delaywheel-aside")
        try:
            async with self._aside:
                return await asyncio.get_running_loop().run_in_executor(thread, work)
        finally:
            thread.shutdown(wait=False)

    async def begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="delaywheel-call")
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)

    async def side_by_side(
        self,
        work: Callable[[ItemT], Coroutine[Any, Any, ReturnT]],
        items: Sequence[ItemT],
        at_once: int,
    ) -> list[ReturnT]:
        free = asyncio.Semaphore(at_once)

        async def limited(item: ItemT) -> ReturnT:
            async with free:
                return await work(item)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(limited(item)) for item in items]
        return [task.result() for task in tasks]

    async def stop(self) -> None:
        for asking in self._asking:
            asking.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)


class LoopNews:
    """Wakes the tasks that wait, in their order, and lets none wait any more.

    Without `asyncio.timeout`: in a task that cleans up after it was cancelled that raises
    CancelledError once its time is over (before Python 3.11.3; Debian 12 has 3.11.2).
    """

    def __init__(self) -> None:
        self._is_told = False
        self._waiting: Final[dict[asyncio.Future[None], None]] = {}

    def tell(self) -> None:
        self._is_told = True
        for waiting in self._waiting:
            _end(waiting)

    async def wait(self, most_s: float) -> None:
        if self._is_told:
            return
        loop = asyncio.get_running_loop()
        waiting = loop.create_future()
        self._waiting[waiting] = None
        timer = loop.call_later(most_s, _end, waiting)
        try:
            await waiting
        finally:
            timer.cancel()
            del self._waiting[waiting]


def _end(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class _LoopLine(Line):
    def __init__(
        self, address: str, credentials: Credentials, asking: set[asyncio.Task[None]]
    ) -> None:
        super().__init__(credentials)
        with reading_all_wakeups():
            self._channel: Final = (
                grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
                if credentials.grpc is None
                else grpc.aio.secure_channel(address, credentials.grpc, CHANNEL_OPTIONS)
            )
        self._stub: Final = DelayWheelStub(self._channel)
        self._asking: Final = asking
        self._is_closed = False

    async def call(
        self, method: Method[RequestT, ResponseT], request: RequestT, timeout_s: float
    ) -> ResponseT | AttemptFailure:
        awaited = cast("grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT]", method(self._stub))
        try:
            return await awaited(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return AttemptFailure.of_call(error)
        except asyncio.CancelledError:
            # grpc.aio raises this, too, when the channel is closed under the call.
            if not self._is_closed or _cancelled_by_caller():
                raise
            return AttemptFailure(grpc.StatusCode.CANCELLED, CLOSED)
        except grpc.aio.UsageError:  # the channel was closed before
            if not self._is_closed:
                raise
            return AttemptFailure(grpc.StatusCode.CANCELLED, CLOSED, unsent=True)

    def ask(
        self,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        timeout_s: float,
        then: Callable[[ResponseT | AttemptFailure], Coroutine[Any, Any, None]],
    ) -> None:
        async def call() -> None:
            answer = await self.call(method, request, timeout_s)
            await then(answer)

        asking = asyncio.create_task(call(), name="delaywheel-look")
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)

    async def close(self) -> None:
        self._is_closed = True
        await self._channel.close()


def _cancelled_by_caller() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
