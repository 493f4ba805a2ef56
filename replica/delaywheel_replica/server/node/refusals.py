"""Refusals: of a whole request (the call's status), or of one message (an error in its result).

Both name one of the reasons in ``delaywheel.reasons``, which defines the gRPC code and whether a
retry helps.
"""

from dataclasses import dataclass
from typing import Final, NoReturn, TypeAlias

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from delaywheel.reasons import DOMAIN, Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.process.logs import limited

Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"

# How long a caller waits before it retries, if waiting helps and nothing better is known.
_RETRY_DELAY_MS = {
    Reason.BACKPRESSURE: 50,
    Reason.QUOTA_EXCEEDED: 1000,
    Reason.NO_WHEEL: 200,
    Reason.NOT_ENOUGH_REPLICAS: 200,
    Reason.DISK_FULL: 1000,
    Reason.DISK_STALLED: 500,
    Reason.DRAINING: 500,
    Reason.WHEEL_LOST: 100,
    Reason.NO_LEADER: 200,
    Reason.NOT_UP_TO_DATE: 200,
    Reason.CANCEL_UNKNOWN: 200,
    Reason.RESCHEDULE_UNKNOWN: 200,
    Reason.RESCHEDULES_BUSY: 500,
}
# A status travels in headers, of which gRPC drops a call with more than 16 KiB.
_DETAIL_BYTES: Final = 1_500
# How much of a caller's text is quoted back.
_QUOTED_LENGTH: Final = 60
DETAILS_KEY = "grpc-status-details-bin"
"""Metadata of a call's end: a google.rpc.Status."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something is refused, for programs and people."""

    reason: Reason
    detail: str = ""
    after_ms: int | None = None
    """When to retry, if that is known better than the reason alone says."""
    principal: str | None = None
    """Who may not do it, if that is why."""

    @property
    def text(self) -> str:
        """What is wrong, and what to do."""
        if not self.detail:
            return self.reason.advice
        detail = self.detail.encode(errors="replace")[:_DETAIL_BYTES].decode(errors="ignore")
        return f"{detail}. {self.reason.advice}"

    @property
    def retry_delay_ms(self) -> int | None:
        """When to retry; set where waiting helps."""
        if not self.reason.retry_helps:
            return None
        known_ms = _RETRY_DELAY_MS.get(self.reason, 100)
        return known_ms if self.after_ms is None else self.after_ms

    def as_error(self) -> pb.Error:
        """Returns the refusal as an error in a result."""
        error = pb.Error(code=self.reason.code_number, reason=self.reason.value, message=self.text)
        if self.retry_delay_ms is not None:
            error.retry_delay_ms = self.retry_delay_ms
        return error

    def as_status(self) -> status_pb2.Status:
        """Returns the refusal as the status of a call."""
        status = status_pb2.Status(code=self.reason.code_number, message=self.text)
        _pack(status, error_details_pb2.ErrorInfo(reason=self.reason.value, domain=DOMAIN))
        if self.retry_delay_ms is not None:
            delay = Duration()
            delay.FromMilliseconds(self.retry_delay_ms)
            _pack(status, error_details_pb2.RetryInfo(retry_delay=delay))
        return status


class RequestRefusedError(Exception):
    """Raised to refuse a whole request."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason.value)
        self.refusal = Refusal(reason, detail)

    @classmethod
    def of(cls, refusal: Refusal) -> "RequestRefusedError":
        """Returns an error with this very refusal."""
        error = cls(refusal.reason, refusal.detail)
        error.refusal = refusal
        return error


def refusal_of(error: Exception) -> Refusal:
    """Returns what an exception being handled refuses; of a defect the traceback is logged."""
    if isinstance(error, RequestRefusedError):
        return error.refusal
    limited().exception("call failed")
    return Refusal(Reason.INTERNAL, type(error).__name__)


def quoted(text: str) -> str:
    """Shortens a caller's text to be quoted in an error."""
    return repr(text if len(text) <= _QUOTED_LENGTH else f"{text[:_QUOTED_LENGTH]}…")


async def abort(context: Context, refusal: Refusal) -> NoReturn:
    """Ends a call with this refusal as its status."""
    await context.abort(
        refusal.reason.code,
        refusal.text,
        trailing_metadata=((DETAILS_KEY, refusal.as_status().SerializeToString()),),
    )
    raise AssertionError("abort always raises")


def _pack(
    status: status_pb2.Status,
    detail: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo,
) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)
