"""How far consumer groups have come, as Kafka has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from confluent_kafka import Consumer, KafkaException, TopicPartition

from delaywheel_audit.kafka.client import ClientSettings
from delaywheel_audit.kafka.questions import made

_TIMEOUT_S: Final = 30.0


def committed(
    client: ClientSettings, group: str, partitions: Mapping[str, Sequence[int]]
) -> dict[str, dict[int, int]] | None:
    """Returns the next offsets of a group by topic and partition; None: Kafka does not say them.

    A consumer is asked, not an admin client, which may end the process while the group's
    coordinator is away (librdkafka's issues 4605 and 5397). It joins nothing.
    """
    wanted = [TopicPartition(topic, one) for topic, of in partitions.items() for one in of]
    settings = {**client.admin(), "group.id": group, "isolation.level": "read_committed"}
    consumer: Consumer = made(client, lambda: Consumer(settings))
    try:
        answer = consumer.committed(wanted, timeout=_TIMEOUT_S)
    except KafkaException:
        return None
    finally:
        consumer.close()
    found: dict[str, dict[int, int]] = {topic: {} for topic in partitions}
    for one in answer:
        if one.error is not None:
            return None
        if one.offset >= 0:
            found[one.topic][one.partition] = one.offset
    return found
