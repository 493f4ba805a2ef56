"""w is set back: what was done ahead of it stays done, and all else is delivered at its due."""

from dataclasses import replace

import pytest

from delaywheel.identity import WheelId
from delaywheel.storage.folder import layout
from delaywheel_replica.cleaner.due.rows import MessageOutcome
from delaywheel_replica.core.protocol.progress import Progress
from support.core.violations import violations
from support.due.leader import SECOND, START_MS, Leader, message, numbers
from support.due.wheels import Wheels

A1, B1, B2 = WheelId("a", 1), WheelId("b", 1), WheelId("b", 2)
DAY_MS = 86_400_000
DUE_MS = START_MS + 3_600_000


def set_back(leader: Leader, now_ms: int = START_MS) -> Leader:
    """Another leader, once the clock was corrected and w set back."""
    after = leader.progress.set_back(now_ms)
    assert isinstance(after, Progress)
    assert violations(leader.progress, after) == []
    return Leader(leader.wheels, after)


def test_what_went_out_early_does_not_go_out_again(wheels: Wheels) -> None:
    wheels.write(A1, [message(DUE_MS, 1), message(START_MS + 2 * DAY_MS, 2)])
    with Leader(wheels) as ahead:
        ahead.forward(START_MS + DAY_MS)
        assert numbers(ahead.messages) == [1]
    with set_back(ahead) as leader:
        leader.forward(START_MS + 3 * DAY_MS)
    assert numbers(leader.messages) == [2]
    assert leader.dropped == []
    assert leader.progress.ahead == ()


def test_what_comes_later_goes_out_at_its_due(wheels: Wheels) -> None:
    wheels.write(A1, [message(DUE_MS, 1)])
    with Leader(wheels) as ahead:
        ahead.forward(START_MS + DAY_MS)
    wheels.write(A1, [message(DUE_MS, 2), message(START_MS - 5, 3)])
    wheels.write(B1, [message(DUE_MS, 4)])
    with set_back(ahead) as leader:
        leader.forward(DUE_MS - 1)
        assert numbers(leader.messages) == [3]
        leader.forward(DUE_MS)
    assert numbers(leader.messages) == [3, 2, 4]
    assert leader.progress.ahead == ahead.progress.set_back(0).ahead  # type: ignore[union-attr]


def test_a_repetition_of_what_went_out_early_is_a_duplicate(wheels: Wheels) -> None:
    """Also in a wheel with a lesser position."""
    wheels.write(B1, [message(DUE_MS, 1)])
    with Leader(wheels) as ahead:
        ahead.forward(START_MS + DAY_MS)
    wheels.write(A1, [message(DUE_MS, 1)])
    wheels.write(B2, [message(DUE_MS, 1, value=b"other")])
    with set_back(ahead) as leader:
        leader.forward(DUE_MS)
    assert leader.messages == []
    assert [(row.outcome, row.content_differs, row.wheel) for row in leader.dropped] == [
        (MessageOutcome.DUPLICATE, False, A1),
        (MessageOutcome.DUPLICATE, True, B2),
    ]


@pytest.mark.parametrize("cap_messages", [1, 1000])
def test_duplicates_are_compared_with_what_went_out_early(
    wheels: Wheels, cap_messages: int
) -> None:
    """However their millisecond is cut into steps: a duplicate before them is no original."""
    wheels.write(B1, [message(DUE_MS, 1)])
    with Leader(wheels) as ahead:
        ahead.forward(START_MS + DAY_MS)
    for wheel in (A1, B2):
        wheels.write(wheel, [message(DUE_MS, 1, value=b"other")])
    with set_back(ahead) as leader:
        leader.forward(DUE_MS, cap_messages)
        wheels.write(A1, [message(DUE_MS, 1)])
        leader.forward(DUE_MS + 1)
    assert [(row.content_differs, row.wheel) for row in leader.dropped] == [
        (True, A1),
        (True, B2),
        (False, A1),
    ]


def test_a_frame_that_was_not_taken_ahead_is_not_done(wheels: Wheels) -> None:
    wheels.write(A1, [message(DUE_MS, 1)])
    wheels.write(A1, [message(DUE_MS, 2)])
    with Leader(wheels) as ahead:
        ahead.reader.update({A1: 1})
        ahead.commit(ahead.reader.next_step(START_MS + DAY_MS, 1000, 1 << 20))
        assert numbers(ahead.messages) == [1]
    with set_back(ahead) as leader:
        leader.forward(DUE_MS)
    assert numbers(leader.messages) == [2]


def test_a_millisecond_that_was_split_is_gone_on_with_at_its_due(wheels: Wheels) -> None:
    wheels.write(B1, [message(DUE_MS, number) for number in range(1, 6)])
    with Leader(wheels) as ahead:
        ahead.commit(ahead.look(START_MS + DAY_MS, 2))
        assert ahead.progress.position is not None
        assert numbers(ahead.messages) == [1, 2]
    wheels.write(A1, [message(DUE_MS, 2), message(DUE_MS, 5), message(DUE_MS, 6)])
    with set_back(ahead) as leader:
        leader.forward(DUE_MS - 1)
        assert leader.messages == []
        leader.forward(DUE_MS, 2)
        leader.forward(DUE_MS + 5_000, 2)
    assert numbers(leader.messages) == [5, 6, 3, 4]
    assert sorted(numbers(leader.dropped)) == [2, 5]


def test_w_set_back_twice_knows_of_both(wheels: Wheels) -> None:
    wheels.write(A1, [message(DUE_MS, 1), message(DUE_MS + DAY_MS, 2)])
    with Leader(wheels) as first:
        first.forward(START_MS + 2 * DAY_MS)
    wheels.write(A1, [message(DUE_MS, 3), message(DUE_MS + DAY_MS, 4)])
    with set_back(first) as second:
        second.forward(START_MS + DAY_MS)
        assert numbers(second.messages) == [3]
    for number in (1, 2, 3, 4):
        due_ms = DUE_MS if number % 2 else DUE_MS + DAY_MS
        wheels.write(B1, [message(due_ms, number)])
    with set_back(second, START_MS + 1) as third:
        third.forward(START_MS + 3 * DAY_MS, 1)
    assert numbers(third.messages) == [4]
    assert numbers(third.dropped) == [1, 3, 2, 4]
    assert third.progress.ahead == ()


def test_seconds_that_the_floor_has_passed_are_not_looked_for(wheels: Wheels) -> None:
    """Their files are gone, and the index still names them."""
    frames = wheels.write(A1, [message(DUE_MS, 1)])
    with Leader(wheels) as ahead:
        ahead.forward(START_MS + DAY_MS)
    floor = DUE_MS // 1000 + 1
    layout.slot_path(layout.wheel_folder(wheels.data, A1), frames[0].slot).unlink()
    wheels.write(B1, [message(floor * 1000, 2)])
    ahead.progress = replace(ahead.progress, floor=floor)
    with set_back(ahead) as leader:
        leader.look(floor * 1000)
        assert leader.reader.unreadable == frozenset()
        leader.forward(floor * 1000)
    assert numbers(leader.messages) == [2]
    assert floor > SECOND
