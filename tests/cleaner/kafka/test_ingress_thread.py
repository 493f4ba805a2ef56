"""Reading ingress topics in the background, and finding them, on the real broker."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from delaywheel_replica.cleaner.kafka.ingress_finding import (
    IngressTopics,
    find_ingress,
    topic_ids,
)
from delaywheel_replica.cleaner.kafka.ingress_thread import IngressThread
from delaywheel_replica.cleaner.outside.ports import KafkaAway
from delaywheel_replica.core.protocol.control import IngressPartition
from delaywheel_replica.kafka_settings import KafkaSettings
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import create_topic, delete_topic
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka

PATIENCE_S = 60


@pytest.fixture
def topic(kafka: KafkaBroker, settings: KafkaSettings) -> str:
    create_topic(kafka.address, settings.names.ingress)
    return settings.names.ingress


def send(kafka: KafkaBroker, topic: str, *values: bytes) -> None:
    producer = Producer({"bootstrap.servers": kafka.address})
    for value in values:
        producer.produce(topic, value, partition=0)
    assert producer.flush(PATIENCE_S) == 0


def reading(
    settings: KafkaSettings,
    on_news: Callable[[], None] = lambda: None,
    ids_of: Callable[[Iterable[str]], Mapping[str, str]] | None = None,
) -> IngressThread:
    asked = partial(topic_ids, AdminClient(settings.admin()))
    return IngressThread(settings, ids_of or asked, on_news)


def values(reader: IngressThread) -> list[bytes | None]:
    return [record.value for each in reader.poll() for record in each.records]


def test_it_wakes_and_reads_on_once_that_was_taken(
    kafka: KafkaBroker, settings: KafkaSettings, topic: str
) -> None:
    woken = threading.Semaphore(0)
    reader = reading(settings, woken.release)
    at: IngressPartition = topic, 0
    reader.assign({at: 0})
    send(kafka, topic, b"0")
    assert woken.acquire(timeout=PATIENCE_S)
    send(kafka, topic, b"1")
    assert not woken.acquire(timeout=0.7)  # what waits is not taken
    assert values(reader) == [b"0"]
    assert woken.acquire(timeout=PATIENCE_S)
    reader.assign({at: 0})  # it continues where it is
    assert values(reader) == [b"1"]
    wait_until("all is read", lambda: reader.lags() == {at: 0})
    assert (values(reader), reader.cut_off) == ([], {})
    reader.close()
    send(kafka, topic, b"2")
    assert not woken.acquire(timeout=0.7)


def test_a_partition_that_is_cut_off_is_reported(
    kafka: KafkaBroker, settings: KafkaSettings, topic: str
) -> None:
    send(kafka, topic, b"0")
    reader = reading(settings)
    reader.assign({(topic, 0): 7})
    wait_until("it is cut off", lambda: reader.cut_off == {(topic, 0): 1})
    reader.close()


def test_nothing_is_read_of_a_topic_that_was_recreated(
    kafka: KafkaBroker, settings: KafkaSettings, topic: str
) -> None:
    former = topic_ids(AdminClient(settings.admin()), [topic])
    reader = reading(settings)
    reader.assign({(topic, 0): 0}, topic_ids=former)
    send(kafka, topic, b"0")
    wait_until("it is read", lambda: values(reader) == [b"0"])
    delete_topic(kafka.address, topic)
    create_topic(kafka.address, topic)
    send(kafka, topic, b"other", b"other", b"other")
    read: list[bytes | None] = []

    def is_reported() -> bool:
        with contextlib.suppress(KafkaAway):  # while it is gone
            read.extend(values(reader))
        return reader.recreated == {topic}

    wait_until("it is reported", is_reported)
    send(kafka, topic, b"other")
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        assert is_reported()
    assert read == []
    reader.close()


def test_what_came_of_a_topic_that_may_be_another_is_read_again(
    kafka: KafkaBroker, settings: KafkaSettings, topic: str
) -> None:
    ids = topic_ids(AdminClient(settings.admin()), [topic])
    answers: list[Mapping[str, str] | KafkaAway] = [{}, KafkaAway("no answer"), ids, ids]

    def ids_of(topics: Iterable[str]) -> Mapping[str, str]:
        assert list(topics) == [topic]
        answer = answers.pop(0)
        if isinstance(answer, KafkaAway):
            raise answer
        return answer

    reader = reading(settings, ids_of=ids_of)
    send(kafka, topic, b"0", b"1")
    reader.assign({(topic, 0): 1}, topic_ids=ids)
    read: list[bytes | None] = []

    def has_read() -> bool:
        with contextlib.suppress(KafkaAway):
            read.extend(values(reader))
        return bool(read)

    wait_until("it has read", has_read)
    assert read == [b"1"]
    assert (answers, reader.recreated) == ([ids], frozenset())
    reader.close()


def test_topics_are_found_created_and_checked(kafka: KafkaBroker, settings: KafkaSettings) -> None:
    admin = AdminClient(settings.admin())
    name, compacted = settings.names.ingress, f"{settings.names.ingress}-compacted"
    create_topic(kafka.address, compacted, config={"cleanup.policy": "compact,delete"})
    wanted = IngressTopics(frozenset([name, compacted]), 3, max_message_bytes=5_000)
    found = find_ingress(admin, wanted, {"gone"})
    assert {each: topic.partitions for each, topic in found.topics.items()} == {name: 3}
    is_compacted, is_gone = found.faults.values()
    assert "cleanup.policy=compact,delete: set it to delete" in is_compacted
    assert "topic gone is missing" in is_gone
    assert "add it to ingress_topics" in is_gone
    again = find_ingress(admin, wanted)
    assert (again.topics, again.faults) == (found.topics, {compacted: is_compacted})


def test_a_topic_that_cannot_be_created_is_reported(settings: KafkaSettings) -> None:
    admin = AdminClient(settings.admin())
    name = settings.names.ingress
    found = find_ingress(admin, IngressTopics(frozenset([name]), replication_factor=9))
    assert found.topics == {}
    assert f"{name} is missing, and cannot be created" in found.faults[name]
    assert "ingress = false" in found.faults[name]


def test_a_kafka_that_does_not_answer_is_reported() -> None:
    admin = AdminClient({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
    with pytest.raises(KafkaAway):
        find_ingress(admin, IngressTopics(frozenset(["a"])))
