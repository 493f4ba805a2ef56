"""Peers that die, hang, or are cut off; real processes and real connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial

from delaywheel.framecopy import FrameCopy
from delaywheel.identity import WheelId
from delaywheel_replica.core.peers import Applied, Frames, Vote, VoteAsk, WheelCard
from delaywheel_replica.peers.states import Connection, PeerReason
from local.kafka import free_ports
from support.peer_process import FAILED, PeerProcess
from support.peer_site import Site, identity
from support.wire import Wire

WHEEL = WheelId("n1", 1)
# More than it takes until the pause between them grows no more.
MANY_ATTEMPTS = 10
CARD = WheelCard(WHEEL, {"n1": "disk-n1", "n2": "disk-n2"}, 2, 7200)


def members_of_two() -> dict[str, str]:
    return {f"n{n}": f"127.0.0.1:{port}" for n, port in enumerate(free_ports(2), start=1)}


def seconds(what: Callable[[], object]) -> float:
    began = time.monotonic()
    what()
    return time.monotonic() - began


def turn_away(address: str, times: int) -> None:
    """Takes so many connections at the address of a dead peer, and ends each at once."""
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))) as server:
        server.settimeout(20)
        for _ in range(times):
            server.accept()[0].close()


def ask(site: Site, number: int) -> None:
    """Both streams work, in both directions."""
    applied = Applied(WHEEL, "disk-n2", "boot", number)
    site.network.send("n2", VoteAsk(number, 1))
    site.network.send("n2", Frames(CARD, (FrameCopy(number, bytes(16), b"frame"),)))
    site.wait("answers", lambda: {Vote(number), applied} <= {*site.from_("n2")})


def test_a_killed_peer_is_told_at_once_and_found_again() -> None:
    members = members_of_two()
    with Site(identity("n1"), members) as one:
        for life in range(1, 4):
            with PeerProcess("n2", members) as other:
                one.wait_connected("n2")
                ask(one, life)
                assert one.broken == ["n2"] * (life - 1)
                other.kill()
                told_s = seconds(partial(wait_broken, one, life))
                assert told_s < 0.3
            assert one.state("n2").connection is Connection.CONNECTING
            assert one.state("n2").counters.breaks == life


def wait_broken(site: Site, times: int) -> None:
    site.wait(f"told {times} times", lambda: len(site.broken) == times)


def test_a_process_whose_main_thread_fails_is_not_kept_by_its_peers() -> None:
    members = members_of_two()
    with Site(identity("n1"), members) as one, PeerProcess("n2", members) as other:
        one.wait_connected("n2")
        assert other.fail(20) == FAILED
        wait_broken(one, 1)


def test_a_peer_that_starts_again_is_connected_within_half_a_second() -> None:
    members = members_of_two()
    with Site(identity("n1"), members) as one:
        with PeerProcess("n2", members):
            one.wait_connected("n2")
        wait_broken(one, 1)
        # It was away for long: pauses between attempts have grown as far as they do.
        turn_away(members["n2"], 2 * MANY_ATTEMPTS)
        with PeerProcess("n2", members):
            assert seconds(lambda: one.wait_connected("n2")) < 0.5
            ask(one, 1)


def test_dead_peers_cost_next_to_nothing() -> None:
    members = {f"n{n}": f"127.0.0.1:{port}" for n, port in enumerate(free_ports(5), start=1)}
    with Site(identity("n1"), members):
        began_s = time.process_time()
        lasted_s = seconds(lambda: turn_away(members["n2"], 2 * MANY_ATTEMPTS))
        assert lasted_s > 1, "dialled without a pause"
        assert time.process_time() - began_s < 0.1 * lasted_s


def test_another_storage_after_a_death_is_taken() -> None:
    members = members_of_two()
    with Site(identity("n1"), members) as one:
        with PeerProcess("n2", members):
            one.wait_connected("n2")
        with PeerProcess("n2", members, storage="emptied"):
            one.wait_connected("n2")
            assert one.state("n2").storage == "emptied"


def test_a_peer_that_hangs_is_found_out_and_does_not_fill_the_memory() -> None:
    members = members_of_two()
    with (
        Site(identity("n1"), members, data_queue_bytes=1 << 20) as one,
        PeerProcess("n2", members) as other,
    ):
        one.wait_connected("n2")
        other.pause()
        for seq in range(1, 101):
            one.network.send("n2", Frames(CARD, (FrameCopy(seq, bytes(16), bytes(1 << 20)),)))
        # Pings each second, two seconds' patience.
        assert seconds(partial(wait_broken, one, 1)) < 6
        one.wait("all streams", lambda: one.network._peers["n2"]._in == {})
        counters = one.state("n2").counters
        assert counters.sent + counters.dropped == 100
        assert counters.dropped > 80
        other.resume()
        one.wait_connected("n2")
        ask(one, 1000)


def test_a_reset_of_one_direction_is_told_to_both() -> None:
    members = members_of_two()
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
                told_s = seconds(partial(wait_broken, one, times))
                wait_broken(other, times)
                assert told_s < 0.3


def test_frames_and_beats_go_over_connections_of_their_own() -> None:
    members = members_of_two()
    with Wire(members["n2"]) as wire:
        dialled = members | {"n2": wire.address}
        with Site(identity("n1"), dialled) as one, Site(identity("n2"), members):
            one.wait_connected("n2")
            assert wire.connections == 2


def test_a_machine_that_died_and_was_booted_anew_waits_for_its_old_connections_only() -> None:
    members = members_of_two()
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
            # Pings find the old ones out; and a refused node comes again after a second.
            assert seconds(lambda: one.wait_connected("n2")) < 6


def test_a_pulled_cable_is_found_out_and_a_mended_one_too() -> None:
    members = members_of_two()
    with Wire(members["n2"]) as wire:
        dialled = members | {"n2": wire.address}
        with Site(identity("n1"), dialled) as one, Site(identity("n2"), members) as other:
            one.wait_connected("n2")
            other.wait_connected("n1")
            wire.silence()
            assert seconds(partial(wait_broken, one, 1)) < 6
            # The other direction goes on: what n2 says is heard.
            other.network.send("n1", Vote(1))
            one.wait_for_messages(1)
            other.wait("told", lambda: "n1" in other.broken)
            wire.mend()
            one.wait_connected("n2")
            one.network.send("n2", Vote(2))
            other.wait("heard", lambda: Vote(2) in other.from_("n1"))
