"""TLS between nodes: which modes connect, whose certificates are accepted, and full buffers."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trustme
from cryptography.x509.oid import ExtendedKeyUsageOID as Usage

from delaywheel import Tls
from delaywheel.client.exchange.channel import tls_fault
from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.messages import (
    Frames,
    Gossip,
    PrevoteRequest,
    Vote,
    WheelCard,
)
from delaywheel_replica.peers import encryption
from delaywheel_replica.peers.encryption import Cipher, Contexts, PeerSecurity, PeerTls
from delaywheel_replica.peers.outbox import Outbox
from delaywheel_replica.peers.sockets import Channel
from delaywheel_replica.peers.states import Connection, Counters, PeerReason
from delaywheel_replica.server.access.faults import certificate_faults
from delaywheel_replica.server.certificates import NodeCertificates
from support.core.values import heartbeat
from support.peers.authority import Authority
from support.peers.raw import Raw
from support.peers.site import Site, free_members, identity
from support.server.server_process import config_for
from support.wheels.copies import bundled, copy_of

OFF, ACCEPT, PREFER, REQUIRED = PeerTls
WHEEL = WheelId("n1", 1)
CARD = WheelCard(WHEEL, {"n1": "disk-n1", "n2": "disk-n2"}, 2, 7200)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("good"), "good")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"), "other")


def contexts(files: tuple[Path, Path], ca: Path) -> Contexts:
    settings = {"tls_cert": str(files[0]), "tls_key": str(files[1]), "tls_client_ca": str(ca)}
    return NodeCertificates(config_for(files[0].parent, **settings)).peer_context


@contextmanager
def two(first: PeerSecurity, second: PeerSecurity) -> Iterator[tuple[Site, Site]]:
    members = free_members()
    with ExitStack() as stack:
        sites = [
            stack.enter_context(Site(identity(node), members, security=security))
            for node, security in zip(members, (first, second), strict=True)
        ]
        yield sites[0], sites[1]


def security(mode: PeerTls, good: Authority) -> PeerSecurity:
    if mode is OFF:
        return PeerSecurity(mode, None)
    return PeerSecurity(mode, contexts(good.sign("node", "127.0.0.1"), good.file))


@pytest.mark.parametrize(
    ("one", "another"),
    [
        *((OFF, each) for each in (OFF, ACCEPT, PREFER)),
        *((ACCEPT, each) for each in (ACCEPT, PREFER)),
        *((PREFER, each) for each in (PREFER, REQUIRED)),
        (REQUIRED, REQUIRED),
    ],
)
def test_modes_that_connect(good: Authority, one: PeerTls, another: PeerTls) -> None:
    with two(security(one, good), security(another, good)) as (a, b):
        a.wait_connected("n2")
        b.wait_connected("n1")
        a.network.send("n2", PrevoteRequest(1, 1000))
        b.network.send("n1", Vote(2))
        a.wait_for_messages(1)
        b.wait_for_messages(1)
        assert (a.came, b.came) == ([("n2", Vote(2))], [("n1", PrevoteRequest(1, 1000))])


@pytest.mark.parametrize("mode", [OFF, ACCEPT])
def test_a_node_that_wants_tls_takes_no_plain_text(good: Authority, mode: PeerTls) -> None:
    with two(security(mode, good), security(REQUIRED, good)) as (plain, wants):
        plain.wait_refused("n2", PeerReason.TLS_REFUSED)
        assert plain.state("n2").connection is not Connection.CONNECTED
        if mode is OFF:
            wants.wait_refused("n1", PeerReason.TLS_REFUSED)


@pytest.mark.parametrize("trusted", ["root", "intermediate"])
def test_an_intermediate_authority_signs_and_may_be_the_one_that_is_trusted(
    tmp_path: Path, trusted: str
) -> None:
    """gRPC trusts any authority that is named; Python's TLS wanted the root of it."""
    root = trustme.CA()
    intermediate = root.create_child_ca()
    signed, cert, key = intermediate.issue_cert("127.0.0.1"), tmp_path / "cert", tmp_path / "key"
    cert.write_bytes(b"".join(each.bytes() for each in signed.cert_chain_pems))
    key.touch(0o600)
    key.write_bytes(signed.private_key_pem.bytes())
    named = {"root": root, "intermediate": intermediate}[trusted]
    named.cert_pem.write_to_path(tmp_path / "ca")
    both = PeerSecurity(REQUIRED, contexts((cert, key), tmp_path / "ca"))
    with two(both, both) as (a, b):
        a.wait_connected("n2")
        b.wait_connected("n1")
    with socket.socket() as server, ThreadPoolExecutor(1) as pool:
        server.bind(("127.0.0.1", 0))
        server.listen()
        files = {"tls_cert": str(cert), "tls_key": str(key), "tls_client_ca": str(tmp_path / "ca")}
        context = NodeCertificates(config_for(tmp_path, **files)).peer_context(is_dialled=True)
        pool.submit(lambda: context.wrap_socket(server.accept()[0], server_side=True).close())
        address = f"127.0.0.1:{server.getsockname()[1]}"
        told = tls_fault(address, Tls(tmp_path / "ca"), 5)
    assert "CERTIFICATE_REQUIRED" in (told or ""), "what the node says, not that it is unknown"


