"""What a consumer says of itself: troubles by name, events once each, and figures."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from delaywheel.consumer import ConsumerEvents, ConsumerTrouble, ReceivedMessage
from delaywheel.consumer.book import MOST_REASONS
from delaywheel.consumer.records import Partition
from delaywheel.consumer.watching.figures import Figures
from delaywheel.consumer.watching.health import ConsumerHealth
from delaywheel.consumer.watching.metrics import ConsumerMetrics
from support.consumer.driven import DrivenConsumer, start
from support.consumer.fake_kafka import FakeKafka, Fault


class Noted(ConsumerEvents):
    """Events as they were told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def retried(self, message: ReceivedMessage, due_ms: int, why: str) -> None:
        self.told.append(("retried", message.value, due_ms, why))

    def dead(self, message: ReceivedMessage, topic: str, why: str) -> None:
        self.told.append(("dead", message.value, topic, why))
        raise OSError("the program's own")

    def expired(self, message: ReceivedMessage, why: str) -> None:
        self.told.append(("expired", message.value, why))

    def skipped(self, message: ReceivedMessage) -> None:
        self.told.append(("skipped", message.value))

    def commit_failed(self, why: str) -> None:
        self.told.append(("commit_failed", why))

    def assigned(self, partitions: Sequence[Partition]) -> None:
        self.told.append(("assigned", len(partitions)))

    def revoked(self, partitions: Sequence[Partition]) -> None:
        self.told.append(("revoked", len(partitions)))


def look(consumer: DrivenConsumer) -> dict[str, str]:
    consumer.engine._look_at_s = 0.0
    consumer.run_once()
    return {str(name): text for name, text in consumer.engine.health.troubles.items()}


def test_each_trouble_begins_and_ends() -> None:
    kafka = FakeKafka(partitions=1)
    consumer = start(kafka, keep_partition=True)
    assert look(consumer) == {}
    kafka.held_up = {Partition(kafka.source, 0)}
    kafka.send(b"1")
    consumer.broker.pause([Partition(kafka.source, 0)])  # it is there, and is not read
    assert "its producer leaves open" in look(consumer)[ConsumerTrouble.TRANSACTION_OPEN]
    kafka.held_up = set()
    consumer.broker.resume([Partition(kafka.source, 0)])
    assert look(consumer) == {}
    kafka.partitions, kafka.retry_partitions = 2, 1
    trouble = look(consumer)[ConsumerTrouble.PARTITIONS_DIFFER]
    assert f"has 2 partitions, {kafka.retry} only 1: add some" in trouble
    kafka.retry_partitions = 2
    assert look(consumer) == {}
    consumer.broker.fault = Fault.FAILS
    consumer.take()[0].done()
    consumer.run_once()
    assert list(consumer.engine.health.troubles) == [ConsumerTrouble.COMMIT_FAILED]
    assert not consumer.engine.health.is_well
    for _ in range(3):
        consumer.run_once()
    assert consumer.engine.health.is_well


def test_a_plain_consumer_needs_no_retry_partition_for_each_of_the_source() -> None:
    kafka = FakeKafka(partitions=2, retry_partitions=1)
    assert look(start(kafka)) == {}


def test_a_half_of_a_lane_that_is_not_read_is_a_trouble() -> None:
    kafka = FakeKafka(partitions=2)
    consumer = DrivenConsumer(kafka, ordered=True)
    lanes = [Partition(topic, 0) for topic in (kafka.source, kafka.retry)]
    kafka.rebalance({consumer.broker: [*lanes, Partition(kafka.source, 1)]})
    consumer.run_once()
    troubles = consumer.engine.health.troubles
    assert "orders/1" in troubles[ConsumerTrouble.PARTITION_UNREAD]
    kafka.rebalance({consumer.broker: lanes})
    consumer.run_once()
    assert consumer.engine.health.is_well


