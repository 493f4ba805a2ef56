"""Which message a caller means, found in the slot files of a simulated disk."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.wheel_folder import WheelMeta
from delaywheel.storage.folder import layout
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.reader import WheelReader
from delaywheel.storage.writing.dial import Dial
from delaywheel.storage.writing.wheel import OriginWheel
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey, Reschedule, mark_of
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role, ServerStatus
from delaywheel_replica.server.lookup.fates import Fates
from delaywheel_replica.server.lookup.history import ProgressHistory
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.lookup.references import Reference, reference_of
from delaywheel_replica.server.lookup.scan import Found, Scanner
from delaywheel_replica.server.node.naming import rows_naming
from delaywheel_replica.server.node.node_view import CleanerView, monotonic_ms
from delaywheel_replica.server.node.refusals import RequestRefusedError
from sim.machine.disk import Fault, SimulatedDisk, SimulatedFile
from support.core.values import heartbeat, wheel_heartbeat, wheel_record_of
from support.server.views import node_view
from support.wheels.messages import BASE_SLOT, Message, columns_of, message, names_of

A1, B1 = WheelId("a", 1), WheelId("b", 1)
DATA = Path("/data")
ID = message(1).id


def key_of_first(due_ms: int) -> MessageKey:
    return MessageKey(ID, due_ms, "topic")


EARLY_MS, LATE_MS = BASE_SLOT * 1000 + 100, BASE_SLOT * 1000 + 900


def test_a_message_is_found_though_an_index_cannot_be_opened() -> None:
    site = Site()
    site.write(A1, message(1, slot=BASE_SLOT))
    site.write(B1, message(2, slot=BASE_SLOT))
    scanner = Scanner(site.disk, DATA)
    site.disk.faults += [Fault("open", path_part=f"{A1}/index") for _ in range(99)]
    for number, wheel in ((1, A1), (2, B1)):
        reference = Reference(BASE_SLOT, message(number).id, "topic", None)
        (found,) = scanner.find_many([reference], {A1: 1, B1: 1})
        assert [(copy.wheel, copy.seq) for copy in found.copies] == [(wheel, 1)]


class Site:
    """Node a, with its own wheel a.1 and its copy of b.1, which is closed.

    Attributes:
        missing: so many frames of b.1 never came here.
    """

    def __init__(
        self, on_damaged: Callable[[WheelId, int], None] = lambda *_: pytest.fail("damaged")
    ) -> None:
        self.disk = SimulatedDisk()
        Dial(self.disk, DATA, 100)
        self.missing = 0
        self.applied = {A1: 0, B1: 0}
        self._cleaner = CleanerView()
        view = node_view(self._status, cleaner=self._cleaner)
        self.lost = NO_FRAMES
        self._opened: dict[WheelId, OriginWheel] = {}
        self.reschedules: dict[MessageKey, Reschedule] = {}
        self.history = ProgressHistory()
        self.progress: Progress | None = None
        self.transactions = 0
        self.fates = Fates()
        self.queries = Queries(
            self.disk, DATA, view, self.fates, self.history, on_damaged=on_damaged
        )

    @contextmanager
    def opened(self, wheel: WheelId) -> Iterator[OriginWheel]:
        own = self._opened.get(wheel)
        if own is None:
            meta = WheelMeta(wheel, {"a": "s"}, 1, 7200)
            own = OriginWheel.create(self.disk, DATA, meta, HandleCache(self.disk, 4))
            self._opened[wheel] = own
        yield own
        self.applied[wheel] = own.last_seq

    def write(self, wheel: WheelId, *messages: Message) -> None:
        with self.opened(wheel) as own:
            for each in messages:
                own.append(columns_of([each]), accepted_at_ms=BASE_SLOT * 1000)

    def reschedule(self, wheel: WheelId, due_ms: int, to_ms: int) -> None:
        """Writes what the leader writes: the copy, and the cancel with its mark."""
        self.write(wheel, sent(to_ms))
        key = key_of_first(due_ms)
        mark = mark_of(key, to_ms)
        cancels = rows_naming([key, key._replace(id=mark)])
        with self.opened(wheel) as own:
            own.append(cancels, kind=Kind.CANCELS, accepted_at_ms=BASE_SLOT * 1000)

    async def due_of(self, wheel: WheelId) -> int | Reason:
        """The result for a handle of a message that this wheel took."""
        try:
            found = await self.find(wheel)
        except RequestRefusedError as error:
            return error.refusal.reason
        return found.dues_ms[0] if found.copies else Reason.MESSAGE_NOT_FOUND

    async def find(self, wheel: WheelId) -> Found:
        self.know()
        named = pb.MessageRef(handle=f"{wheel}:{BASE_SLOT}:{ID.hex()}:topic")
        return await self.found(reference_of(named))

    async def found(self, reference: Reference) -> Found:
        (found,) = await self.queries.find_many([reference])
        if isinstance(found, RequestRefusedError):
            raise found
        return found

    def know(self) -> None:
        """Has the cleaner report what is committed."""
        self._cleaner.status = self.known()
        self.history.saw(self._cleaner.status)

    def known(self) -> CleanerStatus:
        """What the cleaner reports now."""
        closed_at = self.applied[B1] + self.missing
        return CleanerStatus(
            node="a",
            boot="boot",
            pid=1,
            monotonic_ms=monotonic_ms(),
            wall_ms=0,
            role=Role.LEADING,
            wheels={A1: wheel_record_of("a"), B1: wheel_record_of("a", closed_at=closed_at)},
            lost=self.lost,
            reschedules=self.reschedules,
            progress=self.progress,
            epoch=1,
            counters={"transactions": self.transactions},
        )

    def _status(self) -> ServerStatus:
        wheels = {wheel: wheel_heartbeat(applied) for wheel, applied in self.applied.items()}
        return ServerStatus(heartbeat("a", open_=A1, wheels=wheels), 1, monotonic_ms())


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
        found = await site.found(Reference(BASE_SLOT, ID, "topic", due_ms))
        assert [copy.wheel for copy in found.copies] == ([B1] if due_ms == EARLY_MS else [A1, B1])


@pytest.mark.parametrize("wheel", [A1, B1], ids=["same wheel", "another wheel"])
async def test_a_handle_names_what_was_rescheduled_within_its_second_at_its_new_due(
    site: Site, wheel: WheelId
) -> None:
    site.write(A1, sent(EARLY_MS))
    site.reschedule(wheel, EARLY_MS, LATE_MS)
    for handle_of in (A1, B1, WheelId("c", 1)):  # a later leader answers with its own wheel
        found = await site.find(handle_of)
        assert (found.dues_ms, found.cancels) == ((LATE_MS,), [])
        assert found.rescheduled_to is None
    # By id and due each is reported separately.
    was = await site.found(Reference(BASE_SLOT, ID, "topic", EARLY_MS))
    assert (len(was.copies), len(was.cancels), was.rescheduled_to) == (1, 1, LATE_MS)
    # And on from there: twice within the second, then out of it.
    site.reschedule(B1, LATE_MS, LATE_MS + 5)
    assert await site.due_of(A1) == LATE_MS + 5
    key = key_of_first(LATE_MS + 5)
    mark = mark_of(key, 10**12)
    with site.opened(A1) as own:
        cancels = rows_naming([key, key._replace(id=mark)])
        own.append(cancels, kind=Kind.CANCELS, accepted_at_ms=1)
    found = await site.find(A1)
    assert (found.dues_ms, found.rescheduled_to) == ((LATE_MS + 5,), 10**12)


async def test_a_message_is_looked_up_and_named_by_its_topic_too(site: Site) -> None:
    """The same id and due in another topic took the owner's get, cancel and reschedule away."""
    site.write(B1, sent(EARLY_MS))
    site.write(A1, replace(sent(EARLY_MS), topic="others", value=b"forged"))
    mine = key_of_first(EARLY_MS)
    with site.opened(A1) as own:
        own.append(
            rows_naming([mine._replace(topic="others")]), kind=Kind.CANCELS, accepted_at_ms=1
        )
    found = await site.found(Reference.of(mine))
    assert ([copy.wheel for copy in found.copies], found.cancels) == ([B1], [])
    for topic in ("topic", "others"):
        named = Reference.of(mine._replace(topic=topic))
        got = (await site.queries.get_message(named)).message
        assert (got.topic, got.value == b"forged") == (topic, topic == "others")


