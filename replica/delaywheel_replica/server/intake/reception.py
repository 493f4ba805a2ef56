"""Bounds on what is received before it can be counted: calls, incoming messages, streams.

All bounds of what callers make a node hold. A caller is one connection; what all share is shared by
principal, where callers have one: who opens many connections gets no more.

=====================  =============================  ===============  ===========================
bound                  shared out                     counted by       beyond it
=====================  =============================  ===============  ===========================
calls                  of a connection, by gRPC; a    `Reception`      refused; if all are taken, a
                       principal leaves as many to                     waiting one of who has most
                       others as it takes                              of them is, in its place
messages on their way  of a connection, of all        `Arrivals`       waits for its turn
streams                of a connection; half of all   `Reception`      an idle one is ended in its
                       to a principal                                  place, or it is refused
bytes in flight        of a connection, of all; a     `Admission`      refused; a stream is read
                       principal holds twice what is                   more slowly; who reads no
                       free, or its quota                              answers is cut off
=====================  =============================  ===============  ===========================

Refused is BACKPRESSURE, and QUOTA_EXCEEDED for a quota. The length of a message is known only once
it has arrived: so it is their number that is bounded before; the others wait on the caller's side,
except for one HTTP/2 window each (listening.py).

A stream is idle once it has neither asked nor been answered for `_IDLE_S`, and waits for no answer.
Streams that never sent anything are ended first, then those of the sharer with most streams, then
the one that has been idle for longest.

Health checks have a reception of their own at each port, with watches in place of streams: what
other calls do takes nothing from them. So has the list of services (reflection), whose calls are
streams, for all ports: whoever reaches one may ask for it, and must not take those of senders.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Final, NamedTuple, TypeVar

from delaywheel.reasons import Reason
from delaywheel_replica.quantities import counted
from delaywheel_replica.server.access.callers import CallOrigin
from delaywheel_replica.server.access.shared_room import SharedRoom
from delaywheel_replica.server.intake.arrivals import ArrivalBounds, Arrivals
from delaywheel_replica.server.node.refusals import RequestRefusedError

_LOOK_S: Final = 0.05
_IDLE_LOOK_S: Final = 10.0
"""How often arrivals are looked at, while a call waits for its turn and while none does."""

_IDLE_S: Final = 1.0
"""A stream that has done nothing for so long makes room for another."""

_Message = TypeVar("_Message")


class CallBounds(NamedTuple):
    """How many calls may be open, how many of them streams, and how many messages may arrive."""

    calls: int
    arrivals: ArrivalBounds
    streams: int
    streams_of_caller: int


CALLS: Final = CallBounds(4_096, ArrivalBounds(16, 4, slow=12), 32, 2)
HEALTH: Final = CallBounds(2_048, ArrivalBounds(4, 2, slow=2), 1_024, 4)
REFLECTION: Final = CALLS._replace(calls=64, streams=2)
"""The bounds of a node, for all other calls, and for lists of services; of a port for checks."""


class OpenStream:
    """A call that stays open. For the event loop's thread.

    Attributes:
        caller: Whose it is.
        is_ended: Whether it had to make room.
        on_ended: Called then.
    """

    __slots__ = ("_has_sent", "_moved_s", "_now", "_unanswered", "caller", "is_ended", "on_ended")

    def __init__(self, caller: CallOrigin, now: Callable[[], float]) -> None:
        self.caller: Final = caller
        self.is_ended = False
        self.on_ended: Callable[[], object] = lambda: None
        self._now = now
        self._moved_s = now()
        self._unanswered = 0
        self._has_sent = False

    def received(self) -> None:
        """Notes a request."""
        self._unanswered += 1
        self._has_sent = True
        self._moved_s = self._now()

    def answered(self) -> None:
        """Notes an answer."""
        self._unanswered = max(0, self._unanswered - 1)
        self._moved_s = self._now()

    @property
    def is_idle(self) -> bool:
        """Whether it may be ended."""
        return not self._unanswered and self._now() - self._moved_s >= _IDLE_S

    def worth(self, streams_of_sharer: int) -> tuple[bool, int, float]:
        """Returns a key by which the stream that should be ended first is the least."""
        return self._has_sent, -streams_of_sharer, self._moved_s


class Reception:
    """Counts calls. For the event loop's thread."""

    def __init__(self, bounds: CallBounds = CALLS) -> None:
        self._bounds: Final = bounds
        self._arrivals: Final = Arrivals(bounds.arrivals)
        self._streams: Final[set[OpenStream]] = set()
        self._look: asyncio.TimerHandle | None = None
        self._room: Final = SharedRoom(bounds.calls)

    @property
    def calls(self) -> int:
        """The number of open calls."""
        return self._room.taken

    def begin_call(self, caller: CallOrigin) -> Callable[[], None]:
        """Counts a call; the returned function ends it.

        Raises:
            RequestRefusedError: BACKPRESSURE.
        """
        opened, sharer = self.calls, caller.sharer
        if opened >= self._bounds.calls:
            is_refused = not self._arrivals.make_room_for(caller)
        else:  # of a connection gRPC takes few
            is_refused = bool(caller.principal) and not self._room.left(sharer)
        if is_refused:
            text = f"{counted(opened, 'call')} open on this node; a principal leaves others as many"
            raise RequestRefusedError(Reason.BACKPRESSURE, text)
        self._room.take(sharer)
        return partial(self._room.give_back, sharer)

    def begin_stream(self, caller: CallOrigin, now: Callable[[], float]) -> OpenStream:
        """Counts a call that stays open, until `end_stream`.

        Args:
            caller: Whose it is.
            now: A clock, in seconds.

        Raises:
            RequestRefusedError: BACKPRESSURE.
        """
        most, of_caller = self._bounds.streams, self._bounds.streams_of_caller
        own = sum(stream.caller.address == caller.address for stream in self._streams)
        shared = [stream for stream in self._streams if stream.caller.sharer == caller.sharer]
        if (
            own >= of_caller
            or (caller.principal and len(shared) >= most // 2 and not self._ends_one_of(shared))
            or (len(self._streams) >= most and not self._ends_one_of(self._streams))
        ):
            raise RequestRefusedError(
                Reason.BACKPRESSURE,
                f"At most {of_caller} streams on one connection, {most // 2} of one principal,"
                f" {most} on this node",
            )
        stream = OpenStream(caller, now)
        self._streams.add(stream)
        return stream

    def end_stream(self, stream: OpenStream) -> None:
        """Counts a stream no longer."""
        self._streams.discard(stream)

    def _ends_one_of(self, streams: Iterable[OpenStream]) -> bool:
        """Ends the least needed of those that are idle; returns False if none is."""
        idle = [stream for stream in streams if stream.is_idle]
        if not idle:
            return False
        of_sharer = Counter(stream.caller.sharer for stream in self._streams)
        first = min(idle, key=lambda stream: stream.worth(of_sharer[stream.caller.sharer]))
        self._streams.remove(first)
        first.is_ended = True
        first.on_ended()
        return True

    async def receive(
        self, caller: CallOrigin, read: Callable[[], Awaitable[_Message]]
    ) -> _Message:
        """Reads the message of a call when it is its turn.

        Raises:
            RequestRefusedError: BACKPRESSURE: it did not arrive.
        """
        loop = asyncio.get_running_loop()
        turn, limit = asyncio.Event(), asyncio.timeout(None)
        arrival = self._arrivals.begin(
            caller,
            loop.time(),
            on_read=turn.set,
            on_refused=lambda: limit.reschedule(loop.time()),
        )
        arrived = False
        try:
            async with limit:
                self._look_soon(loop)
                await turn.wait()
                message = await read()
                arrived = True
                return message
        except TimeoutError:
            raise RequestRefusedError(
                Reason.BACKPRESSURE, "The request did not arrive while other calls waited"
            ) from None
        finally:
            self._arrivals.end(arrival, loop.time(), arrived=arrived)

    def _look_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Has arrivals looked at while there are any: often while a call waits."""
        after_s = _LOOK_S if self._arrivals.waiting else _IDLE_LOOK_S
        if self._look is not None:
            if self._look.when() <= loop.time() + after_s:
                return
            self._look.cancel()
        self._look = loop.call_later(after_s, self._look_now, loop)

    def _look_now(self, loop: asyncio.AbstractEventLoop) -> None:
        self._look = None
        self._arrivals.look(loop.time())
        if self._arrivals.read:
            self._look_soon(loop)
