"""A topic of a test of the audit: filled in transactions or without."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from delaywheel_audit.kafka.client import ClientSettings
from delaywheel_audit.kafka.plan import Plan, plan
from delaywheel_audit.kafka.questions import KafkaQuestions
from support.kafka.read_committed import PATIENCE_S, create_topic, delete_topic
from support.services.waiting import wait_until

Headers: TypeAlias = Sequence[tuple[str, bytes | None]]


class AuditTopic:
    """One topic with a unique name; only the test uses it."""

    def __init__(
        self, bootstrap: str, *, partitions: int = 1, config: dict[str, str] | None = None
    ) -> None:
        self.bootstrap = bootstrap
        self.name = f"audit-{uuid.uuid4().hex[:12]}"
        self.create(partitions=partitions, config=config)

    def create(self, *, partitions: int = 1, config: dict[str, str] | None = None) -> None:
        # Tests write old timestamps; a broker looks for what to delete soon after its start.
        kept = {"retention.ms": "-1"} | (config or {})
        create_topic(self.bootstrap, self.name, partitions=partitions, config=kept)

    def delete(self) -> None:
        delete_topic(self.bootstrap, self.name)

    def produce(
        self,
        values: Iterable[bytes | None],
        *,
        partition: int = 0,
        key: bytes | None = None,
        timestamps: Iterable[int] = (),
        headers: Headers = (),
    ) -> None:
        """Writes records without a transaction, and waits until they are visible."""
        # In small batches: a consumer cannot fetch less than one.
        small = {"linger.ms": 1, "batch.num.messages": 10}
        producer = Producer({"bootstrap.servers": self.bootstrap, **small})
        times = iter(timestamps)
        for value in values:
            place: dict[str, Any] = {"partition": partition, "headers": list(headers)}
            if (at := next(times, None)) is not None:
                place["timestamp"] = at
            producer.produce(self.name, value, key, **place)
        assert producer.flush(PATIENCE_S) == 0

    def transaction(self, values: Iterable[bytes], *, commits: bool = True) -> None:
        """Writes records in a transaction, which ends as given."""
        producer = self.open_transaction(values)
        if commits:
            producer.commit_transaction(PATIENCE_S)
        else:
            producer.abort_transaction(PATIENCE_S)
        self.settle()

    def settle(self) -> None:
        """Waits until no transaction is open: its end is decided before it is visible."""
        wait_until(
            f"no transaction of {self.name} is open",
            lambda: not any(range_.open_until for range_ in self.plan().topics[0].ranges),
        )

    def open_transaction(self, values: Iterable[bytes]) -> Producer:
        """Writes records in a transaction, and leaves it open."""
        producer = Producer(
            {"bootstrap.servers": self.bootstrap, "transactional.id": f"t-{uuid.uuid4().hex}"}
        )
        producer.init_transactions(PATIENCE_S)
        producer.begin_transaction()
        for value in values:
            producer.produce(self.name, value, partition=0)
        producer.flush(PATIENCE_S)
        return producer

    def delete_records(self, before: int, *, partition: int = 0) -> None:
        """Lets retention delete everything before the offset."""
        place = TopicPartition(self.name, partition, before)
        client = AdminClient({"bootstrap.servers": self.bootstrap})
        client.delete_records([place])[place].result()

    def client(self, *, timeout_s: float = 60.0, **more: str) -> ClientSettings:
        """Settings that reach this topic's broker; `_` stands for the dots of others."""
        others = {name.replace("_", "."): value for name, value in more.items()}
        return ClientSettings({"bootstrap.servers": self.bootstrap, **others}, timeout_s)

    def plan(self, *, from_ms: int | None = None, to_ms: int | None = None) -> Plan:
        """What a read would read now."""
        return plan([self.name], KafkaQuestions(self.client()), from_ms=from_ms, to_ms=to_ms)


def numbered(count: int, start: int = 0) -> list[bytes]:
    """Values that show their order."""
    return [b"%d" % number for number in range(start, start + count)]
