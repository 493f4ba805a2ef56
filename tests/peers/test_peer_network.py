"""Real sockets over loopback, several nodes in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel_replica.core.node.plausible import check
from delaywheel_replica.core.protocol.heartbeat import Fence, Promise
from delaywheel_replica.core.protocol.messages import (
    Applied,
    Fetch,
    Frames,
    Gossip,
    Lacks,
    PeerMessage,
    PrevoteRequest,
    Refused,
    Vote,
    WheelCard,
)
from delaywheel_replica.peers.encoding import encode, encode_in_parts
from delaywheel_replica.peers.network import PeerListenError, PeerNetwork
from delaywheel_replica.peers.states import Connection, PeerReason, Stream, Way
from support.core.values import heartbeat, wheel_heartbeat
from support.peers.raw import Raw
from support.peers.site import SETTINGS, Site, free_members, identity
from support.wheels.copies import bundled, copy_of

WHEEL = WheelId("n1", 1)
CARD = WheelCard(WHEEL, {"n1": "disk-n1", "n2": "disk-n2"}, 2, 7200)
ALL = (
    Gossip(heartbeat("n1", open_=WHEEL), (heartbeat("n3"),)),
    PrevoteRequest(1, 1000),
    Vote(2),
    Promise("n1", "disk-n1", Fence("n2", 3), {WHEEL: 4}),
    Refused("n2", 3),
    Frames(CARD, bundled([copy_of(1, b"frame")])),
    Applied(WHEEL, "disk-n1", "boot", 1),
    Fetch(1, WHEEL, 2, 3),
    Lacks(1, WHEEL, "disk-n1", 2, 3),
)


def frames(size: int, seq: int = 1) -> Frames:
    return Frames(CARD, bundled([copy_of(seq, bytes(size))]))


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Site, Site]]:
    """Two nodes that are connected."""
    members = free_members(2)
    with Site(identity("n1"), members) as one, Site(identity("n2"), members) as other:
        one.wait_connected("n2")
        other.wait_connected("n1")
        yield one, other


# --- messages


def by_kind(messages: Iterable[PeerMessage]) -> list[PeerMessage]:
    return sorted(messages, key=lambda message: type(message).__name__)


def test_frames_that_go_to_several_nodes_are_encoded_once(
    pair: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But an answer with the same frames is another message."""
    one, other = pair
    made: list[PeerMessage] = []

    def encoding(message: PeerMessage) -> tuple[bytes | memoryview, ...]:
        made.append(message)
        return encode_in_parts(message)

    monkeypatch.setattr("delaywheel_replica.peers.network.encode_in_parts", encoding)
    pushed = frames(10)
    sent = [pushed, Frames(CARD, pushed.frames), Frames(CARD, pushed.frames, 7), frames(10, 2)]
    other.came.clear()
    for message in sent:
        one.network.send("n2", message)
    other.wait_for_messages(len(sent))
    assert other.from_("n1") == sent
    assert made == [pushed, *sent[2:]]


def test_every_kind_of_message_arrives(pair: tuple[Site, Site]) -> None:
    one, other = pair
    assert {type(message) for message in ALL} == set(PeerMessage.__args__)
    other.came.clear()
    for message in ALL:
        one.network.send("n2", message)
    other.wait_for_messages(len(ALL))
    assert by_kind(other.from_("n1")) == by_kind(ALL)


@given(st.lists(st.sampled_from([Vote, Refused, Fetch, Applied]), max_size=200))
def test_each_stream_keeps_its_order(pair: tuple[Site, Site], kinds: list[type]) -> None:
    one, other = pair
    other.came.clear()
    made: dict[type, Callable[[int], PeerMessage]] = {
        Vote: Vote,
        Refused: lambda n: Refused("n2", n),
        Fetch: lambda n: Fetch(n, WHEEL, 1, 1),
        Applied: lambda n: Applied(WHEEL, "", "", n),
    }
    sent = [made[kind](n) for n, kind in enumerate(kinds, start=1)]
    for message in sent:
        one.network.send("n2", message)
    other.wait_for_messages(len(sent))
    for stream in ((Vote, Refused), (Fetch, Applied)):
        came = [message for message in other.from_("n1") if isinstance(message, stream)]
        assert came == [message for message in sent if isinstance(message, stream)]


