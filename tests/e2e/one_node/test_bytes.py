"""Messages come out unchanged: bytes, nulls, headers, partition, timestamp; at their due."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka import Message as KafkaMessage

from delaywheel import Message
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import CommittedReader, headers_of
from support.services.service import Service

pytestmark = pytest.mark.kafka

OWN_HEADERS = ["dw-id", "dw-due", "dw-accepted", "dw-wheel"]


def split_headers(
    message: KafkaMessage,
) -> tuple[list[tuple[str, bytes | None]], dict[str, bytes | None]]:
    """The caller's headers, and ours (which come last)."""
    headers = headers_of(message)
    assert [name for name, _ in headers[-len(OWN_HEADERS) :]] == OWN_HEADERS
    return headers[: -len(OWN_HEADERS)], dict(headers[-len(OWN_HEADERS) :])


CONTENTS: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]] = [
    (b"key", b"value", []),
    (None, b"value", [("a", b"1")]),
    (b"", b"", [("a", None), ("a", b""), ("a", b"2"), ("b", b"\x00\xff")]),
    (b"k", None, [("ä", b"utf-8 name")]),
    (None, None, []),
]


def test_bytes_come_out_as_they_went_in(service: Service, kafka: KafkaBroker, topic: str) -> None:
    messages = [
        Message(topic, value, key=key, headers=headers, delay=timedelta(milliseconds=900))
        for key, value, headers in CONTENTS
    ]
    with service.client() as client, CommittedReader(kafka.address, topic) as reader:
        results = client.produce_many(messages)
        assert [result.error for result in results] == [None] * len(messages)
        arrived = reader.wait_for(len(messages))
    by_id = {split_headers(m)[1]["dw-id"]: m for m in arrived}
    for sent, (key, value, headers) in zip(messages, CONTENTS, strict=True):
        got = by_id[sent.id.hex().encode()]
        assert (got.key(), got.value()) == (key, value)
        assert split_headers(got)[0] == headers


def test_own_headers_say_where_a_message_comes_from(
    service: Service, kafka: KafkaBroker, topic: str
) -> None:
    due = datetime.now(UTC) + timedelta(seconds=5)
    with service.client() as client, CommittedReader(kafka.address, topic) as reader:
        before_ms = time.time_ns() // 1_000_000
        handle = client.produce(topic, b"v", deliver_at=due)
        after_ms = time.time_ns() // 1_000_000
        (got,) = reader.wait_for(1)
    _, own = split_headers(got)
    wheel, _, hex_id, _ = str(handle).split(":")
    assert own["dw-id"] == hex_id.encode()
    assert own["dw-wheel"] == f"{service.cluster_id}/{wheel}".encode()
    due_ms = int(own["dw-due"] or b"")
    assert 0 <= due_ms - due.timestamp() * 1000 < 1.5
    assert before_ms <= int(own["dw-accepted"] or b"") <= after_ms
    # By default the record's time is that of forwarding, as if it had been produced then.
    assert got.timestamp()[1] >= due_ms


def test_explicit_partition_and_timestamp(
    service: Service, kafka: KafkaBroker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(partitions=4)
    with (
        service.client() as client,
        CommittedReader(kafka.address, topic, partitions=4) as reader,
    ):
        client.produce(
            topic,
            b"x",
            partition=3,
            timestamp=datetime.fromtimestamp(1_700_000_000.123, UTC),
            delay=timedelta(0),
        )
        (got,) = reader.wait_for(1)
    assert got.partition() == 3
    assert got.timestamp()[1] == 1_700_000_000_123
    # The timestamp is the caller's: a header has the time of forwarding.
    *others, (name, forwarded_ms) = headers_of(got)
    assert [own for own, _ in others] == OWN_HEADERS
    assert name == "dw-forwarded"
    assert int(dict(others)["dw-due"] or b"") <= int(forwarded_ms or b"") <= time.time() * 1000


def test_nothing_is_visible_before_its_due(
    service: Service, kafka: KafkaBroker, topic: str
) -> None:
    now = datetime.now(UTC)
    messages = [
        Message(topic, b"%d" % n, deliver_at=now + timedelta(milliseconds=300 + 7 * n))
        for n in range(200)
    ]
    with service.client() as client, CommittedReader(kafka.address, topic) as reader:
        assert not [result.error for result in client.produce_many(messages) if result.error]
        seen = 0
        while seen < len(messages):
            reader.wait_for(seen + 1)
            now_ms = time.time_ns() / 1e6
            for got in reader.messages[seen:]:
                assert int(split_headers(got)[1]["dw-due"] or b"") <= now_ms
            seen = len(reader.messages)
    assert len({m.value() for m in reader.messages}) == len(messages)
