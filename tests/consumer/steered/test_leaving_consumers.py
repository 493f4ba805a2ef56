"""A consumer's block that an exception leaves: the record that it left unsettled is not awaited."""

from __future__ import annotations

import asyncio
import threading

import pytest

from delaywheel.consumer import AsyncRetryConsumer, Batch, ReceivedMessage, RetryConsumer
from delaywheel.consumer.records import Partition
from delaywheel.consumer.watching.health import ConsumerTrouble
from delaywheel.testing import MemoryService
from support.consumer.driven import start
from support.consumer.fake_kafka import FakeKafka
from support.consumer.running import RunningKafka

PATIENCE_S = 30.0

# With an hour of `drain` each of these would wait for that.


def endless(kafka: RunningKafka, *values: bytes) -> RetryConsumer:
    kafka.put(*(values or (b"a", b"b")))
    return RetryConsumer(
        "orders", group="g", bootstrap="nowhere", retry_on=ConnectionError, drain="1h"
    )


def fail_at_first(consumer: RetryConsumer, error: type[BaseException]) -> None:
    for message in consumer:
        with message:
            raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, KeyError])
def test_a_loop_that_is_left_by_an_exception_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    consumer = endless(RunningKafka(monkeypatch))
    with pytest.raises(error), consumer:
        fail_at_first(consumer, error)
    assert consumer.counts.done == 0


def test_what_nobody_settled_is_said_when_drain_is_over(caplog: pytest.LogCaptureFixture) -> None:
    kafka = FakeKafka(partitions=1)
    kafka.send(b"1")
    consumer = start(kafka, drain="0s")
    consumer.run_once()
    consumer.take()
    consumer.engine.stop()
    consumer.engine._end()
    assert "not settled within drain" in caplog.text
    caplog.clear()
    consumer.engine._close()
    assert caplog.text == "", "all was given back before"


def test_a_consumer_that_fails_commits_nothing_while_its_clients_are_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kafka = FakeKafka(partitions=1)
    kafka.send(b"1")
    consumer = start(kafka)
    consumer.run_once()
    consumer.take()
    consumer.engine._close()
    assert caplog.text == ""


def test_what_nobody_settled_in_memory_is_no_suspect_of_the_next_block() -> None:
    with MemoryService() as service:
        with service.client() as client:
            for value in (b"a", b"b"):
                client.produce("orders", value, delay="0s")
        consumer = service.consumer("orders", group="g")
        with consumer:
            assert len(list(consumer)) == 2
        with consumer:
            assert ConsumerTrouble.RECORD_BY_RECORD not in consumer.health.troubles
            assert len(list(consumer)) == 2


def test_so_does_one_whose_exception_is_caught_within(monkeypatch: pytest.MonkeyPatch) -> None:
    with endless(RunningKafka(monkeypatch)) as consumer, pytest.raises(KeyboardInterrupt):
        fail_at_first(consumer, KeyboardInterrupt)
    assert consumer.counts.done == 0


def test_so_do_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = endless(RunningKafka(monkeypatch))

    def fail(_: Batch) -> None:
        raise KeyError

    with pytest.raises(KeyError), consumer:
        consumer.run_batches(fail)


async def test_so_do_cancelled_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    RunningKafka(monkeypatch).put(b"a", b"b")
    begun = asyncio.Event()

    async def handle(_: ReceivedMessage) -> None:
        begun.set()
        await asyncio.sleep(PATIENCE_S)

    async def consume() -> None:
        async with AsyncRetryConsumer(
            "orders", group="g", bootstrap="nowhere", drain="1h"
        ) as consumer:
            await consumer.run(handle, concurrency=5)

    running = asyncio.create_task(consume())
    async with asyncio.timeout(PATIENCE_S):
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_record_whose_task_is_cancelled_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    RunningKafka(monkeypatch).put(b"a")
    async with AsyncRetryConsumer(
        "orders", group="g", bootstrap="nowhere", drain="100ms"
    ) as consumer:
        message = await consumer.receive(PATIENCE_S)
        assert message is not None

        async def hang() -> None:
            async with message:
                await asyncio.sleep(PATIENCE_S)

        task = asyncio.create_task(hang())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not message.is_settled


