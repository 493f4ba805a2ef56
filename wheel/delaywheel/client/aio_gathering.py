"""Gathers cancels, and reschedules, that callers of `AsyncClient` await one by one.

A lone one goes at once. While a call is under way others gather, until it ends, or for
`LINGER_S`; a full call goes at once. So a flow of them makes some twenty calls a second on the
node, instead of one for each.

If more come than the service answers, the first would be sent shortly before their time is over,
and all later ones as well: so once the first has waited for `LATE_S`, the last go first.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from time import monotonic
from typing import Final, Generic, NamedTuple

from delaywheel.client.named_changes import MESSAGES_AT_MOST, AnswerT, NamedT, outcome_of
from delaywheel.errors import DelaywheelError, TimedOutError

LINGER_S: Final = 0.02
LATE_S: Final = 1.0
CALLS_AT_ONCE: Final = 16
"""A call waits for a commit, and costs nothing meanwhile."""


class _One(NamedTuple, Generic[NamedT]):
    message: NamedT
    deadline_s: float
    since_s: float


class AioChanges(Generic[NamedT, AnswerT]):
    """Sends cancels, or reschedules, together. For one event loop."""

    def __init__(
        self,
        call: Callable[[Sequence[NamedT], float], Awaitable[Sequence[AnswerT | DelaywheelError]]],
        calls_at_once: int = CALLS_AT_ONCE,
    ) -> None:
        """Prepares; `call` makes one call of messages, until a deadline."""
        self._call: Final = call
        self._calls_at_once: Final = calls_at_once
        # A caller that gives up takes its message out, however many there are.
        self._gathered: Final[dict[asyncio.Future[AnswerT | DelaywheelError], _One[NamedT]]] = {}
        self._tasks: Final[set[asyncio.Task[None]]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def change(self, message: NamedT, deadline_s: float) -> AnswerT:
        """Changes one message, together with others that are asked for now.

        Raises:
            DelaywheelError: As of `Client.cancel` or `Client.reschedule`.
        """
        settled: asyncio.Future[AnswerT | DelaywheelError] = (
            asyncio.get_running_loop().create_future()
        )
        self._gathered[settled] = _One(message, deadline_s, monotonic())
        self._pump()
        try:
            # The call gives up at the latest deadline of its messages; this is a later safeguard.
            async with asyncio.timeout(max(0.0, deadline_s - monotonic())):
                result = await settled
        except TimeoutError:
            is_unsent = self._gathered.pop(settled, None) is not None
            raise TimedOutError("not answered in time", outcome_known=is_unsent) from None
        return outcome_of(result)

    def _pump(self) -> None:
        while self._gathered and self._may_go():
            items = self._gathered.items()
            first_or_last = items if self._waited_s() < LATE_S else reversed(items)
            batch = dict(islice(first_or_last, MESSAGES_AT_MOST))
            for settled in batch:
                del self._gathered[settled]
            task = asyncio.create_task(self._send(batch), name="delaywheel-changes")
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _may_go(self) -> bool:
        if len(self._tasks) >= self._calls_at_once:
            return False
        wait_s = LINGER_S - self._waited_s()
        if not self._tasks or len(self._gathered) >= MESSAGES_AT_MOST or wait_s <= 0:
            return True
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._lingered)
        return False

    def _waited_s(self) -> float:
        """How long the first of them has waited."""
        return monotonic() - next(iter(self._gathered.values())).since_s

    def _lingered(self) -> None:
        self._timer = None
        self._pump()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._pump()

    async def _send(
        self, batch: "dict[asyncio.Future[AnswerT | DelaywheelError], _One[NamedT]]"
    ) -> None:
        deadline_s = max(one.deadline_s for one in batch.values())
        try:
            results = await self._call([one.message for one in batch.values()], deadline_s)
        except BaseException as error:
            for settled in batch:
                if not settled.done():
                    settled.set_exception(error)
            raise
        for settled, result in zip(batch, results, strict=True):
            if not settled.done():  # its caller gave up
                settled.set_result(result)
