"""A function of the wrong kind never runs: nothing is done, retried or dead for that."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest

from delaywheel.consumer import (
    AskedHalf,
    AsyncHalfChecker,
    AsyncRetryConsumer,
    CircuitBreaker,
    ConsumerEvents,
    Counts,
    FunctionKindError,
    HalfChecker,
    RetryConsumer,
)
from delaywheel.deadletters import DROP, AsyncDeadLetterConsumer, DeadLetterConsumer, Decision
from delaywheel.testing import MemoryConsumer, MemoryService
from delaywheel.transactions import HalfVerdict
from support.consumer.running import RunningKafka

Outcomes = Callable[[Counts], tuple[int, ...]]


@pytest.fixture(autouse=True)
def no_coroutine_is_left() -> Iterator[None]:
    """A coroutine that nobody awaits is closed where it is found."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
        gc.collect()


async def coroutine(*_: object) -> None:
    raise AssertionError("nobody awaits this")


def plain(*_: object) -> None:
    pass


def yielding(*_: object) -> Iterator[None]:
    yield None


class Called:
    async def __call__(self, *_: object) -> None:
        raise AssertionError("nobody awaits this")


def settled(counts: Counts) -> tuple[int, ...]:
    return counts.done, counts.retried, counts.dead, counts.skipped, counts.expired


def in_memory(service: MemoryService, **options: Any) -> MemoryConsumer:
    send(service)
    return service.consumer("orders", group="g", retry=("1s",), **options)


def send(service: MemoryService) -> None:
    with service.client() as client:
        client.produce("orders", b"v", delay="0s")


