"""Histograms: how long something took, in fixed buckets, since a process started.

All in integer microseconds: these fit JSON exactly, and sums neither round nor drift.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from delaywheel_replica.core.protocol.codec import Natural

_MS: Final = 1_000

_UP_TO_A_SECOND_MS: Final = (5, 10, 20, 30, 50, 75, 100, 150, 250, 500, 1_000)
_OUTAGES_MS: Final = (2_500, 5_000, 10_000, 30_000, 60_000, 300_000, 3_600_000)

LATENESS_BOUNDS_US: Final = tuple(ms * _MS for ms in (*_UP_TO_A_SECOND_MS, *_OUTAGES_MS))
"""For forwarded messages: dense where a healthy cluster is, and up to the length of an outage."""

COMMIT_BOUNDS_US: Final = tuple(ms * _MS for ms in (*_UP_TO_A_SECOND_MS, 2_500, 5_000, 10_000))
"""For transactions, from begin to the answer to the commit; a call lasts 10 s at most."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts in buckets.

    Attributes:
        bounds_us: Upper bounds of the buckets, each inclusive, ascending.
        counts: Of each bucket alone; the last one is for values beyond the last bound.
    """

    bounds_us: tuple[int, ...]
    counts: tuple[int, ...]
    sum_us: Natural

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.bounds_us) + 1:
            raise ValueError(f"counts: {len(self.counts)} for {len(self.bounds_us)} bounds")
        if any(low >= high for low, high in pairwise(self.bounds_us)):
            raise ValueError("bounds_us: not ascending")


class Tally:
    """Counts into a histogram. One thread adds; any thread may read."""

    def __init__(self, bounds_us: tuple[int, ...]) -> None:
        self.bounds_us = bounds_us
        self._counts = [0] * (len(bounds_us) + 1)
        self._sum_us = 0

    def add(self, value_us: int, times: int = 1) -> None:
        """Adds a value so many times; a negative one (a clock was set back) counts as 0."""
        value_us = max(0, value_us)
        self._counts[bisect_left(self.bounds_us, value_us)] += times
        self._sum_us += value_us * times

    def add_counted(self, counts: Sequence[int], sum_us: int) -> None:
        """Adds counts of another histogram with the same buckets."""
        self._counts = [before + more for before, more in zip(self._counts, counts, strict=True)]
        self._sum_us += sum_us

    def read(self) -> Histogram:
        """Returns the counts so far."""
        return Histogram(self.bounds_us, tuple(self._counts), self._sum_us)
