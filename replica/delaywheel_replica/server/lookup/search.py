"""Search: walks the seconds that hold messages, and applies a filter.

There is no index of topics, keys or ids (docs/decisions): seconds are read in order, from the first
that may hold pending messages. A call is bounded in what it reads, and in time:

| a page ends | the next page |
|---|---|
| when it is full, in messages or bytes | begins behind its last message |
| when the call has read enough, or long enough | begins behind the last frame that was read |
| behind the last second of the request | does not exist |

All reading is done on one thread, for one caller at a time, so that it delays neither senders nor
those that get or cancel a single message. Principals have turns, a page each; one is refused while
too many of its calls wait. It makes no
pauses for others: those that want the interpreter get it after a switch interval (server/main.py),
or with the next file, and pauses make their delays rarer, but searches as much longer.
"""

import re
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.decoding import FrameBatch, PassedOver
from delaywheel.storage.writing.dial import DialView
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.halves import is_released
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.core.protocol.status_files import ServerStatus
from delaywheel_replica.server.access.shared_room import SharedRoom
from delaywheel_replica.server.lookup.batches import Examined, ScannedBatch, in_batches
from delaywheel_replica.server.lookup.filters import Wanted
from delaywheel_replica.server.lookup.history import ProgressHistory
from delaywheel_replica.server.lookup.pages import PAGE_BYTES, page_size_of, position_of
from delaywheel_replica.server.lookup.queries import limits_of
from delaywheel_replica.server.lookup.references import SLOT_BEYOND
from delaywheel_replica.server.lookup.scan import Found, Scanner
from delaywheel_replica.server.lookup.stored import first_row, half_state, stored_message
from delaywheel_replica.server.node.node_view import NodeView, done_slot, wall_ms
from delaywheel_replica.server.node.refusals import RequestRefusedError
from delaywheel_replica.server.node.turns import Turns

READ_BYTES: Final = 128 << 20
"""One call reads at most this much of slot files, plus what crosses the limit: a frame, or a second
that is passed over. Of each wheel, it may have read 4 MiB ahead."""
READ_S: Final = 2.0
"""And for at most this long."""
_CALLS_OF_PRINCIPAL: Final = 8
_CALLS: Final = 64
"""So many calls of one principal, and of all, are answered or wait."""
_Made = TypeVar("_Made")
_NO_HISTORY: Final = ProgressHistory()
"""What is shown here is not done: nothing needs to be known of the past."""

_SLOT = re.compile(r"\d{1,10}")


@dataclass(frozen=True, slots=True)
class PageStart:
    """Where a page begins: after the last message of the page before; None: with the first."""

    slot: int
    after: Position | None = None

    def __str__(self) -> str:
        """Returns the place as a page token."""
        return str(self.slot) if self.after is None else f"{self.slot}/{self.after}"


@dataclass(frozen=True, slots=True)
class Asked:
    """The request for one page.

    Attributes:
        token: The previous page's; empty: the first page.
        page_size: How many messages at most; 0: the default.
        with_cancelled: Include messages that a cancel names.
    """

    wanted: Wanted
    token: str = ""
    page_size: int = 0
    with_content: bool = False
    with_cancelled: bool = False


@dataclass(slots=True)
class Page:
    """The pending messages of a page, in the order of seconds, and how much was examined for it.

    Attributes:
        content_bytes: The length of the messages, if they have contents.
        complete: Every frame that was examined could be read, and the node holds all of them.
    """

    messages: list[pb.StoredMessage] = field(default_factory=list)
    places: list[Position] = field(default_factory=list)
    next: PageStart | None = None
    read_messages: int = 0
    read_bytes: int = 0
    content_bytes: int = 0
    complete: bool = True

    @property
    def next_token(self) -> str:
        """The token of the next page; empty on the last one."""
        return "" if self.next is None else str(self.next)

    def looked(self, node: str) -> pb.Looked:
        """What was examined, as a protocol message."""
        return pb.Looked(
            node=node,
            messages=self.read_messages,
            length_bytes=self.read_bytes,
            to_slot=None if self.next is None else self.next.slot,
            incomplete=not self.complete,
        )


