"""One bad topic or message holds up nobody else for long, and is itself never lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from delaywheel import Message, MessageState
from local.kafka import KafkaBroker
from support.read_committed import (
    CommittedReader,
    create_topic,
    delete_topic,
    headers_of,
    set_topic,
)
from support.service import Service, wait_until

pytestmark = pytest.mark.kafka

AHEAD_S = 8
"""Topics are changed before this is over, also on a busy machine."""


def dead_topic(service: Service) -> str:
    return f"delaywheel-{service.cluster_id}-dead"


def test_a_topic_deleted_while_messages_are_pending(
    own_service: Service, kafka: KafkaBroker, new_topic: Callable[..., str]
) -> None:
    doomed, healthy = new_topic(), new_topic()
    batch = [
        Message(
            topic,
            b"%d" % n,
            key=b"k",
            headers=[("h", b"1")],
            delay=timedelta(seconds=AHEAD_S + n / 50),
        )
        for n in range(20)
        for topic in (doomed, healthy)
    ]
    with own_service.client() as client:
        assert not [r.error for r in client.produce_many(batch) if r.error]
    delete_topic(kafka.address, doomed)
    with (
        CommittedReader(kafka.address, healthy) as good,
        CommittedReader(kafka.address, dead_topic(own_service)) as dead,
    ):
        good.wait_for(20, timeout_s=40)
        dead.wait_for(20, timeout_s=40)
        assert sorted(int(m.value() or b"") for m in good.read_to_end()) == list(range(20))
        letters = dead.read_to_end()
    assert sorted(int(m.value() or b"") for m in letters) == list(range(20))
    for letter in letters:
        headers = dict(headers_of(letter))
        assert letter.key() == b"k"
        assert headers["h"] == b"1"
        assert headers["dw-dead-topic"] == doomed.encode()
        assert headers["dw-dead-reason"]


def test_a_message_that_became_too_large_for_its_topic(
    own_service: Service, kafka: KafkaBroker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    with own_service.client() as client:
        results = client.produce_many(
            [
                Message(topic, b"x" * 50_000, delay=timedelta(seconds=AHEAD_S)),
                *(Message(topic, b"%d" % n, delay=timedelta(seconds=AHEAD_S)) for n in range(10)),
            ]
        )
        assert not [r.error for r in results if r.error]
    set_topic(kafka.address, topic, "max.message.bytes", "10000")
    with (
        CommittedReader(kafka.address, topic) as good,
        CommittedReader(kafka.address, dead_topic(own_service)) as dead,
    ):
        good.wait_for(10, timeout_s=40)
        (letter,) = dead.wait_for(1, timeout_s=40)
        assert sorted(int(m.value() or b"") for m in good.read_to_end()) == list(range(10))
    assert letter.value() == b"x" * 50_000


def test_a_partition_that_the_topic_has_no_more(
    own_service: Service, kafka: KafkaBroker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(partitions=8)
    with own_service.client() as client:
        client.produce(topic, b"nowhere", partition=7, delay=timedelta(seconds=AHEAD_S))
        client.produce(topic, b"fine", delay=timedelta(seconds=AHEAD_S))
        delete_topic(kafka.address, topic)
        create_topic(kafka.address, topic)
    with (
        CommittedReader(kafka.address, topic) as good,
        CommittedReader(kafka.address, dead_topic(own_service)) as dead,
    ):
        assert [m.value() for m in good.wait_for(1, timeout_s=40)] == [b"fine"]
        assert [m.value() for m in dead.wait_for(1, timeout_s=40)] == [b"nowhere"]


def test_a_timestamp_that_no_topic_takes(
    own_service: Service, kafka: KafkaBroker, topic: str
) -> None:
    """The topic of the letters would refuse it too: the letter has the time of now."""
    ahead = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
    with own_service.client() as client:
        refused = client.produce(topic, b"ahead", timestamp=ahead, delay=timedelta(seconds=1))
        fine = client.produce(topic, b"fine", delay=timedelta(seconds=1))
    with (
        CommittedReader(kafka.address, topic) as good,
        CommittedReader(kafka.address, dead_topic(own_service)) as dead,
    ):
        assert [m.value() for m in good.wait_for(1, timeout_s=40)] == [b"fine"]
        (letter,) = dead.wait_for(1, timeout_s=40)
    headers = dict(headers_of(letter))
    assert letter.value() == b"ahead"
    assert headers["dw-dead-reason"] == b"TIMESTAMP_REFUSED"
    with own_service.client() as client:
        expected = [
            (MessageState.DEAD_LETTERED, "TIMESTAMP_REFUSED"),
            (MessageState.DELIVERED, None),
        ]

        def is_told() -> bool:
            found = [client.get(handle) for handle in (refused, fine)]
            return [each and (each.state, each.dead_reason) for each in found] == expected

        wait_until("the node tells what became of both", is_told)
    assert int(headers["dw-dead-timestamp"] or b"") == int(ahead.timestamp() * 1000)


def test_a_message_larger_than_the_limit_is_now(
    kafka: KafkaBroker, topic: str, tmp_path: Path, cluster_id: str
) -> None:
    """What was accepted is forwarded, whatever the operator has set since.

    Beside that, the log of a node that starts, accepts and stops: each line is a document, none of
    the client library's own way, and none says that something broke.
    """
    folder, as_json = tmp_path / "cluster", {"log_format": "json"}
    with (
        Service(kafka.address, folder, cluster_id, config=as_json) as before,
        before.client() as client,
    ):
        client.produce(topic, b"x" * 200_000, delay=timedelta(seconds=8))
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
