from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel.seqset import SeqSet
from delaywheel_replica.core.leader.holders import (
    held_alone,
    held_by,
    held_prefix,
    holds_progress,
    knows_all,
    takeable,
)
from delaywheel_replica.core.protocol.control import REMOVED, ControlState, NodeRecord
from delaywheel_replica.core.protocol.frames import FrameRange, FrameSet
from delaywheel_replica.core.protocol.heartbeat import MAX_MISSING, Heartbeat, WheelHeartbeat
from delaywheel_replica.core.protocol.progress import Progress
from support.core.values import heartbeat, wheel_heartbeat, wheel_record_of

A1, A2 = WheelId("a", 1), WheelId("a", 2)


@pytest.mark.parametrize(
    ("applied", "high_watermark", "closed_at", "taken", "limit"),
    [
        (None, None, None, 0, 0),
        (None, None, 7, 5, 0),
        (9, 7, None, 5, 9),
        (7, 9, None, 5, 7),
        (7, 9, None, 8, 7),
        (6, 6, 7, 5, 6),
        (9, 9, 7, 5, 7),
        # The operating system crashed: 6 to 8 were taken account of, and are not here.
        (5, 5, None, 8, 5),
        (5, 5, 8, 8, 5),
    ],
)
def test_what_a_node_alone_may_take(
    applied: int | None,
    high_watermark: int | None,
    closed_at: int | None,
    taken: int,
    limit: int,
) -> None:
    wheels = {}
    if applied is not None and high_watermark is not None:
        wheels[A1] = WheelHeartbeat(applied, high_watermark, 0, 0, 0, -1)
    state = ControlState(
        progress=Progress(0, None, {A1: taken}),
        wheels={A1: wheel_record_of(closed_at=closed_at)},
    )
    own = heartbeat(wheels=wheels)
    assert takeable(state, own, {"a": own}) == takeable(state, own, {}) == {A1: limit}
    held = 0 if applied is None else applied
    assert holds_progress(state, own) == (held >= taken)


def test_nothing_counts_as_taken_before_the_first_leader() -> None:
    assert holds_progress(ControlState(), heartbeat())
    assert takeable(ControlState(wheels={A1: wheel_record_of()}), heartbeat(), {}) == {A1: 0}


def test_a_wheel_that_is_taken_account_of_but_not_registered_is_not_held() -> None:
    own = heartbeat(wheels={A1: wheel_heartbeat(1)})
    assert not holds_progress(ControlState(progress=Progress(0, None, {A1: 1})), own)


THREE = ControlState(
    nodes={node: NodeRecord(f"disk-{node}", 9) for node in "abcd"},
    wheels={A1: wheel_record_of("a", "b", "c", min_insync=2)},
)


def reported(node: str, applied: int, high_watermark: int = 0, **more: object) -> Heartbeat:
    wheel = wheel_heartbeat(applied, high_watermark=high_watermark, **more)  # type: ignore[arg-type]
    return heartbeat(node, wheels={A1: wheel})


@pytest.mark.parametrize(
    ("own", "others", "limit"),
    [
        (reported("b", 9), [], 0),
        (reported("b", 9), [reported("c", 7)], 7),
        (reported("b", 5), [reported("c", 7)], 5),
        (reported("b", 9), [reported("a", 8), reported("c", 7)], 8),
        # HW, whichever node reports it, heard or not.
        (reported("b", 9, 4), [reported("a", 3, 6)], 6),
        (reported("b", 9), [replace(reported("d", 0, 5), storage="x")], 5),
        # What is held is held without a hole.
        (reported("b", 9), [reported("c", 8, missing=(6, 7))], 5),
        (reported("b", 9, missing=(3,)), [reported("c", 8)], 2),
        # Only the members' storages count.
        (reported("b", 9), [reported("d", 9)], 0),
        (reported("b", 9), [replace(reported("c", 9), storage="disk-new")], 0),
    ],
)
def test_what_w_members_hold_may_be_taken(
    own: Heartbeat, others: list[Heartbeat], limit: int
) -> None:
    heartbeats = {each.node: each for each in others}
    assert takeable(THREE, own, heartbeats) == {A1: limit}


def test_what_was_taken_may_be_though_fewer_are_known_to_hold_it_now() -> None:
    state = replace(THREE, progress=Progress(0, None, {A1: 8}))
    heartbeats = {"c": reported("c", 5)}
    assert takeable(THREE, reported("b", 9), heartbeats) == {A1: 5}
    assert takeable(state, reported("b", 9), heartbeats) == {A1: 8}
    assert takeable(state, reported("b", 6), heartbeats) == {A1: 6}


