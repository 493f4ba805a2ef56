"""Other dues for pending messages: what the leader's node does (core/leader/rescheduling.py).

Two independent parts. A change is proposed to the cleaner again and again, until a record decides
the proposal, or it is known that none will. And the leader's node writes what is decided,
whichever node received the request (decided_dues.py).

| a message is | until | then |
|---|---|---|
| queued | fewer are under way, or have records, than may: its turn | looked up; or dropped |
| looked up | with all that begin at the same time | answered; it is proposed |
| proposed | a record decides it, or it is known that none will | answered |

A message is in this table once for each due: whoever asks again joins its first attempt. The answer
to a proposal that would not be decided is known without making it: while what was done early is
still to come.

| once it is proposed | the answer is |
|---|---|
| the record stands, or the mark is in the slot | RESCHEDULED, with the present due |
| a cancel or a delivery is known, as for a cancel | that |
| its second is deleted, and it is at the due that is asked for | RESCHEDULED, with that due |
| none of these within 10 s | RESCHEDULE_UNKNOWN: repeating the call finds out |

A due that has passed before a record decides it is decided by none any more. So another one is
proposed then: the nearest that is possible, and twice as far ahead each time, since what delayed
the first one may last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.core.leader.rescheduling import MOST
from delaywheel_replica.core.protocol.reschedules import MessageKey, Reschedule, RescheduleProposal
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.process.round_robin import RoundRobin
from delaywheel_replica.quantities import about
from delaywheel_replica.server.access.callers import CallContext
from delaywheel_replica.server.access.shared_room import SharedRoom
from delaywheel_replica.server.changing.awaited import (
    PASSED_ON_S,
    AwaitedCall,
    LaterCall,
    Waiters,
    check_not_all_refused,
    parsed,
    within_s_of,
)
from delaywheel_replica.server.changing.decided_dues import DecidedDues
from delaywheel_replica.server.changing.finder import MessageFinder
from delaywheel_replica.server.changing.passed_on import PassedChanges
from delaywheel_replica.server.changing.pending import Decided, Subject
from delaywheel_replica.server.changing.permission import in_order, judged
from delaywheel_replica.server.lookup.references import Reference, reference_of
from delaywheel_replica.server.lookup.scan import Found
from delaywheel_replica.server.node.calls_to_nodes import WAIT_S
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.naming import handle_of
from delaywheel_replica.server.node.node_view import NodeView, monotonic_ms, wall_ms
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError, refusal_of
from delaywheel_replica.server.node.turns import start

QUEUED_AT_MOST: Final = 4_096
"""Those of one sharer take some eight seconds."""
_KEPT_MS: Final = 1_000
"""So long an attempt waits for the next call that names it, once the time of the last one is over,
even if that was answered in part before: it keeps its place."""
_WRITTEN_S: Final = 5.0
_AGAIN_S: Final = 0.2
"""How often it is proposed again: what one transaction does not decide, it forgets."""
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
_NOT_FOUND: Final = pb.MessageRescheduled(outcome=pb.RESCHEDULE_OUTCOME_NOT_FOUND)
_CERTAIN: Final = _OUTCOMES.keys() - {CancelDecision.TOO_LATE}
"""Final even after it was proposed: it may have been decided before it was too late."""


@dataclass(frozen=True, slots=True)
class Span:
    """How far ahead a due may be: the greatest delay, and by how much clocks may differ."""

    span_seconds: int
    clock_skew_ms: int

    def checked(self, due_ms: int, now_ms: int) -> int:
        """A new due that is no nearer than possible.

        Raises:
            RequestRefusedError: DUE_INVALID, DUE_BEYOND_SPAN.
        """
        if due_ms <= 0:
            raise RequestRefusedError(Reason.DUE_INVALID, f"Due {due_ms}")
        if due_ms > now_ms + self.span_seconds * 1000 + self.clock_skew_ms:
            raise RequestRefusedError(
                Reason.DUE_BEYOND_SPAN, f"More than {about(self.span_seconds * 1000)} ahead"
            )
        return max(due_ms, now_ms + _NEAREST_MS)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A message, and the due that a caller wants it to have."""

    named: Reference
    deliver_at_ms: int


