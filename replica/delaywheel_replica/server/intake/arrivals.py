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

Turns go round by principal, where callers have one, and then among its connections: to open many,
or to have many calls, does not help. Callers that have a slow call, or had one refused and none
arrive since, are *late*. They have ``slow`` places at most, and come after all others, the *prompt*
ones, but for each 16th turn.

So once those that send nothing are known as late, ``most - slow`` places are left to prompt
callers, whose messages take them for a pass of the event loop; before that a prompt caller waits
for two looks at most, and for one turn of each prompt caller before it. A long message on a slow
line loses its place only if its caller has most of the slow ones, or after ``patience_s``.

Looks, not milliseconds, make a message slow: while the event loop stands still, nothing could have
arrived. All operations take time that does not depend on how many calls wait.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from delaywheel_replica.process.round_robin import RoundRobin
from delaywheel_replica.server.access.callers import CallOrigin

LOOKS_UNTIL_SLOW: Final = 2
PROMPT_IN_A_ROW: Final = 15


class ArrivalBounds(NamedTuple):
    """How many messages may be read at once, and for how long.

    Attributes:
        most: Of all callers.
        of_caller: Of one caller.
        slow: Of those that do not arrive at once, while a prompt caller waits.
        arrival_s: How long a message may take.
        patience_s: The same while any call waits.
    """

    most: int
    of_caller: int
    slow: int
    arrival_s: float = 30.0
    patience_s: float = 5.0


class Arrival:
    """One call whose message has not arrived.

    Attributes:
        caller: Whose call it is.
        is_read: Whether its message may be read.
        on_read: Called when it may, if it had to wait.
        on_refused: Called when it may not arrive any more.
    """

    __slots__ = ("caller", "is_read", "is_refused", "looks", "on_read", "on_refused", "since_s")

    def __init__(self, caller: "_Caller") -> None:
        self.caller: Final = caller
        self.is_read = False
        self.is_refused = False
        self.since_s = 0.0
        self.looks = 0
        self.on_read: Callable[[], object] = _nothing
        self.on_refused: Callable[[], object] = _nothing

    @property
    def is_slow(self) -> bool:
        """Whether it has a place for longer than a message that is there needs it."""
        return self.looks >= LOOKS_UNTIL_SLOW and not self.is_refused


def _nothing() -> None:
    """Does nothing: nobody wants to know."""


class _Caller:
    """A caller with calls whose messages have not arrived."""

    __slots__ = ("is_late", "origin", "read", "sharer", "waiting")

    def __init__(self, origin: CallOrigin) -> None:
        self.origin: Final = origin
        self.sharer: Final = origin.sharer
        self.waiting: OrderedDict[Arrival, None] = OrderedDict()
        self.read = 0
        self.is_late = False


