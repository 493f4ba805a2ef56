"""What this node knows of a message to be changed, and the decision that follows.

Cancels and reschedules begin alike: the caller's reference is parsed, a node that does not lead
forwards the call, the message is looked up, and core/leader/cancel.py decides.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import (
    CancelDecision,
    CancelView,
    after_writing,
    before_writing,
    others_to_ask,
)
from delaywheel_replica.core.leader.holders import holds_progress
from delaywheel_replica.core.protocol.reschedules import MessageKey, known_due_ms
from delaywheel_replica.core.protocol.status_files import CleanerStatus
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.lookup.references import Reference, reference_of
from delaywheel_replica.server.lookup.scan import Found
from delaywheel_replica.server.node.calls_to_nodes import Passing
from delaywheel_replica.server.node.node_view import NodeView, wall_ms

_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class Subject:
    """The message that a call is about.

    Attributes:
        reference: Which message, including its due: messages that enter its second later differ.
        named: The reference as the caller gave it.
        found: Where the message and its cancels lie.
    """

    reference: Reference
    named: pb.MessageRef
    found: Found

    @property
    def key(self) -> MessageKey:
        """The message's id and due."""
        assert self.reference.due_ms is not None
        return self.reference.id, self.reference.due_ms


class Decided(NamedTuple):
    """A decision about a message.

    Attributes:
        decision: The decision.
        moved_ms: The message's new due, if it was rescheduled; None also if its frame was lost
            before the message had a new due.
    """

    decision: CancelDecision
    moved_ms: int | None = None


class Sights:
    """Examines messages until they are decided. For the event loop's thread."""

    def __init__(self, view: NodeView, queries: Queries, passing: Passing) -> None:
        self._view = view
        self._queries = queries
        self._passing = passing

    async def elsewhere(
        self, *, passed: bool, call: Callable[[str], Awaitable[_Answer]]
    ) -> _Answer | None:
        """Returns the answer of the leader's node; None: this one leads, or no leader is known.

        Args:
            passed: Another node has forwarded the call: it is not forwarded again.
            call: Makes the same call at an address.
        """
        if passed or self._view.cleaner.leading() is not None:
            return None
        address = self._passing.leader_address()
        return None if address is None else await call(address)

    async def find(self, named: pb.MessageRef) -> Subject:
        """Finds the message that a caller refers to.

        Raises:
            RefusedError: Those of references; HANDLE_AMBIGUOUS, NOT_UP_TO_DATE.
        """
        reference = reference_of(named)
        found = await self._queries.find(reference)
        return Subject(replace(reference, due_ms=_due_of(reference, found)), named, found)

    async def find_again(self, subject: Subject) -> None:
        """Finds the same message again."""
        subject.found = await self._queries.find(subject.reference)

    async def look_for_cancels(self, subject: Subject) -> None:
        """Looks for new cancels of the message, and for the mark of a reschedule."""
        await self._queries.look_for_cancels(subject.reference, subject.found)

    async def decide(self, subject: Subject, *, written: bool) -> Decided:
        """Returns the present decision about a message.

        Args:
            subject: Which message.
            written: A cancel of it was written, or found.
        """
        decided = self._decided(subject.reference, subject.found, written=written)
        match decided.decision:
            case CancelDecision.CONFIRM:
                return await self._held(subject, CancelDecision.WAIT)
            case CancelDecision.ALREADY_DELIVERED:
                # Since the last scan another caller's cancel may have been written and taken: by
                # this leader, or a later one, in a wheel of which this node may lack frames.
                decided = await self._held(subject, CancelDecision.UNKNOWN)
                # The message is done; its second may have been deleted since, and not be found.
                is_open = decided.decision is CancelDecision.WAIT
                return Decided(CancelDecision.UNKNOWN) if is_open else decided
            case CancelDecision.NOT_FOUND if not await self._nobody_has(subject.named):
                return Decided(CancelDecision.UNKNOWN)
            case _:
                return decided

    async def _held(self, subject: Subject, otherwise: CancelDecision) -> Decided:
        """Decides after a scan that has every frame up to V of the deciding progress."""
        status = self._view.cleaner.status
        if status is None or not holds_progress(status.control, self._view.status().heartbeat):
            return Decided(otherwise)
        found = await self._queries.find(subject.reference)
        sight, moved_ms = self._sight(subject.reference, found, status, confirmed=True)
        return Decided(after_writing(sight), moved_ms)

    async def _nobody_has(self, named: pb.MessageRef) -> bool:
        """Asks the other nodes: one may have acknowledged the message since its last heartbeat."""
        cleaner = self._view.cleaner.status
        wheels = () if cleaner is None else cleaner.wheels.values()
        return await self._passing.others_have_none(named, wanted=others_to_ask(wheels))

    def _decided(self, reference: Reference, found: Found, *, written: bool) -> Decided:
        sight, moved_ms = self._sight(reference, found, self._view.cleaner.status)
        return Decided(after_writing(sight) if written else before_writing(sight), moved_ms)

    def _sight(
        self,
        reference: Reference,
        found: Found,
        status: CleanerStatus | None,
        *,
        confirmed: bool = False,
    ) -> tuple[CancelView, int | None]:
        """Returns what is known of a message, and its new due by the same record."""
        assert reference.due_ms is not None
        stands = None
        if status is not None:
            stands = status.reschedules.get((reference.id, reference.due_ms))
        view = CancelView(
            due_ms=reference.due_ms,
            now_ms=wall_ms(),
            leading=self._view.cleaner.leading() is not None,
            progress=None if status is None else status.progress,
            copies=found.copies,
            cancels=found.cancels,
            complete=found.complete,
            readable=found.readable,
            rescheduled=stands is not None or found.rescheduled_to_ms is not None,
            confirmed=confirmed,
        )
        return view, known_due_ms(stands, found.rescheduled_to_ms)


def _due_of(reference: Reference, found: Found) -> int:
    """The due of the message; if it is not found, any due of that second."""
    if reference.due_ms is not None:
        return reference.due_ms
    return found.dues_ms[0] if found.dues_ms else reference.slot * 1000