def test_a_replaced_members_old_copy_counts_no_more() -> None:
    state = ControlState(
        nodes={**THREE.nodes, "c": NodeRecord("disk-new", 9)}, wheels=dict(THREE.wheels)
    )
    assert takeable(state, reported("b", 9), {"c": reported("c", 9)}) == {A1: 0}


def test_lost_frames_are_not_missing() -> None:
    lost = FrameSet.of({(A1, 3), (A1, 6), (A1, 10), (A1, 11), (A2, 7)})
    state = ControlState(progress=Progress(0, None, {A1: 11}), wheels=THREE.wheels, lost=lost)
    for missing, prefix in (((), 11), ((3,), 11), ((3, 6), 11), ((3, 7), 6), ((4,), 3)):
        own = reported("b", 9, missing=missing)
        assert held_prefix(state, A1, own) == prefix
        assert holds_progress(state, own) == (prefix == 11)
    assert takeable(state, reported("b", 9, missing=(6,)), {"c": reported("c", 9)}) == {A1: 11}


@pytest.mark.parametrize(
    ("own", "heard", "min_insync", "knows"),
    [
        # R = 2, itself counted.
        (reported("b", 7), [], 2, False),
        (reported("b", 7), [reported("c", 7)], 2, True),
        (reported("b", 7), [reported("c", 8)], 2, False),
        (reported("b", 7, missing=(3,)), [reported("c", 7)], 2, False),
        # What it lacks it may have acknowledged before it went bad.
        (reported("b", 7), [reported("c", 8, missing=(3,))], 2, False),
        (reported("b", 7), [heartbeat("c")], 2, True),
        (heartbeat("b"), [reported("c", 1)], 2, False),
        # A node that may have forgotten, or is no member, proves nothing.
        (reported("b", 7), [replace(reported("c", 7), complete=False)], 2, False),
        (reported("b", 7), [replace(reported("c", 7), storage="disk-new")], 2, False),
        (reported("b", 7), [reported("d", 7)], 2, False),
        (reported("d", 7), [reported("b", 7), reported("c", 7)], 2, True),
        # With W = 1 any node may have what no other has: R = 3.
        (reported("b", 7), [reported("c", 7)], 1, False),
        (reported("b", 7), [reported("a", 7), reported("c", 7)], 1, True),
        # With W = 3 everybody has it all.
        (reported("b", 7), [], 3, True),
        # It writes the wheel itself.
        (replace(reported("a", 7), open=A1), [], 1, True),
    ],
)
def test_who_knows_all_that_was_acknowledged(
    own: Heartbeat, heard: list[Heartbeat], min_insync: int, knows: bool
) -> None:
    wheel = replace(THREE.wheels[A1], min_insync=min_insync)
    state = replace(THREE, wheels={A1: wheel})
    others = {each.node: each for each in heard}
    assert knows_all(state, own, others) is knows
    # At its end a wheel is known by that; other wheels are known or not by themselves.
    closed = replace(wheel, closed_at=7)
    assert knows_all(replace(state, wheels={A1: closed}), own, {}) is (
        held_prefix(state, A1, own) == 7 or own.open == A1
    )
    assert knows_all(replace(state, wheels={A2: wheel, A1: wheel}), own, {}) is (
        knows_all(state, own, {}) and min_insync == 3
    )


def test_who_was_taken_out_is_not_heard_and_lost_frames_are_not_missing() -> None:
    out = replace(THREE, nodes={**THREE.nodes, "c": NodeRecord(REMOVED, 9)})
    assert not knows_all(out, reported("b", 7), {"c": reported("c", 7)})
    lost = replace(THREE, lost=FrameSet.of({(A1, 8)}))
    assert knows_all(lost, reported("b", 7), {"c": reported("c", 8)})


def test_who_has_read_of_no_wheel_yet_does_not_know_what_it_lacks() -> None:
    own = replace(reported("a", 7), open=A2)
    assert knows_all(ControlState(wheels={A1: wheel_record_of(closed_at=7)}), own, {})
    assert not knows_all(ControlState(), replace(own, wheels={}), {})