def test_what_goes_to_and_fro_is_counted(pair: tuple[Site, Site]) -> None:
    one, other = pair
    before, other_before = one.state("n2").counters, other.state("n1").counters
    other.came.clear()
    for n in range(1, 11):
        one.network.send("n2", Vote(n))
    one.network.send("n2", frames(10_000))
    other.wait_for_messages(11)
    after, other_after = one.state("n2").counters, other.state("n1").counters
    assert after.sent - before.sent == other_after.received - other_before.received == 11
    sent_bytes = after.sent_bytes - before.sent_bytes
    assert sent_bytes == other_after.received_bytes - other_before.received_bytes
    assert 10_000 < sent_bytes < 11_000
    assert (after.dropped, after.breaks, after.connects) == (0, 0, 4)


def test_who_is_not_a_peer_is_a_mistake_of_the_caller(pair: tuple[Site, Site]) -> None:
    for stranger in ("n1", "n9"):
        with pytest.raises(KeyError):
            pair[0].network.send(stranger, Vote(1))


def test_states_name_the_nodes_that_were_heard(pair: tuple[Site, Site]) -> None:
    state = pair[0].state("n2")
    assert state.connection is Connection.CONNECTED
    assert (state.client_address, state.storage) == ("n2.example:7420", "disk-n2")
    assert state.refusal is None


def test_five_nodes_all_hear_each_other() -> None:
    members = free_members(5)
    with ExitStack() as stack:
        sites = [stack.enter_context(Site(identity(node), members)) for node in members]
        for site in sites:
            site.wait_connected(*(node for node in members if node != site.node))
        for site in sites:
            reported = Gossip(heartbeat(site.node))
            for node in members:
                if node != site.node:
                    site.network.send(node, reported)
        for site in sites:
            site.wait_for_messages(4)
            assert sorted(sender for sender, _ in site.came) == [
                node for node in members if node != site.node
            ]
            assert all(
                isinstance(message, Gossip) and message.heartbeat.node == sender
                for sender, message in site.came
            )
        assert not any(site.broken for site in sites)


# --- a slow receiver


def test_a_slow_receiver_of_frames_costs_neither_memory_nor_beats() -> None:
    members, slow = free_members(2), threading.Event()
    bound = 4 << 20
    with (
        Site(identity("n1"), members, data_queue_bytes=bound) as one,
        Site(identity("n2"), members) as other,
    ):
        one.wait_connected("n2")

        def hold(_: str, message: PeerMessage) -> None:
            if isinstance(message, Frames):
                slow.wait(60)

        other.on_message = hold
        for seq in range(1, 301):
            one.network.send("n2", frames(1 << 20, seq))
        counters = one.state("n2").counters
        # What is not counted as dropped waits within the bound, or in the kernel.
        assert counters.dropped >= 200
        for n in range(1, 101):
            one.network.send("n2", Vote(n))
        other.wait("beats", lambda: len(other.from_("n1")) == 100)
        assert other.from_("n1") == [Vote(n) for n in range(1, 101)]
        slow.set()
        taken = 300 - counters.dropped
        other.wait("the rest", lambda: len(other.came) == 100 + taken)
        seqs = [m.frames.first_seq for m in other.from_("n1") if isinstance(m, Frames)]
        assert seqs == sorted(set(seqs))
        assert not one.broken


def test_a_receiver_that_was_slow_gets_the_newest_beat_and_none_of_the_stale_ones() -> None:
    members, slow = free_members(2), threading.Event()
    big = {WheelId("n1", n): wheel_heartbeat(10**9) for n in range(1, 2_000)}
    with Site(identity("n1"), members) as one, Site(identity("n2"), members) as other:
        one.wait_connected("n2")

        def hold(*_: object) -> None:
            slow.wait(60)

        other.on_message = hold
        for count in range(1, 201):
            one.network.send("n2", Gossip(heartbeat("n1", wheels=big, wall_ms=count)))
        slow.set()
        other.wait("the newest", lambda: newest(other) == 200)

        def all_counted() -> bool:  # the newest is counted after it was sent, and may have come
            counters = one.state("n2").counters
            return counters.sent + counters.superseded == 200

        one.wait("all are counted", all_counted)
        counters = one.state("n2").counters
        assert counters.superseded > 50
        assert counters.sent + counters.superseded == 200
        assert counters.dropped == 0


def newest(site: Site) -> int:
    reported = site.from_("n1")
    return reported[-1].heartbeat.wall_ms if reported and isinstance(reported[-1], Gossip) else 0


