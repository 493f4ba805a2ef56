"""Errors in what callers hear: each answers an untruth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel_replica.cleaner.due.rows import MessageOutcome
from delaywheel_replica.cleaner.due.seconds import FORWARDED, Second
from delaywheel_replica.core.leader import cancel
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.server.commit import own_halves
from sim.mutants.mutant import Mutant, Patch, everywhere, instead


def _instead_of_writing(answer: CancelDecision) -> Callable[[], list[Patch]]:
    """Answers every cancel so that would be written."""
    decide = cancel.before_writing

    def before_writing(view: cancel.CancelView) -> CancelDecision:
        decision = decide(view)
        return answer if decision is CancelDecision.WRITE else decision

    def none(due_ms: NDArray[np.int64], *_: Any) -> NDArray[np.bool_]:
        return np.zeros(len(due_ms), np.bool_)

    return lambda: [
        everywhere(cancel.before_writing, before_writing),
        everywhere(cancel.are_to_be_written, none),
    ]


def cancels_count_for_nothing() -> list[Patch]:
    real = Second.outcomes

    def outcomes(self: Second, *arguments: Any) -> Any:
        found, differ = real(self, *arguments)
        found[found == MessageOutcome.CANCELLED] = FORWARDED
        return found, differ

    return [instead(Second, "outcomes", outcomes)]


def every_commit_is_left() -> list[Patch]:
    return [everywhere(own_halves.is_left_to_check, lambda *_: True)]


ANSWERS = {
    "cancelled is answered without a row": Mutant(
        "who cancels is told that it is done, and nothing is written",
        _instead_of_writing(CancelDecision.CANCELLED),
        "reported cancelled, and no row says so",
        ("many_cancels",),
    ),
    "every cancel is too late": Mutant(
        "no message can be cancelled, however long before its due",
        _instead_of_writing(CancelDecision.TOO_LATE),
        "too late, and it is still to come",
        ("many_cancels",),
    ),
    "what was cancelled becomes a dead letter": Mutant(
        "cancels count for nothing, and the topic is not there",
        cancels_count_for_nothing,
        "is a dead letter after it was cancelled",
        ("cancelled_in_trouble",),
    ),
    "every commit is left to the check": Mutant(
        "groups are asked about halves whose senders have said in time that they are committed",
        every_commit_is_left,
        "to its check, and it is still to come",
        ("halves_and_words",),
    ),
}
