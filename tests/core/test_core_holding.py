import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core.beat import WheelBeat
from delaywheel_replica.core.control import ControlState
from delaywheel_replica.core.holding import holds_progress, takeable
from delaywheel_replica.core.progress import Progress
from support.core_values import beat, wheel_record_of

A1 = WheelId("a", 1)


@pytest.mark.parametrize(
    ("applied", "high_watermark", "closed_at", "taken", "limit"),
    [
        (None, None, None, 0, 0),
        (None, None, 7, 5, 0),
        (9, 7, None, 5, 7),
        (7, 9, None, 5, 7),
        (7, 9, None, 8, 7),
        (6, 6, 7, 5, 6),
        (9, 9, 7, 5, 7),
        # The operating system crashed: 6 to 8 were taken account of, and are gone.
        (5, 5, None, 8, 5),
        (5, 5, 5, 8, 8),
    ],
)
def test_what_may_be_taken(
    applied: int | None,
    high_watermark: int | None,
    closed_at: int | None,
    taken: int,
    limit: int,
) -> None:
    wheels = {}
    if applied is not None and high_watermark is not None:
        wheels[A1] = WheelBeat(applied, high_watermark, 0, 0, 0, -1)
    state = ControlState(
        progress=Progress(0, None, {A1: taken}),
        wheels={A1: wheel_record_of(closed_at=closed_at)},
    )
    assert takeable(state, beat(wheels=wheels)) == {A1: limit}
    assert holds_progress(state, beat(wheels=wheels)) == (limit >= taken)


def test_nothing_counts_as_taken_before_the_first_leader() -> None:
    assert holds_progress(ControlState(), beat())
    assert takeable(ControlState(wheels={A1: wheel_record_of()}), beat()) == {A1: 0}


def test_a_wheel_that_is_taken_account_of_but_not_registered_is_not_held() -> None:
    assert not holds_progress(ControlState(progress=Progress(0, None, {A1: 1})), beat())
