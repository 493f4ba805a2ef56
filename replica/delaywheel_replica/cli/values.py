"""Parses and formats times, durations, ids and headers as people write them.

Values that cannot be parsed raise the error that argparse expects.
"""

from __future__ import annotations

import os
import re
from argparse import ArgumentTypeError
from datetime import UTC, datetime, timedelta
from typing import Final

from delaywheel.ingress import PLAUSIBLE_MS
from delaywheel.levels import duration_ms
from delaywheel_replica.quantities import from_ms

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ID_DIGITS: Final = re.compile(r"[0-9a-f]{32}")
_NOW: Final = re.compile(r"now(?:(?P<way>[+-])(?P<by>\w+))?")
_NAMED_ZONE: Final = re.compile(r"(?P<local>\S.*\S) +(?P<zone>[A-Za-z][\w/+-]*)")
TIMES: Final = "2030-01-31T12:00:00Z, '2030-01-31 12:00 Europe/Berlin', now+2h or Unix milliseconds"


def parse_duration(text: str) -> timedelta:
    """Parses `250ms`, `30s`, `1h30m`, `7d`."""
    try:
        return timedelta(milliseconds=duration_ms(text))
    except (ValueError, OverflowError) as error:
        raise ArgumentTypeError(str(error)) from None


def parse_duration_ms(text: str) -> int:
    """Parses a duration; returns milliseconds."""
    return parse_duration(text) // timedelta(milliseconds=1)


def parse_duration_s(text: str) -> float:
    """Parses a duration; returns seconds."""
    return parse_duration(text).total_seconds()


def parse_time(text: str) -> datetime:
    """Parses an ISO 8601 time with its zone, Unix milliseconds, `now`, `now-2h` or `now+1h30m`."""
    if text.lstrip("-").isdecimal():
        return from_ms(_unix_ms(int(text)))
    if match := _NOW.fullmatch(text):
        by = parse_duration(match["by"]) if match["by"] else timedelta()
        now = datetime.now(UTC)
        return now - by if match["way"] == "-" else now + by
    match = _NAMED_ZONE.fullmatch(text)
    try:
        moment = datetime.fromisoformat(match["local"] if match else text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no time: write {TIMES}") from None
    if match:
        if moment.tzinfo is not None:
            raise ArgumentTypeError(f"{text!r} says its zone twice")
        return _in_zone(moment, match["zone"])
    if moment.tzinfo is None:
        raise ArgumentTypeError(f"{text!r} does not say its zone: add Z, UTC, +01:00 or a name")
    return moment


def parse_time_ms(text: str) -> int:
    """Parses a time; returns Unix milliseconds."""
    return to_ms(parse_time(text))


def parse_second(text: str) -> int:
    """Parses a slot: Unix seconds, or a time as above."""
    if not text.isdecimal():
        return to_ms(parse_time(text)) // 1_000
    if int(text) >= PLAUSIBLE_MS.start:
        raise ArgumentTypeError(f"{text} is beyond the year 5000 in Unix seconds: milliseconds?")
    return int(text)


def parse_id(text: str) -> bytes:
    """Parses an id: 32 hex digits, or a UUID's usual form."""
    digits = text.replace("-", "").lower()
    if not _ID_DIGITS.fullmatch(digits):
        raise ArgumentTypeError(f"{text!r} is no id: 32 hex digits, or a UUID")
    return bytes.fromhex(digits)


def parse_header(text: str) -> tuple[str, bytes | None]:
    """Parses `name=value`; a name alone has a null value."""
    name, equals, value = text.partition("=")
    try:
        return bytes_given(name).decode(), bytes_given(value) if equals else None
    except UnicodeDecodeError:
        raise ArgumentTypeError(f"the name of header {name!a} is not UTF-8") from None


def bytes_given(text: str) -> bytes:
    """Returns the bytes that were written on the command line, whatever they are."""
    return os.fsencode(text)


def parse_place(text: str) -> tuple[int, int]:
    """Parses the place of a record: `partition:offset`."""
    partition, _, offset = text.partition(":")
    if not (partition.isdecimal() and offset.isdecimal() and len(text) < 30):
        raise ArgumentTypeError(
            f"{text!r}: write PARTITION:OFFSET, such as 0:1204; for a topic, --dead-topic TOPIC"
        )
    return int(partition), int(offset)


def parse_assignment(text: str) -> tuple[str, str]:
    """Parses `name=value`."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ArgumentTypeError(f"{text!r}: write NAME=VALUE")
    return name, value


def parse_count(text: str) -> int:
    """Parses a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}: a whole number from 1")
    return int(text)


def parse_seconds(text: str) -> float:
    """Parses a timeout: seconds, or a duration."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = parse_duration(text).total_seconds()
    if not 0.1 <= seconds < 1e9:
        raise ArgumentTypeError(f"{text!r}: at least 0.1 seconds")
    return seconds


def to_ms(moment: datetime) -> int:
    """Converts a time to Unix milliseconds."""
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def _unix_ms(number: int) -> int:
    if number < PLAUSIBLE_MS.start:
        raise ArgumentTypeError(
            f"{number} would be before 1973 in Unix milliseconds: seconds? Add 000"
        )
    if number >= PLAUSIBLE_MS.stop:
        raise ArgumentTypeError(
            f"{number} is beyond the year 5000 in Unix milliseconds: microseconds?"
        )
    return number


def _in_zone(local: datetime, name: str) -> datetime:
    """Returns a time in a zone; where clocks are set, an hour may be absent or repeated."""
    # Only here: few name a zone.
    from zoneinfo import ZoneInfo  # noqa: PLC0415

    try:
        zone = ZoneInfo(name)
    except (ValueError, OSError, LookupError):
        raise ArgumentTypeError(f"{name!r} is no time zone, such as Europe/Berlin") from None
    moment = local.replace(tzinfo=zone)
    if moment.astimezone(UTC).astimezone(zone).replace(tzinfo=None) != local:
        raise ArgumentTypeError(f"{local} is skipped by the clocks of {name}")
    if moment.utcoffset() != moment.replace(fold=1).utcoffset():
        raise ArgumentTypeError(f"{local} comes twice on the clocks of {name}: say the offset")
    return moment.astimezone(UTC)
