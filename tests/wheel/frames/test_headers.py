import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delaywheel.headers import HeadersMalformedError, decode_headers, encode_headers
from delaywheel.storage.frames.columns import Columns, content_starts
from delaywheel.storage.frames.header_checks import (
    TooManyHeadersError,
    check_headers,
    rows_that_may_have,
)
from support.wheels.messages import columns_of, message

_pairs = st.lists(
    st.tuples(
        st.text(min_size=1, max_size=6)
        | st.sampled_from(
            ["dw-id", "dw-", "dw", "Dw-x", "dw-retry", "dw-retry-", "dw-retry-é", "é", "a\0", "\0"]
        ),
        st.none() | st.binary(max_size=6),
    ),
    max_size=4,
)


def columns_with(encoded: list[bytes]) -> Columns:
    """Messages with these headers, well-formed or not, after keys and values."""
    plain = columns_of([message(number) for number in range(len(encoded))])
    lengths = np.array([len(each) for each in encoded], dtype=np.int32)
    content = plain.lengths_bytes + lengths
    return replace(
        plain,
        headers_lengths=lengths,
        blob=b"".join(b"keyvalue" + each for each in encoded),
        starts=content_starts(content),
    )


def faults_of(columns: Columns) -> tuple[list[int], list[int]]:
    found = check_headers(columns, most=50_000, most_of_all=100_000)
    assert not len(found.too_many)
    return found.malformed.tolist(), found.reserved.tolist()


def is_ours(name: str) -> bool:
    """A retry's headers are its consumers', and pass every door."""
    return name.startswith("dw-") and not name.startswith("dw-retry-")


def expected(encoded: list[bytes]) -> tuple[list[int], list[int]]:
    malformed, reserved = [], []
    for row, each in enumerate(encoded):
        try:
            names = [name for name, _ in decode_headers(each)]
        except HeadersMalformedError:
            malformed.append(row)
            continue
        if any("\0" in name for name in names):
            malformed.append(row)
        else:
            reserved += [row] if any(map(is_ours, names)) else []
    return malformed, reserved


@settings(deadline=None)
@given(_pairs)
def test_headers_come_back_the_same(pairs: list[tuple[str, bytes | None]]) -> None:
    assert decode_headers(encode_headers(pairs)) == pairs


@settings(deadline=None)
@given(st.lists(_pairs.map(encode_headers) | st.binary(max_size=30), min_size=1, max_size=8))
def test_many_messages_are_judged_as_one_by_one(few: list[bytes]) -> None:
    # Repeated, so that the vectorised walk has enough messages to be taken.
    for encoded in (few, few * (300 // len(few))):
        assert faults_of(columns_with(encoded)) == expected(encoded)


@pytest.mark.parametrize(
    "encoded",
    [
        struct.pack("<Ii", 0, -1),
        struct.pack("<Ii", 1, -2) + b"a",
        struct.pack("<Ii", 1, 5) + b"aabcd",
        struct.pack("<Ii", 0xFFFFFFFF, 0) + b"a",
        struct.pack("<Ii", 1, 0) + b"\xff",
        b"\x01",
    ],
)
def test_malformed_headers_are_found(encoded: bytes) -> None:
    good = encode_headers([("a", b"1"), ("b", None)])
    assert faults_of(columns_with([good] * 300 + [encoded, good + encoded])) == ([300, 301], [])
    with pytest.raises(HeadersMalformedError):
        decode_headers(encoded)


@pytest.mark.parametrize("name", ["a\0b", "\0", "a\0", "dw-\0"])
def test_a_name_that_the_client_would_cut_off_is_found(name: str) -> None:
    good, cut_off = encode_headers([("a", b"\0"), ("b", None)]), encode_headers([(name, b"1")])
    for many in (1, 300):
        columns = columns_with([good] * many + [cut_off, good + cut_off])
        assert faults_of(columns) == ([many, many + 1], [])


@pytest.mark.parametrize("many", [1, 300])
def test_names_of_the_service_are_found_and_those_of_retries_are_not(many: int) -> None:
    names = ["dw-id", "dw-retry-attempt", "dw-retry", "dw", "dw-retry-", "dw-retrx-a", "trace"]
    encoded = [encode_headers([("a", None), (name, b"1")]) for name in names * many]
    assert faults_of(columns_with(encoded)) == expected(encoded)
    reserved = [names[row] for row in faults_of(columns_with(encoded))[1] if row < len(names)]
    assert reserved == ["dw-id", "dw-retry", "dw-retrx-a"]


@pytest.mark.parametrize("rows", [2, 300])
def test_so_many_headers_and_no_more_are_looked_at(rows: int) -> None:
    five, six = (encode_headers([("n", None)] * number) for number in (5, 6))
    columns = columns_with([five, six] * rows)
    found = check_headers(columns, most=5, most_of_all=11 * rows)
    assert found.too_many.tolist() == list(range(1, 2 * rows, 2))
    assert len(found.malformed) == len(found.reserved) == 0
    with pytest.raises(TooManyHeadersError):
        check_headers(columns, most=6, most_of_all=11 * rows - 1)


def test_nothing_to_check() -> None:
    assert faults_of(columns_with([b""])) == ([], [])
    assert faults_of(columns_of([message()])) == ([], [])


@settings(deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(["ttl", "tt", "x"]), st.none() | st.binary(max_size=300)),
            max_size=3,
        ),
        min_size=1,
        max_size=5,
    )
)
def test_messages_with_a_short_header_are_marked(
    messages: list[list[tuple[str, bytes | None]]],
) -> None:
    columns = columns_with([encode_headers(headers) for headers in messages])
    have = np.array(
        [
            any(name == "ttl" and value is not None and len(value) < 20 for name, value in headers)
            for headers in messages
        ]
    )
    for blob in (columns.blob, memoryview(columns.blob), bytearray(columns.blob)):
        marked = rows_that_may_have(replace(columns, blob=blob), "ttl", 19)
        assert (marked | ~have).all()
        if not any(name.startswith("ttl") for headers in messages for name, _ in headers):
            assert not marked.any() or any(b"\0ttl" in (v or b"") for h in messages for _, v in h)
