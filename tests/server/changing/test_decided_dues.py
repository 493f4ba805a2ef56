"""Decided reschedules are written: within a limit of bytes, and no copy twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.protocol.progress import Position
from delaywheel_replica.core.protocol.reschedules import MessageKey, Reschedule, RescheduleWritten
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role
from delaywheel_replica.server.changing.decided_dues import COPIES_BYTES, DecidedDues
from delaywheel_replica.server.node.node_view import CleanerView, monotonic_ms
from delaywheel_replica.server.node.refusals import RequestRefusedError
from support.server.views import node_view
from support.wheels.messages import BASE_SLOT, columns_of, message

OWN = WheelId("a", 1)
DUE_MS, TO_MS = BASE_SLOT * 1000, BASE_SLOT * 1000 + 60_000


def key_of(id_: bytes) -> MessageKey:
    return MessageKey(id_, DUE_MS, "orders")


@dataclass
class Site:
    """A leading node, with messages of one length, and writes that tests hold up.

    Attributes:
        length_bytes: of each message.
        reads: how many hand-overs they cost.
        copies: how many were written.
        cancels: how many were.
        groups: how many messages or cancels were written together, in order.
        held_bytes: of copies that were read and are not written.
        most_bytes: the most of that there was.
        refuses: what the writing says of a cancel.
    """

    length_bytes: int = 10
    reads: int = 0
    copies: int = 0
    cancels: int = 0
    groups: list[int] = field(default_factory=list)
    held_bytes: int = 0
    most_bytes: int = 0
    refuses: list[Exception] = field(default_factory=list)
    reported: list[RescheduleWritten] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.word = asyncio.Event()
        self._group: list[tuple[Columns, Kind, asyncio.Future[SimpleNamespace]]] = []
        self._writes: list[asyncio.Task[None]] = []
        self.cleaner = CleanerView(
            CleanerStatus("a", "boot", 1, monotonic_ms() + 60_000, 0, role=Role.LEADING)
        )

    def decide(self, count: int) -> None:
        """Gives this many messages another due."""
        assert self.cleaner.status is not None
        stand = {
            key_of(n.to_bytes(16, "big")): Reschedule(TO_MS, Position(OWN, 1 + n, 0))
            for n in range(count)
        }
        self.cleaner.status = replace(self.cleaner.status, reschedules=stand)
        self.word.set()

    async def next_change(self) -> None:
        await self.word.wait()
        self.word.clear()

    async def to_copy(
        self, places: Sequence[tuple[int, Position]], length_bytes: int
    ) -> list[Columns]:
        self.reads += 1
        fitting = max(1, length_bytes // self.length_bytes)
        self.held_bytes += self.length_bytes * len(places[:fitting])
        self.most_bytes = max(self.most_bytes, self.held_bytes)
        return [
            columns_of([message(place.seq, value=bytes(self.length_bytes))])
            for _, place in places[:fitting]
        ]

    def submit(
        self, columns: Columns, kind: Kind = Kind.MESSAGES
    ) -> asyncio.Future[SimpleNamespace]:
        """What is submitted before others run is one group, as of the real writing."""
        if not self._group:
            self._writes.append(asyncio.create_task(self._write()))
        answer = asyncio.get_running_loop().create_future()
        self._group.append((columns, kind, answer))
        return answer

    async def _write(self) -> None:
        group, self._group = self._group, []
        self.groups.append(len(group))
        await self.goes_on.wait()
        for columns, kind, answer in group:
            if kind is Kind.MESSAGES:
                self.copies += 1
                self.held_bytes -= self.length_bytes
                assert columns.due_ms.tolist() == [TO_MS]
            else:
                self.cancels += 1
                if self.refuses:
                    answer.set_exception(self.refuses.pop())
                    continue
            seq = self.copies + self.cancels
            answer.set_result(SimpleNamespace(failed={}, wheel=OWN, seq=seq))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[DecidedDues]:
        site = cast("Any", self)
        view = node_view(lambda: cast("Any", None), cleaner=self.cleaner)
        decisions = DecidedDues(
            view, site, site, report=self.reported.append, next_change=self.next_change
        )
        task = asyncio.create_task(decisions.run())
        try:
            yield decisions
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  fakes answer at once: nothing announces it
            await asyncio.sleep(0)


@pytest.mark.parametrize("length_bytes", [COPIES_BYTES // 4, 3 * COPIES_BYTES])
async def test_copies_that_are_written_hold_so_many_bytes(length_bytes: int) -> None:
    site = Site(length_bytes=length_bytes)
    site.goes_on.clear()
    site.decide(40)
    async with site.running():
        for _ in range(1_000):
            await asyncio.sleep(0)
        site.goes_on.set()
        await until(lambda: len(site.reported) == 40)
    assert site.most_bytes <= max(COPIES_BYTES, length_bytes)
    assert (site.copies, site.cancels) == (40, 40)


async def test_what_is_decided_together_is_read_once_and_written_together() -> None:
    """What is decided meanwhile comes next, beside the cancels of those before."""
    site = Site()
    site.goes_on.clear()
    site.decide(40)
    async with site.running():
        await until(lambda: site.groups == [40])
        for count in range(41, 81):
            site.decide(count)
            await asyncio.sleep(0)
        site.goes_on.set()
        await until(lambda: len(site.reported) == 80)
    assert site.reads == 2
    assert (site.copies, site.cancels) == (80, 80)
    assert site.groups in ([40, 80, 40], [40, 40, 40, 40])


async def test_the_next_are_copied_while_cancels_are_written() -> None:
    site = Site()
    site.decide(1)
    async with site.running():
        await until(lambda: site.copies == 1)
        site.goes_on.clear()
        await until(lambda: site.groups == [1, 1])
        site.decide(3)
        await until(lambda: site.groups == [1, 1, 2])
        site.goes_on.set()
        await until(lambda: len(site.reported) == 3)
    assert (site.copies, site.cancels) == (3, 3)


async def test_who_waits_hears_of_the_copy_before_the_cancel_is_written() -> None:
    site, key = Site(), key_of((0).to_bytes(16, "big"))
    site.goes_on.clear()
    site.decide(1)
    async with site.running() as decisions:
        await until(lambda: site.groups == [1])
        waiting = asyncio.create_task(decisions.await_change(key, 60))
        await asyncio.sleep(0)
        assert decisions.copy(key) is None
        site.goes_on.set()
        await until(lambda: site.copies == 1)
        site.goes_on.clear()
        await until(waiting.done)
        copy = decisions.copy(key)
        assert copy is not None
        assert (copy.to_ms, copy.wheel) == (TO_MS, OWN)
        assert not site.reported
        site.goes_on.set()
        await until(lambda: len(site.reported) == 1)


async def test_one_that_is_refused_holds_up_no_other_of_its_batch() -> None:
    site = Site(refuses=[RequestRefusedError(Reason.SLOT_FULL)])
    site.decide(3)
    async with site.running():
        await until(lambda: site.cancels == 3)
        await until(lambda: len(site.reported) == 2)
        site.word.set()
        await until(lambda: len(site.reported) == 3)
    assert (site.copies, site.cancels) == (3, 4)


async def test_where_the_cancel_fails_its_copy_is_not_written_again() -> None:
    site = Site(
        refuses=[RequestRefusedError(Reason.BACKPRESSURE), RequestRefusedError(Reason.WHEEL_LOST)]
    )
    site.decide(1)
    async with site.running():
        for cancels in (1, 2, 3):
            await until(lambda cancels=cancels: site.cancels == cancels)  # type: ignore[misc]
            await asyncio.sleep(0)
            site.word.set()
        await until(lambda: bool(site.reported))
    assert site.copies == 1
    assert site.reported[0].copy == (OWN, 1)


async def test_a_record_that_goes_while_its_copy_is_written_is_no_defect() -> None:
    """At whichever moment: another leader may have had both frames written meanwhile."""
    for moment in range(6):
        site = Site()
        site.goes_on.clear()
        site.decide(1)
        async with site.running():
            await until(lambda site=site: site.groups == [1])  # type: ignore[misc]
            site.goes_on.set()
            for _ in range(moment):
                await asyncio.sleep(0)
            site.decide(0)
            for _ in range(20):
                await asyncio.sleep(0)
            site.decide(2)
            await until(lambda site=site: len(site.reported) >= 2)  # type: ignore[misc]


async def test_who_waits_hears_of_its_own_record_alone() -> None:
    """However often progress comes; and of all if this node does not lead any more."""
    site = Site()
    site.goes_on.clear()
    async with site.running() as decisions:
        ids = [n.to_bytes(16, "big") for n in range(4)]
        waiting = [asyncio.create_task(decisions.await_change(key_of(id_), 60)) for id_ in ids]
        for _ in range(50):
            site.word.set()
            await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        site.decide(2)
        await until(lambda: sum(task.done() for task in waiting) == 2)
        written = asyncio.create_task(decisions.await_change(key_of(ids[0]), 60))
        for _ in range(50):
            site.word.set()
            await asyncio.sleep(0)
        assert not written.done()
        site.goes_on.set()
        await until(lambda: len(site.reported) == 2)
        await written
        assert [task.done() for task in waiting] == [True, True, False, False]
        assert site.cleaner.status is not None
        site.cleaner.status = replace(site.cleaner.status, role=Role.STANDBY)
        site.word.set()
        await asyncio.gather(*waiting)
    assert not decisions._waiting
