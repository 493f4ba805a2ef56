"""Clients of confluent-kafka with a trace, on the real Kafka: they behave as without, and tell."""

from __future__ import annotations

import time
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from delaywheel.testing.tracing import MemoryTrace
from delaywheel.trace.options import TraceOptions
from delaywheel.trace.reports import EventReports
from delaywheel.trace.wrappers import traced_consumer, traced_producer
from delaywheel.trace.wrappers.producer import GivenHeaders
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import create_topic, headers_of, read_all

pytestmark = pytest.mark.kafka

DUE_MS = 1_900_000_000_000
SENT_MS = int(time.time() * 1000)
"""Brokers of Kafka 4 refuse timestamps that are more than an hour ahead."""


class Told(EventReports):
    """A trace whose events are at hand."""

    def __init__(self, **options: Any) -> None:
        chosen = TraceOptions(**options)
        self.events: list[dict[str, Any]] = []
        super().__init__(MemoryTrace(self.events, chosen), chosen)

    def columns(self, *names: str) -> list[tuple[Any, ...]]:
        """These columns of all events so far, which are forgotten."""
        told = [tuple(event[name] for name in names) for event in self.events]
        self.events.clear()
        return told


@pytest.fixture
def topic(kafka: KafkaBroker, cluster_id: str) -> str:
    create_topic(kafka.address, f"ingress-{cluster_id}")
    return f"ingress-{cluster_id}"


def test_a_producer_tells_what_it_has_written(kafka: KafkaBroker, topic: str) -> None:
    trace, now_ms = Told(tags="tags"), time.time_ns() // 1_000_000
    heard: list[tuple[bool, bytes | str | None]] = []
    producer = traced_producer(Producer({"bootstrap.servers": kafka.address}), trace)

    def delivered(error: KafkaError | None, message: Message) -> None:
        heard.append((error is None, message.value()))

    at: GivenHeaders = {"dw-topic": "orders", "dw-deliver-at": str(DUE_MS), "tags": "eu"}
    producer.produce(topic, b"1", "k", on_delivery=delivered, headers=at)
    own = [("dw-topic", b"orders"), ("dw-delay-ms", b"5000"), ("dw-id", bytes(15) + b"\7")]
    producer.produce(topic, b"2", callback=delivered, timestamp=now_ms, headers=own)
    cancel: GivenHeaders = [
        ("dw-topic", b"orders"),
        ("dw-cancel", bytes(16)),
        ("dw-deliver-at", b"1"),
    ]
    producer.produce(topic, b"3", headers=cancel)
    producer.produce(topic, b"4", partition=7, on_delivery=delivered, headers=at)
    producer.produce(topic, b"5")
    assert len(producer) > 0
    assert producer.flush(30) == len(producer) == 0
    assert sorted(heard, key=str) == [(False, b"4"), (True, b"1"), (True, b"2")]
    written = read_all(kafka.address, topic, at_least=4)
    [first] = [dict(headers_of(one)) for one in written if one.value() == b"1"]
    id_ = bytes.fromhex((first["dw-id"] or b"").decode())
    known = sorted(trace.columns("status", "id", "due_ms", "topic", "key", "tags"), key=str)
    assert known[2][:1] + known[2][2:] == ("_UNKNOWN_PARTITION", DUE_MS, "orders", None, "eu")
    assert known[:2] == sorted(
        [
            ("WRITTEN", id_, DUE_MS, "orders", "k", "eu"),
            ("WRITTEN", bytes(15) + b"\7", now_ms + 5_000, "orders", None, None),
        ],
        key=str,
    )
    assert {one.value(): len(headers_of(one)) for one in written}[b"3"] == 3
    assert producer.list_topics(topic, 30).topics[topic].error is None


def test_what_a_transaction_has_is_told_at_its_end(kafka: KafkaBroker, topic: str) -> None:
    trace = Told()
    settings = {"bootstrap.servers": kafka.address, "transactional.id": topic}
    producer = traced_producer(Producer(settings), trace)
    producer.init_transactions(30)
    headers: GivenHeaders = {"dw-topic": "orders", "dw-deliver-at": str(DUE_MS)}
    ends = (
        (b"a", producer.abort_transaction, "ABORTED"),
        (b"c", producer.commit_transaction, "WRITTEN"),
    )
    for key, end, status in ends:
        producer.begin_transaction()
        producer.produce(topic, b"", key, headers=headers)
        assert producer.flush(30) == 0
        assert trace.events == []
        end(30)
        assert trace.columns("key", "status") == [(key.decode(), status)]
    producer.begin_transaction()
    producer.produce(topic, b"", b"o", headers=headers)
    assert producer.flush(30) == 0
    producer.close()
    assert trace.columns("key", "status") == [("o", "UNKNOWN")]


def test_a_consumer_tells_what_is_committed(kafka: KafkaBroker, topic: str) -> None:
    producer = Producer({"bootstrap.servers": kafka.address})
    for number in range(6):
        headers = [("dw-id", b"%032x" % number), ("dw-due", b"%d" % DUE_MS)]
        record = {"headers": headers, "timestamp": SENT_MS + number}
        producer.produce(topic, b"", b"%d" % number, **record)  # type: ignore[arg-type]
    assert producer.flush(30) == 0
    trace = Told()
    settings = {
        "bootstrap.servers": kafka.address,
        "group.id": topic,
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
    }
    with traced_consumer(Consumer(settings), topic, trace) as consumer:
        consumer.subscribe([topic])
        first = consumer.poll(30)
        assert first is not None
        assert trace.events == []
        consumer.commit(message=first, asynchronous=False)
        columns = "kind", "id", "due_ms", "offset", "forwarded_ms", "status", "group"
        assert trace.columns(*columns) == [
            ("processed", bytes(16), DUE_MS, 0, SENT_MS, "DONE", topic),
        ]
        assert [one.offset() for one in consumer.consume(2, 30)] == [1, 2]
        consumer.seek(TopicPartition(topic, 0, 2))
        assert [one.offset() for one in consumer.consume(2, 30)] == [2, 3]
        consumer.commit(offsets=[TopicPartition(topic, 0, 3)])
        assert trace.columns("forwarded_ms") == [(SENT_MS + 1,), (SENT_MS + 2,)]
        [committed] = consumer.commit(asynchronous=False) or []
        assert committed.offset == 4
        assert trace.columns("offset") == [(3,)]
        consumer.consume(2, 30)
        consumer.done([TopicPartition(topic, 0, 5)])
        assert trace.columns("offset") == [(4,)]
        consumer.unsubscribe()
        consumer.poll(1)  # which has the partition revoked
        consumer.commit(offsets=[TopicPartition(topic, 0, 6)])
    assert trace.columns("offset") == []
