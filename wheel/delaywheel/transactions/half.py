"""A half message at its sender: begun, and committed or rolled back with a local transaction.

docs/TRANSACTIONS.md, "The sender", says what `commit`, `rollback` and a block that is left without
a word mean. No end of a block says what became of the transaction: an error may have been caught in
it, and a COMMIT that raised may have committed. What could not be said, or was not heard, the group
is asked: so no word raises.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from copy import copy
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar

from delaywheel.errors import DelaywheelError, MessageInvalidError
from delaywheel.levels import Duration, length_ms
from delaywheel.message import ClockNs, Handle, Message, MessageOptions, clock_ns
from delaywheel.reasons import Reason
from delaywheel.record_headers import HALF_DELIVER_AT, HALF_GROUP

_LOG = logging.getLogger("delaywheel.transactions")

DEFAULT_HOLD: Final = "3s"
HALF_TIMEOUT_S: Final = 5.0
"""How long a commit or rollback is tried: not longer than a hold is useful."""
_AT_ITS_COMMIT: Final = timedelta(0)


class CommitOutcome(StrEnum):
    """What `commit` came to."""

    COMMITTED = "COMMITTED"
    """It is sent, unless a cancel or its group's question was under way in this very moment."""
    LEFT_TO_CHECK = "LEFT_TO_CHECK"
    """Its hold has ended, or no answer was heard, which the log says: if the commit does not count,
    its group is asked. This is no error."""
    ROLLED_BACK = "ROLLED_BACK"
    """Somebody had cancelled it, which the log says: it is never sent, and nobody is asked."""


class RollbackOutcome(StrEnum):
    """What `rollback` came to."""

    ROLLED_BACK = "ROLLED_BACK"
    """It is never delivered, and nobody is asked."""
    LEFT_TO_CHECK = "LEFT_TO_CHECK"
    """Its hold has ended, or is about to, or no answer was heard, which the log says: its group is
    asked, or was. This is no error. It is also the outcome of a half that was committed before:
    then it is delivered."""


def hold_s(hold: Duration) -> float:
    """Returns how long a half is held, in seconds: nobody waits longer for its acknowledgement."""
    try:
        return length_ms(hold) / 1000
    except ValueError as error:
        raise MessageInvalidError(Reason.DELAY_INVALID, f"hold: {error}") from None


def half_message(
    topic: str,
    value: bytes | None,
    group: str,
    hold: Duration,
    options: MessageOptions,
    clock: ClockNs = clock_ns,
) -> Message:
    """Returns a half message; its due is the end of its hold.

    Raises MessageInvalidError, also for two dues, or a level.
    """
    given: dict[str, Any] = {**options}
    if given.get("delay") is given.get("deliver_at") is given.get("level") is None:
        given["delay"] = _AT_ITS_COMMIT
    return _become_half(Message(topic, value, clock=clock, **given), group, hold, clock)


def half_of(message: Message, group: str, hold: Duration, clock: ClockNs = clock_ns) -> Message:
    """Returns the half of a message, which has its id; what is due by now is due at its commit.

    Raises MessageInvalidError, also for a level.
    """
    half = copy(message)
    half.count_by(clock)
    return _become_half(half, group, hold, clock)


