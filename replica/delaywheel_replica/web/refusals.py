"""How the page refuses a request: a status, and the JSON that says why.

A node's refusal has the status that gRPC-gateway gives its code.
"""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web
from grpc import StatusCode

from delaywheel.client.exchange.retry import AttemptFailure

_STATUSES: Final = {
    StatusCode.CANCELLED: 499,
    StatusCode.UNKNOWN: 500,
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.DEADLINE_EXCEEDED: 504,
    StatusCode.NOT_FOUND: 404,
    StatusCode.ALREADY_EXISTS: 409,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.FAILED_PRECONDITION: 400,
    StatusCode.ABORTED: 409,
    StatusCode.OUT_OF_RANGE: 400,
    StatusCode.UNIMPLEMENTED: 501,
    StatusCode.INTERNAL: 500,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DATA_LOSS: 500,
}


class PageRefusal(Exception):
    """A request that is not done.

    Attributes:
        reason: Stable, UPPER_SNAKE_CASE; empty: nobody gave one.
        retry_after_s: When to try again; None: that is not known, or does not help.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        code: StatusCode | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s
        self._code = code

    @classmethod
    def of_node(cls, failure: AttemptFailure) -> PageRefusal:
        """Passes on what a node, or gRPC, says."""
        return cls(
            _STATUSES.get(failure.code, 500),
            str(failure.reason or failure.code.name),
            failure.cause,
            code=failure.code,
            retry_after_s=failure.retry_delay_s,
        )

    @property
    def shape(self) -> dict[str, Any]:
        """What is answered, and told to viewers."""
        shape: dict[str, Any] = {"reason": self.reason, "message": str(self)}
        if self._code is not None:
            shape["code"] = self._code.value[0]
        if self.retry_after_s is not None:
            shape["retry_delay_ms"] = round(self.retry_after_s * 1000)
        return shape

    def response(self) -> web.Response:
        """Returns the answer."""
        answer = web.json_response(self.shape, status=self.status)
        if self.retry_after_s is not None:
            answer.headers["Retry-After"] = str(max(1, round(self.retry_after_s)))
        return answer


def signed_out(message: str) -> PageRefusal:
    """Returns the refusal of who has shown nothing that counts."""
    return PageRefusal(401, "SIGN_IN", message)


def forbidden(right: str, where: str = "") -> PageRefusal:
    """Returns the refusal of who lacks a right."""
    return PageRefusal(403, "FORBIDDEN", f"you have no right '{right}'{where}")
