"""Reschedules at a simulated server, as `delaywheel_replica.server.changing.reschedules` does them.

The server sends a proposal to the cleaner until it is decided; the leader writes the decision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.core.protocol.reschedules import (
    Reschedule,
    RescheduleProposal,
    RescheduleWritten,
    mark_of,
)
from delaywheel_replica.server.changing.moving import Moves
from delaywheel_replica.server.commit.committer import Committed, Request, RequestOutcome
from delaywheel_replica.server.lookup.scan import Found
from sim.checking.truth import Key
from sim.nodes.cancels import WAIT_MS, Cancels

if TYPE_CHECKING:
    from sim.nodes.server import SimServer

LOOK_MS = 500
"""As of the real server: meanwhile it repeats a proposal by what it found.

So a leader may hear of it for the first time when that is as old, too: it waited on the event loop,
or for another leader.
"""

OnDecision = Callable[[CancelDecision], None]


@dataclass(slots=True)
class _Waiting:
    """A proposal that is not decided yet, and what was found when its second was last looked at.

    It is sent from `from_ms` on.
    """

    proposal: RescheduleProposal
    found: Found
    looked_ms: int
    from_ms: int
    until_ms: int
    on_answer: OnDecision


class Reschedules:
    """Gives messages other dues at one server."""

    def __init__(self, server: SimServer, cancels: Cancels) -> None:
        self._server = server
        self._cancels = cancels
        self._waiting: list[_Waiting] = []
        self._busy: set[Key] = set()
        self._written: dict[Key, RescheduleWritten] = {}
        self._moves = Moves()

    def ask(self, key: Key, to_ms: int, on_answer: OnDecision) -> None:
        """Handles a caller's request for another due."""
        basis, found = self._cancels.basis_of_look(), self._cancels.find(key)
        decision = self._cancels.before_writing(key, found, basis)
        if decision is not CancelDecision.WRITE:
            on_answer(CancelDecision.UNKNOWN if _is_open(decision) else decision)
            return
        proposal = RescheduleProposal(key, to_ms, found.copies[0], tuple(found.looked.items()))
        now_ms = self._server.now_ms()
        from_ms = now_ms + self._server.node.random.randrange(LOOK_MS)
        until_ms = now_ms + WAIT_MS
        self._waiting.append(_Waiting(proposal, found, now_ms, from_ms, until_ms, on_answer))
        self.look()

    def look(self) -> None:
        """Called when something may be decided, or settled."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            key = each.proposal.key
            if self._server.now_ms() - each.looked_ms >= LOOK_MS:
                self._look_again(each)
            basis = self._cancels.basis()
            decision = self._cancels.before_writing(key, each.found, basis)
            if decision is not CancelDecision.WRITE:
                basis = self._cancels.basis_of_look()
                self._look_again(each)
                decision = self._cancels.before_writing(key, each.found, basis)
            if decision is CancelDecision.WRITE and self._server.now_ms() >= each.from_ms:
                self._server.node.send_to_cleaner(each.proposal)
            # Once the proposal was sent, it may have had an effect: the answer must be certain.
            is_open = _is_open(decision) or decision is CancelDecision.TOO_LATE
            if is_open and self._server.now_ms() < each.until_ms:
                self._waiting.append(each)
            elif is_open:
                each.on_answer(CancelDecision.UNKNOWN)
            else:
                each.on_answer(decision)
        self._move_all()
        self._write_all()

    def _move_all(self) -> None:
        """Asks for nearer dues."""
        for move in self._moves.due(self._cancels.leading(), self._server.now_ms()):
            basis, found = self._cancels.basis_of_look(), self._cancels.find(move.key)
            decision = self._cancels.before_writing(move.key, found, basis)
            proposal = move.proposal(found, decision, self._server.wall_ms())
            if proposal is not None:
                self._server.node.send_to_cleaner(proposal)

    def _look_again(self, each: _Waiting) -> None:
        each.found = self._cancels.find(each.proposal.key)
        each.looked_ms = self._server.now_ms()
        each.proposal = replace(each.proposal, looked=tuple(each.found.looked.items()))

    def _write_all(self) -> None:
        status = self._cancels.leading()
        if status is None:
            return
        for key in self._written.keys() - status.reschedules.keys():
            del self._written[key]
        for key, record in status.reschedules.items():
            if record.is_written:
                continue
            written = self._written.get(key)
            if written is not None and written.to_ms == record.to_ms:
                self._server.node.send_to_cleaner(written)
            elif key not in self._busy:
                self._busy.add(key)
                self._write_copy(key, record)

    def _write_copy(self, key: Key, record: Reschedule) -> None:
        (columns,) = self._cancels.scanner.messages([(key[1] // 1000, record.place)], 0)
        if columns is None:
            self._busy.discard(key)
            return
        columns = replace(columns, due_ms=np.array([record.to_ms], dtype=np.int64))

        def written(outcome: RequestOutcome) -> None:
            if isinstance(outcome, Committed) and not outcome.failed:
                self._write_cancel(key, record, (outcome.wheel, outcome.seq))
            else:
                self._busy.discard(key)

        self._server.write(Request(columns, Kind.MESSAGES, written))

    def _write_cancel(self, key: Key, record: Reschedule, copy: tuple[WheelId, int]) -> None:
        id_, due_ms = key
        ids = np.frombuffer(id_ + mark_of(key, record), dtype=np.uint8).reshape(2, -1)
        columns = Columns.of_cancels(np.array([due_ms, due_ms], dtype=np.int64), ids)

        def written(outcome: RequestOutcome) -> None:
            self._busy.discard(key)
            if not isinstance(outcome, Committed):
                return
            reasons = {refusal.reason for refusal in outcome.failed.values()}
            if reasons <= {Reason.DUE_TOO_OLD}:
                cancel = None if reasons else (outcome.wheel, outcome.seq)
                self._written[key] = RescheduleWritten(key, record.to_ms, copy, cancel)

        self._server.write(Request(columns, Kind.CANCELS, written))


def _is_open(decision: CancelDecision) -> bool:
    """Whether nothing is known of it yet."""
    return decision in {CancelDecision.WRITE, CancelDecision.WAIT}
