"""A backlog is files, not memory; any number of messages of one second comes out once.

At night they are 210,000, which is more than the cleaner reads ahead
(tests/cleaner/due/test_selection.py has such bounds by day); in a push 40,000, half of them in a
millisecond: more than one transaction holds.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from delaywheel import Message
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import CommittedReader, create_topic
from support.process.night import NIGHT
from support.services.service import Service

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

IN_ONE_SECOND = 210_000 if NIGHT else 40_000


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.fixture(scope="module")
def service(kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Messages are accepted for a week ahead, and however long after their due they come."""
    config = {"span_seconds": "604800", "open_files": "128", "late_window_seconds": "600"}
    folder, name = tmp_path_factory.mktemp("scale") / "cluster", f"t{uuid.uuid4().hex[:12]}"
    with Service(kafka.address, folder, name, config=config) as running:
        yield running


def test_a_week_of_slots_with_few_open_files(
    service: Service, kafka: KafkaBroker, topic: str
) -> None:
    spread = random.Random(3)
    now = datetime.now(UTC)
    batch = [
        Message(topic, b"v", deliver_at=now + timedelta(seconds=spread.randint(600, 600_000)))
        for _ in range(1_000)
    ]
    with service.client() as client, CommittedReader(kafka.address, topic) as reader:
        assert not [r.error for r in client.produce_many(batch) if r.error]
        node = service.node()
        assert open_files(node["server_pid"]) < 128 + 100
        assert open_files(node["cleaner_pid"]) < 128 + 100
        client.produce(topic, b"soon", delay=timedelta(milliseconds=300))
        assert [m.value() for m in reader.wait_for(1)] == [b"soon"]


def count_committed(bootstrap: str, topic: str, wanted: int, timeout_s: float) -> list[bytes]:
    """Values of the topic, read in large batches."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "scale",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    values: list[bytes] = []
    deadline = time.monotonic() + timeout_s
    quiet_since = time.monotonic()
    try:
        while len(values) < wanted or time.monotonic() - quiet_since < 2:
            assert time.monotonic() < deadline, f"{len(values)} of {wanted}"
            if batch := consumer.consume(10_000, timeout=0.5):
                values.extend(m.value() or b"" for m in batch)
                quiet_since = time.monotonic()
    finally:
        consumer.close()
    return values


@pytest.mark.timeout(600)
def test_very_many_messages_in_one_second(
    service: Service, kafka: KafkaBroker, cluster_id: str
) -> None:
    topic = f"many-{cluster_id}"
    create_topic(kafka.address, topic)
    # On a slow machine the last of them are accepted when their second has come.
    total, due = IN_ONE_SECOND, datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=10)
    with service.client(timeout=60.0) as client:
        for first in range(0, total, 10_000):
            batch = [
                Message(
                    topic,
                    n.to_bytes(4, "big"),
                    # Half of them in one single millisecond.
                    deliver_at=due + timedelta(milliseconds=n % 1000 if n % 2 else 500),
                )
                for n in range(first, min(first + 10_000, total))
            ]
            for each in batch:
                each.fix_due(0, {}, "deliver")  # also of those that are late
            assert not [r.error for r in client.produce_many(batch) if r.error]
    values = count_committed(kafka.address, topic, total, timeout_s=400)
    assert len(values) == total
    assert len(set(values)) == total
    service.wait_done((due.timestamp() + 1) * 1000)
