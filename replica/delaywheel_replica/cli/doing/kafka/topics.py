"""`delaywheel topic create`: uses Kafka's admin interface with the operator's settings.

A node is not asked: it makes topics only where `create_topics` lets every caller have them made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from delaywheel_replica.cli.asking.kafka import (
    KafkaOptions,
    kafka_access,
    kafka_failure,
    settings_failure,
)
from delaywheel_replica.cli.printing.text import note, say

_BROKERS_CHOOSE = -1
"""Kafka's own way to say: as the brokers have it by default."""


def create(
    topics: Sequence[str],
    *,
    partitions: int | None,
    replication_factor: int | None,
    **where: Unpack[KafkaOptions],
) -> None:
    """Creates missing topics; existing ones stay as they are."""
    access = kafka_access(where)
    try:
        client = AdminClient({"client.id": "delaywheel-topics", **access.client, "log_level": 0})
    except KafkaException as exception:
        raise settings_failure(exception) from exception
    timeout_s = where["timeout_s"]
    wanted = [
        NewTopic(topic, partitions or _BROKERS_CHOOSE, replication_factor or _BROKERS_CHOOSE)
        for topic in topics
    ]
    made = client.create_topics(wanted, request_timeout=timeout_s, operation_timeout=timeout_s)
    new = 0
    for topic, future in made.items():
        try:
            future.result()
        except KafkaException as exception:
            if exception.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise kafka_failure(exception.args[0], topic, "TOPIC_REFUSED") from exception
            say(f"there already: {topic}")
        else:
            say(f"made: {topic}")
            new += 1
    if new:
        note("within 2 s all nodes accept messages for new topics")
