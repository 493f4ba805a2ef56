"""A half message at its sender: begun, and committed or rolled back with a local transaction.

| the block of a half | what is said | what becomes of the message |
|---|---|---|
| ends normally | it is committed | it is sent; if that could not be said, its group is asked |
| raises | nothing: a COMMIT that failed may have committed | its group is asked |
| its program dies | nothing | its group is asked |

`rollback` spares the group a question, where it is certain that the transaction was rolled back.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, Self

from delaywheel.errors import DelaywheelError, MessageInvalidError
from delaywheel.levels import Duration
from delaywheel.message import Handle, Message, MessageOptions
from delaywheel.reasons import Reason
from delaywheel.record_headers import HALF_DELIVER_AT, HALF_GROUP

_LOG = logging.getLogger("delaywheel.transactions")

DEFAULT_HOLD: Final = "3s"
HALF_TIMEOUT_S: Final = 5.0
"""How long a commit or rollback is tried: not longer than a hold is useful."""


class CommitOutcome(StrEnum):
    """What `commit` came to."""

    COMMITTED = "COMMITTED"
    """It is sent, unless it was rolled back, or its group was asked in this very moment."""
    LEFT_TO_CHECK = "LEFT_TO_CHECK"
    """Its hold has ended: its group is asked. This is no error."""


def half_message(
    topic: str, value: bytes | None, group: str, hold: Duration, options: MessageOptions
) -> Message:
    """Returns a half message; its due is the end of its hold.

    Raises:
        MessageInvalidError: The message is invalid, or gives two dues, or a level.
    """
    delay, deliver_at = options.get("delay"), options.get("deliver_at")
    if options.get("level") is not None:
        raise MessageInvalidError(Reason.DUE_INVALID, "a half has a delay or a due, and no level")
    rest: dict[str, Any] = {
        name: each for name, each in options.items() if name not in {"delay", "deliver_at"}
    }
    message = Message(topic, value, delay=hold, **rest)
    ours = [(HALF_GROUP, group.encode())]
    if delay is not None or deliver_at is not None:
        own_ms = Message(topic, None, delay=delay, deliver_at=deliver_at).due_ms
        assert own_ms is not None
        # Of one id and due one message is delivered, and the half has it.
        ours.append((HALF_DELIVER_AT, b"%d" % (own_ms + (own_ms == message.due_ms))))
    message.add_service_headers(ours)
    return message


class _HeldHalf:
    """A half that was acknowledged.

    Attributes:
        message: As it was sent.
        handle: The half's handle. Once it is committed, a message with a due of its own is named by
            its id and that due.
        outcome: What its commit came to; None: none was made, or that is not known.
        rolled_back: `rollback` was called.
    """

    def __init__(self, message: Message, handle: Handle) -> None:
        self.message: Final = message
        self.handle: Final = handle
        self.outcome: CommitOutcome | None = None
        self.rolled_back = False

    @property
    def id(self) -> bytes:
        """The 16 bytes of its id."""
        return self.message.id

    @property
    def due_ms(self) -> int:
        """The end of its hold, in Unix milliseconds."""
        assert self.message.due_ms is not None
        return self.message.due_ms

    def _not_said(self, error: DelaywheelError) -> None:
        _LOG.warning("the commit of %s was not heard, its group is asked: %s", self.id.hex(), error)


class Half(_HeldHalf):
    """A half that was acknowledged by the service; `Client.begin` returns it.

    Example:
        ::

            with client.begin("orders", value, key=key, delay="30m", group="shop") as half:
                with db:
                    db.execute("insert into orders …")
                    barrier.record(db, half)
    """

    def __init__(
        self,
        message: Message,
        handle: Handle,
        commit: Callable[[Half], CommitOutcome],
        rollback: Callable[[Half], object],
    ) -> None:
        super().__init__(message, handle)
        self._commit: Final = commit
        self._rollback: Final = rollback

    def commit(self) -> CommitOutcome:
        """Says that the local transaction was committed: the message is sent.

        Raises:
            DelaywheelError: That could not be said. Nothing is lost: the group is asked.
        """
        self.outcome = self._commit(self)
        return self.outcome

    def rollback(self) -> None:
        """Says that the local transaction was rolled back, for certain: the message is dropped.

        Raises:
            DelaywheelError: That could not be said. The group is asked.
        """
        self.rolled_back = True
        self._rollback(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Commits, if nothing was raised and nothing was said; never raises."""
        if error is None and self.outcome is None and not self.rolled_back:
            try:
                self.commit()
            except DelaywheelError as failure:
                self._not_said(failure)


class AsyncHalf(_HeldHalf):
    """The same for asyncio; `AsyncClient.begin` returns it."""

    def __init__(
        self,
        message: Message,
        handle: Handle,
        commit: Callable[[AsyncHalf], Awaitable[CommitOutcome]],
        rollback: Callable[[AsyncHalf], Awaitable[object]],
    ) -> None:
        super().__init__(message, handle)
        self._commit: Final = commit
        self._rollback: Final = rollback

    async def commit(self) -> CommitOutcome:
        """See `Half.commit`."""
        self.outcome = await self._commit(self)
        return self.outcome

    async def rollback(self) -> None:
        """See `Half.rollback`."""
        self.rolled_back = True
        await self._rollback(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """See `Half.__exit__`."""
        if error is None and self.outcome is None and not self.rolled_back:
            try:
                await self.commit()
            except DelaywheelError as failure:
                self._not_said(failure)
