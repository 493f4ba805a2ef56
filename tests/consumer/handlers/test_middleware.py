"""Functions around handlers: one mechanism for plain ones, batches, threads and coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from delaywheel.consumer import AsyncRetryConsumer, Middleware, ReceivedMessage, RetryConsumer
from delaywheel.testing import MemoryConsumer, MemoryService
from support.consumer.running import RunningKafka

Call = Callable[[Any], Any]


def named(name: str, said: list[str]) -> Middleware:
    def around(message: Any, call_next: Call) -> Any:
        said.append(f"{name} before")
        try:
            return call_next(message)
        finally:
            said.append(f"{name} after")

    return around


def awaited(name: str, said: list[str]) -> Middleware:
    async def around(message: Any, call_next: Call) -> Any:
        said.append(f"{name} before")
        await asyncio.sleep(0)
        try:
            return await call_next(message)
        finally:
            said.append(f"{name} after")

    return around


def consumer(service: MemoryService, *middleware: Middleware) -> MemoryConsumer:
    with service.client() as client:
        client.produce("orders", b"v", delay="0s")
    return service.consumer("orders", group="g", retry=("1s",), middleware=middleware)


EXPECTED = ["a before", "b before", "handled", "b after", "a after"]


@pytest.mark.parametrize("way", ["run", "run_batches"])
def test_the_first_is_the_outermost_and_its_exceptions_count(way: str) -> None:
    said: list[str] = []

    def handle(_: object) -> None:
        said.append("handled")
        raise OSError("down")

    with MemoryService() as service:
        consuming = consumer(service, named("a", said), named("b", said))
        getattr(consuming, way)(handle)
        assert said == EXPECTED
        assert consuming.counts.retried == 1


def test_around_coroutines_it_is_awaited() -> None:
    said: list[str] = []

    async def handle(_: object) -> None:
        said.append("handled")
        raise OSError("down")

    async def run() -> None:
        with MemoryService() as service:
            with service.client() as client:
                client.produce("orders", b"v", delay="0s")
            around = awaited("a", said), awaited("b", said)
            consuming = service.async_consumer("orders", group="g", middleware=around)
            await consuming.run(handle)
            assert consuming.counts.retried == 1

    asyncio.run(run())
    assert said == EXPECTED


def test_what_it_does_not_pass_on_is_done() -> None:
    with MemoryService() as service:
        consuming = consumer(service, lambda _, __: None)
        consuming.run(fails)
        assert consuming.counts.done == 1


def nothing(_: object) -> None:
    pass


def fails(_: object) -> None:
    raise AssertionError("it was handled")


@pytest.mark.parametrize(
    ("kind", "middleware"), [(RetryConsumer, awaited), (AsyncRetryConsumer, named)]
)
def test_the_wrong_kind_is_refused_at_once(kind: Any, middleware: Any) -> None:
    with pytest.raises(TypeError, match="function is needed around these handlers"):
        kind("orders", group="g", bootstrap="nowhere", middleware=[middleware("a", [])])


def test_each_topic_has_its_handler_also_by_pattern_and_for_retries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[tuple[str, str, int]] = []

    def of(name: str) -> Call:
        def handle(message: ReceivedMessage) -> None:
            said.append((name, message.topic, message.attempt))
            if message.attempt == 1:
                raise OSError("down")

        return handle

    async def awaited_one(message: ReceivedMessage) -> None:
        of("awaited")(message)

    handlers = {"orders": of("orders"), "^bill.*": of("bills")}
    options: dict[str, Any] = {"retry": ("1s",)}
    with MemoryService(topics=["orders", "bills"]) as service, service.client() as client:
        consuming = service.consumer(["orders", "^bill.*"], group="g", **options)
        another = service.async_consumer("orders", group="h", **options)
        for topic in ("orders", "bills"):
            client.produce(topic, b"v", delay="0s")
        consuming.run(handlers)
        service.advance("1s")
        consuming.run(handlers)
        assert sorted(said) == sorted(
            (name, name, attempt) for name in ("orders", "bills") for attempt in (1, 2)
        )
        said.clear()
        for _ in range(2):
            asyncio.run(another.run({"orders": awaited_one}))
            service.advance("1s")
        assert said == [("awaited", "orders", 1), ("awaited", "orders", 2)]
        with pytest.raises(ValueError, match=r"\^bill\.\*, bills: one"):
            consuming.run({"orders": of("orders"), "bills": of("bills")})
    real = RetryConsumer(["orders", "^bill.*"], group="g", bootstrap="nowhere")
    with pytest.raises(ValueError, match=r"\^bill.*: one for each topic"):
        real.run({"orders": of("orders")})
    kafka = RunningKafka(monkeypatch)
    kafka.put(b"v")
    with RetryConsumer("orders", group="g", bootstrap="nowhere") as running:
        running.run({"orders": lambda _: running.stop()})
    assert running.counts.done == 1
