"""Committed progress as this node saw it, to tell which rows came in time.

A row that names a message, as cancels do, counts if its seq is <= V of the transaction that takes
the message. The first progress seen by which the message is done decides, with the one seen before
it, if by that no copy of the message can have been taken:

| the first row | then it |
|---|---|
| is <= V of the progress before | counted: V of a later transaction is no less |
| is <= V of the deciding progress, which was committed directly after | counted |
| is <= V of the deciding progress, which was committed later | may have counted |
| is > V of the deciding progress | did not count |

Memory is bounded: if there are too many, every other one of the older half is dropped.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from delaywheel_replica.core.leader.cancel import directly_before
from delaywheel_replica.core.leader.halves import is_released
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

    def __init__(self) -> None:
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
        if self._seqs > MOST_SEQS:
            half = len(self._seen) // 2
            old = [_Seen(each.progress, follows=False) for each in self._seen[: half + 1 : 2]]
            self._seen = [*old, *self._seen[half + 1 :]]
            self._seqs = sum(_weight(each.progress) for each in self._seen)

    def is_cancelled(
        self,
        progress: Progress | None,
        due_ms: int,
        copies: Collection[Position],
        cancels: Collection[Position],
    ) -> bool | None:
        """Whether a cancel counts, or counted when the message was taken; None: unknown here."""
        if not cancels or progress is None:
            return False
        if any(progress.covers(due_ms, copy) for copy in copies):
            return self.did_count(due_ms, copies, cancels)
        return progress.counts(cancels)

    def did_count(
        self,
        due_ms: int,
        copies: Iterable[Position],
        naming: Collection[Position],
        releases: Collection[Position] = (),
    ) -> bool | None:
        """Whether rows that name a message counted when it was taken; None: that is not known here.

        Of its copies one is enough. The `releases` are those of a half.
        """
        copies, seen = list(copies), self._seen

        def done_by(each: _Seen) -> int:
            return int(
                any(
                    each.progress.covers(due_ms, copy) or is_released(copy, releases, each.progress)
                    for copy in copies
                )
            )

        at = bisect_left(seen, 1, key=done_by)
        if at == len(seen):
            return None
        if not seen[at].progress.counts(naming):
            return False
        if at == 0:
            return None
        before = seen[at - 1].progress
        if due_ms <= max(before.last_due_ms, before.ahead_ms or 0):
            return None  # another copy may have been taken before
        return True if seen[at].follows or before.counts(naming) else None


def _weight(progress: Progress) -> int:
    return 1 + len(progress.seqs) + sum(len(done.seqs) for done in progress.ahead)
