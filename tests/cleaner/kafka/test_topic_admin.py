"""Asking the real broker about topics, over and over: nothing may be left of an answer."""

from __future__ import annotations

import gc

import pytest
from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient

from delaywheel_replica.cleaner.delivery.topics import TopicState
from delaywheel_replica.cleaner.kafka.ingress_finding import topic_ids
from delaywheel_replica.cleaner.kafka.topic_admin import KafkaTopicAdmin, release_leaked_id
from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import create_topic

pytestmark = pytest.mark.kafka

TIMES = 40


def ids_in_memory() -> int:
    gc.collect()
    return sum(type(each).__name__ == "Uuid" for each in gc.get_objects())


def test_what_was_described_is_given_back(kafka: KafkaBroker, cluster_id: str) -> None:
    topic = f"orders-{cluster_id}"
    create_topic(kafka.address, topic)
    settings = KafkaSettings(KafkaNames(cluster_id), {"bootstrap.servers": kafka.address})
    described, client = KafkaTopicAdmin(settings), AdminClient(settings.admin())
    before = ids_in_memory()
    for _ in range(TIMES):
        assert described.describe([topic])[topic].state is TopicState.PRESENT
        assert topic_ids(client, [topic]).keys() == {topic}
    assert ids_in_memory() - before < TIMES


def test_an_id_that_nobody_leaks_is_left_alone(kafka: KafkaBroker, cluster_id: str) -> None:
    topic = f"orders-{cluster_id}"
    create_topic(kafka.address, topic)
    client = AdminClient({"bootstrap.servers": kafka.address})
    found = client.describe_topics(TopicCollection([topic]))[topic].result()
    id_ = str(found.topic_id)
    for _ in range(10):
        release_leaked_id(found)
        assert str(found.topic_id) == id_
