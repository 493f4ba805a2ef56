"""Computes figures from measurements: spreads, ratios, lateness by second."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.floating[Any]]
"""Milliseconds, one value for each message."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Minimum, median and maximum over several rounds."""

    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Extent | None:
        """Returns the extent of any number of values; None for none."""
        if not values:
            return None
        return cls(min(values), statistics.median(values), max(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Extent | None:
    """Returns our values divided by theirs, by round; rounds with 0 of theirs are left out."""
    return Extent.of([a / b for a, b in zip(ours, theirs, strict=True) if b])


def differences(ours: Sequence[float], theirs: Sequence[float]) -> Extent | None:
    """Returns our values minus theirs, by round."""
    return Extent.of([a - b for a, b in zip(ours, theirs, strict=True)])


@dataclass(frozen=True, slots=True)
class Second:
    """Lateness of the messages due in one second, in milliseconds."""

    second: int
    messages: int
    p50_ms: float
    p99_ms: float
    max_ms: float


def by_second(dues_ms: Times, lateness_ms: Times) -> list[Second]:
    """Returns lateness over time, in order, without seconds in which nothing was due."""
    if not len(dues_ms):
        return []
    seconds = (dues_ms // 1000).astype(np.int64)
    order = np.argsort(seconds, kind="stable")
    names, starts = np.unique(seconds[order], return_index=True)
    parts = np.split(lateness_ms[order], starts[1:])
    return [
        Second(second, len(part), *np.percentile(part, (50, 99, 100)).tolist())
        for second, part in zip(names.tolist(), parts, strict=True)
    ]
