"""Marks cover exactly the letters that they were made from."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.deadletters import (
    Letter,
    LetterCounts,
    LetterPlace,
    LetterState,
)
from delaywheel.deadletters.counting import MOST_ROWS, OTHERS
from delaywheel.deadletters.marks import CLAIM_KEY, Marks, make_marks

ID = "Xy/7+q"
"""Kafka shows ids in base64."""
_OFFSETS = st.integers(0, 200) | st.integers(2**16 - 3, 2**16 + 3)
_PLACES = st.lists(st.builds(LetterPlace, st.integers(0, 2), _OFFSETS), min_size=1, max_size=40)


@given(
    st.lists(st.tuples(_PLACES, st.sampled_from(["replayed", "dropped"])), max_size=4),
    _PLACES,
)
def test_what_was_marked_is_known_again(
    batches: list[tuple[list[LetterPlace], str]], asked: list[LetterPlace]
) -> None:
    marks = Marks(ID, {0: 0, 1: 0, 2: 0})
    known: dict[LetterPlace, LetterState] = {}
    for places, state in batches:
        # A letter is dealt with once.
        new = sorted(set(places) - known.keys())
        if not new:
            continue
        records = make_marks(ID, new, LetterState(state), at_ms=7, to="t")
        assert len({key for key, _ in records}) == len({place.partition for place in new})
        reported = [marks.read(key, value) for key, value in records]
        assert all(each is not None and each[1].to == "t" for each in reported)
        covered = {
            place
            for place in new
            for each in reported
            if each is not None and each[0] == place.partition and each[1].covers(place.offset)
        }
        assert covered == set(new)
        known |= dict.fromkeys(new, LetterState(state))
    for place in (*asked, *known):
        assert marks.state_of(place) is known.get(place, LetterState.WAITING)
    assert not marks.obsolete


def test_marks_of_a_topic_that_was_recreated_or_of_deleted_letters_are_obsolete() -> None:
    marks = Marks(ID, {0: 10})
    (old,) = make_marks("other", [LetterPlace(0, 20)], LetterState.REPLAYED, at_ms=1, to=None)
    (gone,) = make_marks(
        ID, [LetterPlace(0, 8), LetterPlace(0, 9)], LetterState.DROPPED, at_ms=1, to=None
    )
    (half,) = make_marks(
        ID, [LetterPlace(0, 9), LetterPlace(0, 10)], LetterState.DROPPED, at_ms=1, to=None
    )
    for record in (old, gone, half):
        marks.read(*record)
    assert marks.obsolete == [old[0], gone[0]]
    assert marks.state_of(LetterPlace(0, 20)) is LetterState.WAITING
    assert marks.state_of(LetterPlace(0, 10)) is LetterState.DROPPED


def test_marks_of_a_partition_that_the_asked_broker_does_not_know_yet_count() -> None:
    marks = Marks(ID, {0: 10})
    (new,) = make_marks(ID, [LetterPlace(5, 0)], LetterState.REPLAYED, at_ms=1, to=None)
    assert marks.read(*new) is not None
    assert not marks.obsolete, "the next claim would delete it, and the letter be sent again"
    assert marks.state_of(LetterPlace(5, 0)) is LetterState.REPLAYED


def test_claims_and_tombstones_mark_nothing() -> None:
    marks = Marks(ID, {0: 0})
    assert marks.read(CLAIM_KEY, b"{}") is None
    assert marks.read(f"{ID}/0/1".encode(), None) is None
    assert not marks.obsolete


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"\xff", b"{}"),
        (b"a/b/c", b"{}"),
        (b"a/0/0", b"no json"),
        (b"a/0/0", b'{"action":"replayed","at_ms":1,"to":null,"offsets":[]}'),
        (b"a/0/0", b'{"action":"sent","at_ms":1,"to":null,"offsets":[[0,0]]}'),
        (b"a/0/0", b'{"action":"replayed","at_ms":1,"to":null,"offsets":[[0,9000000000]]}'),
        (b"a/0/0", b'{"action":"replayed","at_ms":1,"to":null,"offsets":[[5,0]]}'),
        (b"a/0/0", b"[1]"),
    ],
)
def test_what_is_no_mark_counts_for_nothing(key: bytes, value: bytes) -> None:
    marks = Marks("a", {0: 0})
    assert marks.read(key, value) is None
    assert marks.read(None, value) is None
    assert (marks.foreign, marks.state_of(LetterPlace(0, 0))) == (2, LetterState.WAITING)


def test_runs_are_written_as_ranges() -> None:
    places = [LetterPlace(0, offset) for offset in (4, 5, 6, 9)]
    ((key, value),) = make_marks(ID, places, LetterState.REPLAYED, at_ms=1, to=None)
    assert key == f"{ID}/0/4".encode()
    assert json.loads(value)["offsets"] == [[4, 6], [9, 9]]


def test_counts_are_bounded_whatever_headers_say() -> None:
    counts = LetterCounts()
    for number in range(MOST_ROWS + 5):
        reported = (("dw-dead-topic", b"t%d" % number), ("dw-dead-reason", b"R"))
        counts.add(Letter(LetterPlace(0, number), 1, None, None, reported), LetterState.WAITING)
    rows = counts.rows()
    assert len(rows) == MOST_ROWS + 1
    assert next(row.waiting for row in rows if row.topic == OTHERS) == 5
    assert counts.of(LetterState.WAITING) == MOST_ROWS + 5
