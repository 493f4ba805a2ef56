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
    open_proposals,
    passing,
    reschedule_records,
    withdrawn,
)
from delaywheel_replica.core.protocol.control import ControlState, reschedule_record
from delaywheel_replica.core.protocol.frames import FrameSet
from delaywheel_replica.core.protocol.progress import Done, Position, Progress
from delaywheel_replica.core.protocol.reschedules import (
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
    assert put_off.reschedules == {KEY: Reschedule(to_ms, PLACE, (TO_MS,))}
    assert withdrawn(put_off) == {KEY, KEY.at(TO_MS)}
    # It is written, and stands until nothing can come for the due that passed.
    words = [replace(WRITTEN, to_ms=to_ms)]
    written = after(put_off, later, written=words)
    assert written.reschedules[KEY].is_written
    assert withdrawn(written) == {KEY, KEY.at(TO_MS)}
    assert passing(written, replace(later, due_ms=to_ms)) == []
    assert after(written, later).reschedules == written.reschedules
    assert not after(written, replace(later, floor=91)).reschedules


W_AHEAD = Progress(1_000_000, None, {A1: 8}, floor=4)
SET_BACK = cast("Progress", W_AHEAD.set_back(20_000))


def test_what_was_put_off_ahead_keeps_that_due_when_w_is_set_back() -> None:
    """All clocks were a quarter of an hour ahead; to follow them back took states of its own."""
    state = after(DECIDED, W_AHEAD, absent=frozenset([KEY]))
    far_ms = W_AHEAD.due_ms + PUT_OFF_MS
    assert state.reschedules == {KEY: Reschedule(far_ms, PLACE, (TO_MS,))}
    assert after(state, SET_BACK).reschedules == state.reschedules
    written = after(state, SET_BACK, written=[replace(WRITTEN, to_ms=far_ms)])
    assert written.reschedules[KEY].is_written
    assert withdrawn(written) == {KEY, KEY.at(TO_MS)}
    assert not after(written, replace(SET_BACK, floor=TO_MS // 1000 + 1)).reschedules
    at_the_floor = after(DECIDED, replace(W_AHEAD, floor=2_000), absent=frozenset([KEY]))
    assert at_the_floor.reschedules[KEY].to_ms == 2_000_000


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
        (None, 7, 7),
        (Reschedule(9, PLACE), None, 9),
        (Reschedule(9, PLACE, (7,)), 7, 9),
        (Reschedule(7, PLACE), 9, 9),
        (Reschedule(7, PLACE, (7,), is_written=True), None, None),
    ],
    ids=["nowhere", "its mark", "its record", "put off", "an older record", "lost"],
)
def test_the_newer_of_record_and_mark_shows_where_a_message_went(
    record: Reschedule | None, marked: int | None, known_ms: int | None
) -> None:
    assert known_due_ms(record, marked) == known_ms


def test_a_mark_shows_where_its_message_went_and_no_other() -> None:
    ids = [ID, mark_of(KEY.at(1), 5), mark_of(KEY, TO_MS)]
    assert marked_due(KEY, ids) == TO_MS
    assert marked_due(KEY.at(2), ids) is None


def test_records_are_read_as_they_were_written() -> None:
    record = Reschedule(TO_MS, PLACE, (1, 2), is_written=True)
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
    marks = [mark_of(KEY, due_ms) for due_ms in dues_ms]
    assert marked_due(KEY, [*marks, mark_of(KEY.at(1), 10**12)]) == TO_MS + 2_000


def test_what_was_forwarded_at_its_new_due_needs_no_more_frames() -> None:
    past = replace(NOW, due_ms=TO_MS)
    state = after(DECIDED, past)
    assert state.reschedules[KEY].is_written
    assert KEY in withdrawn(state)
    assert floor_below(state, 1_000) == 1_000
    assert not after(state, replace(past, floor=KEY.due_ms // 1000 + 1)).reschedules
