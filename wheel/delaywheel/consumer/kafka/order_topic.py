"""Reads the order topics: which records of each lane are away.

They are folded while they are read, so memory holds only what is away. What was read stays known
for some minutes: a partition that comes back soon is read on from there. Not for longer: then
records that ended meanwhile may have been compacted away without a trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from delaywheel.consumer.order import Away, fold
from delaywheel.consumer.port import KafkaUnavailable
from delaywheel.consumer.records import Partition

STANDSTILL_S = 30.0
"""Reading is given up, and begun again, after this time without any progress."""
TOLD_S = 5.0
"""How often reading that takes long is told."""
FETCH_RECORDS = 5_000
FETCH_S = 0.05
TRACE_MS = 600_000
"""How long compaction keeps the trace of what is no longer away, in topics that we make."""
KEPT_S = TRACE_MS / 1000 / 2
ORDER_CONFIG = {
    "cleanup.policy": "compact",
    "segment.ms": "600000",
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": str(TRACE_MS),
}
"""Settings of order topics that we make."""


@dataclass(slots=True)
class _KnownPartition:
    """What is known of one partition of an order topic."""

    position: int = 0
    away: dict[int, Away] = field(default_factory=dict)
    read_s: float = 0.0


class OrderTopics:
    """The order topics of one consumer."""

    def __init__(
        self,
        client: Mapping[str, Any],
        group: str,
        ends_of: Callable[[list[Partition]], Mapping[Partition, int]],
    ) -> None:
        """Connects when it reads; the group's rights count, and nothing is committed.

        `ends_of` asks for the offsets after the last records, open transactions included.
        """
        self._client = {**client, "group.id": group, "enable.auto.commit": False}
        self._ends_of = ends_of
        self._known: dict[Partition, _KnownPartition] = {}

    def read(
        self, partitions: list[Partition], tell: Callable[[int], None] = lambda _: None
    ) -> dict[Partition, list[Away]]:
        """Returns what is away now, by partition of an order topic.

        `tell` is called every few seconds with how many records are unread. Raises KafkaUnavailable
        if Kafka does not answer, or a transaction stays open.
        """
        ends = self._ends_of(partitions)
        now_s = time.monotonic()
        for at in partitions:
            known = self._known.get(at)
            if known is None or now_s - known.read_s > KEPT_S or known.position > ends[at]:
                self._known[at] = _KnownPartition(read_s=now_s)
        left = {at: end for at, end in ends.items() if self._known[at].position < end}
        if left:
            self._read(left, tell)
        for at in partitions:
            self._known[at].read_s = time.monotonic()
        return {at: list(self._known[at].away.values()) for at in partitions}

    def _read(self, left: dict[Partition, int], tell: Callable[[int], None]) -> None:
        reader = Consumer(
            {
                **self._client,
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 50,
            }
        )
        try:
            reader.assign(
                [TopicPartition(*at, self._known[at].position or OFFSET_BEGINNING) for at in left]
            )
            told_s = time.monotonic()
            deadline = told_s + STANDSTILL_S
            while left:
                now_s = time.monotonic()
                if now_s - told_s > TOLD_S:
                    told_s = now_s
                    tell(sum(end - self._known[at].position for at, end in left.items()))
                for at in left:  # what was read so far is kept if this ends early
                    self._known[at].read_s = now_s
                for message in reader.consume(FETCH_RECORDS, FETCH_S):
                    if self._take(message, left):
                        deadline = time.monotonic() + STANDSTILL_S
                if time.monotonic() > deadline:
                    raise KafkaUnavailable(f"{next(iter(left))} cannot be read to its end")
        finally:
            reader.close()

    def _take(self, message: Any, left: dict[Partition, int]) -> bool:
        """Takes in one record, or the end of a partition; returns whether that is progress."""
        at, error = Partition(message.topic(), message.partition()), message.error()
        if at not in left:
            return False
        known = self._known[at]
        if error is None:
            fold(known.away, message.key(), message.value())
            known.position = message.offset() + 1
            return True
        # The end of committed records would come too early: a transaction may be open there.
        if error.code() == KafkaError._PARTITION_EOF and message.offset() >= left[at]:
            known.position = message.offset()
            del left[at]
            return True
        return False
