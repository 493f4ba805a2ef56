"""How a call ends: with its answer, or with a reason as its status."""

from collections.abc import Awaitable
from typing import TypeAlias, TypeVar

import grpc
import structlog

from delaywheel.reasons import Reason
from delaywheel_replica.server.counts import Counts
from delaywheel_replica.server.refusals import Refusal, RefusedError, abort

Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"

_Answer = TypeVar("_Answer")

_log = structlog.get_logger(__name__)


async def answered(
    counts: Counts, context: Context, call: str, work: Awaitable[_Answer]
) -> _Answer:
    """The answer, or the call's end with the refusal as its status."""
    try:
        return await work
    except RefusedError as error:
        refusal = error.refusal
    except Exception as error:  # noqa: BLE001 - a defect of ours is named to the caller, and logged
        refusal = defect(error)
    counts.refused_calls[call, refusal.reason] += 1
    return await abort(context, refusal)


def defect(error: Exception) -> Refusal:
    """To be called where it is handled: the log gets the whole of it."""
    _log.exception("call failed")
    return Refusal(Reason.INTERNAL, type(error).__name__)
