"""What handlers write goes with the outcome of their record, or nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from delaywheel.consumer import (
    BatchItemError,
    ConsumerError,
    ConsumerReason,
    ReceivedMessage,
    SettledError,
    WriteRefusedError,
)
from delaywheel.consumer.batch import Batch
from delaywheel.consumer.records import MOST_WRITTEN_BYTES, Partition, RecordHeaders
from delaywheel.errors import MessageInvalidError
from delaywheel.ingress import IngressLimits
from delaywheel.message import Headers
from support.consumer.driven import DrivenConsumer, start
from support.consumer.fake_kafka import INGRESS, FakeKafka, Fault

BILLS = "bills"


@pytest.fixture
def kafka() -> FakeKafka:
    return FakeKafka(partitions=1, more={BILLS: "of bills"}, written={BILLS})


def bills(kafka: FakeKafka) -> list[bytes | None]:
    return [record.value for record in kafka.committed_records if record.topic == BILLS]


def outcomes(kafka: FakeKafka) -> list[str]:
    """What was written of a record itself: a retry, or a letter's reason."""
    return [
        (dict(record.headers).get("dw-dead-reason") or b"RETRIED").decode()
        for record in kafka.committed_records
        if record.topic != BILLS
    ]


def take(kafka: FakeKafka, consumer: DrivenConsumer, *values: bytes) -> list[ReceivedMessage]:
    for value in values:
        kafka.send(value, key=b"k")
    consumer.run_often()
    return consumer.take(len(values))


def leave(message: ReceivedMessage) -> None:
    with message:
        pass


def fail(message: ReceivedMessage) -> None:
    with message:
        raise OSError("down")


@pytest.mark.parametrize("fault", [None, *Fault])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("ends", "is_written"),
    [
        (ReceivedMessage.done, True),
        (leave, True),
        (lambda one: Batch([one])._leave(None), True),
        (lambda one: one.retry(), False),
        (lambda one: one.dead("BY_HAND"), False),
        (fail, False),
    ],
)
def test_it_is_written_with_an_outcome_that_is_done_and_no_other(
    kafka: FakeKafka,
    ends: Callable[[ReceivedMessage], object],
    fault: Fault | None,
    *,
    is_written: bool,
    ordered: bool,
) -> None:
    consumer = start(kafka, ordered=ordered)
    [message] = take(kafka, consumer, b"order")
    assert message.produce(BILLS, b"1", key=b"k", headers={"trace": b"7"}, partition=0)
    assert message.produce(BILLS, b"2")
    consumer.run_once()
    assert bills(kafka) == []
    ends(message)
    consumer.broker.fault = fault
    consumer.run_often()
    assert bills(kafka) == ([b"1", b"2"] if is_written else [])
    assert consumer.engine.counts.produced == len(bills(kafka))
    if is_written:
        first = kafka.committed_records[0]
        assert (first.key, first.headers, first.partition) == (b"k", [("trace", b"7")], 0)
        assert kafka.offsets[message.at] == 1
    assert consumer.engine._book.held_bytes == sum(one.length_bytes for one in waiting(consumer))


@pytest.mark.parametrize("after", [None, "1s"])
@pytest.mark.parametrize(
    ("given", "carried"),
    [
        (None, [("traceparent", b"00-1"), ("tracestate", b"a=1")]),
        ({"own": b"1"}, [("own", b"1"), ("traceparent", b"00-1"), ("tracestate", b"a=1")]),
        ([("traceparent", b"00-2")], [("traceparent", b"00-2")]),
    ],
)
def test_the_trace_of_a_record_is_passed_on(
    kafka: FakeKafka, given: Headers | None, carried: list[tuple[str, bytes]], after: str | None
) -> None:
    consumer = start(kafka)
    read: RecordHeaders = [("traceparent", b"00-1"), ("other", b"x"), ("tracestate", b"a=1")]
    kafka.send(b"order", headers=read)
    consumer.run_once()
    [message] = consumer.take()
    message.retry()  # its headers come back with it
    consumer.run_often()
    [message] = consumer.take()
    assert message.attempt == 2
    message.produce(BILLS, b"1", headers=given, after=after)
    message.done()
    consumer.run_once()
    written = kafka.committed_records[-1].headers
    assert [each for each in written if not each[0].startswith("dw-")] == carried


def waiting(consumer: DrivenConsumer) -> list[ReceivedMessage]:
    """What is held: a retry that came back at once."""
    book = consumer.engine._book
    return [
        block.message(index)
        for shelf in book._shelves.values()
        for block in shelf.blocks
        for index in range(block.begin, len(block))
    ]


