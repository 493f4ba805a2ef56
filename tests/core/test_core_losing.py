from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel_replica.core.beat import MAX_LACKING, MAX_SOUGHT, Beat, Fence, FenceAnswer
from delaywheel_replica.core.control import ControlState, NodeRecord
from delaywheel_replica.core.frames import FrameSet
from delaywheel_replica.core.losing import Sought, frames_lost, frames_missing
from support.core_values import beat, wheel_beat, wheel_record_of

A1, A2 = WheelId("a", 1), WheelId("a", 2)
STATE = ControlState(
    nodes={node: NodeRecord(f"disk-{node}", 9) for node in "abcd"},
    wheels={A1: wheel_record_of("a", "b", "c", min_insync=2)},
)
ALL = frozenset("abc")


def lacking(node: str, *seqs: int, applied: int = 9) -> Beat:
    return beat(node, wheels={A1: wheel_beat(applied, lacking=seqs)})


def sought(
    *beats: Beat,
    lacks: dict[tuple[WheelId, int], frozenset[str]],
    answers: tuple[FenceAnswer, ...] = (),
) -> Sought:
    return Sought("b", {each.node: each for each in beats}, answers, lacks)


NOBODY = (lacking("a", 4), lacking("b", 4), lacking("c", 4))


@pytest.mark.parametrize(
    ("nodes", "lost"),
    [("abc", True), ("abcd", True), ("ab", False), ("bc", False), ("abd", False), ("", False)],
)
def test_a_frame_is_lost_when_all_members_lack_it(nodes: str, lost: bool) -> None:
    lacks = {(A1, 4): frozenset(nodes)}
    assert frames_lost(STATE, {}, sought(*NOBODY, lacks=lacks)) == ([(A1, 4)] if lost else [])


def test_a_replaced_member_lacks_everything() -> None:
    replaced = ControlState(
        nodes={**STATE.nodes, "c": NodeRecord("disk-new", 9)}, wheels=STATE.wheels
    )
    # What its old storage holds does not matter any more.
    beats = (lacking("a", 4), lacking("b", 4), lacking("c"))
    lacks = {(A1, 4): frozenset("ab")}
    assert frames_lost(replaced, {}, sought(*beats, lacks=lacks)) == [(A1, 4)]
    assert frames_lost(STATE, {}, sought(*beats, lacks=lacks)) == []


@pytest.mark.parametrize(
    ("shown", "lost"),
    [
        (lacking("c"), False),
        (lacking("c", 3), False),
        (lacking("c", 3, 4), True),
        (lacking("c", applied=3), True),
        # It has files of the wheel, and does not know yet what they hold.
        (replace(beat("c"), verifying=frozenset({A1})), False),
        (replace(beat("c"), verifying=frozenset({A2})), True),
        (beat("c"), True),
        (beat("c", storage="disk-new", wheels={A1: wheel_beat(9)}), True),
        # It lacks more than it tells: of those beyond nothing is known.
        (lacking("c", *range(5, 5 + MAX_LACKING), applied=999), False),
        (lacking("c", *range(-MAX_LACKING, 0), applied=999), True),
    ],
)
def test_what_a_members_newest_beat_shows_is_not_lost(shown: Beat, lost: bool) -> None:
    found = frames_lost(
        STATE, {}, sought(lacking("a", 4), lacking("b", 4), shown, lacks={(A1, 4): ALL})
    )
    assert found == ([(A1, 4)] if lost else [])


def test_the_own_beat_is_not_asked_for_it_was_told_together() -> None:
    beats = (lacking("a", 4), lacking("b"), lacking("c", 4))
    assert frames_lost(STATE, {}, sought(*beats, lacks={(A1, 4): ALL})) == [(A1, 4)]


def test_what_was_never_written_may_still_come() -> None:
    lacks = {(A1, 10): ALL}
    beats = (lacking("a"), lacking("b"), lacking("c"))
    assert frames_lost(STATE, {}, sought(*beats, lacks=lacks)) == []
    assert frames_lost(STATE, {A1: 9}, sought(*beats, lacks=lacks)) == []
    assert frames_lost(STATE, {A1: 10}, sought(*beats, lacks=lacks)) == [(A1, 10)]
    answers = (FenceAnswer("c", "disk-c", Fence("a", 1), {A1: 10}),)
    assert frames_lost(STATE, {}, sought(*beats, lacks=lacks, answers=answers)) == [(A1, 10)]


def test_a_committed_fill_says_that_it_was_written() -> None:
    """Who held it is gone, and no end was committed: the wheel could never be closed."""
    lacks = {(A1, 5): ALL, (A1, 6): ALL}
    beats = [lacking(node, applied=3) for node in "abc"]
    assert frames_lost(STATE, {}, sought(*beats, lacks=lacks)) == []
    filled = replace(STATE, wheels={A1: replace(STATE.wheels[A1], fill=5)})
    assert frames_lost(filled, {}, sought(*beats, lacks=lacks)) == [(A1, 5)]


def test_each_is_recorded_once_in_order_and_only_of_registered_wheels() -> None:
    lacks = {(A1, 4): ALL, (A1, 3): ALL, (A2, 1): ALL, (A1, 2): ALL}
    beats = (lacking("a", 2, 3, 4), lacking("b", 2, 3, 4), lacking("c", 2, 3, 4))
    state = ControlState(nodes=STATE.nodes, wheels=STATE.wheels, lost=FrameSet.of({(A1, 2)}))
    assert frames_lost(state, {A2: 1}, sought(*beats, lacks=lacks)) == [(A1, 3), (A1, 4)]


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
    beats = {node: lacking(node, applied=seq) for node, seq in applied.items()}
    shown = max((seq for node, seq in applied.items() if node != "d"), default=0)
    expected = {(A1, seq) for seq in range(1, end + 1) if seq > shown and seq not in lost}
    assert frames_missing(state, {A1: end}, beats) == expected


def test_so_many_are_sought_at_once() -> None:
    missing = frames_missing(STATE, {A1: 10**9}, {"a": lacking("a", applied=5)})
    assert sorted(missing) == [(A1, seq) for seq in range(6, 6 + MAX_SOUGHT)]
