"""Progress is checked against its meaning: the set of messages that are done."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given

from delaywheel.identity import WheelId
from delaywheel_replica.core.fields import MalformedError
from delaywheel_replica.core.progress import Position, Progress, first_progress, violations
from support.core_values import progresses

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
    assert Progress.from_json(progress.to_json()) == progress


@pytest.mark.parametrize("text", ["", "a.1", "a.1/2", "a.1/2/x", "a.1/-2/3", "a/1/2", "a.1/2/3/4"])
def test_no_position(text: str) -> None:
    with pytest.raises(MalformedError):
        Position.parse(text)


def test_the_first_progress_is_now() -> None:
    assert first_progress(500_999, 120) == Progress(500_999, None, {}, floor=380)
