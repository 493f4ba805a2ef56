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
