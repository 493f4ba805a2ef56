"""Errors about setting w back: what was done ahead of it, and which nodes learn of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner import leadership
from delaywheel_replica.cleaner.due.rows import Records
from delaywheel_replica.cleaner.due.runs import Runs
from delaywheel_replica.cleaner.due.seconds import Bounds, Second
from delaywheel_replica.core.election.eligibility import Eligibility
from delaywheel_replica.core.node.heard_heartbeats import HeardHeartbeats
from delaywheel_replica.core.node.shared_state import Known
from delaywheel_replica.core.protocol.control import ControlState
from delaywheel_replica.core.protocol.progress import Position, Progress, SetBackRefusal
from sim.mutants.mutant import Mutant, Patch, everywhere, instead


def forgets_what_was_done_ahead() -> list[Patch]:
    real = Progress.set_back

    def set_back(self: Progress, now_ms: int) -> Progress | SetBackRefusal:
        after = real(self, now_ms)
        return after if isinstance(after, SetBackRefusal) else replace(after, ahead=())

    return [instead(Progress, "set_back", set_back)]


def writes_by_its_own_clock() -> list[Patch]:
    return [instead(HeardHeartbeats, "agreed_clock_ms", lambda _, own_ms, __: own_ms)]


def takes_it_again() -> list[Patch]:
    real = Runs.add

    def add(self: Runs, records: Records, begin: int) -> None:
        records["ahead"][begin:] = False
        real(self, records, begin)

    return [instead(Runs, "add", add)]


def repetitions_are_new() -> list[Patch]:
    real = Second._originals

    def originals(self: Second, rows: NDArray[np.intp], bounds: Bounds) -> NDArray[np.intp]:
        found = real(self, rows, bounds)
        return np.where(self.records(found)["ahead"], rows, found)

    return [instead(Second, "_originals", originals)]


def remembers_it_for_ever() -> list[Patch]:
    real = Progress.moved

    def moved(
        self: Progress, due_ms: int, position: Position | None, seqs: Mapping[WheelId, int]
    ) -> Progress:
        return replace(real(self, due_ms, position, seqs), ahead=self.ahead)

    return [instead(Progress, "moved", moved)]


def keeps_wheels_that_are_sealed_ahead() -> list[Patch]:
    return [instead(Known, "ahead_slot", None)]


def newer_by_w_alone() -> list[Patch]:
    def is_older(state: ControlState, than: ControlState) -> bool:
        def w(each: ControlState) -> int:
            return -1 if each.progress is None else each.progress.due_ms

        return w(state) < w(than)

    return [everywhere(leadership._is_older, is_older)]


def never_asks_again() -> list[Patch]:
    return [instead(Eligibility, "_may_ask_kafka", lambda *_: False)]


CLOCKS = {
    "a clock that was off counts until it is forgotten": Mutant(
        "who could not lead for its clock waits until Kafka's old one does not count any more",
        never_asks_again,
        "no node leads",
        ("corrected_alone",),
    ),
    "an origin writes by its own clock": Mutant(
        "messages are written that no mirror believes before its clock is that far",
        writes_by_its_own_clock,
        "no mirror believes",
        ("days_ahead",),
    ),
    "what was done ahead is forgotten": Mutant(
        "w is set back, and nothing beside it says what is done",
        forgets_what_was_done_ahead,
        "as sealed|delivered twice",
        ("set_back",),
    ),
    "what was done ahead is taken again": Mutant(
        "a step takes what w passes, whatever was done ahead of it",
        takes_it_again,
        "delivered twice",
        ("set_back",),
    ),
    "what was done ahead has no repetitions": Mutant(
        "a copy of what was done ahead goes out as if it were the first",
        repetitions_are_new,
        "delivered twice",
        ("set_back", "set_back_twice"),
    ),
    "what was done ahead is kept for ever": Mutant(
        "progress names what was done ahead when w has passed it",
        remembers_it_for_ever,
        "done ahead",
        ("set_back_short",),
    ),
    "wheels sealed ahead are kept": Mutant(
        "a node uses wheels that refuse what is due until a wrong clock",
        keeps_wheels_that_are_sealed_ahead,
        "as sealed|not drained",
        ("set_back",),
    ),
    "the newest progress is that with the greatest w": Mutant(
        "who follows does not see that w was set back",
        newer_by_w_alone,
        "not drained|as sealed",
        ("set_back",),
    ),
}
