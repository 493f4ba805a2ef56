"""Gathers changes of named messages that callers wait for one by one: cancels, dues, commits.

| a message is | until | then |
|---|---|---|
| gathered | it goes with a call | under way |
| | its caller leaves | gone: unchanged, unless it is doubtful |
| under way | the call settles it | settled: its caller hears of it, though the call goes on |
| | it is being decided (`Again`) | gathered, as if it came now, and doubtful |
| | it was refused, or was late in doubt | backing off |
| | the call is interrupted, or has a defect | settled: CallFailedError, outcome unknown |
| | its caller leaves | gone: the call's `Doubts` say whether it is unchanged |
| backing off | that is over | gathered |
| | its caller leaves | gone: unchanged, unless it is doubtful |

A lone one goes at once. While a call is under way others gather, until it ends, or for
`LINGER_S`, and longer while more than a few are under way; a full call goes at once. So a flow of
them makes some fifty calls a second on the node, instead of one for each, and fewer if the node
takes long: nobody waits for one of these calls to end, nor for what another one named.

If more come than the service answers, the first would be sent shortly before their time is over,
and all later ones as well: so once the first has waited for `LATE_S`, the last go first, beside it.
And what a client asks for beyond `UNANSWERED_AT_MOST` is refused at once then: an event loop that
has to keep all of them until their time is over has none left to answer any. At one moment it may
ask for more. (10,000 cancels a second for 10 s: 27,423 were answered without that, 88,582 with it.)

If calls went on for what is refused, a few messages that nobody can decide would hold all of them.

Those who wait send for one another: the first of them takes all that is gathered. There is no
thread beside them, so with threads a call lasts for as long as its sender's own time, and whose
time is longer is gathered again then; in an event loop it lasts until the last of its messages is
given up.
"""

from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from time import monotonic
from typing import Any, Final, Generic, TypeAlias

from grpc import StatusCode

from delaywheel.client.changing.named_changes import (
    MESSAGES_AT_MOST,
    Again,
    AnswerT,
    Doubts,
    NamedT,
    OnSettled,
    outcome_of,
)
from delaywheel.client.exchange.endpoints import RETRY_DELAY_MOST_S
from delaywheel.client.transport.port import News, Transport
from delaywheel.errors import CallFailedError, DelaywheelError, RefusedError, TimedOutError
from delaywheel.reasons import Reason

LINGER_S: Final = 0.02
LATE_S: Final = 1.0
UNANSWERED_AT_MOST: Final = 8_192
"""Of one client, once the first has been unanswered for `LATE_S`."""
CALLS_AT_ONCE: Final = 32
"""A call waits for a commit, and costs nothing meanwhile."""
_FEW: Final = 8
"""Calls: with twice as many under way, others gather for twice as long."""
BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MOST_S: Final = 1.0
"""How long a refused message backs off: twice as long each time."""

MakeCall: TypeAlias = Callable[
    [Sequence[NamedT], float, OnSettled[AnswerT], Doubts], Coroutine[Any, Any, object]
]
"""Makes one call of messages until a deadline, and tells what became of each."""
OnAnswer: TypeAlias = Callable[[NamedT, AnswerT | DelaywheelError, float], None]
"""Called with a message, what became of it in the end, and when that was asked for."""


