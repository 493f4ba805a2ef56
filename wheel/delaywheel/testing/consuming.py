"""Consumers of the service in memory: the real ones, with an engine that needs no Kafka."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Self

from delaywheel.consumer.aio import AsyncRetryConsumer, AwaitedConsumer
from delaywheel.consumer.message import ReceivedMessage
from delaywheel.consumer.rules.middleware import HandlersByTopic, check_middleware
from delaywheel.consumer.settings import ConsumerSettings
from delaywheel.consumer.sync import BaseConsumer, RetryConsumer, ThreadedConsumer
from delaywheel.testing.engine import MemoryEngine
from delaywheel.transactional import Outgoing

if TYPE_CHECKING:
    from delaywheel.testing.service import MemoryService


class _InMemory(BaseConsumer):
    _service: MemoryService
    _engine: MemoryEngine

    def _made_engine(self, settings: ConsumerSettings) -> MemoryEngine:
        return MemoryEngine(self._service, settings)

    def _begin_again(self) -> None:
        """A further `with` block goes on where the group is, as the program's next process."""
        if self._engine.is_over:
            self._engine = self._engine.again()

    @property
    def dead_letters(self) -> list[Outgoing]:
        """The letters, as they are in the group's topics for them."""
        return self._engine.written(dead=True)

    @property
    def produced(self) -> list[Outgoing]:
        """What handlers have written beside outcomes, without what is delivered later."""
        return self._engine.written(dead=False)


class MemoryConsumer(_InMemory, RetryConsumer):
    """`RetryConsumer` in memory: its loops end where it would wait.

    It runs from the beginning, without a `with` block, until one is left. A further block is as the
    program's next process: it goes on where the group is, and counts anew.
    """

    def __init__(self, service: MemoryService, settings: ConsumerSettings) -> None:
        self._service = service
        ThreadedConsumer.__init__(self, settings)
        check_middleware(settings.middleware, is_awaited=False)

    def __enter__(self) -> Self:
        """See `RetryConsumer`."""
        self._begin_again()
        return super().__enter__()


class AsyncMemoryConsumer(_InMemory, AsyncRetryConsumer):
    """`AsyncRetryConsumer` in memory, otherwise as `MemoryConsumer`."""

    def __init__(self, service: MemoryService, settings: ConsumerSettings) -> None:
        self._service = service
        AwaitedConsumer.__init__(self, settings)
        check_middleware(settings.middleware, is_awaited=True)
        self._engine.listen(self._ready.set)

    async def __aenter__(self) -> Self:
        """See `AsyncRetryConsumer`."""
        cancel_s = self._engine.desk.cancel_s
        self._begin_again()
        self._engine.desk.cancel_s = cancel_s
        return await super().__aenter__()

    async def run(
        self,
        handle: Callable[[ReceivedMessage], Awaitable[object]] | HandlersByTopic,
        *,
        concurrency: int = 1,
    ) -> None:
        """See `AsyncRetryConsumer.run`."""
        await super().run(handle, concurrency=concurrency)
        while not self._engine.has_ended:  # the next ones of keys that were handled
            await super().run(handle, concurrency=concurrency)
