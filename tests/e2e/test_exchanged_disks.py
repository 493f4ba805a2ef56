"""Each node's disk is exchanged, then each node is killed, in turn.

A night's: a push has a disk that is lost (test_replaced_node.py), and drills of the simulation.

Messages are sent all the time, some due at once and some for later. Between the exchanges the
operator waits for what RUNBOOK says: no messages on one node only. The first node is lost before it
has published its part of the ledger.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pyarrow.parquet as pq
import pytest

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.kafka_settings import KafkaNames
from local.loopback.kafka import KafkaBroker
from local.loopback.node import Node
from support.kafka.read_committed import CommittedReader, create_topic
from support.process.night import at_night
from support.services.load import Load, assert_arrived
from support.services.trio import Trio, row, run_cli, send, stub_of

pytestmark = [at_night, pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(1_200)]

MESSAGES = 40
LATER_S = 3_600
SEAL_S = 6
_NAME = re.compile(r"(.+)-(\d{19})-(\d{19})(?:-\d{10}-\d{10})?\.parquet")


def test_disks_are_exchanged_and_nothing_is_lost_or_waits(
    kafka: KafkaBroker, topic: str, tmp_path: Path, cluster_id: str
) -> None:
    books = tmp_path / "books"
    ledger: dict[str, Any] = {"ledger_seal_seconds": SEAL_S, "ledger_uri": str(books)}
    with Trio(kafka.address, tmp_path / "cluster", cluster_id, **ledger) as trio:
        trio.wait_in_sync()
        leader = trio.leader()
        first, other = trio.others(leader)
        for node in (leader, other):
            rows = [row(topic, b"v", delay_s=LATER_S + n) for n in range(MESSAGES)]
            send(node, *rows)
        ids = [os.urandom(16) for _ in range(MESSAGES)]
        rows = [row(topic, b"v", delay_s=LATER_S + n, id_=id_) for n, id_ in enumerate(ids)]
        wheel = send(first, *rows)[0].partition(":")[0]
        create_topic(kafka.address, busy := f"{topic}-busy")
        with Load(trio.client(timeout=30.0), busy) as load:
            load.wait_for_more()
            exchange(trio, first)
            trio.wait("its rows are in the ledger", lambda: set(ids) <= entered(books, wheel))
            assert_gapless(books, wheel)
            for node in (leader, other):
                exchange(trio, node)
                load.wait_for_more()
            for node in trio.nodes:
                others = trio.others(node)
                trio.kill(node)
                trio.wait("another one forwards", lambda: forwards(others[0]))  # noqa: B023
                (handle,) = send(others[0], row(topic, b"now", delay_s=0.5))
                assert handle
                load.wait_for_more()
                trio.wait("all of it is pending", lambda: pending(others[0]) >= 3 * MESSAGES)  # noqa: B023
                trio.start(node)
                trio.wait_accepting()
                trio.wait_in_sync()
        assert not load.errors
        with CommittedReader(kafka.address, topic) as reader:
            reader.wait_for(len(trio.nodes), timeout_s=60)
            assert {m.value() for m in reader.read_to_end()} == {b"now"}
        with CommittedReader(kafka.address, busy) as reader:
            assert_arrived(reader, load.acknowledged)
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
    # Also where a node was stopped for a moment after that, and is out of sync again.
    trio.wait("nothing is on one node only", lambda: is_copied(others[0], node))
    for each in trio.nodes:
        assert run_cli(others[0], "node", "wait", each.id, "--up-to", "20s").returncode == 0


def seen_with_details(seer: Node) -> pb.DescribeClusterResponse:
    """What all nodes report, as `delaywheel status` shows it; none while it has no answer."""
    request = pb.DescribeClusterRequest(details=True, all_members=True)
    try:
        with stub_of(seer) as stub:
            return stub.DescribeCluster(request, timeout=10)
    except grpc.RpcError:
        return pb.DescribeClusterResponse()


def pending(seer: Node) -> int:
    """How many messages wait, as far as nodes answer."""
    return seen_with_details(seer).pending.messages


def is_copied(seer: Node, node: Node) -> bool:
    """Whether a node has all of every wheel, and no node has messages that no other has."""
    seen = seen_with_details(seer)
    copies = {
        copy.state for wheel in seen.wheels for copy in wheel.replicas if copy.node == node.id
    }
    knows_all = bool(seen.members) and all(row.HasField("report") for row in seen.members)
    is_alone = any(row.report.alone_messages for row in seen.members)
    return copies == {pb.REPLICA_STATE_IN_SYNC} and knows_all and not is_alone


def forwards(seer: Node) -> bool:
    """Whether one of the nodes leads and does not rest, as all of them see it."""
    seen = seen_with_details(seer)
    leading = {row.node for row in seen.members if row.report.role == "leading"}
    return seen.leader.node in leading


def entered(books: Path, wheel: str) -> set[bytes | None]:
    """The ids of a wheel's rows."""
    tables = [pq.ParquetFile(path).read(columns=["id"]) for path in books.rglob(f"{wheel}-*")]
    return {id_ for table in tables for id_ in table["id"].to_pylist()}


def assert_gapless(books: Path, wheel: str) -> None:
    """The files of a wheel cover its frames from the first on."""
    names = sorted(
        (int(match[2]), int(match[3]))
        for path in books.rglob("*.parquet")
        if (match := _NAME.fullmatch(path.name)) and match[1] == wheel
    )
    assert names[0][0] == 1
    assert all(before[1] + 1 == after[0] for before, after in pairwise(names))
