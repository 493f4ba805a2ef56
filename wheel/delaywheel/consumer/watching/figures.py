"""A consumer in figures, all of one moment: what its metrics are made of."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Final, NamedTuple

from delaywheel.consumer.book import Counts
from delaywheel.consumer.records import Partition

HANDLER_BOUNDS_S: Final = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0)


class Figures(NamedTuple):
    """One moment of a consumer.

    Attributes:
        held_bytes: Their keys, values and headers.
        oldest_in_hand_s: How long the record has been in hand that holds up its partition longest.
        suspects: Partitions whose records are handed out one by one: whoever had them before died.
        are_counts_forbidden: Whether the trace's counts are not in its transactions, as it may not
            write to their topic.
        lags: Offsets of each partition that have not ended: unread ones, and those of held records.
        handled: How many records handlers took up to each of `HANDLER_BOUNDS_S`, and longer.
    """

    counts: Counts
    dead_reasons: Mapping[str, int]
    held: int
    held_bytes: int
    in_hand: int
    oldest_in_hand_s: float
    suspects: int
    are_counts_forbidden: bool
    lags: Mapping[Partition, int]
    handled: tuple[int, ...]
    handled_s: float


class HandlerTimes:
    """How long records were in hand until they were settled."""

    def __init__(self) -> None:
        self.counts = [0] * (len(HANDLER_BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, took_s: float, records: int = 1) -> None:
        """Adds records that were handled together."""
        self.counts[bisect_left(HANDLER_BOUNDS_S, took_s)] += records
        self.sum_s += took_s * records
