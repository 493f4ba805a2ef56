"""Handlers that fail, by the consumer in memory: the outcomes of a RetryConsumer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delaywheel import Client
from delaywheel.consumer.message import Outcome, ReceivedMessage, SettledError
from delaywheel.testing import MemoryConsumer, MemoryService


@pytest.fixture
def service() -> Iterator[MemoryService]:
    with MemoryService() as running:
        yield running


@pytest.fixture
def client(service: MemoryService) -> Iterator[Client]:
    with service.client() as made:
        yield made


def handled(consumer: MemoryConsumer, failing: BaseException | None) -> list[ReceivedMessage]:
    messages = []
    for message in consumer:
        with message:
            messages.append(message)
            if failing is not None:
                raise failing
    return messages


def test_what_fails_comes_back_until_it_is_dead(service: MemoryService, client: Client) -> None:
    consumer = service.consumer("orders", group="billing", retry=("1s", "2s"))
    client.produce("orders", b"v", key=b"k", headers={"a": b"1"}, delay="5s")
    assert not handled(consumer, None)
    service.advance("5s")
    error = ConnectionError("the bank does not answer")
    (first,) = handled(consumer, error)
    assert (first.attempt, first.topic, first.headers) == (1, "orders", [("a", b"1")])
    assert not service.advance("999ms")
    assert len(service.advance("1ms")) == 1
    (second,) = handled(consumer, error)
    assert (second.attempt, second.origin, second.key) == (2, first.place, b"k")
    assert second.headers == [("a", b"1")]
    assert second.last_error == "ConnectionError: the bank does not answer"
    service.advance("2s")
    assert handled(consumer, error)[0].attempt == 3
    (letter,) = consumer.dead_letters
    assert (letter.topic, letter.value) == ("orders-dead-billing", b"v")
    assert dict(letter.headers)["dw-dead-reason"] == b"ATTEMPTS_EXHAUSTED"
    assert dict(letter.headers)["dw-dead-topic"] == b"orders-retry-billing"
    assert consumer.counts == {Outcome.RETRIED: 2, Outcome.DEAD: 1}
    service.advance("7d")
    assert not handled(consumer, None)


def test_exceptions_and_calls_decide(service: MemoryService, client: Client) -> None:
    consumer = service.consumer(
        "orders", group="g", retry=("1s",), retry_on=OSError, dead_on=(ValueError,), route=["eu.#"]
    )
    for value, routed in ((b"bad", b"eu.x"), (b"skipped", b"us"), (b"later", b"eu")):
        client.produce("orders", value, headers={"routingkey": routed}, delay="1s")
    service.advance("1s")
    messages = iter(consumer)
    with next(messages):
        raise ValueError("no such article")
    later = next(messages)
    assert later.value == b"later"
    assert later.retry(after="3h")
    with pytest.raises(SettledError):
        later.done()
    assert not list(messages)
    reasons = [dict(letter.headers)["dw-dead-reason"] for letter in consumer.dead_letters]
    assert reasons == [b"NOT_RETRIABLE"]
    assert consumer.counts[Outcome.SKIPPED] == 1
    service.advance("3h")
    with pytest.raises(KeyError), next(iter(consumer)):
        raise KeyError("neither")
    with pytest.raises(ValueError, match="ordered"):
        service.consumer("orders", group="g", ordered=True)
