"""Since when index rows cannot be read.

A row that the medium does not return says nothing of its frame, not even its second. So what counts
is not how long that second is over, but when the row was first found to be unreadable.
"""

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.reading.reader import UNREADABLE_WAIT_MS


class UnreadableRows:
    """When rows were first found to be unreadable. For one thread."""

    def __init__(self) -> None:
        self._found: dict[WheelId, dict[int, SeqSet]] = {}  # by the second that found them

    def waited_for(
        self, wheel: WheelId, looked_at: SeqSet, unreadable: SeqSet, now_ms: int
    ) -> SeqSet:
        """Notes which of some rows cannot be read now, by the seqs of their frames.

        Returns those that were found so less than `UNREADABLE_WAIT_MS` ago, by the wall clock.
        """
        readable = looked_at - unreadable
        now_s, new = now_ms // 1000, unreadable
        found: dict[int, SeqSet] = {}
        for second, seqs in self._found.pop(wheel, {}).items():
            since_s, left = min(second, now_s), seqs - readable  # the clock may have been set back
            if left:
                found[since_s] = found.get(since_s, NO_SEQS) | left
            new -= left
        if new:
            found[now_s] = found.get(now_s, NO_SEQS) | new
        if found:
            self._found[wheel] = found
        waited_for = NO_SEQS
        for second, seqs in found.items():
            if now_ms < second * 1000 + UNREADABLE_WAIT_MS:
                waited_for |= seqs & unreadable
        return waited_for
