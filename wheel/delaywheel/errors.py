"""The exceptions of the SDK.

    DelaywheelError             outcome_known, failed
    ├── RefusedError            the service said no: reason, retry_helps
    │   └── MessageInvalidError the message was never sent; also a ValueError
    ├── TimedOutError           no acknowledgement within the time given; also a TimeoutError
    ├── CallFailedError         the call failed, and a retry would not help: code
    └── ClientClosedError       the client no longer takes messages

`outcome_known` answers the question that matters after a failure. True: no attempt had any effect,
so nothing was accepted (or cancelled). False: an attempt may have succeeded; send the same
`Message` again. It keeps its id and due, so there is at most one copy.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, Self, TypeVar

from grpc import StatusCode

from delaywheel.reasons import Reason

if TYPE_CHECKING:  # message.py raises what is defined here
    from delaywheel.message import Message


class DelaywheelError(Exception):
    """The base class of everything the SDK raises.

    Attributes:
        outcome_known: True: nothing was accepted. False: it may have been.
        failed: The message that the error is about, if any; send it again unchanged.

    Example:
        A retry that yields at most one copy, however the first attempt ended::

            try:
                client.produce("orders", b"…", delay="30m")
            except DelaywheelError as error:
                if error.failed is None or error.outcome_known:
                    raise
                [result] = client.produce_many([error.failed])
    """

    def __init__(self, text: str, *, outcome_known: bool, failed: Message | None = None) -> None:
        super().__init__(text)
        self.outcome_known = outcome_known
        self.failed = failed

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes errors copyable and picklable, whatever arguments their constructors take."""
        return _rebuild, (type(self), self.args, self.__dict__)

    def with_hint(self, text: str) -> Self:
        """Returns the same error that says more."""
        error = copy(self)
        error.args = (f"{str(self).removesuffix('.')}; {text}",)
        return error

    def about(self, message: Message) -> Self:
        """Returns the same error for one message."""
        error = copy(self)
        error.failed = message
        return error


class RefusedError(DelaywheelError):
    """The service, or the SDK itself, refused; `reason` is stable.

    `reason` is a plain name if a newer server sent one that this SDK does not know.
    """

    def __init__(
        self,
        reason: Reason | str,
        text: str,
        *,
        outcome_known: bool = True,
        failed: Message | None = None,
    ) -> None:
        super().__init__(f"{reason}: {text}", outcome_known=outcome_known, failed=failed)
        self.reason = reason

    @property
    def retry_helps(self) -> bool:
        """Whether the same message may be accepted later, or by another node."""
        return isinstance(self.reason, Reason) and self.reason.retry_helps


class MessageInvalidError(RefusedError, ValueError):
    """A message has an invalid argument; nothing was sent."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(reason, text)


class TimedOutError(DelaywheelError, TimeoutError):
    """There was no answer in time; the text names the last obstacle.

    In time is within the timeout. A client that has never reached a node gives up after 2 s if no
    address that it knows accepts connections, however long its timeout is.
    """


class CallFailedError(DelaywheelError):
    """The call failed in a way that no retry helps: missing permission, wrong service, a defect.

    `code` is gRPC's status code.
    """

    def __init__(
        self,
        code: StatusCode,
        text: str,
        *,
        outcome_known: bool,
        failed: Message | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {text}", outcome_known=outcome_known, failed=failed)
        self.code = code


class ClientClosedError(DelaywheelError):
    """The client was closed; messages that it had not sent by then are never sent."""

    def __init__(
        self, text: str = "the client is closed", *, failed: Message | None = None
    ) -> None:
        super().__init__(text, outcome_known=True, failed=failed)


ErrorT = TypeVar("ErrorT", bound=DelaywheelError)


def _rebuild(kind: type[ErrorT], args: tuple[object, ...], state: dict[str, object]) -> ErrorT:
    """Makes an error as it was, without calling its constructor."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error