# --- refusals


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cluster_id": "other"}, PeerReason.WRONG_CLUSTER),
        ({"protocol": 9, "protocol_from": 9}, PeerReason.WRONG_PROTOCOL),
        ({"format": 9}, PeerReason.WRONG_FORMAT),
        ({"settings": SETTINGS | {"span_seconds": "60"}}, PeerReason.SETTINGS_DISAGREE),
    ],
)
def test_those_who_disagree_refuse_each_other_by_name(
    changes: dict[str, Any], reason: PeerReason
) -> None:
    members = free_members(2)
    with (
        structlog.testing.capture_logs() as logs,
        Site(identity("n1"), members) as one,
        Site(identity("n2", **changes), members) as other,
    ):
        for site, peer in ((one, "n2"), (other, "n1")):
            site.wait_refused(peer, reason)
            assert site.state(peer).connection is Connection.REFUSED
            site.network.send(peer, Vote(1))
            assert site.state(peer).counters.dropped == 1
        refusals, others = one.network._peers["n2"]._refusals, other.network._peers["n1"]._refusals
        # Who dials is refused when it comes to it: either side's own word may be all there is yet.
        one.wait("both ways", lambda: len(refusals) == len(others) == len(Way) * len(Stream))
        first = dict(refusals)
        one.wait("tried again", lambda: all(refusals[key] != first[key] for key in first))
        assert [*one.came, *other.came, *one.broken, *other.broken] == []
    reported = [log for log in logs if log["event"] == "peer refused"]
    # Once for each side's own refusal and once for the other's, whatever was tried again.
    assert sorted((log["peer"], log["by"]) for log in reported) == [
        (peer, by) for peer in ("n1", "n2") for by in ("it", "this node")
    ]


def test_a_node_that_is_no_member_is_refused_and_logged() -> None:
    members = free_members(2)
    stranger = {"n1": members["n1"], "n9": members["n2"]}
    with (
        structlog.testing.capture_logs() as logs,
        Site(identity("n1"), members) as one,
        Site(identity("n9"), stranger) as other,
    ):
        # Whichever is shown: it is dialled as n2, too, and says that it is n9.
        since = other.network._peers["n1"]._refusals
        other.wait(
            "refused",
            lambda: PeerReason.NOT_A_MEMBER in {r.reason for r, _ in since.copy().values()},
        )
        one.wait("refused", lambda: one.reason("n2") is not None)
        assert one.reason("n2") in {PeerReason.NOT_A_MEMBER, PeerReason.WRONG_NODE}
        first = dict(since)
        other.wait("tried again", lambda: all(since[key] != first[key] for key in first))
    refused = {log["text"] for log in logs if log["event"] == "stranger refused"}
    assert len(refused) == 1


def test_an_address_that_leads_to_another_member() -> None:
    members = free_members(3)
    crossed = members | {"n2": members["n3"]}
    with Site(identity("n1"), crossed) as one, Site(identity("n3"), members) as three:
        one.wait_refused("n2", PeerReason.WRONG_NODE)
        one.wait_connected("n3")
        refusal = one.state("n2").refusal
        assert refusal is not None
        assert "n2" in refusal.text
        assert "n3" in refusal.text
        assert not three.broken


def test_the_greatest_frame_of_the_settings_arrives() -> None:
    members, size = free_members(2), 100 << 20
    reported = SETTINGS | {"transaction_bytes": str(size)}
    with (
        Site(identity("n1", settings=reported), members) as one,
        Site(identity("n2", settings=reported), members) as other,
    ):
        one.wait_connected("n2")
        one.network.send("n2", frames(size))
        other.wait_for_messages(1)


def test_what_cannot_be_read_ends_the_stream_by_name() -> None:
    members = free_members(2)
    with Site(identity("n1"), members) as one, Raw(members["n1"]) as raw:
        raw.greet(identity("n2"), "n1")
        assert raw.answer().welcome.node == "n1"
        raw.say(b"\xff")
        raw.wait_ended()
        one.wait("refused", lambda: one.reason("n2") is PeerReason.MALFORMED)
        assert one.state("n2").counters.malformed == 1
        one.wait("reported", lambda: one.broken == ["n2"])


def test_a_message_longer_than_any_ends_the_stream_by_name() -> None:
    """Before it is read; and frames may be longer than other messages."""
    members, length_bytes = free_members(2), (8 << 20) + 1
    with Site(identity("n1"), members) as one:
        with Raw(members["n1"]) as raw:
            raw.greet(identity("n2"), "n1", Stream.CONTROL)
            assert raw.answer().welcome.node == "n1"
            raw.socket.sendall(length_bytes.to_bytes(4, "little"))
            raw.wait_ended()
        one.wait("refused", lambda: one.reason("n2") is PeerReason.MALFORMED)
        refusal = one.state("n2").refusal
        assert refusal is not None
        assert f"{length_bytes} bytes" in refusal.text
        with Raw(members["n1"]) as raw:
            raw.greet(identity("n2"), "n1", Stream.DATA)
            assert raw.answer().welcome.node == "n1"
            raw.say(bytes(length_bytes))  # it is read, and then it is no message
            raw.wait_ended()
        one.wait("counted", lambda: one.state("n2").counters.malformed == 2)


