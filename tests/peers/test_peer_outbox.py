"""Which messages are sent, kept and dropped; the socket takes as much as the test allows."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import count
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel_replica.peers import sockets
from delaywheel_replica.peers.framing import IncomingStream, Part
from delaywheel_replica.peers.outbox import Outbox
from delaywheel_replica.peers.sockets import Channel
from delaywheel_replica.peers.states import Counters

HEAD = 4


class Taking:
    """Stands for a socket whose kernel has a given room."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.took = bytearray()
        self.calls = 0
        self.is_broken = False

    def sendmsg(self, buffers: list[Part], _: object, flags: int) -> int:
        assert flags == socket.MSG_DONTWAIT, "nobody waits"
        self.calls += 1
        if self.is_broken:
            raise ConnectionResetError
        if not self.room:
            raise BlockingIOError
        data = b"".join(buffers)[: self.room]
        self.took += data
        self.room -= len(data)
        return len(data)

    @property
    def messages(self) -> list[bytes]:
        """The messages as their reader gets them."""
        left = memoryview(bytes(self.took))

        def receive_into(view: memoryview) -> int:
            nonlocal left
            length = min(len(view), len(left))
            view[:length] = left[:length]
            left = left[length:]
            return length

        return list(iter(IncomingStream(receive_into, 1 << 20).message, None))


class Bench:
    """An outbox and its environment."""

    def __init__(self, room: int = 0, max_bytes: int = 1 << 20) -> None:
        self.socket = Taking(room)
        self.tally = Counters()
        self.woken = 0
        channel = Channel(cast("socket.socket", self.socket), "a:1")
        self.outbox = Outbox(channel, max_bytes, self.tally, wake=self._wake)

    def put(self, *parts: bytes, is_heartbeat: bool = False) -> None:
        self.outbox.put(parts, is_heartbeat=is_heartbeat)

    def make_room(self, room: int = 1 << 30) -> list[bytes]:
        """Lets this much more be taken; returns everything taken from the beginning."""
        self.socket.room += room
        self.outbox.flush()
        return self.socket.messages

    def _wake(self) -> None:
        self.woken += 1


def left_of(puts: list[tuple[bytes, bool]]) -> list[bytes]:
    """All messages, except heartbeats that a later one follows."""
    last_heartbeat = max(
        (n for n, (_, is_heartbeat) in enumerate(puts) if is_heartbeat), default=None
    )
    return [
        data
        for n, (data, is_heartbeat) in enumerate(puts)
        if not is_heartbeat or n == last_heartbeat
    ]


puts_of_chance = st.lists(st.tuples(st.binary(min_size=1, max_size=9), st.booleans()))


@given(puts_of_chance)
def test_where_there_is_room_all_goes_at_once_and_nobody_is_woken(
    puts: list[tuple[bytes, bool]],
) -> None:
    bench = Bench(room=1 << 30)
    for data, is_heartbeat in puts:
        bench.put(data, is_heartbeat=is_heartbeat)
    assert bench.socket.messages == [data for data, _ in puts]
    assert bench.socket.calls == len(puts)
    assert (bench.woken, bench.tally.superseded, bench.tally.dropped) == (0, 0, 0)
    assert bench.tally.sent == len(puts)


@given(puts_of_chance)
def test_others_keep_their_order_and_of_beats_the_newest_stays_in_its_place(
    puts: list[tuple[bytes, bool]],
) -> None:
    bench = Bench()
    for data, is_heartbeat in puts:
        bench.put(data, is_heartbeat=is_heartbeat)
    left = left_of(puts)
    assert bench.make_room() == left
    assert bool(bench.woken) == bool(puts)
    tally = bench.tally
    assert tally.sent == len(left)
    assert tally.superseded == len(puts) - len(left)
    assert (tally.dropped, tally.sent_bytes) == (0, sum(map(len, left)))


