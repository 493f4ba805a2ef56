"""The floor against a model that knows every frame of every wheel, reported or not."""

from dataclasses import replace

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core.leader.floor import (
    FRAME_GATES,
    FloorView,
    FloorWatch,
    floor_after,
    floor_wait,
    passed_seq,
    published_seqs,
    reported_seals,
    watch_seals,
    wholly_below,
)
from delaywheel_replica.core.protocol.control import ControlState, NodeRecord
from delaywheel_replica.core.protocol.frames import FrameSet
from delaywheel_replica.core.protocol.heartbeat import WheelHeartbeat
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.seal import Seal
from delaywheel_replica.core.protocol.status_files import FloorWait
from support.core.values import heartbeat, wheel_heartbeat, wheel_record_of

A1, A2, B1 = WheelId("a", 1), WheelId("a", 2), WheelId("b", 1)


def view(**changes: object) -> FloorView:
    base = FloorView(
        progress=Progress(1_000_000, None, {A1: 5}, floor=10),
        wheels={A1: wheel_record_of(seal_slot=10)},
        reported={A1: Seal(500, 5)},
        published={A1: 5},
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def floor_of(view: FloorView, watch: FloorWatch | None = None) -> int:
    watch = watch_seals(watch or FloorWatch(), view)
    return floor_after(view, watch, late_window_s=100)


def test_each_gate_holds_the_floor() -> None:
    assert set(FRAME_GATES) == {"taken", "published"}
    assert floor_of(view()) == 500
    assert floor_of(view(reported={A1: Seal(990, 5)})) == 900
    assert floor_of(view(reported={})) == 10
    assert floor_of(view(published={A1: 4})) == 10
    assert floor_of(view(published={})) == 10
    assert floor_of(view(published={}, reported={A1: Seal(500, 1)})) == 10
    assert floor_of(view(progress=Progress(1_000_000, None, {A1: 4}, floor=10))) == 10
    assert floor_of(view(wheels={})) == 900


def test_a_spare_holds_the_floor_by_its_own_seal() -> None:
    wheels = {A1: wheel_record_of(seal_slot=10), A2: wheel_record_of(seal_slot=300)}
    assert floor_of(view(wheels=wheels)) == 300
    assert floor_of(view(wheels=wheels, reported={A1: Seal(500, 5), A2: Seal(400, 0)})) == 400


def test_a_closed_wheel_holds_it_only_until_its_end_has_passed() -> None:
    for final_seq, floor in ((5, 900), (6, 500), (0, 900)):
        closed = {A1: wheel_record_of(seal_slot=10, closed_at=final_seq)}
        assert floor_of(view(wheels=closed)) == floor


def test_a_lost_frame_counts_as_published() -> None:
    lost = view(published={A1: 3}, lost=FrameSet.of({(A1, 4), (A1, 5), (B1, 6)}))
    assert passed_seq(lost, A1) == 5
    assert floor_of(lost) == 500


def test_under_load_a_held_seal_moves_the_floor_though_the_newest_is_always_ahead() -> None:
    watch = FloorWatch()
    floors = []
    for second in range(6):
        written = 10 * (second + 1)
        seen = view(
            progress=Progress(1_000_000, None, {A1: written - 15}, floor=10),
            reported={A1: Seal(400 + second, written)},
            published={A1: written},
        )
        watch = watch_seals(watch, seen)
        floors.append(floor_after(seen, watch, late_window_s=100))
    assert floors == [10, 10, 400, 400, 402, 402]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"published": {A1: 4}}, "the ledger of a.1, which is published up to frame 4 of 5"),
        ({"progress": Progress(1_000_000, None, {A1: 4}, 10)}, "frame 5 of a.1 to be taken"),
        ({"reported": {}}, "a to seal a.1, or a.1 to be closed"),
        (
            {"wheels": {A1: wheel_record_of(seal_slot=10, closed_at=6)}, "reported": {}},
            "frame 6 of a.1 to be taken",
        ),
        (
            {"wheels": {}, "ingress_slot": 10},
            "ingress records that are announced and not settled",
        ),
        ({}, "messages that are to get another due"),
    ],
)
def test_a_floor_that_is_far_behind_says_what_it_waits_for(
    changes: dict[str, object], cause: str
) -> None:
    seen = view(**changes)
    watch = watch_seals(FloorWatch(), seen)

    def wait(patience_s: int) -> FloorWait | None:
        return floor_wait(seen, watch, 10, late_window_s=100, patience_s=patience_s)

    assert wait(890) is None
    assert wait(889) == FloorWait(890, (cause,))