class Search:
    """Searches what this node holds. For the event loop's thread."""

    def __init__(
        self,
        disk: Disk,
        data: Path,
        view: NodeView,
        *,
        knows_all: Callable[[ServerStatus], bool],
        on_damaged: Callable[[WheelId, int, int], None],
    ) -> None:
        """Begins with nothing read; `on_damaged` gets wheel, seq, slot of an unreadable frame."""
        self._view = view
        self._knows_all = knows_all
        self._walk = Walk(Scanner(disk, data, on_damaged=on_damaged), DialView(disk, data))
        self._turns = Turns("search")
        self._room = SharedRoom(_CALLS, _CALLS_OF_PRINCIPAL)

    def close(self) -> None:
        """Ends the thread."""
        self._turns.close()

    async def search(
        self, request: pb.SearchRequest, wanted: Wanted, sharer: Hashable = ""
    ) -> pb.SearchResponse:
        """Returns a page of pending messages, to a sharer; refuses as `page`."""
        asked = Asked(wanted, request.page_token, request.page_size, request.with_content)
        page = await self.page(asked, sharer)
        node = self._view.status().heartbeat.node
        return pb.SearchResponse(
            messages=page.messages, next_page_token=page.next_token, looked=page.looked(node)
        )

    async def page(self, asked: Asked, sharer: Hashable = "") -> Page:
        """Returns a page of pending messages, with their places, to a sharer.

        Refuses: PAGE_TOKEN_INVALID, SEARCHES_BUSY.
        """
        begin = _page_start(asked.token)
        status, cleaner = self._view.status(), self._view.cleaner.status
        progress = None if cleaner is None else cleaner.progress
        held = NodeHoldings(
            limits_of(status),
            progress,
            NO_FRAMES if cleaner is None else cleaner.lost,
            frozenset() if cleaner is None else frozenset(cleaner.reschedules),
            frozenset() if cleaner is None else frozenset(cleaner.wheels),
        )
        page = await self.on_thread(lambda: self._walk.page(asked, begin, held), sharer)
        page.complete = page.complete and self._knows_all(status)
        return page

    async def on_thread(self, work: Callable[[], _Made], sharer: Hashable = "") -> _Made:
        """Runs a function on the thread, when it is the sharer's turn; refuses SEARCHES_BUSY."""
        with self._room.place(sharer) as has_place:
            if not has_place:
                raise RequestRefusedError(Reason.SEARCHES_BUSY)
            return await self._turns.take(sharer, work)


@dataclass(frozen=True, slots=True)
class NodeHoldings:
    """The node's state when a walk begins: wheels up to their seqs, and what else it knows."""

    limits: Mapping[WheelId, int]
    progress: Progress | None
    lost: FrameSet
    rescheduled: frozenset[MessageKey] = frozenset()
    registered: frozenset[WheelId] = frozenset()
    now_ms: int = field(default_factory=wall_ms)


