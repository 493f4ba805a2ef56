"""Spans of seqs behave like plain sets of seqs."""

import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.seqset import NO_SEQS, SeqSet, SeqSpan

MOST = 14

spans = st.lists(
    st.builds(
        lambda first, more: (first, first + more),
        st.integers(1, MOST),
        st.integers(-1, 4),  # one less than a seq is none
    ),
    max_size=8,
)


def seqs_of(given_spans: list[SeqSpan]) -> set[int]:
    return {seq for first, last in given_spans for seq in range(first, last + 1)}


def assert_is(found: SeqSet, expected: set[int]) -> None:
    assert found == SeqSet.of(expected)
    assert hash(found) == hash(SeqSet.of(expected))
    assert [*found] == sorted(expected)
    assert (len(found), bool(found)) == (len(expected), bool(expected))
    assert SeqSet.from_json(found.to_json()) == found
    marks = np.array([seq in expected for seq in range(MOST + 7)])
    assert SeqSet.where(0, marks) == found
    assert found.marks(0, MOST + 7).tolist() == marks.tolist()
    if expected:
        assert (found.first, found.last) == (min(expected), max(expected))
    for before, after in pairwise(found.spans):
        assert before[1] + 1 < after[0]
    for seq in range(MOST + 7):
        assert (seq in found) == (seq in expected)
        end = begin = seq
        while end + 1 in expected:
            end += 1
        while begin in expected:
            begin -= 1
        assert (found.end_from(seq), found.begin_to(seq)) == (end, begin)
        assert found.span_of(seq) == ((begin + 1, end) if seq in expected else None)


@given(spans, spans)
def test_spans_are_what_plain_sets_are(one: list[SeqSpan], other: list[SeqSpan]) -> None:
    left, right = SeqSet(one), SeqSet(other)
    plain, plain_right = seqs_of(one), seqs_of(other)
    assert_is(left, plain)
    assert_is(left | right, plain | plain_right)
    assert_is(left - right, plain - plain_right)
    assert_is(left & right, plain & plain_right)
    assert (left == right) == (plain == plain_right)


@given(spans)
def test_one_span_after_another_makes_the_same_set(some: list[SeqSpan]) -> None:
    found = NO_SEQS
    for first, last in some:
        found = found.with_span(first, last)
    assert_is(found, seqs_of(some))


@given(spans, st.integers(0, MOST), st.integers(0, MOST))
def test_a_part_of_a_set(some: list[SeqSpan], first: int, last: int) -> None:
    found, plain = SeqSet(some), seqs_of(some)
    assert_is(found.within(first, last), {seq for seq in plain if first <= seq <= last})
    assert_is(found.least(last), {*sorted(plain)[:last]})
    assert found.head(last).spans == found.spans[:last]


@given(spans, st.integers(1, 4))
def test_in_fewer_spans_it_has_more(some: list[SeqSpan], most: int) -> None:
    found = SeqSet(some)
    condensed = found.condensed(most)
    assert len(condensed.spans) == min(most, len(found.spans))
    assert not found - condensed
    assert (condensed.spans[:1], condensed.spans[-1:]) == (
        (found.spans[:1], found.spans[-1:])
        if len(found.spans) <= most
        else (condensed.spans[:1], ((found.spans[most - 1][0], found.last),))
    )


def test_millions_in_a_row_cost_nothing() -> None:
    huge = SeqSet([(1, 10**12)])
    left = huge - SeqSet.of([5 * 10**11])
    assert len(left) == 10**12 - 1
    assert left.end_from(0) == 5 * 10**11 - 1
    assert left | SeqSet.of([5 * 10**11]) == huge
    assert left & huge == left
    assert len(pickle.dumps(left)) < 1_000


@pytest.mark.parametrize("document", [[[1]], [["x", 2]], ["x"], [None], 5])
def test_what_is_no_set_is_refused(document: object) -> None:
    with pytest.raises((ValueError, TypeError, IndexError)):
        SeqSet.from_json(document)


def test_each_seq_alone_is_read_as_older_programs_wrote_it() -> None:
    assert SeqSet.from_json([3, 4, 5, 9]) == SeqSet([(3, 5), (9, 9)])