@dataclass(slots=True, eq=False)
class _Attempt:
    """A message that is given another due, for all callers who ask for that.

    Attributes:
        wanted: What they ask for.
        to_ms: The due that is asked for, or the nearest that is possible.
        ahead_ms: How far ahead the next one is, if that passes before it is decided.
        admitted: Done once there is room for it.
        callers: The calls that wait for it.
        sharer: Who asked first.
        kept_until_ms: Until then it goes on without a caller.
    """

    wanted: _Wanted
    to_ms: int
    admitted: asyncio.Future[None]
    callers: Waiters[_Answered]
    sharer: Hashable
    ahead_ms: int = _NEAREST_MS
    kept_until_ms: int = 0

    @property
    def is_awaited(self) -> bool:
        return self.callers.are_any or monotonic_ms() < self.kept_until_ms


_Answered = pb.MessageRescheduled | Refusal


class Reschedules:
    """Gives messages other dues. For the event loop's thread."""

    def __init__(
        self,
        view: NodeView,
        finder: MessageFinder,
        decided_dues: DecidedDues,
        passed_on: PassedChanges[pb.NewDue, pb.MessageRescheduled],
        *,
        span: Span,
        propose: Callable[[RescheduleProposal], object],
        next_change: Callable[[], Awaitable[object]],
        counts: NodeCounts,
    ) -> None:
        """Prepares.

        Args:
            span: How far ahead a due may be.
            next_change: Waits for a new progress or role in the cleaner's row.
        """
        self._counts = counts
        self._view = view
        self._finder = finder
        self._decided_dues = decided_dues
        self._passed_on = passed_on
        self._span = span
        self._propose = propose
        self._next_change = next_change
        self._attempts: dict[_Wanted, _Attempt] = {}
        self._queue = RoundRobin[_Attempt]()
        self._queued = SharedRoom(QUEUED_AT_MOST)
        self._under_way: dict[_Attempt, bytes] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._admitting: asyncio.Task[None] | None = None

    async def reschedule(
        self, request: pb.RescheduleRequest, call: CallContext
    ) -> pb.RescheduleResponse:
        """Gives messages other dues, or returns why not; arguments as of `Cancels.cancel`.

        Raises:
            RequestRefusedError: TOO_MANY_MESSAGES, and what concerns every message: NO_LEADER,
                RESCHEDULES_BUSY, BACKPRESSURE; of a single message also those of references,
                NOT_UP_TO_DATE, DUE_INVALID, DUE_BEYOND_SPAN, DUE_TAKEN, RESCHEDULES_RESTING,
                HALF_KEEPS_DUE, RESCHEDULE_UNKNOWN, QUOTA_EXCEEDED.
        """
        # See `Cancels.cancel`.
        request.DiscardUnknownFields()
        wanted = parsed(request.messages, self._wanted)
        caller, within_s = call.caller, within_s_of(call.left_s)
        named = judged(
            caller, [each if isinstance(each, Refusal) else each.named for each in wanted]
        )
        rows = [row for row, each in enumerate(named) if isinstance(each, Reference)]
        changed: Sequence[_Answered | None] = ()
        if rows and (address := self._finder.leader_address(caller)) is not None:
            messages = [request.messages[row] for row in rows]
            changed = await self._passed_on.ask(
                address, messages, within_s, call.sharer, partly=request.partly
            )
        elif rows:
            if self._view.cleaner.leading() is None:
                raise RequestRefusedError(Reason.NO_LEADER)
            some = [each for row in rows if isinstance(each := wanted[row], _Wanted)]
            sharers = call.sharers(request.sharers, len(named))
            changed = await self._reschedule_here(
                some,
                within_s,
                [sharers[row] for row in rows],
                partly=request.partly,
                first_s=PASSED_ON_S if caller.is_node else WAIT_S,
            )
        results = in_order(named, changed)
        check_not_all_refused(results)
        return pb.RescheduleResponse(results=map(_result, results))

    async def _reschedule_here(
        self,
        wanted: Sequence[_Wanted],
        within_s: float,
        sharers: Sequence[Hashable],
        *,
        partly: bool,
        first_s: float,
    ) -> list[_Answered | None]:
        call = AwaitedCall[_Answered].of(len(wanted))
        until_ms = monotonic_ms() + round(within_s * 1000) + _KEPT_MS
        attempts = [
            self._join(each, call, row, sharer)
            for row, (each, sharer) in enumerate(zip(wanted, sharers, strict=True))
        ]
        self._admit()
        is_part = await call.wait(within_s, (lambda: True) if partly else None, first_s=first_s)
        if partly:
            for attempt in attempts:
                if attempt is not None:
                    attempt.kept_until_ms = max(attempt.kept_until_ms, until_ms)
        if is_part:
            return list(call.results)
        return [
            _over(attempt) if result is None else result
            for attempt, result in zip(attempts, call.results, strict=True)
        ]

    def _wanted(self, message: pb.NewDue) -> _Wanted:
        self._span.checked(message.deliver_at_ms, wall_ms())
        return _Wanted(reference_of(message.message), message.deliver_at_ms)

    # --- attempts

    def _join(
        self, wanted: _Wanted, call: AwaitedCall[_Answered], row: int, sharer: Hashable
    ) -> _Attempt | None:
        """Begins an attempt, or joins an earlier one; None: it is refused."""
        if (attempt := self._attempts.get(wanted)) is not None:
            is_looked_up = attempt.admitted.done()
            attempt.callers.join(LaterCall(call, _NOT_FOUND) if is_looked_up else call, row)
            return attempt
        if not self._queued.left(sharer):
            call.settle(row, Refusal(Reason.RESCHEDULES_BUSY))
            return None
        to_ms = self._span.checked(wanted.deliver_at_ms, wall_ms())
        admitted = asyncio.get_running_loop().create_future()
        attempt = _Attempt(wanted, to_ms, admitted, Waiters(call, row), sharer)
        self._attempts[wanted] = attempt
        self._queue.add(sharer, attempt)
        self._queued.take(sharer)
        start(self._carry_out(attempt), self._tasks)
        return attempt

    async def _carry_out(self, attempt: _Attempt) -> None:
        answered: _Answered = Refusal(Reason.RESCHEDULE_UNKNOWN)
        try:
            with self._counts.calls.timed("reschedule") as outcome:
                await attempt.admitted
                answered = await self._reschedule(attempt)
                name = pb.RescheduleOutcome.Name(answered.outcome)
                outcome.append(name.removeprefix("RESCHEDULE_OUTCOME_"))
        except Exception as error:  # noqa: BLE001 - a defect is named to its callers alone
            answered = refusal_of(error)
        finally:
            del self._attempts[attempt.wanted]
            self._under_way.pop(attempt, None)
            attempt.callers.settle(answered)
        self._admit()

    def _admit(self) -> None:
        """Lets attempts begin for which there is room, by turns of their sharers.

        The leader decides no more than its records have room for; it would forget other proposals.
        """
        if not self._queue:
            return
        leading = self._view.cleaner.leading()
        taken = set(self._under_way.values())
        taken.update(key.id for key in (leading.reschedules if leading is not None else ()))
        while self._queue:
            attempt = self._queue.next()
            id_ = attempt.wanted.named.id
            if not attempt.is_awaited:
                attempt.admitted.set_exception(RequestRefusedError(Reason.RESCHEDULES_BUSY))
            elif leading is None or len(taken) < MOST or id_ in taken:
                taken.add(id_)
                self._under_way[attempt] = id_
                attempt.admitted.set_result(None)
            else:
                break
            self._queue.take()
            self._queued.give_back(attempt.sharer)
        if self._queue and self._admitting is None:
            self._admitting = start(self._admit_later(), self._tasks)

    async def _admit_later(self) -> None:
        """Admits when records go; what nobody waits for any more is dropped in time, too."""
        try:
            async with asyncio.timeout(_AGAIN_S):
                await self._next_change()
        except TimeoutError:
            pass
        self._admitting = None
        self._admit()

    # --- one message

    async def _reschedule(self, attempt: _Attempt) -> pb.MessageRescheduled:
        wanted = attempt.wanted
        at_new_due = Reference.of(wanted.named.at(attempt.to_ms))
        await self._finder.read_ahead((wanted.named, at_new_due), attempt.sharer)
        subject, other = await asyncio.gather(
            self._finder.find(wanted.named), self._finder.find(at_new_due)
        )
        decision, moved_ms = await self._decide(attempt, subject, other.found)
        if decision is CancelDecision.TOO_LATE and not subject.found.copies:
            decision, moved_ms = await self._moved_before(attempt)
        if decision is not CancelDecision.RESCHEDULED:
            return pb.MessageRescheduled(outcome=_OUTCOMES[decision])
        if moved_ms is None:
            raise RequestRefusedError(
                Reason.RESCHEDULE_UNKNOWN, "It was lost before it had another due"
            )
        moved_ms = await self._until_copied(subject.key, moved_ms)
        return pb.MessageRescheduled(
            outcome=pb.RESCHEDULE_OUTCOME_RESCHEDULED,
            due_ms=moved_ms,
            handle=self._handle(subject, moved_ms),
        )

    async def _decide(self, attempt: _Attempt, subject: Subject, there: Found) -> Decided:
        """What became of the proposal; `there` is what was found at the new due."""
        proposal: RescheduleProposal | None = None
        looked_ms = monotonic_ms()
        try:
            async with asyncio.timeout(WAIT_S):
                while attempt.is_awaited:
                    decided = await self._finder.decide(subject, attempt.sharer)
                    decision = decided.decision
                    if decision is CancelDecision.RESCHEDULED:
                        return decided
                    if decision is CancelDecision.WAIT and subject.found.is_committed:
                        raise RequestRefusedError(Reason.HALF_KEEPS_DUE)
                    if decision is CancelDecision.WRITE:
                        if attempt.to_ms == subject.key.due_ms:  # perhaps since an earlier attempt
                            return Decided(CancelDecision.RESCHEDULED, attempt.to_ms)
                        if proposal is None or attempt.to_ms <= self._decided_until_ms():
                            proposal = await self._proposal(attempt, subject, there)
                        self._propose(
                            replace(
                                proposal,
                                place=self._finder.place(subject.found),
                                looked=tuple(subject.found.looked.items()),
                            )
                        )
                        await self._decided_dues.await_change(subject.key, _AGAIN_S)
                    elif decision in _OUTCOMES and (proposal is None or decision in _CERTAIN):
                        return decided
                    else:
                        _check_goes_on(decision, was_proposed=proposal is not None)
                        await self._next_change()
                    now_ms = monotonic_ms()
                    if now_ms - looked_ms >= _LOOK_MS:
                        looked_ms = now_ms
                        await self._finder.look_again(subject)
        except TimeoutError:
            pass
        raise RequestRefusedError(
            Reason.NOT_UP_TO_DATE if proposal is None else Reason.RESCHEDULE_UNKNOWN
        )

    def _decided_until_ms(self) -> int:
        """The last due that no transaction gives any more: of w + 1 a part may be done."""
        progress = self._finder.basis().progress
        return 0 if progress is None else progress.due_ms + 1

    async def _moved_before(self, attempt: _Attempt) -> Decided:
        """What to answer if the second is deleted: an earlier attempt may have succeeded.

        Then the message is at the due that is asked for once more. No other message is: a due that
        an id has already is refused to a message with another one.
        """
        key = attempt.wanted.named.at(attempt.wanted.deliver_at_ms)
        there = await self._finder.find(Reference.of(key))
        if not there.found.copies:
            return Decided(CancelDecision.TOO_LATE)
        decided = await self._finder.decide(there, attempt.sharer)
        is_pending = decided.decision in {CancelDecision.WRITE, CancelDecision.TOO_LATE}
        if is_pending and not there.found.cancels:
            return Decided(CancelDecision.RESCHEDULED, key.due_ms)
        is_known = decided.decision in _OUTCOMES or decided.moved_ms is not None
        return decided if is_known else Decided(CancelDecision.TOO_LATE)

    async def _proposal(
        self, attempt: _Attempt, subject: Subject, there: Found
    ) -> RescheduleProposal:
        """Returns the proposal, unless it is known that it would not be decided."""
        self._decided_dues.check_room(subject.key.topic)
        if attempt.to_ms <= (until_ms := self._decided_until_ms()):
            attempt.to_ms = max(wall_ms(), until_ms) + attempt.ahead_ms
            attempt.ahead_ms *= 2
            there = (await self._finder.find(Reference.of(subject.key.at(attempt.to_ms)))).found
        basis = self._finder.basis()
        if basis.may_be_half(subject.key.due_ms) and await self._finder.is_half(
            subject, attempt.sharer
        ):
            raise RequestRefusedError(Reason.HALF_KEEPS_DUE)
        progress = self._finder.basis().progress
        if progress is not None and progress.ahead:
            raise RequestRefusedError(Reason.RESCHEDULES_RESTING)
        await self._check_free(subject.key.at(attempt.to_ms), there)
        return RescheduleProposal(subject.key, attempt.to_ms, self._finder.place(subject.found))

    def _handle(self, subject: Subject, moved_ms: int) -> str:
        """Returns a handle of the message at the new due: any wheel finds it."""
        copy = self._decided_dues.copy(subject.key)
        if copy is not None and copy.to_ms == moved_ms:
            wheel = copy.wheel  # nearly always: a node's status costs
        elif (
            moved_ms == subject.key.due_ms or (open_ := self._view.status().heartbeat.open) is None
        ):
            wheel = self._finder.place(subject.found).wheel
        else:
            wheel = open_
        return handle_of(wheel, subject.key.at(moved_ms))

    async def _check_free(self, key: MessageKey, there: Found) -> None:
        """Checks that no such message or cancel exists: it would count for both.

        A heartbeat that says what a node has written comes on another connection than the frames,
        so for a moment this node lacks something every now and then.
        """
        until_ms = monotonic_ms() + _COMPLETE_MS
        while True:
            if there.copies or there.cancels:
                raise RequestRefusedError(Reason.DUE_TAKEN, f"Due {key.due_ms}")
            if there.complete:
                return
            if monotonic_ms() >= until_ms:
                raise RequestRefusedError(Reason.NOT_UP_TO_DATE)
            await self._next_change()
            there = (await self._finder.find(Reference.of(key))).found

    async def _until_copied(self, key: MessageKey, moved_ms: int) -> int:
        """Waits until the message can be found at its new due; the decision stands anyway.

        Nobody waits for the cancel at the old one: the record says the same until then.

        Returns:
            The due by then: if one passed meanwhile, the leader has put it off.
        """
        try:
            async with asyncio.timeout(_WRITTEN_S):
                while (record := self._unwritten(key)) is not None:
                    moved_ms = record.to_ms
                    copy = self._decided_dues.copy(key)
                    if copy is not None and copy.to_ms == moved_ms:
                        break
                    await self._decided_dues.await_change(key, _AGAIN_S)
        except TimeoutError:
            _log.warning("a reschedule is decided, and not written yet", due_ms=key.due_ms)
        return moved_ms

    def _unwritten(self, key: MessageKey) -> Reschedule | None:
        status = self._view.cleaner.status
        record = None if status is None else status.reschedules.get(key)
        return None if record is None or record.is_written else record


def _over(attempt: _Attempt | None) -> Refusal:
    """The answer for a message whose caller's time is over: BUSY says that nothing will happen."""
    goes_on = attempt is not None and (attempt.admitted.done() or attempt.is_awaited)
    return Refusal(Reason.RESCHEDULE_UNKNOWN if goes_on else Reason.RESCHEDULES_BUSY)


def _result(answered: _Answered | None) -> pb.MessageRescheduled:
    if answered is None:
        return pb.MessageRescheduled()
    if isinstance(answered, Refusal):
        return pb.MessageRescheduled(error=answered.as_error())
    return answered


def _check_goes_on(decision: CancelDecision, *, was_proposed: bool) -> None:
    """Refuses if waiting for the next progress cannot show a caller more than is known now."""
    if decision is CancelDecision.NO_LEADER:
        raise RequestRefusedError(Reason.RESCHEDULE_UNKNOWN if was_proposed else Reason.NO_LEADER)
    if decision is CancelDecision.UNKNOWN and not was_proposed:
        raise RequestRefusedError(Reason.NOT_UP_TO_DATE)
