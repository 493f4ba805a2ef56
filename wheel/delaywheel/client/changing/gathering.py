"""Gathers changes of named messages that callers wait for one by one: cancels, dues, commits.

A lone one goes at once. While a call is under way others gather, until it ends, or for
`LINGER_S`, and longer while more than a few are under way; a full call goes at once. So a flow of
them makes some fifty calls a second on the node, instead of one for each, and fewer if the node
takes long: nobody waits for one of these calls to end.

If more come than the service answers, the first would be sent shortly before their time is over,
and all later ones as well: so once the first has waited for `LATE_S`, the last go first. And what
an event loop asks for beyond `UNANSWERED_AT_MOST` is refused at once then: a loop that has to keep
all of them until their time is over has none left to answer any. At one moment it may ask for more.
(10,000 cancels a second for 10 s: 27,423 were answered without that, 88,582 with it.)

A call is answered in part, and no caller waits for what another one named: each is told as soon as
its message is settled, and what is not is gathered again, after a back-off if it was refused. An
earlier call may have changed it: then it is in doubt (named_changes.py). If calls went on for what
is refused, a few messages that nobody can decide would hold all of them.

Who gives up before the call does withdraws the message: what is known of it by then, that no
attempt can have changed it or that one may have, is in the error, and stays true.

Threads that wait send for one another: whoever may send takes all that is gathered, and there is
no thread beside them. A call lasts for as long as its thread's own time; whose time is longer is
gathered again then.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from threading import Event, Lock
from time import monotonic
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

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

KeyT = TypeVar("KeyT")

OnAnswer: TypeAlias = Callable[[NamedT, AnswerT | DelaywheelError, float], None]
"""Called with a message, what became of it in the end, and when that was asked for."""


class _One(NamedTuple, Generic[NamedT]):
    message: NamedT
    deadline_s: float
    since_s: float
    is_doubtful: bool = False
    refused: int = 0
    late: int = 0

    def again(self, why: Again) -> "_One[NamedT]":
        """Returns it as it is gathered once more: as if it came after its back-off."""
        wait_s, is_refused = 0.0, why.retry_delay_s is not None
        if why.retry_delay_s is not None:
            asked_s = min(why.retry_delay_s, RETRY_DELAY_MOST_S)
            wait_s = max(asked_s, min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2.0**self.refused))
        return self._replace(
            since_s=monotonic() + wait_s,
            is_doubtful=self.is_doubtful or why.is_doubtful,
            refused=min(self.refused + is_refused, 16),
            late=self.late + why.is_late,
        )


def _wait_s(gathered: Mapping[KeyT, _One[NamedT]], calls: int) -> float:
    """How long what is gathered still waits for others, with so many calls under way."""
    if not calls or len(gathered) >= MESSAGES_AT_MOST:
        return 0.0
    return LINGER_S * max(1.0, calls / _FEW) - _waited_s(gathered)


def _waited_s(gathered: Mapping[KeyT, _One[NamedT]]) -> float:
    """How long the first of them has waited."""
    return monotonic() - next(iter(gathered.values())).since_s


def _taken(
    gathered: dict[KeyT, _One[NamedT]], sender: KeyT | None = None
) -> dict[KeyT, _One[NamedT]]:
    """Takes out what goes with the next call, with the sender's own in any case."""
    items = gathered.items()
    first_or_last: Iterable[tuple[KeyT, _One[NamedT]]] = (
        items if _waited_s(gathered) < LATE_S else reversed(items)
    )
    batch = dict(islice(first_or_last, MESSAGES_AT_MOST))
    if sender is not None and sender not in batch:
        batch.popitem()
        batch[sender] = gathered[sender]
    for key in batch:
        del gathered[key]
    return batch


def _latest_s(batch: Mapping[KeyT, _One[NamedT]]) -> float:
    return max(one.deadline_s for one in batch.values())


def _late(obstacle: str, *, is_unchanged: bool) -> TimedOutError:
    last = f"; last: {obstacle}" if obstacle else ""
    return TimedOutError(f"not answered in time{last}", outcome_known=is_unchanged)


