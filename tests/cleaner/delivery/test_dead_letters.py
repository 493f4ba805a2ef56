"""Messages that Kafka will not take become dead letters; all others are delivered on time."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import pytest
from confluent_kafka import Message, Producer
from structlog.testing import capture_logs

from delaywheel.transactional import transactional
from delaywheel_replica.cleaner.delivery import bisection
from delaywheel_replica.cleaner.delivery.deferring import partition_of
from delaywheel_replica.kafka_settings import KafkaNames
from local.loopback.kafka import KafkaBroker
from support.cleaner.cleaner_world import World, sent
from support.due.wheels import Sent, Wheels
from support.kafka.read_committed import (
    CommittedReader,
    create_topic,
    delete_topic,
    read_all,
    set_topic,
)

pytestmark = pytest.mark.kafka


@pytest.fixture
def good(kafka: KafkaBroker, cluster_id: str) -> str:
    name = f"good-{cluster_id}"
    create_topic(kafka.address, name)
    return name


@pytest.fixture
def world(kafka: KafkaBroker, cluster_id: str, wheels: Wheels) -> Iterator[World]:
    with World(kafka.address, wheels.data, cluster_id, wheels) as world:
        world.wait_leading()
        yield world


def headers_of(message: Message) -> dict[str, bytes]:
    return dict(message.headers() or [])  # type: ignore[arg-type]


def dead_letters(kafka: KafkaBroker, cluster_id: str, count: int) -> list[Message]:
    with CommittedReader(kafka.address, KafkaNames(cluster_id).dead) as reader:
        return reader.wait_for(count)


def reasons(letters: list[Message]) -> list[bytes]:
    return [headers_of(letter)["dw-dead-reason"] for letter in letters]


def failures(logs: Sequence[MutableMapping[str, Any]]) -> set[str]:
    """The outcomes of the leader's transactions that were not committed."""
    return {entry["verdict"] for entry in logs if entry["event"] == "transaction"}


def wait_done(world: World, rows: list[Sent], *, timeout_s: float = 60) -> None:
    last_ms = max(row.due_ms for row in rows)
    world.wait_for(
        "everything is done",
        lambda s: s.progress is not None and s.progress.due_ms >= last_ms,
        timeout_s=timeout_s,
    )


def test_a_missing_topic_and_an_illegal_partition(
    kafka: KafkaBroker, world: World, good: str, cluster_id: str
) -> None:
    missing = sent(f"missing-{cluster_id}", 800, b"m", key=b"k", headers=(("h", b"1"),))
    illegal = sent(good, 800, b"p", partition=3)
    fine = sent(good, 800, b"fine")
    world.server.write([missing, illegal, fine])
    wait_done(world, [fine])
    letters = {letter.value(): letter for letter in dead_letters(kafka, cluster_id, 2)}
    assert [m.value() for m in read_all(kafka.address, good, at_least=1)] == [b"fine"]
    letter = letters[b"m"]
    assert letter.key() == b"k"
    assert headers_of(letter) | {"dw-accepted": b"", "dw-wheel": b""} == {
        "h": b"1",
        "dw-id": missing.id.hex().encode(),
        "dw-due": str(missing.due_ms).encode(),
        "dw-accepted": b"",
        "dw-wheel": b"",
        "dw-dead-reason": b"TOPIC_MISSING",
        "dw-dead-topic": missing.topic.encode(),
    }
    assert headers_of(letters[b"p"])["dw-dead-reason"] == b"PARTITION_UNKNOWN"
    assert headers_of(letters[b"p"])["dw-dead-partition"] == b"3"
    reported = [
        json.loads(record.value() or b"")
        for record in read_all(kafka.address, KafkaNames(cluster_id).outcomes, at_least=2)
    ]
    assert {(o["outcome"], o["id"]) for o in reported} == {
        ("dead-lettered", missing.id.hex()),
        ("dead-lettered", illegal.id.hex()),
    }


