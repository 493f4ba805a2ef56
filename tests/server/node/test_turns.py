"""Work on one thread, in turns by who asks for it."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from threading import Event

from delaywheel_replica.process.round_robin import RoundRobin
from delaywheel_replica.server.node.turns import Turns, TurnsAtOnce


async def test_who_asks_for_much_waits_for_itself() -> None:
    turns, goes_on, done = Turns("test"), Event(), list[str]()
    try:
        first = asyncio.create_task(turns.take("a", goes_on.wait))
        asked = [
            asyncio.create_task(turns.take(sharer, lambda sharer=sharer: done.append(sharer)))  # type: ignore[misc]
            for sharer in "aaaabbc"
        ]
        await asyncio.sleep(0)
        asked[1].cancel()
        await asyncio.sleep(0)  # the thread hears of it
        goes_on.set()
        await asyncio.gather(first, *asked, return_exceptions=True)
    finally:
        goes_on.set()
        turns.close()
    assert "".join(done) == "bcabaa"


async def test_what_fails_fails_for_who_asked() -> None:
    turns = Turns("test")
    try:
        failed = asyncio.create_task(turns.take("a", lambda: 1 // 0))
        assert await turns.take("a", lambda: 1) == 1
        assert isinstance(await asyncio.gather(failed, return_exceptions=True), list)
        assert isinstance(failed.exception(), ZeroDivisionError)
    finally:
        turns.close()


async def test_who_asks_for_much_at_once_waits_for_itself() -> None:
    turns, done, holding = TurnsAtOnce(2), list[str](), asyncio.Semaphore(0)

    async def work(sharer: str) -> None:
        async with turns.turn(sharer):
            done.append(sharer)
            await holding.acquire()

    asked = [asyncio.create_task(work(sharer)) for sharer in "aaaaaa"]
    await asyncio.sleep(0)
    asked += [asyncio.create_task(work(sharer)) for sharer in "bc"]
    await asyncio.sleep(0)
    assert done == ["a", "a"]
    asked[2].cancel()  # who leaves has no turn
    asked[0].cancel()  # and whose turn it is, ends it
    for _ in asked:
        holding.release()
    await asyncio.gather(*asked, return_exceptions=True)
    assert "".join(done) == "aabcaaa"


async def test_a_turn_goes_on_to_the_next_if_its_caller_has_just_left() -> None:
    turns = TurnsAtOnce(1)

    async def work() -> str:
        async with turns.turn("a"):
            return "done"

    async with turns.turn("a"):
        left, next_one = asyncio.create_task(work()), asyncio.create_task(work())
        await asyncio.sleep(0)
    left.cancel()  # it was told that it is its turn, and has not run since
    assert await next_one == "done"
    assert await work() == "done"


def test_another_thread_sees_what_is_next_while_it_changes() -> None:
    """A scrape of the metrics asks how long the first cancel of each sharer has waited."""
    waiting, ended = RoundRobin[int](), threading.Event()

    def change() -> None:
        while not ended.is_set():
            for number in range(40):
                waiting.add(number % 20, number)
            while waiting:
                waiting.take()

    changing, interval_s = threading.Thread(target=change), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    changing.start()
    try:
        until_s = time.monotonic() + 1.5
        while time.monotonic() < until_s:
            waiting.firsts()
    finally:
        ended.set()
        changing.join()
        sys.setswitchinterval(interval_s)
