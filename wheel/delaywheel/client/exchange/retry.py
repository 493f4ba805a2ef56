"""Classifies failed attempts: whether to retry, and whether messages may have been accepted.

Two tables decide. A failure with one of our reasons is decided by the reason (see
`delaywheel.reasons`). Any other comes from gRPC, a proxy or a defect, and is decided by its code.
Retrying is always safe, since id and due stay the same, but does not always help. Where a table
must guess, it assumes that the outcome is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol, Self

from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from delaywheel.errors import CallFailedError, DelaywheelError, RefusedError
from delaywheel.message import Message
from delaywheel.reasons import DOMAIN, Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb

_STATUS_DETAILS: Final = "grpc-status-details-bin"
# gRPC's texts for an attempt that never left this process, because a lost connection could not be
# made again. If gRPC rewords them, only certainty is lost: that one attempt then counts as unknown.
# On a channel over which nothing was ever answered, or nothing since the last failure, a question
# precedes each attempt (`before_sending`): texts do not matter there.
_UNSENT_DETAILS: Final = (
    "failed to connect to all addresses",
    "DNS resolution failed",
    "errors resolving",  # grpcio 1.85
)
# Its texts for a connection that was made and closed again before any data.
_CLOSED_AT_ONCE_DETAIL: Final = ": Socket closed"
_CLOSED_AT_ONCE_HINT: Final = (
    " (a node that has all the connections that it takes closes each new one; so does what is no"
    " node)"
)
# Its text for a call that a server refused before it looked at it (HTTP/2's REFUSED_STREAM): the
# connection has as many calls under way as the server takes.
_NO_ROOM_DETAIL: Final = re.compile(r"RST_STREAM.*error code 7\b")
_NO_ROOM_TEXT: Final = (
    "the node takes no more calls at once on this connection: make fewer at a time, name many"
    " messages in each, or use another client"
)
# Its text for a request over its own limit, where that is lower than the service's.
_OVERSIZED_DETAIL: Final = "larger than max"
_SPLITTING_REASONS: Final = frozenset({Reason.TOO_MANY_MESSAGES, Reason.REQUEST_TOO_LARGE})


class RetryDecision(NamedTuple):
    """What to do after a failed attempt.

    Attributes:
        retry: Sending the same again may help.
        outcome_known: The message was not accepted.
        split: Sending fewer messages in a request may help.
    """

    retry: bool
    outcome_known: bool
    split: bool = False


_BY_CODE: Final = {
    StatusCode.OK: RetryDecision(
        retry=False, outcome_known=False
    ),  # a failure cannot be OK: a defect
    StatusCode.CANCELLED: RetryDecision(retry=True, outcome_known=False),
    StatusCode.UNKNOWN: RetryDecision(retry=True, outcome_known=False),  # also "Stream removed"
    StatusCode.INVALID_ARGUMENT: RetryDecision(retry=False, outcome_known=False),
    StatusCode.DEADLINE_EXCEEDED: RetryDecision(retry=True, outcome_known=False),
    StatusCode.NOT_FOUND: RetryDecision(retry=False, outcome_known=False),
    StatusCode.ALREADY_EXISTS: RetryDecision(retry=False, outcome_known=False),
    StatusCode.PERMISSION_DENIED: RetryDecision(retry=False, outcome_known=True),
    StatusCode.UNAUTHENTICATED: RetryDecision(retry=False, outcome_known=True),
    # Without our reason: gRPC's limit of concurrent calls, or a proxy's rate limit.
    StatusCode.RESOURCE_EXHAUSTED: RetryDecision(retry=True, outcome_known=False),
    StatusCode.FAILED_PRECONDITION: RetryDecision(retry=False, outcome_known=False),
    StatusCode.ABORTED: RetryDecision(retry=True, outcome_known=False),
    StatusCode.UNIMPLEMENTED: RetryDecision(retry=False, outcome_known=True),
    StatusCode.INTERNAL: RetryDecision(retry=True, outcome_known=False),  # also a reset stream
    StatusCode.UNAVAILABLE: RetryDecision(retry=True, outcome_known=False),
    StatusCode.OUT_OF_RANGE: RetryDecision(retry=False, outcome_known=False),
    StatusCode.DATA_LOSS: RetryDecision(retry=False, outcome_known=False),
}
_NO_ROOM: Final = RetryDecision(retry=True, outcome_known=True)
_OVERSIZED: Final = RetryDecision(retry=False, outcome_known=False, split=True)
# The error for a question that perhaps no service has answered.
_UNANSWERED: Final = frozenset(
    {
        StatusCode.UNAVAILABLE,
        StatusCode.DEADLINE_EXCEEDED,
        StatusCode.CANCELLED,
        StatusCode.UNKNOWN,
        StatusCode.INTERNAL,
    }
)
_CODES_BY_NUMBER: Final = {code.value[0]: code for code in StatusCode}


class EndedCall(Protocol):
    """The error interface of failed calls, synchronous or not."""

    def code(self) -> StatusCode:
        """The status code."""

    def details(self) -> str | None:
        """The status text."""

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """The metadata with ErrorInfo and RetryInfo."""


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """Why an attempt, or one of its messages, failed.

    Attributes:
        code: The gRPC code.
        text: In the service's words, or gRPC's.
        reason: Our reason, or only its name if this SDK does not know it, or None: not from our
            service.
        retry_delay_s: How long the service asks to wait, if it does.
        unsent: The attempt never left this process.
        unprocessed: The server refused it before it looked at it.
    """

    code: StatusCode
    text: str
    reason: Reason | str | None = None
    retry_delay_s: float | None = None
    unsent: bool = False
    unprocessed: bool = False

    @classmethod
    def of_call(cls, call: EndedCall) -> Self:
        """Reads the status of a failed call."""
        code, text = call.code(), call.details() or ""
        reason: Reason | str | None = None
        retry_delay_s = None
        for detail in _status_details(call):
            if detail.Is(ErrorInfo.DESCRIPTOR):
                info = ErrorInfo.FromString(detail.value)
                if info.domain == DOMAIN:
                    reason = Reason.of(info.reason) or info.reason
            elif detail.Is(RetryInfo.DESCRIPTOR):
                delay = RetryInfo.FromString(detail.value).retry_delay
                retry_delay_s = delay.seconds + delay.nanos / 1e9
        if reason is None and _NO_ROOM_DETAIL.search(text):
            return cls(code, f"{_NO_ROOM_TEXT} ({text})", unprocessed=True)
        unsent = code is StatusCode.UNAVAILABLE and text.startswith(_UNSENT_DETAILS)
        if unsent and reason is None and text.endswith(_CLOSED_AT_ONCE_DETAIL):
            text += _CLOSED_AT_ONCE_HINT
        return cls(code, text, reason, retry_delay_s, unsent=unsent and reason is None)

    @classmethod
    def of_error(cls, error: pb.Error) -> Self:
        """Reads the error of one message."""
        delay_ms = error.retry_delay_ms if error.HasField("retry_delay_ms") else None
        return cls(
            code=_CODES_BY_NUMBER.get(error.code, StatusCode.UNKNOWN),
            text=error.message,
            reason=Reason.of(error.reason) or error.reason,
            retry_delay_s=None if delay_ms is None else delay_ms / 1000,
        )

    @property
    def cause(self) -> str:
        """Why, for people; of gRPC's words where no connection can be made, the last ones."""
        if self.reason is None and self.text.startswith(_UNSENT_DETAILS):
            return f"cannot connect: {self.text.rpartition(': ')[2].removesuffix(']')}"
        return self.text

    @property
    def unanswered(self) -> bool:
        """Whether possibly nothing listens there: neither service nor proxy gave a reason."""
        return self.reason is None and self.code in _UNANSWERED

    def before_sending(self) -> Self:
        """Returns the failure as that of a preliminary question; the attempt was never sent."""
        return replace(self, unsent=True)

    @property
    def verdict(self) -> RetryDecision:
        """Returns what to do about the failure."""
        if isinstance(self.reason, Reason):
            return RetryDecision(
                self.reason.retry_helps,
                self.reason.outcome_known,
                split=self.reason in _SPLITTING_REASONS,
            )
        if self.code is StatusCode.RESOURCE_EXHAUSTED and _OVERSIZED_DETAIL in self.text:
            return _OVERSIZED
        if self.unprocessed:
            return _NO_ROOM
        verdict = _BY_CODE[self.code]
        return verdict._replace(outcome_known=verdict.outcome_known or self.unsent)

    def error(self, *, outcome_known: bool, failed: Message | None = None) -> DelaywheelError:
        """Returns the error to raise if the failure is final."""
        if self.reason is not None:
            return RefusedError(self.reason, self.cause, outcome_known=outcome_known, failed=failed)
        return CallFailedError(self.code, self.cause, outcome_known=outcome_known, failed=failed)

    def __str__(self) -> str:
        return f"{self.reason or self.code.name}: {self.cause}"


class Obstacle:
    """The failure to tell of when the time of an exchange is over."""

    def __init__(self) -> None:
        self._failure: AttemptFailure | None = None

    def met(self, failure: AttemptFailure) -> None:
        """Takes a later one; no answer in time tells less than a named reason."""
        is_late = failure.reason is None and failure.code is StatusCode.DEADLINE_EXCEEDED
        if not is_late or self._failure is None or self._failure.reason is None:
            self._failure = failure

    def __str__(self) -> str:
        """What follows in the text of an error; empty if there was none."""
        return "" if self._failure is None else f"; last: {self._failure}"


def _status_details(call: EndedCall) -> list[Any]:
    for key, value in call.trailing_metadata() or ():
        if key == _STATUS_DETAILS and isinstance(value, bytes):
            try:
                return list(Status.FromString(value).details)
            except DecodeError:
                return []  # not ours; the code alone decides
    return []
