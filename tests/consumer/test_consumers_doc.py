"""The programs of docs/CONSUMERS.md, cut out of it and run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Producer

from delaywheel.consumer import ConsumerReason, ConsumerTrouble, DeadLetterReason
from delaywheel.consumer.settings import Options
from local.loopback.kafka import KafkaBroker
from support.consumer.documents import DOCS, PATIENCE_S, Program, program_of
from support.kafka.read_committed import CommittedReader, create_topic, headers_of

DOCUMENT = "CONSUMERS.md"

Record = tuple[bytes, list[tuple[str, str | bytes | None]]]


@pytest.fixture
def run(kafka: KafkaBroker, cluster: str, orders: str) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(holding: str, *records: Record) -> Program:
        producer = Producer({"bootstrap.servers": kafka.address})
        for value, headers in records:
            producer.produce(orders, value, partition=0, headers=headers)
        assert producer.flush(PATIENCE_S) == 0
        code = program_of(DOCUMENT, holding).replace("localhost:9092", kafka.address)
        code = code.replace('"orders"', f'"{orders}"')
        code = code.replace('bootstrap="', f'cluster="{cluster}", bootstrap="')
        started.append(Program(code))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.mark.kafka
def test_the_loop(run: Callable[..., Program]) -> None:
    running = run("charging", (b"fine", []), (b"unlucky", []))
    lines = list(running.wait_for(5))
    assert lines == ["charging fine", *["charging unlucky"] * 4]
    running.stop()
    assert "done=1, retried=3, dead=1" in running.wait_for(6)[5]


@pytest.mark.kafka
def test_by_hand(kafka: KafkaBroker, orders: str, run: Callable[..., Program]) -> None:
    running = run("out of stock", (b"later", []), (b"broken", []))
    assert running.wait_for(3) == ["later 1 None", "broken 1 None", "later 2 out of stock"]
    with CommittedReader(kafka.address, f"{orders}-dead-stock", partitions=2) as reader:
        (letter,) = reader.wait_for(1)
    running.stop()  # not before: what is not committed by then comes again with the next start
    reported = dict(headers_of(letter))
    assert reported["dw-dead-reason"] == b"UNREADABLE"
    assert reported["dw-dead-detail"] == b"no such article"


@pytest.mark.kafka
def test_objects(run: Callable[..., Program]) -> None:
    running = run("read_json", (b"{", []), (b'{"total": 3}', []))
    assert running.wait_for(1) == ["None 3"]
    running.stop()


@pytest.mark.kafka
def test_around_handlers(run: Callable[..., Program]) -> None:
    running = run("with_context", (b"you", []))
    greeting, line = running.wait_for(2)
    assert greeting == "hello, you"
    assert "handled" in line
    assert "attempt" in line
    running.stop()


@pytest.mark.kafka
def test_writing(kafka: KafkaBroker, run: Callable[..., Program]) -> None:
    for name in ("bills", "bill-reminders"):
        create_topic(kafka.address, name)
    running = run("invoicing", (b"3 lamps", []))
    assert running.wait_for(1) == ["billed 3 lamps"]
    for name, value in (("bills", b"bill for 3 lamps"), ("bill-reminders", b"3 lamps")):
        with CommittedReader(kafka.address, name) as reader:
            reader.wait_for(1)
            reader.read_to_end()
            assert [one.value() for one in reader.messages] == [value]
    running.stop()


@pytest.mark.kafka
def test_on_a_loop(run: Callable[..., Program]) -> None:
    running = run("asyncio", (b"a", []), (b"b", []))
    assert sorted(running.wait_for(2)) == ["mailed a", "mailed b"]
    running.stop()


@pytest.mark.kafka
def test_routes(run: Callable[..., Program]) -> None:
    key = "routingkey"
    running = run(
        "routingkey",
        (b"1", [(key, "orders.us.paid")]),
        (b"2", [(key, "audit.a.b"), ("ttl", "1")]),
        (b"3", []),
        (b"4", [(key, "orders.eu.paid"), ("ttl", "900")]),
    )
    # The second may have been in time.
    assert running.wait_for(1)[-1] in ("orders.eu.paid", "audit.a.b")
    running.stop()
    assert not {"orders.us.paid"} & set(running.lines)


@pytest.mark.kafka
def test_on_threads(run: Callable[..., Program]) -> None:
    running = run("packing", (b"a", []), (b"b", []))
    # Threads may print at once: each a text, then the end of its line.
    said = "".join(running.wait_for(2))
    assert sorted(re.findall("packed .", said)) == ["packed a", "packed b"]
    running.stop()


@pytest.mark.kafka
def test_delays(run: Callable[..., Program]) -> None:
    running = run("shipping", (b"x", []))  # the cause is a TimeoutError: two more attempts
    assert running.wait_for(3) == [f"shipping, attempt {number}" for number in (1, 2, 3)]
    running.stop()


@pytest.mark.kafka
def test_watching(orders: str, run: Callable[..., Program]) -> None:
    running = run("ConsumerMetrics", (b"x", []))
    expected = f"given up: {orders}/0/0 ATTEMPTS_EXHAUSTED: ValueError: no such order"
    assert running.wait_for(1) == [expected]
    running.stop()


@pytest.mark.kafka
def test_handlers_of_letters(kafka: KafkaBroker, orders: str) -> None:
    name = f"{orders}-dead-watched"
    create_topic(kafka.address, name)
    producer = Producer({"bootstrap.servers": kafka.address})
    for value, reason in ((b"1", "ATTEMPTS_EXHAUSTED"), (b"2", "TIME_EXHAUSTED")):
        headers = [("dw-dead-reason", reason), ("dw-dead-topic", orders)]
        producer.produce(name, value, headers=headers)  # type: ignore[arg-type]
    assert producer.flush(PATIENCE_S) == 0
    code = program_of(DOCUMENT, "DeadLetterConsumer").replace("localhost:9092", kafka.address)
    running = Program(code.replace("orders-dead-watched", name))
    try:
        assert running.wait_for(2) == ["given up: b'1'", "again: b'2'"]
        with CommittedReader(kafka.address, orders, partitions=2) as reader:
            (message,) = reader.wait_for(1)
        assert message.value() == b"2"
        running.stop()
    finally:
        running.kill()


def test_reasons_and_options_are_all_reported() -> None:
    text = "".join(
        (DOCS / f"{name}.md").read_text(encoding="utf-8")
        for name in ("CONSUMERS", "CONSUMER_REFERENCE", "TRANSACTIONS")
    )
    rows = set(re.findall(r"`([a-zA-Z_]+)`", text))
    assert {reason.value for reason in ConsumerReason} <= rows
    assert {reason.value for reason in DeadLetterReason} <= rows
    assert {trouble.value for trouble in ConsumerTrouble} <= rows
    assert set(Options.__annotations__) <= rows