def test_sizes_are_judged_to_the_byte(
    kafka: KafkaBroker, world: World, good: str, cluster_id: str
) -> None:
    """Exactly what the broker takes is delivered; one byte more is a dead letter, without a try."""
    small = f"small-{cluster_id}"
    create_topic(kafka.address, small, config={"max.message.bytes": "2000"})
    rows = [sent(small, 900, b"x" * length) for length in range(1_700, 1_900)]
    fine = sent(good, 900, b"fine")
    world.server.write([*rows, fine])
    wait_done(world, [fine])
    status = world.wait_for("counted", lambda s: s.counters.get("forwarded", 0) > 1)
    counted = status.counters
    assert status.forwarded_by_topic[good] >= 1
    assert sum(status.forwarded_by_topic.values()) == counted["forwarded"]
    assert status.dead_by_topic == {small: counted["dead_lettered"]}
    assert +Counter(status.dead_by_reason) == {"MESSAGE_TOO_LARGE": counted["dead_lettered"]}
    forwarded = read_all(kafka.address, small, at_least=counted["forwarded"] - 1)
    out = {len(message.value() or b"") for message in forwarded}
    letters = dead_letters(kafka, cluster_id, counted["dead_lettered"])
    dead = {len(message.value() or b"") for message in letters}
    assert out
    assert dead
    assert max(out) + 1 == min(dead)
    assert len(out) + len(dead) == len(rows)
    assert world.status.counters.get("failed_transactions", 0) == 0


def test_keys_and_timestamps_that_a_topic_refuses(
    kafka: KafkaBroker, world: World, cluster_id: str
) -> None:
    compacted, dated = f"compacted-{cluster_id}", f"dated-{cluster_id}"
    create_topic(kafka.address, compacted, config={"cleanup.policy": "compact"})
    create_topic(kafka.address, dated, config={"message.timestamp.before.max.ms": "60000"})
    rows = [
        sent(compacted, 800, b"keyless"),
        sent(compacted, 800, b"keyed", key=b""),
        sent(dated, 800, b"old", timestamp_ms=1_700_000_000_000),
        sent(dated, 800, b"now"),
    ]
    world.server.write(rows)
    wait_done(world, rows)
    letters = dead_letters(kafka, cluster_id, 2)
    assert {(m.value(), headers_of(m)["dw-dead-reason"]) for m in letters} == {
        (b"keyless", b"KEY_MISSING"),
        (b"old", b"TIMESTAMP_REFUSED"),
    }
    assert letters[0].timestamp()[1] != 0
    assert [m.value() for m in read_all(kafka.address, compacted, at_least=1)] == [b"keyed"]
    assert [m.value() for m in read_all(kafka.address, dated, at_least=1)] == [b"now"]
    assert world.status.counters.get("failed_transactions", 0) == 0