def _doubts(batch: Mapping[KeyT, _One[NamedT]]) -> Doubts:
    return Doubts({n: one.late for n, one in enumerate(batch.values()) if one.is_doubtful})


class _WaitingThread(Generic[NamedT, AnswerT]):
    """A thread that waits for its message.

    Attributes:
        result: What became of it.
        backing_off: It was refused, and is gathered again once its back-off is over.
        has_left: Nobody waits for it any more.
        obstacle: What kept it from being settled last.
        call: What the last call that named it knows, and its number there; None: there was none.
        woken: Set when any of these changes, or the thread may send.
    """

    def __init__(self) -> None:
        self.result: AnswerT | DelaywheelError | None = None
        self.backing_off: _One[NamedT] | None = None
        self.has_left = False
        self.obstacle = ""
        self.call: tuple[Doubts, int] | None = None
        self.woken: Final = Event()


class SyncChanges(Generic[NamedT, AnswerT]):
    """Sends changes of one kind together. For threads."""

    def __init__(
        self,
        call: Callable[[Sequence[NamedT], float, OnSettled[AnswerT], Doubts], object],
        report: OnAnswer[NamedT, AnswerT] | None = None,
        calls_at_once: int = CALLS_AT_ONCE,
    ) -> None:
        """Prepares.

        Args:
            call: Makes one call of messages until a deadline, and tells what became of each; those
                in doubt come last.
            report: Is told of each message what its caller is told; None: nobody is.
            calls_at_once: How many calls are under way at most.
        """
        self._call: Final = call
        self._report: Final = report
        self._calls_at_once: Final = calls_at_once
        self._lock: Final = Lock()  # guards all below, and results
        self._gathered: Final[dict[_WaitingThread[NamedT, AnswerT], _One[NamedT]]] = {}
        self._under_way = 0

    def change(self, message: NamedT, deadline_s: float) -> AnswerT:
        """Changes one message, together with others that are asked for now.

        Raises:
            DelaywheelError: As of `Client.cancel` or `Client.reschedule`.
        """
        mine, began_s = _WaitingThread[NamedT, AnswerT](), monotonic()
        with self._lock:
            self._gathered[mine] = _One(message, deadline_s, began_s)
        try:
            while (result := self._step(mine, deadline_s)) is None:
                pass
        except BaseException:  # an interrupt
            self._leave(mine)
            raise
        if self._report is not None:
            self._report(message, result, began_s)
        return outcome_of(result)

    def _step(
        self, mine: _WaitingThread[NamedT, AnswerT], deadline_s: float
    ) -> AnswerT | DelaywheelError | None:
        """Sends what is gathered if it may go, or waits until something has changed."""
        batch = None
        with self._lock:
            if mine.result is not None:
                return mine.result
            mine.woken.clear()
            now_s = monotonic()
            wait_s = deadline_s - now_s
            if mine.backing_off is not None:
                if mine.backing_off.since_s <= now_s:
                    self._gathered[mine], mine.backing_off = mine.backing_off, None
                else:
                    wait_s = min(wait_s, mine.backing_off.since_s - now_s)
            is_first = next(iter(self._gathered), None) is mine
            if is_first and self._under_way < self._calls_at_once and now_s < deadline_s:
                may_go_in_s = _wait_s(self._gathered, self._under_way)
                if may_go_in_s <= 0:
                    # It cannot look while it sends: as the first it would keep all others waiting.
                    batch = _taken(self._gathered, mine)
                    doubts = _doubts(batch)
                    for number, waiting in enumerate(batch):
                        waiting.call = doubts, number
                    self._under_way += 1
                    self._wake_first()
                wait_s = min(wait_s, may_go_in_s)
        if batch is not None:
            self._send(batch, doubts, mine, deadline_s)
        elif not mine.woken.wait(max(0.0, wait_s)) and monotonic() >= deadline_s:
            # The call gives up at the latest deadline of its messages; this is a later safeguard.
            is_unchanged = self._leave(mine)
            late = _late(mine.obstacle, is_unchanged=is_unchanged)
            return late if mine.result is None else mine.result
        return None

    def _leave(self, mine: _WaitingThread[NamedT, AnswerT]) -> bool:
        """Takes out a message that nobody waits for any more; returns whether it is unchanged."""
        with self._lock:
            mine.has_left = True
            one = self._gathered.pop(mine, None) or mine.backing_off
            self._wake_first()
        if one is not None:
            return not one.is_doubtful
        if mine.call is None:
            return False
        doubts, number = mine.call
        mine.obstacle = doubts.why or mine.obstacle
        return doubts.withdraw(number)

    def _wake_first(self) -> None:
        """Has the first of those that wait look whether it may send."""
        first = next(iter(self._gathered), None)
        if first is not None:
            first.woken.set()

    def _send(
        self,
        batch: Mapping[_WaitingThread[NamedT, AnswerT], _One[NamedT]],
        doubts: Doubts,
        mine: _WaitingThread[NamedT, AnswerT],
        deadline_s: float,
    ) -> None:
        """Makes a call, until the deadline of the thread that makes it."""
        rows = [*batch.items()]
        untold = set(batch)

        def take(number: int, result: AnswerT | DelaywheelError | Again) -> None:
            waiting, one = rows[number]
            # Before its time a call is given up only where none helps: nothing answers at all, or
            # the client is closed.
            is_over = waiting is mine or not deadline_s <= monotonic() < one.deadline_s
            if isinstance(result, TimedOutError) and not is_over:
                result = Again(is_doubtful=not result.outcome_known, why=doubts.why)
            with self._lock:
                untold.discard(waiting)
                if isinstance(result, Again):
                    waiting.obstacle = result.why or waiting.obstacle
                if not isinstance(result, Again):
                    waiting.result = result
                elif waiting.has_left:
                    return
                elif result.retry_delay_s is None:
                    self._gathered[waiting] = one.again(result)
                    self._wake_first()
                    return
                else:
                    waiting.backing_off = one.again(result)
                waiting.woken.set()

        messages = [one.message for _, one in rows]
        try:
            self._call(messages, deadline_s, take, doubts)
        finally:
            with self._lock:
                self._under_way -= 1
                for waiting in untold:
                    if not waiting.has_left:
                        waiting.result = _UNFINISHED
                        waiting.woken.set()
                self._wake_first()


