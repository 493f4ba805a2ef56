"""The next seconds that have a cancel: a commit looks for one of its half only in these.

Cancels of halves are rare, and a look costs more than a commit. So whoever writes frames, a node's
own and those of others, notes the seconds of cancels that are due soon. What was written before
this process started is unknown: each of those seconds may have one.
"""

from typing import Final

from delaywheel.record_headers import LONGEST_HOLD_MS
from delaywheel.storage.frames.bundle import FrameBundle
from delaywheel.storage.frames.rows import are_cancels

AHEAD_S: Final = LONGEST_HOLD_MS // 1000 + 5
"""No half is due later, by clocks that differ by less than 5 s: what is, is no half's cancel."""


class NearCancels:
    """Noted by one thread; read by any."""

    def __init__(self, now_ms: int) -> None:
        self._known_from = now_ms // 1000 + AHEAD_S
        self._seconds: frozenset[int] = frozenset()

    def __contains__(self, due_ms: int) -> bool:
        """Whether the second of a due may have a cancel."""
        return due_ms // 1000 <= self._known_from or due_ms // 1000 in self._seconds

    def wrote(self, frames: FrameBundle, now_ms: int) -> None:
        """Notes frames that were written; forgets seconds that are over."""
        rows = frames.rows
        cancels = rows["slot"][are_cancels(rows)]
        if len(cancels):
            now = now_ms // 1000
            near = {slot for slot in cancels.tolist() if slot <= now + AHEAD_S}
            self._seconds = frozenset(each for each in self._seconds | near if each >= now)
