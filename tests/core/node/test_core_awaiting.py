"""What was asked for and is not answered."""

from delaywheel.identity import WheelId
from delaywheel.storage.frames.bundle import NO_BUNDLE
from delaywheel_replica.core.node.awaiting import Awaiting
from delaywheel_replica.core.node.events import (
    CloseWheel,
    DeleteWheel,
    Effect,
    LeaveWheel,
    Mirror,
    Repair,
    Save,
    Sweep,
)
from support.core.member_world import held_of, state_of

B1, B2 = WheelId("b", 1), WheelId("b", 2)
SAVE = Save(state_of("a"))


def asked(*lists: list[Effect]) -> Awaiting:
    awaiting = Awaiting()
    for effects in lists:
        awaiting.asked(effects)
    return awaiting


def test_an_answer_takes_out_the_oldest_of_its_kind_and_wheel() -> None:
    card = held_of(B1, 0).card
    first, second = Mirror(card, NO_BUNDLE), Repair(card, NO_BUNDLE)
    awaiting = asked([first, second, CloseWheel(B2, 3)])
    assert awaiting.is_writing(B1)
    assert awaiting.done(Mirror, Repair, wheel=B2) is None
    assert awaiting.done(Mirror, Repair, wheel=B1) is first
    assert awaiting.is_writing(B1)
    assert awaiting.done(Mirror, Repair, wheel=B1) is second
    assert not awaiting.is_writing(B1)
    assert awaiting.has(CloseWheel, B2)


def test_a_failure_takes_out_what_stood_behind_it_in_its_own_list() -> None:
    leave, close, delete = LeaveWheel(B1), CloseWheel(B1, 3), DeleteWheel(B2)
    awaiting = asked([leave, SAVE, close], [delete])
    assert awaiting.failed(SAVE) == [SAVE, close]
    assert awaiting.has(LeaveWheel, B1)
    assert awaiting.has(DeleteWheel, B2)
    assert not awaiting.has(Save)


def test_the_failure_of_what_is_not_answered_takes_out_nothing() -> None:
    awaiting = asked([SAVE, Sweep(9)])
    assert awaiting.failed(Sweep(9)) == []
    assert awaiting.has(Save)
