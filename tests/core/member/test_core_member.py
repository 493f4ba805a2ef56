"""The member machine: own wheels, callers, seals, heartbeats; alone, or among silent nodes."""

from dataclasses import replace

import pytest

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.folder.node_state import NodeState, Spare
from delaywheel_replica.core.member.member import (
    SWEEP_AFTER_FAILURE_MS,
    SWEEP_EVERY_MS,
    Admitted,
    MemberRefusal,
)
from delaywheel_replica.core.node.events import (
    Acknowledge,
    Broken,
    CleanerReported,
    CloseWheel,
    DeleteWheel,
    Drain,
    Effect,
    ForgetLost,
    LeaveWheel,
    MemberConfig,
    Published,
    Save,
    Sweep,
    Unreadable,
    Written,
)
from delaywheel_replica.core.protocol.control import WheelRecord
from delaywheel_replica.core.protocol.frames import FrameSet
from delaywheel_replica.core.protocol.heartbeat import Fence
from delaywheel_replica.core.protocol.messages import Applied, Gossip
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.status_files import Role
from delaywheel_replica.core.wheels.inventory import READ_AGAIN_MS
from delaywheel_replica.core.wheels.mirrors import AHEAD_SECONDS
from delaywheel_replica.core.wheels.verifying import AGAIN_MS
from support.core.member_talk import meet
from support.core.member_world import (
    WALL_MS,
    FakeNode,
    FakeStore,
    disk_of,
    held_of,
    record_of,
    state_of,
)
from support.core.values import heartbeat as plain_beat
from support.core.values import missing_members

A1, A2, A3 = (WheelId("a", number) for number in (1, 2, 3))
SLOT = WALL_MS // 1000
SPAN_S = MemberConfig("a", ("a",), 1, 120).span_seconds


def alone(*, opened: bool = True) -> FakeNode:
    """A cluster of one, with an open wheel and a spare unless stated otherwise."""
    node = FakeNode("a", "a")
    if opened:
        node.cleaner_reports(
            node.cleaner({A1: record_of("a"), A2: record_of("a")}, role=Role.LEADING)
        )
        node.tick()
    return node


def admitted(node: FakeNode, wheel: WheelId, *, seal_slot: int) -> bool:
    """Whether a group may be written, to this wheel and from this slot on."""
    last_slot = node.wall_ms // 1000 + SPAN_S + AHEAD_SECONDS // 2
    return node.machine.admit(node.now_ms) == Admitted(wheel, seal_slot, last_slot)


def kinds(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects]


# --- adopting and opening


def test_no_second_save_before_the_first_is_answered() -> None:
    node = alone(opened=False)
    effects = node.machine.step(_reported(node, {A1: record_of("a")}))
    assert kinds(effects).count(Save) == 1
    assert Save not in kinds(
        node.machine.step(_reported(node, {A1: record_of("a"), A2: record_of("a")}))
    )


def test_a_failed_save_of_the_name_is_tried_again_and_the_spare_stays_named() -> None:
    node = FakeNode("a", "a", store=FakeStore(_with_spare(A1)))
    node.store.refuses = {Save}
    node.tick()
    heartbeat = node.status().heartbeat
    assert (heartbeat.open, heartbeat.spare) == (None, A1)
    node.store.refuses = set()
    node.tick()
    heartbeat = node.status().heartbeat
    assert (heartbeat.open, heartbeat.spare) == (A1, None)


def test_a_registry_that_was_not_read_to_an_end_is_not_believed() -> None:
    node = alone(opened=False)
    node.cleaner_reports(node.cleaner({A1: record_of("a")}, control_offset=-1))
    assert node.store.state.spare is None


def test_a_row_of_another_boot_is_not_believed() -> None:
    node = alone(opened=False)
    node.cleaner_reports(replace(node.cleaner({A1: record_of("a")}), boot="another"))
    assert node.store.state.spare is None


def test_a_spare_that_is_closed_is_dropped_and_a_missing_one_only_when_a_later_is_there() -> None:
    node = alone()
    assert node.store.state.spare is not None
    node.cleaner_reports(node.cleaner({A1: record_of("a")}))
    assert node.store.state.spare is not None
    node.cleaner_reports(node.cleaner({A1: record_of("a"), A3: record_of("a")}))
    spare = node.store.state.spare
    assert spare is not None
    assert spare.wheel == A3
    node.cleaner_reports(node.cleaner({A1: record_of("a"), A3: record_of("a", closed_at=0)}))
    assert node.store.state.spare is None