def test_what_is_given_back_or_lost_has_written_nothing(kafka: FakeKafka) -> None:
    consumer = start(kafka)
    [message] = take(kafka, consumer, b"order")
    message.produce(BILLS, b"first")
    message.nack()
    assert not message.produce(BILLS, b"late")
    [again] = consumer.take()
    again.produce(BILLS, b"second")
    kafka.rebalance({consumer.broker: [message.at]}, [consumer.broker])
    consumer.run_once()
    assert not again.produce(BILLS, b"late")
    assert not again.done()
    assert consumer.engine._book.held_bytes == 0
    consumer.run_once()
    [again] = consumer.take()
    again.produce(BILLS, b"third")
    again.done()
    with pytest.raises(SettledError):
        again.produce(BILLS, b"late")
    consumer.run_once()
    assert bills(kafka) == [b"third"]
    assert consumer.engine._book.held_bytes == 0


def test_of_a_batch_that_stops_what_was_handled_before_is_written(kafka: FakeKafka) -> None:
    consumer = start(kafka)
    batch = Batch(take(kafka, consumer, b"1", b"2", b"3"))
    with batch:
        for message in batch:
            message.produce(BILLS, message.value)
        raise BatchItemError(batch[1]) from OSError("down")
    consumer.run_once()
    assert (bills(kafka), outcomes(kafka)) == ([b"1"], ["RETRIED"])
    [third] = consumer.take()
    third.done()
    consumer.run_often()
    assert bills(kafka) == [b"1"]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_record_fails_if_what_it_wrote_is_refused_and_no_other_does(
    kafka: FakeKafka, *, ordered: bool, is_known: bool
) -> None:
    consumer = start(kafka, ordered=ordered, retry=("5s",))
    if is_known:  # and is deleted then
        kafka.more["gone"] = "of none"
        [message] = take(kafka, consumer, b"before")
        message.produce("gone", b"0")
        message.done()
        consumer.run_once()
        kafka.more.pop("gone")
        kafka.committed_records.clear()
    for value in (b"good", b"bad", b"fine"):
        [message] = take(kafka, consumer, value)
        message.produce(BILLS if value != b"bad" else "gone", value)
        message.produce(BILLS, b"also " + value)
        message.done()
    for _ in range(4):
        consumer.run_often()
    assert bills(kafka) == [b"good", b"also good", b"fine", b"also fine"]
    # With `ordered` the next one of its key was handled before this was known.
    assert outcomes(kafka) == ["WRITE_REFUSED" if ordered else "RETRIED"]
    assert kafka.offsets[Partition(kafka.source, 0)] == 3 + is_known
    assert consumer.engine.counts.failed_commits == is_known  # then it is asked for again
    if ordered:
        return
    [again] = consumer.take()
    assert (again.value, again.attempt) == (b"bad", 2)
    assert (again.last_error or "").startswith("WriteRefusedError: ")
    again.produce("gone", b"bad")
    again.done()
    consumer.run_often()
    assert outcomes(kafka)[1:] == ["ATTEMPTS_EXHAUSTED"]


def test_a_refused_write_is_dead_by_its_name_where_no_exception_is_retried(
    kafka: FakeKafka,
) -> None:
    consumer = start(kafka, retry_on=LookupError)
    [message] = take(kafka, consumer, b"bad")
    message.produce("gone", b"1")
    message.done()
    consumer.run_often()
    assert outcomes(kafka) == ["WRITE_REFUSED"]
    assert issubclass(WriteRefusedError, RuntimeError)


def test_what_a_topic_takes_one_by_one_is_written_though_it_is_too_large_together(
    kafka: FakeKafka,
) -> None:
    kafka.most_bytes = 1_000
    consumer = start(kafka)
    for message in take(kafka, consumer, b"1", b"2"):
        for _ in range(3):
            message.produce(BILLS, b"x" * 600)
        message.done()
    for _ in range(3):
        consumer.run_often()
    assert (len(bills(kafka)), outcomes(kafka)) == (6, [])


def test_a_missing_right_is_not_the_records_fault(kafka: FakeKafka) -> None:
    consumer = start(kafka)
    [message] = take(kafka, consumer, b"order")
    kafka.denied = {BILLS}
    message.produce(BILLS, b"1")
    message.done()
    with pytest.raises(ConsumerError) as reported:
        consumer.run_often()
    assert reported.value.reason is ConsumerReason.NOT_AUTHORIZED


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_right_is_waited_for_and_nothing_is_handled_meanwhile(
    kafka: FakeKafka, *, is_hidden: bool
) -> None:
    consumer = start(kafka, wait_for_rights="1h")
    [message] = take(kafka, consumer, b"order")
    kafka.denied = {BILLS}
    kafka.hidden = {BILLS} if is_hidden else set()
    message.produce(BILLS, b"1")
    message.done()
    kafka.send(b"next")
    consumer.run_often()
    assert (bills(kafka), consumer.take()) == ([], [])
    kafka.denied = kafka.hidden = set()
    consumer.run_often()
    assert bills(kafka) == [b"1"]
    assert len(consumer.take()) == 1


