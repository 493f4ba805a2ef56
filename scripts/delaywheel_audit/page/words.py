"""Formats numbers, times and durations for people."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

SECOND = 1000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR

# What became of accepted messages, in the order in which it is drawn and listed; each with its
# name.
PARTS = {
    "forwarded": "forwarded",
    "cancelled": "cancelled",
    "committed": "committed for later",
    "asked": "asked about",
    "deferred": "deferred",
    "duplicates_dropped": "duplicates dropped",
    "dead": "dead-lettered",
    "pending": "pending",
    "lost": "lost",
    "not_verifiable": "not verifiable",
    "missing": "missing",
}


def count(number: int | None) -> str:
    """Formats a number with thousands separators; None as a dash."""
    return "-" if number is None else f"{number:,}"


def kind_name(kind: str) -> str:
    """Returns a kind of finding, or a column, as words."""
    return kind.replace("_", " ")


def listed(parts: Sequence[str]) -> str:
    """Joins items: one, two and three."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def span(ms: int | None) -> str:
    """Formats a duration in a suitable unit; None as a dash."""
    if ms is None:
        return "-"
    if ms < 0:
        return f"\u2212{span(-ms)}"
    if ms < SECOND:
        return f"{ms} ms"
    if ms < MINUTE:
        return f"{ms // 10 / 100:.2f}".rstrip("0").rstrip(".") + " s"
    for unit, name, smaller, smaller_name in (
        (DAY, "d", HOUR, "h"),
        (HOUR, "h", MINUTE, "min"),
    ):
        if ms >= unit:
            return _two(ms, unit, name, smaller, smaller_name)
    return _two(ms, MINUTE, "min", SECOND, "s")


def moment(ms: int | None) -> str:
    """Formats a time of day in UTC, in milliseconds; None as a dash."""
    if ms is None:
        return "-"
    when = _utc(ms)
    if when is None:  # a forged header may say anything
        return f"{ms:,} ms"
    return f"{when:%Y-%m-%d %H:%M:%S}.{ms % SECOND:03d}"


def short_moment(ms: int) -> str:
    """Formats a time in UTC without trailing zeros."""
    text = moment(ms)
    return text.removesuffix(".000").removesuffix(":00") if "-" in text else text


def clock(ms: int, step_ms: int) -> str:
    """Formats the label of a time axis, for ticks at this distance."""
    when = _utc(ms)
    if when is None:
        return count(ms)
    if step_ms >= DAY or ms % DAY == 0:
        return f"{when:%b} {when.day}" if step_ms < 300 * DAY else f"{when:%Y-%m}"
    if step_ms >= MINUTE:
        return f"{when:%H:%M}"
    return f"{when:%H:%M:%S}" + ("" if step_ms >= SECOND else f".{ms % SECOND:03d}")


def _utc(ms: int) -> datetime | None:
    try:
        return datetime.fromtimestamp(ms // SECOND, UTC)
    except (OverflowError, OSError, ValueError):
        return None


def _two(ms: int, unit: int, name: str, smaller: int, smaller_name: str) -> str:
    rest = ms % unit // smaller
    return f"{ms // unit:,} {name}" + (f" {rest} {smaller_name}" if rest else "")
