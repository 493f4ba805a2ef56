"""Group commit on a simulated disk: who is acknowledged, and when."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from delaywheel.columns import Columns
from delaywheel.format import Frame, Kind
from delaywheel.identity import WheelId
from delaywheel.reader import WheelReader
from delaywheel.reasons import Reason
from delaywheel.slotfiles import HandleCache
from delaywheel.wheel import FramePlace, OriginWheel, WheelMeta
from delaywheel_replica.core.origin import opened
from delaywheel_replica.server.committer import Committed, Committer
from delaywheel_replica.server.refusals import RefusedError
from sim.disk import Fault, SimulatedDisk
from support.messages import BASE_SLOT, Message, columns_of, message, messages_of

DATA = Path("/data")
NOW_MS = BASE_SLOT * 1000
WHEEL = WheelId("n1", 1)


class Books:
    """Remembers what was entered."""

    def __init__(self) -> None:
        self.entered: list[tuple[int, int, int]] = []

    def enter(
        self,
        wheel: WheelId,
        columns: Columns | None,
        places: Sequence[FramePlace],
        accepted_at_ms: int,
    ) -> None:
        del wheel, accepted_at_ms
        messages = 0 if columns is None else sum(place.messages for place in places)
        self.entered.append((places[0].seq, places[-1].seq, messages))


class Bench:
    """A committer with one wheel on a simulated disk."""

    def __init__(self, *, sync_groups: bool = False) -> None:
        self.disk = SimulatedDisk()
        self.disk.make_folder(DATA)
        self.books = Books()
        self.held: list[tuple[int, int]] = []
        self.broken: list[WheelId] = []
        self.committer = Committer(
            loop=asyncio.get_running_loop(),
            books=self.books,
            sync_groups=sync_groups,
            clock_ms=lambda: NOW_MS,
            on_held=self._on_held,
            on_broken=lambda wheel, _: self.broken.append(wheel),
        )

    def open(self, *, min_insync: int = 1, seal_slot: int = 0) -> OriginWheel:
        meta = WheelMeta(WHEEL, {"n1": "s"}, min_insync, 7200)
        wheel = OriginWheel.create(self.disk, DATA, meta, HandleCache(self.disk, 8))
        origin = opened(
            "n1", members=["n1"], min_insync=min_insync, in_sync=(), seal_slot=seal_slot
        )
        self.committer.use(wheel, origin)
        return wheel

    async def produce(self, *messages: Message, kind: Kind = Kind.MESSAGES) -> Committed:
        return await self.committer.submit(columns_of(list(messages)), kind)

    def stored(self) -> list[Message]:
        reader = WheelReader(self.disk, DATA, WHEEL)
        messages = []
        for seq in range(1, reader.last_seq() + 1):
            frame = reader.frame(seq)
            assert isinstance(frame, Frame)
            if frame.kind is Kind.MESSAGES:
                messages += messages_of(frame.columns)
        return messages

    def _on_held(self, least_due_ms: int) -> None:
        line = self.committer.line
        assert line is not None
        self.held.append((line.origin.high_watermark, least_due_ms))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    bench.committer.start()
    yield bench
    bench.committer.end()
    await asyncio.to_thread(bench.committer.join)


async def test_a_message_is_acknowledged_once_its_frame_can_be_read(bench: Bench) -> None:
    bench.open()
    committed = await bench.produce(message(1), message(2))
    assert (committed.wheel, committed.seq, committed.failed) == (WHEEL, 1, {})
    assert bench.stored() == [message(1), message(2)]
    assert bench.held == [(1, message(1).due_ms)]
    assert bench.books.entered == [(1, 1, 2)]


class _Gate:
    """Holds back every write to slot files until it is opened."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self._open = disk.open
        disk.open = self.open  # type: ignore[method-assign, assignment]

    def open(self, path: Path, *, create: bool = False) -> object:
        if path.suffix == ".slot":
            self.reached.set()
            assert self.opened.wait(20)
        return self._open(path, create=create)


async def test_nothing_is_acknowledged_before_it_is_written(bench: Bench) -> None:
    bench.open()
    gate = _Gate(bench.disk)
    first = asyncio.ensure_future(bench.produce(message(1)))
    await asyncio.to_thread(gate.reached.wait, 20)
    assert not first.done()
    # What arrives meanwhile is the next group, as a whole.
    others = [asyncio.ensure_future(bench.produce(message(number))) for number in (2, 3, 4)]
    await asyncio.sleep(0)
    gate.opened.set()
    assert (await first).seq == 1
    assert {(await other).seq for other in others} == {2}
    assert bench.stored() == [message(number) for number in (1, 2, 3, 4)]


async def test_with_flush_group_only_what_the_medium_holds_is_acknowledged() -> None:
    bench = Bench(sync_groups=True)
    bench.committer.start()
    wheel = bench.open()
    await bench.produce(message(1))
    bench.disk.faults.append(Fault("sync"))
    committed = await bench.produce(message(2))
    assert committed.failed[0].reason is Reason.WHEEL_LOST
    assert wheel.broken
    assert bench.broken == [WHEEL]
    assert [high for high, _ in bench.held] == [1]
    bench.committer.end()
    await asyncio.to_thread(bench.committer.join)


async def test_without_a_wheel_nothing_is_accepted(bench: Bench) -> None:
    with pytest.raises(RefusedError, match="NO_WHEEL"):
        await bench.produce(message(1))
    bench.open()
    bench.committer.finish()
    with pytest.raises(RefusedError, match="NO_WHEEL"):
        await bench.produce(message(1))
    bench.committer.drop()
    assert bench.committer.line is None


