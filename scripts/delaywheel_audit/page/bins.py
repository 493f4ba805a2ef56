"""Merges buckets into columns of a plot: adjacent, without gaps, and few enough to see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from delaywheel_audit.page.scales import time_step
from delaywheel_audit.page.words import PARTS

SUMS = ("accepted", "acknowledged", *PARTS, "duplicated", "unexpected", "early", "late")
SPANS = ("lateness", "delay")
# Merged buckets take the greatest value: what holds for each part holds for the whole, so the true
# percentile is not above it. Only all values together would give it exactly.
GREATEST = tuple(f"{name}_{of}_ms" for name in SPANS for of in ("p50", "p99", "max"))

Row = Mapping[str, Any]


@dataclass(slots=True)
class Bin:
    """One column: sums and maxima of its buckets."""

    from_ms: int
    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SUMS, 0))
    greatest: dict[str, int | None] = field(default_factory=lambda: dict.fromkeys(GREATEST))
    buckets: int = 0

    def take(self, row: Row) -> None:
        """Adds a bucket."""
        self.buckets += 1
        for name in SUMS:
            self.sums[name] += row.get(name) or 0
        for name in GREATEST:
            value, known = row.get(name), self.greatest[name]
            if value is not None:
                self.greatest[name] = value if known is None else max(known, value)


@dataclass(frozen=True, slots=True)
class Bins:
    """All columns."""

    interval_ms: int
    width_ms: int
    columns: list[Bin]

    @property
    def from_ms(self) -> int:
        """When the first column begins."""
        return self.columns[0].from_ms

    @property
    def to_ms(self) -> int:
        """When the last column ends."""
        return self.columns[-1].from_ms + self.width_ms

    @property
    def is_merged(self) -> bool:
        """Whether a column covers more than one bucket, by time or by topic."""
        return self.width_ms > self.interval_ms or any(one.buckets > 1 for one in self.columns)

    def place(self, ms: int) -> int | None:
        """Returns the number of the column for a time."""
        number = (ms - self.from_ms) // self.width_ms
        return number if 0 <= number < len(self.columns) else None

    def known(self, name: str) -> list[int]:
        """Returns the known maxima of that name."""
        values = (one.greatest[name] for one in self.columns)
        return [value for value in values if value is not None]


def merge(rows: Sequence[Row], interval_ms: int, most: int) -> Bins | None:
    """Returns at most `most` columns, each of whole buckets; None where there is no bucket."""
    if not rows:
        return None
    times = [int(row["bucket_ms"]) for row in rows]
    first, end = min(times), max(times) + interval_ms
    width = interval_ms
    if end - first > most * interval_ms:  # one less: it may begin before the first bucket
        width = time_step(end - first, most - 1, interval_ms)
    first -= first % width
    columns = [Bin(start) for start in range(first, end, width)]
    for row, time in zip(rows, times, strict=True):
        columns[(time - first) // width].take(row)
    return Bins(interval_ms, width, columns)


def total(rows: Iterable[Row]) -> Bin:
    """Returns the sum of all columns."""
    whole = Bin(0)
    for row in rows:
        whole.take(row)
    return whole
