"""Another due for a message: which requests a transaction decides, puts off and settles."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core.leader.rescheduling import (
    MOST,
    PUT_OFF_MS,
    Rescheduling,
    floor_below,
    nearer_due_ms,
    open_proposals,
    passing,
    reschedule_records,
    to_move,
    withdrawn,
)
from delaywheel_replica.core.protocol.control import ControlState, reschedule_record
from delaywheel_replica.core.protocol.frames import FrameSet
from delaywheel_replica.core.protocol.progress import Done, Position, Progress
from delaywheel_replica.core.protocol.reschedules import (
    GivenDue,
    MessageKey,
    Reschedule,
    RescheduleProposal,
    RescheduleWritten,
    known_due_ms,
    mark_of,
    marked_due,
)

A1 = WheelId("a", 1)
ID = b"i" * 16
KEY = MessageKey(ID, 50_000, "orders")
TO_MS = 90_000
PLACE = Position(A1, 3, 0)
PROPOSAL = RescheduleProposal(KEY, TO_MS, PLACE)
NOW = Progress(10_000, None, {A1: 5}, floor=4)
STATE = ControlState(progress=NOW)
DECIDED = STATE.apply_all([reschedule_record(KEY, Reschedule(TO_MS, PLACE))])
WRITTEN = RescheduleWritten(KEY, TO_MS, (A1, 7), (A1, 8))


def after(state: ControlState, progress: Progress = NOW, **reported: object) -> ControlState:
    """The state after a transaction to that progress is committed."""
    records = reschedule_records(state, progress, Rescheduling(**reported), 10_000)  # type: ignore[arg-type]
    return replace(state.apply_all(records), progress=progress)


def test_a_proposal_is_decided_once() -> None:
    decided = after(STATE, proposals=[PROPOSAL])
    assert decided.reschedules == {KEY: Reschedule(TO_MS, PLACE)}
    assert withdrawn(decided) == {KEY}
    other = replace(PROPOSAL, to_ms=70_000)
    assert after(decided, proposals=[other]).reschedules == decided.reschedules
    both = after(STATE, proposals=[PROPOSAL, other])
    assert both.reschedules == decided.reschedules


@pytest.mark.parametrize(
    ("proposal", "progress"),
    [
        (PROPOSAL, replace(NOW, due_ms=49_999)),
        (replace(PROPOSAL, to_ms=10_001), NOW),
        (replace(PROPOSAL, to_ms=KEY.due_ms), NOW),
        (replace(PROPOSAL, place=Position(A1, 6, 0)), NOW),
        (PROPOSAL, replace(NOW, ahead=(Done(60_000, None),))),
    ],
    ids=["the old due", "the new due", "the same due", "beyond V", "done ahead"],
)
def test_what_is_not_decided(proposal: RescheduleProposal, progress: Progress) -> None:
    assert not open_proposals(STATE, [proposal], progress)
    assert not after(STATE, progress, proposals=[proposal]).reschedules


def test_a_due_that_is_touched_already_is_not_given() -> None:
    back = RescheduleProposal(KEY.at(TO_MS), KEY.due_ms, PLACE)
    proposals = [
        back,
        *(RescheduleProposal(KEY.at(60_000), to_ms, PLACE) for to_ms in (TO_MS, 70_000)),
    ]
    assert open_proposals(DECIDED, proposals, NOW) == proposals[2:]
    # Nor do two requests in one transaction.
    assert open_proposals(STATE, proposals[1:], NOW) == proposals[1:2]


def test_so_many_stand_at_once() -> None:
    proposals = [
        replace(PROPOSAL, key=KEY._replace(id=number.to_bytes(16, "big")))
        for number in range(MOST + 9)
    ]
    assert len(after(STATE, proposals=proposals).reschedules) == MOST


def test_a_record_goes_when_v_has_copy_and_cancel() -> None:
    for seq, goes in ((6, False), (7, False), (8, True)):
        progress = replace(NOW, seqs={A1: seq})
        assert (not after(DECIDED, progress, written=[WRITTEN]).reschedules) == goes
    of_before = replace(WRITTEN, to_ms=80_000)
    assert after(DECIDED, replace(NOW, seqs={A1: 9}), written=[of_before]).reschedules


def test_a_due_that_passes_without_a_copy_is_put_off_and_withdrawn() -> None:
    later = replace(NOW, due_ms=TO_MS, seqs={A1: 9}, floor=60)
    assert passing(DECIDED, later) == [KEY]
    assert passing(DECIDED, replace(later, due_ms=TO_MS - 1)) == []
    put_off = after(DECIDED, later, absent=frozenset([KEY]))
    to_ms = TO_MS + PUT_OFF_MS
    assert put_off.reschedules == {KEY: Reschedule(to_ms, PLACE, (TO_MS,), chosen_ms=TO_MS)}
    assert withdrawn(put_off) == {KEY, KEY.at(TO_MS)}
    # It is written, and stands until nothing can come for the due that passed.
    words = [replace(WRITTEN, to_ms=to_ms)]
    written = after(put_off, later, written=words)
    assert written.reschedules[KEY].is_written
    assert withdrawn(written) == {KEY, KEY.at(TO_MS)}
    assert passing(written, replace(later, due_ms=to_ms)) == []
    assert after(written, later).reschedules == written.reschedules
    later_still = reschedule_record(KEY, replace(written.reschedules[KEY], to_ms=to_ms + 500))
    may_move = written.apply_all([later_still])
    assert after(may_move, replace(later, floor=91)).reschedules, "its due may still prove wrong"
    assert not after(written, replace(later, floor=91)).reschedules, "nothing nearer is left"
    assert not after(written, replace(later, due_ms=to_ms, floor=91)).reschedules
    assert not to_move(written.reschedules, later)


W_AHEAD = Progress(1_000_000, None, {A1: 8}, floor=4)
SET_BACK = cast("Progress", W_AHEAD.set_back(20_000))


def put_off_ahead() -> ControlState:
    """A reschedule that passed, and was put off, while all clocks were a quarter of an hour ahead.

    The caller chose 90,000.
    """
    state = after(DECIDED, W_AHEAD, absent=frozenset([KEY]))
    assert state.reschedules[KEY].to_ms == W_AHEAD.due_ms + PUT_OFF_MS
    return state


def test_what_is_not_written_when_w_is_set_back_is_put_off_to_what_was_chosen() -> None:
    state = put_off_ahead()
    far_ms = state.reschedules[KEY].to_ms
    record = after(state, SET_BACK).reschedules[KEY]
    assert (record.to_ms, record.set_backs) == (TO_MS + 1, 1)  # 90,000 itself has passed
    assert record.passed == (TO_MS, far_ms)
    assert after(after(state, SET_BACK), SET_BACK).reschedules[KEY] == record
    # Its mark is newer than that of the due that it had, though that is later.
    marks = [mark_of(KEY, each) for each in (record, state.reschedules[KEY])]
    assert marked_due(KEY, marks) == GivenDue(1, TO_MS + 1)
    assert known_due_ms(record, GivenDue(0, far_ms)) == TO_MS + 1


def test_what_is_written_at_a_due_that_nobody_chose_is_moved_once_w_is_set_back() -> None:
    state = put_off_ahead()
    far_ms = state.reschedules[KEY].to_ms
    reported = replace(WRITTEN, to_ms=far_ms)
    state = after(state, W_AHEAD, written=[reported])
    assert state.reschedules[KEY].is_written
    assert not to_move(state.reschedules, W_AHEAD)
    state = after(state, SET_BACK)
    ((key, record),) = to_move(state.reschedules, SET_BACK).items()
    assert key == KEY.at(far_ms)
    to_ms = nearer_due_ms(record, SET_BACK, 20_050)
    assert to_ms == TO_MS + 1
    later = replace(SET_BACK, due_ms=200_000)
    assert nearer_due_ms(record, later, 200_050) == 200_050 + PUT_OFF_MS
    assert nearer_due_ms(record, replace(SET_BACK, floor=300), 20_050) == 300_000
    # A proposal is decided though something is done ahead, and though no other finds room.
    proposal = RescheduleProposal(key, to_ms, Position(A1, 7, 0))
    others = [
        reschedule_record(KEY._replace(id=n.to_bytes(16, "big")), Reschedule(10**9 + 1, PLACE))
        for n in range(MOST)
    ]
    state = state.apply_all(others)
    other = RescheduleProposal(MessageKey(b"k" * 16, 60_000, "orders"), 70_000, PLACE)
    assert open_proposals(state, [other, proposal], SET_BACK) == [proposal]
    state = after(state, SET_BACK, proposals=[other, proposal])
    assert state.reschedules[key] == Reschedule(to_ms, Position(A1, 7, 0))
    assert not to_move(state.reschedules, SET_BACK)
    # The first record withdraws what passed, as before, and does not say of the due any more.
    assert withdrawn(state) >= {KEY, KEY.at(TO_MS), key}


def test_what_was_moved_by_clocks_that_were_still_ahead_is_moved_again() -> None:
    state = put_off_ahead()
    far_ms = state.reschedules[KEY].to_ms
    state = after(state, W_AHEAD, written=[replace(WRITTEN, to_ms=far_ms)])
    half_way = cast("Progress", W_AHEAD.set_back(500_000))
    place = Position(A1, 7, 0)
    move = RescheduleProposal(KEY.at(far_ms), 501_000, place, chosen_ms=TO_MS)
    by_caller = after(state, half_way, proposals=[replace(move, chosen_ms=None)])
    assert by_caller.reschedules[move.key] == Reschedule(501_000, place)
    state = after(state, half_way, proposals=[move])
    assert state.reschedules[move.key] == Reschedule(
        501_000, place, chosen_ms=TO_MS, set_backs=half_way.set_backs
    )
    copied = RescheduleWritten(move.key, 501_000, (A1, 8), (A1, 8))
    state = after(state, half_way, written=[copied])
    again = cast("Progress", half_way.set_back(20_000))
    assert [*to_move(state.reschedules, again)] == [KEY.at(501_000)]
    # Nothing is nearer than the floor, which may have followed the clocks.
    at_the_floor = replace(again, floor=501)
    assert not to_move(state.reschedules, at_the_floor)
    assert move.key not in after(state, at_the_floor).reschedules


def test_a_caller_may_reschedule_what_was_put_off_as_any_message() -> None:
    past = replace(NOW, due_ms=TO_MS, seqs={A1: 9}, floor=91)
    state = after(DECIDED, past, absent=frozenset([KEY]))
    to_ms = state.reschedules[KEY].to_ms
    state = after(state, past, written=[replace(WRITTEN, to_ms=to_ms)])
    proposal = RescheduleProposal(KEY.at(to_ms), to_ms + 5_000, Position(A1, 7, 0))
    state = after(state, past, proposals=[proposal])
    assert state.reschedules == {proposal.key: Reschedule(proposal.to_ms, proposal.place)}


def test_the_floor_leaves_what_it_is_made_of() -> None:
    assert floor_below(STATE, 70) == 70
    assert floor_below(DECIDED, 70) == 50
    written = Reschedule(TO_MS, PLACE, (80_000,), is_written=True)
    assert floor_below(STATE.apply_all([reschedule_record(KEY, written)]), 70) == 70


def test_what_is_lost_is_not_waited_for_and_comes_at_no_due() -> None:
    lost = replace(DECIDED, lost=FrameSet.of([(A1, 3)]))
    past = replace(NOW, due_ms=TO_MS)
    for reported in (after(lost), after(lost, past, absent=frozenset({KEY}))):
        assert withdrawn(reported) == {KEY, KEY.at(TO_MS)}
        assert floor_below(reported, 1_000) == 1_000
        assert not passing(reported, past)
    above = replace(NOW, due_ms=200_000, floor=TO_MS // 1000 + 1)
    assert not after(after(lost), above).reschedules


def test_what_is_written_when_its_old_frame_is_lost_has_its_new_due() -> None:
    lost = replace(DECIDED, lost=FrameSet.of([(A1, 3)]))
    written = after(lost, replace(NOW, seqs={A1: 8}), written=[WRITTEN])
    assert not written.reschedules


def test_only_proposals_that_may_be_decided_and_have_room_are_looked_at() -> None:
    later = replace(PROPOSAL, key=MessageKey(b"j" * 16, 60_000, "orders"))
    too_late = replace(PROPOSAL, key=MessageKey(b"k" * 16, 10_001, "orders"))
    assert open_proposals(STATE, [too_late, PROPOSAL, later], NOW) == [PROPOSAL, later]
    assert open_proposals(DECIDED, [PROPOSAL, later], NOW) == [later]
    assert open_proposals(STATE, [PROPOSAL], replace(NOW, ahead=(Done(60_000, None),))) == []
    keys = [MessageKey(n.to_bytes(16, "big"), 60_000, "orders") for n in range(MOST - 1)]
    full = STATE.apply_all([reschedule_record(key, Reschedule(TO_MS, PLACE)) for key in keys])
    assert open_proposals(full, [PROPOSAL, later], NOW) == [PROPOSAL]


@pytest.mark.parametrize(
    ("record", "marked", "known_ms"),
    [
        (None, None, None),
        (None, GivenDue(0, 7), 7),
        (Reschedule(9, PLACE), None, 9),
        (Reschedule(9, PLACE, (7,)), GivenDue(0, 7), 9),
        (Reschedule(7, PLACE), GivenDue(0, 9), 9),
        (Reschedule(7, PLACE, (7,), is_written=True), None, None),
    ],
    ids=["nowhere", "its mark", "its record", "put off", "an older record", "lost"],
)
def test_the_newer_of_record_and_mark_shows_where_a_message_went(
    record: Reschedule | None, marked: GivenDue | None, known_ms: int | None
) -> None:
    assert known_due_ms(record, marked) == known_ms


def test_a_mark_shows_where_its_message_went_and_no_other() -> None:
    ids = [ID, mark_of(KEY.at(1), Reschedule(5, PLACE)), mark_of(KEY, Reschedule(TO_MS, PLACE))]
    assert marked_due(KEY, ids) == GivenDue(0, TO_MS)
    assert marked_due(KEY.at(2), ids) is None


def test_records_are_read_as_they_were_written() -> None:
    record = Reschedule(TO_MS, PLACE, (1, 2), is_written=True, chosen_ms=3, set_backs=4)
    state = STATE.apply_all([reschedule_record(KEY, record)])
    assert state.reschedules == {KEY: record}
    assert not state.apply_all([reschedule_record(KEY, None)]).reschedules


def test_where_no_cancel_can_be_written_the_record_withdraws_until_nothing_comes() -> None:
    sealed = replace(WRITTEN, cancel=None)
    past = replace(NOW, seqs={A1: 8}, due_ms=60_000)
    state = after(DECIDED, past, written=[sealed])
    assert state.reschedules[KEY].is_written
    assert KEY in withdrawn(state)
    assert floor_below(state, 1_000) == 1_000
    assert after(state, replace(past, floor=50)).reschedules, "its second is not finished"
    assert not after(state, replace(past, floor=51)).reschedules
    assert (
        not after(DECIDED, replace(past, seqs={A1: 6}), written=[sealed])
        .reschedules[KEY]
        .is_written
    )


def test_of_several_dues_that_were_given_the_last_counts() -> None:
    dues_ms = (TO_MS + 2_000, TO_MS)
    marks = [mark_of(KEY, Reschedule(due_ms, PLACE)) for due_ms in dues_ms]
    assert marked_due(KEY, [*marks, mark_of(KEY.at(1), Reschedule(10**12, PLACE))]) == GivenDue(
        0, TO_MS + 2_000
    )


def test_what_was_forwarded_at_its_new_due_needs_no_more_frames() -> None:
    past = replace(NOW, due_ms=TO_MS)
    state = after(DECIDED, past)
    assert state.reschedules[KEY].is_written
    assert KEY in withdrawn(state)
    assert floor_below(state, 1_000) == 1_000
    assert not after(state, replace(past, floor=KEY.due_ms // 1000 + 1)).reschedules
