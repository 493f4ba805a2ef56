"""Progress is checked against its meaning: the set of messages that are done."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.codec import MalformedError, from_json, to_json
from delaywheel_replica.core.protocol.progress import (
    MOST_AHEAD,
    Position,
    Progress,
    SetBackRefusal,
    first_progress,
)
from support.core.values import progresses
from support.core.violations import violations

A1, B1 = WheelId("a", 1), WheelId("b", 1)

# A small world: two wheels, three frames of two rows, three dues; and every progress over it.
POSITIONS = [
    Position(wheel, seq, row) for wheel, seq in ((A1, 1), (A1, 2), (B1, 1)) for row in (0, 1)
]
WORLD = list(product((1, 2, 3), POSITIONS))
EVERY_PROGRESS = [
    Progress(due_ms, position, {A1: a, B1: b})
    for due_ms in range(4)
    for position in (None, *POSITIONS)
    for a in range(3)
    for b in range(2)
]


def done(progress: Progress) -> frozenset[tuple[int, Position]]:
    return frozenset(message for message in WORLD if progress.covers(*message))


def test_what_is_done_stays_done_over_every_allowed_step() -> None:
    dones = [(progress, done(progress)) for progress in EVERY_PROGRESS]
    allowed = 0
    for (before, done_before), (after, done_after) in product(dones, dones):
        if not violations(before, after):
            allowed += 1
            assert done_before <= done_after, (before, after)
    assert allowed > len(dones)


def set_back(progress: Progress, now_ms: int) -> Progress:
    after = progress.set_back(now_ms)
    assert isinstance(after, Progress)
    return after


EVERY_SET_BACK = [
    set_back(progress, now_ms) for progress in EVERY_PROGRESS for now_ms in range(progress.due_ms)
]
"""Among them those of which more was taken since, and those that were set back twice."""
ONCE = [*EVERY_SET_BACK[::7], *(set_back(p, 0) for p in EVERY_SET_BACK[::5] if p.due_ms)]


def test_what_is_done_stays_done_when_w_is_set_back() -> None:
    for before in EVERY_PROGRESS:
        for now_ms in range(before.due_ms):
            after = set_back(before, now_ms)
            assert violations(before, after) == []
            assert done(after) == done(before)


def test_what_is_done_stays_done_once_w_was_set_back() -> None:
    allowed = 0
    for before in ONCE:
        done_before = done(before)
        for step in EVERY_PROGRESS:
            after = before.moved(step.due_ms, step.position, step.seqs)
            if not violations(before, after):
                allowed += 1
                assert done_before <= done(after), (before, after)
            forgotten = replace(after, ahead=())
            if after.ahead:
                assert violations(before, forgotten)
    assert allowed > len(ONCE)


def test_what_w_has_passed_was_not_done_ahead_of_it() -> None:
    split = set_back(Progress(10, Position(A1, 2, 1), {A1: 7}), 5)
    assert split.ahead_ms == 11
    assert split.moved(10, None, {A1: 7}).ahead_ms == 11
    assert split.moved(11, None, {A1: 7}).ahead_ms is None
    whole = set_back(Progress(10, None, {A1: 7}), 5)
    assert whole.ahead_ms == 10
    passed = whole.moved(10, None, {A1: 7})
    assert passed.ahead == ()
    assert any(
        "done ahead" in found for found in violations(whole, replace(passed, ahead=whole.ahead))
    )


def test_progress_that_was_set_back_is_newer() -> None:
    before = Progress(10, None, {A1: 7}, floor=5)
    orders = [before.order, set_back(before, 3).order, set_back(before, 3).moved(4, None, {}).order]
    assert orders == sorted(orders)


@pytest.mark.parametrize(
    "change",
    [
        {"seqs": {A1: 8}},
        {"set_backs": 2},
        {"position": Position(A1, 2, 1)},
        {"ahead": ()},
        {"due_ms": 12},
    ],
)
def test_a_set_back_changes_nothing_else(change: dict[str, object]) -> None:
    before = Progress(due_ms=10, position=Position(A1, 2, 1), seqs={A1: 7}, floor=5)
    after = replace(set_back(before, 3), **change)  # type: ignore[arg-type]
    assert any("set back" in found for found in violations(before, after))


def test_a_wheel_leaves_what_was_done_ahead_as_well() -> None:
    before = set_back(Progress(due_ms=10, position=None, seqs={A1: 7, B1: 2}), 3)
    after = before.without([A1])
    assert [ahead.seqs for ahead in after.ahead] == [{B1: 2}]
    assert violations(before, after, leaving=[A1]) == []
    again = before.without([A1]).set_back(2)
    assert isinstance(again, Progress)
    assert violations(before, again, leaving=[A1]) == []


def test_w_is_set_back_to_the_clock_and_not_too_often() -> None:
    progress = Progress(due_ms=10, position=None)
    assert progress.set_back(10) is SetBackRefusal.NOTHING_TO_SET_BACK
    for now_ms in range(MOST_AHEAD):
        progress = set_back(progress, 8 - now_ms)
    assert progress.set_back(0) is SetBackRefusal.SET_BACK_TOO_OFTEN


@given(progresses)
def test_to_rest_is_allowed(progress: Progress) -> None:
    assert violations(progress, progress) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"due_ms": 9}, "due goes back"),
        ({"floor": 4}, "floor goes back"),
        ({"seqs": {A1: 6}}, "seq of a.1 goes back"),
        ({"seqs": {}}, "seq of a.1 goes back"),
        ({"position": None}, "position goes back"),
        ({"position": Position(A1, 2, 0)}, "position goes back"),
        ({"seqs": {A1: 8}}, "seqs move"),
        ({"seqs": {A1: 7, B1: 1}}, "seqs move"),
    ],
)
def test_each_step_back_is_named(change: dict[str, object], what: str) -> None:
    before = Progress(due_ms=10, position=Position(A1, 2, 1), seqs={A1: 7}, floor=5)
    assert any(what in found for found in violations(before, replace(before, **change)))  # type: ignore[arg-type]


def test_a_finished_split_may_move_everything() -> None:
    before = Progress(due_ms=10, position=Position(A1, 2, 1), seqs={A1: 7}, floor=5)
    after = Progress(due_ms=11, position=None, seqs={A1: 9, B1: 1}, floor=6)
    assert violations(before, after) == []


def test_a_wheel_leaves_only_when_it_is_unregistered() -> None:
    before = Progress(due_ms=10, position=None, seqs={A1: 7, B1: 2}, floor=5)
    after = before.without([A1])
    assert after.seqs == {B1: 2}
    assert violations(before, after, leaving=[A1]) == []
    assert violations(before, after) == ["seq of a.1 goes back from 7 to 0"]
    assert violations(before, before, leaving=[A1]) == ["a.1 leaves but is named"]


@given(progresses)
def test_json_and_back(progress: Progress) -> None:
    assert from_json(Progress, to_json(progress)) == progress


@pytest.mark.parametrize("text", ["", "a.1", "a.1/2", "a.1/2/x", "a.1/-2/3", "a/1/2", "a.1/2/3/4"])
def test_no_position(text: str) -> None:
    with pytest.raises(MalformedError):
        Position.parse(text)


def test_the_first_progress_is_now() -> None:
    assert first_progress(500_999, 120) == Progress(500_999, None, {}, floor=380)