def test_a_message_that_the_server_does_not_believe_ends_its_stream_and_nothing_else() -> None:
    members = free_members(2)
    with Site(identity("n1"), members) as one, Site(identity("n2"), members) as other:
        one.wait_connected("n2")
        other.wait_connected("n1")
        one.on_message = check
        other.network.send("n1", Vote(1 << 60))
        one.wait("counted", lambda: one.state("n2").counters.malformed == 1)
        one.wait_connected("n2")
        other.wait_connected("n1")
        other.network.send("n1", Vote(2))
        one.wait("heard", lambda: ("n2", Vote(2)) in one.came)
        assert ("n2", Vote(1 << 60)) not in one.came


def test_who_goes_before_it_is_welcomed_is_not_held_to_be_there() -> None:
    members = free_members(2)
    with Site(identity("n1"), members) as one:
        for _ in range(20):
            with Raw(members["n1"]) as raw:
                raw.greet(identity("n2"), "n1")
        one.wait("nobody", lambda: not one.network._peers["n2"]._in)


def test_a_stream_that_is_opened_again_takes_the_place_of_the_first() -> None:
    members, sender = free_members(2), identity("n2")
    with Site(identity("n1"), members) as one, Raw(members["n1"]) as first:
        first.greet(sender, "n1")
        assert first.answer().welcome.node == "n1"
        first.say(encode(Vote(1)))
        one.wait_for_messages(1)
        with Raw(members["n1"]) as second:
            second.greet(sender, "n1")
            assert second.answer().welcome.node == "n1"
            first.wait_ended()
            second.say(encode(Vote(2)))
            one.wait_for_messages(2)
            assert one.came == [("n2", Vote(1)), ("n2", Vote(2))]
            # The end of the first was reported when the second came, and is not reported again.
            assert one.broken == ["n2"]
        one.wait("reported", lambda: one.broken == ["n2"] * 2)


# --- life


def test_a_port_in_use_is_refused_by_name() -> None:
    members = free_members(2)
    with Site(identity("n1"), members):
        second = PeerNetwork(
            identity("n1"), members, on_message=lambda *_: None, on_disconnected=lambda _: None
        )
        with pytest.raises(PeerListenError, match=members["n1"]):
            second.start(members["n1"])
        second.stop()


def test_a_stop_is_announced_to_the_others_and_not_to_oneself() -> None:
    members = free_members(2)
    with Site(identity("n1"), members) as one:
        with Site(identity("n2"), members) as other:
            one.wait_connected("n2")
            other.wait_connected("n1")
        assert other.broken == []
        one.wait("reported", lambda: one.broken == ["n2"])

        def drops() -> bool:
            one.network.send("n2", Vote(1))
            return one.state("n2").counters.dropped > 0

        # It is reported when the first stream ends; the one for this message may end later.
        one.wait("dropped", drops)
        assert one.state("n2").connection is Connection.CONNECTING


def test_a_stop_waits_for_the_message_that_is_being_taken() -> None:
    members, entered, leave = free_members(2), threading.Event(), threading.Event()
    with Site(identity("n1"), members) as one:
        other = Site(identity("n2"), members)
        other.__enter__()
        one.wait_connected("n2")

        def hold(*_: object) -> None:
            entered.set()
            leave.wait(60)

        other.on_message = hold
        one.network.send("n2", Vote(1))
        assert entered.wait(60)
        threading.Timer(0.2, leave.set).start()
        other.network.stop()
        assert leave.is_set()
        assert other.came == [("n1", Vote(1))]


def test_what_a_message_raises_comes_out_of_its_thread_and_its_stream_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a real node this ends the process from any thread: defects.py."""
    failed: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda reported: failed.append(reported.exc_type))
    members = free_members(2)
    with Site(identity("n1"), members) as one, Site(identity("n2"), members) as other:
        one.wait_connected("n2")
        other.wait_connected("n1")

        def fail(*_: object) -> None:
            other.on_message = lambda *_: None
            raise ZeroDivisionError("of this test")

        other.on_message = fail
        one.network.send("n2", Vote(1))
        one.wait("reported", lambda: one.broken == ["n2"])
        other.wait("reported", lambda: other.broken == ["n1"])
        one.wait_connected("n2")
        one.network.send("n2", Vote(2))
        other.wait_for_messages(1)
        assert other.came == [("n1", Vote(2))]
    assert failed == [ZeroDivisionError]