def test_the_open_wheel_is_left_when_it_is_closed() -> None:
    node = alone()
    node.write()
    effects = node.cleaner_reports(
        node.cleaner({A1: record_of("a", closed_at=1), A2: record_of("a")})
    )
    assert kinds(effects).count(LeaveWheel) == 1
    assert node.status().heartbeat.open == A2
    assert CloseWheel(A1, 1) in node.tick()


def test_a_leave_that_failed_is_asked_for_again_and_nothing_is_let_in_meanwhile() -> None:
    node = alone()
    node.store.refuses = {LeaveWheel}
    node.step(Broken(A1, "no space"))
    assert node.machine.refusal(node.now_ms) is MemberRefusal.NO_WHEEL
    assert node.status().heartbeat.open is None
    node.store.refuses = set()
    node.tick()
    assert node.status().heartbeat.open == A2


# --- callers


def test_nothing_is_acknowledged_of_a_wheel_that_is_being_left() -> None:
    node = alone()
    node.store.refuses = {LeaveWheel}
    node.step(Broken(A1, "no space"))
    node.store.append(1)
    effects = node.machine.step(_written(node, A1, 1))
    assert Acknowledge not in kinds(effects)


def test_draining_waits_for_what_is_not_acknowledged_but_not_for_ever() -> None:
    node = FakeNode("a", "ab", store=FakeStore(_with_spare(A1, "ab")))
    meet(node)
    node.tick()
    node.store.append(1)
    node.step(_written(node, A1, 1))
    node.step(Drain())
    assert node.status().heartbeat.open == A1
    for _ in range(11):
        node.tick()
    assert node.status().heartbeat.open is None


# --- seals


