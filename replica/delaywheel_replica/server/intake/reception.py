"""Bounds on what is received before it can be counted: calls, incoming messages, streams.

The length of a message is known only once it has arrived. So the number of messages that may arrive
at once is bounded; other calls' messages wait on the caller's side, except for one HTTP/2 window
each (see listening.py). Whose turn it is, `Arrivals` decides. A caller is one connection.

====================  ==========================  ============================================
bound                 beyond it                   why
====================  ==========================  ============================================
calls                 refused: BACKPRESSURE; or   each costs a task, and a window of bytes
                      one that waits is, of the
                      caller with most of them
messages on their     waits for its turn          each may become the longest that is accepted
way, of a caller, of
all
streams of a caller,  refused: BACKPRESSURE       a stream's next message may come at any time
of all
====================  ==========================  ============================================

Health checks have a reception of their own, with watches in place of streams: what other calls do
takes nothing from them.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeVar

from delaywheel.reasons import Reason
from delaywheel_replica.server.intake.arrivals import Arrival, ArrivalBounds, Arrivals
from delaywheel_replica.server.node.refusals import RefusedError

_LOOK_S: Final = 0.05
_LOOK_AT_REST_S: Final = 10.0
"""How often arrivals are looked at, while a call waits for its turn and while none does."""

_Message = TypeVar("_Message")


class CallBounds(NamedTuple):
    """How much may be received at once.

    Attributes:
        calls: Open calls, of all callers.
        arrivals: Messages on their way.
        streams: Calls that stay open, of all callers.
        streams_of_caller: The same of one caller.
    """

    calls: int
    arrivals: ArrivalBounds
    streams: int
    streams_of_caller: int


CALLS: Final = CallBounds(4_096, ArrivalBounds(16, 4, slow=12), 32, 2)
HEALTH: Final = CallBounds(2_048, ArrivalBounds(4, 2, slow=2), 1_024, 4)
"""The bounds of a node, for all other calls and for health checks."""


class Reception:
    """Counts calls. For the event loop's thread.

    Attributes:
        calls: The number of open calls.
    """

    def __init__(self, bounds: CallBounds = CALLS) -> None:
        self._bounds: Final = bounds
        self._arrivals: Final = Arrivals(bounds.arrivals)
        self._streams: Final[Counter[str]] = Counter()
        self._look: asyncio.TimerHandle | None = None
        self.calls = 0

    def begin_call(self, caller: str) -> Callable[[], None]:
        """Counts a call; the returned function ends it.

        Raises:
            RefusedError: BACKPRESSURE.
        """
        if self.calls >= self._bounds.calls and not self._arrivals.make_room_for(caller):
            raise RefusedError(Reason.BACKPRESSURE, f"{self.calls} calls are open on this node")
        self.calls += 1
        return self._end_call

    def begin_stream(self, caller: str) -> Callable[[], None]:
        """Counts a call that stays open; the returned function ends it.

        Raises:
            RefusedError: BACKPRESSURE.
        """
        of_caller, most = self._bounds.streams_of_caller, self._bounds.streams
        if self._streams[caller] >= of_caller or self._streams.total() >= most:
            raise RefusedError(
                Reason.BACKPRESSURE,
                f"At most {of_caller} streams on one connection, {most} on this node",
            )
        self._streams[caller] += 1
        return lambda: _less(self._streams, caller)

    async def receive(self, caller: str, read: Callable[[], Awaitable[_Message]]) -> _Message:
        """Reads the message of a call when it is its turn.

        Raises:
            RefusedError: BACKPRESSURE: it did not arrive.
        """
        loop = asyncio.get_running_loop()
        arrival = self._arrivals.begin(caller, loop.time())
        limit = asyncio.timeout(None)
        arrived = False
        try:
            async with limit:
                arrival.on_refused = lambda: limit.reschedule(loop.time())
                self._look_soon(loop)
                if not arrival.is_read:
                    await _turn(arrival, loop)
                message = await read()
                arrived = True
                return message
        except TimeoutError:
            raise RefusedError(
                Reason.BACKPRESSURE, "The request did not arrive while other calls waited"
            ) from None
        finally:
            self._arrivals.end(arrival, loop.time(), arrived=arrived)

    def _end_call(self) -> None:
        self.calls -= 1

    def _look_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Has arrivals looked at while there are any: often while a call waits."""
        after_s = _LOOK_S if self._arrivals.waiting else _LOOK_AT_REST_S
        if self._look is not None:
            if self._look.when() <= loop.time() + after_s:
                return
            self._look.cancel()
        self._look = loop.call_later(after_s, self._look_now, loop)

    def _look_now(self, loop: asyncio.AbstractEventLoop) -> None:
        self._look = None
        self._arrivals.look(loop.time())
        if not self._arrivals.is_idle:
            self._look_soon(loop)


async def _turn(arrival: Arrival, loop: asyncio.AbstractEventLoop) -> None:
    """Waits until a message may be read."""
    turn: asyncio.Future[None] = loop.create_future()

    def begin() -> None:
        if not turn.done():
            turn.set_result(None)

    arrival.on_read = begin
    await turn


def _less(counter: Counter[str], caller: str) -> None:
    counter[caller] -= 1
    if not counter[caller]:
        del counter[caller]
