"""One bad topic or message holds up nobody else for long, and is itself never lost."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from delaywheel import Message
from local.kafka import KafkaBroker
from support.read_committed import (
    CommittedReader,
    create_topic,
    delete_topic,
    headers_of,
    set_topic,
)
from support.service import Service

pytestmark = pytest.mark.kafka


def dead_topic(service: Service) -> str:
    return f"delaywheel-{service.cluster_id}-dead"


def test_a_topic_deleted_while_messages_are_pending(
    own_service: Service, kafka: KafkaBroker, new_topic: Callable[..., str]
) -> None:
    doomed, healthy = new_topic(), new_topic()
    batch = [
        Message(
            topic, b"%d" % n, key=b"k", headers=[("h", b"1")], delay=timedelta(seconds=3 + n / 50)
        )
        for n in range(20)
        for topic in (doomed, healthy)
    ]
    with own_service.client() as client:
        assert not [r.error for r in client.produce_many(batch) if r.error]
    delete_topic(kafka.address, doomed)
    with (
        CommittedReader(kafka.address, healthy) as good,
        CommittedReader(kafka.address, dead_topic(own_service)) as dead,
    ):
        good.wait_for(20, timeout_s=40)
        dead.wait_for(20, timeout_s=40)
        assert sorted(int(m.value() or b"") for m in good.read_to_end()) == list(range(20))
        letters = dead.read_to_end()
    assert sorted(int(m.value() or b"") for m in letters) == list(range(20))
    for letter in letters:
        headers = dict(headers_of(letter))
        assert letter.key() == b"k"
        assert headers["h"] == b"1"
        assert headers["dw-dead-topic"] == doomed.encode()
        assert headers["dw-dead-reason"]


def test_a_message_that_became_too_large_for_its_topic(
    own_service: Service, kafka: KafkaBroker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    with own_service.client() as client:
        results = client.produce_many(
            [
                Message(topic, b"x" * 50_000, delay=timedelta(seconds=4)),
                *(Message(topic, b"%d" % n, delay=timedelta(seconds=4)) for n in range(10)),
            ]
        )
        assert not [r.error for r in results if r.error]
    set_topic(kafka.address, topic, "max.message.bytes", "10000")
    with (
        CommittedReader(kafka.address, topic) as good,
        CommittedReader(kafka.address, dead_topic(own_service)) as dead,
    ):
        good.wait_for(10, timeout_s=40)
        (letter,) = dead.wait_for(1, timeout_s=40)
        assert sorted(int(m.value() or b"") for m in good.read_to_end()) == list(range(10))
    assert letter.value() == b"x" * 50_000


def test_a_partition_that_the_topic_has_no_more(
    own_service: Service, kafka: KafkaBroker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(partitions=8)
    with own_service.client() as client:
        client.produce(topic, b"nowhere", partition=7, delay=timedelta(seconds=5))
        client.produce(topic, b"fine", delay=timedelta(seconds=5))
        delete_topic(kafka.address, topic)
        create_topic(kafka.address, topic)
    with (
        CommittedReader(kafka.address, topic) as good,
        CommittedReader(kafka.address, dead_topic(own_service)) as dead,
    ):
        assert [m.value() for m in good.wait_for(1, timeout_s=40)] == [b"fine"]
        assert [m.value() for m in dead.wait_for(1, timeout_s=40)] == [b"nowhere"]
