"""Work on one thread, in turns by who asks for it."""

from __future__ import annotations

import asyncio
from threading import Event

from delaywheel_replica.server.node.turns import Turns


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
        goes_on.set()
        await asyncio.gather(first, *asked, return_exceptions=True)
    finally:
        goes_on.set()
        turns.close()
    assert "".join(done) in {"abcbaa", "bcabaa"}


async def test_what_fails_fails_for_who_asked() -> None:
    turns = Turns("test")
    try:
        failed = asyncio.create_task(turns.take("a", lambda: 1 // 0))
        assert await turns.take("a", lambda: 1) == 1
        assert isinstance(await asyncio.gather(failed, return_exceptions=True), list)
        assert isinstance(failed.exception(), ZeroDivisionError)
    finally:
        turns.close()
