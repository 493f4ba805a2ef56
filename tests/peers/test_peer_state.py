"""One peer's state, without a network."""

import socket
from dataclasses import replace
from typing import cast
from unittest.mock import Mock

import pytest
import structlog

from delaywheel_replica.core.protocol.messages import Vote
from delaywheel_replica.peers import peer as module
from delaywheel_replica.peers.accepting import Acceptor
from delaywheel_replica.peers.encoding import encode
from delaywheel_replica.peers.encryption import PLAIN
from delaywheel_replica.peers.framing import PREFACE, head_of
from delaywheel_replica.peers.handshake import Hello, PeerIdentity, encode_hello
from delaywheel_replica.peers.outbox import Outbox
from delaywheel_replica.peers.peer import Peer
from delaywheel_replica.peers.sockets import Channel
from delaywheel_replica.peers.states import (
    Connection,
    Counters,
    PeerReason,
    PeerRefusal,
    Stream,
    Way,
)
from support.peers.site import SETTINGS, identity

ME = identity("n1")
THEIRS = identity("n2")


def outbox() -> Outbox:
    """The state without a connection."""
    channel = Mock(is_gone=lambda: False)
    return Outbox(cast("Channel", channel), 100, Counters(), wake=lambda: None)


class Line(Channel):
    """A connection from the peer, with nothing behind it."""

    def __init__(self) -> None:
        self.ends = 0
        self.gone = False

    def end(self) -> None:
        self.ends += 1

    def is_gone(self) -> bool:
        return self.gone


def connected(reported: list[str]) -> Peer:
    """A peer with all four streams connected."""
    peer = Peer(ME, "n2", "a:1", reported.append)
    for stream in Stream:
        assert peer.welcomed(stream, THEIRS, outbox()) is None
        assert peer.state().connection is Connection.CONNECTING
        assert peer.came(stream, THEIRS, Line()) is None
    assert peer.state().connection is Connection.CONNECTED
    return peer


def test_who_welcomes_under_another_name_is_not_wanted() -> None:
    refusal = Peer(ME, "n2", "a:1", print).welcomed(Stream.DATA, identity("n3"), outbox())
    assert refusal is not None
    assert refusal.reason is PeerReason.WRONG_NODE


@pytest.mark.parametrize(
    ("other", "in_text"),
    [
        (identity("n2", storage="other-disk"), "storage disk-n2 from a machine of boot boot"),
        (identity("n2", storage="other-disk"), "storage other-disk at boot boot"),
        # A copied folder.
        (identity("n2", boot="elsewhere"), "storage disk-n2 from a machine of boot boot"),
        (identity("n2", boot="elsewhere"), "storage disk-n2 at boot elsewhere"),
        (replace(THEIRS, started_ns=THEIRS.started_ns - 1), "the data folder of one is a copy"),
        (replace(THEIRS, started_ns=THEIRS.started_ns + 1), "the data folder of one is a copy"),
    ],
)
def test_another_process_is_refused_on_either_way_while_the_first_is_connected(
    other: PeerIdentity, in_text: str
) -> None:
    reported: list[str] = []
    peer = connected(reported)
    for refusal in (
        peer.welcomed(Stream.DATA, other, outbox()),
        peer.came(Stream.DATA, other, Line()),
    ):
        assert refusal is not None
        assert refusal.reason is PeerReason.NODE_ID_TAKEN
        assert in_text in refusal.text
    assert peer.state().storage == "disk-n2"
    assert reported == []


@pytest.mark.parametrize("changes", [{}, {"boot": "next"}, {"storage": "new"}])
def test_a_node_that_was_started_again_is_taken_once_the_old_connections_are_gone(
    changes: dict[str, str],
) -> None:
    """The threads that read what the old process sent may notice later."""
    peer, again = Peer(ME, "n2", "a:1", lambda _: None), identity("n2", **changes)
    old = {stream: Line() for stream in Stream}
    for stream, line in old.items():
        assert peer.came(stream, THEIRS, line) is None
    assert peer.came(Stream.DATA, again, Line()) is not None
    old[Stream.DATA].gone = True
    assert peer.came(Stream.DATA, again, Line()) is not None
    old[Stream.CONTROL].gone = True
    assert peer.came(Stream.DATA, again, Line()) is None
    assert old[Stream.DATA].ends == 1
    assert peer.came(Stream.CONTROL, again, Line()) is None


