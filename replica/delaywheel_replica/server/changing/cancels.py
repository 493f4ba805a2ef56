"""Cancel: messages that a call names, whichever node the caller has asked.

The leader's node decides (gathering.py), each message on its own; another node passes them on to it
(passed_on.py).
"""

from collections.abc import Sequence
from typing import Final

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.server.access.callers import Caller
from delaywheel_replica.server.changing.awaited import (
    PASSED_ON_S,
    check_some,
    parsed,
    within_s_of,
)
from delaywheel_replica.server.changing.finder import MessageFinder
from delaywheel_replica.server.changing.gathering import CancelGroups
from delaywheel_replica.server.changing.passed_on import PassedChanges, change_permitted
from delaywheel_replica.server.changing.waiting import Answered
from delaywheel_replica.server.lookup.references import reference_of
from delaywheel_replica.server.node.calls_to_nodes import WAIT_S
from delaywheel_replica.server.node.refusals import Refusal

OUTCOMES: Final = {
    CancelDecision.CANCELLED: pb.CANCEL_OUTCOME_CANCELLED,
    CancelDecision.ALREADY_DELIVERED: pb.CANCEL_OUTCOME_ALREADY_DELIVERED,
    CancelDecision.TOO_LATE: pb.CANCEL_OUTCOME_TOO_LATE,
    CancelDecision.NOT_FOUND: pb.CANCEL_OUTCOME_NOT_FOUND,
    CancelDecision.RESCHEDULED: pb.CANCEL_OUTCOME_RESCHEDULED,
}
_RESULTS: Final = {
    decision: pb.MessageCancelled(outcome=outcome) for decision, outcome in OUTCOMES.items()
}


class Cancels:
    """Answers calls that name messages. For the event loop's thread."""

    def __init__(
        self,
        finder: MessageFinder,
        groups: CancelGroups,
        passed_on: PassedChanges[pb.MessageRef, pb.MessageCancelled],
    ) -> None:
        self._finder = finder
        self._groups = groups
        self._passed_on = passed_on

    async def cancel(
        self, request: pb.CancelRequest, caller: Caller, *, left_s: float | None
    ) -> pb.CancelResponse:
        """Cancels messages, or returns why not.

        Args:
            caller: Who asks; a node has judged its own caller.
            left_s: How long the caller waits; None: it does not say.

        Raises:
            RefusedError: TOO_MANY_MESSAGES, and what concerns every message: NO_LEADER,
                BACKPRESSURE; of a single message also those of references, NOT_UP_TO_DATE,
                CANCEL_UNKNOWN, and those of the writing.
        """
        # A reference is short, but for these: what one caller adds must not fill a call of many.
        request.DiscardUnknownFields()
        references = parsed(request.messages, reference_of)
        within_s = within_s_of(left_s)

        async def cancel(rows: Sequence[int]) -> Sequence[Answered | pb.MessageCancelled | None]:
            passed_on = await self._finder.elsewhere(
                passed=caller.is_node,
                call=lambda address: self._passed_on.ask(
                    address,
                    [request.messages[row] for row in rows],
                    within_s,
                    partly=request.partly,
                ),
            )
            if passed_on is not None:
                return passed_on
            named = [references[row] for row in rows]
            first_s = PASSED_ON_S if caller.is_node else WAIT_S
            return await self._groups.cancel(
                named, within_s, partly=request.partly, first_s=first_s
            )

        results: Sequence[Answered | pb.MessageCancelled | None]
        results = await change_permitted(self._finder, caller, references, cancel)
        check_some(results)
        return pb.CancelResponse(results=map(_result, results))


def _result(answered: Answered | pb.MessageCancelled | None) -> pb.MessageCancelled:
    if answered is None:
        return pb.MessageCancelled()
    if isinstance(answered, Refusal):
        return pb.MessageCancelled(error=answered.as_error())
    if isinstance(answered, pb.MessageCancelled):
        return answered
    if answered.moved_ms is None:
        return _RESULTS[answered.decision]
    return pb.MessageCancelled(outcome=OUTCOMES[answered.decision], due_ms=answered.moved_ms)
