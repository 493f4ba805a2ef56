"""Three real nodes on a real broker: leaders are killed; nothing is lost, or left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from delaywheel import Client
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from local.loopback.cluster import LocalCluster
from local.loopback.kafka import KafkaBroker
from local.loopback.node import Node
from support.kafka.read_committed import CommittedReader
from support.services.load import Load, assert_arrived
from support.services.service import wait_until
from support.services.trio import NO_METRICS, seen_by

pytestmark = pytest.mark.kafka

KILLS = 3


@pytest.fixture
def cluster(kafka: KafkaBroker, tmp_path: Path, cluster_id: str) -> Iterator[LocalCluster]:
    settings = {
        "cluster_id": cluster_id,
        "late_window_seconds": 5,
        "ledger_seal_seconds": 1,
        **NO_METRICS,
    }
    with LocalCluster(
        nodes=3, kafka=kafka.address, folder=tmp_path / "cluster", settings=settings
    ) as running:
        running.wait_until_accepting()
        yield running


def watched(cluster: LocalCluster, what: str, ask: Callable[[], bool]) -> None:
    """Waits; nodes that died are started again meanwhile."""

    def look() -> bool:
        cluster.watch()
        return ask()

    wait_until(what, look, timeout_s=120, every_s=0.1)


def another_leads(cluster: LocalCluster, than: Node) -> bool:
    """Whether the others hear one of them lead."""
    seen = {seen_by(node).leader.node for node in cluster.nodes if node is not than}
    return bool(seen - {"", than.id})


def is_tidy(cluster: LocalCluster) -> bool:
    """Only wheels in use are left on every node, and no finished slot file."""
    for node in cluster.nodes:
        answer = seen_by(node)
        in_use = {pb.WHEEL_STATE_OPEN, pb.WHEEL_STATE_SPARE}
        if len(answer.wheels) != 6 or any(row.state not in in_use for row in answer.wheels):
            return False
        try:
            slots = [int(path.stem) for path in node.data.rglob("*.slot")]
        except FileNotFoundError:
            return False  # it is being tidied up
        if any(slot < answer.floor for slot in slots) or answer.floor < time.time() - 60:
            return False
    return True


def test_the_leader_is_killed_again_and_again(
    cluster: LocalCluster, kafka: KafkaBroker, topic: str
) -> None:
    """Callers know one node; any two of three hold acknowledged messages, and one of them leads."""
    killed = set()
    with Load(Client(cluster.nodes[0].address, timeout=30.0), topic) as load:
        for _ in range(KILLS):
            load.wait_for_more()
            leader = wait_until("somebody leads", cluster.leader)
            leader.kill()
            killed.add(leader.id)
            watched(cluster, "another leads", partial(another_leads, cluster, leader))
            load.wait_for_more()
            cluster.wait_until_accepting()
        load.wait_for_more()
    assert len(killed) > 1, "the leader was always the same"
    with CommittedReader(kafka.address, topic) as reader:
        assert_arrived(reader, load.acknowledged)
    watched(cluster, "what the dead have left is closed and deleted", lambda: is_tidy(cluster))