async def test_with_too_few_members_in_sync_nothing_is_written(bench: Bench) -> None:
    wheel = bench.open(min_insync=2)
    with pytest.raises(RefusedError, match="NOT_ENOUGH_REPLICAS"):
        await bench.produce(message(1))
    assert wheel.last_seq == 0


async def test_a_sealed_second_takes_no_more(bench: Bench) -> None:
    bench.open(seal_slot=BASE_SLOT)
    early, due = message(1, slot=BASE_SLOT - 1), message(2)
    committed = await bench.produce(early, due)
    assert {row: refusal.reason for row, refusal in committed.failed.items()} == {
        0: Reason.DUE_TOO_OLD
    }
    assert bench.stored() == [due]


async def test_a_seal_asked_for_within_a_group_is_given_behind_it(bench: Bench) -> None:
    """Else it would rest under load, and the floor with it."""
    bench.open()
    enter = bench.books.enter

    def ask_and_enter(*arguments: Any) -> None:
        bench.committer.seal(leader_clock_ms=NOW_MS, late_window_s=120)
        enter(*arguments)

    bench.books.enter = ask_and_enter  # type: ignore[assignment]  # called within the group
    await bench.produce(message(1))
    line = bench.committer.line
    assert line is not None
    assert (line.origin.seal.slot, line.origin.seal.seq) == (BASE_SLOT - 120, 1)


async def test_the_seal_moves_with_the_lesser_clock_and_never_back(bench: Bench) -> None:
    bench.open()

    def sealed(leader_clock_ms: int | None) -> tuple[int, int]:
        bench.committer.seal(leader_clock_ms=leader_clock_ms, late_window_s=120)
        line = bench.committer.line
        assert line is not None
        return line.origin.seal.slot, line.origin.seal.seq

    await bench.produce(message(1))
    assert sealed(None) == (0, 0)
    assert sealed(NOW_MS - 5_000) == (BASE_SLOT - 125, 1)
    await bench.produce(message(2))
    assert sealed(NOW_MS - 9_000) == (BASE_SLOT - 125, 1)
    assert sealed(NOW_MS + 9_000) == (BASE_SLOT - 120, 2)


async def test_messages_and_cancels_are_frames_of_their_own(bench: Bench) -> None:
    bench.open()
    gate = _Gate(bench.disk)
    first = asyncio.ensure_future(bench.produce(message(1)))
    await asyncio.to_thread(gate.reached.wait, 20)
    cancel = asyncio.ensure_future(bench.produce(message(1), kind=Kind.CANCELS))
    second = asyncio.ensure_future(bench.produce(message(2)))
    await asyncio.sleep(0)
    gate.opened.set()
    await first
    assert ((await second).seq, (await cancel).seq) == (2, 3)
    assert bench.stored() == [message(1), message(2)]
    assert bench.books.entered == [(1, 1, 1), (2, 2, 1), (3, 3, 0)]


async def test_when_the_medium_fails_only_what_is_known_to_count_is_acknowledged(
    bench: Bench,
) -> None:
    wheel = bench.open()
    bench.disk.faults.append(Fault("write", errno.EIO, f"{BASE_SLOT + 1}.slot"))
    messages = [message(number, slot=BASE_SLOT + number % 3) for number in range(6)]
    committed = await bench.produce(*messages)
    # The frame of the first second was written before the failure, and its row after it.
    assert {row for row, _ in committed.failed.items()} == {1, 2, 4, 5}
    assert {refusal.reason for refusal in committed.failed.values()} == {Reason.WHEEL_LOST}
    assert bench.stored() == [messages[0], messages[3]]
    assert bench.held == [(1, messages[0].due_ms)]
    assert bench.broken == [WHEEL]
    assert wheel.broken
    with pytest.raises(RefusedError, match="NO_WHEEL"):
        await bench.produce(message(1))


async def test_a_full_second_refuses_its_messages_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = bench.open()
    monkeypatch.setattr(wheel._slots, "_limit_bytes", 4_000)
    big = [message(number, value=bytes(800)) for number in range(2)]
    for _ in range(2):
        await bench.produce(*big)
    other = message(9, slot=BASE_SLOT + 1)
    committed = await bench.produce(message(7, value=bytes(800)), other)
    assert {row: refusal.reason for row, refusal in committed.failed.items()} == {
        0: Reason.SLOT_FULL
    }
    assert bench.stored()[-1] == other


async def test_whoever_gave_up_waiting_harms_nobody(bench: Bench) -> None:
    bench.open()
    gate = _Gate(bench.disk)
    gone = bench.committer.submit(columns_of([message(1)]))
    stays = bench.committer.submit(columns_of([message(2)]))
    gone.cancel()
    gate.opened.set()
    assert (await stays).failed == {}
    assert bench.stored() == [message(1), message(2)]


async def test_all_that_was_submitted_is_answered_before_the_end() -> None:
    bench = Bench()
    bench.open()
    answers = [bench.committer.submit(columns_of([message(number)])) for number in range(50)]
    bench.committer.start()
    bench.committer.end()
    await asyncio.to_thread(bench.committer.join)
    assert [(await answer).failed for answer in answers] == [{}] * 50
    assert bench.stored() == [message(number) for number in range(50)]
    with pytest.raises(RefusedError, match="DRAINING"):
        await bench.produce(message(1))