async def test_the_record_says_where_a_message_went_before_its_mark_does(site: Site) -> None:
    site.write(A1, sent(EARLY_MS))
    site.reschedules[key_of_first(EARLY_MS)] = Reschedule(LATE_MS, Position(A1, 1, 0))
    assert await site.due_of(A1) == EARLY_MS, "the copy is not there yet"
    site.write(A1, sent(LATE_MS))
    assert await site.due_of(A1) == LATE_MS
    # That due passed before it was known that the copy is there: it is none that counts.
    put_off = Reschedule(LATE_MS + 5_000, Position(A1, 1, 0), (LATE_MS,))
    site.reschedules[key_of_first(EARLY_MS)] = put_off
    assert await site.due_of(A1) == EARLY_MS
    # What was lost with its frame is nowhere else.
    lost = Reschedule(LATE_MS, Position(A1, 1, 0), (LATE_MS,), is_written=True)
    site.reschedules[key_of_first(EARLY_MS)] = lost
    assert await site.due_of(A1) == EARLY_MS


async def test_a_message_is_read_though_its_index_row_is_lost() -> None:
    site = Site(on_damaged=lambda *_: None)
    try:
        site.write(A1, sent(EARLY_MS), sent(LATE_MS))
        site.disk.flip_bit(layout.index_path(layout.wheel_folder(DATA, A1), 0), 70)
        found = await site.found(Reference(BASE_SLOT, ID, "topic", EARLY_MS))
        (place,) = found.copies
        columns = await site.queries.message(BASE_SLOT, place)
        assert columns is not None
        assert (columns.due_ms.tolist(), columns.value(0)) == ([EARLY_MS], sent(EARLY_MS).value)
        assert await site.queries.message(BASE_SLOT, Position(A1, 3, 0)) is None
    finally:
        site.queries.close()


