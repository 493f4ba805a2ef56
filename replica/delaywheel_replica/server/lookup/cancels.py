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
from delaywheel_replica.core.leader.cancel import (
    CancelDecision,
    CancelView,
    after_writing,
    before_writing,
    others_to_ask,
)
from delaywheel_replica.core.leader.holders import holds_progress
from delaywheel_replica.link import CommitSoon
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.commit.writing import Writing
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.lookup.references import Reference, reference_of
from delaywheel_replica.server.lookup.scan import Found
from delaywheel_replica.server.node.calls_to_nodes import Passing
from delaywheel_replica.server.node.node_view import NodeView, wall_ms
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
        return pb.CancelResponse(outcome=await self._cancel(reference, request.message))

    async def _cancel(
        self, reference: Reference, named: pb.MessageRef
    ) -> "pb.CancelOutcome.ValueType":
        found = await self._queries.find(reference)
        due_ms = _due_of(reference, found)
        # From here on it is this message, whatever else comes to lie in that second.
        reference = replace(reference, due_ms=due_ms)
        decision = before_writing(self._sight(due_ms, found))
        if decision is CancelDecision.ALREADY_DELIVERED:
            decision = await self._delivered(reference, due_ms)
        if decision is CancelDecision.NOT_FOUND and not await self._nobody_has(named):
            decision = CancelDecision.UNKNOWN
        if decision is CancelDecision.WRITE:
            written = await self._writing.submit(_cancel_of(reference.id, due_ms), Kind.CANCELS)
            for refusal in written.failed.values():
                raise RefusedError(refusal.reason, refusal.detail)
            found = await self._queries.find(reference)
            decision = CancelDecision.WAIT
        elif decision is CancelDecision.UNKNOWN:  # nothing was written
            raise RefusedError(Reason.NOT_UP_TO_DATE)
        if decision is CancelDecision.WAIT:
            decision = await self._wait(due_ms, found)
            if decision is CancelDecision.ALREADY_DELIVERED:
                decision = await self._delivered(reference, due_ms)
        if decision is CancelDecision.NO_LEADER:
            raise RefusedError(Reason.NO_LEADER)
        outcome = _OUTCOMES.get(decision)
        if outcome is None:
            raise RefusedError(Reason.CANCEL_UNKNOWN)
        return outcome

    async def _nobody_has(self, named: pb.MessageRef) -> bool:
        """Whether no other node has the message, which one may have just acknowledged."""
        cleaner = self._view.cleaner.status
        wheels = () if cleaner is None else cleaner.wheels.values()
        return await self._passing.others_have_none(named, wanted=others_to_ask(wheels))

    async def _wait(self, due_ms: int, found: Found) -> CancelDecision:
        """Follows committed progress until it decides the cancel."""
        self._ask(CommitSoon())
        try:
            async with asyncio.timeout(_WAIT_S):
                while True:
                    decision = after_writing(self._sight(due_ms, found))
                    if decision is not CancelDecision.WAIT:
                        return decision
                    await self._next_word()
        except TimeoutError:
            return CancelDecision.UNKNOWN

    async def _delivered(self, reference: Reference, due_ms: int) -> CancelDecision:
        """Whether the message was delivered, as far as this node can still see.

        Since the last scan a cancel of another caller may have been written and taken: here, or by
        a next leader, in a wheel of which this node may lack frames.
        """
        cleaner = self._view.cleaner.status
        if cleaner is None or not holds_progress(cleaner.control, self._view.status().beat):
            return CancelDecision.UNKNOWN
        decision = after_writing(self._sight(due_ms, await self._queries.find(reference)))
        # The message is done: not to be found any more it is when its second was deleted meanwhile.
        return CancelDecision.UNKNOWN if decision is CancelDecision.WAIT else decision

    def _sight(self, due_ms: int, found: Found) -> CancelView:
        status = self._view.cleaner.status
        return CancelView(
            due_ms=due_ms,
            now_ms=wall_ms(),
            leading=self._view.cleaner.leading() is not None,
            progress=None if status is None else status.progress,
            copies=found.copies,
            cancels=found.cancels,
            complete=found.complete,
        )


def _due_of(reference: Reference, found: Found) -> int:
    if reference.due_ms is not None:
        return reference.due_ms
    return found.dues_ms[0] if found.dues_ms else reference.slot * 1000


def _cancel_of(id_: bytes, due_ms: int) -> Columns:
    return Columns.of_cancels(
        np.array([due_ms], dtype=np.int64), np.frombuffer(id_, dtype=np.uint8).reshape(1, -1)
    )
