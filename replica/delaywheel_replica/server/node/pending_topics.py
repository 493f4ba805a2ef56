"""Counts pending messages by topic, as they are accepted and as time passes.

A message counts until its second is done. To keep memory independent of what is pending, near
seconds are counted one by one, and later ones in buckets: at most 101 topics (as in
`process/topic_counts.py`) times some 8,400 numbers, 3.5 MB, of which untouched pages cost nothing.

    done                  edge
     |  near, by seconds   |  far, by buckets of `width` seconds             |
     |<-- 1 to 2 widths -->|<-- BUCKETS at most; what lies behind counts     |
                                in the last one                              |

Invariants: done <= edge; edge is a multiple of the width; width < edge - done <= 2 * width once
`read` has moved both. When a bucket comes near, its messages are spread evenly over its seconds:
the sum is exact, and the moment when one of them stops counting is off by less than a width.
"""

import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from delaywheel_replica.process.topic_counts import OTHERS, TOPICS_AT_MOST

BUCKETS: Final = 8_192
_WIDTH_AT_LEAST_S: Final = 64


class PendingTopics:
    """Counts pending messages by topic. For any thread."""

    def __init__(self, ahead_s: int, done_slot: int, *, most: int = TOPICS_AT_MOST) -> None:
        """Begins at zero.

        Args:
            ahead_s: How far ahead of what is done messages may be due in normal operation.
            done_slot: Everything before this second counts as done.
            most: How many topics are counted by themselves.
        """
        self._width = max(_WIDTH_AT_LEAST_S, -(-ahead_s // (BUCKETS - 2)))
        self._near = np.zeros((most + 1, 2 * self._width), np.uint32)
        self._far = np.zeros((most + 1, BUCKETS), np.uint32)
        self._done = done_slot
        self._edge = (done_slot // self._width + 2) * self._width
        self._most = most
        self._rows: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(
        self,
        topics: Sequence[str],
        numbers: NDArray[np.integer[Any]],
        slots: NDArray[np.int64],
    ) -> None:
        """Counts messages; those of a finished second count until the next one is finished.

        Args:
            topics: The names.
            numbers: For each message the index of its topic.
            slots: Each message's second.
        """
        if not len(numbers):
            return
        with self._lock:
            rows = np.zeros(len(topics), np.intp)
            for number in np.flatnonzero(np.bincount(numbers)).tolist():
                rows[number] = self._row(topics[number])
            rows = rows[numbers]
            slots = np.maximum(slots, self._done)
            is_near = slots < self._edge
            _count(self._near, rows[is_near], slots[is_near])
            last = self._edge // self._width + BUCKETS - 1
            buckets = np.minimum(slots[~is_near] // self._width, last)
            _count(self._far, rows[~is_near], buckets)

    def read(self, done_slot: int) -> dict[str, int]:
        """Returns the counts of pending messages by topic.

        Args:
            done_slot: Everything before this second is done; it never decreases here.
        """
        with self._lock:
            self._advance(done_slot)
            sums = self._near.sum(axis=1, dtype=np.int64) + self._far.sum(axis=1, dtype=np.int64)
            return {topic: int(sums[row]) for topic, row in self._rows.items()}

    def _row(self, topic: str) -> int:
        row = self._rows.get(topic)
        if row is None:
            row = min(len(self._rows), self._most)
            self._rows[topic if row < self._most else OTHERS] = row
        return row

    def _advance(self, done_slot: int) -> None:
        if done_slot <= self._done:
            return
        width, near = self._width, self._near.shape[1]
        gone = np.arange(max(self._done, done_slot - near), done_slot) % near
        self._near[:, gone] = 0
        self._done = done_slot
        while self._edge - done_slot <= width:
            place = self._edge // width % BUCKETS
            counts = self._far[:, place].astype(np.int64)
            self._far[:, place] = 0
            slots = np.arange(max(self._edge, done_slot), self._edge + width)
            self._edge += width
            if len(slots):
                each, more = np.divmod(counts[:, None], len(slots))
                spread = each + (np.arange(len(slots)) < more)
                self._near[:, slots % near] += spread.astype(np.uint32)


def _count(table: NDArray[np.uint32], rows: NDArray[np.intp], numbers: NDArray[np.int64]) -> None:
    """Adds 1 for each message; by flat indexes, since numpy is five times as slow with pairs."""
    columns = table.shape[1]
    np.add.at(table.reshape(-1), rows * columns + numbers % columns, np.uint32(1))