def test_while_too_much_is_written_no_handler_begins(kafka: FakeKafka) -> None:
    consumer = start(kafka, max_held_bytes=2_000, commit_every="1h", max_deliveries=None)
    consumer.engine._commits.commit()  # the first comes at once
    first, second = take(kafka, consumer, b"1", b"2")
    kafka.send(b"3")
    consumer.run_once()
    second.produce(BILLS, b"x" * 2_000)
    second.done()
    assert consumer.take() == []
    first.done()
    consumer.engine._commits.last_s = 0.0
    consumer.run_once()  # at once, for want of room
    assert bills(kafka) == [b"x" * 2_000]
    assert [message.value for message in consumer.take()] == [b"3"]


@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_written_does_not_keep_back_the_record_that_it_waits_for(
    kafka: FakeKafka, *, ordered: bool
) -> None:
    consumer = start(kafka, max_held_bytes=2_000, max_deliveries=None, ordered=ordered)
    at = Partition(kafka.source, 0)
    for value in (b"1", b"2", b"3"):
        kafka._append(at, value, value, [])
    while consumer.engine._book.held < 3:
        consumer.run_once()
    first, second = consumer.take(2)
    second.produce(BILLS, b"x" * 2_000)
    second.done()
    first.nack()
    may_take = [consumer.engine._book.has_waiting]
    [again] = consumer.take(9)
    assert again.value == b"1"
    may_take.append(consumer.engine._book.has_waiting)
    assert may_take == [True, False], "otherwise who waits would not rest"
    again.done()
    consumer.run_often()
    assert bills(kafka) == [b"x" * 2_000]
    assert [message.value for message in consumer.take(9)] == [b"3"]


def test_a_partition_whose_writes_stay_here_stops_no_other(kafka: FakeKafka) -> None:
    kafka.partitions = 2
    stuck, other = (Partition(kafka.source, number) for number in range(2))
    consumer = start(kafka, max_held_bytes=20_000, max_deliveries=None)
    for _ in range(6):
        kafka._append(stuck, None, b"stuck", [])
    consumer.run_often()
    for message in consumer.take(9)[1:]:  # the first one stays in hand
        message.produce(BILLS, b"x" * 5_000)
        message.done()
    for number in range(9):
        kafka._append(other, None, b"%d" % number, [])
        kafka._append(stuck, None, b"later", [])
    while consumer.engine._book.held < 15:
        consumer.run_once()
    taken = consumer.take(9)
    assert [message.value for message in taken] == [b"%d" % number for number in range(9)]
    taken[0].produce(BILLS, b"x" * 2_500)  # its part
    taken[1].nack()
    taken[2].nack()
    assert consumer.take(9) == []
    taken[0].done()
    consumer.run_often()
    assert bills(kafka) == [b"x" * 2_500]
    assert len(consumer.take(9)) == 2


def test_what_no_transaction_takes_is_an_error_of_the_handler(kafka: FakeKafka) -> None:
    consumer = start(kafka)
    [message] = take(kafka, consumer, b"order")
    half = b"x" * (MOST_WRITTEN_BYTES // 2)
    message.produce(BILLS, half)
    for given in ({"value": half}, {"value": b"", "headers": {"dw-id": b"1"}}):
        with pytest.raises(MessageInvalidError):
            message.produce(BILLS, **given)
    for topic in ("a topic", "__consumer_offsets", INGRESS):
        with pytest.raises(MessageInvalidError):
            message.produce(topic, b"")
    with pytest.raises(TypeError):
        message.produce(BILLS, "text")  # type: ignore[arg-type]
    fail(message)
    assert consumer.engine._book.held_bytes == message.length_bytes


def test_what_is_to_appear_later_goes_through_ingress(kafka: FakeKafka) -> None:
    limits = IngressLimits(span_ms=60_000, message_bytes=1_000, ttl_header="ttl")
    kafka.limits = limits
    consumer = start(kafka)
    [message] = take(kafka, consumer, b"order")
    assert message.produce("reminders", b"pay", key=b"k", partition=3, after="30s")
    for value, after in ((b"x" * 1_000, "30s"), (b"", "61s")):
        with pytest.raises(MessageInvalidError):
            message.produce("reminders", value, after=after)
    leave(message)
    consumer.run_once()
    [record] = kafka.committed_records
    said = dict(record.headers)
    assert (record.topic, record.key, record.value) == (INGRESS, b"k", b"pay")
    assert (said["dw-topic"], said["dw-partition"]) == (b"reminders", b"3")
    assert len(said["dw-id"] or b"") == 32
    assert "dw-deliver-at" in said


async def test_coroutines_write_too(kafka: FakeKafka) -> None:
    consumer = start(kafka)
    one, other = take(kafka, consumer, b"1", b"2")

    async def handle(message: ReceivedMessage) -> None:
        async with message:
            message.produce(BILLS, message.value)
            await asyncio.sleep(0)
            if message is other:
                raise OSError("down")

    await asyncio.gather(handle(one), handle(other))
    consumer.run_once()
    assert bills(kafka) == [b"1"]
