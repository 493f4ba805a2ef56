"""A leader's term outlasts what brokers do every day."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest

from delaywheel import Client
from local.loopback.brokers import Brokers
from local.loopback.cluster import LocalCluster, described
from support.kafka.read_committed import CommittedReader, create_topic
from support.services.trio import NO_METRICS

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

MOVES = 5
EVERY_S = 3.0
PARTITIONS = 3


@pytest.fixture(scope="module")
def cluster(brokers: Brokers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("nodes")
    with LocalCluster(
        nodes=1, kafka=brokers.address, folder=folder, settings=NO_METRICS
    ) as cluster:
        cluster.wait_until_accepting()
        yield cluster


class Sending(threading.Thread):
    """Sends a message again and again; `sent` has what was accepted."""

    def __init__(self, client: Client, topic: str) -> None:
        super().__init__(daemon=True)
        self.sent: list[bytes] = []
        self._client, self._topic = client, topic
        self._ends = threading.Event()

    def run(self) -> None:
        while not self._ends.wait(0.02):
            value = b"%d" % len(self.sent)
            self._client.produce(self._topic, value, key=value, delay=timedelta(seconds=1))
            self.sent.append(value)

    def end(self) -> None:
        self._ends.set()
        self.join()


@contextmanager
def sending(cluster: LocalCluster, brokers: Brokers, topic: str) -> Iterator[CommittedReader]:
    """Messages on their way, each of which arrives once."""
    create_topic(brokers.address, topic, partitions=PARTITIONS)
    reader = CommittedReader(brokers.address, topic, partitions=PARTITIONS)
    with Client(cluster.nodes[0].address, timeout=60) as client, reader:
        sender = Sending(client, topic)
        sender.start()
        yield reader
        sender.end()
        reader.wait_for(len(sender.sent))
        arrived = [message.value() for message in reader.read_to_end()]
        assert sorted(filter(None, arrived)) == sorted(sender.sent)


def epoch(cluster: LocalCluster) -> int | None:
    found = described(cluster.nodes[0].address)
    return found.leader.epoch if found is not None and found.HasField("leader") else None


def test_leaders_and_coordinators_move_within_a_term(
    cluster: LocalCluster, brokers: Brokers, cluster_id: str
) -> None:
    with sending(cluster, brokers, f"orders-{cluster_id}") as reader:
        reader.wait_for(1)
        before, ends = epoch(cluster), threading.Event()
        for _ in range(MOVES):
            brokers.move_leaders()
            ends.wait(EVERY_S)
        assert epoch(cluster) == before is not None


def test_a_broker_restarts_cleanly_within_a_term(
    cluster: LocalCluster, brokers: Brokers, cluster_id: str
) -> None:
    with sending(cluster, brokers, f"restarts-{cluster_id}") as reader:
        reader.wait_for(1)
        before = epoch(cluster)
        for broker in brokers.each:
            broker.restart()
            brokers.wait_until_in_sync()
        brokers.elect_preferred()
        assert epoch(cluster) == before is not None