@pytest.mark.parametrize(
    ("number", "applied", "knows"),
    [(9, 5, True), (10, 5, False), (10, 0, True)],
    ids=["unregistered since", "registered since", "still empty"],
)
@pytest.mark.parametrize("where", ["b", "c"])
def test_who_has_not_read_of_a_wheel_does_not_know_what_is_in_it(
    number: int, applied: int, where: str, *, knows: bool
) -> None:
    """Kafka is out of reach, and another node has opened its next wheel."""
    newer = {WheelId("a", number): wheel_heartbeat(applied)}
    reports = {node: reported(node, 7) for node in "bc"}
    reports[where] = replace(reports[where], wheels={**reports[where].wheels, **newer})
    assert knows_all(THREE, reports["b"], {"c": reports["c"]}) is knows


@given(
    applied=st.integers(0, 12),
    missing=st.sets(st.integers(1, 12)),
    lost=st.sets(st.integers(1, 15)),
)
def test_the_prefix_is_what_counting_finds(applied: int, missing: set[int], lost: set[int]) -> None:
    there = sorted(seq for seq in missing if seq <= applied)
    state = ControlState(lost=FrameSet.of((A1, seq) for seq in lost))
    expected = 0
    while expected + 1 in lost or (expected < applied and expected + 1 not in there):
        expected += 1
    assert held_prefix(state, A1, reported("a", applied, missing=tuple(there))) == expected


def test_of_many_spans_the_last_one_reported_takes_in_the_others() -> None:
    scattered = tuple(range(1, 4 * MAX_MISSING, 2))
    state = ControlState(lost=FrameSet.of((A1, seq) for seq in scattered[: MAX_MISSING - 1]))
    own = reported("a", 999, missing=SeqSet.of(scattered).condensed(MAX_MISSING))
    assert held_prefix(state, A1, own) == 2 * MAX_MISSING - 2


def test_millions_in_a_row_are_one_span() -> None:
    lost = FrameSet([FrameRange(A1, 3, 10**9)])
    own = reported("a", 10**9 + 5, missing=SeqSet([(3, 10**9 - 1), (10**9 + 2, 10**9 + 2)]))
    assert held_prefix(ControlState(lost=lost), A1, own) == 10**9 + 1


EXCHANGED = {"a": NodeRecord("disk-a", 9), "b": NodeRecord("disk-new", 9)}


def test_a_replaced_member_holds_a_wheel_again_once_it_is_closed() -> None:
    state = ControlState(nodes={**EXCHANGED, "c": NodeRecord(REMOVED, 9)})
    unclosed, closed = wheel_record_of("a", "b", "c"), wheel_record_of("a", "b", "c", closed_at=5)
    assert state.holders(unclosed) == state.remaining(unclosed) == {"a": "disk-a"}
    assert state.holders(closed) == {"a": "disk-a", "b": "disk-new"}
    assert state.remaining(closed) == {"a": "disk-a"}


@pytest.mark.parametrize(
    ("of_a", "of_b", "closed_at", "alone"),
    [
        (5, 5, 5, None),
        (5, 0, 5, ("a", 1, 5)),
        (7, 3, 5, ("a", 4, 5)),
        (2, 5, 5, ("b", 3, 5)),
        (5, 0, None, None),
        (0, 0, 0, None),
    ],
)
def test_what_only_one_node_holds_of_a_closed_wheel(
    of_a: int, of_b: int, closed_at: int | None, alone: tuple[str, int, int] | None
) -> None:
    record = wheel_record_of("a", "b", closed_at=closed_at)
    state = ControlState(nodes=EXCHANGED, wheels={A1: record})
    heartbeats = {
        "a": heartbeat("a", wheels={A1: wheel_heartbeat(of_a)}),
        "b": heartbeat("b", storage="disk-new", wheels={A1: wheel_heartbeat(of_b)}),
    }
    assert held_alone(state, heartbeats) == ({} if alone is None else {A1: alone})


def test_what_one_node_holds_if_another_goes() -> None:
    state = ControlState(
        nodes={node: NodeRecord(f"disk-{node}", 9) for node in "ab"},
        wheels={A1: wheel_record_of("a", "b", closed_at=5), A2: wheel_record_of("a", closed_at=5)},
    )
    heartbeats = {
        node: heartbeat(node, wheels={A1: wheel_heartbeat(5), A2: wheel_heartbeat(5)})
        for node in "ab"
    }
    assert held_alone(state, heartbeats) == {}
    assert held_alone(state, heartbeats, without="b") == {A1: ("a", 1, 5)}


@given(st.lists(st.integers(0, 5), max_size=5), st.integers(1, 5))
def test_held_by_agrees_with_counting(applied: list[int], holders: int) -> None:
    counted = [seq for seq in range(6) if sum(held >= seq for held in applied) >= holders]
    assert held_by(applied, holders) == max(counted, default=0)
