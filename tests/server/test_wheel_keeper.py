"""The life of a node's own wheels, step by step, on a disk that fails when told to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from delaywheel.dial import Dial
from delaywheel.identity import WheelId
from delaywheel.nodefile import NodeFolder, load_node_state, open_node_folder
from delaywheel.nodestate import NodeState, Spare
from delaywheel.slotfiles import HandleCache
from delaywheel.wheel import WheelState, list_wheels, load_meta
from delaywheel_replica.core.beat import Fence, FenceAnswer, Office
from delaywheel_replica.core.control import WheelRecord
from delaywheel_replica.core.progress import Progress
from delaywheel_replica.core.status import CleanerStatus, Role
from delaywheel_replica.server import status as status_module
from delaywheel_replica.server import wheels as wheels_module
from delaywheel_replica.server.committer import Committer
from delaywheel_replica.server.floor import Sweeper
from delaywheel_replica.server.status import HeldWheel, NodeView, monotonic_ms, wall_ms
from delaywheel_replica.server.wheels import Keeper, NodeFiles, WheelLimits, recover_all
from sim.disk import Crash, Fault, SimulatedDisk
from support.messages import columns_of, message

DATA = Path("/data")
ONE, TWO, THREE = (WheelId("n1", number) for number in (1, 2, 3))


class NoBooks:
    def enter(self, *_: object) -> None:
        """Nobody reads these books."""


class Bench:
    """A keeper whose thread is the test."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.disk = disk
        self.folder: NodeFolder = open_node_folder(
            disk, DATA, node="n1", cluster_id="c", boot_id="b"
        )
        self.view = NodeView(self.folder, "b")
        self.view.held = recover_all(disk, DATA, os_crashed=False, floor=0)
        self.committer = Committer(
            loop=asyncio.get_running_loop(),
            books=NoBooks(),
            sync_groups=False,
            clock_ms=wall_ms,
            on_held=lambda _: None,
            on_broken=lambda *_: None,
        )
        self._writes = False
        self.view.line = lambda: self.committer.line
        dial = Dial(disk, DATA, 100)
        self.keeper = Keeper(
            NodeFiles(
                disk,
                HandleCache(disk, 8),
                dial,
                Sweeper(disk, DATA, dial, open_wheel=lambda: self.committer.wheel),
            ),
            self.view,
            self.committer,
            limits=WheelLimits(7200, 120, 1000, 1 << 20),
            on_change=lambda: None,
        )

    @property
    def state(self) -> NodeState:
        state = load_node_state(self.disk, DATA)
        assert state is not None
        return state

    def hear(
        self,
        *,
        role: Role = Role.LEADING,
        floor: int = 0,
        fences: tuple[Fence, ...] = (),
        **wheels: int | None,
    ) -> None:
        """The cleaner tells a registry: number of the wheel -> T, or None while it is open."""
        members = {"n1": self.state.storage}
        self.view.cleaner.status = CleanerStatus(
            node="n1",
            boot="b",
            pid=1,
            monotonic_ms=monotonic_ms(),
            wall_ms=wall_ms(),
            role=role,
            progress=Progress(0, None, {}, floor),
            control_offset=5,
            wheels={
                WheelId("n1", int(name[1:])): WheelRecord(members, 1, 0, closed_at)
                for name, closed_at in wheels.items()
            },
            fences=fences,
        )
        self.keeper.work()

    def want(self, *fences: Fence) -> None:
        """The cleaner tells the same registry, and wants promises."""
        status = self.view.cleaner.status
        assert status is not None
        self.view.cleaner.status = replace(status, fences=fences)
        self.keeper.work()

    @property
    def answers(self) -> list[FenceAnswer]:
        """What is told of promises."""
        return list(self.view.answers.values())

    async def close(self) -> None:
        """Ends the writer's thread, if there is one."""
        if self._writes:
            self.committer.end()
            await asyncio.to_thread(self.committer.join)

    async def write(self, number: int = 1) -> str | None:
        """One message; the wheel it went to, or the reason why not."""
        if not self._writes:
            self._writes = True
            self.committer.start()
        slot = wall_ms() // 1000 + 60
        committed = await self.committer.submit(columns_of([message(number, slot=slot)]))
        return committed.failed[0].reason if committed.failed else str(committed.wheel)


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
async def bench(disk: SimulatedDisk) -> AsyncIterator[Bench]:
    bench = Bench(disk)
    yield bench
    await bench.close()


