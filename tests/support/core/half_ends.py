"""What becomes of the copies of a half, by the table of core/leader/halves.py.

The cleaner decides the same for all rows of a second at once (cleaner/due/steps.py).
"""

from enum import StrEnum

from delaywheel_replica.core.leader import halves
from delaywheel_replica.core.leader.halves import HalfRows
from delaywheel_replica.core.protocol.progress import Position, Progress


class HalfEnd(StrEnum):
    """What becomes of one copy of a half."""

    FORWARDED = "forwarded"
    CANCELLED = "cancelled"
    ASKED = "asked"
    """Its sender is asked; until it answers, the message is neither sent nor given up."""
    DUPLICATE = "duplicate"


def ends(rows: HalfRows, before: Progress, after: Progress) -> dict[Position, HalfEnd]:
    """Returns the copies that a step takes, with their ends.

    Args:
        rows: All rows of the half that are <= V'; others may be among them.
        before: The progress that the step begins with.
        after: The progress that it leads to.
    """
    was_done = {copy for copy in rows.copies if halves.is_done(rows, copy, before)}
    taken = sorted(
        (copy for copy in rows.copies - was_done if halves.is_done(rows, copy, after)),
        key=lambda copy: (not halves.is_released(copy, rows.releases, after), copy),
    )
    found = dict.fromkeys(taken, HalfEnd.DUPLICATE)
    if taken and not was_done:
        found[taken[0]] = _end(rows, after)
    return found


def _end(rows: HalfRows, after: Progress) -> HalfEnd:
    if after.counts(rows.cancels):
        return HalfEnd.CANCELLED
    if after.counts(rows.commits | rows.releases):
        return HalfEnd.FORWARDED
    return HalfEnd.ASKED
