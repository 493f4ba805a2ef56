"""How a call ends: with an answer, or with a defect of the server."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import grpc

from delaywheel.reasons import Reason
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.node.refusals import Refusal

Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"

_log = get_logger(__name__)


class Answer(NamedTuple):
    """An answer, and the function to call once gRPC has passed it on."""

    content: bytes
    end: Callable[[], None]


def defect(error: Exception) -> Refusal:
    """Returns the refusal for a defect being handled; logs its traceback."""
    _log.exception("call failed")
    return Refusal(Reason.INTERNAL, type(error).__name__)
