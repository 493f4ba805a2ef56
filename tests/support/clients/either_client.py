"""One interface to both clients, so that a test runs against each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from threading import Thread
from typing import Any, Protocol, Self, TypeVar

from delaywheel import AsyncClient, Cancelled, Client, Handle
from delaywheel.client.exchange.answers import StoredMessage
from delaywheel.client.exchange.endpoints import Endpoints

ResultT = TypeVar("ResultT")


class EitherClient(Protocol):
    """What the tests use."""

    @property
    def endpoints(self) -> Endpoints: ...
    @property
    def lines(self) -> set[str]: ...
    def produce(self, topic: str, value: bytes, **options: Any) -> Handle: ...
    def cancel(self, handle: Handle, **options: Any) -> Cancelled: ...
    def get(self, handle: Handle, **options: Any) -> StoredMessage | None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


class SyncClient(Client):
    """The client for threads."""

    @property
    def endpoints(self) -> Endpoints:
        return self._calls._endpoints

    @property
    def lines(self) -> set[str]:
        return set(self._calls._lines)


class LoopClient:
    """The client for asyncio, called like that for threads; its loop has a thread of its own."""

    def __init__(self, addresses: str | list[str], **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever)
        self._thread.start()

        async def make() -> AsyncClient:
            return AsyncClient(addresses, **options)

        self._client = self._do(make())

    @property
    def endpoints(self) -> Endpoints:
        return self._client._calls._endpoints

    @property
    def lines(self) -> set[str]:
        return set(self._client._calls._lines)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def call(*arguments: Any, **options: Any) -> Any:
            return self._do(method(*arguments, **options))

        return call

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


Make = Callable[..., EitherClient]
