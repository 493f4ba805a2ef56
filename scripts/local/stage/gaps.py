"""Times in which nothing arrived, read from the times of the arrivals."""

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
    """The longest time between one and the next; times are in order, and there is one."""
    gaps = (Gap(after - before, after) for before, after in itertools.pairwise(times_ms))
    return max(gaps, default=Gap(0.0, times_ms[0]))


def usual_spacing_ms(times_ms: Sequence[float]) -> float:
    """The median time between arrivals; what came together counts as one; 0 if none is known."""
    gaps = [after - before for before, after in itertools.pairwise(times_ms) if after > before]
    return statistics.median(gaps) if gaps else 0.0
