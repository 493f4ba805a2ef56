"""Counts pending messages, and their bytes, by topic, as they are accepted and as time passes.

A message counts until its second is done, also if it is cancelled: it lies on the disk until then.
To keep memory independent of what is pending, near seconds are counted one by one, and later ones
in buckets: for each topic some 8,400 numbers, 34 KB of messages and 67 KB of bytes, of which
untouched pages cost nothing. A hundred topics have rows of their own, or a thousand if topics may
have quotas; all others share one.

    done                  edge
     |  near, by seconds   |  far, by buckets of `width` seconds             |
     |<-- 1 to 2 widths -->|<-- BUCKETS at most; what lies behind counts     |
                                in the last one                              |

Invariants: done <= edge; edge is a multiple of the width; width < edge - done <= 2 * width once
`read` has moved both; a row's sum is that of its numbers. When a bucket comes near, its messages
are spread evenly over its seconds, and their bytes with them: the sum is exact, and the moment when
one of them stops counting is off by less than a width.
"""

import threading
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from delaywheel.storage.frames.columns import Columns
from delaywheel_replica.process.topic_counts import OTHERS, TOPICS_AT_MOST

BUCKETS: Final = 8_192
QUOTA_TOPICS_AT_MOST: Final = 1_000
_WIDTH_AT_LEAST_S: Final = 64


