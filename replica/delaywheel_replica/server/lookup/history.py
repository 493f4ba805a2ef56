"""Committed progress as this node saw it, to tell which cancels came in time.

A cancel counts if its seq is <= V of the transaction that takes its message. The first progress
seen that covers the message decides, with the one seen before it, if by that no copy of the message
can have been taken:

| the first cancel | then the message |
|---|---|
| is <= V of the progress before | was cancelled: V of a later transaction is no less |
| is <= V of the progress that covers it, committed directly after | was cancelled |
| is <= V of the progress that covers it, committed later | may be either |
| is > V of the progress that covers it | was not cancelled |

Memory is bounded: if there are too many, every other one of the older half is dropped.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from delaywheel_replica.core.leader.cancel import directly_before
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.status_files import CleanerStatus

MOST_SEQS: Final = 1 << 17
"""All records together hold so many seqs, some 16 MiB."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A progress; whether it was committed directly after the one seen before."""

    progress: Progress
    follows: bool


class ProgressHistory:
    """Keeps the progress records that were seen. Written by one thread, read by any."""

    def __init__(self, *, most_seqs: int = MOST_SEQS) -> None:
        """Begins with nothing seen."""
        self._most_seqs = most_seqs
        self._seqs = 0
        self._last: CleanerStatus | None = None
        self._seen: list[_Seen] = []

    def saw(self, status: CleanerStatus) -> None:
        """Takes a new status of the cleaner."""
        last, self._last = self._last, status
        progress = status.progress
        if progress is None or (self._seen and self._seen[-1].progress.order >= progress.order):
            return
        before = directly_before(last, status, None)
        follows = bool(self._seen) and before == self._seen[-1].progress
        self._seen.append(_Seen(progress, follows=follows))
        self._seqs += _weight(progress)
        if self._seqs > self._most_seqs:
            half = len(self._seen) // 2
            old = [_Seen(each.progress, follows=False) for each in self._seen[: half + 1 : 2]]
            self._seen = [*old, *self._seen[half + 1 :]]
            self._seqs = sum(_weight(each.progress) for each in self._seen)

    def was_cancelled(
        self, due_ms: int, copies: Iterable[Position], cancels: Collection[Position]
    ) -> bool | None:
        """Whether a message that is done was cancelled; None if that is not known here.

        Args:
            due_ms: Its due.
            copies: Where it lies; one is enough.
            cancels: Where all its cancels lie.
        """
        copies, seen = list(copies), self._seen

        def is_done(each: _Seen) -> int:
            return int(any(each.progress.covers(due_ms, copy) for copy in copies))

        at = bisect_left(seen, 1, key=is_done)
        if at == len(seen):
            return None
        if not _counts(seen[at].progress, cancels):
            return False
        if at == 0:
            return None
        before = seen[at - 1].progress
        if due_ms <= max(before.last_due_ms, before.ahead_ms or 0):
            return None  # another copy may have been taken before
        return True if seen[at].follows or _counts(before, cancels) else None


def _counts(progress: Progress, cancels: Iterable[Position]) -> bool:
    return any(cancel.seq <= progress.seq(cancel.wheel) for cancel in cancels)


def _weight(progress: Progress) -> int:
    return 1 + len(progress.seqs) + sum(len(done.seqs) for done in progress.ahead)