def _become_half(message: Message, group: str, hold: Duration, clock: ClockNs) -> Message:
    own_ms = message.due_ms
    if own_ms is None:
        raise MessageInvalidError(Reason.DUE_INVALID, "a half has a delay or a due, and no level")
    now_ms = -(-clock() // 1_000_000)
    due_ms = now_ms + round(hold_s(hold) * 1000)
    headers = [(HALF_GROUP, group.encode())]
    if own_ms > now_ms:
        # Of one id and due one message is delivered, and the half has it.
        headers.append((HALF_DELIVER_AT, b"%d" % (own_ms + (own_ms == due_ms))))
    message.become_half(due_ms, headers)
    return message


class _HeldHalf:
    """A half that was acknowledged.

    Attributes:
        handle: The half's handle. Once it is committed, a message with a due of its own is named by
            its id and that due.
        outcome: What its commit or rollback came to; None: nothing was said.
    """

    def __init__(self, message: Message, handle: Handle) -> None:
        self.message: Final = message
        self.handle: Final = handle
        self.outcome: CommitOutcome | RollbackOutcome | None = None

    @property
    def id(self) -> bytes:
        """The 16 bytes of its id."""
        return self.message.id

    @property
    def due_ms(self) -> int:
        """The end of its hold, in Unix milliseconds."""
        assert self.message.due_ms is not None
        return self.message.due_ms

    def _left(self, error: BaseException | None) -> None:
        """Logs that its block was left without a word; what raised will be heard of anyway."""
        if error is None and self.outcome is None:
            _LOG.warning(
                "half %s was neither committed nor rolled back in its block: its group is asked",
                self.id.hex(),
            )

    def _said(self, outcome: CommitOutcome) -> CommitOutcome:
        """Notes what its commit came to."""
        if outcome is CommitOutcome.ROLLED_BACK:
            _LOG.warning("half %s was cancelled before its commit: not sent", self.id.hex())
        self.outcome = outcome
        return outcome

    def _unheard(self, what: str, error: DelaywheelError) -> None:
        _LOG.warning("the %s of half %s was not heard: %s", what, self.id.hex(), error)


class Half(_HeldHalf):
    """A half that was acknowledged by the service; `Client.begin` returns it."""

    def __init__(
        self,
        message: Message,
        handle: Handle,
        commit: Callable[[Half], CommitOutcome],
        rollback: Callable[[Half], RollbackOutcome],
    ) -> None:
        super().__init__(message, handle)
        self._commit: Final = commit
        self._rollback: Final = rollback

    def commit(self) -> CommitOutcome:
        """Says that the local transaction was committed: the message is sent."""
        try:
            outcome = self._commit(self)
        except DelaywheelError as error:
            self._unheard("commit", error)
            outcome = CommitOutcome.LEFT_TO_CHECK
        return self._said(outcome)

    def rollback(self) -> RollbackOutcome:
        """Says that the local transaction was rolled back, for certain: the message is dropped."""
        try:
            outcome = self._rollback(self)
        except DelaywheelError as error:
            self._unheard("rollback", error)
            outcome = RollbackOutcome.LEFT_TO_CHECK
        self.outcome = outcome
        return outcome

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Says nothing: what the block did not say, the group is asked."""
        self._left(error)


class AsyncHalf(_HeldHalf):
    """The same for asyncio; `AsyncClient.begin` returns it."""

    def __init__(
        self,
        message: Message,
        handle: Handle,
        commit: Callable[[AsyncHalf], Awaitable[CommitOutcome]],
        rollback: Callable[[AsyncHalf], Awaitable[RollbackOutcome]],
    ) -> None:
        super().__init__(message, handle)
        self._commit: Final = commit
        self._rollback: Final = rollback

    async def commit(self) -> CommitOutcome:
        """See `Half.commit`."""
        try:
            outcome = await self._commit(self)
        except DelaywheelError as error:
            self._unheard("commit", error)
            outcome = CommitOutcome.LEFT_TO_CHECK
        return self._said(outcome)

    async def rollback(self) -> RollbackOutcome:
        """See `Half.rollback`."""
        try:
            outcome = await self._rollback(self)
        except DelaywheelError as error:
            self._unheard("rollback", error)
            outcome = RollbackOutcome.LEFT_TO_CHECK
        self.outcome = outcome
        return outcome

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """See `Half.__exit__`."""
        self._left(error)


HalfT = TypeVar("HalfT", bound=_HeldHalf)
_Result: TypeAlias = CommitOutcome | DelaywheelError


class _ManyHalves(Generic[HalfT]):
    """Halves that go with one local transaction, in the order of their messages."""

    def __init__(self, halves: Sequence[HalfT]) -> None:
        self._halves: Final = tuple(halves)

    def __len__(self) -> int:
        return len(self._halves)

    def __getitem__(self, number: int) -> HalfT:
        return self._halves[number]

    def __iter__(self) -> Iterator[HalfT]:
        return iter(self._halves)

    def _left(self, error: BaseException | None) -> None:
        if error is None and (unsaid := self._unsaid()):
            _LOG.warning(
                "%d of %d halves were neither committed nor rolled back in their block: their group"
                " is asked",
                *(len(unsaid), len(self)),
            )

    def _unsaid(self) -> list[HalfT]:
        return [half for half in self if half.outcome is None]

    def _note(self, halves: Sequence[HalfT], results: Sequence[_Result]) -> None:
        """Notes what commits came to."""
        errors = [result for result in results if isinstance(result, DelaywheelError)]
        if errors:
            counts = len(errors), len(halves)
            _LOG.warning("%d of %d commits were not heard: %s", *counts, errors[0])
        if cancelled := results.count(CommitOutcome.ROLLED_BACK):
            counts = cancelled, len(halves)
            _LOG.warning("%d of %d halves were cancelled before their commit: not sent", *counts)
        for half, result in zip(halves, results, strict=True):
            if isinstance(result, DelaywheelError):
                half.outcome = CommitOutcome.LEFT_TO_CHECK
            else:
                half.outcome = result


class Halves(_ManyHalves[Half]):
    """Halves that go with one local transaction; `Client.begin_many` returns them."""

    def __init__(
        self,
        halves: Sequence[Half],
        commit: Callable[[Sequence[Half]], Sequence[_Result]],
    ) -> None:
        super().__init__(halves)
        self._commit: Final = commit

    def commit(self) -> None:
        """Commits those of which nothing was said yet; each has its `outcome` then."""
        unsaid = self._unsaid()
        results: Sequence[_Result]
        try:
            results = self._commit(unsaid)
        except DelaywheelError as error:
            results = [error] * len(unsaid)
        self._note(unsaid, results)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """See `Half.__exit__`."""
        self._left(error)


class AsyncHalves(_ManyHalves[AsyncHalf]):
    """The same for asyncio; `AsyncClient.begin_many` returns them."""

    def __init__(
        self,
        halves: Sequence[AsyncHalf],
        commit: Callable[[Sequence[AsyncHalf]], Awaitable[Sequence[_Result]]],
    ) -> None:
        super().__init__(halves)
        self._commit: Final = commit

    async def commit(self) -> None:
        """See `Halves.commit`."""
        unsaid = self._unsaid()
        results: Sequence[_Result]
        try:
            results = await self._commit(unsaid)
        except DelaywheelError as error:
            results = [error] * len(unsaid)
        self._note(unsaid, results)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """See `Half.__exit__`."""
        self._left(error)
