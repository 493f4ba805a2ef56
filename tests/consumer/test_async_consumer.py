"""AsyncRetryConsumer on a real Kafka: many handlers at once on one loop."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from confluent_kafka import Producer

from delaywheel.consumer import AsyncRetryConsumer, ReceivedMessage
from local.loopback.kafka import KafkaBroker

pytestmark = pytest.mark.kafka

PATIENCE_S = 60.0


async def test_handlers_run_at_once_and_settle_in_any_order(
    kafka: KafkaBroker, cluster: str, orders: str
) -> None:
    producer = Producer({"bootstrap.servers": kafka.address})
    for number in range(100):
        producer.produce(orders, b"%d" % number)
    assert producer.flush(PATIENCE_S) == 0
    attempts: Counter[int] = Counter()
    running, most_running, done = 0, 0, 0
    consumer = AsyncRetryConsumer(
        orders,
        group="billing",
        bootstrap=kafka.address,
        cluster=cluster,
        retry=("50ms", "100ms"),
        expired="dead",
    )

    async def handle(message: ReceivedMessage) -> None:
        nonlocal running, most_running, done
        number = int(message.value or b"")
        running += 1
        most_running = max(most_running, running)
        try:
            # Whatever the order in which they come back to it: the later ones first.
            await asyncio.sleep(0.2 - number / 1000)
            attempts[number] += 1
            if number % 10 == 0 and message.attempt < 3:
                raise OSError(number)
        finally:
            running -= 1
        done += 1
        if done == 100:
            consumer.stop()

    async with asyncio.timeout(PATIENCE_S), consumer:
        await consumer.run(handle, concurrency=30)
    assert most_running == 30
    assert attempts == {number: 3 if number % 10 == 0 else 1 for number in range(100)}
    assert (consumer.counts.done, consumer.counts.retried) == (100, 20)


async def test_a_loop_takes_messages_and_a_cancelled_one_leaves_them(
    kafka: KafkaBroker, cluster: str, orders: str
) -> None:
    producer = Producer({"bootstrap.servers": kafka.address})
    for number in range(3):
        producer.produce(orders, b"%d" % number, partition=0)
    assert producer.flush(PATIENCE_S) == 0

    def consumer() -> AsyncRetryConsumer:
        return AsyncRetryConsumer(
            orders, group="billing", bootstrap=kafka.address, cluster=cluster, drain="100ms"
        )

    async with consumer() as first:
        first_message = await first.receive(PATIENCE_S)
        assert first_message is not None
        async with first_message:
            pass
        assert await first.flush()
        second_message = await first.receive(PATIENCE_S)
        assert second_message is not None

        async def hang() -> None:
            async with second_message:
                await asyncio.sleep(PATIENCE_S)

        task = asyncio.create_task(hang())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not second_message.is_settled
    values = []
    async with consumer() as second:
        async for message in second:
            async with message:
                values.append(message.value)
            if len(values) == 2:
                second.stop()
    assert values == [b"1", b"2"]
