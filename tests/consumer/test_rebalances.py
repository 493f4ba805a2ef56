"""Rebalances that leave alone what stays, on a real Kafka: of the classic protocol and KIP-848."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import ExitStack
from typing import Literal, Self

import pytest
from confluent_kafka import Producer

from delaywheel.consumer import ConsumerEvents, Partition, ReceivedMessage, RetryConsumer
from local.loopback.kafka import KafkaBroker
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka

PATIENCE_S = 60.0
RECORDS = 300
QUICK = {"heartbeat.interval.ms": 500}
"""Members hear of a rebalance with the answer to a heartbeat; with KIP-848 the broker says when."""


class Moves(ConsumerEvents):
    """Notes which partitions were given up."""

    def __init__(self) -> None:
        self.gone: list[Partition] = []

    def revoked(self, partitions: object) -> None:
        self.gone += partitions  # type: ignore[arg-type]


class Member:
    """A consumer on a thread of its own, whose handlers fail once at each fifth record."""

    def __init__(
        self,
        kafka: KafkaBroker,
        cluster: str,
        topic: str,
        rebalances: Literal["cooperative", "consumer"],
        handled: Counter[tuple[int, int]],
    ) -> None:
        self.moves = Moves()
        self.consumer = RetryConsumer(
            topic,
            group="moving",
            bootstrap=kafka.address,
            cluster=cluster,
            retry=("100ms",),
            rebalances=rebalances,
            events=self.moves,
            kafka=QUICK if rebalances == "cooperative" else {},
        )
        self._handled = handled
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.consumer.stop()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        with self.consumer:
            self.consumer.run(self._handle, concurrency=2)

    def _handle(self, message: ReceivedMessage) -> None:
        time.sleep(0.005)
        number = int(message.value or b"")
        self._handled[number, message.attempt] += 1
        if number % 5 == 0 and message.attempt == 1:
            raise OSError(number)


@pytest.mark.parametrize("rebalances", ["cooperative", "consumer"])
def test_partitions_move_and_each_record_ends_once(
    kafka: KafkaBroker, cluster: str, orders: str, rebalances: Literal["cooperative", "consumer"]
) -> None:
    handled: Counter[tuple[int, int]] = Counter()
    producer = Producer({"bootstrap.servers": kafka.address})

    def send(numbers: range) -> None:
        for number in numbers:
            producer.produce(orders, b"%d" % number, key=b"%d" % number)
        assert producer.flush(PATIENCE_S) == 0

    def member() -> Member:
        return Member(kafka, cluster, orders, rebalances, handled)

    with ExitStack() as both:
        first = both.enter_context(member())
        wait_until("all are assigned", lambda: bool(first.consumer.partitions))
        had = set(first.consumer.partitions)
        send(range(RECORDS // 3))
        with member() as second:
            wait_until("some have moved", lambda: bool(second.consumer.partitions))
            send(range(RECORDS // 3, 2 * RECORDS // 3))
            wait_until(
                "no partition is with nobody",
                lambda: {*first.consumer.partitions, *second.consumer.partitions} == had,
            )
            gone = set(first.moves.gone)
            assert gone == had - set(first.consumer.partitions)
            assert gone != had
        send(range(2 * RECORDS // 3, RECORDS))
        wait_until("all are back", lambda: set(first.consumer.partitions) == had)
        wait_until(
            "all are handled",
            lambda: first.consumer.counts.done + second.consumer.counts.done == RECORDS,
        )
        counts = (first.consumer.counts, second.consumer.counts)
    assert sum(one.retried for one in counts) == RECORDS // 5
    assert handled == Counter(
        {(number, attempt): 1 for number in range(RECORDS) for attempt in (1, 2)}
    ) - Counter({(number, 2): 1 for number in range(RECORDS) if number % 5})
