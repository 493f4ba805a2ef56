"""Pending messages are found by their properties, and no call reads without end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.wheel_folder import WheelMeta
from delaywheel.storage.folder import layout
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.writing.dial import Dial, DialView
from delaywheel.storage.writing.wheel import OriginWheel
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import ServerStatus
from delaywheel_replica.link import TopicInfo
from delaywheel_replica.server.lookup.filters import Wanted
from delaywheel_replica.server.lookup.scan import Scanner
from delaywheel_replica.server.lookup.search import Asked, NodeHoldings, PageStart, Search, Walk
from delaywheel_replica.server.node.node_view import CleanerView
from delaywheel_replica.server.node.refusals import RequestRefusedError
from sim.machine.disk import SimulatedDisk
from support.core.values import heartbeat
from support.server.server_process import ServerProcess
from support.server.views import node_view
from support.wheels.messages import BASE_SLOT, Message, any_message, columns_of, message, names_of

A1, B1 = WheelId("a", 1), WheelId("b", 1)
DATA = Path("/data")


class Folder:
    """Wheels on a simulated disk, and walks through them."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.limits: dict[WheelId, int] = {}
        self.slots: set[int] = set()
        self.progress = Progress(BASE_SLOT * 1000 - 1, None, {})

    def write(
        self, wheel: WheelId, *groups: list[Message], cancels: tuple[Message, ...] = ()
    ) -> None:
        meta = WheelMeta(wheel, {"a": "s"}, 1, 7200)
        with closing(OriginWheel.create(self.disk, DATA, meta, HandleCache(self.disk, 4))) as own:
            for group in groups:
                own.append(columns_of(group), accepted_at_ms=BASE_SLOT * 1000)
                self.slots |= {each.due_ms // 1000 for each in group}
            for each in cancels:
                names = names_of(columns_of([each]))
                own.append(names, kind=Kind.CANCELS, accepted_at_ms=BASE_SLOT * 1000)
            self.limits[wheel] = own.last_seq

    def walk(self, **bounds: Any) -> Walk:
        def rows(first: int, end: int) -> Any:
            slots = sorted(slot for slot in self.slots if first <= slot < end)
            return np.array([(slot,) for slot in slots], np.dtype([("slot", np.int64)]))

        dial = cast("DialView", SimpleNamespace(rows=rows))
        # The disk is in memory: no page ends by time, unless a test asks for that.
        return Walk(Scanner(self.disk, DATA), dial, **{"read_s": 600.0, **bounds})

    def all(self, wanted: Wanted, *, page_size: int = 0, **bounds: Any) -> tuple[list[bytes], int]:
        """The ids that all pages have together, and how many pages there are."""
        walk, place, found, pages = self.walk(**bounds), PageStart(0), list[bytes](), 0
        held = NodeHoldings(
            self.limits, self.progress, NO_FRAMES, registered=frozenset(self.limits)
        )
        while True:
            page = walk.page(Asked(wanted, page_size=page_size), place, held)
            found += [each.id for each in page.messages]
            pages += 1
            if page.next is None:
                return found, pages
            place = page.next


def test_a_call_reads_so_much_and_the_next_one_goes_on_from_there() -> None:
    """Each of 6 seconds has 5 frames of 100 kB; only one message of all has the key."""
    folder, seconds = Folder(), range(BASE_SLOT, BASE_SLOT + 6)
    many = [message(n, slot=slot, value=bytes(100_000)) for slot in seconds for n in range(5)]
    one = Message(many[-1].due_ms, b"i" * 16, "topic", b"mine", b"")
    folder.write(A1, *([each] for each in many), [one])
    wanted = Wanted(key=b"mine")
    assert folder.all(wanted) == ([one.id], 1)
    found, pages = folder.all(wanted, read_bytes=600_000)
    assert found == [one.id]
    assert pages == 4  # each reads two seconds, and the last one finds the end
    held = NodeHoldings(folder.limits, folder.progress, NO_FRAMES)
    page = folder.walk(read_bytes=600_000).page(Asked(wanted), PageStart(0), held)
    assert page.read_messages == 10
    assert 1_000_000 < page.read_bytes < 1_100_000
    assert page.looked("a").to_slot == BASE_SLOT + 2


def test_pages_have_each_message_once_in_the_order_of_seconds() -> None:
    folder = Folder()
    late, early = [[message(n, slot=BASE_SLOT + s) for n in range(9)] for s in (2, 0)]
    folder.write(A1, late, early)
    ids = [each.id for each in (*early, *late)]
    for page_size in (1, 4, 9, 100):
        assert folder.all(Wanted(), page_size=page_size)[0] == ids


def test_what_is_done_or_cancelled_or_sent_again_is_not_found() -> None:
    folder = Folder()
    first, second, third = (message(n) for n in (10, 20, 30))
    folder.write(A1, [first, second], cancels=(third,))
    folder.write(B1, [second, third])
    assert folder.all(Wanted())[0] == [first.id, second.id]
    folder.progress = Progress(first.due_ms, None, {A1: 1})
    assert folder.all(Wanted())[0] == [second.id]
    folder.progress = Progress(second.due_ms, None, {A1: 1})
    assert folder.all(Wanted())[0] == [second.id]  # a late copy, which no leader has taken yet


def test_a_page_is_complete_once_what_is_missing_is_known_to_be_lost() -> None:
    """It never was again, where a page had messages: their cancels were looked for among it."""
    folder = Folder()
    folder.write(A1, [message(10)])
    folder.limits[A1] = 2  # nobody has the second frame
    held = NodeHoldings(folder.limits, folder.progress, NO_FRAMES)
    assert not folder.walk().page(Asked(Wanted()), PageStart(0), held).complete
    held = replace(held, lost=FrameSet.of([(A1, 2)]))
    page = folder.walk().page(Asked(Wanted()), PageStart(0), held)
    assert [each.id for each in page.messages] == [message(10).id]
    assert page.complete


@pytest.mark.parametrize("ahead_s", [-100_000, 2, 100_000], ids=["past", "present", "future"])
def test_what_is_due_by_w_is_found_if_no_leader_has_taken_it(ahead_s: int) -> None:
    """Where w lies: forwarding rests while it is in the future."""
    folder, late = Folder(), message(3, slot=BASE_SLOT + 1)
    early, soon = message(1), message(2, slot=BASE_SLOT + 4)
    folder.write(A1, [early, message(9, slot=BASE_SLOT + 1)], [late], [soon])
    folder.write(B1, [message(4)])  # it is not registered any more: all of it is done
    folder.progress = Progress((BASE_SLOT + 3) * 1000, None, {A1: 2}, floor=BASE_SLOT + 1)
    held = NodeHoldings(
        folder.limits,
        folder.progress,
        NO_FRAMES,
        registered=frozenset({A1}),
        now_ms=(BASE_SLOT + 3 - ahead_s) * 1000,
    )
    page = folder.walk().page(Asked(Wanted()), PageStart(0), held)
    assert [each.id for each in page.messages] == [late.id, soon.id]


def test_a_damaged_frame_makes_a_search_incomplete_though_nothing_sought_is_there() -> None:
    folder = Folder()
    folder.write(A1, [message(1)], [message(2)])
    held = NodeHoldings(folder.limits, folder.progress, NO_FRAMES)
    asked = Asked(Wanted(key=b"mine"))
    page = folder.walk().page(asked, PageStart(0), held)
    assert (page.complete, page.read_messages) == (True, 2)
    path = layout.slot_path(layout.wheel_folder(DATA, A1), BASE_SLOT)
    folder.disk.flip_bit(path, 8 * len(folder.disk.content(path)) - 100)
    assert not folder.walk().page(asked, PageStart(0), held).complete
    folder.disk.flip_bit(path, 8 * len(folder.disk.content(path)) - 100)
    folder.disk.flip_bit(layout.index_path(layout.wheel_folder(DATA, A1), 0), 70)
    folder.disk.delete(path)
    assert not folder.walk().page(asked, PageStart(0), held).complete


async def test_who_has_many_searches_is_refused_and_others_are_not() -> None:
    disk = SimulatedDisk()
    Dial(disk, DATA, 100)
    status = ServerStatus(heartbeat("a", open_=A1, wheels={}), 1, 0)
    view = node_view(lambda: status, cleaner=CleanerView())
    search = Search(disk, DATA, view, knows_all=lambda _: True, on_damaged=lambda *_: None)
    goes_on = threading.Event()
    try:
        busy = [asyncio.create_task(search.on_thread(goes_on.wait, "a")) for _ in range(8)]
        await asyncio.sleep(0)
        with pytest.raises(RequestRefusedError, match="SEARCHES_BUSY"):
            await search.page(Asked(Wanted()), "a")
        others = asyncio.create_task(search.on_thread(lambda: None, "b"))
        await asyncio.sleep(0)
        goes_on.set()
        await asyncio.gather(*busy, others)
    finally:
        goes_on.set()
        search.close()


@given(
    st.lists(any_message(), min_size=1, max_size=20),
    st.none() | st.binary(max_size=2),
    st.none() | st.tuples(st.text(max_size=2), st.none() | st.binary(max_size=2)),
    st.booleans(),
)
def test_whole_columns_are_compared_as_messages_would_be(
    messages: list[Message],
    key: bytes | None,
    header: tuple[str, bytes | None] | None,
    by_first: bool,
) -> None:
    first = messages[0]
    if by_first:
        key, header = first.key, first.headers[0] if first.headers else None
    wanted = Wanted(topic=first.topic, key=key, header=header, to_ms=first.due_ms + 2)

    def is_meant(each: Message) -> bool:
        has_header = header is None or any(
            name == header[0] and header[1] in {None, value} for name, value in each.headers
        )
        return (
            each.topic == first.topic
            and (key is None or each.key == key)
            and each.due_ms < first.due_ms + 2
            and has_header
        )

    expected = [row for row, each in enumerate(messages) if is_meant(each)]
    assert wanted.rows(columns_of(messages)) == expected


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("search") / "n1", span_seconds="600") as running:
        running.cleaner.topics = {"orders": TopicInfo(3, 1_000_000), "news": TopicInfo(3, 1_000)}
        running.wait_accepting()
        yield running


