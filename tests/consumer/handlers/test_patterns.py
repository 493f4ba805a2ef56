"""Regular expressions as topics: the table of `rules/subscription.py`, row by row."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

import pytest

from delaywheel.consumer import ConsumerTrouble, GroupTopic
from delaywheel.consumer.engine import pattern_watch
from delaywheel.consumer.records import Partition
from delaywheel.consumer.settings import Options, read_settings
from support.consumer.driven import DrivenConsumer
from support.consumer.fake_kafka import FakeBroker, FakeKafka

NEW, ITS_RETRY, ITS_DEAD = "new-1", "new-1-retry-g", "new-1-dead-g"


def look(*consumers: DrivenConsumer) -> None:
    for consumer in consumers:
        consumer.engine._look_at_s = 0.0
        consumer.run_once()


def assign(consumer: DrivenConsumer, *, is_lost: bool = False) -> None:
    """The group assigns all that is subscribed to."""
    kafka, topics = consumer.broker.kafka, consumer.broker.subscribed[-1]
    given = [Partition(topic, number) for topic in topics for number in range(kafka.partitions)]
    kafka.rebalance({consumer.broker: given}, [consumer.broker] if is_lost else [])
    consumer.run_once()


def send(kafka: FakeKafka, topic: str, *values: bytes) -> None:
    for value in values:
        kafka._append(Partition(topic, 0), b"k", value, [])


def handle(consumer: DrivenConsumer) -> list[tuple[bytes | None, int]]:
    """Handles all; what is called bad fails at first."""
    seen = []
    for _ in range(8):
        consumer.run_once()
        for message in consumer.take(10):
            seen.append((message.value, message.attempt))
            if message.value == b"bad" and message.attempt == 1:
                message.retry()
            else:
                message.done()
    return seen


@pytest.mark.parametrize(
    ("existing", "read"),
    [
        ({"orders-eu", "orders-us", "invoices"}, ["orders-eu", "orders-us"]),
        ({"orders-eu", "orders-eu-retry-shipping", "orders-eu-dead-shipping"}, ["orders-eu"]),
        ({"orders-eu", "orders-eu-retry-s", "orders-eu-order-s"}, ["orders-eu"]),
        ({"orders-eu", "orders-eu-order-made"}, ["orders-eu", "orders-eu-order-made"]),
        ({"orders-retry-policy"}, ["orders-retry-policy"]),
        ({"orders-eu-retry-s", "orders-eu-dead-s", "orders-eu-order-s"}, []),
        ({"orders-eu-retry-g", "orders-eu-dead-g", "orders-eu-retry-g-0123abcd"}, []),
        ({"orders-eu-dead-s-marks", "orders-x.letters.of.g"}, []),
        ({"orders-named", "orders-" + "n" * 240}, []),
    ],
)
def test_what_patterns_match(existing: Collection[str], read: list[str]) -> None:
    topics = read_settings(
        ["orders-named", "^orders-", "^orders-e"],
        "g",
        "nowhere",
        {"dead_topic": GroupTopic("{topic}.letters.of.{group}")},
    ).topics
    found, refused = topics.matches(existing)
    assert [names.source for names in found] == read
    assert len(refused) == sum(len(one) > 200 for one in existing)
    assert list(topics.read_topics) == ["orders-named", "orders-named-retry-g"]


def test_topics_of_kafka_and_delaywheel_are_left_out() -> None:
    topics = read_settings("^.*", "g", "nowhere", {}).topics
    found, _ = topics.matches({"__amazing", "delaywheel-c-ingress", "delaywheel-c-dead", "a"})
    assert [names.source for names in found] == ["a"]


@pytest.mark.parametrize(
    ("topics", "options", "why"),
    [
        (["^orders-("], {}, "not a regular expression"),
        (["^orders"], {"start": "latest"}, "would be skipped"),
        (["^orders"], {"retry_topic": GroupTopic("again.{group}")}, "for more than one use"),
        (["^orders", "^orders"], {}, "each once"),
        (["orders.*"], {}, r"a pattern begins with '\^'"),
    ],
)
def test_what_cannot_work_is_refused(topics: list[str], options: Options, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_settings(topics, "g", "nowhere", options)


@pytest.mark.parametrize("ways", ["eager", "cooperative", "ordered"])
def test_a_topic_that_appears_is_read_from_its_beginning(ways: str) -> None:
    kafka = FakeKafka(partitions=1, is_incremental=ways == "cooperative")
    consumer = DrivenConsumer(kafka, ["orders", "^new-"], ordered=ways == "ordered")
    assign(consumer, is_lost=True)
    assert consumer.broker.subscribed == [("orders", "orders-retry-g")]
    send(kafka, kafka.source, b"old")
    kafka.more[NEW] = "id of new"
    send(kafka, NEW, b"1", b"bad", b"3")
    look(consumer)
    assert {ITS_RETRY, ITS_DEAD} <= kafka.more.keys()
    assert consumer.broker.subscribed[-1] == ("orders", "orders-retry-g", NEW, ITS_RETRY)
    look(consumer)
    assert len(consumer.broker.subscribed) == 2
    assign(consumer)
    seen = handle(consumer)
    assert sorted(seen) == [(b"1", 1), (b"3", 1), (b"bad", 1), (b"bad", 2), (b"old", 1)]
    if ways == "ordered":
        assert seen.index((b"3", 1)) > seen.index((b"bad", 2))
    passed = kafka.passed[Partition(NEW, 0)]
    assert (passed.offset, passed.topic_id) == (3, "id of new")
    assert consumer.engine.counts.restarts == 0
    # Another process of the group finds the same, and its place there.
    another = DrivenConsumer(kafka, ["orders", "^new-"], ordered=ways == "ordered")
    assert another.broker.subscribed == consumer.broker.subscribed[-1:]
    assign(another, is_lost=True)
    assert handle(another) == []


@pytest.mark.parametrize("is_incremental", [False, True])
def test_a_topic_that_is_deleted_is_no_longer_read(*, is_incremental: bool) -> None:
    kafka = FakeKafka(partitions=1, is_incremental=is_incremental, more={NEW: "first"})
    consumer = DrivenConsumer(kafka, ["orders", "^new-"])
    assign(consumer, is_lost=True)
    send(kafka, NEW, b"1")
    handle(consumer)
    send(kafka, NEW, b"in hand")
    consumer.run_once()
    [message] = consumer.take()
    kafka.more["new-1-retry-another"] = "no source"
    kafka.delete(NEW, ITS_RETRY, ITS_DEAD)
    look(consumer)
    assert len(consumer.broker.subscribed) == 1
    assert message.is_ours  # a broker may not know a topic for a moment
    look(consumer)
    assert consumer.broker.subscribed[-1] == ("orders", "orders-retry-g")
    assert message.dead("LATE") is False
    assert NEW not in {one.topic for one in consumer.engine.partitions}
    send(kafka, kafka.source, b"other")
    assert handle(consumer) == [(b"other", 1)]
    assign(consumer)
    # The next one of that name is another topic.
    kafka.more[NEW] = "second"
    send(kafka, NEW, b"anew")
    look(consumer)
    assign(consumer)
    assert handle(consumer) == [(b"anew", 1)]
    assert consumer.engine.counts.restarts == 1


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_deleted_topic_that_is_assigned_holds_up_nothing(*, is_ordered: bool) -> None:
    kafka = FakeKafka(partitions=1, more={NEW: "first"})
    consumer = DrivenConsumer(kafka, ["orders", "^new-"], ordered=is_ordered)
    kafka.delete(NEW, ITS_RETRY, "new-1-order-g")
    assign(consumer, is_lost=True)
    send(kafka, kafka.source, b"other")
    assert handle(consumer) == [(b"other", 1)]
    kafka.more[NEW] = "second"
    send(kafka, NEW, b"1")
    look(consumer)
    assert handle(consumer) == [(b"1", 1)]
    assert {ITS_RETRY, "new-1-order-g"} <= kafka.more.keys()
    assert len(consumer.broker.subscribed) == 1
    assert kafka.passed[Partition(NEW, 0)].topic_id == "second"


def test_the_id_of_a_topic_that_stays_is_that_of_its_positions() -> None:
    """Recreated just before others were assigned, it must still be seen to be another one."""
    kafka = FakeKafka(partitions=1, is_incremental=True)
    consumer = DrivenConsumer(kafka, ["orders", "^new-"])
    assign(consumer, is_lost=True)
    send(kafka, kafka.source, b"1", b"2")
    handle(consumer)
    kafka.more[NEW] = "of new"
    look(consumer)
    kafka.recreate()
    send(kafka, kafka.source, b"3", b"4", b"5")
    assign(consumer)
    look(consumer)
    assert {value for value, _ in handle(consumer)} >= {b"3", b"4", b"5"}


def test_what_is_not_there_is_a_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = FakeKafka(partitions=1)
    consumer = DrivenConsumer(kafka, ["^new-", "named"])

    def troubles() -> Mapping[ConsumerTrouble, str]:
        return consumer.engine.health.troubles

    text = troubles()[ConsumerTrouble.NO_TOPIC]
    assert text == "topic named does not exist; no topic matches '^new-'"
    kafka.more |= {NEW: "first", "new-2": "first", "new-3": "first", "named": "first"}
    kafka.refused = {"new-2"}
    look(consumer)
    assert list(troubles()) == [ConsumerTrouble.TOPIC_UNREAD]
    assert "new-2: TOPICS_NOT_MADE: new-2-retry-g" in troubles()[ConsumerTrouble.TOPIC_UNREAD]
    assert {NEW, "new-3"} <= set(consumer.broker.subscribed[-1])
    kafka.refused = set()
    look(consumer)
    assert list(troubles()) == [ConsumerTrouble.TOPIC_UNREAD]
    later_s = time.monotonic() + pattern_watch._AGAIN_S
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    look(consumer)
    assert consumer.engine.health.is_well
    assert "new-2" in consumer.broker.subscribed[-1]
    consumer.broker.be_away(1)
    look(consumer)
    assert list(troubles()) == [ConsumerTrouble.KAFKA_AWAY]
    look(consumer)
    assert consumer.engine.health.is_well


def test_a_deleted_topic_that_is_named_is_a_trouble() -> None:
    kafka = FakeKafka(partitions=1, more={"named": "1", "named-retry-g": "1"})
    consumer = DrivenConsumer(kafka, ["orders", "named"])
    assign(consumer, is_lost=True)
    kafka.delete("named")
    look(consumer)
    assert consumer.engine.health.troubles == {
        ConsumerTrouble.NO_TOPIC: "topic named does not exist"
    }
    assert isinstance(consumer.broker, FakeBroker)
    assert len(consumer.broker.subscribed) == 1
