import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delaywheel.record_headers import LONGEST_TTL_VALUE_BYTES, read_ttl_s, ttl_s_of

LONGEST_S = 2**63 - 1


@pytest.mark.parametrize(
    ("value", "ttl_s"),
    [
        (b"60", 60),
        (b"007", 7),
        (b"12345678", 12_345_678),
        (b"9" * 19, 10**19 - 1),
        ((60).to_bytes(8, "big"), 60),
        (b"\x7f" + b"\xff" * 7, LONGEST_S),
        (b"0", None),
        (bytes(8), None),
        ((-1).to_bytes(8, "big", signed=True), None),
        (b"9" * 20, None),
        (b"", None),
        (None, None),
        (b"5m", None),
        (b"-5", None),
        (b" 5", None),
        (b"1.5", None),
        ("٣".encode(), None),
        ((60).to_bytes(4, "big"), None),
    ],
)
def test_what_a_value_means(value: bytes | None, ttl_s: int | None) -> None:
    assert read_ttl_s(value) == ttl_s


@given(st.integers(1, LONGEST_S))
@example(0x3030303030303031)
def test_both_ways_to_write_it_are_read(ttl_s: int) -> None:
    text = b"%d" % ttl_s
    assert len(text) <= LONGEST_TTL_VALUE_BYTES
    assert read_ttl_s(text) == ttl_s
    long = ttl_s.to_bytes(8, "big")
    assert read_ttl_s(long) == (int(long) if long.isdigit() else ttl_s)


@given(st.none() | st.binary(max_size=24))
def test_any_value_is_a_whole_number_from_1_or_none(value: bytes | None) -> None:
    ttl_s = read_ttl_s(value)
    assert ttl_s is None or ttl_s >= 1


def test_the_last_header_of_the_name_counts() -> None:
    assert ttl_s_of([("ttl", b"5"), ("TTL", b"6"), ("ttl", b"7"), ("a", b"8")]) == 7
    assert ttl_s_of([("ttl", b"5"), ("ttl", None)]) is None
    assert ttl_s_of([]) is None


def test_another_header_may_state_it_or_none() -> None:
    headers = [("ttl", b"5"), ("x-life", b"6"), ("", b"7")]
    assert ttl_s_of(headers, "x-life") == 6
    assert ttl_s_of(headers, "") is None
    assert ttl_s_of(headers, None) is None
