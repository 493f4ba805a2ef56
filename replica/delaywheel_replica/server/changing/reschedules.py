"""Another due for a pending message: what the leader's node does (core/leader/rescheduling.py).

Two independent parts. A caller's wish is announced to the cleaner again and again, until a record
decides the wish, or it is known that none will. And the leader's node writes what is decided,
whichever node received the wish (decided.py).

A wish that would not be decided is not announced; its caller gets the reason at once: while as
many wishes are announced, and records stand, as may stand at once; and while what was done early
is still to come.

| once the wish is announced | the answer is |
|---|---|
| the record stands, or the mark is in the slot | RESCHEDULED, with the present due |
| a cancel or a delivery is known, as for a cancel | that |
| its second is deleted, and it is at the due that is asked for | RESCHEDULED, with that due |
| none of these within 10 s | RESCHEDULE_UNKNOWN: repeating the call finds out |
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.core.leader.rescheduling import MOST, nodes_behind
from delaywheel_replica.core.protocol.control import ControlState
from delaywheel_replica.core.protocol.progress import Position
from delaywheel_replica.core.protocol.reschedules import MessageKey, Reschedule, RescheduleWish
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.quantities import about
from delaywheel_replica.server.changing.decided import Decisions
from delaywheel_replica.server.changing.sights import Sights
from delaywheel_replica.server.changing.waiting import Decided, Subject
from delaywheel_replica.server.lookup.references import Reference, reference_of
from delaywheel_replica.server.lookup.scan import Found
from delaywheel_replica.server.node.calls_to_nodes import Passing
from delaywheel_replica.server.node.counts import Counts
from delaywheel_replica.server.node.node_view import NodeView, monotonic_ms, wall_ms
from delaywheel_replica.server.node.refusals import RefusedError

_WAIT_S: Final = 10.0
_WRITTEN_S: Final = 5.0
_AGAIN_S: Final = 0.2
"""How often a wish is announced again: what one transaction does not decide, it forgets."""
_LOOK_MS: Final = 500
"""How often a caller that waits has its second looked at: the record shows most decisions, and the
leader itself looks for cancels before it decides."""
_COMPLETE_MS: Final = 1_000
"""How long a caller waits for frames that this node lacks, before it is sent elsewhere."""
_NEAREST_MS: Final = 500
"""A new due that is nearer becomes this: it is decided while it is still to come."""

_log = get_logger(__name__)

_OUTCOMES: Final = {
    CancelDecision.CANCELLED: pb.RESCHEDULE_OUTCOME_CANCELLED,
    CancelDecision.ALREADY_DELIVERED: pb.RESCHEDULE_OUTCOME_ALREADY_DELIVERED,
    CancelDecision.TOO_LATE: pb.RESCHEDULE_OUTCOME_TOO_LATE,
    CancelDecision.NOT_FOUND: pb.RESCHEDULE_OUTCOME_NOT_FOUND,
}
_CERTAIN: Final = _OUTCOMES.keys() - {CancelDecision.TOO_LATE}
"""Final even after a wish was announced: it may have been decided before it was too late."""


@dataclass(frozen=True, slots=True)
class Span:
    """How far ahead a due may be: the greatest delay, and by how much clocks may differ."""

    span_seconds: int
    clock_skew_ms: int

    def checked(self, due_ms: int, now_ms: int) -> int:
        """A new due that is no nearer than possible.

        Raises:
            RefusedError: DUE_INVALID, DUE_BEYOND_SPAN.
        """
        if due_ms <= 0:
            raise RefusedError(Reason.DUE_INVALID, f"Due {due_ms}")
        if due_ms > now_ms + self.span_seconds * 1000 + self.clock_skew_ms:
            raise RefusedError(
                Reason.DUE_BEYOND_SPAN, f"More than {about(self.span_seconds * 1000)} ahead"
            )
        return max(due_ms, now_ms + _NEAREST_MS)


class Reschedules:
    """Gives messages other dues. For the event loop's thread."""

    def __init__(
        self,
        view: NodeView,
        sights: Sights,
        decisions: Decisions,
        passing: Passing,
        *,
        span: Span,
        announce: Callable[[RescheduleWish], object],
        next_change: Callable[[], Awaitable[object]],
        counts: Counts,
    ) -> None:
        """Prepares.

        Args:
            view: What the parts know of the node.
            sights: Finds messages, and examines them.
            decisions: Writes what is decided.
            passing: Forwards calls to the leader's node.
            span: How far ahead a due may be.
            announce: Sends a wish to the cleaner.
            next_change: Waits for a new progress or role in the cleaner's row.
            counts: Counts what became of each message.
        """
        self._counts = counts
        self._view = view
        self._sights = sights
        self._decisions = decisions
        self._passing = passing
        self._span = span
        self._announce = announce
        self._next_change = next_change
        self._wished: Counter[MessageKey] = Counter()

    async def reschedule(
        self, request: pb.RescheduleRequest, *, passed: bool
    ) -> pb.RescheduleResponse:
        """Gives a message another due, or raises the reason.

        Raises:
            RefusedError: NO_LEADER, NOT_UP_TO_DATE, HANDLE_AMBIGUOUS, DUE_INVALID,
                DUE_BEYOND_SPAN, DUE_TAKEN, RELEASE_TOO_OLD, RESCHEDULES_BUSY,
                RESCHEDULES_RESTING, RESCHEDULE_UNKNOWN.
        """
        named = reference_of(request.message)  # refused here, if it is none
        to_ms = self._span.checked(request.deliver_at_ms, wall_ms())
        answer = await self._sights.elsewhere(
            passed=passed, call=lambda address: self._passing.reschedule(address, request)
        )
        if answer is not None:
            return answer
        if self._view.cleaner.leading() is None:
            raise RefusedError(Reason.NO_LEADER)
        with self._counts.calls.timed("reschedule") as outcome:
            response = await self._reschedule(named, to_ms, request)
            name = pb.RescheduleOutcome.Name(response.outcome)
            outcome.append(name.removeprefix("RESCHEDULE_OUTCOME_"))
        return response

    async def _reschedule(
        self, named: Reference, to_ms: int, request: pb.RescheduleRequest
    ) -> pb.RescheduleResponse:
        self._check_room(named.id)  # before anything is read: callers come back when it is full
        subject = await self._sights.find(named)
        decision, moved_ms = await self._decide(subject, to_ms)
        if decision is CancelDecision.TOO_LATE and not subject.found.copies:
            decision, moved_ms = await self._moved_before(subject.reference.id, request)
        if decision is not CancelDecision.RESCHEDULED:
            return pb.RescheduleResponse(outcome=_OUTCOMES[decision])
        if moved_ms is None:
            raise RefusedError(Reason.RESCHEDULE_UNKNOWN, "It was lost before it had another due")
        moved_ms = await self._until_written(subject.key, moved_ms)
        return pb.RescheduleResponse(
            outcome=pb.RESCHEDULE_OUTCOME_RESCHEDULED,
            due_ms=moved_ms,
            handle=self._handle(subject, moved_ms),
        )

    async def _decide(self, subject: Subject, to_ms: int) -> Decided:
        """What became of the wish."""
        wish: RescheduleWish | None = None
        looked_ms = monotonic_ms()
        try:
            async with asyncio.timeout(_WAIT_S):
                while True:
                    decided = await self._sights.decide(subject)
                    decision = decided.decision
                    if decision is CancelDecision.RESCHEDULED:
                        return decided
                    if decision is CancelDecision.WRITE:
                        if to_ms == subject.key[1]:  # it has it, perhaps since an earlier attempt
                            return Decided(CancelDecision.RESCHEDULED, to_ms)
                        wish = wish or await self._wish(subject, to_ms)
                        self._announce(replace(wish, looked=tuple(subject.found.looked.items())))
                        await self._decisions.news(subject.key, _AGAIN_S)
                    elif decision in _OUTCOMES and (wish is None or decision in _CERTAIN):
                        return decided
                    else:
                        _check_goes_on(decision, was_announced=wish is not None)
                        await self._next_change()
                    now_ms = monotonic_ms()
                    if now_ms - looked_ms >= _LOOK_MS:
                        looked_ms = now_ms
                        await self._sights.look_for_cancels(subject)
        except TimeoutError:
            reason = Reason.NOT_UP_TO_DATE if wish is None else Reason.RESCHEDULE_UNKNOWN
            raise RefusedError(reason) from None
        finally:
            if wish is not None:
                self._wished.subtract([subject.key])
                self._wished += Counter()  # drops those without a caller

    async def _moved_before(self, id_: bytes, request: pb.RescheduleRequest) -> Decided:
        """What to answer if the second is deleted: an earlier attempt may have succeeded.

        Then the message is at the due that is asked for once more. No other message is: a due that
        an id has already is refused to a message with another one.
        """
        due_ms = request.deliver_at_ms
        there = await self._sights.find(Reference(due_ms // 1000, id_, due_ms))
        if not there.found.copies:
            return Decided(CancelDecision.TOO_LATE)
        decided = await self._sights.decide(there)
        is_pending = decided.decision in {CancelDecision.WRITE, CancelDecision.TOO_LATE}
        if is_pending and not there.found.cancels:
            return Decided(CancelDecision.RESCHEDULED, due_ms)
        is_known = decided.decision in _OUTCOMES or decided.moved_ms is not None
        return decided if is_known else Decided(CancelDecision.TOO_LATE)

    async def _wish(self, subject: Subject, to_ms: int) -> RescheduleWish:
        """Returns a wish to announce, unless it is known that it would not be decided."""
        self._check_releases()
        progress = self._sights.moment().progress
        if progress is not None and progress.ahead:
            raise RefusedError(Reason.RESCHEDULES_RESTING)
        await self._check_free(subject.reference.id, to_ms)
        self._check_room(subject.reference.id)
        self._wished[subject.key] += 1
        return RescheduleWish(subject.key, to_ms, self._place(subject.found))

    def _check_room(self, id_: bytes) -> None:
        """Applies the leader's own bounds: a wish that it would not decide now is not announced."""
        status = self._view.cleaner.status
        if status is None:
            return
        taken = self._wished.keys() | status.reschedules.keys()
        if len(taken) >= MOST and not any(id_ == key[0] for key in taken):
            raise RefusedError(Reason.RESCHEDULES_BUSY)

    def _handle(self, subject: Subject, moved_ms: int) -> str:
        """Returns a handle of the message at the new due: any wheel finds it."""
        wheel = self._view.status().heartbeat.open
        if wheel is None or moved_ms == subject.key[1]:
            wheel = self._place(subject.found).wheel
        return f"{wheel}:{moved_ms // 1000}:{subject.reference.id.hex()}"

    def _check_releases(self) -> None:
        """Checks releases as the leader does, which cannot report why it decides nothing."""
        status, own = self._view.cleaner.status, self._view.status()
        control = ControlState() if status is None else status.control
        behind = nodes_behind(control, own.heartbeats)
        if behind:
            raise RefusedError(
                Reason.RELEASE_TOO_OLD, f"Older, or not heard since the start: {', '.join(behind)}"
            )

    async def _check_free(self, id_: bytes, to_ms: int) -> None:
        """Checks that no message or cancel of this id and due exists: it would count for both.

        A heartbeat that says what a node has written comes on another connection than the frames,
        so for a moment this node lacks something every now and then.
        """
        until_ms = monotonic_ms() + _COMPLETE_MS
        while True:
            other = (await self._sights.find(Reference(to_ms // 1000, id_, to_ms))).found
            if other.copies or other.cancels:
                raise RefusedError(Reason.DUE_TAKEN, f"Due {to_ms}")
            if other.complete:
                return
            if monotonic_ms() >= until_ms:
                raise RefusedError(Reason.NOT_UP_TO_DATE)
            await self._next_change()

    def _place(self, found: Found) -> Position:
        """Returns a copy that progress covers, if there is one yet, otherwise any copy."""
        status = self._view.cleaner.status
        progress = None if status is None else status.progress
        in_v = [
            copy
            for copy in found.copies
            if progress is not None and copy.seq <= progress.seq(copy.wheel)
        ]
        return (in_v or found.copies)[0]

    async def _until_written(self, key: MessageKey, moved_ms: int) -> int:
        """Waits until the message can be found at its new due; the decision stands anyway.

        Returns:
            The due by then: if one passed meanwhile, the leader has put it off.
        """
        try:
            async with asyncio.timeout(_WRITTEN_S):
                while (
                    self._decisions.written(key) is None
                    and (stands := self._stands(key)) is not None
                ):
                    moved_ms = stands.to_ms
                    await self._decisions.news(key, _AGAIN_S)
        except TimeoutError:
            _log.warning("a reschedule is decided, and not written yet", due_ms=key[1])
        written = self._decisions.written(key)
        return moved_ms if written is None else written.to_ms

    def _stands(self, key: MessageKey) -> Reschedule | None:
        status = self._view.cleaner.status
        stands = None if status is None else status.reschedules.get(key)
        return None if stands is None or stands.is_written else stands


def _check_goes_on(decision: CancelDecision, *, was_announced: bool) -> None:
    """Refuses if waiting for the next progress cannot show a caller more than is known now."""
    if decision is CancelDecision.NO_LEADER:
        raise RefusedError(Reason.RESCHEDULE_UNKNOWN if was_announced else Reason.NO_LEADER)
    if decision is CancelDecision.UNKNOWN and not was_announced:
        raise RefusedError(Reason.NOT_UP_TO_DATE)