@given(st.lists(st.tuples(st.lists(st.binary(max_size=9), min_size=1), st.booleans())), st.data())
def test_however_little_is_taken_messages_stay_whole_and_in_order(
    puts: list[tuple[list[bytes], bool]], draw: st.DataObject
) -> None:
    bench = Bench()
    numbers: Iterator[int] = count(1)
    reported: list[tuple[bytes, bool]] = []
    for parts, is_heartbeat in puts:
        number = b"%d " % next(numbers)
        reported.append((number + b"".join(parts), is_heartbeat))
        bench.put(number, *parts, is_heartbeat=is_heartbeat)
        bench.make_room(draw.draw(st.integers(0, 12)))
    got = bench.make_room()
    # Those that are missing are heartbeats, and a newer one came.
    missing = [n for n, (data, _) in enumerate(reported) if data not in got]
    assert got == [data for n, (data, _) in enumerate(reported) if n not in missing]
    heartbeats = [n for n, (_, is_heartbeat) in enumerate(reported) if is_heartbeat]
    assert set(missing) <= set(heartbeats[:-1])
    assert bench.tally.superseded == len(missing)
    assert bench.tally.sent == len(got)


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans())), st.integers(1, 100))
def test_never_more_waits_than_the_bound_but_for_one_message(
    puts: list[tuple[int, bool]], bound: int
) -> None:
    bench = Bench(max_bytes=bound)
    for size, is_heartbeat in puts:
        bench.put(bytes(size), is_heartbeat=is_heartbeat)
    waiting = bench.make_room()
    assert len(waiting) == len(puts) - bench.tally.dropped - bench.tally.superseded
    assert sum(map(len, waiting)) <= bound or len(waiting) == 1
    assert bool(waiting) == bool(puts)
    # What was taken makes room again.
    bench.put(bytes(bound), is_heartbeat=False)
    assert bench.make_room()[len(waiting) :] == [bytes(bound)]


def test_a_beat_that_has_begun_is_finished_before_a_newer_one() -> None:
    bench = Bench(room=HEAD + 2)
    bench.put(b"begun", is_heartbeat=True)
    bench.put(b"between")
    bench.put(b"stale", is_heartbeat=True)
    bench.put(b"newest", is_heartbeat=True)
    assert bench.make_room() == [b"begun", b"between", b"newest"]
    assert (bench.tally.superseded, bench.tally.sent, bench.tally.dropped) == (1, 3, 0)


def test_what_waits_is_woken_for_once_and_not_overtaken() -> None:
    bench = Bench()
    bench.put(b"one")
    assert bench.woken == 1
    bench.socket.room = 1 << 30
    bench.put(b"two")
    assert (bench.woken, bench.socket.messages) == (1, [])
    assert bench.make_room() == [b"one", b"two"]


def test_more_parts_than_the_kernel_takes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_MOST_BUFFERS", 3)
    bench = Bench(room=1 << 30)
    bench.put(*(b"%d" % n for n in range(10)))
    assert bench.socket.messages == [b"0123456789"]
    assert bench.woken == 0


def test_a_real_kernel_takes_as_many_parts_as_are_given_to_it() -> None:
    ours, theirs = socket.socketpair()
    parts = [b"x"] * (2 * sockets._MOST_BUFFERS)
    with ours, theirs:
        outbox = Outbox(Channel(ours, ""), 1 << 20, Counters(), wake=lambda: None)
        outbox.put(parts, is_heartbeat=False)
        assert not outbox.waits
        ours.close()
        sent = HEAD + len(parts)
        assert len(theirs.recv(sent, socket.MSG_WAITALL)) == sent


def test_a_ping_is_said_when_nothing_else_is() -> None:
    bench = Bench(room=1 << 30)
    assert 0 < bench.outbox.ping(1_000) <= 1_000
    assert bench.socket.calls == 0
    bench.outbox._sent_s -= 1_000  # so much time has passed
    assert bench.outbox.ping(1_000) == 1_000
    assert bench.socket.messages == [b""]
    assert bench.outbox.ping(1_000) < 1_000
    assert bench.socket.calls == 1
    assert (bench.tally.sent, bench.tally.dropped) == (0, 0)


def test_a_ping_neither_waits_beside_others_nor_is_counted() -> None:
    bench = Bench()
    bench.put(b"waits")
    bench.outbox._sent_s -= 1_000
    assert bench.outbox.ping(1_000) == 1_000
    assert bench.make_room() == [b"waits"]
    bench.socket.room = 2
    bench.outbox._sent_s -= 1_000
    bench.outbox.ping(1_000)  # a part of it is sent
    bench.outbox.close()
    assert (bench.tally.sent, bench.tally.dropped) == (1, 0)


def test_what_still_waits_when_it_is_closed_was_dropped() -> None:
    bench = Bench(room=HEAD + 1)
    bench.put(b"one")
    bench.put(b"beat", is_heartbeat=True)
    bench.outbox.close()
    bench.put(b"late")
    assert not bench.outbox.waits
    assert bench.make_room() == []
    tally = bench.tally
    assert (tally.sent, tally.dropped, tally.dropped_bytes) == (0, 3, 11)


def test_what_finds_the_connection_broken_is_dropped_without_a_report() -> None:
    """The stream's own thread notices."""
    bench = Bench()
    bench.put(b"waits")
    bench.socket.is_broken = True
    assert bench.make_room() == []
    bench.put(b"late")
    assert (bench.socket.calls, bench.tally.dropped, bench.tally.sent) == (2, 2, 0)
