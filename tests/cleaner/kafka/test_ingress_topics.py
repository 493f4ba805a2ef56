"""Reading ingress topics on the real broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from delaywheel import transactional
from delaywheel.consumer.kafka.topics import limits_of
from delaywheel.ingress import IngressLimits
from delaywheel_replica.cleaner.kafka import ingress_topics
from delaywheel_replica.cleaner.kafka.ingress_finding import IngressTopics, find_ingress
from delaywheel_replica.cleaner.kafka.ingress_topics import IngressReader
from delaywheel_replica.cleaner.outside.ports import Fetched, TopicPartitions
from delaywheel_replica.core.ingress.reading import CommittedRecord
from delaywheel_replica.core.protocol.control import IngressPartition
from delaywheel_replica.kafka_settings import KafkaSettings
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import add_partitions, create_topic, delete_topic
from support.kafka.unreadable import send_unreadable

pytestmark = pytest.mark.kafka

PATIENCE_S = 60


@pytest.fixture
def topic(kafka: KafkaBroker, settings: KafkaSettings) -> str:
    create_topic(kafka.address, settings.names.ingress, partitions=2)
    return settings.names.ingress


@pytest.fixture
def reader(settings: KafkaSettings) -> Iterator[IngressReader]:
    with closing(IngressReader(settings)) as reader:
        yield reader


@pytest.fixture
def admin(settings: KafkaSettings) -> AdminClient:
    return AdminClient(settings.admin())


def found(admin: AdminClient, topic: str) -> TopicPartitions:
    """Kafka's description of an existing topic."""
    return find_ingress(admin, IngressTopics(), {topic}).topics[topic]


def send(kafka: KafkaBroker, topic: str, *values: bytes, partition: int = 0) -> None:
    """Records without a transaction."""
    refused: list[KafkaError | None] = []
    producer = Producer({"bootstrap.servers": kafka.address})
    for value in values:
        producer.produce(
            topic,
            value,
            b"key",
            partition,
            headers=[("h", None), ("h", b"1")],
            on_delivery=lambda error, _: refused.append(error),
        )
    assert producer.flush(PATIENCE_S) == 0
    assert refused == [None] * len(values)


class Read:
    """The records that a reader has read so far."""

    def __init__(self, reader: IngressReader) -> None:
        self._reader = reader
        self.fetched: list[Fetched] = []

    @property
    def records(self) -> list[CommittedRecord]:
        return [record for each in self.fetched for record in each.records]

    @property
    def values(self) -> list[bytes | None]:
        return [record.value for record in self.records]

    @property
    def positions(self) -> dict[IngressPartition, int]:
        return {each.at: each.position for each in self.fetched}

    def until(self, seen: Callable[[Read], bool]) -> None:
        """Reads until the condition holds."""
        give_up = time.monotonic() + PATIENCE_S
        while not seen(self):
            assert time.monotonic() < give_up, self.fetched
            self.fetched += self._reader.poll(100, 0.1)


def test_records_come_as_they_were_sent(
    kafka: KafkaBroker, topic: str, reader: IngressReader
) -> None:
    before_ms = time.time_ns() // 1_000_000
    send(kafka, topic, b"0", b"1")
    send(kafka, topic, b"2", partition=1)
    reader.assign({(topic, 0): 1, (topic, 1): 0})
    read = Read(reader)
    read.until(lambda read: len(read.records) == 2)
    first, second = sorted(read.records)
    assert (first.place, first.value) == ((topic, 0, 1), b"1")
    assert (second.place, second.value) == ((topic, 1, 0), b"2")
    assert (first.key, first.headers) == (b"key", [("h", None), ("h", b"1")])
    assert before_ms <= first.timestamp_ms <= time.time_ns() // 1_000_000
    assert read.positions == {(topic, 0): 2, (topic, 1): 1}


