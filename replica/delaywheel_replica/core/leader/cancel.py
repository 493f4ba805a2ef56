"""Decides how to answer a cancel, and when.

A cancel is a frame, seq c, in the wheel of the leader's node; it counts if c <= V of the
transaction that takes its message. So an answer is true only by a committed progress record, and
once the frame is written, "too late" and "not found" are no longer true of anything.

`before_writing` says what is done first, `after_writing` what is answered, for each committed
progress seen: docs/PROTOCOL.md, "Cancel", has their tables, which tests compare, and says what a
plain message is, which `is_cancelled` decides about alone.

One transaction took a message and its cancel if the progress that it began with is known
(`directly_before`), and nothing due at that millisecond was done by then: a cancel with c <= V
counts in the transaction that takes its message.

CANCELLED and ALREADY_DELIVERED rest on a look that is `current`: when it began, the node held every
frame up to V of the deciding progress. By any other look, and by one that finds the message no
longer, CANCELLED is WAIT, and ALREADY_DELIVERED is UNKNOWN: a cancel may have been written and
taken since.

A message was rescheduled (rescheduling.py) if the record of that stands with this progress, or its
mark lies in the slot. A current look finds the mark of an earlier reschedule, which is <= V; before
deciding a later one the leader sees the cancel, and leaves the message alone. A frame of the slot
that cannot be read may be the mark, or the release of a half: WAIT, until it is read, or given up
as lost. A node knows of such a frame once a look has met it, and no later look of it is current; so
this decides where one look is all: of commits, of ids that are checked, of what a search lists.

UNKNOWN stands where the progress record does not show which came first, or where a cancel that
counted may lie in what could not be read.

A half message (halves.py) is done before its due if a release counts for it. If it is done without
a cancel it was forwarded, or its sender was asked: ALREADY_DELIVERED says no more of a half.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from delaywheel_replica.core.leader.halves import is_released
from delaywheel_replica.core.protocol.control import WheelRecord
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.status_files import CleanerStatus

TOO_LATE_MS = 100


class CancelDecision(StrEnum):
    """What to do about a cancel, or what to answer."""

    WRITE = "write"
    """Write a cancel frame, then follow `after_writing`."""
    WAIT = "wait"
    """Look again, and decide by the next committed progress."""
    CANCELLED = "cancelled"
    RESCHEDULED = "rescheduled"
    ALREADY_DELIVERED = "already delivered"
    TOO_LATE = "too late"
    NOT_FOUND = "not found"
    NO_LEADER = "no leader"
    UNKNOWN = "unknown"


@dataclass(slots=True)  # frozen, making one would cost as much as the decision
class CancelView:
    """What a leader's node knows of one message, identified by topic, id and due.

    Attributes:
        now_ms: The wall clock.
        leading: This node's cleaner leads, and its status is fresh.
        progress: The committed one; None before the first leader.
        copies: Where the message lies in the slot files.
        cancels: Where cancels of it lie, as far as known; `commits` likewise.
        complete: Every frame of the slot could be read, and the node holds all that was
            acknowledged (`holders.knows_all`).
        readable: Every frame of the slot that the node holds could be read.
        rescheduled: It has another due: a record of that stands with this progress, or its mark
            lies in the slot.
        current: The look that found this began when the node held every frame <= V of this
            progress.
        before: What was committed directly before this progress; None: unknown.
        releases: Where releases of it lie, as far as known; a current look finds all.
    """

    due_ms: int
    now_ms: int
    leading: bool
    progress: Progress | None
    copies: Collection[Position]
    cancels: Collection[Position]
    complete: bool
    readable: bool = True
    rescheduled: bool = False
    current: bool = False
    before: Progress | None = None
    releases: Collection[Position] = ()
    commits: Collection[Position] = ()


def directly_before(
    earlier: CleanerStatus | None, now: CleanerStatus, known: Progress | None
) -> Progress | None:
    """Returns what was committed directly before the progress of a status; None if unknown.

    `known` is the result for the status that was read before this one.
    """
    if earlier is None or not (earlier.has_term and now.has_term):
        return None
    if (earlier.pid, earlier.started_ms, earlier.epoch) != (now.pid, now.started_ms, now.epoch):
        return None
    if earlier.progress == now.progress:
        return known
    transactions = [status.counters.get("transactions", 0) for status in (earlier, now)]
    return earlier.progress if transactions[1] - transactions[0] == 1 else None


def others_to_ask(wheels: Collection[WheelRecord]) -> int:
    """Returns how many other members must report "not found" before NOT_FOUND may be answered.

    For a closed wheel no more is acknowledged than the node was found to hold.
    """
    needed = [record.required_answers for record in wheels if record.closed_at is None]
    return max(needed, default=1) - 1


def before_writing(view: CancelView) -> CancelDecision:
    """Decides while no cancel frame has been written for this request."""
    if not view.leading or view.progress is None:
        return CancelDecision.NO_LEADER
    if view.due_ms // 1000 < view.progress.floor:
        return CancelDecision.TOO_LATE
    if view.rescheduled:
        return CancelDecision.RESCHEDULED
    if not view.copies:
        return CancelDecision.NOT_FOUND if view.complete else CancelDecision.UNKNOWN
    return after_writing(view) if view.cancels else _before_any(view, view.progress)


def _before_any(view: CancelView, progress: Progress) -> CancelDecision:
    """Decides when a copy of the message exists, but no cancel of it."""
    if _is_done(view, progress):
        return _done(view)
    if view.due_ms <= view.now_ms + TOO_LATE_MS:
        return CancelDecision.TOO_LATE
    if view.commits or view.releases:
        return CancelDecision.WAIT
    return CancelDecision.WRITE


def after_writing(view: CancelView) -> CancelDecision:
    """Decides by one committed progress record, once the cancel frame is written.

    Progress records may be skipped: any later one decides as well.
    """
    progress = view.progress
    if progress is None:
        return CancelDecision.WAIT
    if view.rescheduled:
        return CancelDecision.RESCHEDULED
    if progress.counts(view.cancels):
        if _is_to_come(view, progress) or _was_to_come(view):
            is_sure = view.current and view.readable
            return CancelDecision.CANCELLED if is_sure else CancelDecision.WAIT
        return CancelDecision.UNKNOWN
    return _done(view) if _is_done(view, progress) else CancelDecision.WAIT


def is_cancelled(due_ms: int, cancel: Position, progress: Progress) -> bool:
    """Decides about a plain message after writing, without another look: CANCELLED.

    No other leader has written anything while the same epoch leads. Where it is false,
    `after_writing` says what to do.
    """
    is_taken = cancel.seq <= progress.seq(cancel.wheel)
    return is_taken and due_ms > progress.due_ms and not progress.ahead


def _done(view: CancelView) -> CancelDecision:
    """Decides when a copy is done, and no cancel of it counts."""
    is_sure = view.current and view.readable
    return CancelDecision.ALREADY_DELIVERED if is_sure else CancelDecision.UNKNOWN


def _is_to_come(view: CancelView, progress: Progress) -> bool:
    """Whether no transaction can have taken any copy of the message yet."""
    if view.due_ms <= progress.due_ms or _is_released(view, progress):
        return False
    if progress.ahead_ms is None or view.due_ms > progress.ahead_ms:
        return True
    return view.readable and not _is_done(view, progress)


def _was_to_come(view: CancelView) -> bool:
    """Whether the transaction that led to this progress took the message, if it is done.

    V rests while a millisecond is being split: of one that was split before, a part may have been
    taken without the cancel.
    """
    before = view.before
    return before is not None and view.due_ms > before.last_due_ms and _is_to_come(view, before)


def _is_done(view: CancelView, progress: Progress) -> bool:
    is_covered = any(progress.covers(view.due_ms, copy) for copy in view.copies)
    return is_covered or _is_released(view, progress)


def _is_released(view: CancelView, progress: Progress) -> bool:
    return bool(view.releases) and any(
        is_released(copy, view.releases, progress) for copy in view.copies
    )
