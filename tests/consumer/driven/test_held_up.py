"""A topic that takes nothing for a while: who writes there waits, and nobody else."""

from __future__ import annotations

import pytest

from delaywheel.consumer.engine import commits
from delaywheel.consumer.records import Partition
from delaywheel.consumer.watching.health import ConsumerTrouble
from delaywheel.ingress import IngressLimits
from support.consumer.driven import DrivenConsumer, start
from support.consumer.fake_kafka import INGRESS, FakeKafka

BILLS = "bills"
ONE, TWO = Partition("orders", 0), Partition("orders", 1)


def run(consumer: DrivenConsumer, *, is_time: bool = False) -> None:
    """Runs it for a while, as it is; or once what is held up is to be tried again."""
    for topic in consumer.engine._commits._held_up._topics.values():
        if is_time:
            topic.try_at_s = 0.0
    consumer.run_often()


def handle(consumer: DrivenConsumer) -> None:
    consumer.run_often()
    for message in consumer.take(99):
        if message.at == ONE:
            message.produce(BILLS, message.value)
        message.done()


@pytest.fixture
def kafka() -> FakeKafka:
    return FakeKafka(partitions=2, more={BILLS: "bills"}, silent={BILLS})


def put(kafka: FakeKafka, at: Partition, count: int) -> None:
    for number in range(count):
        kafka._append(at, b"k", b"%d" % number, [])


def test_a_topic_that_does_not_answer_holds_up_its_writers_alone(kafka: FakeKafka) -> None:
    consumer = start(kafka, max_deliveries=None)
    put(kafka, ONE, 3)
    put(kafka, TWO, 3)
    handle(consumer)
    run(consumer)
    assert kafka.offsets == {TWO: 3}
    text = consumer.engine.health.troubles[ConsumerTrouble.HELD_UP]
    assert text == "orders/0 waits until topic bills takes its outcomes"
    failed = consumer.engine.counts.failed_commits
    assert failed == 2
    put(kafka, TWO, 3)
    handle(consumer)
    run(consumer)
    assert (kafka.offsets, consumer.engine.counts.failed_commits) == ({TWO: 6}, failed)
    run(consumer, is_time=True)  # in vain
    put(kafka, TWO, 3)
    handle(consumer)
    run(consumer)
    assert (kafka.offsets, consumer.engine.counts.failed_commits) == ({TWO: 9}, failed + 1)
    kafka.silent.clear()
    run(consumer)
    assert ONE not in kafka.offsets
    run(consumer, is_time=True)
    assert kafka.offsets == {ONE: 3, TWO: 9}
    assert consumer.engine.health.is_well
    assert [record.value for record in kafka.committed_records] == [b"0", b"1", b"2"]


def test_what_kafka_says_of_its_leaders_is_asked_for_before_anything_is_tried(
    kafka: FakeKafka,
) -> None:
    """Each transaction that touches a partition without leader stays open there."""
    kafka.unable = {BILLS}
    consumer = start(kafka, max_deliveries=None)
    put(kafka, ONE, 3)
    put(kafka, TWO, 3)
    handle(consumer)
    run(consumer)
    assert (kafka.offsets, consumer.engine.counts.failed_commits) == ({TWO: 3}, 1)
    run(consumer, is_time=True)
    consumer.broker.be_away(1)
    run(consumer, is_time=True)
    kafka.silent.clear()
    run(consumer, is_time=True)
    assert (kafka.offsets, consumer.engine.counts.failed_commits) == ({TWO: 3}, 1)
    kafka.unable.clear()
    run(consumer, is_time=True)
    assert (kafka.offsets, consumer.engine.counts.failed_commits) == ({ONE: 3, TWO: 3}, 1)
    assert consumer.engine.health.is_well


def test_a_moment_without_an_answer_holds_up_nothing(kafka: FakeKafka) -> None:
    consumer = start(kafka, max_deliveries=None)
    put(kafka, ONE, 3)
    consumer.run_often()
    for message in consumer.take(99):
        message.produce(BILLS, message.value)
        message.done()
    consumer.run_once()
    assert consumer.engine.counts.failed_commits == 1
    kafka.silent.clear()
    consumer.run_often()
    assert kafka.offsets == {ONE: 3}
    assert consumer.engine.health.is_well


def test_what_is_held_up_is_forgotten_with_its_partition(kafka: FakeKafka) -> None:
    consumer = start(kafka, max_deliveries=None)
    put(kafka, ONE, 3)
    handle(consumer)
    run(consumer)
    assert ConsumerTrouble.HELD_UP in consumer.engine.health.troubles
    consumer.engine._lost([ONE])
    assert ConsumerTrouble.HELD_UP not in consumer.engine.health.troubles
    assert not consumer.engine._book.held_up


