"""Scales and ticks: positions of values, and labels of axes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from delaywheel_audit.page.words import DAY, HOUR, MINUTE, SECOND

HEIGHT = 1000
"""The height of plots in units; their width is the number of columns."""

_STEPS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500),
    *(number * SECOND for number in (1, 2, 5, 10, 15, 30)),
    *(number * MINUTE for number in (1, 2, 5, 10, 15, 30)),
    *(number * HOUR for number in (1, 2, 3, 6, 12)),
    *(number * DAY for number in (1, 2, 7, 14, 28, 91, 364)),
)
# For spans, where powers of ten say little: no reader thinks in 10,000,000 ms.
_MARKS = (1, 10, 100, SECOND, 10 * SECOND, MINUTE, 10 * MINUTE, HOUR, 10 * HOUR)
_DAY_MARKS = tuple(10**power * DAY for power in range(10))


def count_ticks(top: int, most: int = 5) -> list[int]:
    """Returns round numbers from 0 to at least `top`, at most `most` of them above 0."""
    top = max(top, 1)
    step = 1
    while math.ceil(top / step) > most:
        step = _next_round(step)
    return list(range(0, (math.ceil(top / step) + 1) * step, step))


def time_step(span_ms: int, most: int, multiple_of: int = 1) -> int:
    """Returns a step that divides a span into at most `most`, preferably a familiar one."""
    needed = max(1, math.ceil(span_ms / (most * multiple_of))) * multiple_of
    friendly = (step for step in _STEPS if step >= needed and step % multiple_of == 0)
    nearest = next(friendly, needed)
    return nearest if nearest <= 4 * needed else needed


def time_ticks(from_ms: int, to_ms: int, most: int = 8) -> tuple[list[int], int]:
    """Returns the times to label on an axis, and their distance."""
    step = time_step(to_ms - from_ms, most)
    first = -(-from_ms // step) * step
    return list(range(first, to_ms, step)), step


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear scale from 0."""

    ticks: list[int]

    def y(self, value: int) -> int:
        """Returns the position of a value, from above."""
        return HEIGHT - round(HEIGHT * value / self.ticks[-1])


@dataclass(frozen=True, slots=True)
class Spans:
    """A logarithmic scale of durations, in powers of ten; 1 ms and less is at the base."""

    ticks: list[int]

    @classmethod
    def around(cls, values: list[int]) -> Spans:
        """Returns a scale that shows all of these, with at least two marks."""
        marks = [*_MARKS, *_DAY_MARKS]
        low, high = max(min(values), 1), max(*values, 1)
        first = max(number for number, mark in enumerate(marks) if mark <= low)
        over = [number for number, mark in enumerate(marks) if mark >= high]
        last = over[0] if over else len(marks) - 1
        return cls(marks[first : max(last, first + 1) + 1])

    def y(self, value: int) -> int:
        """Returns the position of a value, from above."""
        low, high = math.log(self.ticks[0]), math.log(self.ticks[-1])
        share = (math.log(max(value, 1)) - low) / (high - low)
        return HEIGHT - round(HEIGHT * min(max(share, 0.0), 1.0))


def _next_round(step: int) -> int:
    """Returns the next of 1, 2, 5, 10, 20, 50 and so on."""
    digit = int(str(step)[0])
    return step * 5 // 2 if digit == 2 else step * 2
