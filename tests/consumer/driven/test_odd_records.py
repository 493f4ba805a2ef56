"""Records that other programs wrote, and handlers that do odd things: the loop goes on."""

from __future__ import annotations

import logging
import re

import pytest

from delaywheel.consumer import ReceivedMessage
from delaywheel.consumer.message import State
from delaywheel.consumer.records import Incoming, Partition, Place
from support.consumer.driven import DrivenConsumer, start
from support.consumer.fake_kafka import FakeKafka


@pytest.fixture
def kafka() -> FakeKafka:
    return FakeKafka(partitions=1)


def handle(consumer: DrivenConsumer) -> list[bytes | None]:
    values = []
    for _ in range(6):
        consumer.run_once()
        for message in consumer.take(10):
            values.append(message.value)
            message.done()
    return values


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("attempt", "origin"),
    [(b"-7", b"orders/0/5"), (b"2", b"orders/0/" + b"9" * 20), (b"2", b"orders/9/5")],
)
def test_a_strangers_retry_that_fails_is_retried(
    kafka: FakeKafka, ordered: bool, attempt: bytes, origin: bytes
) -> None:
    consumer = start(kafka, ordered=ordered)
    said = [("dw-retry-attempt", attempt), ("dw-retry-origin", origin)]
    whole = [*said, ("dw-retry-origin-timestamp", b"1")]
    kafka._append(Partition(kafka.retry, 0), b"k", b"v", list(whole))
    consumer.run_once()
    [message] = consumer.take()
    with message:
        raise OSError("down")
    assert message.state is State.SETTLED


def test_what_is_raised_after_an_outcome_is_logged(
    kafka: FakeKafka, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = start(kafka, retry_on=OSError)
    kafka.send(b"1")
    kafka.send(b"2")
    consumer.run_once()
    first, second = consumer.take(2)
    with caplog.at_level(logging.WARNING), first:
        first.retry(error="later")
        raise OSError("and then the line for the log failed")
    assert "was settled before" in caplog.text
    # What means no outcome is raised all the same.
    second.done()
    with pytest.raises(KeyError), second:
        raise KeyError


def test_headers_that_no_client_reads_are_a_letters_reason(kafka: FakeKafka) -> None:
    """With a route such a record was skipped, and its handler saw no headers without one."""
    consumer = start(kafka, route=["orders.#"])
    place = Place(kafka.source, 0, 0, 5)
    kafka.logs[Partition(kafka.source, 0)] = [Incoming(place, b"k", b"v", None)]
    assert handle(consumer) == []
    [letter] = kafka.committed_records
    headers = dict(letter.headers)
    assert (letter.topic, letter.key, letter.value) == (kafka.dead, b"k", b"v")
    assert headers["dw-dead-reason"] == b"HEADER_INVALID"
    assert headers["dw-dead-omitted"] == b"headers"
    assert headers["dw-dead-origin"] == b"orders/0/0"


def test_a_record_without_a_timestamp_has_not_expired(kafka: FakeKafka) -> None:
    consumer = start(kafka)
    kafka.now_ms = -1
    kafka.send(b"v", headers=[("ttl", b"3600")])
    kafka.now_ms = 1_700_000_000_000
    consumer.run_once()
    [message] = consumer.take()
    assert isinstance(message, ReceivedMessage)
    assert message.retry(after="1s")
    consumer.run_once()
    consumer.run_once()
    assert [(one.value, one.timestamp_ms) for one in consumer.take()] == [(b"v", -1)]


def test_an_empty_header_name_comes_back(kafka: FakeKafka) -> None:
    """Ingress would refuse it: the retry would leave its group."""
    consumer = start(kafka)
    kafka.send(b"v", headers=[("", b"1"), ("a", b"2")])
    consumer.run_once()
    consumer.take()[0].retry()
    sent = kafka.committed_records
    consumer.run_once()
    assert all(name for name, _ in sent[0].headers)
    consumer.run_once()
    [again] = consumer.take()
    assert (again.attempt, again.headers) == (2, [("", b"1"), ("a", b"2")])


@pytest.mark.parametrize(("name", "expires"), [("ttl", True), ("x-life", False), (None, False)])
def test_the_header_of_the_time_to_live_is_a_setting(
    kafka: FakeKafka, name: str | None, expires: bool, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = start(kafka, ttl_header=name)
    kafka.send(b"v", headers=[("ttl", b"1"), ("x-life", b"90")])
    kafka.now_ms += 60_000
    consumer.run_once()
    taken = consumer.take()
    assert len(taken) == (0 if expires else 1)
    if expires:
        assert "has expired: ttl of 1 s" in caplog.text
        return
    taken[0].retry()
    consumer.run_once()
    [sent] = kafka.committed_records
    assert "ttl" not in dict(sent.headers)  # the service may count it, from another timestamp
    assert ("x-life" in dict(sent.headers)) == (name is None)
    consumer.run_once()
    assert consumer.take()[0].headers == [("ttl", b"1"), ("x-life", b"90")]


def test_each_retry_and_each_dead_letter_is_a_line(
    kafka: FakeKafka, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = start(kafka, retry=("5s",))
    kafka.send(b"v", key=b"secret")
    for _ in range(2):
        consumer.run_once()
        consumer.run_once()
        with consumer.take()[0]:
            raise OSError("down\x1b[2J\n")
    lines = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert [one.levelno for one in lines] == [logging.WARNING, logging.ERROR]
    assert re.search(r" is retried at \d{4}-.+Z: OSError: down\\x1b\[2J\\n$", lines[0].getMessage())
    for part in ("orders/0/0 attempt=2", kafka.dead, "ATTEMPTS_EXHAUSTED"):
        assert part in lines[1].getMessage()
    # What a sender wrote may be in the error.
    assert all(one.getMessage().isprintable() for one in lines)
    assert "secret" not in caplog.text


def test_a_record_that_is_never_settled_is_a_trouble(kafka: FakeKafka) -> None:
    consumer = start(kafka, stuck_after="1s")
    kafka.send(b"v")
    consumer.run_once()
    [message] = consumer.take()
    assert trouble_of(consumer) is None
    message.block.handed_s[message.index] -= 2
    assert consumer.engine.desk.oldest_in_hand_s >= 2
    assert "orders/0/0" in (trouble_of(consumer) or "")
    message.done()
    assert (trouble_of(consumer), consumer.engine.desk.oldest_in_hand_s) == (None, 0.0)


def trouble_of(consumer: DrivenConsumer) -> str | None:
    """What the consumer says after it has looked again."""
    consumer.engine._look_at_s = 0.0
    consumer.run_once()
    return next(iter(consumer.engine.health.troubles.values()), None)