_UNFINISHED: Final = CallFailedError(
    StatusCode.CANCELLED, "the thread that made the call was interrupted", outcome_known=False
)


class AioChanges(Generic[NamedT, AnswerT]):
    """Sends changes of one kind together. For one event loop."""

    def __init__(
        self,
        call: Callable[[Sequence[NamedT], float, OnSettled[AnswerT], Doubts], Awaitable[object]],
        report: OnAnswer[NamedT, AnswerT] | None = None,
        calls_at_once: int = CALLS_AT_ONCE,
    ) -> None:
        """Prepares.

        Args:
            call: Makes one call of messages until a deadline, and tells what became of each; those
                in doubt come last.
            report: Is told of each message what its caller is told; None: nobody is.
            calls_at_once: How many calls are under way at most.
        """
        self._call: Final = call
        self._report: Final = report
        self._calls_at_once: Final = calls_at_once
        # A caller that gives up takes its message out, however many there are.
        self._gathered: Final[dict[asyncio.Future[AnswerT | DelaywheelError], _One[NamedT]]] = {}
        self._backing_off: Final[dict[asyncio.Future[AnswerT | DelaywheelError], _One[NamedT]]] = {}
        self._obstacles: Final[dict[asyncio.Future[AnswerT | DelaywheelError], str]] = {}
        self._calls: Final[dict[asyncio.Future[AnswerT | DelaywheelError], tuple[Doubts, int]]] = {}
        # When each was asked for, the first one first.
        self._unanswered: Final[dict[asyncio.Future[AnswerT | DelaywheelError], float]] = {}
        self._tasks: Final[set[asyncio.Task[None]]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def change(self, message: NamedT, deadline_s: float) -> AnswerT:
        """Changes one message, together with others that are asked for now.

        Raises:
            DelaywheelError: As of `Client.cancel` or `Client.reschedule`.
        """
        now_s = monotonic()
        if self._is_full(now_s):
            raise RefusedError(
                Reason.BACKPRESSURE, f"this client waits for {len(self._unanswered):,} already"
            )
        loop = asyncio.get_running_loop()
        settled: asyncio.Future[AnswerT | DelaywheelError] = loop.create_future()
        self._unanswered[settled] = now_s
        self._gathered[settled] = _One(message, deadline_s, now_s)
        self._pump()
        # The call gives up at the latest deadline of its messages; this is a later safeguard.
        timer = loop.call_later(deadline_s - now_s, self._give_up, settled)
        try:
            result = await settled
        except BaseException:  # its task was cancelled, or the call has failed
            self._leave(settled)
            raise
        finally:
            timer.cancel()
            del self._unanswered[settled]
            self._obstacles.pop(settled, None)
            self._calls.pop(settled, None)
        if self._report is not None:
            self._report(message, result, now_s)
        return outcome_of(result)

    def _is_full(self, now_s: float) -> bool:
        if len(self._unanswered) < UNANSWERED_AT_MOST:
            return False
        return now_s - next(iter(self._unanswered.values())) >= LATE_S

    def _give_up(self, settled: asyncio.Future[AnswerT | DelaywheelError]) -> None:
        if not settled.done():
            is_unchanged, obstacle = self._leave(settled)
            settled.set_result(_late(obstacle, is_unchanged=is_unchanged))

    def _leave(self, settled: asyncio.Future[AnswerT | DelaywheelError]) -> tuple[bool, str]:
        """Takes out a message that nobody waits for any more.

        Returns:
            Whether it is unchanged, and what kept it from being settled last.
        """
        obstacle = self._obstacles.get(settled, "")
        one = self._gathered.pop(settled, None) or self._backing_off.pop(settled, None)
        if one is not None:
            return not one.is_doubtful, obstacle
        if settled not in self._calls:
            return False, obstacle
        doubts, number = self._calls[settled]
        return doubts.withdraw(number), doubts.why or obstacle

    def _pump(self) -> None:
        while self._gathered and self._may_go():
            batch = _taken(self._gathered)
            doubts = _doubts(batch)
            self._calls.update((settled, (doubts, n)) for n, settled in enumerate(batch))
            task = asyncio.create_task(self._send(batch, doubts), name="delaywheel-changes")
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _may_go(self) -> bool:
        if len(self._tasks) >= self._calls_at_once:
            return False
        wait_s = _wait_s(self._gathered, len(self._tasks))
        if wait_s <= 0:
            return True
        loop = asyncio.get_running_loop()
        if self._timer is not None and self._timer.when() > loop.time() + wait_s + LINGER_S / 2:
            self._timer.cancel()  # calls have ended since
            self._timer = None
        if self._timer is None:
            self._timer = loop.call_later(wait_s, self._lingered)
        return False

    def _backed_off(self, settled: asyncio.Future[AnswerT | DelaywheelError]) -> None:
        one = self._backing_off.pop(settled, None)
        if one is not None:
            self._gathered[settled] = one
            self._pump()

    def _lingered(self) -> None:
        self._timer = None
        self._pump()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._pump()

    async def _send(
        self,
        batch: "dict[asyncio.Future[AnswerT | DelaywheelError], _One[NamedT]]",
        doubts: Doubts,
    ) -> None:
        rows = [*batch.items()]
        untold = set(batch)

        def take(number: int, result: AnswerT | DelaywheelError | Again) -> None:
            settled, one = rows[number]
            untold.discard(settled)
            if settled.done():  # its caller gave up
                return
            if isinstance(result, Again) and result.why:
                self._obstacles[settled] = result.why
            if not isinstance(result, Again):
                settled.set_result(result)
            elif result.retry_delay_s is None:
                self._gathered[settled] = one.again(result)
                self._pump()
            else:
                again = self._backing_off[settled] = one.again(result)
                wait_s = again.since_s - monotonic()
                asyncio.get_running_loop().call_later(wait_s, self._backed_off, settled)

        messages = [one.message for _, one in rows]
        try:
            await self._call(messages, _latest_s(batch), take, doubts)
        except BaseException as error:
            for settled in untold:
                if not settled.done():
                    settled.set_exception(error)
            raise
