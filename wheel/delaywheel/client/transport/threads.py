"""The transport for threads: synchronous gRPC. Its coroutines block, and never suspend."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, Final, TypeVar, cast

import grpc

from delaywheel.client.exchange.channel import Credentials, open_channel
from delaywheel.client.exchange.exchange import CLOSED
from delaywheel.client.exchange.retry import AttemptFailure, EndedCall
from delaywheel.client.transport.port import ItemT, Line, Method, RequestT, ResponseT, finished
from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelStub

ReturnT = TypeVar("ReturnT")


class ThreadTransport:
    """For calls that block their threads."""

    blocks: Final = True

    def open(self, address: str, credentials: Credentials) -> Line:
        return _ThreadLine(address, credentials)

    def news(self) -> _ThreadNews:
        return _ThreadNews()

    async def aside(self, work: Callable[[], ReturnT]) -> ReturnT:
        return work()

    async def begin(self, work: Coroutine[Any, Any, None]) -> None:
        await work

    async def side_by_side(
        self,
        work: Callable[[ItemT], Coroutine[Any, Any, ReturnT]],
        items: Sequence[ItemT],
        at_once: int,
    ) -> list[ReturnT]:
        if len(items) <= 1:
            return [await work(item) for item in items]
        with ThreadPoolExecutor(min(at_once, len(items))) as pool:
            return [*pool.map(lambda item: finished(work(item)), items)]

    async def stop(self) -> None:
        """Does nothing: closed channels end everything."""


class _ThreadNews:
    def __init__(self) -> None:
        self._told: Final = Event()

    def tell(self) -> None:
        self._told.set()

    async def wait(self, most_s: float) -> None:
        self._told.wait(most_s)


class _ThreadLine(Line):
    def __init__(self, address: str, credentials: Credentials) -> None:
        super().__init__(credentials)
        self._channel: Final = open_channel(address, credentials)
        self._stub: Final = DelayWheelStub(self._channel)
        self._is_closed = False

    async def call(
        self, method: Method[RequestT, ResponseT], request: RequestT, timeout_s: float
    ) -> ResponseT | AttemptFailure:
        try:
            return method(self._stub)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            # A stub raises the call itself, which the types do not say.
            return AttemptFailure.of_call(cast("EndedCall", error))
        except ValueError:  # the channel was closed before
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
        def ended(call: grpc.Future[ResponseT]) -> None:
            status = cast("EndedCall", call)  # which it is, too
            is_ok = status.code() is grpc.StatusCode.OK
            finished(then(call.result() if is_ok else AttemptFailure.of_call(status)))

        try:
            call = method(self._stub).future(request, timeout=timeout_s)
        except ValueError:
            if not self._is_closed:
                raise
        except RuntimeError as error:  # no thread begins when a program ends, says Python 3.12
            finished(then(AttemptFailure(grpc.StatusCode.CANCELLED, str(error))))
        else:
            call.add_done_callback(ended)

    async def close(self) -> None:
        self._is_closed = True
        self._channel.close()
