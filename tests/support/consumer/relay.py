"""Ingress, played: what is sent to the ingress topic comes to its topic at its due, once.

It reads committed records, waits, and forwards in transactions, as docs/INGRESS.md says. It stands
for delaywheel where the consumer is the subject, and starts in no time.
"""

from __future__ import annotations

import heapq
import threading
import time
import uuid
from types import TracebackType
from typing import Self

from confluent_kafka import Consumer, Message, Producer, TopicPartition

from delaywheel import ingress
from support.kafka.read_committed import create_topic, headers_of

BATCH = 500


class Relay:
    """Plays ingress for one cluster id, on a thread, until it is closed."""

    def __init__(self, bootstrap: str, cluster_id: str, *, partitions: int = 2) -> None:
        self.topic = ingress.ingress_topic(cluster_id)
        create_topic(bootstrap, self.topic, partitions=partitions)
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": f"relay-{cluster_id}",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 20,
            }
        )
        self._consumer.assign([TopicPartition(self.topic, n, 0) for n in range(partitions)])
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "transactional.id": f"relay-{cluster_id}",
                "partitioner": "murmur2_random",
                "linger.ms": 0,
            }
        )
        self._waiting: list[tuple[int, int, Message]] = []
        self._taken = 0
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_ending.set()
        self._thread.join()
        self._consumer.close()

    def _run(self) -> None:
        self._producer.init_transactions()
        while not self._is_ending.is_set():
            for message in self._consumer.consume(BATCH, 0.02):
                assert message.error() is None, message.error()
                self._taken += 1
                due_ms = int(_told(message)[ingress.DELIVER_AT])
                heapq.heappush(self._waiting, (due_ms, self._taken, message))
            due = []
            while self._waiting and self._waiting[0][0] <= time.time_ns() // 1_000_000:
                due.append(heapq.heappop(self._waiting))
            if due:
                self._forward([(due_ms, message) for due_ms, _, message in due])

    def _forward(self, due: list[tuple[int, Message]]) -> None:
        self._producer.begin_transaction()
        for due_ms, message in due:
            told = _told(message)
            passed = [
                (name, value)
                for name, value in headers_of(message)
                if not name.startswith("dw-") or name.startswith(ingress.PASSED_PREFIX)
            ]
            passed += [
                ("dw-id", uuid.uuid4().hex.encode()),
                ("dw-due", b"%d" % due_ms),
                ("dw-accepted", b"%d" % message.timestamp()[1]),
                ("dw-wheel", b"relay.1"),
            ]
            self._producer.produce(
                told[ingress.TOPIC].decode(),
                value=message.value(),
                key=message.key(),
                headers=passed,  # type: ignore[arg-type]  # its list is typed as invariant
                partition=int(told.get(ingress.PARTITION, b"-1")),
            )
        self._producer.commit_transaction()


def _told(message: Message) -> dict[str, bytes]:
    return {name: value for name, value in headers_of(message) if value is not None}
