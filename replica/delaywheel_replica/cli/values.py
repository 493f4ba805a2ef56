"""Times, durations and ids as people write them, and back."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

import typer

from delaywheel.levels import duration_ms
from delaywheel_replica.cli.moments import unix_ms, unix_second

_ID_DIGITS: Final = re.compile(r"[0-9a-f]{32}")


def parse_duration(text: str) -> timedelta:
    """Reads `250ms`, `30s`, `5m`, `2h`, `7d`."""
    try:
        return timedelta(milliseconds=duration_ms(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_time(text: str) -> datetime:
    """Reads an ISO 8601 time with its zone, or Unix milliseconds."""
    try:
        if text.lstrip("-").isdecimal():
            return from_ms(_taken(unix_ms, text))
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is no time: write 2030-01-31T12:00:00Z or Unix milliseconds"
        ) from None
    if moment.tzinfo is None:
        raise typer.BadParameter(f"{text!r} does not say its time zone: add Z or an offset")
    return moment


def parse_second(text: str) -> int:
    """Reads a slot: Unix seconds, or an ISO 8601 time with its zone."""
    if text.isdecimal():
        return _taken(unix_second, text)
    return int(parse_time(text).timestamp() // 1)


def _taken(take: Callable[[int], int], digits: str) -> int:
    try:
        return take(int(digits))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_id(text: str) -> bytes:
    """Reads an id: 32 hex digits, or a UUID's usual form."""
    digits = text.replace("-", "").lower()
    if not _ID_DIGITS.fullmatch(digits):
        raise typer.BadParameter(f"{text!r} is no id: 32 hex digits, or a UUID")
    return bytes.fromhex(digits)


def parse_header(text: str) -> tuple[str, bytes | None]:
    """Reads `name=value`; a name alone has a null value."""
    name, equals, value = text.partition("=")
    return name, value.encode() if equals else None


def from_ms(ms: int) -> datetime:
    """The time of these Unix milliseconds."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)


def about(ms: int) -> str:
    """How long, roughly: `850 ms`, `12 s`, `3 min`, `5 h`, `2 d`."""
    for unit, of_ms, least in (
        ("d", 86_400_000, 2),
        ("h", 3_600_000, 2),
        ("min", 60_000, 2),
        ("s", 1_000, 1),
    ):
        if ms >= least * of_ms:
            return f"{ms // of_ms:,} {unit}"
    return f"{ms} ms"


def iso(ms: int) -> str:
    """Unix milliseconds as ISO 8601 in UTC."""
    return from_ms(ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def clock(slot: int) -> str:
    """A slot as ISO 8601 in UTC, without a fraction."""
    return from_ms(slot * 1000).isoformat(timespec="seconds").replace("+00:00", "Z")
