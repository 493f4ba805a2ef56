"""Grants where a call goes through two nodes: the one that is asked judges, not the leader's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from delaywheel import Tls
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1 import delaywheel_pb2_grpc as rpc
from delaywheel_replica.link import TopicInfo
from local.loopback.kafka import free_ports
from support.peers.authority import Authority
from support.server.fake_cleaner import FakeCleaner
from support.server.server_process import CHANNEL_OPTIONS, ServerProcess
from support.services.waiting import wait_to_hold, wait_until

NODES = ("n1", "n2", "n3")
GRANTS = """
[[grant]]
who = ["dns:127.0.0.1", "dns:admin.*"]
may = ["produce", "change", "inspect", "read", "operate"]

[[grant]]
who = ["dns:shop.*"]
may = ["produce", "change", "inspect"]
topics = ["orders"]

[[quota]]
who = ["dns:shop.*"]
messages_per_second = 3
"""
DUE_MS = (time.time_ns() // 1_000_000_000 + 3_600) * 1_000


class Cluster:
    """Three servers with TLS on all ports; the cleaner of n1 leads, and n1 alone has no grants."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.authority = authority
        self.grants = {node: folder / f"{node}.toml" for node in NODES}
        members = {
            node: f"127.0.0.1:{port}" for node, port in zip(NODES, free_ports(3), strict=True)
        }
        cert, key = authority.sign("node", "127.0.0.1")
        tls = {"tls_cert": str(cert), "tls_key": str(key), "tls_client_ca": str(authority.file)}
        self.servers: dict[str, ServerProcess] = {}
        for node, path in self.grants.items():
            path.touch(0o600)
            path.write_text(GRANTS)
            granted = {} if node == "n1" else {"grants": str(path)}
            self.servers[node] = ServerProcess(
                folder / node,
                node_id=node,
                members=members,
                peer_tls="required",
                **tls,
                **granted,
            )
        self.stack = ExitStack()
        self._stubs: dict[tuple[str, str], rpc.DelayWheelStub] = {}

    def start(self) -> None:
        """Starts all of them."""
        leader = self.servers["n1"]

        def prepare(cleaner: FakeCleaner) -> None:
            cleaner.nodes, cleaner.min_insync = len(NODES), 2
            cleaner.topics = dict.fromkeys(("orders", "bills"), TopicInfo(3, 1_000_000))
            cleaner.follows = None if cleaner is leader.cleaner else leader.cleaner

        for server in self.servers.values():
            self.stack.callback(server.kill)
            server.start(prepare=prepare)

    def stub(self, node: str, who: str) -> rpc.DelayWheelStub:
        """The calls of a principal at a node; certificate and connection are made once."""
        if (node, who) in self._stubs:
            return self._stubs[node, who]
        address = self.servers[node].address
        assert address is not None
        cert, key = self.authority.sign(who, f"{who}.example.org")
        credentials = Tls(self.authority.file, cert, key).credentials()
        channel = grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        stub = self._stubs[node, who] = rpc.DelayWheelStub(self.stack.enter_context(channel))
        return stub

    def report(self, node: str) -> pb.MemberReport:
        """What a node reports about itself."""
        request = pb.DescribeClusterRequest(details=True)
        answer = self.stub(node, "admin").DescribeCluster(request, timeout=9)
        return next(each.report for each in answer.members if each.node == node)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    authority = Authority(tmp_path_factory.mktemp("ca"), "good")
    made = Cluster(tmp_path_factory.mktemp("cluster"), authority)
    with made.stack:
        made.start()
        yield made


def sent(stub: rpc.DelayWheelStub, *topics: str) -> list[str]:
    messages = [
        pb.DelayedMessage(
            id=number.to_bytes(16, "big"), topic=topic, key=b"k", deliver_at_ms=DUE_MS
        )
        for number, topic in enumerate(topics, 1)
    ]
    try:
        answer = stub.DelayProduce(pb.DelayProduceRequest(messages=messages), timeout=9)
    except grpc.RpcError as error:
        return [str(error)]
    return [each.error.reason or "ok" for each in answer.results]


def found(stub: rpc.DelayWheelStub, *within: str) -> list[str]:
    """Topics of what would be cancelled."""
    request = pb.CancelManyRequest(filter=pb.Filter(key=b"k", from_ms=DUE_MS), dry_run=True)
    if within:
        request.within.add(any_of=within)
    return sorted(result.topic for result in stub.CancelMany(request, timeout=9).results)


def test_a_leader_without_grants_finds_what_the_node_that_was_asked_allows(
    cluster: Cluster,
) -> None:
    admin, shop = cluster.stub("n2", "admin"), cluster.stub("n2", "shop")
    wait_until(
        "n2 takes messages", lambda: sent(admin, "orders", "bills") == ["ok", "ok"], timeout_s=30
    )
    wait_to_hold(lambda: found(admin) == ["bills", "orders"])
    with pytest.raises(grpc.RpcError, match="read"):
        found(shop)
    assert found(cluster.stub("n1", "shop")) == ["bills", "orders"]  # asked itself, it lets all
    cluster.grants["n2"].write_text(
        GRANTS.replace('"inspect"]\ntopics', '"inspect", "read"]\ntopics')
    )
    wait_until("the new grants count", lambda: answered(lambda: found(shop)) == ["orders"])
    assert found(admin, "orders", "others") == ["orders"]
    assert found(shop, "bills") == []
    cluster.grants["n2"].write_text(GRANTS)


def answered(call: Callable[[], object]) -> object:
    try:
        return call()
    except grpc.RpcError as error:
        return error.code()


BEYOND = "more than messages_per_second 3"


def test_each_node_counts_what_it_takes_itself(cluster: Cluster) -> None:
    def exhaust(node: str) -> None:
        shop = cluster.stub(node, "shop")
        wait_until("it takes messages", lambda: sent(shop, *["orders"] * 5) == ["ok"] * 5)
        # Until it is refused: during a pause of the machine, the whole quota may come back.
        wait_until("no more", lambda: BEYOND in sent(shop, *["orders"] * 5)[0])

    exhaust("n2")
    exhaust("n3")


def test_nodes_say_whose_files_are_others(cluster: Cluster) -> None:
    """After some seconds, and no longer once they agree: a file that is changed everywhere."""

    def wait_for(*differing: list[str]) -> None:
        wait_until(
            f"{differing}",
            lambda: [[*cluster.report(node).access_differs] for node in NODES] == [*differing],
            timeout_s=40,
        )

    wait_for(["n2", "n3"], ["n1"], ["n1"])
    cluster.grants["n3"].write_text(GRANTS + "\n# another\n")
    wait_for(["n2", "n3"], ["n1", "n3"], ["n1", "n2"])
    cluster.grants["n2"].write_text(GRANTS + "\n# another\n")
    wait_for(["n2", "n3"], ["n1"], ["n1"])
