"""A cluster that takes messages is switched over to TLS, node by node, callers and peers."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from delaywheel import Client, Message, Tls
from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.reading.reader import WheelReader
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.asking.connection import ask
from delaywheel_replica.cli.reaching import Nodes
from local.loopback.kafka import free_ports
from support.peers.authority import Authority
from support.server.fake_cleaner import FakeCleaner
from support.server.server_process import ServerProcess, config_for
from support.services.waiting import wait_until
from support.wheels.messages import messages_of

NODES = ("n1", "n2", "n3")


class Sender:
    """Sends messages until it is told to stop, and keeps the handles of those acknowledged."""

    def __init__(self, addresses: list[str], tls: Tls | None) -> None:
        self._client = Client(addresses, tls=tls, timeout=20)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send)
        self.handles: list[str] = []
        self.errors: list[str] = []
        self._thread.start()

    def _send(self) -> None:
        while not self._stop.wait(0.02):
            results = self._client.produce_many([Message("orders", b"v", delay="60s")] * 5)
            self.handles += [str(result.handle) for result in results if result.handle]
            self.errors += [str(result.error) for result in results if result.error]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()


# Of a connection that is reset as it is made, Python's ssl leaves the socket to the collector.
@pytest.mark.filterwarnings("ignore:.*ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning")
def test_nothing_that_is_acknowledged_is_lost_on_the_way(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    ports = free_ports(2 * len(NODES))
    members = {n: f"127.0.0.1:{port}" for n, port in zip(NODES, ports, strict=False)}
    addresses = [f"127.0.0.1:{port}" for port in ports[len(NODES) :]]
    cert, key = authority.sign("node", "127.0.0.1")
    files = {"tls_cert": str(cert), "tls_key": str(key), "tls_ca": str(authority.file)}
    servers: dict[str, ServerProcess] = {}

    def start(node: str, settings: Mapping[str, str]) -> None:
        listen = addresses[NODES.index(node)]
        data = tmp_path / node
        wanted = {"node_id": node, "members": members, "listen": listen, **settings}
        if node in servers:
            servers[node].kill()
            servers[node].config = config_for(data, **wanted)
        else:
            servers[node] = ServerProcess(data, **wanted)
        follows = None if node == "n1" else servers["n1"].cleaner
        servers[node].start(prepare=partial(_prepare, follows))
        if settings:
            wait_until(f"{node} takes messages", partial(_accepts, listen, Tls(authority.file)))

    try:
        for node in NODES:
            start(node, {})
        plain = Sender(addresses, None)
        wait_until("plain text is taken", lambda: len(plain.handles) > 50)
        for node in NODES[1:]:
            start(node, {**files, "peer_tls": "prefer"})
        encrypted = Sender(addresses, Tls(authority.file))
        wait_until("both are taken", lambda: len(encrypted.handles) > 50)
        plain.stop()
        start("n1", {**files, "peer_tls": "prefer"})
        for node in NODES:
            start(node, {**files, "peer_tls": "required"})
        taken = len(encrypted.handles)
        wait_until("TLS alone is spoken", lambda: len(encrypted.handles) > taken + 50)
        encrypted.stop()
        handles = {*plain.handles, *encrypted.handles}
        assert (plain.errors, encrypted.errors) == ([], [])
        wait_until(
            "all are on two nodes",
            lambda: all(n >= 2 for n in _copies(tmp_path, handles).values()),
        )
    finally:
        for server in servers.values():
            server.kill()


def _accepts(address: str, tls: Tls) -> bool:
    request = pb.DescribeClusterRequest()
    answer = ask(Nodes(address, tls), lambda stub: stub.DescribeCluster(request, timeout=30))
    return not answer.refusing.reason


def _prepare(follows: FakeCleaner | None, cleaner: FakeCleaner) -> None:
    cleaner.nodes, cleaner.min_insync, cleaner.follows = len(NODES), 2, follows


def _copies(folder: Path, handles: set[str]) -> dict[str, int]:
    """Counts the nodes that have each of these messages."""
    found = dict.fromkeys(handles, 0)
    for node in NODES:
        data = folder / node
        for wheel in {WheelId.parse(handle.split(":")[0]) for handle in handles}:
            if not (data / "wheels" / str(wheel)).exists():
                continue
            reader = WheelReader(PosixDisk(), data, wheel)
            for seq in range(1, reader.last_seq() + 1):
                frame = reader.frame(seq)
                if isinstance(frame, Frame):
                    for message in messages_of(frame.columns):
                        handle = f"{wheel}:{frame.slot}:{message.id.hex()}:{message.topic}"
                        if handle in found:
                            found[handle] += 1
            reader.close()
    return found
