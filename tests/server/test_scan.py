"""Which message a caller means, found in the slot files of a simulated disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from delaywheel.dial import Dial
from delaywheel.format import Frame
from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.slotfiles import HandleCache
from delaywheel.wheel import OriginWheel, WheelMeta
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.status import CleanerStatus, Role, ServerStatus
from delaywheel_replica.server.queries import Queries
from delaywheel_replica.server.references import Reference, reference_of
from delaywheel_replica.server.refusals import RefusedError
from delaywheel_replica.server.scan import Scanner
from delaywheel_replica.server.status import Cleaner, NodeView, monotonic_ms
from sim.disk import SimulatedDisk
from support.core_values import beat, wheel_beat, wheel_record_of
from support.messages import BASE_SLOT, Message, columns_of, message

A1, B1 = WheelId("a", 1), WheelId("b", 1)
DATA = Path("/data")
ID = message(1).id
EARLY_MS, LATE_MS = BASE_SLOT * 1000 + 100, BASE_SLOT * 1000 + 900


class Site:
    """Node a, with its own wheel a.1 and what it holds of b.1, which is closed.

    Attributes:
        lacking: so many frames of b.1 never came here.
    """

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        Dial(self.disk, DATA, 100)
        self.lacking = 0
        self.applied = {A1: 0, B1: 0}
        self._cleaner = Cleaner()
        view = NodeView(status=self._status, cleaner=self._cleaner)
        self.queries = Queries(self.disk, DATA, view, on_damaged=lambda *_: pytest.fail("damaged"))

    def write(self, wheel: WheelId, *messages: Message) -> None:
        meta = WheelMeta(wheel, {"a": "s"}, 1, 7200)
        with closing(OriginWheel.create(self.disk, DATA, meta, HandleCache(self.disk, 4))) as own:
            for each in messages:
                own.append(columns_of([each]), accepted_at_ms=BASE_SLOT * 1000)
        self.applied[wheel] = len(messages)

    async def due_of(self, wheel: WheelId) -> int | Reason:
        """What the handle of a message that this wheel took leads to."""
        closed_at = self.applied[B1] + self.lacking
        self._cleaner.status = CleanerStatus(
            node="a",
            boot="boot",
            pid=1,
            monotonic_ms=monotonic_ms(),
            wall_ms=0,
            role=Role.LEADING,
            wheels={A1: wheel_record_of("a"), B1: wheel_record_of("a", closed_at=closed_at)},
        )
        named = pb.MessageRef(handle=f"{wheel}:{BASE_SLOT}:{ID.hex()}")
        try:
            found = await self.queries.find(reference_of(named))
        except RefusedError as error:
            return error.refusal.reason
        return found.dues_ms[0] if found.first is not None else Reason.MESSAGE_NOT_FOUND

    def _status(self) -> ServerStatus:
        wheels = {wheel: wheel_beat(applied) for wheel, applied in self.applied.items()}
        return ServerStatus(beat("a", open_=A1, wheels=wheels), 1, monotonic_ms())


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.queries.close()


def sent(due_ms: int) -> Message:
    return replace(message(1), due_ms=due_ms)


async def test_of_one_id_with_two_dues_the_wheel_of_the_handle_decides(site: Site) -> None:
    site.write(A1, sent(LATE_MS))
    site.write(B1, sent(EARLY_MS))
    assert await site.due_of(B1) == EARLY_MS
    assert await site.due_of(A1) == LATE_MS


async def test_a_handle_that_fits_several_messages_is_refused(site: Site) -> None:
    site.write(A1, sent(LATE_MS))
    site.write(B1, sent(EARLY_MS), sent(LATE_MS))
    assert await site.due_of(B1) == Reason.HANDLE_AMBIGUOUS
    assert await site.due_of(WheelId("c", 1)) == Reason.HANDLE_AMBIGUOUS
    assert await site.due_of(A1) == LATE_MS
    for due_ms in (EARLY_MS, LATE_MS):
        found = await site.queries.find(Reference(BASE_SLOT, ID, due_ms))
        assert [copy.wheel for copy in found.copies] == ([B1] if due_ms == EARLY_MS else [A1, B1])


async def test_another_attempt_may_lie_elsewhere(site: Site) -> None:
    site.write(A1, sent(LATE_MS), sent(LATE_MS))
    assert await site.due_of(WheelId("c", 1)) == LATE_MS


async def test_what_this_node_lacks_may_be_what_is_meant(site: Site) -> None:
    """The handle's own message may be in a frame that never came here: the other is not it."""
    site.write(A1, sent(LATE_MS))
    site.lacking = 1
    assert await site.due_of(B1) == Reason.NOT_UP_TO_DATE


async def pages_of(site: Site) -> list[list[bytes]]:
    """The ids of a second's messages, page by page."""
    request, pages = pb.GetSlotRequest(slot=BASE_SLOT, page_size=4), []
    while True:
        page = await site.queries.get_slot(request)
        pages.append([each.id for each in page.messages])
        if not page.next_page_token:
            return pages
        request.page_token = page.next_page_token


async def test_a_second_is_read_twice_however_many_pages_it_has(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.write(A1, *(message(number) for number in range(20)))
    site.write(B1, *(message(number) for number in range(20, 30)))
    read = 0
    frames = Scanner.frames

    def counted(*given: Any) -> Iterator[Frame]:
        nonlocal read
        for frame in frames(*given):
            read += 1
            yield frame

    monkeypatch.setattr(Scanner, "frames", counted)
    pages = await pages_of(site)
    assert [len(page) for page in pages] == [4, 4, 4, 4, 4, 4, 4, 2]
    assert [id_ for page in pages for id_ in page] == [message(number).id for number in range(30)]
    assert read == 60
    # Who comes with a token whose reading is gone gets the same page.
    first = await site.queries.get_slot(pb.GetSlotRequest(slot=BASE_SLOT, page_size=4))
    asked = pb.GetSlotRequest(slot=BASE_SLOT, page_size=4, page_token=first.next_page_token)
    assert await site.queries.get_slot(asked) == await site.queries.get_slot(asked)


async def test_whoever_looks_at_a_whole_second_holds_up_no_cancel(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.write(A1, sent(LATE_MS))
    begun, released = threading.Event(), threading.Event()
    frames = Scanner.frames

    def held(scanner: Scanner, *given: Any) -> Iterator[Frame]:
        if threading.current_thread().name.startswith("pages"):
            begun.set()
            released.wait(60)
        yield from frames(scanner, *given)

    monkeypatch.setattr(Scanner, "frames", held)
    page = asyncio.ensure_future(site.queries.get_slot(pb.GetSlotRequest(slot=BASE_SLOT)))
    await asyncio.to_thread(begun.wait, 60)
    assert await site.due_of(A1) == LATE_MS
    assert not page.done()
    released.set()
    assert len((await page).messages) == 1
