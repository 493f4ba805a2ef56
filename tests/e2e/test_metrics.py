"""A whole node's metrics over HTTP while messages pass through it, and processes die; and a load.

One node for all tests: the first finds nothing counted, each other one counts from what it finds.
The last has very many messages of one second, which come out once: at night 210,000, which is more
than the cleaner reads ahead (tests/cleaner/due/test_selection.py has such bounds by day); in a push
40,000, half of them in a millisecond: more than one transaction holds.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from prometheus_client.parser import text_string_to_metric_families

from delaywheel import CancelOutcome, Message
from local.loopback.kafka import KafkaBroker, free_ports
from support.kafka.read_committed import create_topic
from support.process.night import NIGHT
from support.services.service import Service
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka

IN_ONE_SECOND = 210_000 if NIGHT else 40_000
STARTS = "process_start_time_seconds"
# Counters of the cleaner, which restart with it.
FORWARDING = ("forwarded_messages_total", "cancelled_messages_total", "lateness_seconds_count")


class Watch:
    """Scrapes a node; no counter may ever fall while its process lives."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/metrics"
        self._counters: dict[str, float] = {}
        self._started: dict[str, float] = {}

    def scrape(self) -> dict[str, float]:
        with urllib.request.urlopen(self._url, timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        found, counters = {}, {}
        for family in families:
            for sample in family.samples:
                labels = [sample.name.removeprefix("delaywheel_"), *sample.labels.values()]
                found["/".join(labels)] = sample.value
                if family.type in {"counter", "histogram"}:
                    counters["/".join(labels)] = sample.value
        started = {name: value for name, value in found.items() if name.startswith(STARTS)}
        if started == self._started:
            fallen = {
                name for name, value in counters.items() if value < self._counters.get(name, 0)
            }
            assert not fallen
        self._started, self._counters = started, counters
        return found

    def until(self, what: str, **least: float) -> dict[str, float]:
        def reached() -> dict[str, float] | None:
            found = self.scrape()
            return found if all(found.get(n, -1) >= value for n, value in least.items()) else None

        return wait_until(what, reached)


@pytest.fixture(scope="module")
def started(
    kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Service, Watch]]:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    folder, name = tmp_path_factory.mktemp("metrics") / "cluster", f"t{uuid.uuid4().hex[:12]}"
    config = {
        "metrics_listen": address,
        # Messages are accepted however long after their due they come.
        "late_window_seconds": "600",
    }
    with Service(kafka.address, folder, name, config=config) as running:
        yield running, Watch(address)


@pytest.fixture
def watched(started: tuple[Service, Watch]) -> tuple[Service, Watch]:
    """The node accepts messages, whatever the previous test has killed."""
    service, watch = started
    service.wait_accepting()
    return service, watch


def test_messages_are_followed_from_acceptance_to_their_topic(
    watched: tuple[Service, Watch], topic: str
) -> None:
    service, watch = watched
    began = time.time()
    with service.client() as client:
        for _ in range(5):
            client.produce(topic, b"soon", delay=timedelta(milliseconds=200))
        # A cancel waits for a leader, which a busy machine may have to elect first.
        gone = client.produce(topic, b"gone", delay=timedelta(seconds=10))
        assert client.cancel(gone).outcome is CancelOutcome.CANCELLED
        client.produce(topic, b"later", delay=timedelta(hours=1.5))
        done = {"forwarded_messages_total": 5, "cancelled_messages_total": 1}
        # A busy machine may bring another election: it is waited for.
        found = watch.until("all is done", **done, **{"role/leading": 1, "ready": 1})
        assert found["accepted_messages_total"] == found["acknowledged_messages_total"] == 7
        assert found[f"topic_accepted_messages_total/{topic}"] == 7
        assert found[f"topic_forwarded_messages_total/{topic}"] == 5
        assert found["acknowledgement_duration_seconds_count"] > 0
        assert found["dead_letters_total/TOPIC_MISSING"] == 0
        assert found["accepted_cancels_total"] == 1
        assert found["pending_messages/1d"] == 1
        assert found["lateness_seconds_count"] == 5
        assert found["lateness_seconds_bucket/3600.0"] == 5
        assert 0 < found["lateness_seconds_sum"] < 5 * (time.time() - began)
        assert found["commits_total"] == found["commit_duration_seconds_count"] > 3
        assert found["elections_total"] >= 1
        assert found["role/leading"] == found["ready"] == 1
        assert found["process_resident_memory_bytes/cleaner"] > 10 << 20
        assert found["unreadable_frames"] == found["lost_frames_total"] == 0


def test_a_cleaner_that_dies_begins_anew(watched: tuple[Service, Watch], topic: str) -> None:
    service, watch = watched
    earlier = watch.scrape()["forwarded_messages_total"]
    with service.client() as client:
        for _ in range(3):
            client.produce(topic, b"v", delay=timedelta(milliseconds=200))
        before = watch.until("three are out", forwarded_messages_total=earlier + 3)
        service.kill("cleaner_pid")
        began = before[f"{STARTS}/cleaner"]
        after = watch.until("the next one reports", **{f"{STARTS}/cleaner": began + 0.001})
        assert {after[name] for name in FORWARDING} == {0}
        acknowledged = "acknowledged_messages_total"
        assert after[acknowledged] == before[acknowledged] >= 3, "the server lives on"
        service.wait_accepting()
        client.produce(topic, b"v", delay=timedelta(milliseconds=200))
        again = watch.until("one is out", forwarded_messages_total=1)
        server = f"{STARTS}/server"
        assert again[server] == before[server]


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_very_many_messages_in_one_second(
    watched: tuple[Service, Watch], kafka: KafkaBroker, cluster_id: str
) -> None:
    service, _ = watched
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