def test_what_is_read_for_long_before_anything_is_handled_is_a_trouble(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kafka = FakeKafka(partitions=1)
    consumer = DrivenConsumer(kafka, ordered=True)
    consumer.broker.order_left = [2_000, 1_000]
    kafka.rebalance({consumer.broker: [Partition(kafka.source, 0), Partition(kafka.retry, 0)]})
    consumer.run_once()
    assert "ORDER_UNREAD: 2,000 records" in caplog.text
    assert consumer.engine.health.is_well


def test_an_error_that_ends_the_consumer_is_a_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = DrivenConsumer(FakeKafka())
    monkeypatch.setattr(consumer.engine, "_begin", lambda: 1 / 0)
    consumer.engine._run()
    assert list(consumer.engine.health.troubles) == [ConsumerTrouble.STOPPED]


@pytest.mark.parametrize("fault", [None, *Fault])
def test_each_outcome_is_told_once_when_it_is_certain(fault: Fault | None) -> None:
    kafka, noted = FakeKafka(partitions=1), Noted()
    consumer = start(kafka, events=noted, retry=("5s",), route=["a.#"])
    for value, key in ((b"fails", b"a.b"), (b"other", b"b"), (b"kills", b"a"), (b"fine", b"a")):
        kafka.send(value, headers=[("routingkey", key)])
    kafka.send(b"late", headers=[("routingkey", b"a"), ("ttl", b"1")])
    kafka.now_ms += 5_000
    for _ in range(3):
        consumer.run_once()
    for message in consumer.take(9):
        if message.value == b"kills":
            message.dead("BY_HAND", error="no")
        elif message.value == b"fails":
            message.retry(error="down")
        else:
            message.done()
    assert noted.told == [("assigned", 2)]  # nothing is certain yet
    consumer.broker.fault = fault
    for _ in range(5):
        consumer.run_once()
    failed = [] if fault is None else [("commit_failed", fault.value)]
    assert noted.told[1:] == [
        *failed,
        ("retried", b"fails", kafka.now_ms + 5_000, "down"),
        ("skipped", b"other"),
        ("dead", b"kills", kafka.dead, "BY_HAND: no"),
        ("expired", b"late", "ttl of 1 s"),
    ]
    kafka.rebalance({consumer.broker: []})
    assert noted.told[-1] == ("revoked", 2)


class Seen:
    """A consumer, as its metrics see it."""

    group = "billing"

    def __init__(self, consumer: DrivenConsumer) -> None:
        self._engine = consumer.engine

    @property
    def health(self) -> ConsumerHealth:
        return self._engine.health

    @property
    def figures(self) -> Figures:
        return self._engine.figures()


def test_metrics_say_how_far_it_is_and_what_became_of_records() -> None:
    kafka = FakeKafka(partitions=1)
    consumer = start(kafka)
    registry = CollectorRegistry()
    registry.register(ConsumerMetrics(Seen(consumer)))  # type: ignore[arg-type]
    for value in (b"1", b"2", b"3", b"4", b"5"):
        kafka.send(value)
    consumer.run_once()
    first, second, third = consumer.take(3)
    first.dead("BROKEN")
    second.retry()
    third.block.handed_s[third.index] -= 3.0
    look(consumer)
    text = generate_latest(registry).decode()
    for line in (
        'records_total{group="billing",outcome="dead",reason="BROKEN"} 1.0',
        'records_total{group="billing",outcome="retried",reason=""} 1.0',
        'in_hand_records{group="billing"} 1.0',
        'held_records{group="billing"} 3.0',
        'lag_offsets{group="billing",partition="0",topic="orders"} 3.0',
        'commits_total{group="billing"} 1.0',
        'handler_seconds_count{group="billing"} 2.0',
        'trouble{group="billing",trouble="KAFKA_AWAY"} 0.0',
    ):
        assert f"delaywheel_consumer_{line}\n" in text
    assert registry.get_sample_value(
        "delaywheel_consumer_oldest_in_hand_seconds", {"group": "billing"}
    ) == pytest.approx(3, abs=1)


def test_reasons_that_handlers_make_up_are_bounded_in_metrics() -> None:
    kafka = FakeKafka(partitions=1)
    consumer = start(kafka)
    for number in range(MOST_REASONS + 9):
        kafka.send(b"%d" % number)
    for _ in range(40):
        consumer.run_once()
        for message in consumer.take(9):
            message.dead(f"R{message.place.offset}")
    reasons = consumer.engine.figures().dead_reasons
    assert (len(reasons), reasons["OTHER"]) == (MOST_REASONS + 1, 9)


def test_what_log_lines_say_of_a_message_is_printable() -> None:
    kafka = FakeKafka(partitions=1)
    kafka.send(b"v", key=b"a\x1b[2J\xff\n")
    consumer = start(kafka)
    consumer.run_once()
    [message] = consumer.take()
    assert message.context == {
        "topic": "orders",
        "partition": 0,
        "offset": 0,
        "key": r"a\x1b[2J\xff\n",
        "attempt": 1,
    }
