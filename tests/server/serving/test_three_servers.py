"""Three real server processes that mirror one another; one leads, as their fake cleaners say.

What one of them says of another it has heard some time before, and whoever is not heard for a
second is away: so what they say is waited for.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from delaywheel.identity import WheelId
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.link import DeadLetter
from local.loopback.kafka import free_ports
from support.server.fake_cleaner import FakeCleaner
from support.server.server_process import ServerProcess
from support.services.waiting import wait_to_hold, wait_until

NODES = ("n1", "n2", "n3")
MIN_INSYNC = 2


class Cluster:
    """The servers; the cleaner of n1 leads."""

    def __init__(self, folder: Path) -> None:
        ports = free_ports(len(NODES))
        members = {node: f"127.0.0.1:{port}" for node, port in zip(NODES, ports, strict=True)}
        self.servers = {
            node: ServerProcess(folder / node, node_id=node, members=members) for node in NODES
        }

    def start(self, node: str) -> None:
        """Starts a server, its cleaner following that of n1."""
        leader = self.servers["n1"]

        def prepare(cleaner: FakeCleaner) -> None:
            cleaner.nodes, cleaner.min_insync = len(NODES), MIN_INSYNC
            cleaner.follows = None if node == "n1" else leader.cleaner

        self.servers[node].start(prepare=prepare)

    def __getitem__(self, node: str) -> ServerProcess:
        return self.servers[node]

    def wait_accepting(self, *nodes: str) -> None:
        """Waits until each of these accepts messages, as all of these see it."""
        wanted = set(nodes)
        for seer in nodes:
            wait_until(f"{seer} sees {wanted} accept", lambda: wanted <= self.accepting(seer))  # noqa: B023

    def accepting(self, seer: str) -> set[str]:
        """The nodes that accept messages, as one sees them."""
        return {member.node for member in self[seer].describe().members if member.accepting}

    def wheel(self, seer: str, wheel: str) -> pb.WheelStatus:
        """What a node knows of a wheel."""
        rows = {row.wheel: row for row in self[seer].describe().wheels}
        return rows.get(wheel, pb.WheelStatus())

    def slot_files(self, node: str, wheel: str) -> dict[str, bytes]:
        """The content of all slot files that a node has of a wheel."""
        folder = self[node].data / "wheels" / wheel
        return {path.name: path.read_bytes() for path in folder.rglob("*.slot")}

    def whole(self, seer: str) -> pb.DescribeClusterResponse:
        """The cluster as all nodes describe it, asked through one."""
        request = pb.DescribeClusterRequest(all_members=True)
        return self[seer].stub.DescribeCluster(request, timeout=30)

    def replica(self, seer: str, wheel: str, node: str) -> pb.Replica:
        """A node's copy of a wheel, as all describe it."""
        rows = {row.wheel: row for row in self.whole(seer).wheels}
        replicas = {each.node: each for each in rows[wheel].replicas}
        return replicas[node]

    def slots(self, seer: str, first: int, end: int) -> pb.ListSlotsResponse:
        """The seconds, as counted by all nodes."""
        request = pb.ListSlotsRequest(from_slot=first, to_slot=end, all_members=True)
        return self[seer].stub.ListSlots(request, timeout=30)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("three"))
    with ExitStack() as stack:
        for node in NODES:
            made.start(node)
            stack.callback(made[node].kill)
        made.wait_accepting(*NODES)
        yield made


def row(id_: bytes | None = None, *, ahead_ms: int = 60_000) -> pb.DelayedMessage:
    return pb.DelayedMessage(
        topic="orders",
        value=b"v",
        id=id_ or os.urandom(16),
        deliver_at_ms=time.time_ns() // 1_000_000 + ahead_ms,
    )


def test_what_is_acknowledged_lies_on_all_with_the_same_bytes(cluster: Cluster) -> None:
    for node in NODES:
        results = cluster[node].produce(*[row(ahead_ms=60_000 + n * 700) for n in range(20)])
        assert {result.handle.split(":")[0] for result in results} == {f"{node}.1"}
        contents = {holder: cluster.slot_files(holder, f"{node}.1") for holder in NODES}
        assert contents[node]
        assert list(contents.values()).count(contents[node]) >= MIN_INSYNC, "at once, not later"
    for node in NODES:
        wheel = f"{node}.1"
        wait_to_hold(lambda: _is_held_by_all(cluster, node, wheel))  # noqa: B023


def _is_held_by_all(cluster: Cluster, node: str, wheel: str) -> None:
    contents = [cluster.slot_files(holder, wheel) for holder in NODES]
    assert contents[0]
    assert contents[0] == contents[1] == contents[2]
    assert cluster.wheel(node, wheel).in_sync == list(NODES)


def test_what_became_of_a_message_the_leaders_node_is_asked_for(cluster: Cluster) -> None:
    due_ms = time.time_ns() // 1_000_000 + 2
    dead, delivered = row(), row()
    for each in (dead, delivered):
        each.deliver_at_ms = due_ms
    handles = [result.handle for result in cluster["n2"].produce(dead, delivered)]
    wait_to_hold(lambda: _is_held_by_all(cluster, "n2", "n2.1"))
    leader = cluster["n1"].cleaner
    seqs = {
        WheelId.parse(wheel.wheel): wheel.applied_seq for wheel in cluster["n1"].describe().wheels
    }
    leader.commit_dead(
        DeadLetter(dead.id, due_ms, dead.topic, "KEY_MISSING"), due_ms=due_ms, seqs=seqs
    )

    def all_know() -> None:
        for node in NODES:
            requests = [pb.GetMessageRequest(message=pb.MessageRef(handle=h)) for h in handles]
            reported = [cluster[node].stub.GetMessage(r, timeout=20).message for r in requests]
            assert [(message.state, message.dead_reason) for message in reported] == [
                (pb.MESSAGE_STATE_DEAD_LETTERED, "KEY_MISSING"),
                (pb.MESSAGE_STATE_DELIVERED, ""),
            ]

    wait_to_hold(all_know)