class Walk:
    """Reads seconds in order. For one thread."""

    def __init__(
        self,
        scanner: Scanner,
        dial: DialView,
        *,
        read_bytes: int = READ_BYTES,
        read_s: float = READ_S,
    ) -> None:
        self._scanner = scanner
        self._dial = dial
        self._read_bytes = read_bytes
        self._read_s = read_s

    def page(self, asked: Asked, begin: PageStart, held: NodeHoldings) -> Page:
        """Returns one page, from a place on."""
        page, until_s = Page(), time.monotonic() + self._read_s
        first, last = asked.wanted.from_ms // 1000, (asked.wanted.to_ms - 1) // 1000
        slots = self._slots(max(begin.slot, first), last + 1, held)
        found = Found()
        self._scanner.note_missing(held.limits, begin.slot, found, held.lost)
        page.complete = found.complete
        passing = self._scanner.passing_over(slots, held.limits, asked.wanted.may_be_in)
        for slot, passed in zip(slots.tolist(), passing, strict=True):
            after = begin.after if slot == begin.slot else None
            if passed is not None and after is None:
                page.read_messages += passed.messages
                page.read_bytes += passed.length_bytes
            elif (
                place := self._read(page, asked, PageStart(slot, after), held, until_s)
            ) is not None:
                page.next = place
                return page
            if page.read_bytes >= self._read_bytes or time.monotonic() >= until_s:
                page.next = PageStart(slot + 1) if slot + 1 < SLOT_BEYOND else None
                return page
        return page

    def _read(
        self, page: Page, asked: Asked, begin: PageStart, held: NodeHoldings, until_s: float
    ) -> PageStart | None:
        """Adds a second's messages to a page; returns where that ends if the page is full."""
        size = page_size_of(asked.page_size)
        seen = set[MessageKey]()
        for batch in self._batches(page, asked, begin, held, Found()):
            for message, at in _matches(asked, held, batch, seen):
                page.messages.append(message)
                page.places.append(at)
                page.content_bytes += message.ByteSize() if asked.with_content else 0
                if len(page.messages) >= size or page.content_bytes >= PAGE_BYTES:
                    return PageStart(begin.slot, at)
            if page.read_bytes >= self._read_bytes or time.monotonic() >= until_s:
                return PageStart(begin.slot, batch.end)
        return None

    def _slots(self, first: int, end: int, held: NodeHoldings) -> NDArray[np.int64]:
        """Returns the seconds in [first, end) that may hold pending messages, ascending.

        What is due by w is pending only in frames beyond V: many, while w lies in the future.
        """
        progress = held.progress
        done = done_slot(progress, held.now_ms)
        first = first if progress is None else max(first, progress.floor)
        slots = self._dial.rows(max(first, done), end)["slot"].astype(np.int64)
        if progress is not None and first < done:
            seqs = {wheel: progress.seq(wheel) for wheel in held.registered}
            early = self._scanner.slots_beyond(seqs, held.limits)
            early = early[(early >= first) & (early < min(end, done))]
            slots = np.concatenate((early, slots))
        return slots

    def _batches(
        self, page: Page, asked: Asked, begin: PageStart, held: NodeHoldings, found: Found
    ) -> Iterator[ScannedBatch]:
        """Yields the messages of a second that meet the filter, cancelled ones included."""

        def naming(kind: Kind) -> Iterator[Frame]:
            for frame in self._scanner.frames(
                begin.slot, held.limits, kind=kind, found=found, lost=held.lost
            ):
                page.read_bytes += frame.length_bytes
                yield frame
            page.complete = page.complete and found.complete

        def wanted() -> Iterator[Examined]:
            for batch in self._scanner.sieved(
                begin.slot,
                held.limits,
                asked.wanted.may_be_in,
                after=begin.after,
                found=found,
                lost=held.lost,
            ):
                page.complete = page.complete and found.complete
                examined, messages = _examined(batch, asked.wanted, begin.after)
                page.read_messages += messages
                page.read_bytes += examined.length_bytes
                yield examined
            page.complete = page.complete and found.complete

        return in_batches(
            wanted(),
            naming,
            page_size_of(asked.page_size),
            is_enough=lambda: page.read_bytes >= self._read_bytes,
        )


def _examined(
    batch: FrameBatch | PassedOver, wanted: Wanted, after: Position | None
) -> tuple[Examined, int]:
    """Returns the wanted rows of some frames behind a position, and how many rows they have."""
    last_seq = int(batch.seqs[-1])
    if isinstance(batch, PassedOver):
        end = Position(batch.wheel, last_seq, batch.last_messages)
        return Examined(end, batch.length_bytes, ()), batch.messages
    end = Position(batch.wheel, last_seq, int(batch.counts[-1]))
    rows = np.array(wanted.rows(batch.columns), np.intp)
    frames = []
    for frame, within in batch.frames_with(rows):
        first = first_row(frame, after)
        if behind := [row for row in within if row >= first]:
            frames.append((frame, behind))
    return Examined(end, int(batch.lengths_bytes.sum()), frames), len(batch.columns)


def _matches(
    asked: Asked, held: NodeHoldings, batch: ScannedBatch, seen: set[MessageKey]
) -> Iterator[tuple[pb.StoredMessage, Position]]:
    """Yields the pending messages of a batch, with their places.

    `seen` are those of the second that the page has already: a retry may have left several copies.
    """
    for frame, row, key in batch.rows():
        if key in seen:
            continue
        at = Position(frame.wheel, frame.seq, row)
        cancels = batch.named_by(Kind.CANCELS, key)
        if not asked.with_cancelled and (cancels or key in held.rescheduled):
            continue
        if held.progress is not None and held.progress.covers(int(frame.columns.due_ms[row]), at):
            continue
        half, state = batch.half(frame, row, key), None
        if half is not None:
            if held.progress is not None and is_released(at, half.releases, held.progress):
                continue
            state = half_state(half, held.progress, _NO_HISTORY)
        seen.add(key)
        yield (
            stored_message(
                frame,
                row,
                held.progress,
                cancelled=held.progress is not None and held.progress.counts(cancels),
                with_content=asked.with_content,
                half=state,
            ),
            at,
        )


def _page_start(token: str) -> PageStart:
    slot, slash, position = (token or "0").partition("/")
    if not _SLOT.fullmatch(slot) or int(slot) >= SLOT_BEYOND or (slash and not position):
        raise RequestRefusedError(Reason.PAGE_TOKEN_INVALID)
    return PageStart(int(slot), position_of(position))
