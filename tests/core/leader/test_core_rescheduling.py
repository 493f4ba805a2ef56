"""Another due for a message: which requests a transaction decides, puts off and settles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core.leader.rescheduling import (
    MOST,
    PUT_OFF_MS,
    Rescheduling,
    floor_below,
    nodes_behind,
    open_wishes,
    passing,
    reschedule_records,
    withdrawn,
)
from delaywheel_replica.core.protocol.control import (
    NEEDS_KEY,
    REMOVED,
    ControlState,
    NodeRecord,
    reschedule_record,
)
from delaywheel_replica.core.protocol.frames import FrameSet
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.protocol.progress import Done, Position, Progress
from delaywheel_replica.core.protocol.reschedules import (
    Reschedule,
    RescheduleWish,
    RescheduleWritten,
    known_due_ms,
    mark_of,
    marked_due_ms,
)
from support.core.values import heartbeat

A1 = WheelId("a", 1)
ID = b"i" * 16
KEY = (ID, 50_000)
TO_MS = 90_000
PLACE = Position(A1, 3, 0)
WISH = RescheduleWish(KEY, TO_MS, PLACE)
NOW = Progress(10_000, None, {A1: 5}, floor=4)
STATE = ControlState(progress=NOW)
DECIDED = STATE.apply_all([reschedule_record(KEY, Reschedule(TO_MS, PLACE))])
WRITTEN = RescheduleWritten(KEY, TO_MS, (A1, 7), (A1, 8))


def after(state: ControlState, progress: Progress = NOW, **reported: object) -> ControlState:
    """The state after a transaction to that progress is committed."""
    records = reschedule_records(state, progress, Rescheduling(**reported), {}, 10_000)  # type: ignore[arg-type]
    return replace(state.apply_all(records), progress=progress)


def test_a_wish_is_decided_once() -> None:
    decided = after(STATE, wishes=[WISH])
    assert decided.reschedules == {KEY: Reschedule(TO_MS, PLACE)}
    assert withdrawn(decided) == {KEY}
    other = replace(WISH, to_ms=70_000)
    assert after(decided, wishes=[other]).reschedules == decided.reschedules
    both = after(STATE, wishes=[WISH, other])
    assert both.reschedules == decided.reschedules


@pytest.mark.parametrize(
    ("wish", "progress"),
    [
        (WISH, replace(NOW, due_ms=49_999)),
        (replace(WISH, to_ms=10_001), NOW),
        (replace(WISH, to_ms=KEY[1]), NOW),
        (replace(WISH, place=Position(A1, 6, 0)), NOW),
        (WISH, replace(NOW, ahead=(Done(60_000, None),))),
    ],
    ids=["the old due", "the new due", "the same due", "beyond V", "done ahead"],
)
def test_what_is_not_decided(wish: RescheduleWish, progress: Progress) -> None:
    assert not open_wishes(STATE, [wish], progress)
    assert not after(STATE, progress, wishes=[wish]).reschedules


def test_a_due_that_is_touched_already_is_not_given() -> None:
    back = RescheduleWish((ID, TO_MS), KEY[1], PLACE)
    wishes = [back, *(RescheduleWish((ID, 60_000), to_ms, PLACE) for to_ms in (TO_MS, 70_000))]
    assert open_wishes(DECIDED, wishes, NOW) == wishes[2:]


def test_so_many_stand_at_once() -> None:
    wishes = [replace(WISH, key=(number.to_bytes(16, "big"), 50_000)) for number in range(MOST + 9)]
    assert len(after(STATE, wishes=wishes).reschedules) == MOST


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
    assert withdrawn(put_off) == {KEY, (ID, TO_MS)}
    # It is written, and stands until nothing can come for the due that passed.
    words = [replace(WRITTEN, to_ms=to_ms)]
    written = after(put_off, later, written=words)
    assert written.reschedules[KEY].is_written
    assert withdrawn(written) == {KEY, (ID, TO_MS)}
    assert passing(written, replace(later, due_ms=to_ms)) == []
    assert after(written, later).reschedules == written.reschedules
    assert not after(written, replace(later, floor=91)).reschedules


def test_the_floor_leaves_what_it_is_made_of() -> None:
    assert floor_below(STATE, 70) == 70
    assert floor_below(DECIDED, 70) == 50
    written = Reschedule(TO_MS, PLACE, (80_000,), is_written=True)
    assert floor_below(STATE.apply_all([reschedule_record(KEY, written)]), 70) == 70


def test_what_is_lost_is_not_waited_for_and_comes_at_no_due() -> None:
    lost = replace(DECIDED, lost=FrameSet.of([(A1, 3)]))
    past = replace(NOW, due_ms=TO_MS)
    for reported in (after(lost), after(lost, past, absent=frozenset({KEY}))):
        assert withdrawn(reported) == {KEY, (ID, TO_MS)}
        assert floor_below(reported, 1_000) == 1_000
        assert not passing(reported, past)
    above = replace(NOW, due_ms=200_000, floor=TO_MS // 1000 + 1)
    assert not after(after(lost), above).reschedules


def test_what_is_written_when_its_old_frame_is_lost_has_its_new_due() -> None:
    lost = replace(DECIDED, lost=FrameSet.of([(A1, 3)]))
    written = after(lost, replace(NOW, seqs={A1: 8}), written=[WRITTEN])
    assert not written.reschedules


def by(**versions: int) -> dict[str, Heartbeat]:
    """Heartbeats of nodes whose releases know this version."""
    return {
        node: replace(heartbeat(node), control_version=version)
        for node, version in versions.items()
    }


@pytest.mark.parametrize(
    ("heartbeats", "behind"),
    [
        (by(a=2, b=2), []),
        (by(a=3, b=2, c=2), []),
        (by(a=2), ["b"]),
        (by(a=2, b=1), ["b"]),
        (by(a=2, b=2, c=1), ["c"]),
        (by(a=2, b=2, gone=1), []),
    ],
    ids=["all", "later ones", "not heard", "older", "older and not registered", "removed"],
)
def test_nothing_is_decided_before_every_node_knows_the_record(
    heartbeats: dict[str, Heartbeat], behind: list[str]
) -> None:
    nodes = {"a": "disk-a", "b": "disk-b", "gone": REMOVED}
    state = replace(STATE, nodes={node: NodeRecord(disk, 1) for node, disk in nodes.items()})
    assert nodes_behind(state, heartbeats) == behind
    reported = Rescheduling(wishes=[WISH])
    records = reschedule_records(state, NOW, reported, heartbeats, 10_000)
    keys = [NEEDS_KEY, reschedule_record(WISH.key, None)[0]]
    assert [key for key, _ in records] == ([] if behind else keys)
    if not behind:
        # From the mark on no node is asked, and it is not written again.
        marked = state.apply_all(records[:1])
        again = reschedule_records(marked, NOW, reported, by(a=1), 10_000)
        assert [key for key, _ in again] == keys[1:]


def test_only_wishes_that_may_be_decided_are_looked_at_and_only_as_many_as_there_is_room_for() -> (
    None
):
    later = replace(WISH, key=(b"j" * 16, 60_000))
    too_late = replace(WISH, key=(b"k" * 16, 10_001))
    assert open_wishes(STATE, [too_late, WISH, later], NOW) == [WISH, later]
    assert open_wishes(DECIDED, [WISH, later], NOW) == [later]
    assert open_wishes(STATE, [WISH], replace(NOW, ahead=(Done(60_000, None),))) == []
    keys = [(n.to_bytes(16, "big"), 60_000) for n in range(MOST - 1)]
    full = STATE.apply_all([reschedule_record(key, Reschedule(TO_MS, PLACE)) for key in keys])
    assert open_wishes(full, [WISH, later], NOW) == [WISH]


@pytest.mark.parametrize(
    ("stands", "marked_ms", "known_ms"),
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
    stands: Reschedule | None, marked_ms: int | None, known_ms: int | None
) -> None:
    assert known_due_ms(stands, marked_ms) == known_ms


def test_a_mark_shows_where_its_message_went_and_no_other() -> None:
    ids = [ID, mark_of((ID, 1), 5), mark_of(KEY, TO_MS)]
    assert marked_due_ms(KEY, ids) == TO_MS
    assert marked_due_ms((ID, 2), ids) is None


def test_records_are_read_as_they_were_written() -> None:
    stands = Reschedule(TO_MS, PLACE, (1, 2), is_written=True)
    state = STATE.apply_all([reschedule_record(KEY, stands)])
    assert state.reschedules == {KEY: stands}
    assert not state.apply_all([reschedule_record(KEY, None)]).reschedules


def test_where_no_cancel_can_be_written_the_record_withdraws_until_nothing_comes() -> None:
    sealed = replace(WRITTEN, cancel=None)
    past = replace(NOW, seqs={A1: 8}, due_ms=60_000)
    stands = after(DECIDED, past, written=[sealed])
    assert stands.reschedules[KEY].is_written
    assert KEY in withdrawn(stands)
    assert floor_below(stands, 1_000) == 1_000
    assert after(stands, replace(past, floor=50)).reschedules, "its second is not finished"
    assert not after(stands, replace(past, floor=51)).reschedules
    assert (
        not after(DECIDED, replace(past, seqs={A1: 6}), written=[sealed])
        .reschedules[KEY]
        .is_written
    )


def test_of_several_dues_that_were_given_the_last_counts() -> None:
    marks = [mark_of(KEY, TO_MS + 2_000), mark_of(KEY, TO_MS), mark_of((ID, 1), 1)]
    assert marked_due_ms(KEY, marks) == TO_MS + 2_000


def test_what_was_forwarded_at_its_new_due_needs_no_more_frames() -> None:
    past = replace(NOW, due_ms=TO_MS)
    stands = after(DECIDED, past)
    assert stands.reschedules[KEY].is_written
    assert KEY in withdrawn(stands)
    assert floor_below(stands, 1_000) == 1_000
    assert not after(stands, replace(past, floor=KEY[1] // 1000 + 1)).reschedules
