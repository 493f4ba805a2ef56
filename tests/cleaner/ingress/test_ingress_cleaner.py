"""A whole cleaner reads ingress topics of the real broker, beside a fake server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from delaywheel import ingress
from delaywheel_replica.core.protocol.status_files import CleanerStatus
from delaywheel_replica.kafka_settings import KafkaNames
from local.loopback.kafka import KafkaBroker
from support.cleaner.cleaner_world import World
from support.due.wheels import Wheels
from support.kafka.read_committed import CommittedReader
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka

SOON_MS = 6_000
"""A record that is due when it is read goes to no wheel: a busy machine reads it late."""


@pytest.fixture
def world(kafka: KafkaBroker, cluster_id: str, wheels: Wheels) -> Iterator[World]:
    with World(kafka.address, wheels.data, cluster_id, wheels, ingress_partitions=3) as world:
        world.wait_leading()
        world.wait_for(
            "the topic is found", lambda s: s.ingress is not None and bool(s.ingress.partitions)
        )
        yield world


class Sender:
    """Sends records to the ingress topic."""

    def __init__(self, kafka: KafkaBroker, cluster_id: str) -> None:
        self._producer = Producer({"bootstrap.servers": kafka.address})
        self._topic = KafkaNames(cluster_id).ingress

    def send(self, value: bytes, headers: Sequence[tuple[str, bytes]], partition: int = 0) -> None:
        self._producer.produce(self._topic, value, b"key", partition, headers=list(headers))
        assert self._producer.flush(60) == 0


def committed(kafka: KafkaBroker, topic: str, count: int) -> list[Message]:
    with CommittedReader(kafka.address, topic) as reader:
        return reader.wait_for(count)


def headers_in(message: Message) -> dict[str, bytes]:
    return dict(message.headers() or [])  # type: ignore[arg-type]


def test_records_go_through_a_wheel_directly_or_to_the_dead_letters(
    kafka: KafkaBroker, world: World, cluster_id: str, topic: str
) -> None:
    sender = Sender(kafka, cluster_id)
    to = (ingress.TOPIC, topic.encode())
    sender.send(b"later", [to, (ingress.DELAY_MS, b"%d" % SOON_MS)])
    sender.send(b"now", [to, (ingress.DELAY_MS, b"0"), ("trace", b"1")], 1)
    sender.send(b"never", [to], 2)
    later, now = sorted(committed(kafka, topic, 2), key=lambda each: each.value() or b"")
    assert [(each.key(), each.value()) for each in (now, later)] == [
        (b"key", b"now"), (b"key", b"later"),
    ]  # fmt: skip
    assert headers_in(now)["trace"] == b"1"
    assert headers_in(now)["dw-wheel"] == f"{cluster_id}/ingress".encode()
    assert headers_in(later)["dw-wheel"].startswith(f"{cluster_id}/n1.".encode())
    assert later.timestamp()[1] >= int(headers_in(later)["dw-due"])
    (letter,) = committed(kafka, KafkaNames(cluster_id).dead, 1)
    assert headers_in(letter)["dw-dead-reason"] == b"DUE_MISSING"
    status = world.wait_for("all is settled", lambda s: has_settled(s, 3))
    assert status.ingress is not None
    assert status.ingress.partitions == 3
    counted = {name: count for name, count in status.counters.items() if "ingress" in name}
    assert counted == {
        "ingress_settled": 3,
        "ingress_announced": 1,
        "ingress_held": 1,
        "ingress_forwarded": 1,
        "ingress_dead_letters": 1,
    }
    assert status.dead_by_reason["DUE_MISSING"] == 1
    wait_for_group(kafka, cluster_id, [1, 1, 1])


def has_settled(status: CleanerStatus, records: int) -> bool:
    """Whether so many records were taken, and nothing of the ingress is unread or held."""
    ingress = status.ingress
    is_read = ingress is not None and ingress.partitions > 0 and not ingress.lag
    is_counted = status.counters.get("ingress_settled", 0) == records
    return is_read and is_counted and status.ingress_slot is None


def wait_for_group(kafka: KafkaBroker, cluster_id: str, offsets: list[int]) -> None:
    """The progress as Kafka's own tools show it."""
    names = KafkaNames(cluster_id)
    looking = Consumer({"bootstrap.servers": kafka.address, "group.id": names.ingress_group})
    partitions = [TopicPartition(names.ingress, number) for number in range(len(offsets))]
    with closing(looking):
        wait_until(
            "it is shown",
            lambda: [each.offset for each in looking.committed(partitions, 10)] == offsets,
        )


def test_a_cleaner_that_is_started_again_goes_on(
    kafka: KafkaBroker, cluster_id: str, wheels: Wheels, topic: str
) -> None:
    sender = Sender(kafka, cluster_id)
    to = (ingress.TOPIC, topic.encode())
    sent = 0
    for life in range(3):
        with World(kafka.address, wheels.data, cluster_id, wheels) as world:
            world.wait_leading()
            if life == 0:
                world.wait_for(
                    "found", lambda s: s.ingress is not None and bool(s.ingress.partitions)
                )
            for delay_ms in (0, 200, 60_000, 0, 200):
                sender.send(b"%d" % sent, [to, (ingress.DELAY_MS, b"%d" % delay_ms)], sent % 2)
                sent += 1
            if life == 1:
                world.wait_for("some", lambda s: s.counters.get("ingress_settled", 0) > 0)
            if life == 2:
                world.wait_for("all", lambda s: s.ingress is not None and not s.ingress.lag)
                received = committed(kafka, topic, 12)
    assert sorted(int(each.value() or b"") for each in received) == [
        number for number in range(15) if number % 5 != 2
    ]


def test_without_ingress_no_topic_is_made(
    kafka: KafkaBroker, cluster_id: str, wheels: Wheels
) -> None:
    with World(kafka.address, wheels.data, cluster_id, wheels, ingress=False) as world:
        world.wait_leading()
        assert world.status.ingress is None
    known = AdminClient({"bootstrap.servers": kafka.address}).list_topics(timeout=60).topics
    assert KafkaNames(cluster_id).ingress not in known
