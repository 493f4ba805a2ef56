"""Connections to the peer port that are no nodes; real sockets over loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest
import structlog
from grpc_health.v1 import health, health_pb2_grpc

from delaywheel_proto.v1 import peer_pb2 as pb
from delaywheel_replica.core.protocol.messages import Vote
from delaywheel_replica.peers import accepting
from delaywheel_replica.peers.framing import PREFACE
from delaywheel_replica.peers.handshake import Hello, encode_hello
from delaywheel_replica.peers.states import PeerReason, Stream
from support.peers.raw import Raw
from support.peers.site import Site, free_members, identity


@pytest.fixture
def members() -> dict[str, str]:
    return free_members()


@pytest.fixture
def one(members: dict[str, str]) -> Iterator[Site]:
    """A node whose peer does not run yet."""
    with Site(identity("n1"), members) as site:
        yield site


def refused(logs: list[structlog.typing.EventDict]) -> list[tuple[str, str]]:
    reported = [log for log in logs if log["event"] == "stranger refused"]
    return [(log["reason"], log["text"]) for log in reported]


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03", bytes(1 << 20)]
)
@pytest.mark.usefixtures("one")
def test_who_begins_otherwise_is_closed_unanswered_and_logged(
    members: dict[str, str], garbage: bytes
) -> None:
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            with Raw(members["n1"]) as raw:
                try:
                    raw.socket.sendall(garbage)
                except ConnectionError:
                    continue  # it was closed before all was said
                raw.wait_ended()
    told = PeerReason.MALFORMED, f"127.0.0.1 is not a node: it begins with {garbage[:8]!r}"
    if garbage.startswith(b"\x16\x03"):
        told = PeerReason.TLS_REFUSED, "127.0.0.1 speaks TLS: peer_tls is off here"
    assert {*refused(logs)} == {told}


@pytest.mark.usefixtures("one")
def test_a_caller_is_reported_in_the_log(members: dict[str, str]) -> None:
    """Its gRPC sees a closed connection; the port cannot read its request."""
    with (
        structlog.testing.capture_logs() as logs,
        grpc.insecure_channel(members["n1"]) as channel,
    ):
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            "/delaywheel.v1.DelayWheel/Produce"
        )
        with pytest.raises(grpc.RpcError) as ended:
            next(method(iter([b"hello"])))
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    ((reason, text),) = refused(logs)
    assert reason == PeerReason.MALFORMED
    assert "127.0.0.1 speaks HTTP/2" in text


def test_an_address_where_grpc_is_spoken(members: dict[str, str], one: Site) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    server.add_insecure_port(members["n2"])
    server.start()
    one.wait_refused("n2", PeerReason.WRONG_PORT)
    refusal = one.state("n2").refusal
    assert refusal is not None
    assert "speaks HTTP/2" in refusal.text
    server.stop(None).wait()


def test_an_address_where_something_else_answers(members: dict[str, str], one: Site) -> None:
    host, _, port = members["n2"].rpartition(":")
    with socket.create_server((host, int(port))) as server:
        for _ in Stream:
            taken, _ = server.accept()
            with taken:
                taken.sendall(b"-ERR unknown command\r\n")
        one.wait_refused("n2", PeerReason.WRONG_PORT)
    refusal = one.state("n2").refusal
    assert refusal is not None
    assert "b'-ERR unk'" in refusal.text


def test_a_first_message_that_is_no_hello_is_refused_by_name(
    members: dict[str, str], one: Site
) -> None:
    two = identity("n2")
    for said, words in (
        (b"\xff", "no ToPeer"),
        (b"", "where a hello must be"),
        (encode_hello(Hello(two, "n1", None)), "names no stream"),
    ):
        with Raw(members["n1"]) as raw:
            raw.socket.sendall(PREFACE)
            raw.say(said)
            answer = raw.answer()
            assert answer.refusal.reason == PeerReason.MALFORMED
            assert words in answer.refusal.text
            raw.wait_ended()
    assert one.came == []


@pytest.mark.usefixtures("one")
def test_a_hello_of_the_next_protocol_is_refused_as_such_whatever_stream_it_names(
    members: dict[str, str],
) -> None:
    said = pb.ToPeer.FromString(
        encode_hello(Hello(identity("n2", protocol=9, protocol_from=9), "n1", None))
    )
    with Raw(members["n1"]) as raw:
        raw.socket.sendall(PREFACE)
        raw.say(said.SerializeToString() + b"\x92\x06\x01x")  # and a field of that protocol
        assert raw.answer().refusal.reason == PeerReason.WRONG_PROTOCOL


@pytest.mark.usefixtures("one")
def test_a_hello_that_is_too_long_is_not_read(members: dict[str, str]) -> None:
    with Raw(members["n1"]) as raw:
        raw.socket.sendall(PREFACE + (accepting.HELLO_BYTES + 1).to_bytes(4, "little"))
        answer = raw.answer()
        assert answer.refusal.reason == PeerReason.MALFORMED
        assert "65537 bytes, 65536 at most" in answer.refusal.text
        raw.wait_ended()


@pytest.mark.parametrize("said", [b"", PREFACE[:3], PREFACE, PREFACE + b"\x09\0\0\0abc"])
@pytest.mark.usefixtures("one")
def test_who_says_no_hello_keeps_no_thread(
    monkeypatch: pytest.MonkeyPatch, members: dict[str, str], said: bytes
) -> None:
    monkeypatch.setattr(accepting, "HELLO_S", 0.05)
    with Raw(members["n1"]) as raw:
        raw.socket.sendall(said)
        raw.wait_ended()


@pytest.mark.usefixtures("one")
def test_who_says_it_bit_by_bit_has_no_more_time(
    monkeypatch: pytest.MonkeyPatch, members: dict[str, str]
) -> None:
    monkeypatch.setattr(accepting, "HELLO_S", 0.5)
    with Raw(members["n1"]) as raw:
        raw.socket.sendall(PREFACE + b"\0\x80\0\0")
        began_s = time.monotonic()
        with pytest.raises(ConnectionError):  # noqa: PT012 - until one of them fails
            while time.monotonic() < began_s + 60:
                raw.socket.sendall(b"x")
                time.sleep(0.02)


def test_many_that_are_silent_keep_no_node_out(members: dict[str, str], one: Site) -> None:
    """Nor do they get more threads than allowed."""
    most = one.network._listener._most_strangers
    with ExitStack() as stack:
        silent = [stack.enter_context(Raw(members["n1"])) for _ in range(5 * most)]
        # Not always the last are left: with all threads busy, new connections are closed at once.
        one.wait("all but some are ended", lambda: sum(map(Raw.has_ended, silent)) >= 4 * most)
        two = stack.enter_context(Site(identity("n2"), members))
        one.wait_connected("n2")
        two.wait_connected("n1")
        two.network.send("n1", Vote(1))
        one.wait_for_messages(1)
        assert len(threads(one)) <= one.network._listener._most


def threads(site: Site) -> list[threading.Thread]:
    return list(site.network._listener._threads.values())


def test_beyond_all_threads_who_comes_is_closed_at_once(members: dict[str, str], one: Site) -> None:
    one.network._listener._most = 1
    with Raw(members["n1"]) as first:
        one.wait("it has the only one", lambda: len(threads(one)) == 1)
        with Raw(members["n1"]) as second:
            second.wait_ended()
        first.greet(identity("n2"), "n1")
        assert first.answer().welcome.node == "n1"


def test_the_port_survives_when_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, members: dict[str, str]
) -> None:
    with Site(identity("n1"), members) as one, structlog.testing.capture_logs() as logs:

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for _ in range(3):
                with Raw(members["n1"]) as raw:
                    raw.wait_ended()
        with Raw(members["n1"]) as raw:
            raw.greet(identity("n2"), "n1")
            assert raw.answer().welcome.node == "n1"
        assert one.network._listener._strangers == {}
    reported = [log for log in logs if log["event"] == "connection of a peer not taken"]
    assert [log["error"] for log in reported] == ["can't start new thread"]
