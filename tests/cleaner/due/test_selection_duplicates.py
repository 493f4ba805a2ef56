"""Finds equal keys and contents; the oracle compares them one by one."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delaywheel_replica.cleaner.due import duplicates
from delaywheel_replica.cleaner.due.duplicates import (
    contents_differ,
    first_of_equals,
    mix_keys,
    spread_ranges,
)
from delaywheel_replica.cleaner.due.rows import RECORD

ranges = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=8)
contents = st.tuples(
    st.sampled_from([None, b"", b"a", b"ab", b"b"]),
    st.sampled_from([None, b"", b"a", b"ab", b"b" * 9]),
    st.integers(0, 1),
    st.sampled_from([-1, 0]),
)


@given(ranges)
def test_ranges_are_spread_in_order(lengths: list[tuple[int, int]]) -> None:
    first = np.array([begin for begin, _ in lengths], np.intp)
    end = np.array([begin + length for begin, length in lengths], np.intp)
    numbers, members = spread_ranges(first, end)
    assert list(zip(numbers.tolist(), members.tolist(), strict=True)) == [
        (number, begin + place)
        for number, (begin, length) in enumerate(lengths)
        for place in range(length)
    ]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1)), max_size=20))
def test_the_first_of_equals_has_the_least_rank(keys: list[tuple[int, int, int]]) -> None:
    records = np.zeros(len(keys), RECORD)
    for number, (due_ms, low, high) in enumerate(keys):
        records["due_ms"][number] = due_ms
        records["id_low"][number], records["id_high"][number] = low, high
    ranks = np.arange(len(keys))[::-1]
    firsts = first_of_equals(records, ranks).tolist()
    for number, key in enumerate(keys):
        same = [other for other, its_key in enumerate(keys) if its_key == key]
        assert firsts[number] == same[-1]


@pytest.mark.parametrize(("at_once_bytes", "large_bytes"), [(1, 100), (7, 100), (7, 2), (1, 1)])
@settings(deadline=None)
@given(pairs=st.lists(st.tuples(contents, contents), max_size=12), data=st.data())
def test_contents_differ_where_bytes_or_lengths_do(
    at_once_bytes: int,
    large_bytes: int,
    pairs: list[tuple[tuple[bytes | None, bytes | None, int, int], ...]],
    data: st.DataObject,
) -> None:
    blobs = [bytearray(b"?" * data.draw(st.integers(0, 3))) for _ in range(3)]
    left, right = np.zeros(len(pairs), RECORD), np.zeros(len(pairs), RECORD)
    for number, pair in enumerate(pairs):
        for (key, value, topic, partition), records in zip(pair, (left, right), strict=True):
            blob = data.draw(st.integers(0, 2))
            record = records[number : number + 1]
            record["blob"], record["start"] = blob, len(blobs[blob])
            record["key_length"] = -1 if key is None else len(key)
            record["value_length"] = -1 if value is None else len(value)
            record["topic"], record["partition"] = topic, partition
            blobs[blob] += (key or b"") + (value or b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "_COMPARED_AT_ONCE_BYTES", at_once_bytes)
        patch.setattr(duplicates, "_LARGE_BYTES", large_bytes)
        patch.setattr(duplicates, "_PIECE_BYTES", 2)
        differ = contents_differ(left, right, [memoryview(blob) for blob in blobs])
    assert differ.tolist() == [one != other for one, other in pairs]


@pytest.mark.parametrize("length", [1 << 12, (1 << 12) - 1, 8 << 20])
def test_comparing_takes_little_memory_however_large_messages_are(length: int) -> None:
    count = max(1, (8 << 20) // length)
    records = np.zeros(count, RECORD)
    records["value_length"], records["key_length"] = length, -1
    records["start"] = np.arange(count) * length
    blob = bytes(length * count)
    altered = memoryview(blob[:-1] + b"!")
    other = records.copy()
    other["blob"] = 1
    tracemalloc.start()
    differ = contents_differ(records, other, [memoryview(blob), altered])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert differ.tolist() == [False] * (count - 1) + [True]
    assert peak_bytes < 8 << 20


def test_the_mix_spreads_keys_that_differ_little() -> None:
    numbers = np.arange(1 << 16, dtype=np.uint64)
    zeros = np.zeros(1 << 16, np.uint64)
    dues = np.zeros(1 << 16, np.int64)
    topics = np.zeros(1 << 16, np.int32)
    for mixes in (
        mix_keys(dues, numbers, zeros, topics),
        mix_keys(dues, zeros, numbers, topics),
        mix_keys(numbers.astype(np.int64), zeros, zeros, topics),
        mix_keys(dues, numbers << np.uint64(48), zeros, topics),
        mix_keys(dues, zeros, numbers << np.uint64(48), topics),
        mix_keys(dues, zeros, zeros, numbers.astype(np.int32)),
    ):
        assert len(np.unique(mixes)) == 1 << 16
