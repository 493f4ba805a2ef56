"""Group commit: one thread writes what many callers sent.

Whatever arrived while the last group was being written is the next group: no linger, so a single
caller waits for nobody, and groups grow by themselves under load. A caller is answered when its
frames lie behind their index rows (and, with flush = "group", on the medium) and W members hold
them: never before.

The wheel in use, as this module sees it:

========  ================================  ===================================================
state     how it is reached                 what callers get
========  ================================  ===================================================
none      start; ``drop``                   NO_WHEEL
in use    ``use``                           their handles, or the reasons of single messages
broken    a write or sync failed            WHEEL_LOST (unknown) for what is not known to count,
                                            from then on NO_WHEEL; the node is told, drops the
                                            wheel and opens its spare
========  ================================  ===================================================

The lock is held while a group is written: whoever looks at or changes wheel and origin together
(seal, ``drop``) sees them between two groups.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from delaywheel.columns import Columns
from delaywheel.format import Kind
from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.slotfiles import SlotFull
from delaywheel.wheel import FramePlace, OriginWheel, WheelBroken
from delaywheel_replica.core.origin import Origin
from delaywheel_replica.server.refusals import Refusal, RefusedError

_GROUP_MESSAGES: Final = 20_000
_GROUP_BYTES: Final = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Committed:
    """What became of one request's messages.

    Attributes:
        wheel: where the accepted ones are.
        seq: the seq of the last frame of the group: through it, the request is held.
        failed: row -> why it was not accepted.
    """

    wheel: WheelId
    seq: int
    failed: dict[int, Refusal]


class Books(Protocol):
    """Who keeps the ledger."""

    def enter(
        self,
        wheel: WheelId,
        columns: Columns | None,
        places: Sequence[FramePlace],
        accepted_at_ms: int,
    ) -> None:
        """Takes note of the frames of a group; ``columns`` is None when they are cancels."""


@dataclass(frozen=True, slots=True)
class Line:
    """The wheel in use, between two groups.

    Attributes:
        origin: who holds it, what is acknowledged and sealed.
        top_slot: the greatest slot that a frame of it has; -1: none.
    """

    wheel: WheelId
    origin: Origin
    top_slot: int


@dataclass(slots=True)
class _Waiting:
    """One request in the queue."""

    columns: Columns
    kind: Kind
    answer: "asyncio.Future[Committed]"

    @property
    def length_bytes(self) -> int:
        return len(self.columns.blob)


@dataclass(slots=True)
class _Group:
    """The requests of one kind that are written together, and what became of each message.

    ``verdicts`` has a number for each message: 0 = accepted, else an index into ``reasons``.
    """

    requests: list[_Waiting]
    columns: Columns
    verdicts: NDArray[np.uint8]
    reasons: list[Refusal]

    @classmethod
    def of(cls, requests: list[_Waiting]) -> "_Group":
        columns = Columns.concat([request.columns for request in requests])
        return cls(
            requests, columns, np.zeros(len(columns), dtype=np.uint8), [Refusal(Reason.INTERNAL)]
        )

    def refuse(self, messages: NDArray[np.bool_] | NDArray[np.intp], refusal: Refusal) -> None:
        self.reasons.append(refusal)
        self.verdicts[messages] = len(self.reasons) - 1

    def failed_rows(self) -> list[dict[int, Refusal]]:
        """For each request: its rows that were not accepted."""
        if not self.verdicts.any():
            return [{} for _ in self.requests]
        failed = []
        begin = 0
        for request in self.requests:
            verdicts = self.verdicts[begin : begin + len(request.columns)]
            rows = np.flatnonzero(verdicts).tolist()
            failed.append({row: self.reasons[verdicts[row]] for row in rows})
            begin += len(request.columns)
        return failed


_Answers: TypeAlias = list[tuple["asyncio.Future[Committed]", Committed | RefusedError]]


class Committer:
    """The one writer of the node's own wheels.

    ``submit`` and ``end`` are for the event loop's thread; the rest may be called from any.
    """

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        books: Books,
        sync_groups: bool,
        clock_ms: Callable[[], int],
        on_held: Callable[[int], None],
        on_broken: Callable[[WheelId, str], None],
    ) -> None:
        """Prepares; ``start`` starts the thread.

        Args:
            loop: where the callers wait.
            books: gets every accepted message.
            sync_groups: acknowledge only what is on the medium.
            clock_ms: the wall clock.
            on_held: the high watermark moved; with the least due of what was written.
            on_broken: the wheel in use takes no more, and why. Both on the writer's thread.
        """
        self._loop = loop
        self._books = books
        self._sync_groups = sync_groups
        self._clock_ms = clock_ms
        self._on_held = on_held
        self._on_broken = on_broken
        self._queue: SimpleQueue[_Waiting | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._wheel: OriginWheel | None = None
        self._line: Line | None = None
        # The leader's clock and the late window, of a seal not yet given.
        self._seal_wanted: tuple[int | None, int] | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def start(self) -> None:
        """Starts the writer's thread."""
        self._thread.start()

    def end(self) -> None:
        """Takes no more: what is submitted from now on is refused. On the event loop's thread."""
        self._ended = True
        self._queue.put(None)

    def join(self) -> None:
        """Blocks until everything submitted before the end is answered."""
        self._thread.join()

    @property
    def line(self) -> Line | None:
        """The wheel in use, as of the last group; None: there is none."""
        return self._line

    @property
    def wheel(self) -> OriginWheel | None:
        """The wheel in use, for its checkpoints and deletions."""
        return self._wheel

    def use(self, wheel: OriginWheel, origin: Origin) -> None:
        """Takes a wheel that was just opened into use."""
        with self._lock:
            self._wheel = wheel
            self._line = Line(wheel.wheel, origin, top_slot=-1)

    def finish(self) -> None:
        """The wheel takes no more; when this returns, nothing of it is being written."""
        with self._lock:
            if self._wheel is not None:
                self._wheel.close()

    def drop(self) -> None:
        """Forgets the wheel, once what it holds is told in another way."""
        with self._lock:
            self._wheel = self._line = None

    def seal(self, *, leader_clock_ms: int | None, late_window_s: int) -> None:
        """Moves the seal; while a group is written, the writer does it behind that group."""
        self._seal_wanted = leader_clock_ms, late_window_s
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._seal()
        finally:
            self._lock.release()

    def submit(self, columns: Columns, kind: Kind = Kind.MESSAGES) -> "asyncio.Future[Committed]":
        """Has a request's messages written; the answer comes when they may be acknowledged.

        It is a RefusedError when none of them was accepted, or (WHEEL_LOST) that is not known.
        """
        answer: asyncio.Future[Committed] = self._loop.create_future()
        if self._ended:
            answer.set_exception(RefusedError(Reason.DRAINING))
            return answer
        self._queue.put(_Waiting(columns, kind, answer))
        return answer

    def _seal(self) -> None:
        """With the lock held. A broken wheel may hold more than is known: it is sealed no more."""
        wanted, self._seal_wanted = self._seal_wanted, None
        line, wheel = self._line, self._wheel
        if wanted is None or line is None or wheel is None or wheel.broken is not None:
            return
        leader_clock_ms, late_window_s = wanted
        origin = line.origin.sealed(
            own_clock_ms=self._clock_ms(),
            leader_clock_ms=leader_clock_ms,
            late_window_s=late_window_s,
        )
        self._line = replace(line, origin=origin)

    # --- the writer's thread

    def _run(self) -> None:
        ended = False
        while not ended:
            requests, ended = self._take()
            if requests:
                answers = self._write_all(requests)
                self._loop.call_soon_threadsafe(_settle, answers)

    def _take(self) -> tuple[list[_Waiting], bool]:
        """Waits for one request and takes all others that are there, within a group's bounds."""
        first = self._queue.get()
        if first is None:
            return [], True
        requests = [first]
        messages, length_bytes = len(first.columns), first.length_bytes
        while messages < _GROUP_MESSAGES and length_bytes < _GROUP_BYTES:
            try:
                request = self._queue.get_nowait()
            except Empty:
                break
            if request is None:
                return requests, True
            requests.append(request)
            messages += len(request.columns)
            length_bytes += request.length_bytes
        return requests, False

    def _write_all(self, requests: list[_Waiting]) -> _Answers:
        answers: _Answers = []
        for kind in Kind:
            group = [request for request in requests if request.kind is kind]
            if group:
                answers += self._write(group, kind)
        return answers

    def _write(self, requests: list[_Waiting], kind: Kind) -> _Answers:
        try:
            with self._lock:
                group = _Group.of(requests)
                wheel, seq = self._write_group(group, kind)
                self._seal()
        except RefusedError as error:
            return [(request.answer, error) for request in requests]
        return [
            (request.answer, Committed(wheel, seq, failed))
            for request, failed in zip(requests, group.failed_rows(), strict=True)
        ]

    def _write_group(self, group: _Group, kind: Kind) -> tuple[WheelId, int]:
        wheel, line = self._wheel, self._line
        if wheel is None or line is None or wheel.broken is not None:
            raise RefusedError(Reason.NO_WHEEL)
        origin = line.origin
        if len(origin.in_sync) < origin.min_insync:
            raise RefusedError(
                Reason.NOT_ENOUGH_REPLICAS,
                f"{len(origin.in_sync)} of {origin.min_insync} members are in sync",
            )
        if origin.seal.slot > int(group.columns.due_ms.min()) // 1000:
            sealed = group.columns.slots < origin.seal.slot
            group.refuse(sealed, Refusal(Reason.DUE_TOO_OLD, "Its second is sealed"))
        accepted_at_ms = self._clock_ms()
        broken: WheelBroken | None = None
        try:
            columns, places = _append(wheel, group, kind, accepted_at_ms)
            if self._sync_groups:
                wheel.sync()
        except _BrokenError as error:
            columns, places, broken = error.columns, error.cause.done, error.cause
        except WheelBroken as error:  # of the sync: what the medium holds is unknown
            group.refuse(group.verdicts == 0, Refusal(Reason.WHEEL_LOST, str(error)))
            places, broken = [], error
        if places:
            self._held(line, places, columns)
            entered = columns if kind is Kind.MESSAGES else None
            self._books.enter(wheel.wheel, entered, places, accepted_at_ms)
        if broken is not None:
            self._on_broken(wheel.wheel, str(broken))
        return wheel.wheel, wheel.last_seq

    def _held(self, line: Line, places: Sequence[FramePlace], columns: Columns) -> None:
        """Everything written is held: by this node alone, which may be enough."""
        self._line = replace(
            line,
            origin=line.origin.held(line.origin.node, places[-1].seq),
            top_slot=max(line.top_slot, places[-1].slot),
        )
        self._on_held(int(columns.due_ms.min()))