WAYS = ["run", "run_batches"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("handle", [coroutine, Called(), yielding])
def test_a_handler_that_would_not_run_is_refused(way: str, handle: Any) -> None:
    consumer = RetryConsumer("orders", group="g", bootstrap="nowhere")
    with pytest.raises(TypeError, match=r"handle=.*(coroutine function|yield)"):
        getattr(consumer, way)(handle)


@pytest.mark.parametrize("way", WAYS)
def test_a_plain_handler_is_refused_where_it_would_be_awaited(way: str) -> None:
    consumer = AsyncRetryConsumer("orders", group="g", bootstrap="nowhere")
    with pytest.raises(TypeError, match="not a coroutine function"):
        asyncio.run(getattr(consumer, way)(plain))


RETURNED: list[Callable[..., object]] = [
    lambda *given: coroutine(*given),  # noqa: PLW0108 - that is the mistake
    lambda *_: Future[None](),
    lambda *given: yielding(*given),  # noqa: PLW0108
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("handle", RETURNED)
def test_a_handler_that_returns_what_is_to_run_is_no_outcome(
    monkeypatch: pytest.MonkeyPatch, way: str, handle: Any
) -> None:
    kafka = RunningKafka(monkeypatch)
    kafka.put(b"v")
    consumer = RetryConsumer("orders", group="g", bootstrap="-", retry_on=TypeError, drain="0s")
    with pytest.raises(FunctionKindError, match="returned"), consumer:
        getattr(consumer, way)(handle)
    assert settled(consumer.counts) == (0, 0, 0, 0, 0)
    with MemoryService() as service:
        double = in_memory(service)
        with pytest.raises(FunctionKindError, match="returned"):
            getattr(double, way)(handle)
        assert settled(double.counts) == (0, 0, 0, 0, 0)


async def hands_on(*given: object) -> object:
    return coroutine(*given)


async def forgets_to_await(message: object, call_next: Callable[[object], Any]) -> None:
    call_next(message)


async def awaits(_: object) -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("handle", "middleware"), [(hands_on, []), (awaits, [forgets_to_await]), (awaits, [hands_on])]
)
def test_a_coroutine_that_ends_before_its_work_is_no_outcome(
    monkeypatch: pytest.MonkeyPatch, way: str, handle: Any, middleware: Any
) -> None:
    kafka = RunningKafka(monkeypatch)
    kafka.put(b"v")

    async def run() -> Counts:
        consumer = AsyncRetryConsumer(
            "orders", group="g", bootstrap="-", middleware=middleware, drain="0s"
        )
        with pytest.raises(FunctionKindError):
            async with consumer:
                await getattr(consumer, way)(handle)
        return consumer.counts

    assert settled(asyncio.run(run())) == (0, 0, 0, 0, 0)
    with MemoryService() as service:
        send(service)
        double = service.async_consumer("orders", group="g", middleware=middleware)
        with pytest.raises(FunctionKindError):
            asyncio.run(getattr(double, way)(handle))
        assert settled(double.counts) == (0, 0, 0, 0, 0)


def test_a_middleware_that_drops_what_it_was_given_is_found() -> None:
    def drops(message: object, call_next: Callable[[object], Any]) -> None:
        call_next(message)

    with MemoryService() as service:
        double = in_memory(service, middleware=[drops])
        with pytest.raises(FunctionKindError):
            double.run(lambda message: coroutine(message))  # noqa: PLW0108
        assert double.counts.done == 0


class Telling(ConsumerEvents):
    async def retried(self, *_: object) -> None:  # type: ignore[override]
        raise AssertionError("nobody awaits this")


@pytest.mark.parametrize(
    "option",
    [
        {"value_deserializer": coroutine},
        {"key_deserializer": Called()},
        {"retry": coroutine},
        {"retry_by": {OSError: coroutine}},
        {"events": Telling()},
        {"middleware": [yielding]},
    ],
    ids=lambda option: next(iter(option)),
)
def test_an_option_that_would_not_run_is_refused(option: Any) -> None:
    with pytest.raises(TypeError, match=r"coroutine function|yield"):
        RetryConsumer("orders", group="g", bootstrap="nowhere", **option)
    with MemoryService() as service, pytest.raises(TypeError, match=r"coroutine function|yield"):
        service.consumer("orders", group="g", **option).run(plain)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"breaker": 5}, "breaker must be a CircuitBreaker, not int"),
        ({"breaker": CircuitBreaker}, "breaker must be a CircuitBreaker, not type"),
        ({"events": plain}, "events must be a ConsumerEvents, not function"),
        ({"retry_topic": "again"}, "retry_topic must be a GroupTopic, not str"),
        ({"dead_topic": "dead"}, "dead_topic must be a GroupTopic, not str"),
        ({"order_topic": "order"}, "order_topic must be a GroupTopic, not str"),
        ({"kafka": "localhost:9092"}, "kafka must be a Mapping, not str"),
        ({"retry_by": ("5s",)}, "retry_by must be a Mapping, not tuple"),
        ({"middleware": plain}, "middleware must be a Sequence, not function"),
        ({"retry": 5}, "retry=5: give a list of delays, such as "),
        ({"retry_on": 5}, "5 is not an exception class"),
        ({"route": 5}, "give a list of patterns, such as "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_of_another_kind_is_refused_with_what_to_give(option: Any, says: str) -> None:
    for kind in (RetryConsumer, AsyncRetryConsumer):
        with pytest.raises((TypeError, ValueError), match=says):
            kind("orders", group="g", bootstrap="nowhere", **option)
    with MemoryService() as service:
        for make in (service.consumer, service.async_consumer):
            with pytest.raises((TypeError, ValueError), match=says):
                make("orders", group="g", **option)


def test_a_deserializer_that_returns_a_coroutine_makes_no_dead_letter() -> None:
    with MemoryService() as service:
        double = in_memory(service, value_deserializer=lambda *given: coroutine(*given))  # noqa: PLW0108
        with pytest.raises(FunctionKindError):
            double.run(lambda message: message.data)
        with pytest.raises(FunctionKindError):
            in_memory(service, value_deserializer=lambda *given: coroutine(*given)).run_batches(  # noqa: PLW0108
                lambda batch: [message.data for message in batch]
            )
        assert settled(double.counts) == (0, 0, 0, 0, 0)
        assert double.dead_letters == []


def test_what_is_called_for_a_lost_record_is_plain() -> None:
    with MemoryService() as service:
        for message in in_memory(service):
            with message, pytest.raises(TypeError, match="on_lost"):
                message.on_lost(coroutine)  # type: ignore[arg-type]


def test_checks_are_of_the_kind_of_their_checker() -> None:
    class Awaited(HalfChecker):
        async def check(self, half: AskedHalf) -> HalfVerdict:  # type: ignore[override]
            raise NotImplementedError

    class Plain(AsyncHalfChecker):
        def check(self, half: AskedHalf) -> HalfVerdict:  # type: ignore[override]
            raise NotImplementedError

    class Returning(HalfChecker):
        def check(self, half: AskedHalf) -> HalfVerdict:
            return coroutine(half)  # type: ignore[return-value]

    for kind in (Awaited, Plain):
        with pytest.raises(TypeError, match="check="):
            kind(group="g", bootstrap="-", cluster="c")
    with MemoryService() as service, service.client() as client:
        checks = service.half_checker(Returning(group="g", bootstrap="-", cluster="c"))
        client.begin("orders", b"v", group="g", hold="1s")
        service.advance("1s")
        with pytest.raises(FunctionKindError):
            checks.run()
        assert settled(checks.counts) == (0, 0, 0, 0, 0)


def test_handlers_of_letters_are_of_the_kind_of_their_consumer() -> None:
    def plainly(_: object) -> Decision:
        return DROP

    async def awaited(_: object) -> Decision:
        return DROP

    for kind, wrong in ((DeadLetterConsumer, awaited), (AsyncDeadLetterConsumer, plainly)):
        with pytest.raises(TypeError, match="coroutine function"):
            kind("orders-dead-g", {"bootstrap.servers": "-"}, {}, otherwise=wrong)  # type: ignore[arg-type]
    with MemoryService() as service:
        consumer = in_memory(service)
        for message in consumer:
            message.dead("WRONG")
        with pytest.raises(TypeError, match="others are"):
            service.dead_letter_consumer(consumer, {"A": awaited, "B": plainly})
        mistakes: list[Any] = [lambda letter: coroutine(letter), lambda _: True]  # noqa: PLW0108
        for mistake in mistakes:
            letters = service.dead_letter_consumer(consumer, {}, otherwise=mistake)
            with pytest.raises(TypeError, match="returned"):
                letters.run()
            assert letters.decided == []


def test_a_callback_of_a_pending_result_is_plain() -> None:
    with MemoryService() as service, service.client() as client:
        pending = client.produce_async("orders", b"v", delay="1s")
        with pytest.raises(TypeError, match="callback="):
            pending.add_done_callback(coroutine)
        with suppress(TimeoutError):
            pending.result(30.0)
