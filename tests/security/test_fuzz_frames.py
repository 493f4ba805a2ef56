"""No bytes, below the level of calls, end a node: frames, HPACK, pseudo headers, at each port.

Some seconds with the other tests. By hand, for some minutes: ``DELAYWHEEL_FUZZ_MINUTES=10``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from random import Random

import grpc
import pytest

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from local.loopback.kafka import free_ports
from support.server import h2_frames as h2
from support.server.server_process import ServerProcess
from support.services.waiting import wait_until

MINUTES = float(os.environ.get("DELAYWHEEL_FUZZ_MINUTES", "0"))
pytestmark = pytest.mark.timeout(480 + 200 * MINUTES)
BATCH = 60
AT_ONCE = 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("frames")
    *peers, metrics = [f"127.0.0.1:{port}" for port in free_ports(3)]
    members = {f"members.n{number}": peer for number, peer in enumerate(peers, 1)}
    server = ServerProcess(folder / "n1", metrics_listen=metrics, min_insync="1", **members)
    with server:
        server.wait_accepting()
        yield server


def takes(server: ServerProcess) -> bool:
    assert server.process.poll() is None, "the server ended"
    try:
        (result,) = server.produce(pb.DelayedMessage(topic="orders", value=b"v", delay_ms=60_000))
    except grpc.RpcError:
        return False
    return bool(result.handle)


@pytest.mark.parametrize("path", h2.PATHS)
def test_a_call_of_any_path_is_answered_or_refused(server: ServerProcess, path: bytes) -> None:
    assert server.address is not None
    head = h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.call_headers(path))
    h2.send(server.address, h2.begun() + head + h2.frame(h2.DATA, h2.END_STREAM, 1, bytes(5)))
    wait_until("it takes messages", lambda: takes(server))


@pytest.mark.parametrize("port", ["calls", "peers", "metrics"])
def test_no_bytes_end_a_server(server: ServerProcess, port: str) -> None:
    config = server.config
    of_port = {
        "calls": server.address,
        "peers": config.members[config.node_id],
        "metrics": config.metrics_listen,
    }
    address = of_port[port]
    assert address is not None
    ends_at = time.monotonic() + 60 * MINUTES
    with ThreadPoolExecutor(AT_ONCE) as senders:
        for batch in count():
            seeds = range(batch * BATCH, (batch + 1) * BATCH)
            contents = [h2.drawn(Random(f"{port} {seed}")) for seed in seeds]
            for _ in senders.map(lambda content: h2.send(address, content), contents):
                pass
            wait_until(f"it takes messages after {seeds}", lambda: takes(server))
            if time.monotonic() >= ends_at:
                break