def test_whichever_node_is_asked_all_of_them_answer(cluster: Cluster) -> None:
    """Each wheel's own node, each node itself, and every message once."""
    for node in NODES:
        cluster[node].produce(row(ahead_ms=444_000))
    for seer in NODES:
        wait_to_hold(lambda: _reports_of_all(cluster, seer))  # noqa: B023
    wait_to_hold(lambda: _all_count_the_same(cluster))


def _reports_of_all(cluster: Cluster, seer: str) -> None:
    """A node's answer is complete, and no reported copy is missing anything."""
    answer = cluster.whole(seer)
    assert (answer.node, answer.leader.node) == (seer, "n1")
    addresses = {node: cluster[node].address for node in NODES}
    assert {member.node: member.address for member in answer.members} == addresses
    copies = [replica for row in answer.wheels for replica in row.replicas]
    assert len(copies) == len(answer.wheels) * len(NODES)
    states = {(replica.state, replica.lag_frames, replica.lag_ms) for replica in copies}
    assert states == {(pb.REPLICA_STATE_IN_SYNC, 0, 0)}
    rows = {row.wheel: row for row in answer.wheels if row.state == pb.WHEEL_STATE_OPEN}
    assert {row.told_by for row in rows.values()} == set(NODES)
    for member in answer.members:
        report = member.report
        assert (member.accepting, member.silent) == (True, "")
        assert abs(report.now_ms - answer.now_ms) < 5_000
        assert report.server_started_ms <= report.now_ms
        assert report.role == ("leading" if member.node == "n1" else "standby")
        assert report.ledger.place == cluster[member.node].config.ledger_place


def _all_count_the_same(cluster: Cluster) -> None:
    pending = {seer: cluster.whole(seer).pending for seer in NODES}
    assert len({each.messages for each in pending.values()}) == 1
    assert not any(each.at_least for each in pending.values())
    one_by_one = [
        cluster[node].stub.DescribeCluster(pb.DescribeClusterRequest(details=True), timeout=30)
        for node in NODES
    ]
    assert {each.pending.messages for each in one_by_one} == {pending["n1"].messages}


def test_a_message_is_found_wherever_it_is_asked_for_and_counted_once(cluster: Cluster) -> None:
    (result,) = cluster["n2"].produce(row(ahead_ms=333_000))
    slot = int(result.handle.split(":")[1])
    wait_to_hold(lambda: _is_held_by_all(cluster, "n2", "n2.1"))
    for node in NODES:
        request = pb.GetMessageRequest(message=pb.MessageRef(handle=result.handle))
        found = cluster[node].stub.GetMessage(request, timeout=30).message
        assert (found.wheel, found.handle) == ("n2.1", result.handle)
        wait_to_hold(lambda: _is_counted_once(cluster, node, slot))  # noqa: B023


def _is_counted_once(cluster: Cluster, node: str, slot: int) -> None:
    listed = cluster[node].stub.ListSlots(
        pb.ListSlotsRequest(from_slot=slot, to_slot=slot + 1), timeout=30
    )
    assert [row.messages for row in listed.slots] == [1]
    counted = cluster.slots(node, slot, slot + 1)
    assert [(row.messages, row.copies) for row in counted.slots] == [(1, 3)]
    assert sorted(counted.counted_by) == list(NODES)


def test_a_process_with_a_copied_folder_has_to_go_and_the_first_one_stays(
    cluster: Cluster, tmp_path: Path
) -> None:
    first = cluster["n3"]
    first.process.send_signal(signal.SIGSTOP)  # a file that it removes meanwhile is not copied
    try:
        shutil.copytree(first.data, tmp_path / "n3")
    finally:
        first.process.send_signal(signal.SIGCONT)
    members = {**first.config.members, "n3": f"127.0.0.1:{free_ports(1)[0]}"}
    copy = ServerProcess(tmp_path / "n3", node_id="n3", members=members)
    copy.start(leads=False)
    try:
        deadline = time.monotonic() + 90
        while copy.process.poll() is None:
            assert time.monotonic() < deadline
            assert all(result.handle for result in cluster["n1"].produce(row()))
            # For a moment, a pause of its own may take it out.
            wait_until("n3 mirrors", lambda: "n3" in cluster.wheel("n1", "n1.1").in_sync)
            time.sleep(0.3)
        assert copy.process.returncode == 78
    finally:
        copy.kill()
    assert first.process.poll() is None


def test_what_only_the_node_itself_knows_is_reported_by_it(cluster: Cluster) -> None:
    """A full disk: from outside it looks like a node that accepts messages."""
    cluster["n2"].kill()
    free_bytes = shutil.disk_usage(cluster["n2"].data).free
    reserve_bytes = free_bytes * 3 // 2  # with less than half of it free no wheel is opened either
    cluster["n2"].config = replace(cluster["n2"].config, disk_reserve_bytes=reserve_bytes)
    cluster.start("n2")

    def full() -> pb.Member | None:
        member = next(m for m in cluster.whole("n1").members if m.node == "n2")
        return member if member.report.refusing.reason == "DISK_FULL" else None

    assert not wait_until("n2 says so", full).accepting
    wait_until("n1 hears it with a wheel open", lambda: "n2" in cluster.accepting("n1"))
    assert not wait_until("n2 says so still", full).accepting
