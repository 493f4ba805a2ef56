"""Cancels at a simulated server: carries out what `core/leader/cancel.py` decides.

As `delaywheel_replica.server.lookup.cancels` does it, without threads: whoever waits for a
committed progress is looked at again with every word of the cleaner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.format import Kind
from delaywheel_replica.core.election.eligibility import heard_beats
from delaywheel_replica.core.leader.cancel import (
    CancelDecision,
    CancelView,
    after_writing,
    before_writing,
    others_to_ask,
)
from delaywheel_replica.core.leader.holders import knows_all
from delaywheel_replica.core.protocol.control import ControlState
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role
from delaywheel_replica.server.commit.committer import Committed, Outcome, Request
from delaywheel_replica.server.lookup.scan import Found, Scanner
from sim.checking.truth import Key

if TYPE_CHECKING:
    from sim.nodes.server import SimServer

CLEANER_FRESH_MS = 1_000
WAIT_MS = 2_000

OnDecision = Callable[[CancelDecision], None]


@dataclass(slots=True)
class _Waiting:
    """A cancel that was written, here or by somebody before."""

    key: Key
    found: Found
    until_ms: int
    on_answer: OnDecision


class Cancels:
    """Withdraws messages at one server."""

    def __init__(self, server: SimServer) -> None:
        self._server = server
        self._scanner = Scanner(server.node.disk, server.node.data)
        self._waiting: list[_Waiting] = []

    def leading(self) -> CleanerStatus | None:
        """The cleaner's row, if it lives and leads."""
        status = self._server.cleaner_row
        if status is None or status.role is not Role.LEADING:
            return None
        fresh = self._server.now_ms() - status.monotonic_ms < CLEANER_FRESH_MS
        return status if fresh else None

    def ask(self, key: Key, on_answer: OnDecision) -> None:
        """A caller withdraws a message."""
        found = self._find(key)
        decision = before_writing(self._sight(key, found))
        if decision is CancelDecision.NOT_FOUND and not self._others_have_none(key):
            decision = CancelDecision.UNKNOWN
        if decision is CancelDecision.WRITE:
            self._write(key, on_answer)
        elif decision is CancelDecision.WAIT:
            self._wait(key, found, on_answer)
        else:
            on_answer(decision)

    def look(self) -> None:
        """Perhaps there is a new progress."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            decision = after_writing(self._sight(each.key, each.found))
            if decision is not CancelDecision.WAIT:
                each.on_answer(decision)
            elif self._server.now_ms() >= each.until_ms:
                each.on_answer(CancelDecision.UNKNOWN)
            else:
                self._waiting.append(each)

    def _write(self, key: Key, on_answer: OnDecision) -> None:
        id_, due_ms = key
        columns = Columns.of_cancels(
            np.array([due_ms], dtype=np.int64), np.frombuffer(id_, dtype=np.uint8).reshape(1, -1)
        )

        def written(outcome: Outcome) -> None:
            if isinstance(outcome, Committed) and not outcome.failed:
                self._wait(key, self._find(key), on_answer)
            else:
                on_answer(CancelDecision.UNKNOWN)

        self._server.write(Request(columns, Kind.CANCELS, written))

    def _wait(self, key: Key, found: Found, on_answer: OnDecision) -> None:
        until_ms = self._server.now_ms() + WAIT_MS
        self._waiting.append(_Waiting(key, found, until_ms, on_answer))
        self._server.node.commit_soon()
        self.look()

    def _sight(self, key: Key, found: Found) -> CancelView:
        status = self._server.cleaner_row
        return CancelView(
            due_ms=key[1],
            now_ms=self._server.wall_ms(),
            leading=self.leading() is not None,
            progress=None if status is None else status.progress,
            copies=found.copies,
            cancels=found.cancels,
            complete=found.complete,
        )

    def _others_have_none(self, key: Key) -> bool:
        """Whether enough others that can be asked now say that they find nothing either."""
        server, status = self._server, self._server.cleaner_row
        assert status is not None
        wanted = others_to_ask(status.wheels.values())
        if not wanted:
            return True
        node, network = server.node.name, server.world.network
        answers = []
        for name, beat in heard_beats(server.driver.status(), server.now_ms()).items():
            peer = server.world.nodes[name].server
            is_cut = network.is_blocked(node, name) or network.is_blocked(name, node)
            if peer is not None and beat.complete and not (is_cut or peer.process.paused):
                answers.append(peer.has_none(key))
        return False not in answers and answers.count(True) >= wanted

    def has_none(self, key: Key) -> bool | None:
        """What this node answers another one; None: it cannot say."""
        if self._server.cleaner_row is None or self._server.row is None:
            return None
        found = self._find(key)
        return False if found.copies else found.complete or None

    def _find(self, key: Key) -> Found:
        """Where a message and its cancels lie.

        What this node does not hold of a registered wheel could be the message, or a cancel.
        """
        id_, due_ms = key
        slot = due_ms // 1000
        status = self._server.cleaner_row
        if status is None or self._server.row is None or (status.floor or 0) > slot:
            return Found()
        row = self._server.driver.status()
        heard = heard_beats(row, self._server.now_ms())
        registry = ControlState(wheels=status.wheels, lost=status.lost)
        limits = {wheel: beat.applied for wheel, beat in row.beat.wheels.items()}
        open_wheel = self._server.store.wheel
        if open_wheel is not None:
            limits[open_wheel.wheel] = open_wheel.last_seq
        found = self._scanner.find(slot, id_, limits, due_ms, lost=status.lost)
        found.complete = found.complete and knows_all(registry, row.beat, heard)
        return found