async def test_the_first_wheel_is_opened_and_the_next_one_is_the_spare(bench: Bench) -> None:
    bench.keeper.work()
    assert (bench.state.open, bench.state.spare) == (None, None)
    bench.hear(w1=None)
    assert (bench.state.open, bench.state.spare, bench.state.last_number) == (ONE, None, 1)
    bench.hear(w1=None)
    assert bench.state.last_number == 1
    bench.hear(w1=None, w2=None)
    assert bench.state.spare is not None
    assert (bench.state.open, bench.state.spare.wheel, bench.state.last_number) == (ONE, TWO, 2)
    assert await bench.write() == "n1.1"
    beat = bench.view.beat()
    assert (beat.open, beat.spare, beat.last_number) == (ONE, TWO, 2)
    assert (beat.wheels[ONE].applied, beat.wheels[TWO].applied) == (1, 0)


@pytest.mark.parametrize(
    "record",
    [
        WheelRecord({"n1": "another storage"}, 1, 0),
        WheelRecord({"n2": "s"}, 1, 0),
        WheelRecord({"n1": "mine"}, 1, 0, closed_at=0),
    ],
)
async def test_a_wheel_that_is_not_ours_to_open_is_left(bench: Bench, record: WheelRecord) -> None:
    bench.folder.save(storage="mine")
    bench.hear(w1=None)
    before = bench.state
    status = bench.view.cleaner.status
    assert status is not None
    bench.view.cleaner.status = replace(status, wheels={TWO: record})
    bench.keeper.work()
    assert bench.state.last_number == before.last_number


async def test_a_cleaner_that_is_silent_is_not_followed(bench: Bench) -> None:
    bench.hear()
    status = bench.view.cleaner.status
    assert status is not None
    old = replace(status, monotonic_ms=monotonic_ms() - 5_000)
    members = {"n1": bench.state.storage}
    bench.view.cleaner.status = replace(old, wheels={ONE: WheelRecord(members, 1, 0)})
    bench.keeper.work()
    assert bench.state.last_number == 0


async def test_a_broken_wheel_is_left_and_the_spare_opened(bench: Bench) -> None:
    bench.hear(w1=None)
    bench.hear(w1=None, w2=None)
    assert await bench.write(1) == "n1.1"
    bench.disk.faults.append(Fault("write", path_part=".slot"))
    assert await bench.write(2) == "WHEEL_LOST"
    bench.keeper.work()
    assert await bench.write(2) == "n1.2"
    assert (bench.state.open, bench.state.spare) == (TWO, None)
    assert bench.view.held == {ONE: HeldWheel(1, bench.view.held[ONE].top_slot)}
    assert bench.view.beat().wheels[ONE].applied == 1


async def test_a_promise_is_durable_before_it_is_answered(bench: Bench) -> None:
    bench.hear(w1=None)
    bench.hear(w1=None, w2=None)
    await bench.write()
    bench.disk.faults.append(Fault("write", path_part="node.json"))
    bench.want(Fence("n1", 1))
    assert (bench.answers, bench.state.fenced) == ([], {})
    bench.keeper.work()
    answer = FenceAnswer("n1", bench.state.storage, Fence("n1", 1), {ONE: 1})
    assert bench.answers == [answer]
    assert bench.state.fenced == {"n1": 1}
    assert bench.state.open == TWO
    assert load_meta(bench.disk, DATA, ONE).state is WheelState.FENCED
    assert await bench.write() == "n1.2"


