"""Bounds on what is received before it can be counted: calls, incoming messages, streams.

The length of a message is known only once it has arrived. So the number of messages that may arrive
at once is bounded; other calls' messages wait on the caller's side, except for one HTTP/2 window
each (see listening.py). A caller is one connection.

====================  ==========================  ============================================
bound                 beyond it                   why
====================  ==========================  ============================================
calls                 refused: BACKPRESSURE       each costs a task, and a window of bytes
messages on their     waits for its turn          each may become the longest that is accepted
way, of a caller, of
all
streams of a caller,  refused: BACKPRESSURE       a stream's next message may come at any time
of all
====================  ==========================  ============================================

A call whose message does not arrive within ``ARRIVAL_S`` is refused; within ``PATIENCE_S`` if
others wait for their turn.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from delaywheel.reasons import Reason
from delaywheel_replica.server.node.refusals import RefusedError

CALLS: Final = 4_096
ARRIVING: Final = 16
ARRIVING_OF_CALLER: Final = 4
STREAMS: Final = 32
STREAMS_OF_CALLER: Final = 2
ARRIVAL_S: Final = 30.0
PATIENCE_S: Final = 5.0

_Message = TypeVar("_Message")


class Reception:
    """Counts calls. For the event loop's thread.

    Attributes:
        calls: The number of open calls.
    """

    def __init__(
        self,
        *,
        calls: int = CALLS,
        arriving: int = ARRIVING,
        arriving_of_caller: int = ARRIVING_OF_CALLER,
        arrival_s: float = ARRIVAL_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Begins without calls; the defaults are those of a node."""
        self._max_calls = calls
        self._max_arriving = arriving
        self._max_of_caller = arriving_of_caller
        self._arrival_s = arrival_s
        self._patience_s = patience_s
        self.calls = 0
        self._streams: Counter[str] = Counter()
        self._arriving: Counter[str] = Counter()
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()
        # Calls that hold a turn, and until when they may if others wait.
        self._turns: dict[asyncio.Timeout, float] = {}

    def begin_call(self) -> Callable[[], None]:
        """Counts a call; the returned function ends it.

        Raises:
            RefusedError: BACKPRESSURE.
        """
        if self.calls >= self._max_calls:
            raise RefusedError(Reason.BACKPRESSURE, f"{self.calls} calls are open on this node")
        self.calls += 1
        return self._end_call

    def begin_stream(self, caller: str) -> Callable[[], None]:
        """Counts a stream; the returned function ends it.

        Raises:
            RefusedError: BACKPRESSURE.
        """
        if self._streams[caller] >= STREAMS_OF_CALLER or self._streams.total() >= STREAMS:
            raise RefusedError(
                Reason.BACKPRESSURE,
                f"At most {STREAMS_OF_CALLER} streams on one connection, {STREAMS} on this node",
            )
        self._streams[caller] += 1
        return lambda: _less(self._streams, caller)

    async def receive(self, caller: str, read: Callable[[], Awaitable[_Message]]) -> _Message:
        """Reads the message of a call when it is its turn.

        Raises:
            RefusedError: BACKPRESSURE: it did not arrive.
        """
        if self._has_turn(caller):
            self._arriving[caller] += 1
        else:
            await self._turn(caller)
        try:
            return await self._within_time(read)
        finally:
            self._end_turn(caller)

    def _end_call(self) -> None:
        self.calls -= 1

    async def _within_time(self, read: Callable[[], Awaitable[_Message]]) -> _Message:
        now = asyncio.get_running_loop().time()
        patience_ends = now + self._patience_s
        ends = patience_ends if self._waiting else now + self._arrival_s
        limit = asyncio.timeout_at(ends)
        try:
            async with limit:
                self._turns[limit] = patience_ends
                return await read()
        except TimeoutError:
            raise RefusedError(Reason.BACKPRESSURE, "The request did not arrive in time") from None
        finally:
            self._turns.pop(limit, None)

    def _has_turn(self, caller: str) -> bool:
        has_room = self._arriving.total() < self._max_arriving
        return has_room and self._arriving[caller] < self._max_of_caller

    async def _turn(self, caller: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((caller, turn))
        for limit, patience_ends in self._turns.items():
            if not limit.expired():
                limit.reschedule(patience_ends)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove((caller, turn))
            else:  # it was given just now
                self._end_turn(caller)
            raise

    def _end_turn(self, caller: str) -> None:
        """Ends a turn and admits the next callers; a turn's time counts from its start."""
        _less(self._arriving, caller)
        for waiting, turn in list(self._waiting):
            if not turn.done() and self._has_turn(waiting):
                self._waiting.remove((waiting, turn))
                self._arriving[waiting] += 1
                turn.set_result(None)


def _less(counter: Counter[str], caller: str) -> None:
    counter[caller] -= 1
    if not counter[caller]:
        del counter[caller]
