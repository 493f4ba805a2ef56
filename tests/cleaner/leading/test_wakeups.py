"""What wakes the cleaner's main thread, and what waits until a transaction may begin."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from delaywheel_replica.cleaner.outside.clocks import SystemClock
from delaywheel_replica.cleaner.wakeups import Wakeups
from delaywheel_replica.link import CommitSoon, Link, LinkMessage, Wake

LONG_S = 20.0
PAUSE_S = 0.2


@dataclass
class Bed:
    """A cleaner's wake-ups, and the server's end of its link."""

    wakeups: Wakeups
    server: Link
    taken: list[LinkMessage]

    def waited_s(self, wait_s: float, pause_s: float) -> float:
        """How long it waits."""
        began_s = time.monotonic()
        self.wakeups.wait(wait_s, pause_s)
        return time.monotonic() - began_s


@pytest.fixture
def bed() -> Iterator[Bed]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own, server = Link(one.detach()), Link(other.detach())
    taken: list[LinkMessage] = []
    wakeups = Wakeups(own, taken.append, SystemClock())
    yield Bed(wakeups, server, taken)
    wakeups.close()
    own.close()
    server.close()


def test_a_new_status_waits_until_a_transaction_may_begin(bed: Bed) -> None:
    bed.server.send(Wake())
    assert PAUSE_S <= bed.waited_s(LONG_S, PAUSE_S) < LONG_S
    assert bed.taken == [Wake()]


def test_statuses_one_after_another_extend_no_pause(bed: Bed) -> None:
    ended = threading.Event()

    def send() -> None:
        while not ended.wait(PAUSE_S / 20):
            bed.server.send(Wake())

    bed.server.send(Wake())
    bed.server.send(Wake())
    sender = threading.Thread(target=send)
    sender.start()
    try:
        assert PAUSE_S <= bed.waited_s(LONG_S, PAUSE_S) < LONG_S
        assert len(bed.taken) > 1
    finally:
        ended.set()
        sender.join()


def test_a_new_status_ends_a_rest_without_a_pause(bed: Bed) -> None:
    bed.server.send(Wake())
    assert bed.waited_s(LONG_S, 0) < LONG_S
    assert bed.taken == [Wake()]


def test_a_pause_that_is_over_holds_nothing_up(bed: Bed) -> None:
    threading.Timer(3 * PAUSE_S, bed.server.send, [Wake()]).start()
    assert 2 * PAUSE_S <= bed.waited_s(LONG_S, PAUSE_S) < LONG_S


def test_nothing_comes_and_the_rest_is_over(bed: Bed) -> None:
    assert bed.waited_s(PAUSE_S, LONG_S) >= PAUSE_S
    assert not bed.taken


@pytest.mark.parametrize("what", ["request", "request behind a status", "call", "answer"])
def test_anything_else_ends_the_pause(bed: Bed, what: str) -> None:
    answers, server = socket.socketpair()
    with answers, server:
        bed.wakeups.watch(answers.fileno())
        match what:
            case "request":
                bed.server.send(CommitSoon())
            case "request behind a status":
                bed.server.send(Wake())
                bed.server.send(CommitSoon())
            case "call":
                bed.server.send(Wake())
                bed.wakeups.wake()
            case _:
                bed.server.send(Wake())
                server.send(b"x")
        assert bed.waited_s(LONG_S, LONG_S) < LONG_S
    assert (CommitSoon() in bed.taken) == what.startswith("request")


def test_a_call_wakes_once(bed: Bed) -> None:
    bed.wakeups.wake()
    bed.wakeups.wake()
    assert bed.waited_s(LONG_S, 0) < LONG_S
    assert bed.waited_s(PAUSE_S, 0) >= PAUSE_S


def test_answers_that_are_not_watched_any_more_wake_nobody(bed: Bed) -> None:
    answers, server = socket.socketpair()
    with answers, server:
        bed.wakeups.watch(answers.fileno())
        server.send(b"x")
        assert bed.waited_s(LONG_S, 0) < LONG_S
        bed.wakeups.watch(None)
        assert bed.waited_s(PAUSE_S, 0) >= PAUSE_S


def test_a_server_that_is_gone_ends_the_wait(bed: Bed) -> None:
    bed.server.close()
    with pytest.raises(EOFError):
        bed.wakeups.wait(LONG_S, LONG_S)
