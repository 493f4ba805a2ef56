"""`get` finds where a message lies in Kafka, for any leader and any age."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from delaywheel import Handle, KafkaPlace, MessageState, StoredMessage
from delaywheel_replica.kafka_settings import KafkaNames
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import CommittedReader, delete_topic
from support.services.service import Service, wait_until

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


def test_a_dead_letter_is_found_with_its_reason(
    service: Service, kafka: KafkaBroker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    with service.client() as client:
        handle = client.produce(topic, b"nowhere", delay=timedelta(hours=1))
        delete_topic(kafka.address, topic)
        moved = client.reschedule(handle, to=datetime.now(UTC))
    assert moved.handle is not None
    stored = found(service, moved.handle)
    assert stored.place is not None
    assert stored.place.topic == KafkaNames(service.cluster_id).dead
    assert (stored.state, stored.dead_reason) == (MessageState.DEAD_LETTERED, "TOPIC_MISSING")
