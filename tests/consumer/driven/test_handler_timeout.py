"""Handlers that take longer than `handler_timeout`."""

from __future__ import annotations

import asyncio
import threading

import pytest

from delaywheel.consumer import AsyncRetryConsumer, ConsumerTrouble
from delaywheel.consumer.message import ReceivedMessage
from support.consumer.driven import DrivenConsumer, start
from support.consumer.fake_kafka import INGRESS, FakeKafka

PATIENCE_S = 30.0


def pass_time(consumer: DrivenConsumer, message: ReceivedMessage) -> None:
    """Has a handler be late."""
    message.block.handed_s[message.index] -= 60
    consumer.engine.desk._next_look_s = 0.0
    consumer.run_once()


def taken(kafka: FakeKafka, **options: object) -> tuple[DrivenConsumer, ReceivedMessage]:
    kafka.send(b"x", key=b"k")
    consumer = start(kafka, handler_timeout="30s", **options)
    consumer.run_once()
    [message] = consumer.take()
    return consumer, message


@pytest.mark.parametrize("how", ["done", "retry", "leave", "raise"])
def test_a_late_handlers_record_is_retried_and_what_it_says_later_is_dropped(how: str) -> None:
    kafka = FakeKafka(partitions=1)
    consumer, message = taken(kafka)
    lost = threading.Event()
    message.on_lost(lost.set)
    consumer.run_once()
    assert [message.is_ours] == [True]
    pass_time(consumer, message)
    assert lost.is_set()
    assert not message.is_ours
    assert list(consumer.engine.health.troubles) == [ConsumerTrouble.HANDLER_HANGS]
    [retry] = [one for one in kafka.committed_records if one.topic == INGRESS]
    assert b"HandlerTimeoutError" in (dict(retry.headers)["dw-retry-last-error"] or b"")
    if how == "done":
        assert message.done() is False
    elif how == "retry":
        assert message.retry() is False
    else:
        with message:
            if how == "raise":
                raise ValueError(how)
    pass_time(consumer, message)
    assert consumer.engine.health.is_well
    assert (consumer.engine.counts.retried, consumer.engine.counts.done) == (1, 0)
    assert len([one for one in kafka.committed_records if one.topic == INGRESS]) == 1


def test_a_time_out_that_is_no_outcome_by_the_options_is_a_dead_letter() -> None:
    kafka = FakeKafka(partitions=1)
    consumer, message = taken(kafka, retry_on=ValueError)
    pass_time(consumer, message)
    [letter] = [one for one in kafka.committed_records if one.topic == kafka.dead]
    assert dict(letter.headers)["dw-dead-reason"] == b"HANDLER_TIMEOUT"


def test_the_next_of_the_key_waits_for_the_retry_and_not_for_the_handler() -> None:
    kafka = FakeKafka(partitions=1)
    consumer, message = taken(kafka, ordered=True)
    kafka.send(b"y", key=b"k")
    pass_time(consumer, message)
    kafka.now_ms += 60_000
    consumer.run_once()
    handled = []
    for _ in range(9):
        for one in consumer.take(9):
            handled.append(one.value)
            one.done()
        consumer.run_once()
    assert handled[0] == b"x"


async def test_a_task_is_cancelled_and_its_record_retried() -> None:
    kafka = FakeKafka(partitions=1)
    kafka.send(b"slow")
    kafka.send(b"next")
    driven = start(kafka, handler_timeout="50ms")
    consumer = AsyncRetryConsumer("orders", group="g", bootstrap="nowhere", handler_timeout="50ms")
    consumer._engine = driven.engine
    ended: list[bytes | None] = []

    async def handle(message: ReceivedMessage) -> None:
        if message.value == b"slow" and message.attempt == 1:
            try:
                await asyncio.sleep(PATIENCE_S)
            except asyncio.CancelledError:
                ended.append(b"cancelled")
                raise
        ended.append(message.value)

    running = asyncio.create_task(consumer.run(handle, concurrency=2))
    async with asyncio.timeout(PATIENCE_S):
        while driven.engine.counts.done < 2:
            driven.run_once()
            await asyncio.sleep(0.01)
    driven.engine.stop()
    await running
    assert ended == [b"next", b"cancelled", b"slow"]
    assert (driven.engine.counts.retried, driven.engine.health.is_well) == (1, True)
