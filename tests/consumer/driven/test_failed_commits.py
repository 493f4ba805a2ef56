"""Transactions that fail, and outcomes that Kafka refuses: no handler runs again because of one."""

from __future__ import annotations

from collections import Counter

import pytest

from delaywheel.consumer import ConsumerError, ConsumerReason
from delaywheel.consumer.block import runs_of
from delaywheel.consumer.records import Partition, RecordHeaders
from delaywheel.transactional import Outgoing
from support.consumer.driven import DrivenConsumer, start
from support.consumer.fake_kafka import INGRESS, FakeKafka, Fault

TURNS = 200


def kill_large_ones(kafka: FakeKafka, consumer: DrivenConsumer) -> Counter[bytes]:
    """Handles everything; large records are dead. Returns how often each was handled."""
    handled: Counter[bytes] = Counter()
    for _ in range(TURNS):
        consumer.engine._commits._recover_at_s = 0.0  # it would wait longer each time
        consumer.run_once()
        for message in consumer.take(100):
            value = message.value or b""
            handled[value[:8]] += 1
            if len(value) > 100:
                message.dead("UNREADABLE")
            else:
                message.done()
    assert sum(kafka.offsets.values()) == sum(map(len, kafka.logs.values()))
    return handled


def letters(kafka: FakeKafka) -> list[Outgoing]:
    return [record for record in kafka.committed_records if record.topic == kafka.dead]


def test_a_letter_that_its_topic_refuses_costs_no_handler_a_second_run() -> None:
    kafka = FakeKafka(partitions=2, most_bytes=1_000)
    for number in range(20):
        kafka._append(Partition(kafka.source, 1), None, b"good %d" % number, [])
        kafka._append(Partition(kafka.source, 0), b"k", b"large %d" % number + b"x" * 2_000, [])
    consumer = start(kafka)
    assert set(kill_large_ones(kafka, consumer).values()) == {1}
    assert (consumer.engine.counts.done, consumer.engine.counts.dead) == (20, 20)
    for letter in letters(kafka):
        assert (letter.key, letter.value) == (b"k", None)
        assert ("dw-dead-omitted", b"value") in letter.headers
    assert len(letters(kafka)) == 20
    assert consumer.engine.health.is_well


def test_a_transaction_that_is_not_answered_in_time_is_tried_with_less() -> None:
    """A quota of Kafka takes so much at once, and no more."""
    kafka = FakeKafka(partitions=1, in_time=2)
    for number in range(60):
        kafka._append(Partition(kafka.source, 0), b"k", b"%08d" % number + b"x" * 200, [])
    consumer = start(kafka)
    assert set(kill_large_ones(kafka, consumer).values()) == {1}
    assert len(letters(kafka)) == 60
    assert consumer.engine.counts.failed_commits < 50
    assert consumer.engine.health.is_well


def test_a_refused_record_is_found_beside_a_busy_partition() -> None:
    kafka = FakeKafka(partitions=2, most_bytes=8_000)
    kafka._append(Partition(kafka.source, 1), b"k", b"large" + b"x" * 9_000, [])
    consumer = start(kafka)
    for _ in range(30):
        for _ in range(3):
            kafka._append(Partition(kafka.source, 0), b"k", b"good", [])
        consumer.engine._commits._recover_at_s = 0.0
        consumer.run_once()
        for message in consumer.take(9):
            message.dead("BY_HAND")
    assert kafka.offsets[Partition(kafka.source, 1)] == 1
    assert consumer.engine.counts.failed_commits < 9