def search(server: ServerProcess, with_content: bool = False, **asked: Any) -> list[Any]:
    request = pb.SearchRequest(filter=pb.Filter(**asked), with_content=with_content, page_size=2)
    found: list[Any] = []
    while True:
        page = server.stub.Search(request, timeout=30)
        found += page.messages
        request.page_token = page.next_page_token
        if not page.next_page_token:
            assert page.looked.node == "n1"
            assert not page.looked.HasField("to_slot")
            return found


def test_a_node_finds_what_is_pending_by_topic_key_header_id_and_due(
    server: ServerProcess,
) -> None:
    now_ms = time.time_ns() // 1_000_000
    dues = [now_ms + 60_000 + 2_000 * number for number in range(4)]
    trip = pb.Header(name="trip", value=b"7")
    messages = [
        pb.DelayedMessage(topic="orders", key=b"42", value=b"a", deliver_at_ms=dues[0]),
        pb.DelayedMessage(topic="orders", key=b"43", headers=[trip], deliver_at_ms=dues[1]),
        pb.DelayedMessage(topic="news", key=b"42", id=b"n" * 16, deliver_at_ms=dues[2]),
        pb.DelayedMessage(topic="news", headers=[pb.Header(name="trip")], deliver_at_ms=dues[3]),
    ]
    handles = [result.handle for result in server.produce(*messages)]

    def places(**asked: Any) -> list[int]:
        return [handles.index(each.handle) for each in search(server, **asked)]

    assert places() == [0, 1, 2, 3]
    assert places(topic="orders") == [0, 1]
    assert places(key=b"42") == [0, 2]
    assert places(topic="news", key=b"42") == [2]
    assert places(id=b"n" * 16) == [2]
    assert places(header=pb.Header(name="trip")) == [1, 3]
    assert places(header=trip) == [1]
    assert places(from_ms=dues[1], to_ms=dues[3]) == [1, 2]
    assert places(key=b"") == []
    (found,) = search(server, topic="orders", key=b"42", with_content=True)
    assert (found.value, found.state) == (b"a", pb.MESSAGE_STATE_PENDING)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (pb.SearchRequest(filter=pb.Filter(id=b"x")), Reason.ID_INVALID),
        (pb.SearchRequest(filter=pb.Filter(from_ms=5, to_ms=5)), Reason.DUE_INVALID),
        (pb.SearchRequest(filter=pb.Filter(header=pb.Header())), Reason.HEADER_INVALID),
        (pb.SearchRequest(page_token="5/n1.1"), Reason.PAGE_TOKEN_INVALID),
        (pb.SearchRequest(page_token="9999999999"), Reason.PAGE_TOKEN_INVALID),
    ],
)
def test_a_search_that_cannot_be_is_refused(
    server: ServerProcess, request_: pb.SearchRequest, reason: Reason
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.stub.Search(request_, timeout=20)
    assert caught.value.code() is reason.code
    assert reason.advice in str(caught.value)
