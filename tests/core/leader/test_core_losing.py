from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel_replica.core.leader.lost_frames import MAX_LOST, Sought, frames_lost, frames_missing
from delaywheel_replica.core.protocol.control import ControlState, NodeRecord
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameRange, FrameSet
from delaywheel_replica.core.protocol.heartbeat import MAX_SOUGHT, Fence, Heartbeat, Promise
from support.core.values import heartbeat, looked_for, wheel_heartbeat, wheel_record_of

A1, A2 = WheelId("a", 1), WheelId("a", 2)
STATE = ControlState(
    nodes={node: NodeRecord(f"disk-{node}", 9) for node in "abcd"},
    wheels={A1: wheel_record_of("a", "b", "c", min_insync=2)},
)
ALL = frozenset("abc")


def holder(node: str, *seqs: int, applied: int = 9) -> Heartbeat:
    return heartbeat(node, wheels={A1: wheel_heartbeat(applied, missing=seqs)})


def sought(
    *heartbeats: Heartbeat,
    lacks: dict[tuple[WheelId, int], frozenset[str]],
    answers: tuple[Promise, ...] = (),
) -> Sought:
    return Sought("b", {each.node: each for each in heartbeats}, answers, *looked_for(lacks))


def of_a1(*seqs: int) -> FrameSet:
    return FrameSet.of((A1, seq) for seq in seqs)


FOUR = of_a1(4)


def test_a_replaced_member_lacks_everything() -> None:
    replaced = ControlState(
        nodes={**STATE.nodes, "c": NodeRecord("disk-new", 9)}, wheels=STATE.wheels
    )
    # What its old storage holds does not matter any more.
    heartbeats = (holder("a", 4), holder("b", 4), holder("c"))
    lacks = {(A1, 4): frozenset("ab")}
    assert frames_lost(replaced, {}, sought(*heartbeats, lacks=lacks)) == of_a1(4)
    assert frames_lost(STATE, {}, sought(*heartbeats, lacks=lacks)) == NO_FRAMES


@pytest.mark.parametrize(
    ("of_c", "lacked_by", "lost"), [(9, "ab", False), (3, "ab", False), (3, "abc", True)]
)
def test_of_a_closed_wheel_a_replaced_members_copy_counts(
    of_c: int, lacked_by: str, lost: bool
) -> None:
    state = ControlState(
        nodes={**STATE.nodes, "c": NodeRecord("disk-new", 9)},
        wheels={A1: wheel_record_of("a", "b", "c", min_insync=2, closed_at=9)},
    )
    copy = heartbeat("c", storage="disk-new", wheels={A1: wheel_heartbeat(of_c)})
    lacks = {(A1, 4): frozenset(lacked_by)}
    found = frames_lost(state, {}, sought(holder("a", 4), holder("b", 4), copy, lacks=lacks))
    assert found == (FOUR if lost else NO_FRAMES)


@pytest.mark.parametrize(
    ("shown", "lost"),
    [
        (holder("c"), False),
        (holder("c", 3), False),
        (holder("c", 3, 4), True),
        (holder("c", applied=3), True),
        # It has files of the wheel, and does not know yet what they hold.
        (replace(heartbeat("c"), verifying=frozenset({A1})), False),
        (replace(heartbeat("c"), verifying=frozenset({A2})), True),
        (heartbeat("c"), True),
        (heartbeat("c", storage="disk-new", wheels={A1: wheel_heartbeat(9)}), True),
    ],
)
def test_what_a_members_newest_beat_shows_is_not_lost(shown: Heartbeat, lost: bool) -> None:
    found = frames_lost(
        STATE, {}, sought(holder("a", 4), holder("b", 4), shown, lacks={(A1, 4): ALL})
    )
    assert found == (FOUR if lost else NO_FRAMES)


def test_the_own_beat_is_not_asked_for_it_was_reported_together() -> None:
    heartbeats = (holder("a", 4), holder("b"), holder("c", 4))
    assert frames_lost(STATE, {}, sought(*heartbeats, lacks={(A1, 4): ALL})) == of_a1(4)


