"""Each node's disk is exchanged in turn, then each node is killed in turn; takes a minute or two.

Between the exchanges the operator waits for what RUNBOOK says: no messages on one node only.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from delaywheel_replica.kafka_settings import KafkaNames
from local.loopback.kafka import KafkaBroker
from local.loopback.node import Node
from support.kafka.read_committed import CommittedReader
from support.services.trio import Trio, row, run_cli, seen_by, send

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

MESSAGES = 40
LATER_S = 3_600


def test_disks_are_exchanged_and_nothing_is_lost_or_waits(
    kafka: KafkaBroker, topic: str, tmp_path: Path, cluster_id: str
) -> None:
    with Trio(kafka.address, tmp_path / "cluster", cluster_id) as trio:
        trio.wait_in_sync()
        for node in trio.nodes:
            rows = [row(topic, b"v", delay_s=LATER_S + n) for n in range(MESSAGES)]
            send(node, *rows)
        for node in trio.nodes:
            exchange(trio, node)
        for node in trio.nodes:
            others = trio.others(node)
            trio.kill(node)
            trio.wait("another one forwards", lambda: forwards(others))  # noqa: B023
            (handle,) = send(others[0], row(topic, b"now", delay_s=0.5))
            assert handle
            assert pending(others[0]) >= 3 * MESSAGES
            trio.start(node)
            trio.wait_accepting()
            trio.wait_in_sync()
        with CommittedReader(kafka.address, topic) as reader:
            reader.wait_for(3, timeout_s=60)
            assert {m.value() for m in reader.read_to_end()} == {b"now"}
    with CommittedReader(kafka.address, KafkaNames(cluster_id).outcomes) as outcomes:
        assert not [m for m in outcomes.read_to_end() if b'"lost"' in (m.value() or b"")]


def exchange(trio: Trio, node: Node) -> None:
    """Replaces a node's disk, and waits for its copies."""
    others = trio.others(node)
    trio.kill(node)
    shutil.rmtree(node.data)
    trio.start(node)
    trio.wait(
        "it is refused", lambda: trio.member(trio.await_leader(others), node).storage_replaced
    )
    done = run_cli(others[0], "node", "replace", node.id, "--yes", "--json", "--wait", "2m")
    assert done.returncode == 0, done.stderr
    change = json.loads(done.stdout)
    assert change["wheels"]
    for each in change["wheels"]:
        assert (each["frames_at_risk"], each["alone_messages"]) == (0, 0)
    assert is_copied(others[0], node)
    for each in trio.nodes:
        assert run_cli(others[0], "node", "wait", each.id, "--up-to", "20s").returncode == 0


def is_copied(seer: Node, node: Node) -> bool:
    """Whether a node has all of every wheel, and no node has messages that no other has."""
    status = json.loads(run_cli(seer, "status", "--json").stdout)
    copies = [
        copy["state"]
        for wheel in status["wheels"]
        for copy in wheel["replicas"]
        if copy["node"] == node.id
    ]
    reports = [member["report"] for member in status["members"]]
    is_alone = any(report is None or report["alone_messages"] for report in reports)
    return set(copies) == {"in_sync"} and not is_alone


def forwards(nodes: list[Node]) -> bool:
    """Whether one of these leads and does not rest, as all of them see it."""
    status = json.loads(run_cli(nodes[0], "status", "--json").stdout)
    leader = status["leader"]
    roles = {m["node"]: m["report"]["role"] for m in status["members"] if m["report"]}
    return leader is not None and roles.get(leader["node"]) == "leading"


def pending(node: Node) -> int:
    """The pending messages of the cluster, as the nodes count them."""
    status = json.loads(run_cli(node, "status", "--json").stdout)
    assert seen_by(node).node == node.id
    return int(status["pending"]["messages"])