async def test_who_waits_for_a_cancel_reads_only_what_is_new(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.write(A1, sent(EARLY_MS))
    site.write(B1, message(2, slot=BASE_SLOT))
    await site.find(A1)
    reference = Reference(BASE_SLOT, ID, "topic", EARLY_MS, A1)
    monkeypatch.setattr(WheelReader, "slot_batches", pytest.fail)
    found = await site.found(reference)
    assert (found.cancels, found.rescheduled_to) == ([], None)
    site.reschedule(B1, EARLY_MS, LATE_MS)
    found = await site.found(reference)
    assert (found.cancels, found.rescheduled_to) == ([Position(B1, 3, 0)], LATE_MS)
    assert (await site.find(A1)).dues_ms == (LATE_MS,)


async def test_many_lookups_read_a_second_once_and_each_gets_its_own_answer(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.write(A1, *(message(number, slot=BASE_SLOT) for number in range(2, 9)), sent(LATE_MS))
    site.write(B1, sent(EARLY_MS), sent(LATE_MS), message(9, slot=BASE_SLOT + 1))
    site.reschedule(A1, EARLY_MS, 10**12)
    site.know()
    references = [
        *(Reference(BASE_SLOT, message(number).id, "topic", None) for number in range(2, 9)),
        Reference(BASE_SLOT, ID, "topic", EARLY_MS),
        Reference(BASE_SLOT, ID, "topic", None, B1),
        Reference(BASE_SLOT + 1, message(9).id, "topic", None),
        Reference(BASE_SLOT + 1, ID, "topic", None),
        Reference(BASE_SLOT, message(5).id, "topic", None),
    ]
    read: list[tuple[WheelId, int]] = []
    slot_batches = WheelReader.slot_batches

    def counted(reader: WheelReader, slot: int, *given: Any, **asked: Any) -> Iterator[Any]:
        read.append((reader.wheel, slot))
        return slot_batches(reader, slot, *given, **asked)

    monkeypatch.setattr(WheelReader, "slot_batches", counted)
    found = await site.queries.find_many(references)
    assert sorted(read) == sorted((w, BASE_SLOT + n) for w in (A1, B1) for n in (0, 1))
    assert isinstance(found[8], RequestRefusedError)
    assert found[8].refusal.reason is Reason.HANDLE_AMBIGUOUS
    for reference, each in zip(references, found, strict=True):
        if isinstance(each, Found):
            assert each == await site.found(reference)
    assert isinstance(found[7], Found)
    assert (found[7].rescheduled_to, len(found[7].cancels)) == (10**12, 1)
    assert [len(each.copies) for each in found if isinstance(each, Found)] == [*[1] * 9, 0, 1]


_rows = st.lists(
    st.tuples(
        st.sampled_from(["send", "cancel"]),
        st.sampled_from([A1, B1]),
        st.integers(1, 3),
        st.sampled_from([EARLY_MS, LATE_MS, LATE_MS + 1_000]),
    ),
    max_size=8,
)


@settings(max_examples=2 * settings().max_examples)
@given(rows=_rows, is_damaged=st.booleans())
def test_absent_is_what_has_no_row_in_a_second_that_could_be_read(
    rows: list[tuple[str, WheelId, int, int]], *, is_damaged: bool
) -> None:
    site = Site(on_damaged=lambda *_: None)
    for what, wheel, number, due_ms in rows:
        each = replace(message(number), due_ms=due_ms)
        if what == "send":
            site.write(wheel, each)
            continue
        with site.opened(wheel) as own:
            named = rows_naming([MessageKey(each.id, due_ms, each.topic)])
            own.append(named, kind=Kind.CANCELS, accepted_at_ms=1)
    there = {(message(number).id, due_ms // 1000) for _, _, number, due_ms in rows}
    path = layout.slot_path(layout.wheel_folder(DATA, A1), BASE_SLOT)
    ids, slots = [message(number).id for number in (1, 2, 3)], (BASE_SLOT, BASE_SLOT + 1)
    if is_damaged and path in site.disk.paths():
        site.disk.flip_bit(path, 8 * len(site.disk.content(path)) - 9)
        there.update((id_, BASE_SLOT) for id_ in ids)
    references = [Reference(slot, id_, "topic", None) for slot in slots for id_ in ids]
    limits = {wheel: seq for wheel, seq in site.applied.items() if seq}
    absent = Scanner(site.disk, DATA).are_absent(references, limits, NO_FRAMES)
    assert absent.tolist() == [(each.id, each.slot) not in there for each in references]


async def test_another_attempt_may_lie_elsewhere(site: Site) -> None:
    site.write(A1, sent(LATE_MS), sent(LATE_MS))
    assert await site.due_of(WheelId("c", 1)) == LATE_MS


async def test_what_this_node_lacks_may_be_what_is_meant(site: Site) -> None:
    """The handle's own message may be in a frame that never came here: this one is another."""
    site.write(A1, sent(LATE_MS))
    site.missing = 1
    assert await site.due_of(B1) == Reason.NOT_UP_TO_DATE


@pytest.mark.parametrize("has_file", [False, True])
async def test_a_frame_of_nobody_knows_what_second_may_be_what_is_meant(*, has_file: bool) -> None:
    """Its index row is lost; while its slot file exists, it is found there."""
    reported: list[tuple[WheelId, int]] = []
    site = Site(on_damaged=lambda *frame: reported.append(frame))
    try:
        site.write(A1, sent(LATE_MS))
        folder = layout.wheel_folder(DATA, A1)
        site.disk.flip_bit(layout.index_path(folder, 0), 70)
        if has_file:
            assert await site.due_of(A1) == LATE_MS
            assert reported == []
            return
        site.disk.delete(layout.slot_path(folder, BASE_SLOT))
        found = await site.find(A1)
        assert (found.copies, found.complete) == ([], False)
        assert reported == [(A1, 1)]
        site.lost = FrameSet.of([(A1, 1)])
        assert (await site.find(A1)).complete
    finally:
        site.queries.close()


@pytest.mark.parametrize("unseen", [None, 2], ids=["all seen", "one unseen"])
@pytest.mark.parametrize("in_time", [True, False])
async def test_a_cancel_that_came_too_late_makes_no_delivered_message_cancelled(
    site: Site, *, in_time: bool, unseen: int | None
) -> None:
    """V of the transaction that takes the message, or of the next one, has the cancel."""
    site.write(A1, sent(EARLY_MS))
    cancel = rows_naming([key_of_first(EARLY_MS)])
    with site.opened(A1) as own:
        own.append(cancel, kind=Kind.CANCELS, accepted_at_ms=1)
    for due_ms, seq in ((EARLY_MS - 9, 1), (EARLY_MS, 1 + in_time), (EARLY_MS + 9, 2)):
        site.progress, site.transactions = Progress(due_ms, None, {A1: seq}), site.transactions + 1
        if site.transactions != unseen:
            site.know()
    reference = Reference(BASE_SLOT, ID, "topic", EARLY_MS)
    got = await site.queries.get_message(reference)
    page = await site.queries.get_slot(pb.GetSlotRequest(slot=BASE_SLOT))
    states = {got.message.state, page.messages[0].state}
    assert got.is_doubtful is (unseen is not None)
    is_cancelled = in_time and unseen is None
    assert states == {pb.MESSAGE_STATE_CANCELLED if is_cancelled else pb.MESSAGE_STATE_DONE}


@pytest.mark.parametrize(("seq", "is_cancelled"), [(None, False), (1, False), (2, True)])
async def test_a_cancel_that_does_not_count_yet_cancels_nothing(
    site: Site, seq: int | None, *, is_cancelled: bool
) -> None:
    """A step may yet take the message without it; the leader's node knows whether it has."""
    site.write(A1, sent(LATE_MS))
    cancel = rows_naming([key_of_first(LATE_MS)])
    with site.opened(A1) as own:
        own.append(cancel, kind=Kind.CANCELS, accepted_at_ms=1)
    if seq is not None:
        site.progress, site.transactions = Progress(EARLY_MS - 9, None, {A1: seq}), 1
        site.know()
    got = await site.queries.get_message(Reference(BASE_SLOT, ID, "topic", LATE_MS))
    page = await site.queries.get_slot(pb.GetSlotRequest(slot=BASE_SLOT))
    expected = pb.MESSAGE_STATE_CANCELLED if is_cancelled else pb.MESSAGE_STATE_PENDING
    assert {got.message.state, page.messages[0].state} == {expected}
    assert got.is_undecided is not is_cancelled


async def pages_of(site: Site) -> list[list[bytes]]:
    """The ids of a second's messages, page by page."""
    request, pages = pb.GetSlotRequest(slot=BASE_SLOT, page_size=4), []
    while True:
        page = await site.queries.get_slot(request)
        pages.append([each.id for each in page.messages])
        if not page.next_page_token:
            return pages
        request.page_token = page.next_page_token


async def test_a_page_reads_no_more_of_a_second_than_it_needs(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads of 24 MB: the cancels wherever they lie, the headers, and 1 MiB of messages."""
    value = bytes(200_000)
    big = [message(number, value=value) for number in range(120)]
    with site.opened(A1) as own:
        for number, each in enumerate(big[:80]):
            own.append(columns_of([each]), accepted_at_ms=BASE_SLOT * 1000)
            if number % 8 == 7:
                named = names_of(columns_of([big[number - 6]]))
                own.append(named, kind=Kind.CANCELS, accepted_at_ms=BASE_SLOT * 1000)
    site.write(B1, *big[80:])
    read = 0
    read_at = SimulatedFile.read_at

    def counted(file: SimulatedFile, length: int, offset: int) -> bytes:
        nonlocal read
        content = read_at(file, length, offset)
        read += len(content)
        return content

    monkeypatch.setattr(SimulatedFile, "read_at", counted)
    site.progress = Progress(BASE_SLOT * 1000 - 1, None, {A1: 90})
    site.know()
    first = await site.queries.get_slot(pb.GetSlotRequest(slot=BASE_SLOT, page_size=4))
    assert [each.id for each in first.messages] == [each.id for each in big[:4]]
    states = [each.state for each in first.messages]
    assert states[1] == pb.MESSAGE_STATE_CANCELLED
    assert states.count(pb.MESSAGE_STATE_PENDING) == 3
    assert read < 3_000_000
    pages = await pages_of(site)
    assert [id_ for page in pages for id_ in page] == [each.id for each in big]
    # A token whose reading is gone gets the same page, and reads as little.
    asked = pb.GetSlotRequest(slot=BASE_SLOT, page_size=4)
    for _ in range(25):
        last, asked.page_token = (
            asked.page_token,
            (await site.queries.get_slot(asked)).next_page_token,
        )
    asked.page_token, read = last, 0
    page = await site.queries.get_slot(asked)
    assert page.messages[0].wheel == str(B1)
    assert read < 3_000_000
    assert await site.queries.get_slot(asked) == page


async def test_looking_for_one_message_keeps_none_of_the_others(site: Site) -> None:
    """A second may be 4 GiB long: of 24 MB little more than the current piece stays in memory."""
    messages = [message(number, value=bytes(200_000)) for number in range(120)]
    site.write(A1, *messages)
    tracemalloc.start()
    try:
        found = (
            await site.queries.get_message(Reference(BASE_SLOT, messages[77].id, "topic", None))
        ).message
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.seq, len(found.value)) == (78, 200_000)
    assert most_bytes < 8_000_000


async def test_whoever_looks_at_a_whole_second_holds_up_no_cancel(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.write(A1, sent(LATE_MS))
    begun, released = threading.Event(), threading.Event()
    frames = Scanner.frames

    def held(scanner: Scanner, *given: Any, **asked: Any) -> Iterator[Frame]:
        if threading.current_thread().name.startswith("pages"):
            begun.set()
            released.wait(60)
        yield from frames(scanner, *given, **asked)

    monkeypatch.setattr(Scanner, "frames", held)
    page = asyncio.ensure_future(site.queries.get_slot(pb.GetSlotRequest(slot=BASE_SLOT)))
    await asyncio.to_thread(begun.wait, 60)
    assert await site.due_of(A1) == LATE_MS
    assert not page.done()
    released.set()
    assert len((await page).messages) == 1


async def test_who_names_many_invented_messages_delays_others_by_a_turn() -> None:
    """A thousand handles, 60 kB, held the only thread for seconds."""
    site = Site()
    site.write(A1, sent(BASE_SLOT * 1000))
    site.know()
    invented = [Reference(BASE_SLOT + n, ID, "topic", None) for n in range(1, 1_000)]
    hog = asyncio.create_task(site.queries.read_ahead(invented, "hog"))
    await asyncio.sleep(0)
    await site.queries.get_message(Reference.of(key_of_first(BASE_SLOT * 1000)), "other")
    assert not hog.done()
    await hog
    further = [Reference(BASE_SLOT + n, ID, "topic", None) for n in range(2_000, 3_000)]
    ahead = asyncio.create_task(site.queries.read_ahead(further, "hog"))
    await asyncio.sleep(0)
    await site.queries.get_message(Reference.of(key_of_first(BASE_SLOT * 1000)), "other")
    assert not ahead.done()
    await ahead
    built = site.queries.index_size()[2]
    await site.queries.find_many(further)
    assert site.queries.index_size()[2] == built, "none is read with the messages of others"
