"""Where a consumer reads on: nothing is skipped, whatever has become of the topic meanwhile."""

from __future__ import annotations

import pytest

from delaywheel.consumer.records import FetchedRecords, Incoming, Partition, Place, fetched_of
from delaywheel.consumer.watching.health import ConsumerTrouble
from support.consumer.driven import DrivenConsumer
from support.consumer.fake_kafka import FakeKafka


def join(kafka: FakeKafka, consumer: DrivenConsumer) -> None:
    topics = (kafka.source, kafka.retry)
    given = [Partition(t, n) for t in topics for n in range(kafka.partitions)]
    kafka.rebalance({consumer.broker: given}, [consumer.broker])
    consumer.run_once()


def start(kafka: FakeKafka, **options: object) -> DrivenConsumer:
    consumer = DrivenConsumer(kafka, **options)
    join(kafka, consumer)
    return consumer


def handle(consumer: DrivenConsumer, iterations: int = 40) -> list[bytes | None]:
    values = []
    for _ in range(iterations):
        consumer.run_once()
        for message in consumer.take(10):
            values.append(message.value)
            message.done()
    return values


def send(kafka: FakeKafka, name: str, count: int, *, partition: int = 0) -> list[bytes]:
    values = [f"{name}{number}".encode() for number in range(count)]
    for value in values:
        kafka._append(Partition(kafka.source, partition), b"k", value, [])
    return values


@pytest.mark.parametrize("records", [5, 20, 50])
@pytest.mark.parametrize("meets", ["while it reads", "when it is assigned"])
def test_a_topic_that_was_recreated_is_read_from_its_beginning(records: int, meets: str) -> None:
    kafka = FakeKafka(partitions=1)
    consumer = start(kafka)
    assert len(send(kafka, "old", 20)) == len(handle(consumer))
    kafka.recreate()
    sent = send(kafka, "new", records)
    if meets == "when it is assigned":
        join(kafka, consumer)
    else:
        consumer.engine._look_at_s = 0.0
    assert set(sent) <= set(handle(consumer))
    assert kafka.offsets[Partition(kafka.source, 0)] == records
    assert consumer.engine.counts.restarts == 1
    # And once is enough.
    join(kafka, consumer)
    assert handle(consumer) == []


def test_no_record_of_a_topic_that_was_recreated_has_two_outcomes() -> None:
    kafka = FakeKafka(partitions=1)
    consumer = start(kafka)
    assert len(send(kafka, "old", 5)) == len(handle(consumer))
    kafka.recreate()
    sent = send(kafka, "new", 20)  # the client goes on among them, at offset 5
    for _ in range(40):
        consumer.run_once()
        for message in consumer.take(10):
            message.dead("BY_HAND")
    assert sorted(one.value or b"" for one in kafka.committed_records) == sorted(sent)


def test_offsets_that_go_back_within_what_was_fetched_begin_anew() -> None:
    kafka = FakeKafka(partitions=1)
    book = start(kafka).engine._book
    at = Partition(kafka.source, 0)

    def fetched(*offsets: int) -> list[FetchedRecords]:
        return fetched_of(Incoming(Place(*at, n, 1), b"k", b"v", []) for n in offsets)

    assert book.going_back(fetched(0, 1, 5)) == set()
    assert book.going_back(fetched(4, 5, 0, 1)) == {at}
    assert book.going_back([*fetched(4, 5), *fetched(0, 1)]) == {at}


def test_a_partition_that_lost_its_end_is_read_from_its_beginning() -> None:
    """As Kafka's own clients do with `earliest`; the records that are left come again."""
    kafka = FakeKafka(partitions=1)
    consumer = start(kafka)
    send(kafka, "kept", 20)
    handle(consumer)
    del kafka.logs[Partition(kafka.source, 0)][15:]
    join(kafka, consumer)
    sent = send(kafka, "later", 10)
    assert set(sent) <= set(handle(consumer))
    assert consumer.engine.counts.restarts == 1


