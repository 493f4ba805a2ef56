"""One interface to a RetryConsumer with Kafka and to the consumer in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeAlias

from confluent_kafka import Producer

from delaywheel.consumer import AsyncRetryConsumer, ReceivedMessage, RetryConsumer
from delaywheel.testing import MemoryConsumer, MemoryService
from support.kafka.read_committed import headers_of, read_all, wait_decided

PATIENCE_S = 60.0
GROUP = "billing"
AnyConsumer: TypeAlias = RetryConsumer | MemoryConsumer
Handler: TypeAlias = Callable[[ReceivedMessage], object]
Coroutine: TypeAlias = Callable[[ReceivedMessage], Awaitable[object]]


class Letter(NamedTuple):
    """A dead letter, without what depends on where its record lay."""

    value: bytes | None
    own: list[tuple[str, bytes | None]]
    reason: bytes | None
    attempts: bytes | None
    detail: bytes | None


class Sent(NamedTuple):
    """A record to handle."""

    value: bytes
    key: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()


class Site(Protocol):
    """Where records appear and are handled."""

    topic: str

    def consumer(self, **options: Any) -> AnyConsumer:
        """Returns a consumer of the topic, of one group."""
        ...

    def send(self, *records: Sent) -> None:
        """Has records appear, in this order."""
        ...

    def pass_time(self, seconds: float) -> None:
        """Lets so much time pass."""
        ...

    def received(self, consumer: AnyConsumer) -> ReceivedMessage | None:
        """Returns the next record to handle; None if none comes."""
        ...

    def letters(self, consumer: AnyConsumer) -> list[Letter]:
        """Returns the group's dead letters."""
        ...

    def run(self, handle: Coroutine, number: int, **options: Any) -> list[ReceivedMessage]:
        """Runs a coroutine as the handler, three at once, of so many records."""
        ...


def handled(
    site: Site, consumer: AnyConsumer, handle: Handler, number: int
) -> list[ReceivedMessage]:
    """Handles so many records; time passes while none is there."""
    seen: list[ReceivedMessage] = []
    while len(seen) < number:
        message = site.received(consumer)
        assert message is not None, seen
        with message:
            seen.append(message)
            handle(message)
    return seen


class RealSite:
    """A node, a broker and a RetryConsumer; time passes by itself."""

    def __init__(self, topic: str, kafka: str, cluster: str) -> None:
        self.topic = topic
        self._kafka = kafka
        self._cluster = cluster

    def consumer(self, **options: Any) -> RetryConsumer:
        return RetryConsumer(
            self.topic, group=GROUP, bootstrap=self._kafka, cluster=self._cluster, **options
        )

    def send(self, *records: Sent) -> None:
        producer = Producer({"bootstrap.servers": self._kafka, "enable.idempotence": True})
        for value, key, headers in records:
            producer.produce(self.topic, value, key=key, headers=list(headers))
        producer.flush()

    def pass_time(self, seconds: float) -> None:
        time.sleep(seconds)

    def received(self, consumer: AnyConsumer) -> ReceivedMessage | None:
        assert isinstance(consumer, RetryConsumer)
        return consumer.receive(PATIENCE_S)

    def letters(self, consumer: AnyConsumer) -> list[Letter]:
        assert isinstance(consumer, RetryConsumer)
        assert consumer.flush()
        dead = f"{self.topic}-dead-{GROUP}"
        wait_decided(self._kafka, dead)
        records = read_all(self._kafka, dead)
        return [_letter(record.value(), headers_of(record)) for record in records]

    def run(self, handle: Coroutine, number: int, **options: Any) -> list[ReceivedMessage]:
        seen: list[ReceivedMessage] = []

        async def run() -> None:
            made = AsyncRetryConsumer(
                self.topic, group=GROUP, bootstrap=self._kafka, cluster=self._cluster, **options
            )

            async def one(message: ReceivedMessage) -> None:
                seen.append(message)
                if len(seen) == number:
                    made.stop()
                await handle(message)

            async with made as consumer, asyncio.timeout(PATIENCE_S):
                await consumer.run(one, concurrency=3)

        asyncio.run(run())
        return seen


class MemorySite:
    """The service in memory; time passes where a test waits for a record."""

    def __init__(self, topic: str, service: MemoryService) -> None:
        self.topic = topic
        self._service = service

    def consumer(self, **options: Any) -> MemoryConsumer:
        return self._service.consumer(self.topic, group=GROUP, **options)

    def send(self, *records: Sent) -> None:
        with self._service.client() as client:
            for value, key, headers in records:
                client.produce(self.topic, value, key=key, headers=headers, delay="0s")

    def pass_time(self, seconds: float) -> None:
        self._service.advance(timedelta(seconds=seconds))

    def received(self, consumer: AnyConsumer) -> ReceivedMessage | None:
        for _ in range(600):
            message = next(iter(consumer), None)
            if message is not None:
                return message
            self._service.advance("100ms")
        return None

    def letters(self, consumer: AnyConsumer) -> list[Letter]:
        assert isinstance(consumer, MemoryConsumer)
        return [_letter(letter.value, letter.headers) for letter in consumer.dead_letters]

    def run(self, handle: Coroutine, number: int, **options: Any) -> list[ReceivedMessage]:
        seen: list[ReceivedMessage] = []

        async def one(message: ReceivedMessage) -> None:
            seen.append(message)
            await handle(message)

        async def run() -> None:
            async with self._service.async_consumer(self.topic, group=GROUP, **options) as consumer:
                for _ in range(600):
                    await consumer.run(one, concurrency=3)
                    if len(seen) >= number:
                        return
                    self._service.advance("100ms")

        asyncio.run(run())
        return seen


def _letter(value: bytes | None, headers: list[tuple[str, bytes | None]]) -> Letter:
    said = dict(headers)
    own = [pair for pair in headers if not pair[0].startswith("dw-")]
    why = (said.get(f"dw-dead-{name}") for name in ("reason", "attempts", "detail"))
    return Letter(value, own, *why)
