"""Numbers for people: counts with nouns, sizes, durations, times. Whatever prints uses these."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SIZES: Final = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def counted(number: int, noun: str) -> str:
    """Formats a count: `1 message`, `2,000 messages`, `3 copies`."""
    if number != 1:
        ends_in_y = noun.endswith("y") and noun[-2:-1] not in "aeiou"
        noun = f"{noun[:-1]}ies" if ends_in_y else f"{noun}s"
    return f"{number:,} {noun}"


def size(length_bytes: int) -> str:
    """Formats a size to three digits: `612 B`, `1.29 MB`, `248 MB`, `6.13 GB`."""
    for unit_bytes, unit in _SIZES:
        if length_bytes >= unit_bytes - unit_bytes // 2000:  # what is rounded up has the next unit
            number = length_bytes / unit_bytes
            digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
            return f"{number:,.{digits}f} {unit}"
    return f"{length_bytes} B"


def about(ms: int) -> str:
    """Formats a rough duration: `850 ms`, `12 s`, `3 min`, `5 h`, `2 d`."""
    for unit, of_ms, least in (
        ("d", 86_400_000, 2),
        ("h", 3_600_000, 2),
        ("min", 60_000, 2),
        ("s", 1_000, 1),
    ):
        if ms >= least * of_ms:
            return f"{ms // of_ms:,} {unit}"
    return f"{ms} ms"


def from_ms(ms: int) -> datetime:
    """Converts Unix milliseconds to a time."""
    return _EPOCH + timedelta(milliseconds=ms)


def iso(ms: int) -> str:
    """Formats Unix milliseconds as ISO 8601 in UTC."""
    return from_ms(ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def clock(slot: int) -> str:
    """Formats a slot as ISO 8601 in UTC, without a fraction."""
    return from_ms(slot * 1000).isoformat(timespec="seconds").replace("+00:00", "Z")
