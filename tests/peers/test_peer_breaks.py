"""Peers that die, hang, or are cut off; real processes and real connections."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.messages import (
    Applied,
    Frames,
    PrevoteRequest,
    Vote,
    WheelCard,
)
from delaywheel_replica.peers import sockets
from delaywheel_replica.peers.framing import PREFACE, head_of
from delaywheel_replica.peers.handshake import encode_answer
from delaywheel_replica.peers.states import Connection, PeerReason, Stream
from support.peers.process import FAILED, PeerProcess
from support.peers.raw import Raw
from support.peers.site import Site, free_members, identity
from support.peers.wire import Wire
from support.services.waiting import wait_until
from support.wheels.copies import bundled, copy_of

WHEEL = WheelId("n1", 1)
# More than it takes until the pause between them is at its longest.
MANY_ATTEMPTS = 10
CARD = WheelCard(WHEEL, {"n1": "disk-n1", "n2": "disk-n2"}, 2, 7200)


def turn_away(address: str, times: int) -> list[float]:
    """Takes a number of connections at the address of a dead peer, and ends each at once.

    Returns when they came, by the monotonic clock.
    """
    host, _, port = address.rpartition(":")
    came_s = []
    with socket.create_server((host, int(port))) as server:
        server.settimeout(60)
        for _ in range(times):
            server.accept()[0].close()
            came_s.append(time.monotonic())
    return came_s


def ask(site: Site, number: int) -> None:
    """Both streams work, in both directions."""
    applied = Applied(WHEEL, "disk-n2", "boot", number)

    def is_answered() -> bool:
        """It is asked again: until the peer knows that it was accepted, its answers are dropped."""
        site.network.send("n2", PrevoteRequest(number, 1))
        site.network.send("n2", Frames(CARD, bundled([copy_of(number, b"frame")])))
        return {Vote(number), applied} <= {*site.from_("n2")}

    site.wait("answers", is_answered)


def test_a_killed_peer_is_reported_at_once_and_found_again() -> None:
    members = free_members()
    with Site(identity("n1"), members) as one:
        for life in range(1, 4):
            with PeerProcess("n2", members) as other:
                one.wait_connected("n2")
                ask(one, life)
                reported = len(one.broken)
                other.kill()
                wait_broken(
                    one, reported + 1
                )  # by the end of its connections: no silence finds it out
            assert one.state("n2").connection is Connection.CONNECTING
            assert one.state("n2").counters.breaks >= life


def wait_broken(site: Site, times: int) -> None:
    """A death is reported again if an earlier answer is read after the report."""
    site.wait(f"reported {times} times", lambda: len(site.broken) >= times)


def test_a_process_whose_main_thread_fails_is_not_kept_by_its_peers() -> None:
    members = free_members()
    with Site(identity("n1"), members) as one, PeerProcess("n2", members) as other:
        one.wait_connected("n2")
        assert other.fail(60) == FAILED
        wait_broken(one, 1)


def test_a_peer_that_starts_again_is_connected_however_long_it_was_away() -> None:
    members = free_members()
    with Site(identity("n1"), members) as one:
        with PeerProcess("n2", members):
            one.wait_connected("n2")
        wait_broken(one, 1)
        # It was away for long: pauses between attempts have grown as far as they do.
        came_s = turn_away(members["n2"], 2 * MANY_ATTEMPTS)[-MANY_ATTEMPTS:]
        pauses_s = [later - first for first, later in zip(came_s, came_s[2:], strict=False)]
        assert min(pauses_s) < 1, "of two streams that are opened in turn"
        with PeerProcess("n2", members):
            one.wait_connected("n2")
            ask(one, 1)


def test_dead_peers_cost_next_to_nothing() -> None:
    members = free_members(5)
    with Site(identity("n1"), members):
        began_s = time.process_time()
        first_s, *_, last_s = turn_away(members["n2"], 2 * MANY_ATTEMPTS)
        lasted_s = last_s - first_s
        assert lasted_s > 1, "dialled without a pause"
        assert time.process_time() - began_s < 0.2 * lasted_s


@pytest.mark.usefixtures("pings")
def test_a_peer_that_hangs_is_found_out_and_does_not_fill_the_memory() -> None:
    members = free_members()
    with (
        Site(identity("n1"), members, data_queue_bytes=1 << 20) as one,
        PeerProcess("n2", members) as other,
    ):
        one.wait_connected("n2")
        other.pause()
        for seq in range(1, 101):
            one.network.send("n2", Frames(CARD, bundled([copy_of(seq, bytes(1 << 20))])))
        # Nothing but its silence finds it out.
        wait_broken(one, 1)
        peer = one.network._peers["n2"]
        one.wait("all streams", lambda: not (peer._in or peer._out))
        counters = one.state("n2").counters
        assert counters.sent + counters.dropped == 100
        assert counters.dropped > 80
        other.resume()
        one.wait_connected("n2")
        ask(one, 1000)


def test_a_reset_of_one_direction_is_reported_to_both() -> None:
    members = free_members()
    with Wire(members["n2"]) as wire:
        dialled = members | {"n2": wire.address}
        with Site(identity("n1"), dialled) as one, Site(identity("n2"), members) as other:
            for times in range(1, 4):
                one.wait_connected("n2")
                other.wait_connected("n1")
                one.network.send("n2", Vote(times))
                other.network.send("n1", Vote(times))
                one.wait_for_messages(times)
                other.wait_for_messages(times)
                wire.reset()
                wait_broken(one, times)
                wait_broken(other, times)


def test_frames_and_beats_go_over_connections_of_their_own() -> None:
    members = free_members()
    with Wire(members["n2"]) as wire:
        dialled = members | {"n2": wire.address}
        with Site(identity("n1"), dialled) as one, Site(identity("n2"), members):
            one.wait_connected("n2")
            assert wire.connections == 2


def test_a_machine_that_died_and_was_booted_anew_waits_for_its_old_connections_only() -> None:
    members = free_members()
    with (
        Wire(members["n1"]) as from_n2,
        Wire(members["n2"]) as to_n2,
        Site(identity("n1"), members | {"n2": to_n2.address}) as one,
    ):
        with PeerProcess("n2", members | {"n1": from_n2.address}):
            one.wait_connected("n2")
            from_n2.silence()
            to_n2.silence()
        to_n2.mend()
        with Site(identity("n2", boot="next"), members) as again:
            again.wait_refused("n1", PeerReason.NODE_ID_TAKEN)
            from_n2.reset()  # what silence does, later
            one.wait_connected("n2")


@pytest.mark.usefixtures("pings")
def test_who_says_nothing_keeps_its_connections_by_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "PING_S", 0.1)
    monkeypatch.setattr(sockets, "SILENCE_S", 1.0)
    members = free_members()
    with Site(identity("n1"), members) as one, Site(identity("n2"), members) as other:

        def lasts() -> bool:
            """Whether nothing breaks for a while; where a machine stops for a second, it does."""
            one.wait_connected("n2")
            other.wait_connected("n1")
            broken = len(one.broken), len(other.broken)
            time.sleep(3 * sockets.SILENCE_S)  # it is about time that passes
            return (len(one.broken), len(other.broken)) == broken

        wait_until("it lasts", lasts)
        assert [*one.came, *other.came] == []
        assert one.state("n2").connection is Connection.CONNECTED


def test_who_is_silent_on_one_stream_is_found_out_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SILENCE_S", 0.2)
    members = free_members()
    host, _, port = members["n2"].rpartition(":")
    two = identity("n2")
    with (
        socket.create_server((host, int(port))) as server,
        Site(identity("n1"), members) as one,
        Raw(members["n1"]) as said,
    ):
        taken = [server.accept()[0] for _ in Stream]
        for end in taken:
            answer = encode_answer(two)
            end.sendall(PREFACE + head_of([answer]) + answer)
        one.wait("welcomed", lambda: len(one.network._peers["n2"]._out) == 2)
        said.greet(two, "n1")
        assert said.answer().welcome.node == "n1"
        said.wait_ended()
        one.wait("reported", lambda: one.broken)
        for end in taken:
            end.settimeout(60)
            while end.recv(1 << 16):  # its Hello, and pings
                pass
            end.close()


@pytest.mark.usefixtures("pings")
def test_who_lives_and_reads_no_more_is_found_out_and_does_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "_UNTAKEN_MS", 500)
    members, slow = free_members(), threading.Event()
    with (
        Site(identity("n1"), members, data_queue_bytes=1 << 20) as one,
        Site(identity("n2"), members) as other,
    ):
        one.wait_connected("n2")
        other.wait_connected("n1")
        before = one.state("n2").counters.connects

        def hold(_: str, message: object) -> None:
            if isinstance(message, Frames):
                slow.wait(60)

        other.on_message = hold
        for seq in range(1, 101):
            one.network.send("n2", Frames(CARD, bundled([copy_of(seq, bytes(1 << 20))])))
        assert one.state("n2").counters.dropped > 80

        def is_broken() -> bool:  # the kernel may have had room for all that was not dropped
            one.network.send("n2", Frames(CARD, bundled([copy_of(101, bytes(1 << 20))])))
            return bool(one.broken)

        one.wait("reported", is_broken)

        def is_heard() -> bool:  # what is sent while the connection breaks may go with it
            one.network.send("n2", Vote(1))
            return Vote(1) in other.from_("n1")

        # It is dialled again, and heartbeats never stopped.
        other.wait("heard", is_heard)
        one.wait("again", lambda: one.state("n2").counters.connects > before)
        slow.set()


@pytest.mark.usefixtures("pings")
def test_a_pulled_cable_is_found_out_and_a_mended_one_too() -> None:
    members = free_members()
    with Wire(members["n2"]) as wire:
        dialled = members | {"n2": wire.address}
        with Site(identity("n1"), dialled) as one, Site(identity("n2"), members) as other:
            one.wait_connected("n2")
            other.wait_connected("n1")
            wire.silence()
            wait_broken(one, 1)

            def is_heard() -> bool:
                other.network.send("n1", Vote(1))
                return Vote(1) in one.from_("n2")

            one.wait("the other direction goes on", is_heard)
            other.wait("reported", lambda: "n1" in other.broken)
            # The wire takes what goes into it; the peer that hears nothing has ended its streams.
            one.wait("noticed", lambda: not one.network._peers["n2"]._out)
            wire.mend()
            one.wait_connected("n2")
            one.network.send("n2", Vote(2))
            other.wait("heard", lambda: Vote(2) in other.from_("n1"))
