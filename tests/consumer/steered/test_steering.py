"""What a program does with its consumer beside handling: pause, seek, nack."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from datetime import UTC, datetime, timedelta

import pytest

from delaywheel.consumer import SettledError
from delaywheel.consumer.port import ConsumedTopic, KafkaUnavailable
from delaywheel.consumer.records import Partition, Passed
from support.consumer.driven import DrivenConsumer, start
from support.consumer.fake_kafka import FakeKafka, Fault

ONE, TWO = Partition("orders", 0), Partition("orders", 1)


def filled(records: int = 4, **options: object) -> tuple[FakeKafka, DrivenConsumer]:
    kafka = FakeKafka(partitions=2)
    for number in range(records):
        for at in (ONE, TWO):
            kafka._append(at, at.topic.encode() + b"%d" % at.number, b"%d" % number, [])
    consumer = start(kafka, **options)
    while consumer.engine._book.held < 2 * records:
        consumer.run_once()
    return kafka, consumer


def test_a_paused_partition_hands_out_nothing_and_the_others_go_on() -> None:
    kafka, consumer = filled()
    consumer.engine.pause([ONE], on=True)
    assert {one.at for one in consumer.take(9)} == {TWO}
    kafka._append(ONE, None, b"later", [])
    for _ in range(3):
        consumer.run_once()
    assert consumer.engine._book.held == 8
    consumer.engine.pause([ONE], on=False)
    assert [one.value for one in consumer.take(9)] == [b"0", b"1", b"2", b"3"]
    consumer.run_once()
    assert [one.value for one in consumer.take(9)] == [b"later"]


def test_a_pause_ends_with_the_assignment_and_with_a_resume_of_all() -> None:
    kafka, consumer = filled()
    consumer.engine.pause([ONE, TWO], on=True)
    assert consumer.take(9) == []
    consumer.engine.pause([], on=False)
    assert len(consumer.take(9)) == 8
    consumer.engine.pause([ONE], on=True)
    kafka.rebalance({consumer.broker: [ONE]})
    for _ in range(3):
        consumer.run_once()
    assert len(consumer.take(9)) == 4
    with pytest.raises(ValueError, match="orders/1: not assigned here"):
        consumer.engine.pause([TWO], on=True)


def test_a_named_member_does_not_move_partitions_one_by_one() -> None:
    with pytest.raises(ValueError, match="may stay with nobody"):
        DrivenConsumer(FakeKafka(), instance="a", rebalances="cooperative")


def seek(consumer: DrivenConsumer, at: Partition, to: int | datetime) -> None:
    """Seeks as a caller's thread does, while the engine runs."""
    caller = threading.Thread(target=consumer.engine.seek, args=(at, to))
    caller.start()
    while caller.is_alive():
        consumer.run_once()


def test_after_a_seek_reading_goes_on_there_and_that_is_committed() -> None:
    kafka, consumer = filled()
    first, *others = [one for one in consumer.take(9) if one.at == ONE]
    first.retry()
    seek(consumer, ONE, 3)
    assert kafka.passed[ONE] == Passed(3, kafka.topic_id)
    assert consumer.engine.counts.retried == 1
    assert [one.done() for one in others] == [False] * 3
    seek(consumer, ONE, 1)
    consumer.run_once()
    assert [one.value for one in consumer.take(9) if one.at == ONE] == [b"1", b"2", b"3"]
    with pytest.raises(ValueError, match="not assigned"):
        consumer.engine.seek(Partition("other", 0), 1)
    with pytest.raises(ValueError, match="ordered"):
        filled(ordered=True)[1].engine.seek(ONE, 1)


@pytest.mark.parametrize("fault", Fault)
def test_a_seek_that_is_not_committed_is_made_again(fault: Fault) -> None:
    kafka, consumer = filled()
    consumer.broker.fault = fault
    seek(consumer, ONE, 4)
    assert kafka.passed[ONE].offset == 4


def test_what_is_settled_is_committed_before_a_seek_though_kafka_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kafka, consumer = filled(commit_every="1h", max_deliveries=None)
    first = next(one for one in consumer.take(9) if one.at == ONE)
    first.retry()
    answers = consumer.broker.topics
    left = [None] * 3

    def topics(names: Collection[str]) -> dict[str, ConsumedTopic]:
        if left:
            left.pop()
            raise KafkaUnavailable("away on purpose")
        return answers(names)

    monkeypatch.setattr(consumer.broker, "topics", topics)
    seek(consumer, ONE, 3)
    assert (consumer.engine.counts.retried, kafka.passed[ONE].offset) == (1, 3)