class Arrivals:
    """The calls whose messages have not arrived."""

    def __init__(self, bounds: ArrivalBounds) -> None:
        self._bounds: Final = bounds
        self._callers: Final[dict[CallOrigin, _Caller]] = {}
        self._read: Final[dict[Arrival, None]] = {}  # oldest first
        # Callers that wait and are below their bound, in the order of their turns.
        self._prompt: Final = RoundRobin[_Caller]()
        self._late: Final = RoundRobin[_Caller]()
        self._prompt_in_a_row = 0
        self.waiting = 0

    @property
    def is_idle(self) -> bool:
        """Whether no message is being read."""
        return not self._read

    def begin(self, origin: CallOrigin, now_s: float) -> Arrival:
        """Adds a call, which is read at once if there is room."""
        caller = self._callers.get(origin)
        if caller is None:
            caller = self._callers[origin] = _Caller(origin)
        arrival = Arrival(caller)
        caller.waiting[arrival] = None
        self.waiting += 1
        self._line_up(caller)
        self._go_on(now_s)
        return arrival

    def end(self, arrival: Arrival, now_s: float, *, arrived: bool) -> None:
        """Takes a call out, since its message arrived, or it was refused, or its caller left."""
        caller = arrival.caller
        if arrival in self._read:
            del self._read[arrival]
            caller.read -= 1
            if arrived:
                caller.is_late = False
        elif arrival in caller.waiting:
            self._stop_waiting(arrival)
        self._line_up(caller)
        if not caller.read and not caller.waiting and self._callers.get(caller.origin) is caller:
            del self._callers[caller.origin]
        self._go_on(now_s)

    def look(self, now_s: float) -> None:
        """Notes that time has passed, and refuses what has had enough of it."""
        bounds = self._bounds
        most_s = bounds.patience_s if self.waiting else bounds.arrival_s
        for arrival in [*self._read]:
            arrival.looks += 1
            if now_s - arrival.since_s >= most_s:
                self._refuse(arrival)
            if arrival.is_slow:
                arrival.caller.is_late = True
                self._line_up(arrival.caller)
        if self._prompt:
            self._make_room()

    def make_room_for(self, origin: CallOrigin) -> bool:
        """Refuses a call that waits, of the sharer and the caller with most of them.

        Returns:
            False if that is this one.
        """
        if not self.waiting:
            return False
        by_sharer = Counter[tuple[str, str]]()
        for caller in self._callers.values():
            by_sharer[caller.sharer] += _calls_waiting(caller)
        [(sharer, most)] = by_sharer.most_common(1)
        if by_sharer[origin.sharer] == most:
            sharer = origin.sharer
        victim = max(
            (caller for caller in self._callers.values() if caller.sharer == sharer),
            key=_calls_waiting,
        )
        own = self._callers.get(origin)
        if sharer == origin.sharer and _calls_waiting(victim) <= (
            0 if own is None else _calls_waiting(own)
        ):
            return False
        newest = next(reversed(victim.waiting))
        self._stop_waiting(newest)
        self._line_up(victim)
        self._refuse(newest)
        return True

    def _make_room(self) -> None:
        """Refuses slow ones beyond their bound: each time the newest of who has most of them."""
        slow = [arrival for arrival in self._read if arrival.is_slow]
        while len(slow) > self._bounds.slow:
            counts = Counter(arrival.caller.sharer for arrival in slow)
            newest = max(reversed(slow), key=lambda arrival: counts[arrival.caller.sharer])
            slow.remove(newest)
            self._refuse(newest)

    def _refuse(self, arrival: Arrival) -> None:
        """Tells a call to end, once; it keeps its place until it has."""
        if not arrival.is_refused:
            arrival.is_refused = True
            arrival.caller.is_late = True
            self._line_up(arrival.caller)
            arrival.on_refused()

    def _go_on(self, now_s: float) -> None:
        while len(self._read) < self._bounds.most and (caller := self._next()) is not None:
            arrival = next(iter(caller.waiting))
            self._stop_waiting(arrival)
            self._start(arrival, now_s)
            self._line_up(caller)
            arrival.on_read()

    def _next(self) -> _Caller | None:
        """Takes out the caller whose turn it is."""
        overdue = self._prompt_in_a_row >= PROMPT_IN_A_ROW
        if self._late and (overdue or not self._prompt) and self._late_may_start():
            self._prompt_in_a_row = 0
            return self._late.take()
        if not self._prompt:
            return None
        self._prompt_in_a_row += 1
        return self._prompt.take()

    def _late_may_start(self) -> bool:
        return sum(each.caller.is_late for each in self._read) < self._bounds.slow

    def _start(self, arrival: Arrival, now_s: float) -> None:
        arrival.is_read = True
        arrival.since_s = now_s
        arrival.caller.read += 1
        self._read[arrival] = None

    def _stop_waiting(self, arrival: Arrival) -> None:
        del arrival.caller.waiting[arrival]
        self.waiting -= 1

    def _line_up(self, caller: _Caller) -> None:
        """Puts a caller behind the others that wait, unless it is in the right line already."""
        line, other = self._prompt, self._late
        if caller.is_late:
            line, other = other, line
        other.discard(caller.sharer, caller)
        if caller.waiting and caller.read < self._bounds.of_caller:
            line.add(caller.sharer, caller)
        else:
            line.discard(caller.sharer, caller)


def _calls_waiting(caller: _Caller) -> int:
    return len(caller.waiting)