def test_a_letter_is_as_whole_as_its_topic_permits() -> None:
    kafka = FakeKafka(partitions=1)
    consumer = start(kafka)
    wide: RecordHeaders = [("a", b"x" * 30_000)]
    for key, value, headers in (
        (b"k", b"v" * 30_000, []),
        (b"k", b"v", wide),
        (b"k" * 30_000, b"v", wide),
    ):
        kafka._append(Partition(kafka.source, 0), key, value, headers)
    for _ in range(TURNS):
        consumer.run_once()
        for message in consumer.take(9):
            message.dead("BY_HAND")
    omitted = [dict(letter.headers).get("dw-dead-omitted") for letter in letters(kafka)]
    assert omitted == [b"value", b"value,headers", b"value,headers,key"]
    assert all(dict(letter.headers)["dw-dead-origin"] for letter in letters(kafka))


def test_a_retry_that_is_refused_is_a_dead_letter() -> None:
    kafka = FakeKafka(partitions=1, most_bytes=620)
    kafka.send(b"x" * 400, key=b"k")
    consumer = start(kafka, ordered=True)
    consumer.run_once()
    [message] = consumer.take()
    message.retry(error="e" * 60)
    consumer.run_often()
    [letter] = letters(kafka)
    headers = dict(letter.headers)
    assert (headers["dw-dead-reason"], headers["dw-dead-omitted"]) == (b"RETRY_REFUSED", b"value")
    # Nothing of its key waits for it.
    kafka.send(b"next", key=b"k")
    consumer.run_once()
    assert [each.value for each in consumer.take()] == [b"next"]


@pytest.mark.parametrize("is_dead", [True, False])
def test_what_is_refused_for_a_moment_is_written_as_it_was_meant(*, is_dead: bool) -> None:
    kafka = FakeKafka(partitions=1)
    kafka.send(b"x" * 400, key=b"k")
    consumer = start(kafka)
    consumer.run_once()
    [message] = consumer.take()
    kafka.most_bytes = 100
    if is_dead:
        message.dead("BY_HAND")
    else:
        message.retry()
    consumer.run_once()
    assert (consumer.engine.counts.failed_commits, kafka.committed_records) == (1, [])
    consumer.broker.be_away(1)  # a question without an answer decides nothing
    consumer.run_once()
    kafka.most_bytes = 1_000
    consumer.run_often()
    [record] = kafka.committed_records
    assert (record.topic, record.value) == (kafka.dead if is_dead else INGRESS, b"x" * 400)
    assert consumer.engine.health.is_well


def test_a_letter_is_shortened_only_by_what_its_topic_takes_now() -> None:
    kafka = FakeKafka(partitions=1)
    kafka.send(b"x" * 30_000, key=b"k")
    consumer = start(kafka)
    consumer.run_once()
    consumer.take()[0].dead("BY_HAND")
    kafka.dead_bytes = 40_000  # it took 20,000 when the consumer began
    consumer.broker.be_away(1)
    consumer.run_once()
    assert letters(kafka) == []
    consumer.run_often()
    assert [letter.value for letter in letters(kafka)] == [b"x" * 30_000]


def test_after_a_retry_was_too_large_the_topics_are_asked_anew() -> None:
    kafka = FakeKafka(partitions=1, source_bytes=100)
    kafka.retry_bytes = 200
    consumer = start(kafka)
    for _ in range(2):
        kafka.send(b"x" * 400)
        consumer.run_once()
        consumer.take()[0].retry()
        kafka.retry_bytes = 2_000
        consumer.engine._look_at_s = 0.0
        consumer.run_once()
    assert (consumer.engine.counts.dead, consumer.engine.counts.retried) == (1, 1)


def test_what_can_be_settled_in_no_way_stops_the_consumer_by_name() -> None:
    kafka = FakeKafka(partitions=1, most_bytes=10)
    kafka.send(b"x")
    consumer = start(kafka)
    consumer.run_once()
    consumer.take()[0].dead("BY_HAND")
    with pytest.raises(ConsumerError) as reported:
        consumer.run_often()
    assert reported.value.reason is ConsumerReason.OUTCOME_REFUSED
    assert kafka.dead in str(reported.value)


