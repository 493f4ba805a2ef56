"""A whole node's metrics over HTTP while messages pass through it, and processes die.

One node for all tests: the first finds nothing counted, each other one counts from what it finds.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from datetime import timedelta

import pytest
from prometheus_client.parser import text_string_to_metric_families

from delaywheel import CancelOutcome
from local.loopback.kafka import KafkaBroker, free_ports
from support.process.waiting import wait_until
from support.services.service import Service

pytestmark = pytest.mark.kafka

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
    with Service(kafka.address, folder, name, config={"metrics_listen": address}) as running:
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


def test_a_server_that_dies_comes_back_to_its_port(watched: tuple[Service, Watch]) -> None:
    service, watch = watched
    before = watch.scrape()
    service.kill_and_wait("server_pid")

    def alive() -> dict[str, float] | None:
        try:
            return watch.scrape()
        except urllib.error.URLError:
            return None

    after = wait_until("it answers", alive)
    assert after[f"{STARTS}/server"] > before[f"{STARTS}/server"]
