"""Rights that are taken away and given back: what needs them waits, and nothing else."""

from __future__ import annotations

import pytest

from delaywheel.consumer import ConsumerError, ConsumerReason, ConsumerTrouble
from delaywheel.consumer.message import State
from delaywheel.consumer.port import Start
from delaywheel.consumer.records import Partition, Passed
from support.consumer.driven import DrivenConsumer
from support.consumer.fake_kafka import INGRESS, FakeBroker, FakeKafka, Fault

BESIDE = "beside"


def two_topics(**options: object) -> tuple[FakeKafka, DrivenConsumer]:
    """A consumer of two topics, each with five records."""
    more = {BESIDE: "1", f"{BESIDE}-retry-g": "2", f"{BESIDE}-dead-g": "3"}
    kafka = FakeKafka(partitions=1, more=more)
    consumer = DrivenConsumer(kafka, [kafka.source, BESIDE], **options)
    topics = (kafka.source, kafka.retry, BESIDE, f"{BESIDE}-retry-g")
    kafka.rebalance({consumer.broker: [Partition(topic, 0) for topic in topics]})
    for number in range(5):
        for topic in (kafka.source, BESIDE):
            kafka._append(Partition(topic, 0), None, b"%d" % number, [])
    for _ in range(3):
        consumer.run_once()
    return kafka, consumer


def run(consumer: DrivenConsumer, times: int = 9) -> None:
    """Handles all that is handed out."""
    for _ in range(times):
        consumer.engine._look_at_s = 0.0
        consumer.engine._commits._recover_at_s = 0.0
        consumer.run_once()
        for message in consumer.take(100):
            message.done()


@pytest.mark.parametrize("is_hidden", [False, True])
@pytest.mark.parametrize("denied", ["orders", "orders-dead-g", INGRESS])
def test_what_needs_a_missing_right_waits_and_the_rest_goes_on(
    denied: str, *, is_hidden: bool
) -> None:
    kafka, consumer = two_topics(wait_for_rights="1h")
    held = consumer.take(1)[0]
    assert held.topic == kafka.source
    kafka.denied = {denied}
    kafka.hidden = {denied} if is_hidden else set()
    is_ingress = denied == INGRESS
    if is_ingress:
        held.retry(after="1h")
    else:
        held.dead("UNREADABLE")
    run(consumer)
    assert denied in consumer.engine.health.troubles[ConsumerTrouble.NOT_AUTHORIZED]
    assert kafka.offsets.get(Partition(kafka.source, 0), 0) == 0
    assert kafka.offsets.get(Partition(BESIDE, 0), 0) == (0 if is_ingress else 5)
    kafka.denied = kafka.hidden = set()
    run(consumer)
    assert kafka.offsets[Partition(kafka.source, 0)] == 5
    assert kafka.offsets[Partition(BESIDE, 0)] == 5
    assert len(kafka.committed_records) == 1
    assert consumer.engine.health.is_well
    assert consumer.engine.counts.forgotten == 0


def test_a_missing_right_stops_the_consumer_unless_it_is_waited_for() -> None:
    kafka, consumer = two_topics()
    kafka.denied = {kafka.source}
    with pytest.raises(ConsumerError, match="orders") as raised:
        run(consumer)
    assert raised.value.reason is ConsumerReason.NOT_AUTHORIZED


def test_a_missing_right_is_not_waited_for_longer_than_asked() -> None:
    kafka, consumer = two_topics(wait_for_rights="0s")
    kafka.denied = {kafka.source}
    with pytest.raises(ConsumerError) as raised:
        run(consumer)
    assert raised.value.reason is ConsumerReason.NOT_AUTHORIZED


def test_what_is_paused_and_withheld_is_handed_out_once_it_is_neither() -> None:
    kafka, consumer = two_topics(wait_for_rights="1h")
    at = Partition(kafka.source, 0)
    kafka.denied = {kafka.source}
    run(consumer, 2)
    consumer.engine.pause([at], on=True)
    kafka.denied = set()
    run(consumer)
    assert kafka.offsets.get(at, 0) == 0
    consumer.engine.pause([at], on=False)
    run(consumer)
    assert kafka.offsets[at] == 5


@pytest.mark.parametrize("is_rebalanced", [False, True])
@pytest.mark.parametrize("fault", [Fault.UNKNOWN, Fault.FAILS])
def test_a_transaction_in_doubt_waits_while_its_topic_is_hidden(
    fault: Fault, *, is_rebalanced: bool
) -> None:
    """A member that only asked again and again would be put out of its group."""
    kafka, consumer = two_topics(wait_for_rights="1h")
    held = consumer.take(1)[0]
    assert held.topic == kafka.source
    held.dead("UNREADABLE")
    consumer.broker.fault = fault
    consumer.run_once()
    kafka.denied = kafka.hidden = {kafka.source}
    run(consumer)
    if is_rebalanced:
        topics = (kafka.source, kafka.retry, BESIDE, f"{BESIDE}-retry-g")
        kafka.rebalance({consumer.broker: [Partition(topic, 0) for topic in topics]})
        run(consumer)
    assert kafka.source in consumer.engine.health.troubles[ConsumerTrouble.NOT_AUTHORIZED]
    assert consumer.engine._state.must_recover is not is_rebalanced  # what is revoked is forgotten
    kafka.denied = kafka.hidden = set()
    run(consumer)
    assert kafka.offsets[Partition(kafka.source, 0)] == 5
    assert kafka.offsets[Partition(BESIDE, 0)] == 5
    handled_again = is_rebalanced and fault is Fault.FAILS
    assert len(kafka.committed_records) == (0 if handled_again else 1)
    assert consumer.engine.health.is_well