class PendingTopics:
    """Counts pending messages by topic. For any thread."""

    def __init__(
        self,
        ahead_s: int,
        done_slot: int,
        *,
        most: int = TOPICS_AT_MOST,
        counts_bytes: bool = False,
    ) -> None:
        """Begins at zero; everything before `done_slot` counts as done.

        Args:
            ahead_s: How far ahead of what is done messages may be due in normal operation.
            most: How many topics are counted by themselves.
            counts_bytes: Keys, values and headers are counted as well.
        """
        self._width = max(_WIDTH_AT_LEAST_S, -(-ahead_s // (BUCKETS - 2)))
        self._messages = _Numbers(most + 1, self._width, np.uint32)
        self._bytes = _Numbers(most + 1, self._width, np.uint64) if counts_bytes else None
        self._done = done_slot
        self._edge = (done_slot // self._width + 2) * self._width
        self._most = most
        self._rows: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, columns: Columns, chosen: NDArray[np.intp] | None = None) -> None:
        """Counts (chosen) messages; those of a finished second until the next one is finished."""
        numbers, slots = columns.topic_numbers, columns.slots
        if chosen is not None:
            numbers, slots = numbers[chosen], slots[chosen]
        if not len(numbers):
            return
        with self._lock:
            rows = np.zeros(len(columns.topics), np.intp)
            for number in np.flatnonzero(np.bincount(numbers)).tolist():
                rows[number] = self._row(columns.topics[number])
            rows = rows[numbers]
            slots = np.maximum(slots, self._done)
            is_near = slots < self._edge
            last = self._edge // self._width + BUCKETS - 1
            buckets = np.minimum(slots // self._width, last)
            self._messages.add(rows, is_near, slots, buckets, np.ones(len(rows), np.uint32))
            if self._bytes is not None:
                lengths_bytes = columns.lengths_bytes
                amounts = lengths_bytes if chosen is None else lengths_bytes[chosen]
                self._bytes.add(rows, is_near, slots, buckets, amounts.astype(np.uint64))

    def read(self, done_slot: int, *, most: int | None = None) -> dict[str, int]:
        """Returns pending messages by topic, `most` of them; all before `done_slot` is done."""
        with self._lock:
            self._advance(done_slot)
            told: dict[str, int] = {}
            for topic, row in self._rows.items():
                name = topic if row < (self._most if most is None else most) else OTHERS
                told[name] = told.get(name, 0) + int(self._messages.sums[row])
            return told

    def of(self, topic: str, done_slot: int) -> tuple[int, int]:
        """Returns how many messages, and bytes, are pending in a topic, or in all without a row."""
        with self._lock:
            self._advance(done_slot)
            row = self._rows.get(topic, self._most)
            length_bytes = 0 if self._bytes is None else int(self._bytes.sums[row])
            return int(self._messages.sums[row]), length_bytes

    def _row(self, topic: str) -> int:
        row = self._rows.get(topic)
        if row is None:
            row = min(len(self._rows), self._most)
            self._rows[topic if row < self._most else OTHERS] = row
        return row

    def _advance(self, done_slot: int) -> None:
        if done_slot <= self._done:
            return
        width, rows = self._width, len(self._rows)
        self._messages.finish(rows, self._done, done_slot)
        if self._bytes is not None:
            self._bytes.finish(rows, self._done, done_slot)
        self._done = done_slot
        while self._edge - done_slot <= width:
            bucket = self._edge // width
            slots = np.arange(max(self._edge, done_slot), self._edge + width)
            spread = _even(self._messages.take(rows, bucket), len(slots))
            if self._bytes is not None:
                lengths_bytes = self._bytes.take(rows, bucket)
                self._bytes.come_near(slots, _spread_bytes(lengths_bytes, spread))
            self._messages.come_near(slots, spread)
            self._edge += width


class _Numbers:
    """One number of each row and second."""

    def __init__(self, rows: int, width: int, kind: type[np.unsignedinteger[Any]]) -> None:
        self.near: Final = np.zeros((rows, 2 * width), kind)
        self.far: Final = np.zeros((rows, BUCKETS), kind)
        self.sums: Final = np.zeros(rows, np.int64)

    def add(
        self,
        rows: NDArray[np.intp],
        is_near: NDArray[np.bool_],
        slots: NDArray[np.int64],
        buckets: NDArray[np.int64],
        amounts: NDArray[Any],
    ) -> None:
        is_far = ~is_near
        _add_at(self.near, rows[is_near], slots[is_near], amounts[is_near])
        _add_at(self.far, rows[is_far], buckets[is_far], amounts[is_far])
        np.add.at(self.sums, rows, amounts.astype(np.int64))

    def finish(self, rows: int, done: int, done_slot: int) -> None:
        """Drops what is before a second; all before `done` is dropped already."""
        near = self.near.shape[1]
        gone = np.arange(max(done, done_slot - near), done_slot) % near
        self.sums[:rows] -= self.near[:rows, gone].sum(axis=1, dtype=np.int64)
        self.near[:rows, gone] = 0

    def take(self, rows: int, bucket: int) -> NDArray[np.int64]:
        """Empties a bucket; returns what each row had in it."""
        place = bucket % BUCKETS
        taken = self.far[:rows, place].astype(np.int64)
        self.far[:rows, place] = 0
        self.sums[:rows] -= taken
        return taken

    def come_near(self, slots: NDArray[np.int64], spread: NDArray[np.int64]) -> None:
        """Adds to seconds what lay in a bucket, by row and second."""
        rows = len(spread)
        self.near[:rows, slots % self.near.shape[1]] += spread.astype(self.near.dtype)
        self.sums[:rows] += spread.sum(axis=1)


def _even(numbers: NDArray[np.int64], seconds: int) -> NDArray[np.int64]:
    """Spreads numbers evenly; what no second is left for is dropped."""
    if not seconds:
        return np.empty((len(numbers), 0), np.int64)
    each, more = np.divmod(numbers[:, None], seconds)
    spread: NDArray[np.int64] = each + (np.arange(seconds) < more)
    return spread


def _spread_bytes(
    lengths_bytes: NDArray[np.int64], messages: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Spreads bytes as their messages are spread: where there are none, there are no bytes."""
    until = messages.cumsum(axis=1)
    total = np.maximum(until[:, -1:], 1)
    each, more = np.divmod(lengths_bytes[:, None], total)
    ends = each * until + more * until // total
    spread: NDArray[np.int64] = np.diff(ends, axis=1, prepend=0)
    return spread


def _add_at(
    table: NDArray[Any], rows: NDArray[np.intp], numbers: NDArray[np.int64], amounts: NDArray[Any]
) -> None:
    """Adds an amount for each; by flat indexes, since numpy is five times as slow with pairs."""
    columns = table.shape[1]
    np.add.at(table.reshape(-1), rows * columns + numbers % columns, amounts)