class _BrokenError(Exception):
    """The wheel broke while these columns were being appended."""

    def __init__(self, columns: Columns, cause: WheelBroken) -> None:
        super().__init__(str(cause))
        self.columns = columns
        self.cause = cause


def _append(
    wheel: OriginWheel, group: _Group, kind: Kind, accepted_at_ms: int
) -> tuple[Columns, list[FramePlace]]:
    """Appends those messages of a group that are not refused; full slots are left out.

    Returns:
        What was appended, and where its frames are.

    Raises:
        _BrokenError: the wheel broke; messages that are not known to count are refused.
    """
    while True:
        columns, rows = group.columns, None
        if group.verdicts.any():
            rows = np.flatnonzero(group.verdicts == 0)
            columns = columns.take(rows)
        if not len(columns):
            return columns, []
        try:
            return columns, wheel.append(columns, kind=kind, accepted_at_ms=accepted_at_ms)
        except SlotFull as error:
            full = (group.columns.slots == error.slot) & (group.verdicts == 0)
            group.refuse(full, Refusal(Reason.SLOT_FULL, f"Second {error.slot}"))
        except WheelBroken as error:
            _refuse_undone(group, rows, error)
            raise _BrokenError(columns, error) from error


def _refuse_undone(group: _Group, rows: NDArray[np.intp] | None, error: WheelBroken) -> None:
    """Of a group in which the wheel broke, only frames that have their index rows count."""
    undone = group.verdicts == 0
    for place in error.done:
        undone[place.rows if rows is None else rows[place.rows]] = False
    group.refuse(undone, Refusal(Reason.WHEEL_LOST, str(error)))


def _settle(answers: _Answers) -> None:
    """On the event loop: one call for a whole group, so that its callers go on together."""
    for answer, outcome in answers:
        if answer.done():  # its caller gave up
            continue
        if isinstance(outcome, RefusedError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