def test_records_with_many_headers_are_taken_a_few_at_a_time(
    kafka: KafkaBroker, topic: str, reader: IngressReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 of 100,000 headers each fit into a batch of 1 MB; each header takes 140 bytes here."""
    monkeypatch.setattr(ingress_topics, "HEADERS_AT_ONCE", 1_000)
    producer = Producer(
        {"bootstrap.servers": kafka.address, "linger.ms": 100, "compression.type": "gzip"}
    )
    for _ in range(60):
        producer.produce(topic, b"v", partition=0, headers=[("h", None)] * 500)
    assert producer.flush(PATIENCE_S) == 0
    reader.assign({(topic, 0): 0})
    read, taken = Read(reader), list[int]()

    def has_all(read: Read) -> bool:
        taken.append(len(read.records) - sum(taken))
        return sum(taken) == 60

    read.until(has_all)
    assert max(taken) <= 1_000 // 500 + ingress_topics.FEW


def test_aborted_records_are_never_read_and_are_passed(
    kafka: KafkaBroker, topic: str, reader: IngressReader
) -> None:
    producer = Producer({"bootstrap.servers": kafka.address, "transactional.id": topic})
    producer.init_transactions(PATIENCE_S)
    for value, ends in (
        (b"aborted", producer.abort_transaction),
        (b"committed", producer.commit_transaction),
        (b"aborted", producer.abort_transaction),
    ):
        producer.begin_transaction()
        producer.produce(topic, value, partition=0)
        producer.flush(PATIENCE_S)
        ends(PATIENCE_S)
    reader.assign({(topic, 0): 0})
    read = Read(reader)
    # Three records, each with the marker of its end.
    read.until(lambda read: read.positions.get((topic, 0)) == 6)
    assert read.values == [b"committed"]
    assert reader.lags() == {(topic, 0): 0}


def test_who_leaves_a_transaction_open_is_found(
    kafka: KafkaBroker, topic: str, reader: IngressReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactional, "OPEN_S", 0.05)
    producer = Producer({"bootstrap.servers": kafka.address, "transactional.id": topic})
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    producer.flush(PATIENCE_S)
    send(kafka, topic, b"behind it")
    send(kafka, topic, b"elsewhere", partition=1)
    reader.assign({(topic, 0): 0, (topic, 1): 0})
    read = Read(reader)

    def found() -> frozenset[IngressPartition]:
        reader.lags()
        return reader.open_transactions()

    read.until(lambda _: found() == {(topic, 0)})
    producer.commit_transaction(PATIENCE_S)
    read.until(lambda read: len(read.values) == 3 and not found())


def test_a_record_of_an_open_transaction_is_waited_for(
    kafka: KafkaBroker, topic: str, reader: IngressReader
) -> None:
    producer = Producer({"bootstrap.servers": kafka.address, "transactional.id": topic})
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    producer.flush(PATIENCE_S)
    send(kafka, topic, b"behind")
    send(kafka, topic, b"beside", partition=1)
    reader.assign({(topic, 0): 0, (topic, 1): 0})
    read = Read(reader)
    read.until(lambda read: b"beside" in read.values)
    assert read.values == [b"beside"]
    producer.commit_transaction(PATIENCE_S)
    read.until(lambda read: len(read.records) == 3)
    assert read.values == [b"beside", b"open", b"behind"]


def test_headers_that_the_client_cannot_read_stop_nothing(
    kafka: KafkaBroker, topic: str, reader: IngressReader
) -> None:
    send_unreadable(kafka.address, topic)
    send(kafka, topic, b"behind")
    reader.assign({(topic, 0): 0})
    read = Read(reader)
    read.until(lambda read: len(read.records) == 2)
    headers = [None, [("h", None), ("h", b"1")]]
    assert [record.headers for record in read.records] == headers
    assert read.values == [b"v", b"behind"]


def test_what_kafka_deleted_is_reported_and_what_follows_is_read(
    kafka: KafkaBroker, topic: str, reader: IngressReader, admin: AdminClient
) -> None:
    send(kafka, topic, b"0", b"1", b"2")
    admin.delete_records([TopicPartition(topic, 0, 2)])[TopicPartition(topic, 0, 2)].result()
    reader.assign({(topic, 0): 0})
    read = Read(reader)
    read.until(lambda read: bool(read.records))
    assert read.values == [b"2"]
    assert [each.first_kept for each in read.fetched] == [2, None]


def test_a_partition_that_ends_too_early_is_not_read(
    kafka: KafkaBroker, topic: str, reader: IngressReader
) -> None:
    send(kafka, topic, b"0")
    reader.assign({(topic, 0): 5, (topic, 1): 0})
    read = Read(reader)
    read.until(lambda _: bool(reader.cut_off))
    send(kafka, topic, b"1", partition=1)
    read.until(lambda read: read.values == [b"1"])
    assert reader.cut_off == {(topic, 0): 1}


def test_a_partition_that_ends_before_what_was_announced_is_read_and_reported(
    kafka: KafkaBroker, topic: str, reader: IngressReader
) -> None:
    send(kafka, topic, b"0", b"1")
    send(kafka, topic, b"0", b"1", partition=1)
    reader.assign({(topic, 0): 1, (topic, 1): 0}, {(topic, 0): 5, (topic, 1): 2})
    read = Read(reader)
    read.until(lambda _: bool(reader.cut_off))
    read.until(lambda read: sorted(map(str, read.values)) == ["b'0'", "b'1'", "b'1'"])
    assert reader.cut_off == {(topic, 0): 2}


def test_partitions_may_become_more_and_a_topic_another(
    kafka: KafkaBroker, topic: str, reader: IngressReader, admin: AdminClient
) -> None:
    before = found(admin, topic)
    assert before.partitions == 2
    reader.assign({(topic, 0): 0})
    add_partitions(kafka.address, topic, 3)
    read = Read(reader)
    send(kafka, topic, b"2", partition=2)
    reader.assign({(topic, 0): 0, (topic, 2): 0})
    read.until(lambda read: read.values == [b"2"])
    assert found(admin, topic) == before._replace(partitions=3)
    delete_topic(kafka.address, topic)
    create_topic(kafka.address, topic, partitions=2)
    assert found(admin, topic).topic_id != before.topic_id


def test_the_group_shows_how_far_things_are(
    kafka: KafkaBroker, topic: str, reader: IngressReader, settings: KafkaSettings
) -> None:
    send(kafka, topic, b"0", b"1")
    reader.assign({(topic, 0): 0})
    group = settings.names.ingress_group
    looking = Consumer({"bootstrap.servers": kafka.address, "group.id": group})
    give_up = time.monotonic() + PATIENCE_S
    with closing(looking):
        while True:
            reader.report_to_group({(topic, 0): 2}, frozenset())
            reader.poll(100, 0.1)
            (committed,) = looking.committed([TopicPartition(topic, 0)], PATIENCE_S)
            if committed.offset == 2 and reader.lags() == {(topic, 0): 0}:
                break
            assert time.monotonic() < give_up


def test_the_group_shows_which_partitions_are_read_once_some_are_cut_off(
    kafka: KafkaBroker, topic: str, settings: KafkaSettings
) -> None:
    """By whoever leads: a reader that replaces another has not seen that for itself."""
    limits = IngressLimits(1_000, 1_000)
    add_partitions(kafka.address, topic, 3)
    send(kafka, topic, b"0")
    with closing(IngressReader(replace(settings, ingress_limits=limits))) as reader:
        offsets = {(topic, 0): 1, (topic, 1): 7, (topic, 2): 9}
        reader.assign(dict.fromkeys(offsets, 0))
        Read(reader).until(lambda read: bool(read.records))
        group = settings.names.ingress_group
        looking = Consumer({"bootstrap.servers": kafka.address, "group.id": group})
        with closing(looking):
            give_up = time.monotonic() + PATIENCE_S
            while (said := limits_of(looking, topic)) is None:
                assert time.monotonic() < give_up
                reader.report_to_group(offsets, {(topic, 1), (topic, 2)})
                reader.poll(100, 0.1)
    assert said == limits._replace(read=(0,))


def test_the_group_shows_that_nothing_is_read(settings: KafkaSettings) -> None:
    limits = IngressLimits(1_000, 1_000)
    with closing(IngressReader(replace(settings, ingress_limits=limits))) as reader:
        notes = reader._notes({("off", 0), ("on", 0), ("on", 1)}, {("off", 0), ("on", 1)})
    said = {topic: IngressLimits.of_note(note) for topic, note in notes.items()}
    assert said == {"off": limits._replace(is_read=False), "on": limits._replace(read=(0,))}


def test_of_a_paused_partition_nothing_comes_and_nothing_is_lost(
    kafka: KafkaBroker, topic: str, reader: IngressReader
) -> None:
    """Not even records that the client had prefetched; and other partitions continue."""
    values = [b"%d" % number for number in range(500)]
    send(kafka, topic, *values)
    reader.assign({(topic, 0): 0, (topic, 1): 0})
    read = Read(reader)
    read.until(lambda read: bool(read.records))
    for _ in range(2):
        before = [value for value in read.values if value != b"beside"]
        reader.pause_only({(topic, 0)})
        send(kafka, topic, b"beside", partition=1)
        count = read.values.count(b"beside")
        read.until(lambda read, count=count: read.values.count(b"beside") > count)  # type: ignore[misc]
        assert [value for value in read.values if value != b"beside"] == before
        reader.pause_only(frozenset())
        read.until(lambda read, before=before: len(read.values) > len(before) + 2)  # type: ignore[misc]
    read.until(lambda read: len(read.values) == 502)
    assert [value for value in read.values if value != b"beside"] == values
