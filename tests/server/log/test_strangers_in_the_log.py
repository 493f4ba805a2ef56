"""What strangers at each port cost of the log of a whole node: a bounded number of bytes."""

from __future__ import annotations

import json
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from local.loopback.kafka import free_ports
from support.peers.authority import Authority
from support.server import h2_frames as h2
from support.server.forked import fork_program
from support.services.waiting import wait_until

CONNECTIONS = 150
OTHERWISE = (
    *(
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\xff" * 9_000,
        b"G\0T / \r\n\r\n",
    ),
    b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"\x1b[2J" * 3_000 + b"\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n2026-01-01 [error] forged\n",
)


class Node:
    """A node without Kafka, at three ports."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        authority = Authority(folder, "good")
        cert, key = authority.sign("node", "127.0.0.1")
        *ports, self.metrics = [f"127.0.0.1:{port}" for port in free_ports(4)]
        self.calls, self.peers, other = ports
        settings = {
            "cluster_id": "test",
            "node_id": "n1",
            "data_dir": str(folder / "n1"),
            "kafka.bootstrap.servers": "127.0.0.1:1",
            "listen": self.calls,
            "members.n1": self.peers,
            "members.n2": other,
            "metrics_listen": self.metrics,
            "metrics_tls": "true",
            "tls_cert": str(cert),
            "tls_key": str(key),
            "log_format": "json",
            "insecure": "true",
        }
        flags = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        self.context = ssl.create_default_context(cafile=authority.file)
        self.context.set_alpn_protocols(["h2"])
        self.process = fork_program("node", ["serve", *flags], log=self.log)
        wait_until("it serves", lambda: self.events("serving"))

    def events(self, name: str, begin: int = 0) -> list[dict[str, Any]]:
        text = self.log.read_text()[begin:]
        lines = text[: text.rfind("\n") + 1].splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("strangers"))
    yield node
    node.process.send_signal(signal.SIGKILL)
    node.process.wait(60)


def send(node: Node, address: str, content: bytes, *, tls: bool) -> None:
    """Sends a connection's bytes, and waits for its end."""
    host, _, port = address.rpartition(":")
    with (
        suppress(OSError),
        socket.create_connection((host, int(port)), 5) as plain,
        node.context.wrap_socket(plain, server_hostname=host) if tls else plain as line,
    ):
        line.sendall(content)
        line.settimeout(0.1)
        while line.recv(1 << 16):
            pass


@pytest.mark.parametrize(
    ("port", "tls", "told"),
    [
        ("calls", False, set()),
        ("calls", True, set()),
        ("peers", False, {"MALFORMED"}),
        ("metrics", False, {"TLS_REFUSED"}),
        ("metrics", True, {"MALFORMED"}),
    ],
)
def test_strangers_cost_a_bounded_number_of_bytes(
    node: Node, port: str, tls: bool, told: set[str]
) -> None:
    address, begin = getattr(node, port), node.log.stat().st_size
    for number in range(CONNECTIONS):
        drawn = h2.drawn(Random(f"{port} {number}"))
        send(node, address, OTHERWISE[number % 12] if number % 12 < 6 else drawn, tls=tls)
    setting = {"peers": "peer_listen", "metrics": "metrics_listen"}.get(port)
    wait_until(
        "each kind is told",
        lambda: {each["reason"] for each in node.events("stranger refused", begin)} >= told,
    )
    refused = node.events("stranger refused", begin)
    assert {each["port"] for each in refused} <= {setting}
    assert all("127.0.0.1" in each["text"] for each in refused)
    assert node.log.stat().st_size - begin < 60_000
    assert node.process.poll() is None
