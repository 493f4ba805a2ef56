"""How a call ends: with an answer, or by a defect of ours."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import grpc

from delaywheel.reasons import Reason
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.node.refusals import Refusal

Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"

_log = get_logger(__name__)


class Answer(NamedTuple):
    """An answer, and what counts it no more: to be called once, when gRPC has passed it on."""

    content: bytes
    end: Callable[[], None]


def defect(error: Exception) -> Refusal:
    """To be called where it is handled: the log gets the whole of it."""
    _log.exception("call failed")
    return Refusal(Reason.INTERNAL, type(error).__name__)
