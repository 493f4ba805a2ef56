"""One bad topic or message does not hold up others for long, and is itself never lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from confluent_kafka import Message as KafkaMessage

from delaywheel import Message, MessageState
from delaywheel_replica.kafka_settings import KafkaNames
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import (
    CommittedReader,
    create_topic,
    delete_topic,
    headers_of,
    set_topic,
)
from support.services.service import Service, wait_until

pytestmark = pytest.mark.kafka


def letters_of(kafka: KafkaBroker, service: Service, topic: str, count: int) -> list[KafkaMessage]:
    """The letters of messages to one topic, once there are this many."""
    dead = KafkaNames(service.cluster_id).dead
    with CommittedReader(kafka.address, dead) as reader:

        def found() -> list[KafkaMessage] | None:
            letters = [m for m in reader.read_to_end() if topic_of(m) == topic]
            return letters if len(letters) >= count else None

        return wait_until(f"{count} letters", found, timeout_s=40)


def topic_of(letter: KafkaMessage) -> str:
    return (dict(headers_of(letter))["dw-dead-topic"] or b"").decode()


def test_topics_that_take_less_than_when_their_messages_were_accepted(
    service: Service, kafka: KafkaBroker, new_topic: Callable[..., str]
) -> None:
    """One takes no large messages any more, the other has fewer partitions."""
    small, narrow = new_topic(), new_topic(partitions=8)
    ahead = timedelta(hours=1)
    with service.client() as client:
        results = client.produce_many(
            [
                Message(small, b"x" * 50_000, delay=ahead),
                *(Message(small, b"%d" % n, delay=ahead) for n in range(10)),
                Message(narrow, b"nowhere", partition=7, delay=ahead),
                Message(narrow, b"fine", delay=ahead),
            ]
        )
        handles = [result.unwrap() for result in results]
        set_topic(kafka.address, small, "max.message.bytes", "10000")
        delete_topic(kafka.address, narrow)
        create_topic(kafka.address, narrow)
        now = datetime.now(UTC)
        for moved in client.reschedule_many((handle, now) for handle in handles):
            moved.unwrap()
    with CommittedReader(kafka.address, small) as good:
        good.wait_for(10, timeout_s=40)
        (letter,) = letters_of(kafka, service, small, 1)
        assert sorted(int(m.value() or b"") for m in good.read_to_end()) == list(range(10))
    assert letter.value() == b"x" * 50_000
    with CommittedReader(kafka.address, narrow) as good:
        assert [m.value() for m in good.wait_for(1, timeout_s=40)] == [b"fine"]
    assert [m.value() for m in letters_of(kafka, service, narrow, 1)] == [b"nowhere"]


def test_a_timestamp_that_no_topic_takes(service: Service, kafka: KafkaBroker, topic: str) -> None:
    """The dead-letter topic would refuse it too: the letter has the present time."""
    ahead = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
    with service.client() as client:
        refused = client.produce(topic, b"ahead", timestamp=ahead, delay=timedelta(seconds=1))
        fine = client.produce(topic, b"fine", delay=timedelta(seconds=1))
    with CommittedReader(kafka.address, topic) as good:
        assert [m.value() for m in good.wait_for(1, timeout_s=40)] == [b"fine"]
    (letter,) = letters_of(kafka, service, topic, 1)
    headers = dict(headers_of(letter))
    assert letter.value() == b"ahead"
    assert headers["dw-dead-reason"] == b"TIMESTAMP_REFUSED"
    with service.client() as client:
        expected = [
            (MessageState.DEAD_LETTERED, "TIMESTAMP_REFUSED"),
            (MessageState.DELIVERED, None),
        ]

        def is_known() -> bool:
            found = [client.get(handle) for handle in (refused, fine)]
            return [each and (each.state, each.dead_reason) for each in found] == expected

        wait_until("the node knows the fate of both", is_known)
    assert int(headers["dw-dead-timestamp"] or b"") == int(ahead.timestamp() * 1000)


def test_a_message_larger_than_the_limit_is_now(
    kafka: KafkaBroker, topic: str, tmp_path: Path, cluster_id: str
) -> None:
    """Accepted messages are forwarded, whatever the operator has changed since.

    Beside that, the log of a node that starts, accepts and stops: each line is a document, none of
    the client library's own way, and none says that something broke.
    """
    folder, as_json = tmp_path / "cluster", {"log_format": "json"}
    with (
        Service(kafka.address, folder, cluster_id, config=as_json) as before,
        before.client() as client,
    ):
        client.produce(topic, b"x" * 200_000, delay=timedelta(seconds=5))
    (path,) = folder.rglob("*.log")
    log = [json.loads(line) for line in path.read_text().splitlines()]
    assert {"serving", "leading", "wheel opened", "stopped"} <= {line["event"] for line in log}
    assert {line["process"] for line in log} == {"server", "cleaner"}
    # Of a busy machine it may warn.
    assert {line["level"] for line in log} <= {"info", "warning"}
    assert sum(line["event"] == "kafka client says" for line in log) < len(log) / 2
    lower = {"max_message_bytes": "10000"}
    with (
        Service(kafka.address, folder, cluster_id, config=lower),
        CommittedReader(kafka.address, topic) as reader,
    ):
        assert [m.value() for m in reader.wait_for(1, timeout_s=40)] == [b"x" * 200_000]


def test_a_message_that_has_expired(service: Service, kafka: KafkaBroker, topic: str) -> None:
    """All other due messages are delivered, with their own times to live."""
    old = datetime.now(UTC) - timedelta(minutes=2)
    ttl = [("a", b"1"), ("ttl", (60).to_bytes(8, "big"))]
    with service.client() as client:
        results = client.produce_many(
            [
                Message(topic, b"late", timestamp=old, headers=ttl, delay=timedelta(seconds=1)),
                Message(topic, b"lives", headers=ttl, delay=timedelta(seconds=1)),
                Message(topic, b"other", headers=[("ttl", b"5m")], delay=timedelta(seconds=1)),
            ]
        )
        late = results[0].unwrap()
        with CommittedReader(kafka.address, topic) as good:
            arrived = {m.value(): headers_of(m) for m in good.wait_for(2, timeout_s=40)}
        (letter,) = letters_of(kafka, service, topic, 1)

        def is_known() -> bool:
            stored = client.get(late)
            fate = stored and (stored.state, stored.dead_reason)
            return fate == (MessageState.DEAD_LETTERED, "EXPIRED")

        wait_until("its fate is known", is_known)
    assert arrived.keys() == {b"lives", b"other"}
    assert arrived[b"lives"][:2] == ttl
    headers = dict(headers_of(letter))
    assert letter.value() == b"late"
    assert headers["dw-dead-reason"] == b"EXPIRED"
    assert headers["ttl"] == ttl[1][1]
