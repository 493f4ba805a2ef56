"""Handlers on threads, and batches that stop at one message."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from delaywheel.consumer import (
    AsyncRetryConsumer,
    BatchItemError,
    ReceivedMessage,
    RetryConsumer,
)
from delaywheel.consumer.engine.handler_threads import HandlerThreads
from delaywheel.consumer.message import State
from delaywheel.consumer.records import Partition
from support.consumer.driven import DrivenConsumer, start
from support.consumer.fake_kafka import FakeKafka
from support.consumer.running import RunningKafka
from support.services.waiting import wait_until

PATIENCE_S = 30.0
LANE = Partition("orders", 0)


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


def run_threads(
    consumer: DrivenConsumer,
    handle: Callable[[ReceivedMessage], object],
    concurrency: int,
    records: int,
) -> None:
    """Has so many records handled on threads, or those before one raises what is no outcome."""
    done = 0

    def counted(message: ReceivedMessage) -> None:
        nonlocal done
        handle(message)
        done += 1
        if done == records:
            consumer.engine.stop()

    def take() -> list[ReceivedMessage]:
        found = consumer.engine.desk.take_turns(1)
        if not found:
            consumer.engine.desk.wait(0.01)
        return found

    HandlerThreads(counted, concurrency, take, consumer.engine.desk).run()
    consumer.engine._state.is_stopping = False


def test_records_of_a_key_are_handled_in_order_and_others_meanwhile() -> None:
    consumer = filled(200, 7)
    seen: defaultdict[bytes | None, list[int]] = defaultdict(list)
    both = threading.Barrier(2)
    met = threading.Event()

    def handle(message: ReceivedMessage) -> None:
        if not met.is_set() and message.key in (b"1", b"2"):
            both.wait(PATIENCE_S)  # two keys are in hand at once
            met.set()
        seen[message.key].append(int(message.value or b""))

    run_threads(consumer, handle, 4, 200)
    consumer.run_once()
    assert consumer.engine.counts.done == 200
    for key, numbers in seen.items():
        assert key is None or numbers == sorted(numbers)


def hot(
    records: int, others: int, *, is_incremental: bool = False, **options: object
) -> tuple[FakeKafka, DrivenConsumer]:
    """A consumer that holds records of one key, and behind them those of others."""
    kafka = FakeKafka(partitions=1, is_incremental=is_incremental)
    for number in range(records + others):
        key = b"hot" if number < records else b"%d" % number
        kafka._append(LANE, key, b"%d" % number, [])
    consumer = start(kafka, max_deliveries=None, **options)
    while consumer.engine._book.held < records + others:
        consumer.run_once()
    return kafka, consumer


def test_a_slow_key_is_parked_and_the_others_go_on() -> None:
    _, consumer = hot(60, 200)
    others, order = 0, list[bytes | None]()
    are_over = threading.Event()

    def handle(message: ReceivedMessage) -> None:
        nonlocal others
        if message.key == b"hot":
            assert are_over.wait(PATIENCE_S)  # the first one holds up its key, and no other
            order.append(message.value)
            return
        others += 1
        if others == 200:
            are_over.set()

    run_threads(consumer, handle, 2, 260)
    assert order == [b"%d" % number for number in range(60)]


@pytest.mark.parametrize("is_incremental", [True, False])
def test_a_rebalance_waits_for_what_runs_alone(is_incremental: bool) -> None:
    """The handler of the first record runs; those of its key, and all others, go back at once."""
    kafka, consumer = hot(20, 20, is_incremental=is_incremental, drain="30s")
    begun, goes_on = threading.Event(), threading.Event()
    handled: list[tuple[bytes | None, bool]] = []

    def handle(message: ReceivedMessage) -> None:
        handled.append((message.value, message.is_ours))
        if message.key == b"hot":
            begun.set()
            assert goes_on.wait(PATIENCE_S)

    running = threading.Thread(target=run_threads, args=(consumer, handle, 1, 99))
    running.start()
    assert begun.wait(PATIENCE_S)
    assert consumer.engine._book.in_hand([LANE]) == 1
    revoked = threading.Thread(target=consumer.engine._revoked, args=([LANE],))
    revoked.start()
    wait_until("it is given back", lambda: LANE in consumer.engine._book.paused)
    goes_on.set()
    revoked.join()
    consumer.engine.stop()
    running.join()
    assert handled == [(b"0", True)]
    assert consumer.engine.counts.done == 1
    assert kafka.offsets[LANE] == 1
    assert not consumer.engine.desk.take_turns(1)


def test_what_is_parked_waits_in_order_when_it_is_paused() -> None:
    _, consumer = hot(5, 5)
    desk = consumer.engine.desk
    first, *others = desk.take_turns(3)
    assert [one.value for one in (first, *others)] == [b"0", b"5", b"6"]
    desk.end_turn(first)  # 1 is next, and 2 to 4 are parked
    consumer.engine.pause([LANE], on=True)
    assert not desk.take_turns(1)
    consumer.engine.pause([LANE], on=False)
    assert [one.value for one in consumer.take(9)] == [b"1", b"2", b"3", b"4", b"7", b"8", b"9"]


def test_a_record_that_is_put_back_comes_before_those_behind_it() -> None:
    _, consumer = hot(4, 0)
    desk = consumer.engine.desk
    [first] = desk.take_turns(2)
    first.nack()
    assert not desk.take_turns(2)  # its handler goes on
    desk.end_turn(first)
    again = []
    while found := desk.take_turns(2):
        again += [one.value for one in found]
        desk.end_turn(*found)
    assert again == [b"0", b"1", b"2", b"3"]


def test_keys_of_partitions_that_are_gone_are_not_waited_for() -> None:
    kafka, consumer = hot(4, 0)
    desk = consumer.engine.desk
    [first] = desk.take_turns(2)
    desk.end_turn(first)
    consumer.engine._lost([LANE])
    kafka.rebalance({consumer.broker: [LANE, Partition(kafka.retry, 0)]})
    consumer.run_once()
    consumer.run_once()
    [again] = desk.take_turns(2)
    assert (again.value, again.is_ours) == (b"0", True)


def test_what_a_handler_raises_ends_it_and_the_rest_is_handed_back() -> None:
    consumer = filled(100, 100, retry_on=OSError)

    def handle(message: ReceivedMessage) -> None:
        if message.value == b"7":
            raise RuntimeError("no outcome")

    with pytest.raises(RuntimeError, match="no outcome"):
        run_threads(consumer, handle, 1, 100)
    waiting = [int(one.value or b"") for one in consumer.take(100)]
    assert waiting == list(range(8, 100))  # in order, and nothing twice


def names_of(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def test_a_signal_that_reaches_another_thread_stops_it() -> None:
    consumer = filled(1, 1)
    has_stopped = threading.Event()
    main = threading.main_thread().ident or 0

    def stop(*_: object) -> None:
        consumer.engine.stop()
        has_stopped.set()

    before = signal.signal(signal.SIGUSR1, stop)

    def handle(_: ReceivedMessage) -> None:
        wait_until("it waits", lambda: "join" in names_of(sys._current_frames()[main]))
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        if not has_stopped.wait(PATIENCE_S):
            raise KeyboardInterrupt("the main thread has not heard of it")

    try:
        run_threads(consumer, handle, 2, 99)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_concurrency_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="concurrency=0"):
        RetryConsumer("orders", group="g", bootstrap="nowhere").run(print, concurrency=0)


async def test_tasks_handle_the_records_of_a_key_in_order_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kafka = RunningKafka(monkeypatch)
    kafka.put(*(b"%d" % number for number in range(6)), key=b"account")
    kafka.put(b"other", key=b"other")
    order: list[bytes | None] = []
    other_ended = asyncio.Event()
    async with AsyncRetryConsumer("orders", group="g", bootstrap="nowhere") as consumer:

        async def handle(message: ReceivedMessage) -> None:
            if message.value == b"other":
                other_ended.set()
                return
            await other_ended.wait()  # the first one of its key is in hand until then
            await asyncio.sleep(0.01 * (6 - int(message.value or b"")))
            order.append(message.value)
            if len(order) == 6:
                consumer.stop()

        await consumer.run(handle, concurrency=4)
    assert order == [b"0", b"1", b"2", b"3", b"4", b"5"]


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