def test_of_many_wheels_that_a_floor_waits_for_few_are_named() -> None:
    wheels = {WheelId("a", n): wheel_record_of(seal_slot=10) for n in range(1, 9)}
    seen = view(wheels=wheels, reported={})
    wait = floor_wait(seen, FloorWatch(), 10, late_window_s=100, patience_s=60)
    assert wait is not None
    assert wait.causes[3:] == ("5 more wheels",)


def test_of_all_that_is_reported_the_strongest_counts() -> None:
    heartbeats = [
        heartbeat("a", wheels={A1: wheel_heartbeat(9, seal=(5, 9), ledger_seq=4)}),
        heartbeat("b", wheels={A1: wheel_heartbeat(7, seal=(5, 7), ledger_seq=6)}),
        heartbeat(
            "c", wheels={A1: wheel_heartbeat(9, seal=(4, 2), ledger_seq=0), B1: wheel_heartbeat()}
        ),
    ]
    assert reported_seals(heartbeats) == {A1: Seal(5, 7), B1: Seal(0, 0)}
    assert published_seqs(heartbeats) == {A1: 6, B1: 0}


MEMBERS = ControlState(
    nodes={node: NodeRecord(f"disk-{node}", 9) for node in "abc"},
    wheels={A1: wheel_record_of("a", "b", closed_at=5), A2: wheel_record_of("a", "b")},
)


def test_wholly_below_needs_one_who_holds_all_of_it() -> None:
    def below(
        *reported: WheelHeartbeat, wheel: WheelId = A1, state: ControlState = MEMBERS
    ) -> bool:
        heartbeats = {
            n: heartbeat(n, wheels={wheel: w}) for n, w in zip("abc", reported, strict=False)
        }
        return wholly_below(wheel, state, 100, heartbeats)

    assert not below(wheel_heartbeat(5, top_slot=99), wheel=A2)
    for applied, top_slot, is_below in (
        (5, 99, True),
        (5, 100, False),
        (4, 99, False),
        (6, -1, True),
    ):
        assert below(wheel_heartbeat(applied, top_slot=top_slot)) is is_below
        assert below(wheel_heartbeat(0), wheel_heartbeat(applied, top_slot=top_slot)) is is_below
    # Rows with a hole among them do not show every slot; lost frames do not matter.
    hole = wheel_heartbeat(5, top_slot=99, missing=(3,))
    assert not below(hole)
    assert below(hole, state=replace(MEMBERS, lost=FrameSet.of({(A1, 3)})))
    # A node that still has files of it above the floor holds the floor, even as no member.
    whole = wheel_heartbeat(5, top_slot=99)
    for partly in (wheel_heartbeat(3, top_slot=100), wheel_heartbeat(9, top_slot=100)):
        assert not below(whole, partly)
        assert not below(whole, wheel_heartbeat(0), partly)
    # Only members hold it all.
    assert not below(wheel_heartbeat(0), wheel_heartbeat(0), whole)


def test_wholly_below_when_there_is_nothing_or_nobody_left() -> None:
    empty = replace(MEMBERS, wheels={A1: wheel_record_of("a", "b", closed_at=0)})
    assert wholly_below(A1, empty, 100, {})
    assert not wholly_below(
        A1, empty, 100, {"a": heartbeat(wheels={A1: wheel_heartbeat(1, top_slot=100)})}
    )
    assert not wholly_below(A1, MEMBERS, 100, {})


def test_wholly_below_when_every_member_was_replaced() -> None:
    replaced = replace(MEMBERS, nodes={node: NodeRecord("disk-new", 9) for node in "ab"})
    nothing = heartbeat("a", storage="disk-new")
    assert not wholly_below(A1, replaced, 100, {"a": nothing})
    # A node with copies of it by now holds it for every node.
    for applied, is_below in ((5, True), (4, False)):
        copy = heartbeat(
            "a", storage="disk-new", wheels={A1: wheel_heartbeat(applied, top_slot=99)}
        )
        assert wholly_below(A1, replaced, 100, {"a": copy}) is is_below
    # None has: each frame has to be reported as lost first.
    for last, is_below in ((5, True), (4, False)):
        reported = replace(replaced, lost=FrameSet.of((A1, seq) for seq in range(1, last + 1)))
        assert wholly_below(A1, reported, 100, {"a": nothing}) is is_below
