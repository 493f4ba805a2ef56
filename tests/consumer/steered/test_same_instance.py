"""Two consumers with one `instance`, on a real Kafka: one ends by name, the other goes on."""

from __future__ import annotations

import threading
from typing import Literal

import pytest
from confluent_kafka import Producer

from delaywheel.consumer import ConsumerError, ConsumerReason, RetryConsumer
from local.loopback.kafka import KafkaBroker
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka

PATIENCE_S = 60.0


@pytest.mark.parametrize(("rebalances", "who_ends"), [("eager", 0), ("consumer", 1)])
def test_one_of_two_with_the_same_instance_ends_and_the_other_goes_on(
    kafka: KafkaBroker,
    cluster: str,
    orders: str,
    rebalances: Literal["eager", "consumer"],
    who_ends: int,
) -> None:
    producer = Producer({"bootstrap.servers": kafka.address})
    consumers = [
        RetryConsumer(
            orders,
            group="billing",
            bootstrap=kafka.address,
            cluster=cluster,
            instance="pod-0",
            rebalances=rebalances,
        )
        for _ in range(2)
    ]
    ended: dict[int, ConsumerError] = {}
    handled: list[tuple[int, bytes | None]] = []

    def consume(number: int) -> None:
        try:
            with consumers[number] as consumer:
                for message in consumer:
                    with message:
                        handled.append((number, message.value))
        except ConsumerError as error:
            ended[number] = error

    def send(value: bytes) -> None:
        producer.produce(orders, value)
        assert producer.flush(PATIENCE_S) == 0
        wait_until(f"{value!r} is handled", lambda: value in {one for _, one in handled})

    threads = [threading.Thread(target=consume, args=(number,)) for number in range(2)]
    try:
        threads[0].start()
        send(b"before")
        threads[1].start()
        wait_until("one has ended", lambda: bool(ended), timeout_s=PATIENCE_S)
        send(b"after")
    finally:
        for consumer in consumers:
            consumer.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    assert list(ended) == [who_ends]
    assert ended[who_ends].reason is ConsumerReason.INSTANCE_TAKEN
    assert "instance 'pod-0' of group 'billing'" in str(ended[who_ends])
    assert (1 - who_ends, b"after") in handled
    assert consumers[1 - who_ends].counts.failed_commits <= 2
