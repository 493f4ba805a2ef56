"""Ranges of frames behave like plain sets of frames."""

import pickle
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.codec import MalformedError
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameName, FrameRange, FrameSet

A1, B1 = WheelId("a", 1), WheelId("b", 1)
MOST = 14

ranges = st.lists(
    st.builds(
        lambda wheel, first, more: FrameRange(wheel, first, first + more),
        st.sampled_from([A1, B1]),
        st.integers(1, MOST),
        st.integers(-1, 4),  # one less than a frame is none
    ),
    max_size=8,
)


def frames_of(given_ranges: list[FrameRange]) -> set[FrameName]:
    return {(w, seq) for w, first, last in given_ranges for seq in range(first, last + 1)}


def assert_is(found: FrameSet, expected: set[FrameName]) -> None:
    assert found == expected
    assert found == FrameSet.of(expected)
    assert hash(found) == hash(FrameSet.of(expected))
    assert set(found) == expected
    assert (len(found), bool(found)) == (len(expected), bool(expected))
    assert FrameSet.from_json(found.to_json()) == found
    spans = [each for each in found.ranges() if each.wheel == A1]
    assert found.seqs(A1).spans == tuple((first, last) for _, first, last in spans)
    for before, after in pairwise(spans):
        assert before.last_seq + 1 < after.first_seq
    for seq in range(MOST + 7):
        assert ((A1, seq) in found) == ((A1, seq) in expected)
        around = found.range_of((A1, seq))
        assert (around is not None) == ((A1, seq) in expected)
        end = begin = seq
        while (A1, end + 1) in expected:
            end += 1
        while (A1, begin) in expected:
            begin -= 1
        assert (found.seqs(A1).end_from(seq), found.seqs(A1).begin_to(seq)) == (end, begin)
        assert around is None or around == (A1, begin + 1, end)


@given(ranges, ranges)
def test_ranges_are_what_plain_sets_are(one: list[FrameRange], other: list[FrameRange]) -> None:
    left, right = FrameSet(one), FrameSet(other)
    plain, plain_right = frames_of(one), frames_of(other)
    assert_is(left, plain)
    assert_is(left | right, plain | plain_right)
    assert_is(left | frozenset(plain_right), plain | plain_right)
    assert_is(left - right, plain - plain_right)
    assert_is(left - frozenset(plain_right), plain - plain_right)
    assert_is(left & right, plain & plain_right)
    assert_is(left & frozenset(plain_right), plain & plain_right)
    assert_is(left.of_wheel(A1), {frame for frame in plain if frame[0] == A1})
    assert (left == right) == (plain == plain_right)


@given(ranges)
def test_one_range_after_another_makes_the_same_set(some: list[FrameRange]) -> None:
    found = NO_FRAMES
    for each in some:
        found = found.with_range(each) if each.first_seq <= each.last_seq else found
    assert_is(found, frames_of(some))


@given(ranges, st.integers(0, MOST), st.integers(0, MOST))
def test_some_of_a_wheel_are_found(some: list[FrameRange], first: int, last: int) -> None:
    inside = {seq for wheel, seq in frames_of(some) if wheel == A1 and first <= seq <= last}
    assert set(FrameSet(some).seqs(A1).within(first, last)) == inside


def test_millions_in_a_row_cost_nothing() -> None:
    huge = FrameSet([FrameRange(A1, 1, 10**12)])
    left = huge - FrameSet.of([(A1, 5 * 10**11)])
    assert len(left) == 10**12 - 1
    assert left.seqs(A1).end_from(0) == 5 * 10**11 - 1
    assert (left | FrameSet.of([(A1, 5 * 10**11)])) == huge
    assert len(pickle.dumps(left)) < 1_000


@pytest.mark.parametrize("document", [[["a.1", 1]], [["a", 1, 2]], [["a.1", "x", 2]], [5], ["abc"]])
def test_what_is_no_ranges_is_malformed(document: list[object]) -> None:
    with pytest.raises(MalformedError):
        FrameSet.from_json(document)