def test_a_transaction_stays_in_doubt_where_a_rebalance_leaves_its_partition_alone() -> None:
    """Else what it wrote is written again."""
    more = {BESIDE: "1", f"{BESIDE}-retry-g": "2", f"{BESIDE}-dead-g": "3"}
    kafka = FakeKafka(partitions=1, more=more, is_incremental=True)
    consumer = DrivenConsumer(kafka, [kafka.source, BESIDE], wait_for_rights="1h")
    own = [Partition(topic, 0) for topic in (kafka.source, kafka.retry)]
    kafka.rebalance({consumer.broker: own})
    kafka._append(own[0], None, b"0", [])
    for _ in range(3):
        consumer.run_once()
    consumer.take(1)[0].dead("UNREADABLE")
    consumer.broker.fault = Fault.UNKNOWN
    consumer.run_once()
    kafka.denied = kafka.hidden = {kafka.source}
    run(consumer)
    others = [Partition(topic, 0) for topic in (BESIDE, f"{BESIDE}-retry-g")]
    kafka.rebalance({consumer.broker: [*own, *others]})
    run(consumer)
    assert consumer.engine._state.must_recover
    kafka.denied = kafka.hidden = set()
    run(consumer)
    assert kafka.offsets[own[0]] == 1
    assert len(kafka.committed_records) == 1
    assert consumer.engine.health.is_well


@pytest.mark.parametrize(
    ("topic", "ordered"),
    [(f"orders{end}", False) for end in ("", "-retry-g")]
    + [(f"orders{end}", True) for end in ("", "-retry-g", "-order-g")],
)
def test_a_hidden_topic_that_is_assigned_keeps_no_other_waiting(
    topic: str, *, ordered: bool
) -> None:
    """Whoever assigns partitions may have rights that this member lacks."""
    more = {f"{BESIDE}{end}": end or "1" for end in ("", "-retry-g", "-dead-g", "-order-g")}
    kafka = FakeKafka(partitions=1, more=more, is_incremental=not ordered)
    topics = [kafka.source, BESIDE]
    consumer = DrivenConsumer(kafka, topics, wait_for_rights="1h", ordered=ordered)
    hidden, *others = (
        Partition(topic, 0) for topic in (kafka.source, kafka.retry, BESIDE, f"{BESIDE}-retry-g")
    )
    for number in range(5):
        kafka._append(hidden, None, b"%d" % number, [])
        kafka._append(Partition(BESIDE, 0), None, b"%d" % number, [])
    kafka.offsets[hidden], kafka.passed[hidden] = 2, Passed(2, "", 0, "")
    kafka.denied = kafka.hidden = {topic}
    kafka.rebalance({consumer.broker: [hidden, *others]})
    run(consumer)
    assert kafka.offsets[Partition(BESIDE, 0)] == 5
    assert kafka.offsets[hidden] == 2
    assert topic in consumer.engine.health.troubles[ConsumerTrouble.NOT_AUTHORIZED]
    kafka.denied = kafka.hidden = set()
    run(consumer)
    if ordered:  # the group is joined again
        kafka.rebalance({consumer.broker: [hidden, *others]})
        run(consumer)
    assert [one.value for one in consumer.hand if one.topic == kafka.source] == [b"2", b"3", b"4"]
    assert kafka.offsets[hidden] == 5
    assert consumer.engine.health.is_well


def test_a_topic_that_was_hidden_is_assigned_anew_and_not_called_deleted() -> None:
    kafka, consumer = two_topics(wait_for_rights="1h")
    subscribed = list(consumer.broker.subscribed)
    kafka.denied = kafka.hidden = {BESIDE}
    run(consumer)
    assert consumer.engine.health.troubles.keys() == {ConsumerTrouble.NOT_AUTHORIZED}
    assert consumer.broker.subscribed == subscribed
    kafka.denied = kafka.hidden = set()
    run(consumer)
    assert consumer.broker.subscribed == subscribed * 2
    assert consumer.engine.health.is_well
    assert kafka.offsets[Partition(BESIDE, 0)] == 5


def test_nothing_is_handed_out_while_the_group_may_not_be_used() -> None:
    kafka, consumer = two_topics(wait_for_rights="1h", max_deliveries=None)
    (first,) = consumer.take(1)
    kafka.is_group_denied = True
    first.done()
    run(consumer)
    assert [one.state for one in consumer.hand] == [State.SETTLED]
    assert consumer.engine.health.troubles == {ConsumerTrouble.NOT_AUTHORIZED: "the group"}
    kafka.is_group_denied = False
    run(consumer)
    assert (kafka.offsets[Partition(kafka.source, 0)], kafka.offsets[Partition(BESIDE, 0)]) == (
        5,
        5,
    )
    assert consumer.engine.health.is_well
    assert (consumer.engine.counts.done, consumer.engine.counts.forgotten) == (10, 0)


def test_a_right_that_is_missing_at_the_start_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusals = iter([ConsumerError(ConsumerReason.NOT_AUTHORIZED, "Read on topic orders")])
    starts = FakeBroker.start

    def start(broker: FakeBroker) -> Start:
        for refusal in refusals:
            raise refusal
        return starts(broker)

    monkeypatch.setattr(FakeBroker, "start", start)
    kafka, consumer = two_topics(wait_for_rights="1h")
    run(consumer)
    assert kafka.offsets[Partition(BESIDE, 0)] == 5
    assert consumer.engine.health.is_well
