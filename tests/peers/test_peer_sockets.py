"""Addresses, and the socket options of a connection."""

from __future__ import annotations

import socket
import time

import pytest

from delaywheel_replica.peers import sockets
from delaywheel_replica.peers.sockets import Channel, dial, listen


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[::]"])
def test_who_listens_is_found_where_it_listens(host: str) -> None:
    try:
        listening = listen(f"{host}:0")
    except OSError:
        assert host.startswith("["), "of version 6 there may be none"
        return
    with listening:
        port = listening.getsockname()[1]
        channel = dial(f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}")
        assert channel.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        channel.close()


@pytest.mark.parametrize("address", ["a..b:1", f"{'x' * 70}:1", "127.0.0.1:65536"])
def test_an_invalid_address_is_reported_as_one_where_nothing_listens(address: str) -> None:
    for use in (dial, listen):
        with pytest.raises(OSError, match=address.rpartition(":")[2]):
            use(address)


def test_a_connection_that_leads_to_itself_is_none() -> None:
    """While nothing listens, the kernel may choose that very port for the end that dials."""
    with socket.socket() as both:
        both.bind(("127.0.0.1", 0))
        both.connect(both.getsockname())
        with pytest.raises(ConnectionRefusedError):
            sockets._set_up(both)


def test_whoever_waits_for_a_connection_sees_that_another_thread_ends_it() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, "")
    channel.end()
    assert theirs.recv(1) == ours.recv(1) == b""
    channel.close()
    channel.end()  # its number may be another's by now
    theirs.close()


def test_a_deadline_is_one_for_all_reads() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"some")
        receive_into = Channel(ours, "").until(time.monotonic() - 1)
        with pytest.raises(TimeoutError):
            receive_into(memoryview(bytearray(4)))
