"""Reads the order topics: which records of each lane are away."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition

from delaywheel.consumer.order import Away, read_away
from delaywheel.consumer.port import KafkaAway
from delaywheel.consumer.records import Partition

_LOG = logging.getLogger("delaywheel.consumer")

ASK_S = 5.0
AWAY_S = 30.0
FETCH_AWAY = 5_000

_PARTITION_EOF = KafkaError._PARTITION_EOF  # noqa: SLF001 - its name in the library


def read_order(
    client: Mapping[str, Any], group: str, wanted: Mapping[Partition, TopicPartition]
) -> dict[Partition, list[Away]]:
    """Reads partitions of order topics up to their present ends, open transactions included."""
    settings = {**client, "group.id": group, "enable.auto.commit": False}
    dirty = Consumer({**settings, "isolation.level": "read_uncommitted"}, logger=_LOG)
    reader = Consumer(
        {
            **settings,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 50,
        },
        logger=_LOG,
    )
    try:
        ends: dict[tuple[str, int], int] = {}
        for where in wanted.values():
            answer = dirty.get_watermark_offsets(where, timeout=ASK_S)
            if answer is None:
                raise KafkaAway("the end of an order topic is unknown")
            ends[where.topic, where.partition] = answer[1]
        reader.assign([TopicPartition(topic, number, 0) for topic, number in ends])
        read: dict[tuple[str, int], list[tuple[bytes | None, bytes | None]]]
        read = {where: [] for where in ends}
        deadline = time.monotonic() + AWAY_S
        while any(ends.values()):
            if time.monotonic() > deadline:
                raise KafkaAway("the end of an order topic was not reached in time")
            for message in reader.consume(FETCH_AWAY, 0.05):
                topic, partition, offset = message.topic(), message.partition(), message.offset()
                assert topic is not None
                assert partition is not None
                assert offset is not None
                error = message.error()
                if error is None:
                    read[topic, partition].append((message.key(), message.value()))
                # The end of committed records would come too early: a transaction may be open
                # there.
                elif error.code() == _PARTITION_EOF and offset >= ends[topic, partition]:
                    ends[topic, partition] = 0
    finally:
        dirty.close()
        reader.close()
    return {lane: read_away(read[where.topic, where.partition]) for lane, where in wanted.items()}