def test_a_death_is_reported_once_and_again_if_something_was_still_read() -> None:
    reported: list[str] = []
    peer = Peer(ME, "n2", "a:1", reported.append)
    waiting: dict[Stream, Outbox] = {stream: outbox() for stream in Stream}
    lines = {stream: Line() for stream in Stream}
    for stream in Stream:
        peer.welcomed(stream, THEIRS, waiting[stream])
        peer.came(stream, THEIRS, lines[stream])
    peer.left(Stream.CONTROL, waiting[Stream.CONTROL])
    peer.left(Stream.DATA, waiting[Stream.DATA])
    peer.went(Stream.DATA, lines[Stream.DATA])
    assert reported == ["n2"]
    peer.heard()
    peer.went(Stream.CONTROL, lines[Stream.CONTROL])
    assert reported == ["n2", "n2"]
    assert peer.state().counters.breaks == 2
    peer.went(Stream.CONTROL, lines[Stream.CONTROL])
    peer.left(Stream.CONTROL, waiting[Stream.CONTROL])
    assert reported == ["n2", "n2"]


def test_a_break_while_a_message_is_taken_is_reported_again_when_its_stream_ends() -> None:
    reported: list[str] = []
    peer, waiting = Peer(ME, "n2", "a:1", reported.append), outbox()
    peer.welcomed(Stream.CONTROL, THEIRS, waiting)
    acceptor = Acceptor(
        ME,
        {"n2": peer},
        lambda *_: peer.left(Stream.CONTROL, waiting),
        data_bytes=100,
        security=PLAIN,
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(PREFACE)
        for message in (encode_hello(Hello(THEIRS, "n1", Stream.CONTROL)), encode(Vote(1))):
            theirs.sendall(head_of([message]) + message)
        theirs.shutdown(socket.SHUT_WR)
        acceptor.serve(Channel(ours, "a"), lambda: None)
    assert reported == ["n2", "n2"]


def test_who_has_ended_all_its_streams_gets_none_either() -> None:
    peer, ours, theirs = Peer(ME, "n2", "a:1", lambda _: None), *socket.socketpair()
    with ours, theirs:
        sent = Outbox(Channel(ours, "a:1"), 100, Counters(), wake=lambda: None)
        assert peer.welcomed(Stream.CONTROL, THEIRS, sent) is None
        data, control = Line(), Line()
        assert peer.came(Stream.DATA, THEIRS, data) is None
        assert peer.came(Stream.CONTROL, THEIRS, control) is None
        peer.went(Stream.DATA, data)
        sent.put([b"x"], is_heartbeat=False)
        assert len(theirs.recv(9)) == 5
        peer.went(Stream.CONTROL, control)
        assert theirs.recv(9) == b""


def test_who_hangs_loses_all_streams() -> None:
    peer, lines = Peer(ME, "n2", "a:1", lambda _: None), [Line(), Line()]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = Outbox(Channel(ours, "a:1"), 100, Counters(), wake=lambda: None)
        assert peer.welcomed(Stream.DATA, THEIRS, sent) is None
        for stream, line in zip(Stream, lines, strict=True):
            assert peer.came(stream, THEIRS, line) is None
        peer.end()
        assert [line.ends for line in lines] == [1, 1]
        assert theirs.recv(1) == b""


def test_a_refusal_that_is_not_repeated_is_over() -> None:
    peer = Peer(ME, "n2", "a:1", print)
    peer.refused(Way.IN, Stream.DATA, PeerRefusal(PeerReason.MALFORMED, "why"))
    assert peer.state().connection is Connection.REFUSED
    (refusal, at), *_ = peer._refusals.values()
    peer._refusals[Way.IN, Stream.DATA] = refusal, at - module.REFUSAL_FRESH_S
    state = peer.state()
    assert state.connection is Connection.CONNECTING
    assert state.refusal is None


def test_a_refusal_ends_with_its_stream_being_opened_and_is_news_after_that() -> None:
    refusal = PeerRefusal(PeerReason.SETTINGS_DISAGREE, "why")
    with structlog.testing.capture_logs() as logs:
        peer = Peer(ME, "n2", "a:1", print)
        for _ in range(3):
            for stream in Stream:
                peer.refused(Way.OUT, stream, refusal)
        for stream in Stream:
            peer.welcomed(stream, THEIRS, outbox())
            peer.came(stream, THEIRS, Line())
        assert peer.state().refusal is None
        peer.refused(Way.OUT, Stream.DATA, refusal)
        # Shown beside the connection: another node claims to be that node, for instance.
        assert peer.state().refusal == refusal
        assert peer.state().connection is Connection.CONNECTED
    assert len([log for log in logs if log["event"] == "peer refused"]) == 2


@pytest.mark.parametrize("order", [(Way.OUT, Way.IN), (Way.IN, Way.OUT)])
def test_of_two_refusals_the_peers_own_is_shown(order: tuple[Way, Way]) -> None:
    """Whichever came first: the report must not depend on chance."""
    peer = Peer(ME, "n2", "a:1", print)
    refusals = {
        Way.OUT: PeerRefusal(PeerReason.NOT_A_MEMBER, "by it"),
        Way.IN: PeerRefusal(PeerReason.WRONG_NODE, "by this node"),
    }
    for way in order * 2:
        peer.refused(way, Stream.DATA, refusals[way])
    assert peer.state().refusal == refusals[Way.OUT]


def test_refusals_that_change_all_the_time_do_not_fill_the_log() -> None:
    with structlog.testing.capture_logs() as logs:
        peer = Peer(ME, "n2", "a:1", print)
        for n in range(module.MOST_LOGGED + 50):
            peer.refused(Way.OUT, Stream.DATA, PeerRefusal(PeerReason.MALFORMED, str(n)))
    assert len(logs) == module.MOST_LOGGED
    assert len(peer._logged) == module.MOST_LOGGED


def test_a_peer_that_is_lost_is_a_warning_unless_this_node_stops() -> None:
    with structlog.testing.capture_logs() as logs:
        peer, line = Peer(ME, "n2", "a:1", lambda _: None), Line()
        it, waiting = identity("n2"), {stream: outbox() for stream in Stream}
        for stream in Stream:
            assert peer.came(stream, it, line) is None
            assert peer.welcomed(stream, it, waiting[stream]) is None
        peer.left(Stream.DATA, waiting[Stream.DATA])
        assert peer.welcomed(Stream.DATA, it, waiting[Stream.DATA]) is None
        peer.leave()
        peer.left(Stream.DATA, waiting[Stream.DATA])
    assert [(log["event"], log["log_level"]) for log in logs] == [
        ("peer connected", "info"),
        ("peer lost", "warning"),
        ("peer connected", "info"),
    ]


def test_other_members_are_reported_until_both_have_the_same() -> None:
    """Each change appears once in the log, whichever streams come and go."""
    rolled = identity("n2", settings=SETTINGS | {"members": "n1,n2,n3"})
    text = "members is n1,n2 at n1, n1,n2,n3 at n2"
    with structlog.testing.capture_logs() as logs:
        peer, waiting, line = Peer(ME, "n2", "a:1", lambda _: None), outbox(), Line()
        assert peer.came(Stream.DATA, rolled, line) is None
        assert peer.welcomed(Stream.DATA, rolled, waiting) is None
        assert peer.state().rolling == text
        assert peer.state().refusal is None
        peer.went(Stream.DATA, line)
        peer.left(Stream.DATA, waiting)
        # Away, it perhaps gets the new list just now.
        assert peer.state().rolling is None
        peer.came(Stream.DATA, rolled, line)
        assert peer.state().rolling == text
        line.gone = True
        peer.came(Stream.DATA, identity("n2"), Line())
        assert peer.state().rolling is None
    assert [(log["log_level"], log.get("text")) for log in logs] == [
        ("warning", text),
        ("info", None),
    ]
