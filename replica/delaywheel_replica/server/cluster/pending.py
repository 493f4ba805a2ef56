"""How many messages are pending, for those who ask again and again.

To count them all reads the whole dial: some 40 ms of CPU for a span of 7 days, which an operator's
page would cost each node once a second. So what is due beyond an hour is counted again only after
300 times as long as that took, 12 s for those 40 ms; what is due before is counted each time, and
all of it where that takes less than 3 ms, for a span of some hours.
"""

import time
from typing import Final

from delaywheel.storage.writing.dial import DialView, uncancelled

_NEAR_S: Final = 3_600
_PAUSE_FACTOR: Final = 300


class PendingCount:
    """Counts. For one thread at a time."""

    def __init__(self, dial: DialView) -> None:
        self._dial: Final = dial
        self._far_from = 0
        self._far = (0, 0)
        self._counted = range(0)

    def read(self, now_slot: int, done_slot: int) -> tuple[int, int]:
        """Returns messages, and bytes, from the done slot on."""
        if now_slot not in self._counted or done_slot > self._far_from:
            began_s, self._far_from = time.thread_time(), max(now_slot + _NEAR_S, done_slot)
            rows = self._dial.pending(now_slot, self._far_from)
            self._far = sum(row.messages for row in rows), sum(row.length_bytes for row in rows)
            took_s = time.thread_time() - began_s
            self._counted = range(now_slot, now_slot + int(took_s * _PAUSE_FACTOR))
        near = self._dial.rows(done_slot, self._far_from)
        messages, length_bytes = int(uncancelled(near).sum()), int(near["length_bytes"].sum())
        return self._far[0] + messages, self._far[1] + length_bytes
