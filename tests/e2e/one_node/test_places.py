"""`get` finds where a message lies in Kafka, for any leader and any age; and retries that wait."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from delaywheel import Handle, KafkaPlace, MessageState, StoredMessage
from delaywheel.consumer import RetryConsumer
from delaywheel.testing.tracing import MemoryTrace
from delaywheel.trace.options import TraceOptions
from delaywheel.trace.reports import EventReports
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import CommittedReader
from support.services.service import Service
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka


def found(service: Service, handle: Handle) -> StoredMessage:
    """The message with its place, once it has one."""

    def look() -> StoredMessage | None:
        with service.client() as client:
            stored = client.get(handle, find_place=True)
            return stored if stored is not None and stored.place is not None else None

    return wait_until("it is found", look)


def test_each_message_is_found_where_a_consumer_finds_it(
    service: Service, kafka: KafkaBroker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(partitions=3)
    old = datetime.now(UTC).replace(microsecond=0) - timedelta(days=2)
    with service.client() as client, CommittedReader(kafka.address, topic, partitions=3) as reader:
        for n in range(200):
            client.produce_async(topic, b"%d" % n, delay=timedelta(milliseconds=500))
        asked = [
            client.produce(topic, b"any", delay=timedelta(seconds=1)),
            client.produce(topic, b"two", partition=2, delay=timedelta(seconds=1)),
            client.produce(topic, b"old", timestamp=old, delay=timedelta(seconds=1)),
        ]
        records = {record.value(): record for record in reader.wait_for(203, timeout_s=60)}
    for handle, value in zip(asked, (b"any", b"two", b"old"), strict=True):
        stored, record = found(service, handle), records[value]
        assert stored.value == value
        assert stored.state is MessageState.DELIVERED
        place = KafkaPlace(topic, record.partition() or 0, record.offset() or 0)
        assert stored.place == place


def test_a_record_is_proof_where_nobody_remembers(service: Service, topic: str) -> None:
    with service.client() as client:
        handle = client.produce(topic, b"v", delay=timedelta(milliseconds=300))
        before = found(service, handle)
        service.kill("cleaner_pid")
        service.wait_accepting()
        again = found(service, handle)
        assert (again.place, again.state) == (before.place, MessageState.DELIVERED)
        pending = client.produce(topic, b"v", delay=timedelta(hours=1))
        stored = client.get(pending, find_place=True)
        assert stored is not None
        assert (stored.place, stored.state) == (None, MessageState.PENDING)


def test_a_retry_that_waits_is_found_by_the_id_that_its_consumer_gave_it(
    service: Service, kafka: KafkaBroker, topic: str
) -> None:
    told: list[dict[str, Any]] = []
    options = TraceOptions()
    of: dict[str, Any] = {"bootstrap": kafka.address, "cluster": service.cluster_id}
    trace = EventReports(MemoryTrace(told, options), options)
    with service.client() as client:
        first = client.produce(topic, b"42", delay=timedelta(milliseconds=300))
        with RetryConsumer(topic, group=topic, retry=("1h",), trace=trace, **of) as consumer:
            for message in consumer:
                with message:
                    consumer.stop()
                    raise ConnectionError("refused")
        [retried] = [event for event in told if event["kind"] == "processed"]
        assert (retried["id"], retried["status"]) == (first.id, "RETRIED")
        due = datetime.fromtimestamp(retried["to_ms"] / 1000, UTC)
        named: dict[str, Any] = {"topic": f"{topic}-retry-{topic}", "id": retried["next_id"]}
        waiting = wait_until("it waits", lambda: client.get(**named, due=due))
    assert (waiting.state, waiting.value) == (MessageState.PENDING, b"42")
    assert waiting.accepted_at_ms < retried["to_ms"] == waiting.due_ms