@pytest.mark.parametrize("length_bytes", [400, 30_000])  # known only to Kafka, or to the consumer
def test_a_topic_of_letters_that_becomes_too_small_holds_up_its_partition_alone(
    length_bytes: int,
) -> None:
    kafka = FakeKafka(partitions=2)
    consumer = start(kafka, max_deliveries=None)
    kafka._append(ONE, b"k", b"x" * length_bytes, [])
    put(kafka, TWO, 3)
    kafka.most_bytes = kafka.dead_bytes = 300
    for _ in range(3):
        consumer.run_often()
        for message in consumer.take(99):
            if message.at == ONE:
                message.dead("BY_HAND")
            else:
                message.done()
        put(kafka, TWO, 3)
        run(consumer, is_time=True)
    assert kafka.offsets == {TWO: 9}
    text = consumer.engine.health.troubles[ConsumerTrouble.HELD_UP]
    assert text == (
        "orders/0 waits until topic orders-dead-g takes its outcomes:"
        " max.message.bytes of orders-dead-g is 300, that of orders 10,000"
    )
    failed = consumer.engine.counts.failed_commits
    assert failed <= 3
    kafka.most_bytes = kafka.dead_bytes = 40_000
    run(consumer, is_time=True)
    assert kafka.offsets == {ONE: 1, TWO: 9}
    assert consumer.engine.counts.failed_commits == failed
    [letter] = kafka.committed_records
    assert len(letter.value or b"") == length_bytes
    assert consumer.engine.health.is_well


def retry_one_beside_others(kafka: FakeKafka, consumer: DrivenConsumer) -> None:
    """Retries the only record of a partition, while all of another one are done."""
    put(kafka, ONE, 1)
    for _ in range(3):
        put(kafka, TWO, 3)
        consumer.run_often()
        for message in consumer.take(99):
            if message.at == ONE:
                message.retry()
            else:
                message.done()
        run(consumer, is_time=True)


def test_a_topic_of_retries_that_becomes_too_small_holds_up_its_partition_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A retry that its topic refuses would be a dead letter of delaywheel's own."""
    monkeypatch.setattr(commits, "_SIZED_S", 0.0)
    kafka = FakeKafka(partitions=2)
    consumer = start(kafka, max_deliveries=None)
    kafka.retry_bytes = 300
    retry_one_beside_others(kafka, consumer)
    assert kafka.offsets == {TWO: 9}
    text = consumer.engine.health.troubles[ConsumerTrouble.HELD_UP]
    assert text.startswith("orders/0 waits until topic orders-retry-g takes its outcomes: max.mess")
    kafka.retry_bytes = 40_000
    run(consumer, is_time=True)
    assert kafka.offsets == {ONE: 1, TWO: 9}
    assert consumer.engine.counts.retried == 1
    assert consumer.engine.health.is_well


def test_a_record_that_is_too_large_for_a_topic_of_retries_stops_nobody() -> None:
    kafka = FakeKafka(partitions=1)
    consumer = start(kafka, max_deliveries=None)
    kafka._append(ONE, b"k", b"x" * 15_000, [])
    consumer.run_often()
    consumer.take()[0].retry()
    kafka.retry_bytes = 300
    consumer.engine._look_at_s = 0.0
    consumer.run_often()
    assert consumer.engine.counts.dead == 1
    assert not consumer.engine.has_ended


def test_while_no_leader_reads_the_ingress_topic_its_writers_alone_wait() -> None:
    """With `ingress = false` retries would lie there, and nobody would be told."""
    limits = IngressLimits(60_000, 1_000)
    kafka = FakeKafka(partitions=2, limits=IngressLimits.of_note(limits.as_note()))
    consumer = start(kafka, max_deliveries=None)
    kafka.limits = IngressLimits.of_note(limits._replace(is_read=False).as_note())
    consumer.engine._lookout.look_at_topics()
    retry_one_beside_others(kafka, consumer)
    assert (kafka.offsets, kafka.committed_records) == ({TWO: 9}, [])
    text = consumer.engine.health.troubles[ConsumerTrouble.HELD_UP]
    assert text == (f"orders/0 waits until topic {INGRESS} takes its outcomes: no leader reads it")
    kafka.limits = limits
    consumer.engine._lookout.look_at_topics()
    run(consumer, is_time=True)
    assert kafka.offsets == {ONE: 1, TWO: 9}
    assert consumer.engine.health.is_well
