"""Decides which calls' messages may arrive. No gRPC, no event loop, no clock.

gRPC reports a message only once all of it is there, and a message that is being read may become the
longest that is accepted. So only some are read at a time, and nobody can tell a call whose message
is on its way from one that sends nothing: only that time passes. Each call is in one of these
states:

=========  =================================  ======================================================
state      its message                        leaves it
=========  =================================  ======================================================
waiting    stays with its caller, except for  is *read* when there is room; refused if the node has
           one HTTP/2 window                  too many calls, and its caller most of those waiting
read       is being read                      arrives; is *slow* after two looks (0.1 s)
slow       is being read                      arrives; refused after 30 s, after 5 s if any call
                                              waits, or at once if a prompt caller waits, more than
                                              ``slow`` are slow, and its caller has most of them
=========  =================================  ======================================================

Turns go round by principal, where callers have one, and then among its connections. Callers that
have a slow call, or had one refused and none arrive since, are *late*. They have ``slow`` places at
most: the others are left to *prompt* callers, whose messages take them for a pass of the event
loop. Before who sends nothing is known as late, a prompt caller waits for two looks, and for one
turn of each prompt caller before it.

Looks, not milliseconds, make a message slow: while the event loop stands still, nothing could have
arrived. All operations take time that does not depend on how many calls of a caller wait.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from delaywheel_replica.process.round_robin import RoundRobin
from delaywheel_replica.server.access.callers import CallOrigin

LOOKS_UNTIL_SLOW: Final = 2
ARRIVAL_S: Final = 30.0
PATIENCE_S: Final = 5.0


class ArrivalBounds(NamedTuple):
    """How many messages are read at once: of all callers, of one, and slow ones of all."""

    most: int
    of_caller: int
    slow: int


@dataclass(slots=True, eq=False)
class Arrival:
    """One call whose message has not arrived.

    Attributes:
        caller: Whose call it is.
        on_read: Called when its message may be read.
        on_refused: Called when it may not arrive any more.
    """

    caller: "_Caller"
    on_read: Callable[[], object]
    on_refused: Callable[[], object]
    is_refused: bool = False
    since_s: float = 0.0
    looks: int = 0


@dataclass(slots=True, eq=False)
class _Caller:
    """A connection with calls whose messages have not arrived."""

    origin: CallOrigin
    waiting: OrderedDict[Arrival, None] = field(default_factory=OrderedDict)
    read: int = 0
    is_late: bool = False


class Arrivals:
    """The calls whose messages have not arrived.

    Attributes:
        read: Those that may arrive, oldest first.
        waiting: The number of the others.
    """

    def __init__(self, bounds: ArrivalBounds) -> None:
        self._bounds: Final = bounds
        self._callers: Final[dict[CallOrigin, _Caller]] = {}
        # Callers that wait and are below their bound, in the order of their turns.
        self._prompt: Final = RoundRobin[_Caller]()
        self._late: Final = RoundRobin[_Caller]()
        self.read: Final[dict[Arrival, None]] = {}
        self.waiting = 0

    def begin(
        self,
        origin: CallOrigin,
        now_s: float,
        on_read: Callable[[], object],
        on_refused: Callable[[], object],
    ) -> Arrival:
        """Adds a call, which is read at once if there is room."""
        caller = self._callers.setdefault(origin, _Caller(origin))
        arrival = Arrival(caller, on_read, on_refused)
        caller.waiting[arrival] = None
        self.waiting += 1
        self._line_up(caller)
        self._go_on(now_s)
        return arrival

    def end(self, arrival: Arrival, now_s: float, *, arrived: bool) -> None:
        """Takes a call out, since its message arrived, or it was refused, or its caller left."""
        caller = arrival.caller
        if arrival in self.read:
            del self.read[arrival]
            caller.read -= 1
            caller.is_late &= not arrived
        elif arrival in caller.waiting:
            self._stop_waiting(arrival)
        self._line_up(caller)
        if not caller.read and not caller.waiting and self._callers.get(caller.origin) is caller:
            del self._callers[caller.origin]
        self._go_on(now_s)

    def look(self, now_s: float) -> None:
        """Notes that time has passed, and refuses what has had enough of it."""
        most_s = PATIENCE_S if self.waiting else ARRIVAL_S
        for arrival in self.read:
            arrival.looks += 1
            if now_s - arrival.since_s >= most_s:
                self._refuse(arrival)
            elif arrival.looks >= LOOKS_UNTIL_SLOW:
                self._note_late(arrival.caller)
        slow = [
            each for each in self.read if each.looks >= LOOKS_UNTIL_SLOW and not each.is_refused
        ]
        while self._prompt and len(slow) > self._bounds.slow:
            counts = Counter(arrival.caller.origin.sharer for arrival in slow)
            newest = max(reversed(slow), key=lambda arrival: counts[arrival.caller.origin.sharer])
            slow.remove(newest)
            self._refuse(newest)

    def make_room_for(self, origin: CallOrigin) -> bool:
        """Refuses a call that waits, of who has most of them, unless that is this one."""
        waiting = Counter[tuple[str, str]]()
        for caller in self._callers.values():
            waiting[caller.origin.sharer] += len(caller.waiting)
        if not waiting or max(waiting.values()) <= waiting[origin.sharer]:
            return False
        victim = max(
            self._callers.values(),
            key=lambda each: (waiting[each.origin.sharer], len(each.waiting)),
        )
        newest = next(reversed(victim.waiting))
        self._stop_waiting(newest)
        self._refuse(newest)
        return True

    def _refuse(self, arrival: Arrival) -> None:
        """Tells a call to end, once; one that is read keeps its place until it has."""
        if not arrival.is_refused:
            arrival.is_refused = True
            self._note_late(arrival.caller)
            arrival.on_refused()

    def _go_on(self, now_s: float) -> None:
        while self.waiting and len(self.read) < self._bounds.most:
            late = sum(each.caller.is_late for each in self.read)
            line = self._late if self._late and late < self._bounds.slow else self._prompt
            if not line:
                return
            caller = line.take()
            arrival = next(iter(caller.waiting))
            self._stop_waiting(arrival)
            arrival.since_s = now_s
            caller.read += 1
            self.read[arrival] = None
            self._line_up(caller)
            arrival.on_read()

    def _stop_waiting(self, arrival: Arrival) -> None:
        del arrival.caller.waiting[arrival]
        self.waiting -= 1

    def _note_late(self, caller: _Caller) -> None:
        caller.is_late = True
        self._line_up(caller)

    def _line_up(self, caller: _Caller) -> None:
        """Puts a caller behind the others that wait, unless it is in the right line already."""
        may_start = bool(caller.waiting) and caller.read < self._bounds.of_caller
        for line, is_its in ((self._prompt, not caller.is_late), (self._late, caller.is_late)):
            if may_start and is_its:
                line.add(caller.origin.sharer, caller)
            else:
                line.discard(caller.origin.sharer, caller)
