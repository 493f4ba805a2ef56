"""Cancel: carries out what ``core/leader/cancel.py`` decides.

A cancel is a frame in the wheel of the leader's node, and a committed progress record decides the
answer: once the frame is written, each new progress is examined until one decides. A node that does
not lead forwards the call (``calls_to_nodes.py``).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np

from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.format import Kind
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.link import CommitSoon
from delaywheel_replica.server.changing.sights import Decided, Sights, Subject
from delaywheel_replica.server.commit.writing import Writing
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.lookup.references import reference_of
from delaywheel_replica.server.node.calls_to_nodes import Passing
from delaywheel_replica.server.node.node_view import NodeView
from delaywheel_replica.server.node.refusals import RefusedError

_WAIT_S: Final = 10.0

_OUTCOMES: Final = {
    CancelDecision.CANCELLED: pb.CANCEL_OUTCOME_CANCELLED,
    CancelDecision.ALREADY_DELIVERED: pb.CANCEL_OUTCOME_ALREADY_DELIVERED,
    CancelDecision.TOO_LATE: pb.CANCEL_OUTCOME_TOO_LATE,
    CancelDecision.NOT_FOUND: pb.CANCEL_OUTCOME_NOT_FOUND,
}


class Cancels:
    """Cancels messages. For the event loop's thread."""

    def __init__(
        self,
        view: NodeView,
        queries: Queries,
        writing: Writing,
        passing: Passing,
        *,
        ask: Callable[[CommitSoon], object],
        next_change: Callable[[], Awaitable[object]],
    ) -> None:
        """Prepares.

        Args:
            view: What the parts of the node know.
            queries: Finds messages.
            writing: Writes the cancel.
            passing: Forwards calls to the leader's node.
            ask: Asks the cleaner to commit soon.
            next_change: Waits for a new progress or role in the cleaner's row.
        """
        self._sights = Sights(view, queries, passing)
        self._writing = writing
        self._passing = passing
        self._ask = ask
        self._next_change = next_change

    async def cancel(self, request: pb.CancelRequest, *, passed: bool) -> pb.CancelResponse:
        """Cancels a message, or returns why it cannot.

        Raises:
            RefusedError: NO_LEADER, NOT_UP_TO_DATE, HANDLE_AMBIGUOUS, CANCEL_UNKNOWN, and those of
                the writing.
        """
        reference_of(request.message)  # an invalid one is refused here
        answer = await self._sights.elsewhere(
            passed=passed, call=lambda address: self._passing.cancel(address, request)
        )
        if answer is not None:
            return answer
        decision, moved_ms = await self._cancel(await self._sights.find(request.message))
        if decision is CancelDecision.NO_LEADER:
            raise RefusedError(Reason.NO_LEADER)
        if decision is CancelDecision.RESCHEDULED:
            return pb.CancelResponse(outcome=pb.CANCEL_OUTCOME_RESCHEDULED, due_ms=moved_ms)
        outcome = _OUTCOMES.get(decision)
        if outcome is None:
            raise RefusedError(Reason.CANCEL_UNKNOWN)
        return pb.CancelResponse(outcome=outcome)

    async def _cancel(self, subject: Subject) -> Decided:
        decided = await self._sights.decide(subject, written=False)
        if decided.decision is CancelDecision.WRITE:
            written = await self._writing.submit(_cancel_of(*subject.key), Kind.CANCELS)
            for refusal in written.failed.values():
                raise RefusedError(refusal.reason, refusal.detail)
            await self._sights.find_again(subject)
            return await self._wait(subject)
        if decided.decision is CancelDecision.UNKNOWN:  # nothing was written
            raise RefusedError(Reason.NOT_UP_TO_DATE)
        return await self._wait(subject) if decided.decision is CancelDecision.WAIT else decided

    async def _wait(self, subject: Subject) -> Decided:
        """Examines each committed progress until one decides."""
        self._ask(CommitSoon())
        try:
            async with asyncio.timeout(_WAIT_S):
                while True:
                    decided = await self._sights.decide(subject, written=True)
                    if decided.decision is not CancelDecision.WAIT:
                        return decided
                    await self._next_change()
        except TimeoutError:
            return Decided(CancelDecision.UNKNOWN)


def _cancel_of(id_: bytes, due_ms: int) -> Columns:
    return Columns.of_cancels(
        np.array([due_ms], dtype=np.int64), np.frombuffer(id_, dtype=np.uint8).reshape(1, -1)
    )