def test_a_plain_hello_is_told_nothing_where_tls_is_required(good: Authority) -> None:
    """What the node compares a hello with would tell a stranger its members and settings."""
    with two(security(REQUIRED, good), security(REQUIRED, good)) as (_, b):
        address = b.state("n1").address
        for strange in (identity("n9"), identity("n2", cluster_id="x"), identity("n1")):
            with Raw(address) as raw:
                raw.greet(strange, "n1")
                refusal = raw.answer().refusal
                assert (refusal.reason, refusal.text) == (
                    PeerReason.TLS_REFUSED,
                    "peer_tls is required here",
                )


def test_all_of_it_arrives_in_order(good: Authority) -> None:
    """Long messages need more than the kernel takes at once."""
    frames = Frames(CARD, bundled([copy_of(1, bytes(range(256)) * 40_000)]))
    with two(security(REQUIRED, good), security(REQUIRED, good)) as (a, b):
        a.wait_connected("n2")
        a.network.send("n2", frames)
        for number in range(200):
            a.network.send("n2", PrevoteRequest(number, number))
        a.network.send("n2", frames)
        b.wait_for_messages(202)
        asked = [message for message in b.from_("n1") if isinstance(message, PrevoteRequest)]
        assert asked == [PrevoteRequest(number, number) for number in range(200)]
        assert [m for m in b.from_("n1") if isinstance(m, Frames)] == [frames, frames]


@pytest.mark.parametrize("fault", ["authority", "name", "expired"])
def test_a_certificate_that_does_not_suit_is_refused_by_either_end(
    good: Authority, other: Authority, fault: str
) -> None:
    files = {
        "authority": lambda: other.sign("n2", "127.0.0.1"),
        "name": lambda: good.sign("n2", "elsewhere.example.org"),
        "expired": lambda: expired(good),
    }[fault]()
    wrong = PeerSecurity(REQUIRED, made(files, good.file))
    with two(security(REQUIRED, good), wrong) as (a, b):
        b.wait_refused("n1", PeerReason.TLS_REFUSED)
        a.wait_refused("n2", PeerReason.TLS_REFUSED)
        assert a.state("n2").connection is not Connection.CONNECTED


def expired(good: Authority) -> tuple[Path, Path]:
    return good.sign("expired", "127.0.0.1", days=-1)


def made(files: tuple[Path, Path], ca: Path) -> Contexts:
    """As `contexts`, of files that no node would start with."""

    def context(is_dialled: bool) -> ssl.SSLContext:
        protocol = ssl.PROTOCOL_TLS_SERVER if is_dialled else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(protocol)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(ca)
        context.load_cert_chain(*files)
        if is_dialled:
            context.num_tickets = 0
        return context

    return context


