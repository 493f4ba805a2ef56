"""AsyncRetryConsumer on a real Kafka: what a cancelled task leaves is delivered again."""

from __future__ import annotations

import asyncio

import pytest
from confluent_kafka import Producer

from delaywheel.consumer import AsyncRetryConsumer
from local.loopback.kafka import KafkaBroker

pytestmark = pytest.mark.kafka

PATIENCE_S = 60.0


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