def test_what_was_never_written_may_still_come() -> None:
    lacks = {(A1, 10): ALL}
    heartbeats = (holder("a"), holder("b"), holder("c"))
    assert frames_lost(STATE, {}, sought(*heartbeats, lacks=lacks)) == NO_FRAMES
    assert frames_lost(STATE, {A1: 9}, sought(*heartbeats, lacks=lacks)) == NO_FRAMES
    assert frames_lost(STATE, {A1: 10}, sought(*heartbeats, lacks=lacks)) == of_a1(10)
    answers = (Promise("c", "disk-c", Fence("a", 1), {A1: 10}),)
    assert frames_lost(STATE, {}, sought(*heartbeats, lacks=lacks, answers=answers)) == of_a1(10)


def test_a_committed_fill_says_that_it_was_written() -> None:
    """Its holder is gone, and no end was committed: the wheel could never be closed."""
    lacks = {(A1, 5): ALL, (A1, 6): ALL}
    heartbeats = [holder(node, applied=3) for node in "abc"]
    assert frames_lost(STATE, {}, sought(*heartbeats, lacks=lacks)) == NO_FRAMES
    limited = replace(STATE, wheels={A1: replace(STATE.wheels[A1], limit=5)})
    assert frames_lost(limited, {}, sought(*heartbeats, lacks=lacks)) == of_a1(5)


def test_each_is_recorded_once_in_order_and_only_of_registered_wheels() -> None:
    lacks = {(A1, 4): ALL, (A1, 3): ALL, (A2, 1): ALL, (A1, 2): ALL}
    heartbeats = (holder("a", 2, 3, 4), holder("b", 2, 3, 4), holder("c", 2, 3, 4))
    state = ControlState(nodes=STATE.nodes, wheels=STATE.wheels, lost=FrameSet.of({(A1, 2)}))
    assert frames_lost(state, {A2: 1}, sought(*heartbeats, lacks=lacks)) == of_a1(3, 4)


@given(
    applied=st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9)),
    end=st.integers(0, 9),
    lost=st.sets(st.integers(1, 9)),
)
def test_missing_is_what_must_be_there_and_no_member_shows(
    applied: dict[str, int], end: int, lost: set[int]
) -> None:
    state = ControlState(
        nodes=STATE.nodes, wheels=STATE.wheels, lost=FrameSet.of((A1, seq) for seq in lost)
    )
    heartbeats = {node: holder(node, applied=seq) for node, seq in applied.items()}
    shown = max((seq for node, seq in applied.items() if node != "d"), default=0)
    expected = {(A1, seq) for seq in range(1, end + 1) if seq > shown and seq not in lost}
    assert frames_missing(state, {A1: end}, heartbeats) == expected


def test_millions_in_a_row_are_sought_and_lost_at_once() -> None:
    missing = frames_missing(STATE, {A1: 10**9}, {"a": holder("a", applied=5)})
    assert missing == FrameSet([FrameRange(A1, 6, 10**9)])
    heartbeats = {node: holder(node, applied=5) for node in "abc"}
    lacks = dict.fromkeys("abc", missing)
    found = frames_lost(STATE, {A1: 10**9}, Sought("b", heartbeats, (), missing, lacks))
    assert found == missing


def test_of_many_ranges_so_many_are_sought_and_lost_at_once() -> None:
    scattered = of_a1(*range(1, 4 * MAX_LOST, 2))
    state = replace(STATE, lost=scattered)
    assert len([*frames_missing(state, {A1: 10**9}, {}).ranges()]) == MAX_SOUGHT
    heartbeats = {node: holder(node, applied=0) for node in "abc"}
    lacks = dict.fromkeys("abc", scattered)
    found = frames_lost(STATE, {A1: 10**9}, Sought("b", heartbeats, (), scattered, lacks))
    assert found == of_a1(*range(1, 2 * MAX_LOST, 2))


def test_no_beat_but_the_origins_says_what_was_written() -> None:
    """One wrong number of another node would give up all that is still to come."""
    lacks = {(A1, 10): ALL}
    at_b, at_a = holder("b", *range(1, 99), applied=99), holder("a", 10, applied=10)
    assert frames_lost(STATE, {}, sought(holder("a"), at_b, lacks=lacks)) == NO_FRAMES
    assert frames_lost(STATE, {}, sought(at_a, at_b, lacks=lacks)) == of_a1(10)
    other_disk = replace(at_a, storage="disk-new")
    assert frames_lost(STATE, {}, sought(other_disk, at_b, lacks=lacks)) == NO_FRAMES
