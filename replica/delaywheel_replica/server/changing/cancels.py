"""Cancel: one message, or many of them, whichever node the caller has asked.

The leader's node decides (gathering.py), each message on its own; another node passes them on to it
(passed_on.py).
"""

from collections.abc import Iterator, Sequence
from typing import Final

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.quantities import counted
from delaywheel_replica.server.changing.gathering import WAIT_S, Answered, CancelGroups
from delaywheel_replica.server.changing.passed_on import (
    MESSAGES_AT_MOST,
    PassedCancels,
    PassedOn,
)
from delaywheel_replica.server.changing.sights import Sights
from delaywheel_replica.server.lookup.references import Reference, reference_of
from delaywheel_replica.server.node.refusals import Refusal, RefusedError

_ANSWERING_S: Final = 0.2
"""What is left of a caller's time for the answer's way."""

OF_ALL: Final = frozenset({Reason.NO_LEADER, Reason.BACKPRESSURE})
"""They end the call, if they concern each of its messages."""

OUTCOMES: Final = {
    CancelDecision.CANCELLED: pb.CANCEL_OUTCOME_CANCELLED,
    CancelDecision.ALREADY_DELIVERED: pb.CANCEL_OUTCOME_ALREADY_DELIVERED,
    CancelDecision.TOO_LATE: pb.CANCEL_OUTCOME_TOO_LATE,
    CancelDecision.NOT_FOUND: pb.CANCEL_OUTCOME_NOT_FOUND,
    CancelDecision.RESCHEDULED: pb.CANCEL_OUTCOME_RESCHEDULED,
}


class Cancels:
    """Answers calls that name messages. For the event loop's thread."""

    def __init__(self, sights: Sights, groups: CancelGroups, passed_on: PassedCancels) -> None:
        self._sights = sights
        self._groups = groups
        self._passed_on = passed_on

    async def cancel(
        self, request: pb.CancelRequest, *, passed: bool, left_s: float | None
    ) -> pb.CancelResponse:
        """Cancels messages, or returns why not.

        Args:
            request: Which messages.
            passed: Another node has forwarded the call.
            left_s: How long the caller waits; None: it does not say.

        Raises:
            RefusedError: TOO_MANY_MESSAGES, and what concerns every message: NO_LEADER,
                BACKPRESSURE; of a single message also those of references, NOT_UP_TO_DATE,
                CANCEL_UNKNOWN, and those of the writing.
        """
        references = _references(request)
        within_s = WAIT_S if left_s is None else min(WAIT_S, max(left_s - _ANSWERING_S, left_s / 2))
        messages = request.messages or [request.message]
        passed_on = await self._sights.elsewhere(
            passed=passed,
            call=lambda address: self._passed_on.cancel(address, messages, within_s),
        )
        if passed_on is not None:
            return _response(passed_on, is_one=not request.messages)
        if request.partly:
            return _response(await self._groups.cancel_partly(references, within_s), is_one=False)
        results = await self._groups.cancel(references, within_s)
        return _response(results, is_one=not request.messages)


def _response(results: Sequence[Answered | PassedOn | None], *, is_one: bool) -> pb.CancelResponse:
    reasons = {each.reason if isinstance(each, Refusal) else None for each in results}
    if len(reasons) == 1 and (is_one or reasons <= OF_ALL):
        for each in results:
            if isinstance(each, Refusal):
                raise RefusedError.of(each)
    answers = list(map(_result, results))
    if not is_one:
        return pb.CancelResponse(results=answers)
    due_ms = answers[0].due_ms if answers[0].HasField("due_ms") else None
    return pb.CancelResponse(outcome=answers[0].outcome, due_ms=due_ms)


def _references(request: pb.CancelRequest) -> list[Reference | Refusal]:
    if request.HasField("message") or not request.messages:
        if request.messages:
            raise RefusedError(Reason.HANDLE_AMBIGUOUS, "Both one message and many are named")
        return [reference_of(request.message)]  # an invalid one is refused here
    if len(request.messages) > MESSAGES_AT_MOST:
        count = len(request.messages)
        raise RefusedError(
            Reason.TOO_MANY_MESSAGES, f"{counted(count, 'message')}, {MESSAGES_AT_MOST:,} at most"
        )
    return list(_each(request.messages))


def _each(messages: Sequence[pb.MessageRef]) -> Iterator[Reference | Refusal]:
    for message in messages:
        try:
            yield reference_of(message)
        except RefusedError as error:
            yield error.refusal


def _result(answered: Answered | PassedOn | None) -> pb.MessageCancelled:
    if answered is None:
        return pb.MessageCancelled()
    if isinstance(answered, Refusal):
        return pb.MessageCancelled(error=answered.as_error())
    if isinstance(answered, pb.MessageCancelled):
        return answered
    return pb.MessageCancelled(outcome=OUTCOMES[answered.decision], due_ms=answered.moved_ms)
