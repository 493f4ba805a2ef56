"""Detects open transactions on a topic by records that are written and not visible."""

from __future__ import annotations

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

TIMEOUT_S = 20.0


class OpenTransactions:
    """Compares the ends of a topic's partitions under both isolation levels."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        self._client = AdminClient({"bootstrap.servers": bootstrap, "log_level": 2})
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        self._latest = {TopicPartition(topic, n): latest for n in range(partitions)}

    def records(self) -> int:
        """Returns how many records are written and neither committed nor aborted.

        None that could be counted, if the client has to learn first that the broker began again.
        """
        try:
            # In this order: a commit in between makes the answer too small, never too great.
            written = self._end(IsolationLevel.READ_UNCOMMITTED)
            return max(0, written - self._end(IsolationLevel.READ_COMMITTED))
        except KafkaException:
            self._client.list_topics(timeout=TIMEOUT_S)
            return 0

    def _end(self, level: IsolationLevel) -> int:
        futures = self._client.list_offsets(
            self._latest, isolation_level=level, request_timeout=TIMEOUT_S
        )
        return sum(future.result().offset for future in futures.values())
