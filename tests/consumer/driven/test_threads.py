"""Handlers on threads, and batches that stop at one message."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable

import pytest

from delaywheel.consumer import (
    AsyncRetryConsumer,
    Batch,
    BatchItemError,
    ReceivedMessage,
    RetryConsumer,
)
from delaywheel.consumer.engine.handler_threads import HandlerThreads
from delaywheel.consumer.message import State
from delaywheel.consumer.records import Partition
from support.consumer.driven import DrivenConsumer, start
from support.consumer.fake_kafka import FakeKafka

PATIENCE_S = 30.0


def filled(records: int, keys: int, **options: object) -> DrivenConsumer:
    """A consumer that holds records of some keys, in turn."""
    kafka = FakeKafka(partitions=1)
    for number in range(records):
        key = None if number % keys == 0 else b"%d" % (number % keys)
        kafka._append(Partition(kafka.source, 0), key, b"%d" % number, [])
    consumer = start(kafka, max_deliveries=None, **options)
    while consumer.engine._book.held < records:
        consumer.run_once()
    return consumer


def take_of(
    consumer: DrivenConsumer, records: int
) -> tuple[Callable[[int], Batch], Callable[[], bool]]:
    taken = 0

    def take(most: int) -> Batch:
        nonlocal taken
        batch = consumer.engine.desk.hand_out(most)
        taken += len(batch)
        return batch

    def has_ended() -> bool:
        return taken >= records and not consumer.engine._book.in_hand([LANE])

    return take, has_ended


LANE = Partition("orders", 0)


def test_records_of_a_key_are_handled_in_order_and_others_meanwhile() -> None:
    consumer = filled(200, 7)
    seen: defaultdict[bytes | None, list[int]] = defaultdict(list)
    both = threading.Barrier(2)
    met = threading.Event()

    def handle(message: ReceivedMessage) -> None:
        if not met.is_set() and message.key in (b"1", b"2"):
            both.wait(PATIENCE_S)  # two keys of different threads are in hand at once
            met.set()
        seen[message.key].append(int(message.value or b""))

    take, has_ended = take_of(consumer, 200)
    HandlerThreads(handle, 4).run(take, has_ended, consumer.engine.desk.hand_back)
    consumer.run_once()
    assert consumer.engine.counts.done == 200
    for key, numbers in seen.items():
        assert key is None or numbers == sorted(numbers)


def test_what_a_handler_raises_ends_it_and_the_rest_is_handed_back() -> None:
    consumer = filled(100, 100, retry_on=OSError)

    def handle(message: ReceivedMessage) -> None:
        if message.value == b"7":
            raise RuntimeError("no outcome")

    take, has_ended = take_of(consumer, 100)
    with pytest.raises(RuntimeError, match="no outcome"):
        HandlerThreads(handle, 1).run(take, has_ended, consumer.engine.desk.hand_back)
    waiting = [int(one.value or b"") for one in consumer.take(100)]
    assert waiting == list(range(8, 100))  # in order, and nothing twice


def test_a_concurrency_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="concurrency=0"):
        HandlerThreads(print, 0)


@pytest.mark.parametrize("by_index", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_batch_that_stops_at_one_is_done_before_it(by_index: bool, ordered: bool) -> None:
    consumer = filled(5, 1 if not ordered else 9, ordered=ordered)
    batch = consumer.engine.desk.hand_out(5)
    with batch:
        raise BatchItemError(2 if by_index else batch[2]) from OSError("down")
    consumer.engine._commits.commit()
    counts = consumer.engine.counts
    assert (counts.done, counts.retried) == (2, 1)
    again = consumer.take(9)
    assert [(one.value, one.attempt) for one in again] == [(b"3", 1), (b"4", 1)]
    for one in again:
        one.done()
    consumer.engine._commits.commit()
    assert consumer.engine.counts.done == 4


def test_a_batch_that_stops_at_what_means_no_outcome_raises_that() -> None:
    consumer = filled(3, 1, retry_on=OSError)
    batch = consumer.engine.desk.hand_out(3)
    with pytest.raises(BatchItemError), batch:
        raise BatchItemError(1) from KeyError("x")
    assert [one.state for one in batch] == [State.SETTLED, State.IN_HAND, State.WAITING]


def test_a_batch_leaves_alone_what_is_handed_out_again() -> None:
    consumer = filled(3, 1)
    batch = consumer.engine.desk.hand_out(3)
    with batch:
        assert batch[1].nack()
        [again] = consumer.take()
    assert [one.state for one in batch] == [State.SETTLED, State.FORGOTTEN, State.SETTLED]
    assert again.state is State.IN_HAND
    assert again.done()


def test_who_waits_for_a_consumer_that_does_not_run_is_told() -> None:
    """It was not entered, or in the process that forked this one: nothing would ever come."""
    threaded = RetryConsumer("orders", group="g", bootstrap="nowhere")
    with pytest.raises(RuntimeError, match="within its with block"):
        threaded.run(print)
    awaited = AsyncRetryConsumer("orders", group="g", bootstrap="nowhere")
    with pytest.raises(RuntimeError, match="within its with block"):
        asyncio.run(awaited.receive())
