"""Times, durations, ids and headers as people write them."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.ingress import PLAUSIBLE_MS
from delaywheel.message import unix_ms
from delaywheel_replica import quantities
from delaywheel_replica.cli import values


@given(st.integers(min_value=PLAUSIBLE_MS.start, max_value=4_000_000_000_000))
def test_milliseconds_survive_as_text(unix: int) -> None:
    assert unix_ms(values.parse_time(quantities.iso(unix))) == unix
    assert unix_ms(values.parse_time(str(unix))) == unix


@given(st.integers(min_value=0, max_value=4_000_000_000))
def test_seconds_survive_as_text(slot: int) -> None:
    assert values.parse_second(quantities.clock(slot)) == slot
    assert values.parse_second(str(slot)) == slot


@pytest.mark.parametrize(
    ("parse", "text", "reported"),
    [
        (values.parse_time, "1795337599", "before 1973 in Unix milliseconds: seconds"),
        (values.parse_time, "1795337599000000", "microseconds"),
        (values.parse_second, "1795337599000", "milliseconds"),
    ],
)
def test_a_number_of_another_unit_is_not_taken(
    parse: Callable[[str], object], text: str, reported: str
) -> None:
    with pytest.raises(ArgumentTypeError, match=reported):
        parse(text)


def test_offsets_count() -> None:
    assert values.parse_time("2030-01-31T13:00:00+01:00") == datetime(2030, 1, 31, 12, tzinfo=UTC)


def test_durations() -> None:
    assert values.parse_duration("250ms") == timedelta(milliseconds=250)
    assert values.parse_duration("2h") == timedelta(hours=2)
    assert values.parse_duration("1h30m") == timedelta(minutes=90)
    assert values.parse_duration("1d1s5ms") == timedelta(days=1, seconds=1, milliseconds=5)


def test_times_from_now() -> None:
    before = datetime.now(UTC)
    for text, by in (("now", 0), ("now+1h30m", 5_400), ("now-2s", -2)):
        assert abs(values.parse_time(text) - before - timedelta(seconds=by)) < timedelta(minutes=1)


def test_times_on_the_clocks_of_a_zone() -> None:
    noon = datetime(2030, 1, 31, 12, tzinfo=UTC)
    assert values.parse_time("2030-01-31 13:00 Europe/Berlin") == noon
    assert values.parse_time("2030-01-31 12:00 UTC") == noon
    with pytest.raises(ArgumentTypeError, match="skipped"):
        values.parse_time("2030-03-31 02:30 Europe/Berlin")
    with pytest.raises(ArgumentTypeError, match="twice"):
        values.parse_time("2030-10-27 02:30 Europe/Berlin")


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (1_000, "1 s"),
        (119_999, "119 s"),
        (120_000, "2 min"),
        (7_200_000, "2 h"),
        (172_800_000, "2 d"),
        (400 * 86_400_000, "400 d"),
    ],
)
def test_roughly_how_long(ms: int, text: str) -> None:
    assert quantities.about(ms) == text


@pytest.mark.parametrize(
    ("length_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.00 kB"),
        (9_996, "10.0 kB"),
        (248_397_824, "248 MB"),
        (999_499, "999 kB"),
        (999_600, "1.00 MB"),
        (6_128_044_100, "6.13 GB"),
    ],
)
def test_sizes_have_three_digits(length_bytes: int, text: str) -> None:
    assert quantities.size(length_bytes) == text


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "message", "0 messages"),
        (1, "frame", "1 frame"),
        (2_000, "frame", "2,000 frames"),
        (2, "copy", "2 copies"),
        (1, "copy", "1 copy"),
        (2, "day", "2 days"),
    ],
)
def test_counts_agree_with_their_nouns(number: int, noun: str, text: str) -> None:
    assert quantities.counted(number, noun) == text


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (values.parse_time, "tomorrow"),
        (values.parse_time, "2030-01-31T12:00:00"),
        (values.parse_time, "9" * 40),
        (values.parse_time, "-1"),
        (values.parse_duration, "5 minutes"),
        (values.parse_duration, ""),
        (values.parse_duration, "30m1h"),
        (values.parse_duration, "1h1h"),
        (values.parse_duration, "999999999d999999999h"),
        (values.parse_time, "2030-01-31 12:00 Europe/Nowhere"),
        (values.parse_time, "2030-01-31T12:00Z UTC"),
        (values.parse_time, "now-2"),
        (values.parse_id, "12"),
        (values.parse_id, "z" * 32),
        (values.parse_second, "soon"),
    ],
)
def test_what_cannot_be_read_is_wrong_usage(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        parse(text)


def test_ids_as_hex_and_as_uuid() -> None:
    digits = "0190163d8694739b8d3f8a4d6a1f5d10"
    assert values.parse_id(digits) == bytes.fromhex(digits)
    assert values.parse_id("0190163D-8694-739B-8D3F-8A4D6A1F5D10") == bytes.fromhex(digits)


def test_headers_may_be_null_or_empty() -> None:
    assert values.parse_header("a=b=c") == ("a", b"b=c")
    assert values.parse_header("a=") == ("a", b"")
    assert values.parse_header("a") == ("a", None)
