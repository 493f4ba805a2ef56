"""What a consumer believes of a transaction whose end it did not hear, and how it ends."""

from __future__ import annotations

import pytest

from delaywheel.consumer.message import ReceivedMessage
from delaywheel.consumer.order import LONGEST_AGAIN_MS
from delaywheel.consumer.port import TransactionFailure
from delaywheel.consumer.records import Partition, Passed
from support.consumer.driven import start
from support.consumer.fake_kafka import INGRESS, FakeBroker, FakeKafka, Fault


def retries(kafka: FakeKafka) -> int:
    return sum(record.topic == INGRESS for record in kafka.committed_records)


def test_an_offset_of_before_is_no_proof_of_a_transaction() -> None:
    """The partition lost its end, and is read from its beginning: up to the old offset again."""
    kafka = FakeKafka(partitions=1)
    kafka.passed[Partition(kafka.source, 0)] = Passed(1, kafka.topic_id)
    consumer = start(kafka)
    kafka.send(b"x")
    consumer.run_once()
    [message] = consumer.take()
    message.retry()
    consumer.broker.fault = Fault.FAILS
    for _ in range(4):
        consumer.run_once()
    assert (retries(kafka), consumer.engine.counts.retried) == (1, 1)


def test_a_topic_that_is_deleted_meanwhile_makes_no_outcome_of_another_come_twice() -> None:
    kafka = FakeKafka(partitions=2)
    kafka.send(b"\0", key=b"\0")
    kafka.send(b"\1", key=b"\1")
    consumer = start(kafka)
    consumer.run_once()
    for message in consumer.take(2):
        message.retry()
    consumer.broker.fault = Fault.UNKNOWN
    consumer.engine._commits.commit()
    del kafka.passed[Partition(kafka.source, 1)]  # the group's offsets go with a topic
    for _ in range(4):
        consumer.run_once()
    assert retries(kafka) == 2


def test_a_doubt_is_kept_for_the_partitions_that_stay() -> None:
    """Kafka is away while another partition of the transaction is given up."""
    kafka = FakeKafka(partitions=2, is_incremental=True)
    kafka.send(b"\0", key=b"\0")
    kafka.send(b"\1", key=b"\1")
    consumer = start(kafka)
    consumer.run_once()
    for message in consumer.take(2):
        message.retry()
    consumer.broker.fault = Fault.UNKNOWN
    consumer.engine._commits.commit()
    consumer.broker.be_away(1)
    kafka.rebalance({consumer.broker: [Partition(kafka.source, 0)]})
    for _ in range(4):
        consumer.run_once()
    assert (retries(kafka), consumer.engine.counts.retried) == (2, 1)


def test_nothing_is_handed_out_while_partitions_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kafka = FakeKafka(partitions=1)
    for value in (b"1", b"2", b"3"):
        kafka.send(value)
    consumer = start(kafka)
    consumer.run_once()
    [first] = consumer.take()
    first.done()
    real, handed = FakeBroker.commit, list[ReceivedMessage]()

    def commit(broker: FakeBroker, *given: object, **_: bool) -> TransactionFailure | None:
        handed.extend(consumer.take(9))  # as another thread does
        return real(broker, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeBroker, "commit", commit)
    kafka.rebalance({consumer.broker: []})
    assert (handed, kafka.offsets[Partition(kafka.source, 0)]) == ([], 1)


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("is_end", [True, False])
def test_what_is_settled_is_committed_before_partitions_are_given_up(
    fault: Fault, is_end: bool
) -> None:
    kafka = FakeKafka(partitions=1)
    kafka.send(b"1")
    consumer = start(kafka, drain="5s")
    consumer.run_once()
    consumer.take()[0].retry()
    consumer.broker.fault = fault
    if is_end:
        consumer.engine.stop()
        consumer.engine._end()
    else:
        kafka.rebalance({consumer.broker: []})
    assert (retries(kafka), consumer.engine.counts.forgotten) == (1, 0)


def test_giving_up_partitions_waits_for_kafka_for_a_bounded_time() -> None:
    kafka = FakeKafka(partitions=1)
    kafka.send(b"1")
    consumer = start(kafka, drain="200ms")
    consumer.run_once()
    consumer.take()[0].done()
    consumer.broker.fault = Fault.FAILS
    consumer.broker.be_away(10_000)
    kafka.rebalance({consumer.broker: []})
    assert consumer.engine.counts.forgotten == 1


def test_what_was_lost_stays_said_if_the_next_outcome_is_refused() -> None:
    kafka = FakeKafka(partitions=1)
    kafka.send(b"first", key=b"k")
    consumer = start(kafka, ordered=True, retry=("5s",), lost_after="1h")
    consumer.run_once()
    consumer.take()[0].retry()
    consumer.run_once()
    kafka.logs[Partition(kafka.retry, 0)].clear()  # it never comes back
    kafka.now_ms += 3_600_000 + LONGEST_AGAIN_MS
    kafka.most_bytes = 450
    kafka.send(b"next" * 100, key=b"k")
    consumer.run_once()
    [message] = consumer.take()
    message.retry()
    consumer.run_often()
    order = [record for record in kafka.committed_records if record.topic == kafka.order]
    assert {record.key for record in order if record.value is None} >= {(0).to_bytes(8, "big")}