def test_the_open_wheel_seals_by_the_leaders_clock_and_rests_without_one() -> None:
    node = alone()
    node.write(2)
    node.tick(1_000)
    wheels = {A1: record_of("a"), A2: record_of("a")}
    node.cleaner_reports(node.cleaner(wheels, role=Role.LEADING))
    node.tick()
    wheel = node.status().heartbeat.wheels[A1]
    assert (wheel.seal_slot, wheel.seal_seq) == (node.wall_ms // 1000 - 120, 2)
    sealed = wheel.seal_slot
    node.cleaner_reports(None)
    node.tick(5_000)
    assert node.status().heartbeat.wheels[A1].seal_slot == sealed
    assert admitted(node, A1, seal_slot=sealed)


def test_a_spares_seal_is_saved_once_a_second_also_when_that_fails() -> None:
    node = alone()
    wheels = {A1: record_of("a"), A2: record_of("a")}
    node.store.refuses = {Save}
    saves = 0
    for _ in range(20):
        node.cleaner_reports(node.cleaner(wheels, role=Role.LEADING))
        saves += kinds(node.tick()).count(Save)
    assert saves == 2


def test_a_wheel_opens_with_the_seal_that_it_reported_as_a_spare() -> None:
    spare = Spare(A1, SLOT + 500, {"a": disk_of("a")}, 1)
    node = FakeNode("a", "a", store=FakeStore(state_of("a", last_number=1, spare=spare)))
    node.tick()
    assert admitted(node, A1, seal_slot=SLOT + 500)


# --- the own leader's fences


def test_a_fence_of_own_wheels_uses_up_their_numbers_and_drops_the_spare() -> None:
    node = alone()
    wheels = {A1: record_of("a"), A2: record_of("a"), A3: record_of("a")}
    node.cleaner_reports(node.cleaner(wheels, role=Role.LEADING, fences=(Fence("a", 3),)))
    state = node.store.state
    assert (state.open, state.spare, state.last_number) == (None, None, 3)
    assert state.fenced == {"a": 3}
    a4 = WheelId("a", 4)
    node.cleaner_reports(node.cleaner({**wheels, a4: record_of("a")}, role=Role.LEADING))
    assert node.status().heartbeat.open == a4


def test_no_answer_is_reported_out_of_term() -> None:
    node = alone()
    node.cleaner_reports(node.cleaner(role=Role.LEADING, fences=(Fence("b", 3),)))
    assert len(node.status().answers) == 1
    node.cleaner_reports(node.cleaner(role=Role.STANDBY))
    assert node.status().answers == ()


# --- looking after wheels


def test_a_closed_wheel_is_cut_once() -> None:
    node = FakeNode("a", "a", store=_holding(held=5))
    wheels = {A1: record_of("a", closed_at=3)}
    node.cleaner_reports(node.cleaner(wheels))
    assert CloseWheel(A1, 3) in node.tick()
    assert node.status().heartbeat.wheels[A1].applied == 3
    assert CloseWheel not in kinds(node.tick())


@pytest.mark.parametrize("kind", [CloseWheel, DeleteWheel])
def test_a_wheel_that_cannot_be_ended_is_tried_again_after_a_rest(kind: type[Effect]) -> None:
    node = FakeNode("a", "a", store=_holding(held=5))
    node.store.refuses.add(kind)
    closed = {A1: record_of("a", closed_at=3)} if kind is CloseWheel else {A2: record_of("a")}
    node.cleaner_reports(node.cleaner(closed))
    tried = [kinds(node.tick(1_000)).count(kind) for _ in range(2 * AGAIN_MS // 1_000)]
    assert sum(tried) == 2
    node.store.refuses.clear()
    assert kind in [each for _ in range(AGAIN_MS // 1_000) for each in kinds(node.tick(1_000))]


@pytest.mark.parametrize(("held", "floor", "goes"), [(5, 0, False), (5, 1, True), (0, 9, False)])
def test_a_wheel_that_may_not_be_registered_yet_goes_only_when_it_lies_below_the_floor(
    held: int, floor: int, *, goes: bool
) -> None:
    node = FakeNode("a", "a", store=_holding(held=held))
    node.tick()
    node.cleaner_reports(node.cleaner({}, floor=floor))
    assert (DeleteWheel(A1) in node.tick()) is goes


def test_what_lies_below_the_floor_is_swept_when_it_moves_and_again_after_a_failure() -> None:
    node = alone()
    node.cleaner_reports(node.cleaner({}, floor=9))
    assert Sweep(9) in node.tick()
    assert Sweep not in kinds(node.tick())
    node.cleaner_reports(node.cleaner({}, floor=10))
    node.store.refuses = {Sweep}
    node.tick()
    node.store.refuses = set()
    assert Sweep not in kinds(node.tick()), "the medium is given time"
    node.tick(SWEEP_AFTER_FAILURE_MS)
    assert Sweep(10) in node.done
    node.tick(SWEEP_EVERY_MS)
    assert Sweep(10) in node.done, "also what could not be deleted"
    assert node.status().heartbeat.floor == 10


def test_progress_that_was_read_is_still_reported_though_the_topic_lost_it() -> None:
    node = alone(opened=False)
    assert node.status().heartbeat.reached is None
    first = Progress(1_000, Position(A1, 2, 1), floor=9)
    newest = replace(first, due_ms=900, position=None, set_backs=1)
    for reported in (first, newest, replace(newest, due_ms=800), first, replace(first, floor=10)):
        node.cleaner_reports(replace(node.cleaner({}), progress=reported))
    assert node.status().heartbeat.reached == newest.reached
    assert node.status().heartbeat.floor == 10


def test_lost_frames_are_not_missing_and_the_store_is_informed() -> None:
    node = FakeNode("a", "a", store=_holding(held=3))
    node.store.damaged.add((A1, 2))
    node.step(Unreadable(A1, SeqSet.of([2])))
    assert node.status().heartbeat.wheels[A1].missing == SeqSet.of([2])
    assert missing_members(node.status()) == {(A1, 2): "a"}
    node.cleaner_reports(node.cleaner({A1: record_of("a")}, lost=FrameSet.of({(A1, 2)})))
    assert ForgetLost(FrameSet.of([(A1, 2)])) in node.tick()
    assert node.status().heartbeat.wheels[A1].missing == NO_SEQS
    assert missing_members(node.status()) == {}


def test_what_a_leader_cannot_read_is_missing_here_until_a_leader_takes_it_back() -> None:
    node = FakeNode("a", "a", store=_holding(held=3))
    wheels = {A1: record_of("a")}
    bad = FrameSet.of({(A1, 2), (A1, 7)})
    node.cleaner_reports(node.cleaner(wheels, role=Role.RESTING, unreadable=bad))
    assert node.status().heartbeat.wheels[A1].missing == SeqSet.of([2])
    assert missing_members(node.status()) == {(A1, 2): "a", (A1, 7): "a"}
    node.cleaner_reports(node.cleaner(wheels, role=Role.STANDBY))
    assert node.status().heartbeat.wheels[A1].missing == SeqSet.of([2])
    node.cleaner_reports(node.cleaner(wheels, role=Role.RESTING))
    assert node.status().heartbeat.wheels[A1].missing == SeqSet.of([2])
    node.tick(READ_AGAIN_MS)
    node.cleaner_reports(node.cleaner(wheels, role=Role.STANDBY))
    assert node.status().heartbeat.wheels[A1].missing == SeqSet.of([2])
    node.cleaner_reports(node.cleaner(wheels, role=Role.RESTING))
    assert node.status().heartbeat.wheels[A1].missing == NO_SEQS


def test_an_origin_leaves_its_wheel_once_however_many_frames_cannot_be_read() -> None:
    node = alone()
    node.write(3)
    bad = FrameSet.of({(A1, 1), (A1, 3)})
    wheels = {A1: record_of("a"), A2: record_of("a")}
    effects = node.cleaner_reports(node.cleaner(wheels, role=Role.LEADING, unreadable=bad))
    assert kinds(effects).count(LeaveWheel) == 1
    assert node.status().heartbeat.open == A2
    node.tick(2_000)
    node.cleaner_reports(node.cleaner(wheels, role=Role.LEADING, unreadable=bad))
    assert node.status().heartbeat.wheels[A1].missing == SeqSet.of([1, 3])


def test_a_medium_that_returns_nothing_uses_up_no_wheels() -> None:
    """The number of a node's wheels is limited."""
    node = alone()
    wheels = {wheel: record_of("a") for wheel in (A1, A2, A3)}
    left = []
    for _ in range(30):
        node.write(1)
        open_wheel = node.status().heartbeat.open
        assert open_wheel is not None
        bad = FrameSet.of({(open_wheel, 1)})
        report = node.cleaner(wheels, role=Role.LEADING, unreadable=bad)
        left += [each for each in node.cleaner_reports(report) if isinstance(each, LeaveWheel)]
        node.tick(100)
    assert [each.wheel for each in left] == [A1, A2]


def test_what_is_acknowledged_by_the_last_tick_of_a_draining_node_is_reported() -> None:
    node = FakeNode("a", "abc", store=FakeStore(_with_spare(A1, "abc")))
    for peer in "bc":
        reported = replace(plain_beat(peer), storage=disk_of(peer), boot="boot")
        node.receive(peer, Gossip(reported))
    node.tick()
    node.write(1)
    node.receive("b", Applied(A1, disk_of("b"), "boot", 1))
    assert node.acknowledged == {}
    node.step(Drain())
    for _ in range(10):
        node.tick(101)
    assert node.acknowledged == {A1: 1}
    assert node.status().heartbeat.open is None


def test_a_published_ledger_is_reported() -> None:
    node = alone()
    node.write(2)
    node.step(Published(A1, 2))
    assert node.status().heartbeat.wheels[A1].ledger_seq == 2
    node.step(Broken(A1, "no space"))
    assert node.status().heartbeat.wheels[A1].ledger_seq == 2


# --- heartbeats


def test_a_term_is_reported_only_while_the_cleaner_lives() -> None:
    node = alone()
    node.cleaner_reports(node.cleaner(role=Role.LEADING, fences=(Fence("b", 1),), limits={A1: 2}))
    term = node.status().heartbeat.term
    assert term is not None
    assert (term.epoch, term.fences, term.limits) == (7, (Fence("b", 1),), {A1: 2})
    node.tick(1_000)
    assert node.status().heartbeat.term is None


def test_later_beats_have_a_greater_order() -> None:
    node = alone()
    first = node.status().heartbeat
    assert node.status().heartbeat.order > first.order
    node.restart()
    assert node.status().heartbeat.order > first.order


def _with_spare(wheel: WheelId, nodes: str = "a") -> NodeState:
    record = record_of(nodes)
    spare = Spare(wheel, 0, record.members, record.min_insync)
    return state_of("a", last_number=wheel.number, spare=spare)


def _holding(*, held: int) -> FakeStore:
    """A folder with an own wheel of an earlier life."""
    store = FakeStore(state_of("a", last_number=1, open=A1))
    card = held_of(A1, 0, nodes="a").card
    node = FakeNode("a", "a", store=FakeStore(_with_spare(A1)))
    node.tick()
    if held:
        node.write(held)
    store.frames, store.cards = node.store.frames, {A1: card}
    return store


def _reported(node: FakeNode, wheels: dict[WheelId, WheelRecord]) -> CleanerReported:
    return CleanerReported(node.cleaner(wheels), node.now_ms, node.wall_ms)


def _written(node: FakeNode, wheel: WheelId, seq: int) -> Written:
    return Written(wheel, seq, 0, node.now_ms)