@dataclass(slots=True, eq=False)
class _WaitingChange(Generic[NamedT, AnswerT]):
    """A message, and the caller who waits for it.

    Attributes:
        since_s: Since when it is gathered; while it is backing off, when that is over.
        news: Told when it is settled or backs off, and when it may send what is gathered.
        is_doubtful: An earlier call may have changed it.
        refused: How often it was.
        late: How often it was TOO_LATE, in doubt.
        has_left: Its caller does not wait any more.
        obstacle: What kept it from being settled last, for people.
        call: What the last call that named it knows, and its number there.
    """

    message: NamedT
    deadline_s: float
    since_s: float
    news: News
    result: AnswerT | DelaywheelError | None = None
    is_backing_off: bool = False
    is_doubtful: bool = False
    refused: int = 0
    late: int = 0
    has_left: bool = False
    obstacle: str = ""
    call: tuple[Doubts, int] | None = None

    def not_settled(self, why: Again) -> None:
        """Notes that it is named once more, perhaps after a back-off."""
        wait_s, self.is_backing_off = 0.0, why.retry_delay_s is not None
        if why.retry_delay_s is not None:
            asked_s = min(why.retry_delay_s, RETRY_DELAY_MOST_S)
            wait_s = max(asked_s, min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2.0**self.refused))
            self.refused = min(self.refused + 1, 16)
        self.since_s = monotonic() + wait_s
        self.is_doubtful |= why.is_doubtful
        self.late += why.is_late
        self.obstacle = why.why or self.obstacle


