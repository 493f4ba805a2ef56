"""Cancels at a simulated server: carries out what `core/leader/cancel.py` decides.

As `delaywheel_replica.server.changing.cancels` does it, without threads: a caller that waits for
committed progress is reconsidered with every status of the cleaner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.format import Kind
from delaywheel_replica.core.election.eligibility import heard_heartbeats
from delaywheel_replica.core.leader.cancel import (
    CancelDecision,
    CancelView,
    after_writing,
    after_writing_many,
    before_writing,
    others_to_ask,
)
from delaywheel_replica.core.leader.holders import holds_progress, knows_all
from delaywheel_replica.core.protocol.control import ControlState
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role
from delaywheel_replica.server.commit.committer import Committed, Outcome, Request
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.lookup.scan import Found, Scanner
from sim.checking.truth import Key

if TYPE_CHECKING:
    from sim.nodes.server import SimServer

CLEANER_FRESH_MS = 1_000
WAIT_MS = 2_000

OnDecision = Callable[[CancelDecision], None]
OnDecisions = Callable[[dict[Key, CancelDecision]], None]


@dataclass(slots=True)
class _Waiting:
    """A cancel that was written, here or before."""

    key: Key
    found: Found
    until_ms: int
    on_answer: OnDecision


@dataclass(slots=True)
class _WaitingMany:
    """Cancels that were written together."""

    found: dict[Key, Found]
    decisions: dict[Key, CancelDecision]
    until_ms: int
    on_answer: OnDecisions


class Cancels:
    """Cancels messages at one server.

    Attributes:
        scanner: Reads the frames that callers ask about; one thread of a real server does.
    """

    def __init__(self, server: SimServer) -> None:
        self._server = server
        self.scanner = Scanner(server.node.disk, server.node.data)
        self._waiting: list[_Waiting] = []
        self._waiting_many: list[_WaitingMany] = []

    def leading(self) -> CleanerStatus | None:
        """The cleaner's status, if it lives and leads."""
        status = self._server.cleaner_row
        if status is None or status.role is not Role.LEADING:
            return None
        fresh = self._server.now_ms() - status.monotonic_ms < CLEANER_FRESH_MS
        return status if fresh else None

    def ask(self, key: Key, on_answer: OnDecision) -> None:
        """Handles a caller's cancel."""
        found = self.find(key)
        decision = self.before_writing(key, found)
        if decision is CancelDecision.WRITE:
            self._write(key, on_answer)
        elif decision in {CancelDecision.WAIT, CancelDecision.CONFIRM}:
            self._wait(key, found, on_answer)
        else:
            on_answer(decision)

    def before_writing(self, key: Key, found: Found) -> CancelDecision:
        """Decides by what this node finds; asks other nodes before answering that none has it."""
        decision = before_writing(self.sight(key, found))
        if decision is CancelDecision.NOT_FOUND and not self._others_have_none(key):
            return CancelDecision.UNKNOWN
        return decision

    def ask_many(self, keys: list[Key], on_answer: OnDecisions) -> None:
        """Handles a caller's cancels that are written together."""
        decisions = {key: before_writing(self.sight(key, self._find_one(key))) for key in keys}
        if CancelDecision.NO_LEADER in decisions.values():
            on_answer(dict.fromkeys(keys, CancelDecision.NO_LEADER))
            return
        chosen = [key for key, decided in decisions.items() if decided is CancelDecision.WRITE]

        def written(outcome: Outcome) -> None:
            whole = isinstance(outcome, Committed)
            for row, key in enumerate(chosen):
                failed = not isinstance(outcome, Committed) or row in outcome.failed
                decisions[key] = CancelDecision.UNKNOWN if failed else CancelDecision.WAIT
            if not whole:
                on_answer(decisions)
                return
            self._wait_for_many(decisions, on_answer)

        if chosen:
            self._server.write(Request(_cancels_of(chosen), Kind.CANCELS, written))
        else:
            self._wait_for_many(decisions, on_answer)

    def _wait_for_many(self, decisions: dict[Key, CancelDecision], on_answer: OnDecisions) -> None:
        found = {
            key: self._find_one(key)
            for key, decided in decisions.items()
            if decided in {CancelDecision.WAIT, CancelDecision.CONFIRM}
        }
        decisions |= dict.fromkeys(found, CancelDecision.WAIT)
        until_ms = self._server.now_ms() + WAIT_MS
        self._waiting_many.append(_WaitingMany(found, decisions, until_ms, on_answer))
        self._server.node.commit_soon()
        self.look()

    def _look_at_many(self) -> None:
        waiting, self._waiting_many = self._waiting_many, []
        for each in waiting:
            undecided = {
                key: self.sight(key, found)
                for key, found in each.found.items()
                if each.decisions[key] is CancelDecision.WAIT
            }
            each.decisions |= after_writing_many(undecided)
            doubtful = [k for k, d in each.decisions.items() if d is CancelDecision.CONFIRM]
            each.decisions |= self._confirmed_many(doubtful)
            over = self._server.now_ms() >= each.until_ms
            if over or CancelDecision.WAIT not in each.decisions.values():
                each.on_answer(each.decisions)
            else:
                self._waiting_many.append(each)

    def look(self) -> None:
        """Called when there may be a new progress."""
        self._look_at_many()
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            decision = after_writing(self.sight(each.key, each.found))
            if decision is CancelDecision.CONFIRM:
                decision = self._confirmed(each.key)
            if decision is not CancelDecision.WAIT:
                each.on_answer(decision)
            elif self._server.now_ms() >= each.until_ms:
                each.on_answer(CancelDecision.UNKNOWN)
            else:
                self._waiting.append(each)

    def _confirmed(self, key: Key) -> CancelDecision:
        """Looks again once everything is held that progress covers."""
        if not self._holds_progress():
            return CancelDecision.WAIT
        return after_writing(self.sight(key, self.find(key), confirmed=True))

    def _confirmed_many(self, keys: list[Key]) -> dict[Key, CancelDecision]:
        if not self._holds_progress():
            return dict.fromkeys(keys, CancelDecision.WAIT)
        return after_writing_many(
            {key: self.sight(key, self._find_one(key), confirmed=True) for key in keys}
        )

    def _holds_progress(self) -> bool:
        status, row = self._server.cleaner_row, self._server.row
        if status is None or row is None:
            return False
        return holds_progress(status.control, self._server.driver.status().heartbeat)

    def _write(self, key: Key, on_answer: OnDecision) -> None:
        def written(outcome: Outcome) -> None:
            if isinstance(outcome, Committed) and not outcome.failed:
                self._wait(key, self.find(key), on_answer)
            else:
                on_answer(CancelDecision.UNKNOWN)

        self._server.write(Request(_cancels_of([key]), Kind.CANCELS, written))

    def _wait(self, key: Key, found: Found, on_answer: OnDecision) -> None:
        until_ms = self._server.now_ms() + WAIT_MS
        self._waiting.append(_Waiting(key, found, until_ms, on_answer))
        self._server.node.commit_soon()
        self.look()

    def sight(self, key: Key, found: Found, *, confirmed: bool = False) -> CancelView:
        """Returns what this node knows of a message."""
        status = self._server.cleaner_row
        return CancelView(
            due_ms=key[1],
            now_ms=self._server.wall_ms(),
            leading=self.leading() is not None,
            progress=None if status is None else status.progress,
            copies=found.copies,
            cancels=found.cancels,
            complete=found.complete,
            readable=found.readable,
            rescheduled=found.rescheduled_to_ms is not None
            or (status is not None and key in status.reschedules),
            confirmed=confirmed,
        )

    def _others_have_none(self, key: Key) -> bool:
        """Whether enough other reachable nodes find nothing either."""
        server, status = self._server, self._server.cleaner_row
        assert status is not None
        wanted = others_to_ask(status.wheels.values())
        if not wanted:
            return True
        node, network = server.node.name, server.world.network
        answers = []
        for name, heartbeat in heard_heartbeats(server.driver.status(), server.now_ms()).items():
            peer = server.world.nodes[name].server
            is_cut = network.is_blocked(node, name) or network.is_blocked(name, node)
            if peer is not None and heartbeat.complete and not (is_cut or peer.process.paused):
                answers.append(peer.has_none(key))
        return False not in answers and answers.count(True) >= wanted

    def has_none(self, key: Key) -> bool | None:
        """Returns this node's answer to another node; None: it cannot say."""
        if self._server.cleaner_row is None or self._server.row is None:
            return None
        found = self.find(key)
        return False if found.copies else found.complete or None

    def _find_one(self, key: Key) -> Found:
        """One copy of a message and its cancels; other copies stay unknown, as after a search."""
        found = self.find(key)
        return replace(found, copies=found.copies[:1], complete=False)

    def find(self, key: Key) -> Found:
        """Finds a message and its cancels.

        Frames of a registered wheel that this node is missing could be the message, or a cancel.
        """
        id_, due_ms = key
        slot = due_ms // 1000
        status = self._server.cleaner_row
        if status is None or self._server.row is None or (status.floor or 0) > slot:
            return Found()
        row = self._server.driver.status()
        heard = heard_heartbeats(row, self._server.now_ms())
        registry = ControlState(wheels=status.wheels, lost=status.lost)
        limits = {wheel: heartbeat.applied for wheel, heartbeat in row.heartbeat.wheels.items()}
        open_wheel = self._server.store.wheel
        if open_wheel is not None:
            limits[open_wheel.wheel] = open_wheel.last_seq
        reference = Reference(slot, id_, due_ms)
        (found,) = self.scanner.find_many([reference], limits, lost=status.lost)
        found.complete = found.complete and knows_all(registry, row.heartbeat, heard)
        return found


def _cancels_of(keys: list[Key]) -> Columns:
    ids = np.frombuffer(b"".join(id_ for id_, _ in keys), dtype=np.uint8).reshape(len(keys), -1)
    return Columns.of_cancels(np.array([due_ms for _, due_ms in keys], dtype=np.int64), ids)
