"""Cancel: carries out what ``core/leader/cancel.py`` decides.

A cancel is a frame of the leader's node's wheel, and an answer comes from a committed progress
record: so after the frame is written, each new word of the cleaner is looked at until one decides.
A node that does not lead passes the call on (``calls_to_nodes.py``).
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

import numpy as np

from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.format import Kind
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.link import CommitSoon
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.changing.sights import Sights, due_of
from delaywheel_replica.server.commit.writing import Writing
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.lookup.references import Reference, reference_of
from delaywheel_replica.server.lookup.scan import Found
from delaywheel_replica.server.node.calls_to_nodes import Passing
from delaywheel_replica.server.node.node_view import NodeView
from delaywheel_replica.server.node.refusals import RefusedError

_WAIT_S: Final = 10.0

_log = get_logger(__name__)

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
        next_word: Callable[[], Awaitable[object]],
    ) -> None:
        """Prepares.

        Args:
            view: what the parts know of the node.
            queries: finds messages.
            writing: writes the cancel.
            passing: knows the way to the leader's node.
            ask: asks the cleaner to commit soon.
            next_word: waits for the next reading of the cleaner's row.
        """
        self._view = view
        self._queries = queries
        self._sights = Sights(view, queries, passing)
        self._writing = writing
        self._passing = passing
        self._ask = ask
        self._next_word = next_word

    async def cancel(self, request: pb.CancelRequest, *, passed: bool) -> pb.CancelResponse:
        """Cancels a message, or returns why it cannot.

        Args:
            request: which one.
            passed: another node has passed the call on.

        Raises:
            RefusedError: NO_LEADER, NOT_UP_TO_DATE, HANDLE_AMBIGUOUS, CANCEL_UNKNOWN, or that of
                the writing.
        """
        reference = reference_of(request.message)
        if self._view.cleaner.leading() is None and not passed:
            address = self._passing.leader_address()
            if address is not None:
                return await self._passing.cancel(address, request)
        return await self._cancel(reference, request.message)

    async def _cancel(self, reference: Reference, named: pb.MessageRef) -> pb.CancelResponse:
        found = await self._queries.find(reference)
        due_ms = due_of(reference, found)
        # From here on it is this message, whatever else comes to lie in that second.
        reference = replace(reference, due_ms=due_ms)
        decision = await self._sights.decide(reference, named, found, written=False)
        if decision is CancelDecision.WRITE:
            written = await self._writing.submit(_cancel_of(reference.id, due_ms), Kind.CANCELS)
            for refusal in written.failed.values():
                raise RefusedError(refusal.reason, refusal.detail)
            found = await self._queries.find(reference)
            decision = CancelDecision.WAIT
        elif decision is CancelDecision.UNKNOWN:  # nothing was written
            raise RefusedError(Reason.NOT_UP_TO_DATE)
        if decision is CancelDecision.WAIT:
            decision = await self._wait(reference, named, found)
        if decision is CancelDecision.NO_LEADER:
            raise RefusedError(Reason.NO_LEADER)
        if decision is CancelDecision.RESCHEDULED:
            moved_ms = self._sights.moved_ms((reference.id, due_ms), found)
            return pb.CancelResponse(outcome=pb.CANCEL_OUTCOME_RESCHEDULED, due_ms=moved_ms)
        outcome = _OUTCOMES.get(decision)
        if outcome is None:
            raise RefusedError(Reason.CANCEL_UNKNOWN)
        return pb.CancelResponse(outcome=outcome)

    async def _wait(
        self, reference: Reference, named: pb.MessageRef, found: Found
    ) -> CancelDecision:
        """Looks at each committed progress until one decides."""
        self._ask(CommitSoon())
        try:
            async with asyncio.timeout(_WAIT_S):
                while True:
                    decision = await self._sights.decide(reference, named, found, written=True)
                    if decision is CancelDecision.RESCHEDULED:
                        await self._queries.look_for_cancels(reference, found)
                    if decision is not CancelDecision.WAIT:
                        return decision
                    await self._next_word()
        except TimeoutError:
            return CancelDecision.UNKNOWN


def _cancel_of(id_: bytes, due_ms: int) -> Columns:
    return Columns.of_cancels(
        np.array([due_ms], dtype=np.int64), np.frombuffer(id_, dtype=np.uint8).reshape(1, -1)
    )
