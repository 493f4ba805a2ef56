"""Finds times without arrivals."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Gap(NamedTuple):
    """A time without arrivals, and when it ended."""

    length_ms: float
    ended_at_ms: float


def longest_gap(times_ms: Sequence[float]) -> Gap:
    """Returns the longest time between consecutive arrivals; times must be sorted, not empty."""
    gaps = (Gap(after - before, after) for before, after in itertools.pairwise(times_ms))
    return max(gaps, default=Gap(0.0, times_ms[0]))


def usual_spacing_ms(times_ms: Sequence[float]) -> float:
    """Returns the median time between distinct arrivals; 0 if unknown."""
    gaps = [after - before for before, after in itertools.pairwise(times_ms) if after > before]
    return statistics.median(gaps) if gaps else 0.0
