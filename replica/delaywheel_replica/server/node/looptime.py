"""Limits how long the event loop works on requests in one pass.

Reading a small request takes a millisecond at most, and is not worth the hand-over to a thread. But
hundreds may arrive in the same pass of the loop, and everything else waits until it is over: the
cleaner's messages, health checks, other callers. So a pass does some of them, and leaves the rest,
in order, to the next ones.
"""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Final, TypeVar

PASS_S: Final = 0.02

_Made = TypeVar("_Made")


class LoopTime:
    """Counts the time spent in a pass. For the event loop's thread."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """Begins with nothing done.

        Args:
            clock: In seconds.
        """
        self._clock = clock
        self._spent_s = 0.0
        self._is_counting = False

    async def do(self, work: Callable[[], _Made]) -> _Made:
        """Does some work, in this pass or a later one."""
        while self._spent_s >= PASS_S:  # noqa: ASYNC110 - so that waiting work keeps its order
            await asyncio.sleep(0)
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._end_pass)
        began_s = self._clock()
        try:
            return work()
        finally:
            self._spent_s += self._clock() - began_s

    def _end_pass(self) -> None:
        """Begins the next pass."""
        self._spent_s = 0.0
        self._is_counting = False
