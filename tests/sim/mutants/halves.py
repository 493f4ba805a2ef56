"""Errors in what becomes of half messages."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel.record_headers import HALF_GROUP
from delaywheel_replica.cleaner.delivery import halves
from delaywheel_replica.cleaner.due import seconds
from delaywheel_replica.cleaner.due.rows import DueMessage, MessageOutcome, Records
from delaywheel_replica.cleaner.due.runs import Runs
from delaywheel_replica.cleaner.due.seconds import FORWARDED, Bounds, Second
from sim.mutants.mutant import Mutant, Patch, instead


def commit_beats_cancel() -> list[Patch]:
    real = Second.outcomes

    def outcomes(self: Second, rows: Any, records: Records, bounds: Bounds) -> Any:
        found, differ = real(self, rows, records, bounds)
        committed = seconds._named_by(self._commits, records, bounds)
        among = np.isin(np.arange(len(records)), committed) & (records["half"] > 0)
        found[among & (found == MessageOutcome.CANCELLED)] = FORWARDED
        return found, differ

    return [instead(Second, "outcomes", outcomes)]


def asked_is_forwarded() -> list[Patch]:
    real = Second.outcomes

    def outcomes(self: Second, rows: Any, records: Records, bounds: Bounds) -> Any:
        found, differ = real(self, rows, records, bounds)
        found[found == MessageOutcome.ASKED] = FORWARDED
        return found, differ

    return [instead(Second, "outcomes", outcomes)]


def released_falls_due() -> list[Patch]:
    real = Runs.after

    def after(self: Runs, *arguments: Any) -> NDArray[np.intp]:
        return real(self, *arguments[:5])

    return [instead(Runs, "after", after)]


def header_is_left() -> list[Patch]:
    real = halves._parted

    def parted(half: DueMessage) -> Any:
        own, group, deliver_at_ms = real(half)
        return [(HALF_GROUP, group), *own], group, deliver_at_ms

    return [instead(halves, "_parted", parted)]


HALVES = {
    "a commit beats a cancel": Mutant(
        "a half that was committed is delivered, whoever cancelled it",
        commit_beats_cancel,
        "after it was (cancelled|delivered)|counts",
        ("halves_and_words",),
    ),
    "nobody is asked": Mutant(
        "a half that nobody committed is delivered at the end of its hold",
        asked_is_forwarded,
        "its transaction was not committed|counts as|second end",
        ("halves_and_words",),
    ),
    "what was released falls due as well": Mutant(
        "a half that a release has taken is taken again at its due",
        released_falls_due,
        "delivered twice|second end",
        ("halves_and_words",),
    ),
    "the header of a half is left": Mutant(
        "a half that was committed is delivered as a half",
        header_is_left,
        "with other bytes|other headers",
        ("halves_and_words",),
    ),
}
