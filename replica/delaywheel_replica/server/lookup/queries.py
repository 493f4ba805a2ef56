"""Answers questions: ListSlots, GetSlot, GetMessage.

The answering node's view, never a promise: raw rows of all wheels of which it has files, its own
and mirrored ones, counted as written; each message lies in one wheel, so it is counted once. Slot
files are read on a separate thread, so that a large second does not delay senders; pages of a
second and long lists are made on two others, so that they do not delay cancels either. Single
messages are looked for in turns by sharer: in one, few seconds are read that are not in the
index of ids yet, however many messages a call names.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.record_headers import HALF_DELIVER_AT
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.writing.dial import DialView
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.election.eligibility import heard_heartbeats
from delaywheel_replica.core.leader.halves import HalfRows
from delaywheel_replica.core.leader.holders import knows_all
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey, Reschedule, known_due_ms
from delaywheel_replica.core.protocol.status_files import ServerStatus
from delaywheel_replica.quantities import counted
from delaywheel_replica.server.lookup.batches import is_half
from delaywheel_replica.server.lookup.describe import wheels_of
from delaywheel_replica.server.lookup.fates import Fates
from delaywheel_replica.server.lookup.history import ProgressHistory
from delaywheel_replica.server.lookup.pages import SlotPages
from delaywheel_replica.server.lookup.references import SLOT_BEYOND, Reference
from delaywheel_replica.server.lookup.scan import ComparedCopy, Found, Scanner
from delaywheel_replica.server.lookup.stored import half_state, progress_message, stored_message
from delaywheel_replica.server.node.node_view import NodeView
from delaywheel_replica.server.node.refusals import RequestRefusedError
from delaywheel_replica.server.node.turns import Turns

_SLOTS_AT_MOST: Final = 10_000
# How many of the messages that a handle may mean are named.
_DUES_NAMED: Final = 5
UNREAD_AT_ONCE: Final = 16
"""Seconds that a turn reads as a whole, some milliseconds each."""
_IDS_AT_ONCE: Final = 4_096
_NOT_DONE: Final = frozenset(
    {pb.MESSAGE_STATE_PENDING, pb.MESSAGE_STATE_HELD, pb.MESSAGE_STATE_COMMITTED}
)
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class MessageAnswer:
    """A message, as far as this node knows.

    Attributes:
        is_doubtful: A cancel of it may have come in time although it is given as done.
        is_undecided: It is given as not done; a cancel of it lies here that does not count yet.
    """

    message: pb.StoredMessage
    is_doubtful: bool
    is_undecided: bool


class _Scope(NamedTuple):
    """What is looked through, as it is known when the look begins.

    Attributes:
        limits: The node's wheels, each with the last seq to read.
        lost: Frames that no node can read any more.
        reschedules: Decisions that may not be in frames yet.
    """

    status: ServerStatus
    limits: Mapping[WheelId, int]
    lost: FrameSet = NO_FRAMES
    reschedules: Mapping[MessageKey, Reschedule] = MappingProxyType({})


class Queries:
    """Reads what this node holds. For the event loop's thread."""

    def __init__(
        self,
        disk: Disk,
        data: Path,
        view: NodeView,
        fates: Fates,
        history: ProgressHistory,
        *,
        on_damaged: Callable[[WheelId, int], None],
    ) -> None:
        """Begins with nothing read; `on_damaged` is called with a frame that could not be read."""
        self._view = view
        self._fates = fates
        self._history = history
        self._on_damaged = on_damaged
        self._dial = DialView(disk, data)
        self._scanner = Scanner(disk, data, on_damaged=self.damaged)
        self._pages = SlotPages(Scanner(disk, data, on_damaged=self.damaged), fates, history)
        self._copying = Scanner(disk, data, on_damaged=self.damaged)
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._paging = Turns("pages")
        self._turns = Turns("queries")
        self._lists = Turns("lists")

    def index_size(self) -> tuple[int, int, int]:
        """Returns the seconds in the index of ids, its bytes, and how many were read for it."""
        ids = self._scanner.ids
        return len(ids), ids.length_bytes, ids.built

    def close(self) -> None:
        """Ends the threads."""
        self._turns.close()
        self._copies.shutdown(cancel_futures=True)
        self._paging.close()
        self._lists.close()

    async def find_many(
        self, references: Sequence[Reference], sharer: Hashable = ""
    ) -> list[Found | RequestRefusedError]:
        """Finds messages and their cancels; below the floor there are none.

        All that are in known seconds cost one hand-over to the thread that reads. In place of what
        was found stands HANDLE_AMBIGUOUS if several messages have this id and second,
        NOT_UP_TO_DATE if only another message is found, and this one may lie in what cannot be
        read.
        """
        return [found for found, _ in await self._find(references, sharer, with_frames=False)]

    async def are_absent(
        self, references: Sequence[Reference], sharer: Hashable
    ) -> NDArray[np.bool_]:
        """Which messages have no row here, as far as their seconds are not deleted."""
        scanner, absent = self._scanner, np.zeros(len(references), np.bool_)

        def look(some: Sequence[Reference]) -> NDArray[np.bool_]:
            scope = self._scope()
            return scanner.are_absent(some, scope.limits, scope.lost)

        async for rows, part in self._in_turns(references, sharer, look):
            absent[rows] = part
        return absent

    def unread(self, references: Iterable[Reference]) -> list[Reference]:
        """Returns one message of each second that the index lacks."""
        seconds = {each.slot: each for each in references if not self.is_deleted(each)}
        return [each for slot, each in seconds.items() if slot not in self._scanner.ids]

    async def read_ahead(self, references: Iterable[Reference], sharer: Hashable) -> None:
        """Reads the seconds of a sharer's messages that the index lacks.

        They are looked for with those of others next, which wait for no seconds of theirs.
        """
        if unread := self.unread(references):
            await self._find(unread, sharer, with_frames=False)

    def is_deleted(self, reference: Reference) -> bool:
        """Whether the second of a message is finished and deleted."""
        progress = self._view.cleaner.progress
        return progress is not None and reference.slot < progress.floor

    async def _in_turns(
        self,
        references: Sequence[Reference],
        sharer: Hashable,
        look: Callable[[Sequence[Reference]], _Made],
    ) -> AsyncIterator[tuple[Sequence[int], _Made]]:
        """Looks for messages by second, no more in a turn than may be there at once.

        Yields the numbers of some messages, and what `look` found of these on the thread.
        """
        rows = sorted(range(len(references)), key=lambda row: references[row].slot)
        while rows:
            unread, count = set[int](), 0
            for row in rows[:_IDS_AT_ONCE]:
                slot = references[row].slot
                if slot not in self._scanner.ids:
                    unread.add(slot)
                if len(unread) > UNREAD_AT_ONCE:
                    break
                count += 1
            some, rows = rows[:count], rows[count:]
            named = [references[row] for row in some]
            yield some, await self._turns.take(sharer, partial(look, named))

    async def _find(
        self, references: Sequence[Reference], sharer: Hashable, *, with_frames: bool
    ) -> list[tuple[Found | RequestRefusedError, Frame | None]]:
        """Finds messages; with frames, also reads the frame of each one's first copy."""
        # Below the floor rows may still be in an index, but the files are gone: there is nothing
        # that others could hold.
        above = [row for row, each in enumerate(references) if not self.is_deleted(each)]
        answers: list[tuple[Found | RequestRefusedError, Frame | None]]
        answers = [(Found(), None) for _ in references]

        def read(some: Sequence[Reference]) -> tuple[list[tuple[Found, Frame | None]], bool]:
            scope = self._scope()

            def find(references: Sequence[Reference]) -> list[Found]:
                return self._scanner.find_many(
                    references, scope.limits, lost=scope.lost, reschedules=scope.reschedules
                )

            def framed(reference: Reference, found: Found) -> tuple[Found, Frame | None]:
                if not with_frames:
                    return found, None
                return self._half_meant(reference, found, find) or (
                    found,
                    self._frame_of(reference, found),
                )

            found = [*map(framed, some, find(some))]
            return found, self.knows_all(scope.status)

        named = [references[row] for row in above]
        async for rows, (part, is_all) in self._in_turns(named, sharer, read):
            for row, (found, frame) in zip(rows, part, strict=True):
                answers[above[row]] = _judged(named[row], found, knows_all=is_all), frame
        return answers

    def _frame_of(self, reference: Reference, found: Found) -> Frame | None:
        return self._scanner.frame(reference.slot, found.copies[0]) if found.copies else None

    def _half_meant(
        self,
        reference: Reference,
        found: Found,
        find: Callable[[Sequence[Reference]], list[Found]],
    ) -> tuple[Found, Frame] | None:
        """Returns the half that a handle means, if it fits the message of its commit as well.

        That has the same id and, if a group has committed it, the due a millisecond later.
        """
        first_ms = found.dues_ms[0] if found.dues_ms else 0
        if found.dues_ms != (first_ms, first_ms + 1):
            return None
        (half,) = find([reference._replace(due_ms=first_ms, wheel=None)])
        frame = self._frame_of(reference, half)
        if frame is None or not is_half(frame.columns, half.copies[0].row):
            return None
        return half, frame

    async def message(self, slot: int, place: Position, sharer: Hashable = "") -> Columns | None:
        """Returns one message; None: its frame cannot be read, or no longer exists."""
        (columns,) = await self._turns.take(
            sharer, lambda: self._scanner.messages([(slot, place)], 0)
        )
        return columns

    async def to_copy(
        self, places: Sequence[tuple[int, Position]], length_bytes: int
    ) -> list[Columns | None]:
        """Returns messages, given their seconds and places: one at least, of this length at most.

        They do not wait for what callers look for: whoever reschedules does, for them.
        """
        wheels = limits_of(self._view.status()).keys()

        def read() -> list[Columns | None]:
            self._copying.forget_all_but(wheels)
            return self._copying.messages(places, length_bytes)

        return await asyncio.get_running_loop().run_in_executor(self._copies, read)

    async def are_same(self, copies: Sequence[ComparedCopy], sharer: Hashable) -> list[bool | None]:
        """Whether copies have the contents of messages; see `Scanner.are_same`."""
        return await self._turns.take(sharer, lambda: self._scanner.are_same(copies))

    async def get_message(self, reference: Reference, sharer: Hashable = "") -> MessageAnswer:
        """Returns one message with its content.

        Refuses: MESSAGE_NOT_FOUND; NOT_UP_TO_DATE when it may lie in what cannot be read;
        HANDLE_AMBIGUOUS.
        """
        ((found, frame),) = await self._find([reference], sharer, with_frames=True)
        if isinstance(found, RequestRefusedError):
            raise found
        if not found.copies:
            reason = Reason.MESSAGE_NOT_FOUND if found.complete else Reason.NOT_UP_TO_DATE
            raise RequestRefusedError(reason)
        if frame is None:  # deleted with its second, or unreadable
            raise RequestRefusedError(Reason.NOT_UP_TO_DATE)
        place = found.copies[0]
        moved_ms, progress = self._moved_ms(reference, found), self._view.cleaner.progress
        (due_ms,) = found.dues_ms
        is_done = progress is not None and any(
            progress.covers(due_ms, copy) for copy in found.copies
        )
        is_cancelled = moved_ms is not None or self._history.is_cancelled(
            progress, due_ms, found.copies, found.cancels
        )
        if is_done and found.cancels and not found.complete:
            is_cancelled = is_cancelled or None  # a cancel may lie in what is not here
        half = self._half_state(found, progress) if is_half(frame.columns, place.row) else None
        message = stored_message(
            frame,
            place.row,
            progress,
            cancelled=bool(is_cancelled),
            with_content=True,
            fates=self._fates,
            half=half,
        )
        if moved_ms is not None and message.state == pb.MESSAGE_STATE_CANCELLED:
            message.rescheduled_to_ms = moved_ms
        is_doubtful = message.state == pb.MESSAGE_STATE_DONE and (
            is_cancelled is None or half is not None
        )
        was_taken = message.state == pb.MESSAGE_STATE_DONE and not is_doubtful
        if was_taken or message.state == pb.MESSAGE_STATE_DELIVERED:
            message.state = self._end_of(message, found)
        is_undecided = message.state in _NOT_DONE and bool(found.cancels)
        return MessageAnswer(message, is_doubtful=is_doubtful, is_undecided=is_undecided)

    def _end_of(self, message: pb.StoredMessage, found: Found) -> "pb.MessageState.ValueType":
        """What became of a message that was forwarded, or is a dead letter."""
        if not self._was_delivered(found):
            return pb.MESSAGE_STATE_DONE
        has_own_due = any(header.name == HALF_DELIVER_AT for header in message.headers)
        return pb.MESSAGE_STATE_COMMITTED if has_own_due else pb.MESSAGE_STATE_DELIVERED

    def _half_state(self, found: Found, progress: Progress | None) -> "pb.MessageState.ValueType":
        """The state of a half; what is done may have been decided by what is not here."""
        (due_ms,) = found.dues_ms
        copies, cancels = frozenset(found.copies), frozenset(found.cancels)
        rows = HalfRows(
            due_ms, copies, frozenset(found.commits), frozenset(found.releases), cancels
        )
        state = half_state(rows, progress, self._history)
        is_unsure = state == pb.MESSAGE_STATE_ASKED and not found.complete
        return pb.MESSAGE_STATE_DONE if is_unsure else state

    def _moved_ms(self, reference: Reference, found: Found) -> int | None:
        """The due that a message was rescheduled to: the record shows it before frames do."""
        status, (due_ms,) = self._view.cleaner.status, found.dues_ms
        record = None if status is None else status.reschedules.get(reference.at(due_ms))
        return known_due_ms(record, found.rescheduled_to)

    def _was_delivered(self, found: Found) -> bool:
        """Whether a message that is done was delivered, as far as a loss would be known.

        Of a retry the fate of each copy is needed: another one may have been the dead letter, long
        ago.
        """
        status, (due_ms,) = self._view.cleaner.status, found.dues_ms
        if status is None or not found.complete:
            return False
        return all(
            self._fates.is_known(due_ms, copy, found.releases)
            and (copy.wheel, copy.seq) not in status.lost
            for copy in found.copies
        )

    async def list_slots(
        self, request: pb.ListSlotsRequest, sharer: Hashable
    ) -> pb.ListSlotsResponse:
        """Lists the seconds that hold messages, from the dial, when it is the sharer's turn."""
        status, progress = self._view.status(), self._view.cleaner.progress
        return await self.for_lists(sharer, lambda: self._slots(request, status, progress))

    async def for_lists(self, sharer: Hashable, work: Callable[[], _Made]) -> _Made:
        """Builds a long list on its own thread, one at a time."""
        return await self._lists.take(sharer, work)

    def _slots(
        self, request: pb.ListSlotsRequest, status: ServerStatus, progress: Progress | None
    ) -> pb.ListSlotsResponse:
        limit = slots_at_most(request)
        to_slot = request.to_slot if request.HasField("to_slot") else None
        from_slot = request.from_slot if request.HasField("from_slot") else 0
        if request.bucket_seconds > 1:
            rows = self._dial.sums(from_slot, to_slot, request.bucket_seconds)
        else:
            rows = self._dial.rows(from_slot, to_slot)
        answer = pb.ListSlotsResponse(
            slots=[
                pb.SlotRow(
                    slot=int(row["slot"]),
                    messages=int(row["messages"]),
                    length_bytes=int(row["length_bytes"]),
                    frames=int(row["frames"]),
                    cancels=int(row["cancels"]),
                    wheels=int(row["wheels"]),
                    copies=1,
                )
                for row in rows[:limit]
            ],
            node=status.heartbeat.node,
            wheels=wheels_of(status, self._view, of_all=False),
            progress=progress_message(progress),
            counted_by=[status.heartbeat.node],
            bucket_seconds=request.bucket_seconds,
        )
        answer.silent.extend(_unverified(status))
        if len(rows) > limit:
            answer.next_slot = int(rows[limit]["slot"])
        return answer

    async def get_slot(
        self, request: pb.GetSlotRequest, sharer: Hashable = ""
    ) -> pb.GetSlotResponse:
        """Returns one page of a second's messages; refuses SLOT_INVALID, PAGE_TOKEN_INVALID."""
        if not 0 < request.slot < SLOT_BEYOND:
            raise RequestRefusedError(Reason.SLOT_INVALID)
        status, progress = self._view.status(), self._view.cleaner.progress
        limits = limits_of(status)
        answer = await self._paging.take(
            sharer, lambda: self._pages.page(request, limits, progress)
        )
        answer.silent.extend(_unverified(status))
        return answer

    # --- what the node knows

    def _scope(self) -> _Scope:
        status, cleaner = self._view.status(), self._view.cleaner.status
        if cleaner is None:
            return _Scope(status, limits_of(status))
        return _Scope(status, limits_of(status), cleaner.lost, cleaner.reschedules)

    def knows_all(self, status: ServerStatus | None = None) -> bool:
        """Whether the node holds all that was acknowledged, by its status when the look began.

        Otherwise a frame that it does not hold could be the message, or a cancel.
        """
        cleaner = self._view.cleaner.status
        if cleaner is None:
            return False
        status = status or self._view.status()
        heard = heard_heartbeats(status, status.monotonic_ms)
        return knows_all(cleaner.control, status.heartbeat, heard)

    def damaged(self, wheel: WheelId, seq: int, slot: int) -> None:
        """Reports a frame that could not be read, unless it is lost or finished.

        The floor is looked up only now: if the frame was deleted while it was read, it says so.
        """
        cleaner, floor = self._view.cleaner.status, self._view.status().heartbeat.floor
        is_lost = cleaner is not None and (wheel, seq) in cleaner.lost
        if not is_lost and (floor is None or slot >= floor):
            self._on_damaged(wheel, seq)


