"""A leader's term outlasts what brokers do every day."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from delaywheel import Client
from local.loopback.brokers import Brokers
from local.loopback.cluster import LocalCluster
from support.kafka.read_committed import CommittedReader, create_topic
from support.services.trio import NO_METRICS

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

MOVES = 5
EVERY_S = 3.0
PARTITIONS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def cluster(brokers: Brokers, folder: Path) -> Iterator[LocalCluster]:
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


def terms_lost(folder: Path) -> int:
    return (folder / "n1.log").read_text(errors="replace").count("leadership lost")


def test_leaders_and_coordinators_move_within_a_term(
    cluster: LocalCluster, folder: Path, brokers: Brokers, cluster_id: str
) -> None:
    """Each move ended one, as the client sent nothing again. A busy machine may cost one."""
    with sending(cluster, brokers, f"orders-{cluster_id}") as reader:
        reader.wait_for(1)
        before, ends = terms_lost(folder), threading.Event()
        for _ in range(MOVES):
            brokers.move_leaders()
            ends.wait(EVERY_S)
        assert terms_lost(folder) - before <= 1
