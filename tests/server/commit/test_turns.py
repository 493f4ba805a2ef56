"""The store's thread never holds up callers for long, though each file takes 50 ms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from delaywheel.identity import WheelId
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.wheel_folder import WheelMeta, list_wheels
from delaywheel.storage.folder import layout
from delaywheel.storage.frames.bundle import FrameBundle
from delaywheel.storage.recovery.verify import verify_wheel
from delaywheel.storage.writing.wheel import OriginWheel
from delaywheel_replica.core.node.events import (
    CloseWheel,
    DeleteWheel,
    Failed,
    Mirror,
    Mirrored,
    Repair,
    Serve,
    Sweep,
    WheelDeleted,
)
from delaywheel_replica.core.protocol.messages import Frames, Gossip, WheelCard
from sim.machine.disk import Fault, SimulatedDisk
from support.core.member_talk import heartbeat_of
from support.server.driven import DATA, NOW_MS, Asked, Driven
from support.wheels.copies import bundled, copies_of
from support.wheels.messages import BASE_SLOT, columns_of, message

FILE_MS = 50
HELD_MS = 100
ONE, OTHER = WheelId("n1", 1), WheelId("n2", 1)
SECONDS = 40


class SlowDisk(SimulatedDisk):
    """Opening, syncing or deleting a file takes its time; meanwhile other nodes may act."""

    def __init__(self) -> None:
        super().__init__()
        self.node: Driven | None = None
        self.meanwhile: Callable[[], None] | None = None

    def _fail_if_due(self, operation: str, path: Path) -> Fault | None:
        if self.node is not None and operation in {"open", "sync", "delete"}:
            self.node.clock_ms += FILE_MS
            if self.meanwhile is not None:
                self.meanwhile()
        return super()._fail_if_due(operation, path)


class Callers:
    """At every third operation of the disk a caller comes, with a message for the same second.

    So his group costs one open at most; all else that he waits for is others' work.
    """

    def __init__(self, node: Driven, disk: SlowDisk, wheel: str) -> None:
        self.node = node
        self.wheel = wheel
        self.operations = 0
        self.asked: list[tuple[int, Asked]] = []
        self.held_ms: list[int] = []
        node.ask(message(0, slot=BASE_SLOT + 500))
        node.driver._write_group()  # its file is there, and open, from now on
        disk.meanwhile = self.come

    def come(self) -> None:
        """Callers answered meanwhile are noted."""
        self.operations += 1
        self.look()
        if self.operations % 3 == 0:
            asked = self.node.ask(message(self.operations, slot=BASE_SLOT + 500))
            self.asked.append((self.node.clock_ms, asked))

    def look(self) -> None:
        """How long the answered callers waited."""
        done = [each for each in self.asked if each[1].outcome is not None]
        self.asked = [each for each in self.asked if each[1].outcome is None]
        assert all(each.said == self.wheel for _, each in done)
        self.held_ms += [self.node.clock_ms - asked_ms for asked_ms, _ in done]


@pytest.fixture
def disk() -> SlowDisk:
    return SlowDisk()


def alone(disk: SlowDisk) -> Driven:
    """A node with a wheel open, a spare, and messages of many seconds."""
    node = Driven(disk)
    node.hear(w1=None)
    node.hear(w1=None, w2=None)
    return node


def frames_of(node: Driven, number: int = 1) -> tuple[WheelCard, Frames]:
    """A frame of another node's wheel, of which this node is to have a copy."""
    wheel = WheelId(OTHER.node, number)
    card = WheelCard(wheel, {"n1": node.state.storage, "n2": "s2"}, 1, 7200)
    elsewhere = SimulatedDisk()
    meta = WheelMeta(wheel, card.members, 1, 7200)
    messages = [message(number, slot=BASE_SLOT + number) for number in range(SECONDS)]
    OriginWheel.create(elsewhere, DATA, meta, HandleCache(elsewhere, 64)).append(
        columns_of(messages), accepted_at_ms=NOW_MS
    )
    return card, Frames(card, bundled(copies_of(elsewhere, DATA, wheel)))


def with_copy(disk: SlowDisk) -> Driven:
    """One of two nodes, with a wheel that only it must hold, and a copy of the other's."""
    node = Driven(disk, nodes=("n1", "n2"))
    node.hear(w1=None)
    node.driver.received("n2", Gossip(heartbeat_of("n2", wall_ms=NOW_MS)))
    node.work()
    node.hear(w1=None)
    node.driver.received("n2", frames_of(node)[1])
    node.work()
    assert node.row.heartbeat.wheels[OTHER].applied == SECONDS
    return node


def slowly(node: Driven, disk: SlowDisk, wheel: str = "n1.1") -> Callers:
    """Makes the disk slow from now on, and lets callers come."""
    callers = Callers(node, disk, wheel)
    disk.node = node
    return callers


def assert_not_held(node: Driven, callers: Callers, *, held_ms: int = HELD_MS) -> None:
    """No caller has waited longer than allowed, beside its own group's work."""
    node.work()
    callers.look()
    assert len(callers.held_ms) > SECONDS // 4
    assert max(callers.held_ms) <= held_ms + FILE_MS


def test_a_sweep_of_many_seconds_holds_up_nobody(disk: SlowDisk) -> None:
    node = alone(disk)
    node.produce(*(message(number, slot=BASE_SLOT + number) for number in range(SECONDS)))
    callers = slowly(node, disk)
    node.hear(floor=BASE_SLOT + SECONDS, w1=None, w2=None)
    assert_not_held(node, callers)
    assert slots(node, ONE) == [BASE_SLOT + 500]


