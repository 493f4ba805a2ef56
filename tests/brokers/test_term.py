"""A leader's term outlasts what brokers do every day."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from delaywheel import Client
from local.loopback.brokers import Brokers
from local.loopback.cluster import LocalCluster, described
from local.loopback.node import send_signal
from support.kafka.read_committed import CommittedReader
from support.process.night import at_night
from support.services.trio import NO_METRICS
from support.services.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600)]

MOVES = 3
EVERY_S = 3.0
SEND_EVERY_S = 0.1
"""Nearly each message is a transaction of its own, on three brokers."""
PARTITIONS = 3
PATIENT_S = 120.0
"""A busy machine takes half a minute to start a broker, and what waited for that half as long."""


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


class Topic(CommittedReader):
    """A topic, what was accepted for it (`sent`), and a reader of what has arrived."""

    def __init__(self, brokers: Brokers, name: str, *, on: Sequence[int]) -> None:
        config = {"min.insync.replicas": str(min(2, len(on)))}
        wanted = NewTopic(name, PARTITIONS, replica_assignment=_turned(on), config=config)
        admin = AdminClient({"bootstrap.servers": brokers.address})
        admin.create_topics([wanted])[name].result()
        super().__init__(brokers.address, name, partitions=PARTITIONS)
        self.name = name
        self.sent: list[bytes] = []

    def send(self, client: Client) -> None:
        value = b"%d" % len(self.sent)
        client.produce(self.name, value, key=value, delay=timedelta(seconds=1))
        self.sent.append(value)

    def wait_for_new(self) -> None:
        """Waits for messages that are sent only now."""
        self.wait_for(len(self.sent) + 10, timeout_s=PATIENT_S)

    def check(self) -> None:
        """All have arrived, each once and none early."""
        self.wait_for(len(self.sent), timeout_s=PATIENT_S)
        values = [message.value() for message in self.read_to_end()]
        assert sorted(filter(None, values)) == sorted(self.sent)
        for message in self.messages:
            due_ms = dict(message.headers() or [])["dw-due"]
            assert message.timestamp()[1] >= int(due_ms or 0)


def _turned(brokers: Sequence[int]) -> list[list[int]]:
    """Returns the brokers of each partition, each led by another one if there are several."""
    firsts = [number % len(brokers) for number in range(PARTITIONS)]
    return [[*brokers[first:], *brokers[:first]] for first in firsts]


@contextmanager
def sending(cluster: LocalCluster, topics: Sequence[Topic]) -> Iterator[None]:
    """Messages for the topics, again and again."""
    ends = threading.Event()
    with Client(cluster.nodes[0].address, timeout=60) as client:

        def send() -> None:
            while not ends.wait(SEND_EVERY_S):
                for topic in topics:
                    topic.send(client)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        try:
            yield
        finally:
            ends.set()
            sender.join()


def terms_lost(folder: Path) -> int:
    return (folder / "n1.log").read_text(errors="replace").count("leadership lost")


def test_leaders_and_coordinators_move_within_a_term(
    cluster: LocalCluster, folder: Path, brokers: Brokers, cluster_id: str
) -> None:
    """Each move ended one, as the client sent nothing again."""
    before, ends = terms_lost(folder), threading.Event()
    with Topic(brokers, f"moved-{cluster_id}", on=(1, 2, 3)) as topic:
        with sending(cluster, [topic]):
            topic.wait_for_new()
            for _ in range(MOVES):
                brokers.move_leaders()
                ends.wait(EVERY_S)
        topic.check()
    assert terms_lost(folder) == before


@at_night  # the model of terms and a test of the leader have the rule
def test_who_follows_a_leader_does_without_the_ids_that_a_broker_keeps(
    cluster: LocalCluster, brokers: Brokers, cluster_id: str
) -> None:
    """A topic with one copy costs ids as its broker dies; one is never risked, and says which."""
    (node,) = cluster.nodes
    away = brokers.each[-1]

    def kept() -> bool:
        answer = described(node.address, details=True)
        return answer is not None and any("ids (" in m.report.kafka_error for m in answer.members)

    def without_leader(topic: str) -> bool:
        return any(at[0] == topic and leader < 0 for at, leader in brokers.leaders().items())

    with (
        # All on the broker that dies: each transaction with one of its messages costs its id.
        Topic(brokers, f"lone-{cluster_id}", on=(len(brokers.each),)) as lone,
        Topic(brokers, f"many-{cluster_id}", on=(1, 2, 3)) as many,
    ):
        with sending(cluster, [lone, many]):
            lone.wait_for_new()
            away.kill()  # which nobody knows for 9 s: each transaction with its messages stays open
            wait_until("ids are kept", kept, timeout_s=PATIENT_S)
            # A transaction that is open on it by now may cost another id, of which nobody has said
            # that it is kept: then no other process leads before the broker is back.
            wait_until("Kafka misses it", lambda: without_leader(lone.name), timeout_s=PATIENT_S)
            many.wait_for_new()
            send_signal(node.pids(["cleaner_pid"]), signal.SIGKILL)
            many.wait_for_new()
            wait_until("its successor says so", kept, timeout_s=PATIENT_S)
            away.start()
            brokers.wait_until_in_sync()
            wait_until("all ids are back", lambda: not kept(), timeout_s=PATIENT_S)
        for topic in (lone, many):
            topic.check()
