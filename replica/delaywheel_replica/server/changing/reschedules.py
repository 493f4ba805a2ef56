"""Another due for a pending message: what the leader's node does (core/leader/rescheduling.py).

Two things, which know nothing of one another. A caller's wish is told to the cleaner, word after
word, until a record decides it, or until it is known that none will. And what is decided is
written, whoever wished it, by the node that leads: the copy, then the cancel with its mark; that is
told until the record is gone, or says that it is written.

| once the wish was told | is answered |
|---|---|
| the record stands, or the mark lies there | RESCHEDULED, with the due that it has |
| it was cancelled, or delivered, as a cancel would be told | so |
| nothing of that within 10 s | RESCHEDULE_UNKNOWN: a repetition finds out |
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import ID_LENGTH_BYTES, Columns
from delaywheel.storage.frames.format import Frame, Kind
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.core.leader.rescheduling import nodes_behind
from delaywheel_replica.core.protocol.control import ControlState
from delaywheel_replica.core.protocol.progress import Position
from delaywheel_replica.core.protocol.reschedules import (
    MessageKey,
    Reschedule,
    RescheduleWish,
    RescheduleWritten,
    mark_of,
)
from delaywheel_replica.core.protocol.status_files import CleanerStatus
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.changing.sights import Sights, due_of
from delaywheel_replica.server.commit.writing import Writing
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.lookup.references import Reference, reference_of
from delaywheel_replica.server.lookup.scan import Found
from delaywheel_replica.server.node.calls_to_nodes import Passing
from delaywheel_replica.server.node.node_view import NodeView, wall_ms
from delaywheel_replica.server.node.refusals import RefusedError

_WAIT_S: Final = 10.0
_WRITTEN_S: Final = 5.0
_NEAREST_MS: Final = 500
"""A new due that is nearer becomes this: it is decided while it is still to come."""

_log = get_logger(__name__)

Word = RescheduleWish | RescheduleWritten

_OUTCOMES: Final = {
    CancelDecision.CANCELLED: pb.RESCHEDULE_OUTCOME_CANCELLED,
    CancelDecision.ALREADY_DELIVERED: pb.RESCHEDULE_OUTCOME_ALREADY_DELIVERED,
    CancelDecision.TOO_LATE: pb.RESCHEDULE_OUTCOME_TOO_LATE,
    CancelDecision.NOT_FOUND: pb.RESCHEDULE_OUTCOME_NOT_FOUND,
}


@dataclass(frozen=True, slots=True)
class Span:
    """How far ahead a due may be: the greatest delay, and by how much clocks may differ."""

    span_seconds: int
    clock_skew_ms: int

    def checked(self, due_ms: int, now_ms: int) -> int:
        """A new due, no nearer than it can be.

        Raises:
            RefusedError: DUE_INVALID, DUE_BEYOND_SPAN.
        """
        if due_ms <= 0:
            raise RefusedError(Reason.DUE_INVALID, f"Due {due_ms}")
        if due_ms > now_ms + self.span_seconds * 1000 + self.clock_skew_ms:
            raise RefusedError(Reason.DUE_BEYOND_SPAN, f"More than {self.span_seconds} s ahead")
        return max(due_ms, now_ms + _NEAREST_MS)


class Reschedules:
    """Gives messages other dues. For the event loop's thread."""

    def __init__(
        self,
        view: NodeView,
        queries: Queries,
        writing: Writing,
        passing: Passing,
        *,
        span: Span,
        tell: Callable[[Word], object],
        next_word: Callable[[], Awaitable[object]],
    ) -> None:
        """Prepares; `run` writes what is decided.

        Args:
            view: what the parts know of the node.
            queries: finds messages.
            writing: writes copies and cancels.
            passing: knows the way to the leader's node.
            span: how far ahead a due may be.
            tell: tells the cleaner.
            next_word: waits for the next reading of the cleaner's row.
        """
        self._view = view
        self._queries = queries
        self._sights = Sights(view, queries, passing)
        self._writing = writing
        self._passing = passing
        self._span = span
        self._tell = tell
        self._next_word = next_word
        self._tasks: dict[MessageKey, asyncio.Task[None]] = {}
        self._written: dict[MessageKey, RescheduleWritten] = {}

    # --- wishes

    async def reschedule(
        self, request: pb.RescheduleRequest, *, passed: bool
    ) -> pb.RescheduleResponse:
        """Gives a message another due, or says why not.

        Args:
            request: which one, and the due.
            passed: another node has passed the call on.

        Raises:
            RefusedError: NO_LEADER, NOT_UP_TO_DATE, HANDLE_AMBIGUOUS, DUE_INVALID,
                DUE_BEYOND_SPAN, DUE_TAKEN, RELEASE_TOO_OLD, RESCHEDULE_UNKNOWN.
        """
        reference = reference_of(request.message)
        to_ms = self._span.checked(request.deliver_at_ms, wall_ms())
        if self._view.cleaner.leading() is None:
            address = None if passed else self._passing.leader_address()
            if address is None:
                raise RefusedError(Reason.NO_LEADER)
            return await self._passing.reschedule(address, request)
        found = await self._queries.find(reference)
        due_ms = due_of(reference, found)
        key = reference.id, due_ms
        decision, moved_ms = await self._decide(
            replace(reference, due_ms=due_ms), request.message, found, to_ms
        )
        if decision is CancelDecision.RESCHEDULED:
            moved_ms = await self._until_written(key, moved_ms)
            slot, wheel = moved_ms // 1000, self._view.status().heartbeat.open
            return pb.RescheduleResponse(
                outcome=pb.RESCHEDULE_OUTCOME_RESCHEDULED,
                due_ms=moved_ms,
                handle="" if wheel is None else f"{wheel}:{slot}:{reference.id.hex()}",
            )
        return pb.RescheduleResponse(outcome=_OUTCOMES[decision])

    async def _decide(
        self, reference: Reference, named: pb.MessageRef, found: Found, to_ms: int
    ) -> tuple[CancelDecision, int]:
        """What became of the wish; and which due the message has, if it was rescheduled."""
        assert reference.due_ms is not None
        key, wish = (reference.id, reference.due_ms), None
        try:
            async with asyncio.timeout(_WAIT_S):
                while True:
                    decision = await self._sights.decide(reference, named, found, written=False)
                    if decision is CancelDecision.RESCHEDULED:
                        return decision, self._sights.moved_ms(key, found)
                    if decision is CancelDecision.WRITE:
                        if wish is None:
                            self._check_releases()
                            await self._check_free(reference.id, to_ms)
                            wish = RescheduleWish(key, to_ms, self._place(found))
                        self._tell(wish)
                    elif decision is CancelDecision.NO_LEADER:
                        raise RefusedError(
                            Reason.NO_LEADER if wish is None else Reason.RESCHEDULE_UNKNOWN
                        )
                    elif decision in _OUTCOMES and not (
                        wish is not None and decision is CancelDecision.TOO_LATE
                    ):
                        return decision, 0
                    elif decision is CancelDecision.UNKNOWN and wish is None:
                        raise RefusedError(Reason.NOT_UP_TO_DATE)
                    await self._next_word()
                    await self._queries.look_for_cancels(reference, found)
        except TimeoutError:
            reason = Reason.NOT_UP_TO_DATE if wish is None else Reason.RESCHEDULE_UNKNOWN
            raise RefusedError(reason) from None

    def _check_releases(self) -> None:
        """As the leader will, which has no way to say why it decides nothing."""
        status, own = self._view.cleaner.status, self._view.status()
        heartbeats = {node: sight.heartbeat for node, sight in own.peers.items()}
        heartbeats[own.heartbeat.node] = own.heartbeat
        behind = nodes_behind(ControlState() if status is None else status.control, heartbeats)
        if behind:
            raise RefusedError(
                Reason.RELEASE_TOO_OLD, f"Older, or not heard since the start: {', '.join(behind)}"
            )

    async def _check_free(self, id_: bytes, to_ms: int) -> None:
        """A message that was there before would be taken for the same, or its cancel for one."""
        other = await self._queries.find(Reference(to_ms // 1000, id_, to_ms))
        if other.copies or other.cancels:
            raise RefusedError(Reason.DUE_TAKEN, f"Due {to_ms}")
        if not other.complete:
            raise RefusedError(Reason.NOT_UP_TO_DATE)

    def _place(self, found: Found) -> Position:
        """A copy that progress takes account of, if there is one yet."""
        status = self._view.cleaner.status
        progress = None if status is None else status.progress
        in_v = [
            copy
            for copy in found.copies
            if progress is not None and copy.seq <= progress.seq(copy.wheel)
        ]
        return (in_v or found.copies)[0]

    async def _until_written(self, key: MessageKey, moved_ms: int) -> int:
        """So that who is told of the new due finds the message there; it is decided anyway.

        Returns:
            The due that it has by then: one that passed meanwhile was put off.
        """
        try:
            async with asyncio.timeout(_WRITTEN_S):
                while key not in self._written and (stands := self._stands(key)) is not None:
                    moved_ms = stands.to_ms
                    await self._next_word()
        except TimeoutError:
            _log.warning("a reschedule is decided, and not written yet", due_ms=key[1])
        written = self._written.get(key)
        return moved_ms if written is None else written.to_ms

    def _stands(self, key: MessageKey) -> Reschedule | None:
        status = self._view.cleaner.status
        stands = None if status is None else status.reschedules.get(key)
        return None if stands is None or stands.is_written else stands

    # --- what is decided

    async def run(self) -> None:
        """Writes what is decided, while this node's cleaner leads; until it is cancelled."""
        try:
            while True:
                leading = self._view.cleaner.leading()
                if leading is not None:
                    self._write_all(leading)
                await self._next_word()
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _write_all(self, status: CleanerStatus) -> None:
        for key in self._written.keys() - status.reschedules.keys():
            del self._written[key]
        for key, stands in status.reschedules.items():
            written = self._written.get(key)
            if stands.is_written or key in self._tasks:
                continue
            if written is not None and written.to_ms == stands.to_ms:
                self._tell(written)
            else:
                self._tasks[key] = asyncio.create_task(self._write(key, stands))

    async def _write(self, key: MessageKey, stands: Reschedule) -> None:
        """The copy first: a cancel alone would be one."""
        try:
            frame = await self._queries.frame(stands.place)
            if frame is None:
                return  # it is looked for, and asked for again
            copied = await self._writing.submit(_copy_of(frame, stands))
            if copied.failed:
                return  # it is too late for this due: the leader puts it off
            columns = _cancel_of(key, stands.to_ms)
            cancelled = await self._writing.submit(columns, Kind.CANCELS)
            reasons = {refusal.reason for refusal in cancelled.failed.values()}
            if reasons <= {Reason.DUE_TOO_OLD}:
                self._written[key] = RescheduleWritten(
                    key,
                    stands.to_ms,
                    (copied.wheel, copied.seq),
                    None if reasons else (cancelled.wheel, cancelled.seq),
                )
                self._tell(self._written[key])
        except RefusedError as error:
            _log.info("a reschedule is not written", reason=error.refusal.reason.value)
        finally:
            del self._tasks[key]


def _copy_of(frame: Frame, stands: Reschedule) -> Columns:
    columns = frame.columns.take(np.array([stands.place.row])).compacted()
    return replace(columns, due_ms=np.array([stands.to_ms], dtype=np.int64))


def _cancel_of(key: MessageKey, to_ms: int) -> Columns:
    """The cancel and its mark: two rows of one second, so of one frame."""
    id_, due_ms = key
    ids = np.frombuffer(id_ + mark_of(key, to_ms), dtype=np.uint8)
    dues_ms = np.array([due_ms, due_ms], dtype=np.int64)
    return Columns.of_cancels(dues_ms, ids.reshape(2, ID_LENGTH_BYTES))