def test_a_time_leads_to_the_first_record_since() -> None:
    kafka, consumer = filled()
    begun = datetime.fromtimestamp(kafka.now_ms / 1000, UTC)
    kafka.now_ms += 10_000
    kafka._append(ONE, None, b"later", [])
    end = len(kafka.logs[ONE])
    consumer.broker.be_away(1)
    for after_ms, offset in ((0, 0), (1, end - 1), (10_000, end - 1), (10_001, end)):
        seek(consumer, ONE, begun + timedelta(milliseconds=after_ms))
        assert kafka.passed[ONE].offset == offset
    seek(consumer, ONE, datetime.min.replace(tzinfo=UTC))
    assert kafka.passed[ONE].offset == 0
    assert consumer.engine.health.is_well
    with pytest.raises(ValueError, match="no time zone"):
        consumer.engine.seek(ONE, datetime(2030, 1, 1))  # noqa: DTZ001


def test_a_paused_partition_stays_paused_wherever_it_is_read_on() -> None:
    kafka, consumer = filled()
    consumer.engine.pause([ONE], on=True)
    seek(consumer, ONE, 2)
    kafka.recreate()
    for _ in range(3):
        consumer.run_once()
    kafka._append(ONE, None, b"anew", [])
    for _ in range(3):
        consumer.run_once()
    assert ONE not in {one.at for one in consumer.take(9)}
    consumer.engine.pause([ONE], on=False)
    for _ in range(3):
        consumer.run_once()
    assert [one.value for one in consumer.take(9)] == [b"anew"]


def test_what_is_put_back_while_it_is_paused_comes_first_after_that() -> None:
    _, consumer = filled()
    first = next(one for one in consumer.take(8) if one.at == ONE)
    for message in consumer.hand[::-1]:
        if message is not first:
            message.nack()
    consumer.engine.pause([ONE], on=True)
    assert {one.at for one in consumer.take(9)} == {TWO}
    first.nack()
    assert consumer.take(9) == []
    consumer.engine.pause([ONE], on=False)
    assert [one.value for one in consumer.take(9)] == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_record_that_is_put_back_comes_first_as_the_same_attempt(*, ordered: bool) -> None:
    kafka, consumer = filled(ordered=ordered)
    [first] = consumer.take()
    with first:
        assert first.nack()
    assert (first.done(), first.nack(), first.is_ours) == (False, False, False)
    [again] = consumer.take()
    assert (again.place, again.attempt) == (first.place, 1)
    assert again.done()
    with pytest.raises(SettledError):
        again.nack()
    for _ in range(9):
        for message in consumer.take(9):
            message.done()
        consumer.run_once()
    assert consumer.engine.counts.done == 8
    assert kafka.offsets[ONE] == kafka.offsets[TWO] == 4


@pytest.mark.parametrize("ordered", [False, True])
def test_a_record_that_is_put_back_for_later_is_handed_out_then(*, ordered: bool) -> None:
    kafka, consumer = filled(ordered=ordered, max_deliveries=None)
    desk = consumer.engine.desk
    first = next(one for one in desk.take_turns(2) if one.at == ONE)
    assert first.nack("1h")
    assert (first.done(), first.is_ours) == (False, False)
    desk.end_turn(first)
    consumer.run_once()
    assert first.at not in {one.at for one in desk.take_turns(9)}, "its key waits with it"
    desk.put_back_due(time.monotonic() + 3_599)
    assert not desk.take_turns(9)
    desk.put_back_due(time.monotonic() + 3_601)
    [again] = desk.take_turns(9)
    assert (again.place, again.attempt) == (first.place, 1)
    again.done()
    desk.end_turn(again)
    consumer.run_once()
    assert kafka.offsets[ONE] == 1
    [following] = desk.take_turns(9)
    assert following.value == b"1"


def test_what_is_put_back_for_later_may_be_another_members_by_then() -> None:
    kafka, consumer = filled(max_deliveries=None)
    for message in consumer.take(9):
        message.nack("1h")
    kafka.rebalance({consumer.broker: []})
    consumer.run_once()
    consumer.engine.desk.put_back_due(time.monotonic() + 3_601)
    assert consumer.take(9) == []
    with pytest.raises(ValueError, match="soon"):
        message.nack("soon")