async def test_what_may_be_lost_is_said_of_each_wheel_for_as_long_as_it_is_so(
    bench: Bench,
) -> None:
    bench.hear(w1=None)
    bench.hear(w1=None, w2=None)
    await bench.write()
    bench.folder.save(all_incomplete=True)
    bench.view.cleaner.status = None
    bench.keeper.work()
    bench.hear(fences=(Fence("n1", 1),), w1=None, w2=None)
    (answer,) = bench.answers
    assert not answer.is_complete(ONE)
    bench.keeper.work()
    (answer,) = bench.answers
    assert (answer.all_incomplete, answer.incomplete) == (False, frozenset({ONE}))
    bench.hear(fences=(Fence("n1", 1),), w1=1, w2=None)
    bench.keeper.work()
    (answer,) = bench.answers
    assert answer.is_complete(ONE)


async def test_the_beat_says_office_floor_and_its_place_in_the_order(bench: Bench) -> None:
    bench.folder.save(starts=4)
    assert (bench.view.beat().floor, bench.view.beat().office) == (None, None)
    bench.hear(floor=17, fences=(Fence("n9", 1),), w1=None)
    status = bench.view.cleaner.status
    assert status is not None
    bench.view.cleaner.status = status = replace(status, epoch=41, fills={TWO: 3})
    beat = bench.view.beat(9)
    assert (beat.order, beat.floor) == ((4, 9), 17)
    assert beat.office == Office(41, (Fence("n9", 1),), {TWO: 3})
    bench.view.cleaner.status = replace(status, role=Role.STANDBY)
    assert bench.view.beat().office is None
    bench.view.cleaner.status = replace(status, monotonic_ms=monotonic_ms() - 1_000)
    assert (bench.view.beat().floor, bench.view.beat().office) == (17, None)


async def test_a_fence_takes_the_spare_with_it(bench: Bench) -> None:
    bench.hear(w1=None)
    bench.hear(w1=None, w2=None)
    bench.want(Fence("n1", 2))
    assert (bench.state.open, bench.state.spare) == (None, None)
    # Nothing at or below the promise is ever taken again.
    bench.hear(w1=None, w2=None)
    assert bench.state.open is None
    bench.hear(w1=0, w2=0, w3=None)
    assert bench.state.open == THREE


async def test_a_closed_wheel_is_noted_and_deleted_once_it_is_registered_no_more(
    bench: Bench,
) -> None:
    bench.hear(w1=None)
    bench.hear(w1=None, w2=None)
    await bench.write()
    bench.want(Fence("n1", 1))
    bench.hear(w1=1, w2=None)
    assert load_meta(bench.disk, DATA, ONE).final_seq == 1
    above = bench.view.held[ONE].top_slot + 1
    bench.hear(floor=above - 1, w2=None)  # it has a slot that is not finished
    assert ONE in list_wheels(bench.disk, DATA)
    bench.hear(role=Role.STANDBY, floor=above, w2=None)  # its registry may be an old one
    assert ONE in list_wheels(bench.disk, DATA)
    bench.hear(floor=above, w2=None)
    assert list_wheels(bench.disk, DATA) == [TWO]
    assert set(bench.view.beat().wheels) == {TWO}


async def test_the_wheel_of_a_life_before_is_never_written_again(disk: SimulatedDisk) -> None:
    first = Bench(disk)
    first.hear(w1=None)
    first.hear(w1=None, w2=None)
    await first.write()
    disk.restart()
    second = Bench(disk)
    assert second.view.held[ONE].applied == 1
    second.keeper.work()
    assert (second.state.open, second.state.spare) == (TWO, None)
    assert await second.write() == "n1.2"
    assert second.view.beat().named == (TWO,)
    await first.close()
    await second.close()


