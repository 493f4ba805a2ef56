"""Delay through Kafka alone, with a real node: each record once, whole, at its due."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka import Message as KafkaMessage

from delaywheel import ingress
from delaywheel_replica.kafka_settings import KafkaNames
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import PATIENCE_S, CommittedReader, headers_of, read_all
from support.services.ingress import (
    Sender,
    assert_delivered,
    long,
)
from support.services.service import Service
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka

SOON = (ingress.DELAY_MS, b"300")


@pytest.fixture
def sender(service: Service, kafka: KafkaBroker) -> Sender:
    return Sender(kafka.address, service.cluster_id)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def letters_of(kafka: KafkaBroker, sender: Sender, values: set[bytes]) -> dict[bytes, KafkaMessage]:
    """The dead letters of records with these values, by value, each once."""
    dead = KafkaNames(sender.cluster_id).dead
    with CommittedReader(kafka.address, dead) as reader:

        def found() -> list[KafkaMessage] | None:
            letters = [m for m in reader.read_to_end() if m.value() in values]
            return letters if len(letters) >= len(values) else None

        letters = wait_until(f"{len(values)} letters", found)
    by_value = {letter.value() or b"": letter for letter in letters}
    assert len(by_value) == len(letters), "each once"
    return by_value


def test_every_way_to_say_a_due(sender: Sender, kafka: KafkaBroker, topic: str) -> None:
    sender.send(topic, b"text", (ingress.DELAY_MS, b"700"))
    sender.send(topic, b"long", (ingress.DELAY_MS, long(900)))
    sender.send(topic, b"at", (ingress.DELIVER_AT, b"%d" % (now_ms() + 1_500)))
    sender.send(topic, b"at long", (ingress.DELIVER_AT, long(now_ms() + 2_500)))
    sender.send(topic, b"level", (ingress.LEVEL, b"5s"), level_ms=5_000)
    sender.send(topic, b"now", (ingress.DELAY_MS, b"0"))
    sender.send(topic, b"over", (ingress.DELIVER_AT, b"%d" % (now_ms() - 3_600_000)))
    sender.send(topic, b"old", (ingress.DELAY_MS, b"50"), timestamp_ms=now_ms() - 7_200_000)
    sender.flush()
    with CommittedReader(kafka.address, topic) as reader:
        assert_delivered(reader, sender.sent)


def test_key_value_and_headers_come_as_they_were_sent(
    sender: Sender, kafka: KafkaBroker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(3)
    headers: list[tuple[str, bytes | None]] = [
        ("a", b"1"),
        ("a", None),
        ("b", b""),
        ("ä", b"\xff\x00"),
        ("dw-retry-attempt", b"2"),
    ]
    at_ms = now_ms() - 5_000
    for number, due in enumerate([SOON, (ingress.DELAY_MS, b"0")]):
        more = {ingress.PARTITION: b"2", ingress.TIMESTAMP: long(at_ms), "ttl": b"600"}
        sender.send(topic, b"%d" % number, due, key=b"", headers=headers, more=more)
    sender.flush()
    with CommittedReader(kafka.address, topic, partitions=3) as reader:
        for message in reader.wait_for(2):
            assert (message.key(), message.partition()) == (b"", 2)
            assert message.timestamp()[1] == at_ms
            own = [each for each in headers_of(message) if each[0] not in OURS]
            assert own == [*headers, ("ttl", b"600")]
            assert dict(headers_of(message)).keys() >= OURS


OURS = {"dw-id", "dw-due", "dw-accepted", "dw-wheel", "dw-forwarded"}


def test_a_cancel_withdraws_what_waits(
    sender: Sender, service: Service, kafka: KafkaBroker, topic: str
) -> None:
    # The cancel takes some milliseconds; on a busy machine it may take until a node leads again.
    due_ms, id_ = now_ms() + 10_000, uuid.uuid4()
    at, goes_to = (ingress.DELIVER_AT, b"%d" % due_ms), (ingress.TOPIC, topic.encode())
    sender.send(topic, b"withdrawn", at, more={ingress.ID: id_.bytes})
    sender.send(topic, b"stays", at)
    sender.flush()
    sender.put(b"cancel", [(ingress.CANCEL, str(id_).encode()), at, goes_to])
    late = ingress.DELIVER_AT, b"%d" % (now_ms() - 60_000)
    sender.put(b"late cancel", [(ingress.CANCEL, uuid.uuid4().bytes), late, goes_to])
    sender.flush()
    service.wait_done(due_ms)
    assert [m.value() for m in read_all(kafka.address, topic, at_least=1)] == [b"stays"]
    (letter,) = letters_of(kafka, sender, {b"late cancel"}).values()
    assert dict(headers_of(letter))["dw-dead-reason"] == b"DUE_TOO_OLD"


def test_a_half_is_delivered_when_it_was_committed_and_asked_about_otherwise(
    sender: Sender, kafka: KafkaBroker, topic: str
) -> None:
    held_until_ms = now_ms() + 9_000
    at, goes_to = (ingress.DELIVER_AT, b"%d" % held_until_ms), (ingress.TOPIC, topic.encode())
    ids = {name: uuid.uuid4() for name in (b"committed", b"later", b"given up", b"forgotten")}

    def begin(name: bytes, *more: tuple[str, bytes]) -> None:
        id_ = (ingress.ID, ids[name].bytes)
        sender.put(name, [goes_to, at, id_, ("dw-half", b"shop"), *more])

    due_ms = held_until_ms + 3_000
    begin(b"later", ("dw-half-deliver-at", long(due_ms)))
    for name in (b"committed", b"given up", b"forgotten"):
        begin(name)
    over = uuid.uuid4()
    ids[b"over"], at_once = over, (ingress.DELIVER_AT, b"%d" % (now_ms() - 600_000))
    hers = (ingress.ID, over.bytes)
    sender.put(b"over", [goes_to, at_once, hers, ("dw-half", b"shop")])
    sender.flush()
    for name in (b"committed", b"later"):
        sender.put(None, [(ingress.COMMIT, ids[name].bytes), at, goes_to])
    sender.put(None, [(ingress.CANCEL, ids[b"given up"].bytes), at, goes_to])
    sender.put(None, [(ingress.COMMIT, over.bytes), at_once, goes_to])  # no error, and no letter
    sender.flush()
    halves = KafkaNames(sender.cluster_id).halves
    with CommittedReader(kafka.address, topic) as reader:
        first, second = reader.wait_for(2)
    with CommittedReader(kafka.address, halves) as letters:

        def asked() -> list[KafkaMessage] | None:
            ours = {b"over", b"forgotten", b"given up", b"committed", b"later"}
            found = [m for m in letters.read_to_end() if m.value() in ours]
            return found if len(found) >= 2 else None

        about = wait_until("two groups are asked", asked)
    assert (first.value(), second.value()) == (b"committed", b"later")
    committed_ms = int(dict(headers_of(first))["dw-committed"] or b"")
    assert committed_ms <= first.timestamp()[1] < held_until_ms
    assert second.timestamp()[1] >= due_ms
    for message in (first, second):
        assert not [name for name, _ in headers_of(message) if name.startswith("dw-half")]
    assert {m.value() for m in about} == {b"over", b"forgotten"}
    assert {dict(headers_of(m))["dw-half-topic"] for m in about} == {topic.encode()}
    assert {dict(headers_of(m))["dw-id"] for m in about} == {
        ids[name].hex.encode() for name in (b"over", b"forgotten")
    }


UNFIT: dict[str, list[tuple[str, bytes | None]]] = {
    "TOPIC_INVALID": [SOON],
    "DUE_MISSING": [(ingress.TOPIC, b"t")],
    "DUE_AMBIGUOUS": [(ingress.TOPIC, b"t"), SOON, (ingress.LEVEL, b"5s")],
    "DUE_INVALID": [(ingress.TOPIC, b"t"), (ingress.DELIVER_AT, b"soon")],
    "DUE_BEYOND_SPAN": [(ingress.TOPIC, b"t"), (ingress.DELAY_MS, long(10**14))],
    "DELAY_INVALID": [(ingress.TOPIC, b"t"), (ingress.DELAY_MS, long(-1))],
    "LEVEL_UNKNOWN": [(ingress.TOPIC, b"t"), (ingress.LEVEL, b"17m")],
    "ID_INVALID": [(ingress.TOPIC, b"t"), SOON, (ingress.ID, b"mine")],
    "PARTITION_INVALID": [(ingress.TOPIC, b"t"), SOON, (ingress.PARTITION, b"x")],
    "TIMESTAMP_INVALID": [(ingress.TOPIC, b"t"), SOON, (ingress.TIMESTAMP, b"0")],
    "HEADER_RESERVED": [(ingress.TOPIC, b"t"), SOON, ("dw-dely-ms", b"1")],
    "HEADER_INVALID": [(ingress.TOPIC, b"t"), SOON, ("", b"1")],
}


def test_what_cannot_be_delivered_is_reported_and_holds_up_nothing(
    sender: Sender, kafka: KafkaBroker, topic: str
) -> None:
    values = {f"{reason} {uuid.uuid4()}".encode(): reason for reason in UNFIT}
    for value, reason in values.items():
        sender.put(value, [("own", b"1"), *UNFIT[reason]], key=b"k")
    large = b"large " + uuid.uuid4().bytes + bytes(999_990)
    sender.put(large, [(ingress.TOPIC, topic.encode()), SOON])
    sender.send(topic, b"behind", SOON)
    sender.flush()
    with CommittedReader(kafka.address, topic) as reader:
        assert_delivered(reader, sender.sent)
    letters = letters_of(kafka, sender, set(values))
    for value, letter in letters.items():
        dead_headers = dict(headers_of(letter))
        assert dead_headers["dw-dead-reason"] == values[value].encode()
        assert dead_headers["dw-dead-detail"]
        name, partition, offset = (dead_headers["dw-dead-origin"] or b"").decode().split("/")
        assert name == sender.topic
        assert value_at(kafka, TopicPartition(name, int(partition), int(offset))) == value
        assert letter.key() == b"k"
        assert headers_of(letter)[0] == ("own", b"1")
    # The large one has no letter to wait for, and may be read after all others.
    wait_until(
        "all are reported",
        lambda: {*UNFIT, "MESSAGE_TOO_LARGE"} <= reported_reasons(kafka, sender),
    )


def reported_reasons(kafka: KafkaBroker, sender: Sender) -> set[str | None]:
    """Why messages have come to nothing, as the topic of outcomes has it so far."""
    outcomes = read_all(kafka.address, KafkaNames(sender.cluster_id).outcomes)
    return {json.loads(each.value() or b"{}").get("reason") for each in outcomes}


def value_at(kafka: KafkaBroker, place: TopicPartition) -> bytes | None:
    """The value of the record that lies there."""
    consumer = Consumer({"bootstrap.servers": kafka.address, "group.id": "look"})
    consumer.assign([place])
    try:
        message = consumer.poll(PATIENCE_S)
        assert message is not None
        assert message.offset() == place.offset
        return message.value()
    finally:
        consumer.close()


def test_how_far_it_is_shows_where_people_look(
    sender: Sender, service: Service, kafka: KafkaBroker, topic: str
) -> None:
    sender.send(topic, b"far ahead", (ingress.DELAY_MS, b"600000"))
    sender.send(topic, b"soon", SOON)
    sender.flush()
    consumer = Consumer(
        {"bootstrap.servers": kafka.address, "group.id": f"delaywheel-{service.cluster_id}-ingress"}
    )
    partitions = consumer.list_topics(sender.topic, timeout=PATIENCE_S).topics[sender.topic]
    places = [TopicPartition(sender.topic, number) for number in partitions.partitions]

    def is_level() -> bool:
        ends = {p.partition: consumer.get_watermark_offsets(p, timeout=10)[1] for p in places}
        committed = consumer.committed(places, timeout=PATIENCE_S)
        return all(max(each.offset, 0) == ends[each.partition] for each in committed)

    wait_until("the group shows everything as read", is_level)
    consumer.close()
    wait_until(
        "the lag is reported",
        lambda: "0 offsets not settled" in service.run_cli("status", check=False).stdout,
    )