def _judged(reference: Reference, found: Found, *, knows_all: bool) -> Found | RequestRefusedError:
    """Returns what was found, unless it does not show which message is meant."""
    found.complete = found.complete and knows_all
    if found.copies and not (found.in_wheel or found.complete):
        return RequestRefusedError(Reason.NOT_UP_TO_DATE, f"Not all of {reference.wheel} is here")
    if len(found.dues_ms) > 1:
        dues = ", ".join(map(str, found.dues_ms[:_DUES_NAMED]))
        return RequestRefusedError(
            Reason.HANDLE_AMBIGUOUS, f"This id was sent with several dues: {dues}"
        )
    return found


def slots_at_most(request: pb.ListSlotsRequest) -> int:
    """How many seconds one answer lists at most."""
    return min(request.limit or _SLOTS_AT_MOST, _SLOTS_AT_MOST)


def limits_of(status: ServerStatus) -> dict[WheelId, int]:
    """Returns the local wheels, each with the last seq to read."""
    return {
        wheel: reported.applied
        for wheel, reported in status.heartbeat.wheels.items()
        if reported.applied
    }


def _unverified(status: ServerStatus) -> Iterator[pb.Silence]:
    """Names this node while it has wheels to verify: it knows nothing of what they hold."""
    if verifying := status.heartbeat.verifying:
        why = f"it has still to verify {counted(len(verifying), 'wheel')}"
        yield pb.Silence(node=status.heartbeat.node, why=why)