async def test_no_crash_while_opening_opens_a_wheel_twice(disk: SimulatedDisk) -> None:
    """The process ends before each effect of a start, in turn; the next start finds its way."""
    bench = Bench(disk)
    for effects in range(100):
        number = bench.state.last_number + 1
        spare = Spare(WheelId("n1", number), 0, {"n1": bench.state.storage}, 1)
        bench.folder.save(open=None, spare=spare, last_number=number)
        disk.crash_after(effects)
        try:
            bench.keeper.work()
        except Crash:
            disk.restart()
            bench = Bench(disk)
            bench.keeper.work()  # raises, if it makes a wheel that was made before
            if bench.state.open is not None:
                assert await bench.write() == f"n1.{number}"
            await bench.close()
            disk.restart()
            bench = Bench(disk)
            continue
        break
    disk.crash_at_effect = None
    assert effects > 5
    assert await bench.write() == f"n1.{number}"
    await bench.close()


async def test_alone_it_lacks_what_its_cleaner_could_not_read(bench: Bench) -> None:
    bench.hear(w1=None)
    await bench.write()
    assert bench.view.lacks() == {}
    assert bench.view.cleaner.status is not None
    bad = frozenset({(ONE, 1), (ONE, 2), (TWO, 5), (TWO, 6)})
    bench.view.cleaner.status = replace(
        bench.view.cleaner.status, unreadable=bad, lost=frozenset({(TWO, 6)})
    )
    # The second frame of the open wheel was never written: it may still come.
    assert bench.view.lacks() == dict.fromkeys([(ONE, 1), (TWO, 5)], frozenset({"n1"}))


async def test_a_wheel_that_could_not_be_made_is_left(bench: Bench) -> None:
    bench.disk.faults.append(Fault("write", path_part="meta.json"))
    bench.hear(w1=None)
    assert bench.committer.line is None
    bench.hear(w1=None, w2=None)
    assert (bench.state.open, bench.state.spare) == (TWO, None)
    assert await bench.write() == "n1.2"


async def test_a_full_disk_does_not_keep_the_floor_from_freeing_it(bench: Bench) -> None:
    bench.hear(w1=None)
    bench.hear(w1=None, w2=None)
    await bench.write()
    (top_slot,) = (line.top_slot for line in [bench.committer.line] if line is not None)
    bench.disk.faults += [Fault("write", path_part="node.json") for _ in range(9)]
    bench.hear(floor=top_slot + 1, fences=(Fence("n9", 1),), w1=None, w2=None)
    folder = DATA / "wheels" / "n1.1" / "slots"
    assert [
        name for hour in disk_names(bench, folder) for name in disk_names(bench, folder / hour)
    ] == []
    assert bench.answers == []


def disk_names(bench: Bench, folder: Path) -> list[str]:
    return bench.disk.list_folder(folder)


async def test_a_draining_node_wants_no_wheel(bench: Bench) -> None:
    bench.hear(w1=None)
    bench.view.draining = True
    bench.hear(w1=None, w2=None)
    assert bench.state.last_number == 1
    assert bench.view.beat().draining


async def test_a_spares_seal_is_saved_before_it_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.hear(w1=None)
    bench.hear(w1=None, w2=None)
    now_ms = wall_ms() + 10_000
    monkeypatch.setattr(wheels_module, "wall_ms", lambda: now_ms)
    monkeypatch.setattr(status_module, "wall_ms", lambda: now_ms)
    status = bench.view.cleaner.status
    assert status is not None
    bench.view.cleaner.status = replace(status, wall_ms=now_ms)
    before = bench.view.beat().wheels[TWO].seal_slot

    def pass_a_second() -> int:
        monkeypatch.setattr(bench.keeper, "_seal_at", time.monotonic())
        bench.keeper.work()
        return bench.view.beat().wheels[TWO].seal_slot

    bench.disk.faults.append(Fault("write", path_part="node.json"))
    assert pass_a_second() == before
    assert pass_a_second() == now_ms // 1000 - 120
    assert bench.state.spare is not None
    assert bench.state.spare.seal_slot == now_ms // 1000 - 120 > before