class GatheredChanges(Generic[NamedT, AnswerT]):
    """Sends changes of one kind together: for threads, or for one event loop."""

    def __init__(
        self,
        transport: Transport,
        call: MakeCall[NamedT, AnswerT],
        report: OnAnswer[NamedT, AnswerT] | None = None,
        calls_at_once: int = CALLS_AT_ONCE,
    ) -> None:
        """Prepares.

        Args:
            report: Is told of each message what its caller is told; None: nobody is.
            calls_at_once: How many calls are under way at most.
        """
        self._transport: Final = transport
        self._call: Final = call
        self._report: Final = report
        self._calls_at_once: Final = calls_at_once
        self._lock: Final = Lock()  # guards all below, and what waits
        # In order. Whoever gives up is taken out, and the first found, however many there are: a
        # dict passes over all that have left before its first.
        self._gathered: Final = OrderedDict[_WaitingChange[NamedT, AnswerT], None]()
        self._unanswered: Final = OrderedDict[_WaitingChange[NamedT, AnswerT], float]()  # since
        self._under_way = 0

    async def change(self, message: NamedT, deadline_s: float) -> AnswerT:
        """Changes one message, together with others that are asked for now.

        Raises:
            DelaywheelError: As of `Client.cancel` or `Client.reschedule`.
        """
        began_s = monotonic()
        mine = _WaitingChange[NamedT, AnswerT](message, deadline_s, began_s, self._transport.news())
        with self._lock:
            self._check_room(began_s)
        try:
            with self._lock:
                self._unanswered[mine] = began_s
                self._gathered[mine] = None
                if len(self._gathered) == MESSAGES_AT_MOST:
                    self._tell_first()
            while (result := await self._step(mine)) is None:
                pass
        except BaseException:  # an interrupt, or its task was cancelled
            with self._lock:
                self._leave(mine)
            raise
        finally:
            with self._lock:
                self._unanswered.pop(mine, None)
        if self._report is not None:
            self._report(message, result, began_s)
        return outcome_of(result)

    def _check_room(self, now_s: float) -> None:
        if len(self._unanswered) < UNANSWERED_AT_MOST:
            return
        if now_s - next(iter(self._unanswered.values())) >= LATE_S:
            count = f"{len(self._unanswered):,}"
            raise RefusedError(Reason.BACKPRESSURE, f"this client waits for {count} already")

    async def _step(
        self, mine: _WaitingChange[NamedT, AnswerT]
    ) -> AnswerT | DelaywheelError | None:
        """Sends what is gathered if it may go, or waits until something has changed."""
        batch = None
        with self._lock:
            now_s, until_s = monotonic(), mine.deadline_s
            if mine.result is None and now_s >= until_s:
                # The call gives up at the latest deadline of its messages; this is a safeguard.
                mine.result = self._leave(mine)
            if mine.result is not None:
                return mine.result
            mine.news = self._transport.news()
            if mine.is_backing_off and mine.since_s <= now_s:
                mine.is_backing_off = False
                self._gathered[mine] = None
            if mine.is_backing_off:
                until_s = min(until_s, mine.since_s)
            elif self._first is mine and self._under_way < self._calls_at_once:
                going_s = now_s + self._wait_s(now_s - mine.since_s)
                if going_s <= now_s:
                    batch = self._take(mine, now_s)
                until_s = min(until_s, going_s)
        if batch is not None:
            await self._transport.begin(self._send(batch))
        else:
            await mine.news.wait(max(0.0, until_s - now_s))
        return None

    @property
    def _first(self) -> _WaitingChange[NamedT, AnswerT] | None:
        return next(iter(self._gathered), None)

    def _tell_first(self) -> None:
        """Has the first of those that are gathered look whether it may send."""
        if self._first is not None:
            self._first.news.tell()

    def _wait_s(self, waited_s: float) -> float:
        """How long what is gathered still waits for others, if the first has waited for so long."""
        if not self._under_way or len(self._gathered) >= MESSAGES_AT_MOST:
            return 0.0
        return LINGER_S * max(1.0, self._under_way / _FEW) - waited_s

    def _take(
        self, first: _WaitingChange[NamedT, AnswerT], now_s: float
    ) -> list[_WaitingChange[NamedT, AnswerT]]:
        """Takes out what goes with the next call, and has it begun.

        The first goes in any case: a thread does not look while it sends, and in front it would
        keep all others waiting.
        """
        del self._gathered[first]
        is_late = now_s - first.since_s >= LATE_S
        others = reversed(self._gathered) if is_late else iter(self._gathered)
        batch = [first, *islice(others, MESSAGES_AT_MOST - 1)]
        for one in batch[1:]:
            del self._gathered[one]
        doubts = Doubts({n: one.late for n, one in enumerate(batch) if one.is_doubtful})
        for number, one in enumerate(batch):
            one.call = doubts, number
        self._under_way += 1
        return batch

    def _leave(self, mine: _WaitingChange[NamedT, AnswerT]) -> TimedOutError:
        """Takes out a message that nobody waits for any more; returns what is known of it."""
        mine.has_left, is_unchanged = True, not mine.is_doubtful
        if not mine.is_backing_off and mine not in self._gathered and mine.call is not None:
            doubts, number = mine.call
            is_unchanged = doubts.withdraw(number)
            mine.obstacle = doubts.why or mine.obstacle
        self._gathered.pop(mine, None)
        self._tell_first()
        last = f"; last: {mine.obstacle}" if mine.obstacle else ""
        return TimedOutError(f"not answered in time{last}", outcome_known=is_unchanged)

    async def _send(self, batch: Sequence[_WaitingChange[NamedT, AnswerT]]) -> None:
        """Makes a call of what its first message's caller has taken."""
        sender, untold = batch[0], set(batch)
        assert sender.call is not None
        doubts, deadline_s = sender.call[0], sender.deadline_s
        if not self._transport.blocks:
            deadline_s = max(one.deadline_s for one in batch)

        def take(number: int, result: AnswerT | DelaywheelError | Again) -> None:
            one = batch[number]
            # Before its time a call is given up only where none helps: nothing answers at all, or
            # the client is closed.
            is_over = one is sender or not deadline_s <= monotonic() < one.deadline_s
            if isinstance(result, TimedOutError) and not is_over:
                result = Again(is_doubtful=not result.outcome_known, why=doubts.why)
            with self._lock:
                untold.discard(one)
                if not isinstance(result, Again):
                    one.result = result
                elif not one.has_left:
                    one.not_settled(result)
                    if not one.is_backing_off:
                        self._gathered[one] = None
                        self._tell_first()
                        return
                one.news.tell()

        try:
            with self._lock:
                self._tell_first()
            await self._call([one.message for one in batch], deadline_s, take, doubts)
        except BaseException as error:  # an interrupt, its task was cancelled, or a defect
            why = f"the call that named it ended with {error!r}"
            with self._lock:
                for one in untold:
                    one.result = CallFailedError(StatusCode.CANCELLED, why, outcome_known=False)
                    one.news.tell()
            raise
        finally:
            with self._lock:
                self._under_way -= 1
                self._tell_first()
