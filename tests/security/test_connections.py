"""Which connections of callers stay open, on real ports."""

from __future__ import annotations

import asyncio
import math
import select
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.server.connections import (
    STRANGER_BYTES,
    STRANGER_CALLS,
    STRANGER_S,
    CallerConnections,
)
from support.peers.authority import Authority
from support.server import h2_frames as h2
from support.server.server_process import ServerProcess

VALID_S = 12.0
BLOCK = h2.frame(h2.CONTINUATION, 0, 1, h2.literal(b"x-more", b"v" * 16_000))
PING = h2.frame(h2.PING, 0, 0, bytes(8))[:9]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("connections") / "n1") as server:
        server.wait_accepting()
        yield server


def opened(server: ServerProcess, held: ExitStack) -> socket.socket:
    """A connection on which no call was made yet."""
    host, _, port = str(server.address).rpartition(":")
    line = held.enter_context(socket.create_connection((host, int(port)), timeout=60))
    line.sendall(h2.begun())
    return line


def is_closed(line: socket.socket, within_s: float) -> bool:
    """Whether the server closes a connection, which answers pings, as others end anyway."""
    ends_s = time.monotonic() + within_s
    while (left_s := ends_s - time.monotonic()) > 0:
        line.settimeout(left_s)
        try:
            told = line.recv(1 << 16)
            for part in told.split(PING)[1:]:
                line.sendall(h2.frame(h2.PING, 1, 0, part[:8]))
        except TimeoutError:
            return False
        except OSError:
            return True
        if not told:
            return True
    return False


def test_a_connection_without_a_call_is_closed_and_one_with_a_call_stays(
    server: ServerProcess,
) -> None:
    with ExitStack() as held:
        silent, known = opened(server, held), opened(server, held)
        known.sendall(
            h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.call_headers(h2.WHO_AM_I))
            + h2.frame(h2.DATA, h2.END_STREAM, 1, bytes(5))
        )
        assert is_closed(silent, 60)
        assert not is_closed(known, 3)


async def test_one_address_has_a_quarter_of_a_port_and_others_keep_what_they_have() -> None:
    """Idle connections, each of which answered pings, kept all others out."""
    connections = CallerConnections(8)
    with ExitStack() as held:
        port = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        connections.start({port.getsockname()[1]: True}, lambda: False)
        held.callback(connections.stop)

        def connected(host: str) -> socket.socket:
            line = socket.create_connection(port.getsockname(), source_address=(host, 0))
            held.enter_context(port.accept()[0])
            return held.enter_context(line)

        def closed(within_s: float) -> list[socket.socket]:
            return select.select([other, *lines], [], [], within_s)[0]

        other, *lines = (connected(host) for host in ("127.0.0.1", *["127.0.0.2"] * 3))
        (first,) = await asyncio.to_thread(closed, 60)
        assert first in lines
        await asyncio.sleep(1.5)  # some looks later
        assert closed(0) == [first]


def test_a_header_block_without_end_is_cut_off(server: ServerProcess) -> None:
    """It took 30 MiB of memory for each connection."""
    with ExitStack() as held:
        line = opened(server, held)
        line.sendall(h2.frame(h2.HEADERS, 0, 1, h2.call_headers(h2.WHO_AM_I)))
        began_s = time.monotonic()
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(2 * STRANGER_BYTES // len(BLOCK)):
                line.sendall(BLOCK)
        assert is_closed(line, 60)
        assert time.monotonic() - began_s < STRANGER_S


def test_nothing_is_inflated(server: ServerProcess) -> None:
    """Some hundred small requests of zeros, 16 MiB each, made senders wait for seconds."""
    with pytest.raises(grpc.RpcError) as refused:
        server.stub.WhoAmI(pb.WhoAmIRequest(), timeout=30, compression=grpc.Compression.Gzip)
    assert "UNIMPLEMENTED" in str(refused.value)


def test_whoever_floods_health_checks_takes_no_others_turn(server: ServerProcess) -> None:
    """15,000 from one address made a probe from elsewhere wait for 4 s."""
    host, _, port = str(server.address).rpartition(":")
    checks = b"".join(
        h2.frame(
            h2.HEADERS, h2.END_HEADERS, stream, h2.call_headers(b"/grpc.health.v1.Health/Check")
        )
        for stream in range(1, 2 * STRANGER_CALLS, 2)
    )
    with ExitStack() as held:
        flood = []
        began_s = time.monotonic()
        for _ in range(20):
            line = socket.create_connection((host, int(port)), 60, source_address=("127.0.0.2", 0))
            flood.append(held.enter_context(line))
            line.sendall(h2.begun() + checks)
        assert any(is_closed(line, 60) for line in flood[:2])
        assert time.monotonic() - began_s < STRANGER_S, "they were closed as any stranger's"
        with grpc.insecure_channel(str(server.address)) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            asked = health_pb2.HealthCheckRequest()
            for _ in range(STRANGER_CALLS // 2):
                assert check(asked, timeout=60).status == health_pb2.HealthCheckResponse.SERVING


def test_who_shows_a_certificate_has_a_share_of_calls_and_who_is_admitted_any_number() -> None:
    connections = CallerConnections(100)
    hosts = [f"ipv4:10.0.0.1:{port}" for port in range(1, 5)]
    for _ in range(STRANGER_CALLS):
        assert connections.takes(hosts[0], dict)
    assert not connections.takes(hosts[1], dict)
    assert connections.takes(hosts[2], lambda: {"x509_pem_cert": [b"-"]})
    connections.admitted(hosts[3], math.inf)
    assert all(connections.takes(hosts[3], dict) for _ in range(2 * STRANGER_CALLS))
    assert connections.takes("ipv6:%5B::1%5D:7", dict)


def who_am_i(line: socket.socket) -> bytes:
    """Makes a call; returns what comes until the connection is closed, or is silent for a while."""
    line.sendall(
        h2.begun()
        + h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.call_headers(h2.WHO_AM_I))
        + h2.frame(h2.DATA, h2.END_STREAM, 1, bytes(5))
    )
    line.settimeout(5)
    told = b""
    with suppress(OSError):
        while more := line.recv(1 << 16):
            told += more
    return told


def test_an_expired_certificate_keeps_no_connection_and_gets_in_by_no_session_ticket(
    tmp_path: Path,
) -> None:
    """TLS takes up a session without a look at the certificate, and renews its ticket each time."""
    good = Authority(tmp_path, "good")
    cert, key = good.sign("node", "127.0.0.1")
    settings = {"tls_cert": str(cert), "tls_key": str(key), "tls_client_ca": str(good.file)}
    with ServerProcess(tmp_path / "n1", **settings) as node, ExitStack() as held:
        host, _, port = str(node.address).rpartition(":")
        context = ssl.create_default_context(cafile=good.file)
        context.set_alpn_protocols(["h2"])
        until_s = time.time() + VALID_S
        context.load_cert_chain(*good.sign("brief", "a.example.org", days=VALID_S / 86_400))

        def connected(session: ssl.SSLSession | None) -> ssl.SSLSocket:
            plain = socket.create_connection((host, int(port)), timeout=60)
            shaken = context.wrap_socket(plain, server_hostname=host, session=session)
            return held.enter_context(shaken)

        first = connected(None)
        assert b"grpc-status\x010" in who_am_i(first)
        time.sleep(max(0.0, until_s + 0.1 - time.time()))
        assert is_closed(first, 60)
        by_ticket = connected(first.session)
        assert by_ticket.session_reused
        told = who_am_i(by_ticket)
        assert b"Show a new certificate" in told, told
        assert is_closed(by_ticket, 12), "by us, before a keepalive may end it"