def test_verifying_wheels_holds_up_nobody(disk: SlowDisk) -> None:
    node = with_copy(disk)
    node.hear(w1=None, w2=None)
    node.store.release()
    disk.restart()
    node = Driven(disk, boot="after a crash", nodes=("n1", "n2"), verifies=False)
    node.driver.tick()
    while node.store.wheel is None:
        node.driver.do(node.jobs.popleft())
    assert node.row.heartbeat.verifying == {ONE, OTHER}, (
        "messages are taken before old wheels are known"
    )
    callers = slowly(node, disk, "n1.2")
    assert_not_held(node, callers)
    assert node.row.heartbeat.wheels[OTHER].applied == SECONDS


def test_deleting_a_wheel_holds_up_nobody(disk: SlowDisk) -> None:
    node = with_copy(disk)
    callers = slowly(node, disk)
    node.driver._queue([DeleteWheel(OTHER)])
    assert_not_held(node, callers)
    assert WheelDeleted(OTHER) in node.events
    assert OTHER not in list_wheels(disk, DATA)


def test_mirroring_what_was_fetched_holds_up_nobody(disk: SlowDisk) -> None:
    node = with_copy(disk)
    card, frames = frames_of(node, number=2)
    node.store.mirror(card, frames.frames.part(0, 1))
    callers = slowly(node, disk)
    node.driver._queue([Mirror(card, frames.frames)])
    assert_not_held(node, callers)
    (mirrored,) = [event for event in node.events if isinstance(event, Mirrored)][1:]
    assert mirrored.held.applied == SECONDS


def test_the_first_frame_of_a_new_copy_holds_up_nobody(disk: SlowDisk) -> None:
    node = with_copy(disk)
    callers = slowly(node, disk)
    for number in range(2, 12):
        card, frames = frames_of(node, number)
        node.driver._queue([Mirror(card, frames.frames.part(0, 1))])
    # So many files were opened meanwhile that his own, and its folder, were closed.
    assert_not_held(node, callers, held_ms=HELD_MS + FILE_MS)
    assert all(node.store.held(WheelId("n2", number)).applied == 1 for number in range(2, 12))


def test_repairing_holds_up_nobody(disk: SlowDisk) -> None:
    node = with_copy(disk)
    card, frames = frames_of(node)
    for slot in slots(node, OTHER):
        disk.flip_bit(layout.slot_path(layout.wheel_folder(DATA, OTHER), slot), 300)
    callers = slowly(node, disk)
    node.driver._queue([Repair(card, frames.frames)])
    assert_not_held(node, callers)
    assert list(verify_wheel(disk, DATA, OTHER)) == []


def test_cutting_a_wheel_holds_up_nobody(disk: SlowDisk) -> None:
    node = with_copy(disk)
    callers = slowly(node, disk)
    node.driver._queue([CloseWheel(OTHER, 1)])
    assert_not_held(node, callers)
    assert slots(node, OTHER) == [BASE_SLOT]


@pytest.mark.parametrize("request_number", [0, 7])
def test_serving_holds_up_nobody(disk: SlowDisk, request_number: int) -> None:
    node = with_copy(disk)
    callers = slowly(node, disk)
    node.sent.clear()
    first_seq = 1
    while first_seq <= SECONDS:
        node.driver._queue([Serve("n2", OTHER, first_seq, SECONDS, request_number)])
        node.work()
        sent = [reported for _, reported in node.sent if isinstance(reported, Frames)]
        assert sent[-1].frames.last_seq >= first_seq
        first_seq = sent[-1].frames.last_seq + 1
    bundle = FrameBundle.joined([reported.frames for reported in sent])
    assert bundle.seqs.tolist() == list(range(1, SECONDS + 1))
    assert_not_held(node, callers)


def test_many_short_jobs_hold_up_nobody(disk: SlowDisk) -> None:
    node = with_copy(disk)
    callers = slowly(node, disk)
    for seq in range(1, SECONDS + 1):
        node.driver._queue([Serve("n2", OTHER, seq, seq, 0)])
    node.work()
    assert_not_held(node, callers)


def test_one_wheel_that_cannot_be_swept_keeps_no_other_from_it(disk: SlowDisk) -> None:
    node = with_copy(disk)
    node.produce(message(1), message(2, slot=BASE_SLOT + 1))
    disk.faults.append(Fault("read", path_part=f"{OTHER}/slots"))
    sweep = Sweep(BASE_SLOT + 1)
    node.driver._queue([sweep])
    node.work()
    assert [event for event in node.events if isinstance(event, Failed)] == [
        Failed(sweep, node.events[-1].cause)  # type: ignore[union-attr]
    ]
    assert slots(node, ONE) == [BASE_SLOT + 1]


def test_a_later_sweep_takes_the_place_of_one_that_has_not_begun(disk: SlowDisk) -> None:
    node = alone(disk)
    node.produce(*(message(number, slot=BASE_SLOT + number) for number in range(5)))
    disk.node = node
    for ahead in (2, 3, 4):
        node.driver._queue([Sweep(BASE_SLOT + ahead)])
    for _ in range(3):
        node.driver.do(node.jobs.popleft())
    assert node.driver.floor == BASE_SLOT + 4, "reported at once"
    assert len(node.jobs) == 1
    node.work()
    assert slots(node, ONE) == [BASE_SLOT + 4]


def slots(node: Driven, wheel: WheelId) -> list[int]:
    folder = DATA / "wheels" / str(wheel)
    paths = [
        path for path in node.disk.paths() if path.suffix == ".slot" and folder in path.parents
    ]
    return sorted(int(path.stem) for path in paths)