def test_half_handshakes_keep_no_peer_out(good: Authority) -> None:
    one, another = security(REQUIRED, good), security(REQUIRED, good)
    with ExitStack() as stack:
        members = free_members()
        a = stack.enter_context(Site(identity("n1"), members, security=one))
        host, _, port = members["n1"].rpartition(":")
        for began in (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01", b"dwpee") * 20:
            line = stack.enter_context(socket.create_connection((host, int(port))))
            line.sendall(began)
        b = stack.enter_context(Site(identity("n2"), members, security=another))
        a.wait_connected("n2")
        b.wait_connected("n1")


def test_a_full_kernel_makes_messages_wait_and_the_newest_heartbeat_win(good: Authority) -> None:
    """Nothing of what waits is encrypted, but for what fits one write."""
    ours, theirs = socket.socketpair()
    files = good.sign("node", "127.0.0.1")
    source = contexts(files, good.file)
    with ours, theirs:
        for each in (ours, theirs):
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                each.setsockopt(socket.SOL_SOCKET, buffer, 4_096)
        sending, receiving = Channel(ours, "a"), Channel(theirs, "b")
        accepted = Cipher(theirs, source(True), None)  # noqa: FBT003 - see `Contexts`
        until = receiving.until(time.monotonic() + 60)
        thread = threading.Thread(target=accepted.shake_hands, args=(until,), daemon=True)
        thread.start()
        cipher = Cipher(ours, source(False), "127.0.0.1")  # noqa: FBT003 - as above
        cipher.shake_hands(sending.until(time.monotonic() + 60))
        thread.join(60)
        assert not thread.is_alive(), "the handshake does not end"
        sending.cipher = cipher
        ours.settimeout(0)
        woken: list[int] = []
        outbox = Outbox(sending, 1 << 20, Counters(), wake=lambda: woken.append(1))
        outbox.put([b"a" * 300_000], is_heartbeat=False)
        for number in range(5):
            outbox.put([b"heartbeat %d" % number], is_heartbeat=True)
        assert woken
        assert outbox.waits
        wanted = [b"a" * 300_000, b"heartbeat 4"]
        length_bytes = sum(4 + len(each) for each in wanted)
        came, view = bytearray(), memoryview(bytearray(1 << 20))
        theirs.settimeout(0)
        deadline_s = time.monotonic() + 60
        while len(came) < length_bytes:
            assert time.monotonic() < deadline_s, f"{len(came)} of {length_bytes} bytes came"
            outbox.flush()
            with suppress(BlockingIOError):  # less than one record is there
                came += view[: accepted.read_into(theirs.recv_into, view)]
        assert came == b"".join(len(each).to_bytes(4, "little") + each for each in wanted)
        assert not outbox.waits


def test_gossip_over_tls_is_heard(good: Authority) -> None:
    with two(security(PREFER, good), security(REQUIRED, good)) as (a, b):
        a.wait_connected("n2")
        for _ in range(20):
            a.network.send("n2", Gossip(heartbeat("n1"), ()))
        b.wait("gossip", lambda: b.from_("n1"))


def test_peer_tls_needs_certificates(good: Authority, tmp_path: Path) -> None:
    def told(**settings: str) -> list[str]:
        faults = certificate_faults(config_for(tmp_path, **settings))
        return [fault.text for fault in faults]

    cert, key = good.sign("n", "127.0.0.1")
    needs = [f"peer_tls prefer: needs {name}" for name in ("tls_cert", "tls_ca or tls_client_ca")]
    files = {"tls_cert": str(cert), "tls_key": str(key)}
    assert told(peer_tls="prefer") == needs
    assert told(peer_tls="prefer", **files) == needs[1:]
    assert told(peer_tls="prefer", **files, tls_ca=str(good.file)) == []


def test_a_certificate_that_no_other_node_would_accept_is_refused_at_the_start(
    good: Authority, tmp_path: Path
) -> None:
    def told(cert: Path, key: Path, *, host: str = "delay-1.example.org") -> str:
        config = config_for(
            tmp_path,
            members={"n1": f"{host}:1", "n2": "delay-2.example.org:1"},
            listen="127.0.0.1:2",
            peer_listen="127.0.0.1:1",
            peer_tls="required",
            tls_cert=str(cert),
            tls_key=str(key),
            tls_ca=str(good.file),
        )
        return " ".join(fault.text for fault in certificate_faults(config))

    assert told(*good.sign("one", "delay-1.example.org")) == ""
    assert told(*good.sign("any", "*.example.org")) == ""
    assert told(*good.sign("address", "10.0.0.1"), host="10.0.0.1") == ""
    assert "it names delay-2.example.org" in told(*good.sign("two", "delay-2.example.org"))
    assert "it names no host" in told(*good.sign_names("named", uri="spiffe://shop/n1"))
    serves = good.sign_names("serves", dns="delay-1.example.org", use=Usage.SERVER_AUTH)
    assert "it lacks the use clientAuth" in told(*serves)


def test_streams_are_opened_anew_and_what_was_revoked_ends(
    good: Authority, other: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that trusts another authority by now refuses a peer that it is connected with."""
    files = good.sign("node", "127.0.0.1")
    before, after = contexts(files, good.file), contexts(files, other.file)
    trusted = [before]

    def trusts(is_dialled: bool) -> ssl.SSLContext:
        return trusted[0](is_dialled)

    monkeypatch.setattr(encryption, "MAX_AGE_S", 4)
    one, another = PeerSecurity(REQUIRED, trusts), PeerSecurity(REQUIRED, before)
    with two(one, another) as (a, b):
        a.wait_connected("n2")
        b.wait_connected("n1")
        opened, since_ms = b.state("n1").counters.connects, a.state("n2").since_ms
        b.wait("opened anew, both ways", lambda: b.state("n1").counters.connects >= opened + 4)

        def arrives() -> bool:
            a.network.send("n2", PrevoteRequest(1, 1000))
            return bool(b.came)

        b.wait("messages arrive", arrives)
        assert a.state("n2").since_ms == since_ms, "they stay connected meanwhile"
        trusted[0] = after
        a.wait_refused("n2", PeerReason.TLS_REFUSED)
        a.wait("it is out", lambda: a.state("n2").connection is Connection.REFUSED)


def test_which_grants_a_node_has_is_told_to_its_peers() -> None:
    members = free_members()
    with (
        Site(identity("n1", access="old"), members) as a,
        Site(identity("n2", access="other"), members) as b,
    ):
        a.wait_connected("n2")
        b.wait_connected("n1")
        assert b.state("n1").access == "old"

        def told() -> bool:
            a.network.tell_access("new")
            a.network.send("n2", PrevoteRequest(1, 1000))
            return bool(b.came) and b.state("n1").access == "new"

        b.wait("it is heard", told)
        assert a.state("n2").access == "other"
        assert b.broken == []


def test_a_connection_lasts_no_longer_than_the_certificate_of_the_other_side() -> None:
    security = PeerSecurity(REQUIRED, None)
    channel = cast("Channel", SimpleNamespace(cipher=SimpleNamespace(left_s=60.0)))
    for is_dialled in (False, True):
        assert security.ends_s(channel, is_dialled=is_dialled) - time.monotonic() <= 60