async def test_so_do_tasks_that_have_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """One handler ends, so that the next record is taken, in the pass in which another fails."""
    RunningKafka(monkeypatch).put(b"ends", b"fails", b"next")
    both = asyncio.Event()

    async def handle(message: ReceivedMessage) -> None:
        if message.value == b"fails":
            asyncio.get_running_loop().call_soon(both.set)
        await both.wait()
        if message.value == b"fails":
            raise KeyError

    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(KeyError):
            async with AsyncRetryConsumer(
                "orders", group="g", bootstrap="nowhere", retry_on=OSError, drain="1h"
            ) as consumer:
                await consumer.run(handle, concurrency=2)


def test_so_does_a_batch_that_is_not_full_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = endless(RunningKafka(monkeypatch), b"a")
    receive = consumer.receive_batch

    def interrupted(most: int, timeout_s: float | None) -> Batch:
        if most == 1:
            raise KeyboardInterrupt
        return receive(most, timeout_s)

    monkeypatch.setattr(consumer, "receive_batch", interrupted)
    with pytest.raises(KeyboardInterrupt), consumer:
        next(consumer.batches(2, wait="1h"))


async def test_a_batch_that_nobody_waits_for_any_more_is_handed_out_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    RunningKafka(monkeypatch).put(b"a")
    async with AsyncRetryConsumer("orders", group="g", bootstrap="nowhere") as consumer:
        batches = consumer.batches(2, wait="1h")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(batches), 0.5)
        message = await consumer.receive(PATIENCE_S)
        assert message is not None
        assert message.done()


async def test_a_task_that_was_cancelled_may_still_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian 12's Python, 3.11.2, raises CancelledError there where an asyncio.timeout is over."""
    RunningKafka(monkeypatch)
    async with AsyncRetryConsumer("orders", group="g", bootstrap="nowhere") as consumer:

        async def clean_up() -> ReceivedMessage | None:
            try:
                await asyncio.sleep(PATIENCE_S)
            except asyncio.CancelledError:
                return await consumer.receive(0.01)
            return None

        task = asyncio.create_task(clean_up())
        await asyncio.sleep(0)
        task.cancel()
        assert await task is None


async def test_a_batch_that_awaits_what_is_cancelled_elsewhere_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    RunningKafka(monkeypatch).put(b"a")
    async with AsyncRetryConsumer("orders", group="g", bootstrap="nowhere") as consumer:

        async def handle(_: Batch) -> None:
            consumer.stop()
            raise asyncio.CancelledError  # of something that it awaited

        await consumer.run_batches(handle)
    assert consumer.counts.retried == 1


def test_a_record_in_another_threads_hands_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = endless(RunningKafka(monkeypatch))
    has_left = threading.Event()

    def settle(message: ReceivedMessage) -> None:
        with message:
            assert has_left.wait(PATIENCE_S)

    with consumer:
        first, second = consumer.receive(PATIENCE_S), consumer.receive(PATIENCE_S)
        assert first is not None
        assert second is not None
        other = threading.Thread(target=settle, args=(first,))
        other.start()
        threading.Timer(0.3, has_left.set).start()
        with pytest.raises(KeyError), second:
            raise KeyError
    other.join()
    assert consumer.counts.done == 1


def test_a_record_that_is_handed_out_again_is_waited_for() -> None:
    kafka = FakeKafka(partitions=1)
    kafka.send(b"v")
    consumer = start(kafka, retry_on=OSError)
    consumer.run_once()
    [message] = consumer.take()
    with pytest.raises(KeyError), message:
        raise KeyError
    at = Partition(kafka.source, 0)
    assert not consumer.engine._book.is_awaited([at])
    consumer.engine.desk.hand_back([message])
    assert consumer.take() == [message]
    assert consumer.engine._book.is_awaited([at])


def test_a_consumer_has_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = endless(RunningKafka(monkeypatch))
    with consumer:
        pass
    with pytest.raises(RuntimeError, match="make another one"), consumer:
        pass