def test_what_only_the_broker_can_refuse_is_found_by_halves(
    kafka: KafkaBroker, cluster_id: str, wheels: Wheels, good: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compressed sizes are unknown in advance; a slow machine may take its time to search."""
    monkeypatch.setattr(bisection, "SEARCH_S", 60)
    small = f"small-{cluster_id}"
    create_topic(kafka.address, small, config={"max.message.bytes": "20000"})
    client = {"bootstrap.servers": kafka.address, "compression.type": "gzip"}
    with World(kafka.address, wheels.data, cluster_id, wheels, kafka=client) as world:
        world.wait_leading()
        rows = [sent(small, 700, b"%d" % n * 30_000) for n in range(10)]  # small when compressed
        large = [sent(small, 700, os.urandom(30_000)) for _ in range(2)]
        fine = [sent(good, 700 + n, b"%d" % n) for n in range(10)]
        with capture_logs() as logs:
            world.server.write([*rows[:3], large[0], *rows[3:], large[1], *fine])
            wait_done(world, [*rows, *fine])
        assert "fenced" not in failures(logs), "the leader's own ids were touched"
        letters = dead_letters(kafka, cluster_id, 2)
        assert {m.value() for m in letters} == {row.value for row in large}
        assert set(reasons(letters)) == {b"MESSAGE_TOO_LARGE"}
        assert headers_of(letters[0])["dw-dead-detail"].startswith(b"MSG_SIZE_TOO_LARGE")
        assert len(read_all(kafka.address, small, at_least=10)) == 10
        assert len(read_all(kafka.address, good, at_least=10)) == 10


def test_a_topic_deleted_while_messages_are_pending(
    kafka: KafkaBroker, world: World, good: str, cluster_id: str
) -> None:
    doomed = f"doomed-{cluster_id}"
    create_topic(kafka.address, doomed)
    first = [sent(doomed, 100, b"1"), sent(good, 100, b"1")]
    world.server.write(first)  # now the clients know the topic
    wait_done(world, first)
    # The first may still be delivered: how many is up to the broker.
    rows = [sent(doomed, 300 + 100 * n, b"%d" % n) for n in range(30)]
    fine = [sent(good, 300 + 100 * n, b"%d" % n) for n in range(30)]
    world.server.write(rows + fine)
    delete_topic(kafka.address, doomed)
    behind = [sent(doomed, 500 + 50 * n, b"behind") for n in range(10)]
    world.server.write(behind)
    wait_done(world, [*rows, *behind])
    assert len(read_all(kafka.address, good, at_least=31)) == 31
    letters = read_all(kafka.address, KafkaNames(cluster_id).dead, at_least=len(behind))
    # Not by the leader's counters: a commit whose answer went with its term is in neither.
    ids = [headers_of(letter)["dw-id"] for letter in letters]
    assert len(set(ids)) == len(ids)
    assert {row.id.hex().encode() for row in behind} <= set(ids)
    assert set(ids) <= {row.id.hex().encode() for row in rows + behind}
    assert set(reasons(letters)) == {b"TOPIC_MISSING"}
    # A topic made again takes messages again.
    create_topic(kafka.address, doomed)
    again = [sent(doomed, 5_000, b"again")]
    world.server.write(again)
    wait_done(world, again)
    assert [m.value() for m in read_all(kafka.address, doomed, at_least=1)] == [b"again"]


def test_the_partition_of_a_key_is_the_clients(kafka: KafkaBroker, cluster_id: str) -> None:
    topic = f"keyed-{cluster_id}"
    create_topic(kafka.address, topic, partitions=7)
    producer = Producer(
        {"bootstrap.servers": kafka.address, "partitioner": transactional("any")["partitioner"]}
    )
    keys = [b"", *(b"%d" % number * (number % 9 + 1) for number in range(60))]
    for key in keys:
        producer.produce(topic, key=key)
    producer.flush()
    with CommittedReader(kafka.address, topic, partitions=7) as reader:
        records = reader.wait_for(len(keys))
    assert {r.key(): r.partition() for r in records} == {k: partition_of(k, 7) for k in keys}


def test_more_outcomes_than_their_topic_takes_in_one_batch(
    kafka: KafkaBroker, cluster_id: str, wheels: Wheels
) -> None:
    """The client would join them up to its `batch.size`, and each transaction would fail."""
    client = {"kafka.batch.size": "4000000", "kafka.linger.ms": "500"}
    room = {"max.message.bytes": "1200000"}
    create_topic(kafka.address, KafkaNames(cluster_id).outcomes, config=room)
    with World(kafka.address, wheels.data, cluster_id, wheels, **client) as world:
        world.wait_leading()
        with capture_logs() as logs:
            row = sent(f"{'far-' * 50}{cluster_id}", 1_500, b"once")
            world.server.write([row] * 7_000)
            wait_done(world, [row])
    assert not failures(logs)
    outcomes = read_all(kafka.address, KafkaNames(cluster_id).outcomes, at_least=7_000)
    named = Counter(json.loads(each.value() or b"")["outcome"] for each in outcomes)
    assert named == {"dead-lettered": 1, "duplicate": 6_999}


def test_a_topic_for_letters_that_becomes_compacted_is_named_and_nothing_dies_for_it(
    kafka: KafkaBroker, world: World, good: str, cluster_id: str
) -> None:
    names = KafkaNames(cluster_id)
    set_topic(kafka.address, names.dead, "cleanup.policy", "compact")
    lost = sent(f"missing-{cluster_id}", 500, b"without a key")
    rows = [sent(good, 500 + n, b"%d" % n) for n in range(20)]
    world.server.write([lost, *rows])
    world.wait_for("it is named", lambda s: f"{names.dead} has cleanup" in (s.kafka_error or ""))
    set_topic(kafka.address, names.dead, "cleanup.policy", "delete")
    wait_done(world, [lost, *rows])
    world.wait_for("all is well", lambda s: s.kafka_error is None)
    assert reasons(dead_letters(kafka, cluster_id, 1)) == [b"TOPIC_MISSING"]
    assert len(read_all(kafka.address, good, at_least=20)) == 20
