"""Effects that were issued and are not answered."""

from delaywheel.identity import WheelId
from delaywheel.storage.frames.bundle import NO_BUNDLE
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
from delaywheel_replica.core.node.shared_state import PendingEffects
from support.core.member_world import held_of, state_of

B1, B2 = WheelId("b", 1), WheelId("b", 2)
SAVE = Save(state_of("a"))


def asked(*lists: list[Effect]) -> PendingEffects:
    pending = PendingEffects()
    for effects in lists:
        pending.asked(effects)
    return pending


def test_an_answer_takes_out_the_oldest_of_its_kind_and_wheel() -> None:
    card = held_of(B1, 0).card
    first, second = Mirror(card, NO_BUNDLE), Repair(card, NO_BUNDLE)
    pending = asked([first, second, CloseWheel(B2, 3)])
    assert pending.is_writing(B1)
    assert pending.done(Mirror, Repair, wheel=B2) is None
    assert pending.done(Mirror, Repair, wheel=B1) is first
    assert pending.is_writing(B1)
    assert pending.done(Mirror, Repair, wheel=B1) is second
    assert not pending.is_writing(B1)
    assert pending.has(CloseWheel, B2)


def test_a_failure_takes_out_what_stood_behind_it_in_its_own_list() -> None:
    leave, close, delete = LeaveWheel(B1), CloseWheel(B1, 3), DeleteWheel(B2)
    pending = asked([leave, SAVE, close], [delete])
    assert pending.failed(SAVE) == [SAVE, close]
    assert pending.has(LeaveWheel, B1)
    assert pending.has(DeleteWheel, B2)
    assert not pending.has(Save)


def test_the_failure_of_what_is_not_answered_takes_out_nothing() -> None:
    pending = asked([SAVE, Sweep(9)])
    assert pending.failed(Sweep(9)) == []
    assert pending.has(Save)