@pytest.mark.parametrize("fault", Fault)
def test_after_a_failed_transaction_what_is_in_hand_stays_there(fault: Fault) -> None:
    kafka = FakeKafka(partitions=1)
    for value, key in ((b"other", b"o"), (b"A", b"k"), (b"B", b"k")):
        kafka.send(value, key=key)
    consumer = start(kafka, ordered=True)
    consumer.run_once()
    other, a = consumer.take(1) + consumer.take(1)
    other.done()
    consumer.broker.fault = fault
    for _ in range(4):
        consumer.run_once()
    assert consumer.take(10) == []
    assert a.is_ours
    assert a.done()
    [b] = consumer.take(10)
    assert b.value == b"B"
    b.done()
    consumer.run_once()
    assert (consumer.engine.counts.done, consumer.engine.counts.forgotten) == (3, 0)
    assert consumer.engine.counts.failed_commits == 1


def test_a_handler_hears_that_its_record_is_lost() -> None:
    kafka = FakeKafka(partitions=1)
    kafka.send(b"1")
    kafka.send(b"2")
    consumer = start(kafka)
    consumer.run_once()
    first, second = consumer.take(2)
    lost: list[bytes | None] = []
    first.on_lost(lambda: lost.append(first.value))
    second.on_lost(lambda: lost.append(second.value))
    second.done()
    kafka.rebalance({consumer.broker: []}, [consumer.broker])
    consumer.run_once()
    assert (lost, first.is_ours, first.done()) == ([b"1"], False, False)
    first.on_lost(lambda: lost.append(b"late"))
    assert lost == [b"1", b"late"]


def test_what_is_only_done_needs_one_transaction_however_much_it_is() -> None:
    kafka = FakeKafka(partitions=1)
    for number in range(8_000):
        kafka._append(Partition(kafka.source, 0), None, b"%d" % number, [])
    consumer = start(kafka, max_held=20_000, commit_every="1h", max_deliveries=None)
    while len(consumer.hand) < 8_000:
        consumer.run_once()
        consumer.take(5_000)
    runs = runs_of(consumer.hand)
    consumer.engine.desk.all_done(runs)
    consumer.engine.desk.all_done(runs)  # nothing is settled twice
    consumer.engine._commits.commit()
    assert (consumer.engine.counts.done, consumer.engine.counts.commits) == (8_000, 1)


def test_a_commit_comes_before_its_time_if_settled_records_take_the_room() -> None:
    kafka = FakeKafka(partitions=1)
    for number in range(20):
        kafka.send(b"%d" % number)
    consumer = start(kafka, max_held=20, commit_every="1h", max_deliveries=None)
    consumer.engine._commits.commit()  # the first comes at once
    consumer.engine._commits.last_s = 0.0
    for _ in range(4):
        consumer.run_once()
    for message in consumer.take(4):
        message.done()
    consumer.run_once()
    assert consumer.engine.counts.commits == 0
    consumer.take()[0].done()
    consumer.run_once()
    assert consumer.engine.counts.done == 5


def test_a_transaction_stays_in_doubt_where_a_rebalance_leaves_its_partition_alone() -> None:
    """A new producer, as a rebalance needs one, does not say what the old one committed."""
    kafka = FakeKafka(partitions=1, more={"beside": "1"}, is_incremental=True)
    consumer = DrivenConsumer(kafka, [kafka.source, "beside"])
    own = [Partition(topic, 0) for topic in (kafka.source, kafka.retry)]
    kafka.rebalance({consumer.broker: own})
    kafka.send(b"0")
    for _ in range(3):
        consumer.run_once()
    consumer.take()[0].dead("BY_HAND")
    for fault in (Fault.FAILS, Fault.UNKNOWN):  # the second one waits before it recovers
        consumer.broker.fault = fault
        consumer.run_once()
        consumer.run_once()
    kafka.rebalance({consumer.broker: [*own, Partition("beside", 0)]})
    consumer.run_once()
    consumer.run_often()
    assert kafka.offsets[own[0]] == 1
    assert len(kafka.committed_records) == 1
