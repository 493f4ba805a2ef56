"""What this node knows of one message, and what that decides (core/leader/cancel.py)."""

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import (
    CancelDecision,
    CancelView,
    after_writing,
    before_writing,
    others_to_ask,
)
from delaywheel_replica.core.leader.holders import holds_progress
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.core.protocol.status_files import CleanerStatus
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.lookup.scan import Found
from delaywheel_replica.server.node.calls_to_nodes import Passing
from delaywheel_replica.server.node.node_view import NodeView, wall_ms


class Sights:
    """Looks, as often as it takes to say something. For the event loop's thread."""

    def __init__(self, view: NodeView, queries: Queries, passing: Passing) -> None:
        self._view = view
        self._queries = queries
        self._passing = passing

    async def decide(
        self, reference: Reference, named: pb.MessageRef, found: Found, *, written: bool
    ) -> CancelDecision:
        """What is decided of a message now.

        Args:
            reference: which one, with its due.
            named: the same, as its caller named it.
            found: where it and its cancels lie.
            written: a cancel was written, or lay there.
        """
        sight = self._sight(reference, found, self._view.cleaner.status)
        decision = after_writing(sight) if written else before_writing(sight)
        match decision:
            case CancelDecision.CONFIRM:
                return await self._held(reference, CancelDecision.WAIT)
            case CancelDecision.ALREADY_DELIVERED:
                # Since the last scan a cancel of another caller may have been written and taken:
                # here, or by a next leader, in a wheel of which this node may lack frames.
                decision = await self._held(reference, CancelDecision.UNKNOWN)
                # It is done: not to be found any more it is when its second was deleted meanwhile.
                is_open = decision is CancelDecision.WAIT
                return CancelDecision.UNKNOWN if is_open else decision
            case CancelDecision.NOT_FOUND if not await self._nobody_has(named):
                return CancelDecision.UNKNOWN
            case _:
                return decision

    def moved_ms(self, key: MessageKey, found: Found) -> int:
        """The due of a message that was rescheduled."""
        status = self._view.cleaner.status
        stands = None if status is None else status.reschedules.get(key)
        moved_ms = found.rescheduled_to_ms if stands is None else stands.to_ms
        assert moved_ms is not None
        return moved_ms

    async def _held(self, reference: Reference, otherwise: CancelDecision) -> CancelDecision:
        """Decides by a scan that has every frame up to V of the progress by which it decides."""
        status = self._view.cleaner.status
        if status is None or not holds_progress(status.control, self._view.status().heartbeat):
            return otherwise
        found = await self._queries.find(reference)
        return after_writing(self._sight(reference, found, status, confirmed=True))

    async def _nobody_has(self, named: pb.MessageRef) -> bool:
        """What others acknowledged since their last heartbeats, this node has not heard of."""
        cleaner = self._view.cleaner.status
        wheels = () if cleaner is None else cleaner.wheels.values()
        return await self._passing.others_have_none(named, wanted=others_to_ask(wheels))

    def _sight(
        self,
        reference: Reference,
        found: Found,
        status: CleanerStatus | None,
        *,
        confirmed: bool = False,
    ) -> CancelView:
        assert reference.due_ms is not None
        key = reference.id, reference.due_ms
        return CancelView(
            due_ms=reference.due_ms,
            now_ms=wall_ms(),
            leading=self._view.cleaner.leading() is not None,
            progress=None if status is None else status.progress,
            copies=found.copies,
            cancels=found.cancels,
            complete=found.complete,
            rescheduled=found.rescheduled_to_ms is not None
            or (status is not None and key in status.reschedules),
            confirmed=confirmed,
        )


def due_of(reference: Reference, found: Found) -> int:
    """The due of what a caller means; where nothing is found, one of its second."""
    if reference.due_ms is not None:
        return reference.due_ms
    return found.dues_ms[0] if found.dues_ms else reference.slot * 1000