def test_a_group_that_began_at_the_end_misses_no_partition_that_is_added(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kafka = FakeKafka(partitions=2)
    send(kafka, "before", 5, partition=0)
    consumer = start(kafka, start="latest")
    assert handle(consumer) == []
    assert "begins at the end of orders/0 at 5, orders/1 at 0" in caplog.text
    kafka.partitions = 3
    sent = send(kafka, "added", 5, partition=2)
    another = DrivenConsumer(kafka, start="latest")  # it knows only what Kafka says
    join(kafka, another)
    assert handle(another) == sent
    assert handle(consumer) == []


def test_all_who_join_a_new_group_begin_at_the_end() -> None:
    kafka = FakeKafka(partitions=2)
    send(kafka, "before", 5, partition=0)
    send(kafka, "before", 5, partition=1)
    both = [DrivenConsumer(kafka, start="latest") for _ in range(2)]
    kafka.rebalance(
        {
            one.broker: [Partition(kafka.source, number), Partition(kafka.retry, number)]
            for number, one in enumerate(both)
        },
        [one.broker for one in both],
    )
    assert [handle(one) for one in both] == [[], []]


def test_a_record_that_stays_in_hand_stops_its_own_partition_only() -> None:
    kafka = FakeKafka(partitions=2)
    consumer = start(kafka, max_held=100)
    send(kafka, "a", 300, partition=0)
    consumer.run_once()
    [stuck] = consumer.take()
    handle(consumer, 200)
    assert consumer.engine._book.room > 0
    sent = send(kafka, "b", 50, partition=1)
    assert handle(consumer, 200) == sent
    assert kafka.offsets[Partition(kafka.source, 1)] == 50
    # Once it is settled, the rest of its partition follows.
    stuck.done()
    handle(consumer, 200)
    assert kafka.offsets[Partition(kafka.source, 0)] == 300


def test_a_partition_without_leader_that_is_assigned_keeps_no_other_waiting() -> None:
    kafka = FakeKafka(partitions=2)
    away = Partition(kafka.source, 0)
    of_before = send(kafka, "a", 20, partition=0)
    consumer = start(kafka)
    assert handle(consumer) == of_before
    sent = send(kafka, "b", 20, partition=0)
    kafka.leaderless = {away}
    join(kafka, consumer)
    others = send(kafka, "c", 20, partition=1)
    assert handle(consumer) == others
    kafka.leaderless = set()
    assert handle(consumer) == sent
    assert kafka.offsets[away] == 40


@pytest.fixture(params=[False, True], ids=["eager", "cooperative"])
def led_in_part(request: pytest.FixtureRequest) -> FakeKafka:
    """A Kafka whose partition 0 is to lose its leader."""
    return FakeKafka(partitions=2, is_incremental=request.param)


def test_where_a_group_begins_at_the_end_a_partition_without_leader_comes_later(
    led_in_part: FakeKafka,
) -> None:
    kafka, away = led_in_part, Partition(led_in_part.source, 0)
    send(kafka, "before", 20)
    kafka.leaderless = {away}
    kafka.now_ms += 1_000
    consumer = start(kafka, start="latest", retry=())
    others = send(kafka, "other", 20, partition=1)
    assert handle(consumer) == others
    text = consumer.engine.health.troubles[ConsumerTrouble.NO_LEADER]
    assert text == "orders/0 is read once it, and its part of an order topic, has a leader"
    in_hand = send(kafka, "in hand", 1, partition=1)
    consumer.run_once()
    (message,) = consumer.take(1)
    kafka.leaderless = set()
    since = send(kafka, "since", 20)
    consumer.engine._look_at_s = 0.0
    assert handle(consumer) == since
    message.done()
    later = send(kafka, "later", 5)
    assert handle(consumer) == later
    assert (message.value, kafka.offsets) == (*in_hand, {away: 45, message.at: 21})
    assert consumer.engine.health.is_well


def test_a_lane_whose_order_topic_has_no_leader_keeps_no_other_waiting(
    led_in_part: FakeKafka,
) -> None:
    kafka = led_in_part
    kafka.leaderless = {Partition(kafka.order, 0)}
    waiting = send(kafka, "a", 20)
    others = send(kafka, "b", 20, partition=1)
    consumer = start(kafka, ordered=True)
    assert handle(consumer) == others
    assert ConsumerTrouble.NO_LEADER in consumer.engine.health.troubles
    kafka.leaderless = set()
    consumer.engine._look_at_s = 0.0
    assert handle(consumer) == waiting
    assert consumer.engine.health.is_well
    assert consumer.engine.counts.done == 40


def rest(consumer: DrivenConsumer) -> None:
    for _ in range(2):  # a position is committed once it was seen twice
        consumer.engine._look_at_s = 0.0
        consumer.run_once()


@pytest.mark.parametrize("has_handled", [True, False])
def test_the_end_of_a_transaction_behind_the_last_record_is_passed_once(
    *, has_handled: bool
) -> None:
    kafka = FakeKafka(partitions=1)
    at = Partition(kafka.source, 0)
    consumer = start(kafka)
    if has_handled:
        send(kafka, "some", 2)
        handle(consumer)
    kafka.unseen.add(Place(at.topic, 0, len(kafka.logs.get(at, [])), kafka.now_ms))
    (end,) = send(kafka, "end of a transaction", 1)
    rest(consumer)
    assert kafka.offsets[at] == len(kafka.logs[at])
    was = kafka.passed[at]
    rest(consumer)
    assert kafka.passed[at] is was, "committed again"
    later = send(kafka, "later", 3)
    assert handle(consumer) == later
    assert end not in later


def test_nothing_is_passed_while_a_record_is_held() -> None:
    kafka = FakeKafka(partitions=1)
    at = Partition(kafka.source, 0)
    consumer = start(kafka)
    send(kafka, "some", 1)
    consumer.run_once()
    (held,) = consumer.take()
    kafka.unseen.add(Place(at.topic, 0, 1, kafka.now_ms))
    send(kafka, "end of a transaction", 1)
    rest(consumer)
    assert kafka.offsets.get(at, 0) == 0
    held.done()
    handle(consumer, 3)
    rest(consumer)
    assert kafka.offsets[at] == 2


def test_what_was_begun_with_ends_of_transactions_alone_is_free_once_they_are_passed() -> None:
    kafka = FakeKafka(partitions=1)
    at = Partition(kafka.source, 0)
    consumer = start(kafka)
    send(kafka, "some", 2)
    handle(consumer)
    kafka.unseen.add(Place(at.topic, 0, 2, kafka.now_ms))
    send(kafka, "end of a transaction", 1)
    heir = start(kafka)
    rest(heir)
    assert kafka.passed[at].offset == 3
    assert not heir.engine._deliveries.is_watching
    assert kafka.passed[at].deliveries == 0
