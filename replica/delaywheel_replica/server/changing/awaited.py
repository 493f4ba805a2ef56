"""A call that names messages, each of which is settled on its own: its bounds, waiting, and end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from delaywheel.reasons import Reason
from delaywheel_replica.quantities import counted
from delaywheel_replica.server.node.calls_to_nodes import WAIT_S
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError

MESSAGES_AT_MOST: Final = 1_000
"""How many messages one call names."""
_ANSWERING_S: Final = 0.2, 1.0
"""What is left of a caller's time for the answer's way: a fifth of it, within these bounds. Who
hears nothing in time leaves the node, with all other calls."""
_GRACE_S: Final = 0.1
"""So long others are waited for once some are decided: two or three transactions."""
PASSED_ON_S: Final = 2.0
"""So long a call of another node waits for the first decision: that one does not make many at once
(passed_on.py), and asks again for what is not decided, which costs both of them."""

SWEPT_AT_LEAST: Final = 8

_Named = TypeVar("_Named")
_Asked = TypeVar("_Asked")
_Result = TypeVar("_Result")
_Settled_contra = TypeVar("_Settled_contra", contravariant=True)

OF_ALL: Final = frozenset({Reason.NO_LEADER, Reason.BACKPRESSURE, Reason.RESCHEDULES_BUSY})
"""They end the call, if they concern each of its messages."""


class NamingCall(Protocol[_Settled_contra]):
    """A call that names messages, as those see it that settle them."""

    @property
    def is_over(self) -> bool:
        """Whether its caller does not wait any more."""

    def settle(self, row: int, result: _Settled_contra, /) -> None:
        """Notes what became of one."""


@dataclass(frozen=True, slots=True, eq=False)
class LaterCall(Generic[_Result]):
    """A call that joins an attempt whose look has begun.

    What was not found then may have been accepted since, before this call: so this one is not told
    that, and asks again. All else that is decided of a message is true of who came later, too.

    Attributes:
        not_found: What the others are told if there is no such message.
    """

    call: NamingCall[_Result | Refusal]
    not_found: _Result

    @property
    def is_over(self) -> bool:
        """Whether its caller does not wait any more."""
        return self.call.is_over

    def settle(self, row: int, result: _Result | Refusal) -> None:
        """Notes what became of one."""
        is_stale = result == self.not_found
        self.call.settle(row, Refusal(Reason.NOT_UP_TO_DATE) if is_stale else result)


@dataclass(slots=True, eq=False)
class AwaitedCall(Generic[_Result]):
    """One caller's messages, and what became of each; for the event loop that makes it.

    Attributes:
        results: What became of each; None: that is not known yet.
        any_settled: Done once it is known of one of them.
        all_settled: Done once it is of all.
        is_over: Its caller does not wait any more.
    """

    results: list[_Result | None]
    any_settled: asyncio.Future[None] = field(init=False)
    all_settled: asyncio.Future[None] = field(init=False)
    is_over: bool = False
    _left: int = field(init=False)

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.any_settled, self.all_settled = loop.create_future(), loop.create_future()
        self._left = len(self.results)

    @classmethod
    def of(cls, messages: int) -> AwaitedCall[_Result]:
        """Returns a call of so many messages."""
        return cls([None] * messages)

    def settle(self, row: int, result: _Result) -> None:
        """Notes what became of one."""
        self.results[row] = result
        self._left -= 1
        if not self.any_settled.done():
            self.any_settled.set_result(None)
        if not self._left and not self.all_settled.done():
            self.all_settled.set_result(None)

    async def wait(
        self,
        within_s: float,
        may_end: Callable[[], bool] | None = None,
        *,
        first_s: float = WAIT_S,
    ) -> bool:
        """Waits until all are settled, or the time is over.

        Args:
            within_s: How long to wait at most.
            may_end: The wait ends soon after some are settled, if this is true then; None: it does
                not.
            first_s: Then it ends although none is settled.

        Returns:
            Whether it ended in part: what is not settled goes on.
        """
        try:
            async with asyncio.timeout(min(within_s, WAIT_S)):
                if may_end is not None:
                    await asyncio.wait([self.any_settled], timeout=first_s)
                while may_end is not None and not self.all_settled.done():
                    await asyncio.wait([self.all_settled], timeout=_GRACE_S)
                    if may_end():
                        return True
                await self.all_settled
        except TimeoutError:
            pass
        finally:
            self.is_over = True
        return False


class Waiters(Generic[_Result]):
    """The calls that wait for one message, each with the message's row in it.

    Who asks in part comes again and again for what takes long, so those that have left are left
    out: once there are twice as many as the last time. So whoever joins costs the same, however
    many wait.
    """

    __slots__ = ("_calls", "_swept_at")

    def __init__(self, call: NamingCall[_Result], row: int) -> None:
        self._calls = [(call, row)]
        self._swept_at = SWEPT_AT_LEAST

    def __iter__(self) -> Iterator[tuple[NamingCall[_Result], int]]:
        return iter(self._calls)

    @property
    def are_any(self) -> bool:
        """Whether anybody still waits."""
        return any(not call.is_over for call, _ in self._calls)

    def join(self, call: NamingCall[_Result], row: int) -> None:
        """Adds one."""
        self._calls.append((call, row))
        if len(self._calls) >= self._swept_at:
            self._calls = [each for each in self._calls if not each[0].is_over]
            self._swept_at = max(SWEPT_AT_LEAST, 2 * len(self._calls))

    def settle(self, result: _Result) -> None:
        """Tells all."""
        for call, row in self._calls:
            call.settle(row, result)


def within_s_of(left_s: float | None) -> float:
    """Returns how long a caller is waited for, given how long it waits; None: it does not say."""
    if left_s is None:
        return WAIT_S
    least_s, most_s = _ANSWERING_S
    answering_s = min(max(left_s / 5, least_s), most_s)
    return min(WAIT_S, max(left_s - answering_s, left_s / 2))


def parsed(messages: Sequence[_Named], parse: Callable[[_Named], _Asked]) -> list[_Asked | Refusal]:
    """Parses the messages of a call, each on its own.

    Raises:
        RequestRefusedError: TOO_MANY_MESSAGES, HANDLE_AMBIGUOUS.
    """
    if not messages:
        raise RequestRefusedError(Reason.HANDLE_AMBIGUOUS, "No message is named")
    if len(messages) > MESSAGES_AT_MOST:
        count = counted(len(messages), "message")
        raise RequestRefusedError(
            Reason.TOO_MANY_MESSAGES, f"{count}, {MESSAGES_AT_MOST:,} at most"
        )

    def each() -> Iterator[_Asked | Refusal]:
        for message in messages:
            try:
                yield parse(message)
            except RequestRefusedError as error:
                yield error.refusal

    return list(each())


def check_not_all_refused(results: Sequence[object]) -> None:
    """Refuses the call, if all of its messages are refused for what concerns all of them.

    Raises:
        RequestRefusedError: That reason; of a single message any.
    """
    reasons = {each.reason if isinstance(each, Refusal) else None for each in results}
    if len(reasons) == 1 and (len(results) == 1 or reasons <= OF_ALL):
        for each in results:
            if isinstance(each, Refusal):
                raise RequestRefusedError.of(each)
