"""Writes what the leader decided about other dues: the copy, then the cancel with its mark.

The leader's node does this, whichever node received the request (core/leader/rescheduling.py). It
reports what is written to its cleaner until the record is gone, or shows that it is written.

Copies are read out of their frames one at a time, and the bytes of those being written are bounded.
If the cancel fails, the copy is not written again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from typing import Final, NamedTuple

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import ID_LENGTH_BYTES, Columns
from delaywheel.storage.frames.format import Kind
from delaywheel_replica.core.protocol.reschedules import (
    MessageKey,
    Reschedule,
    RescheduleWritten,
    mark_of,
)
from delaywheel_replica.core.protocol.status_files import CleanerStatus
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.commit.writing import Writing
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.node.node_view import NodeView
from delaywheel_replica.server.node.refusals import RefusedError

COPIES_BYTES: Final = 4 << 20
"""Copies being written hold at most this much together, unless there is only one."""

_log = get_logger(__name__)


class _Copy(NamedTuple):
    """A copy that is written: for this due, in this frame."""

    to_ms: int
    wheel: WheelId
    seq: int


class Decisions:
    """Writes decided reschedules, while this node's cleaner leads. For the event loop's thread."""

    def __init__(
        self,
        view: NodeView,
        queries: Queries,
        writing: Writing,
        *,
        report: Callable[[RescheduleWritten], object],
        next_change: Callable[[], Awaitable[object]],
    ) -> None:
        """Prepares; `run` writes.

        Args:
            view: What the parts know of the node.
            queries: Reads what is to be copied.
            writing: Writes copies and cancels.
            report: Sends a report to the cleaner.
            next_change: Waits for a new progress or role in the cleaner's row.
        """
        self._view = view
        self._queries = queries
        self._writing = writing
        self._report = report
        self._next_change = next_change
        self._tasks: dict[MessageKey, asyncio.Task[None]] = {}
        self._copies: dict[MessageKey, _Copy] = {}
        self._written: dict[MessageKey, RescheduleWritten] = {}
        self._reading = asyncio.Lock()
        self._room = _Room(COPIES_BYTES)
        self._waiting: dict[MessageKey, set[asyncio.Future[None]]] = {}
        self._seen: Mapping[MessageKey, Reschedule] = {}

    async def run(self) -> None:
        """Writes decided reschedules until the task is cancelled."""
        try:
            while True:
                leading = self._view.cleaner.leading()
                if leading is not None:
                    self._write_all(leading)
                self._wake(leading)
                await self._next_change()
        finally:
            for task in self._tasks.values():
                task.cancel()

    def written(self, key: MessageKey) -> RescheduleWritten | None:
        """Returns the frames of a message whose record stands."""
        return self._written.get(key)

    async def news(self, key: MessageKey, within_s: float) -> None:
        """Waits until the record of a message changes, or is written; at most so long.

        Progress comes some forty times a second; nearly all of it is of other messages. So those
        that wait for it do not look at each.
        """
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(told)
        try:
            async with asyncio.timeout(within_s):
                await told
        except TimeoutError:
            pass
        finally:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(told)
                if not waiting:
                    del self._waiting[key]

    def _wake(self, leading: CleanerStatus | None) -> None:
        """Tells those whose message is decided, or due; and all, if this node does not lead."""
        records: Mapping[MessageKey, Reschedule] = {}
        done_ms = inf
        if leading is not None:
            records = leading.reschedules
            done_ms = -inf if leading.progress is None else leading.progress.last_due_ms
        for key in list(self._waiting):
            if key[1] <= done_ms or records.get(key) != self._seen.get(key):
                self._tell(key)
        self._seen = records

    def _tell(self, key: MessageKey) -> None:
        for told in self._waiting.pop(key, ()):
            if not told.done():
                told.set_result(None)

    def _write_all(self, status: CleanerStatus) -> None:
        for known in (self._written, self._copies):
            for key in known.keys() - status.reschedules.keys():
                del known[key]
        for key, stands in status.reschedules.items():
            written = self._written.get(key)
            if stands.is_written or key in self._tasks:
                continue
            if written is not None and written.to_ms == stands.to_ms:
                if _is_taken(written, status):
                    self._report(written)
            else:
                self._tasks[key] = asyncio.create_task(self._write(key, stands))

    async def _write(self, key: MessageKey, stands: Reschedule) -> None:
        """Writes the copy before the cancel, which alone would remove the message."""
        try:
            copy = self._copies.get(key)
            if copy is None or copy.to_ms != stands.to_ms:
                copy = await self._write_copy(key, stands)
            if copy is None:
                return
            self._copies[key] = copy
            columns = _cancel_of(key, stands.to_ms)
            cancelled = await self._writing.submit(columns, Kind.CANCELS)
            reasons = {refusal.reason for refusal in cancelled.failed.values()}
            if reasons <= {Reason.DUE_TOO_OLD}:
                self._written[key] = RescheduleWritten(
                    key,
                    stands.to_ms,
                    (copy.wheel, copy.seq),
                    None if reasons else (cancelled.wheel, cancelled.seq),
                )
                self._report(self._written[key])
                self._tell(key)
        except RefusedError as error:
            _log.info("a reschedule is not written", reason=error.refusal.reason.value)
        finally:
            del self._tasks[key]

    async def _write_copy(self, key: MessageKey, stands: Reschedule) -> _Copy | None:
        """Returns None if the frame is missing and requested, or it is too late for this due."""
        async with self._reading:  # a task that waits for room holds one message
            columns = await self._queries.message(key[1] // 1000, stands.place)
            if columns is None:
                return None
            length_bytes = int(columns.lengths_bytes.sum())
            await self._room.wait_for(length_bytes)
        async with self._room.taken(length_bytes):
            due_ms = np.array([stands.to_ms], dtype=np.int64)
            written = await self._writing.submit(replace(columns, due_ms=due_ms))
        if written.failed:
            return None  # the leader puts it off
        return _Copy(stands.to_ms, written.wheel, written.seq)


class _Room:
    """Room for a number of bytes; at least one message fits, however long it is."""

    def __init__(self, length_bytes: int) -> None:
        self._length_bytes = length_bytes
        self._taken_bytes = 0
        self._given_back = asyncio.Event()

    async def wait_for(self, length_bytes: int) -> None:
        """Waits until there is room, for one task at a time, which takes it at once."""
        while self._taken_bytes and self._taken_bytes + length_bytes > self._length_bytes:
            self._given_back.clear()
            await self._given_back.wait()

    @asynccontextmanager
    async def taken(self, length_bytes: int) -> AsyncIterator[None]:
        """Takes the room, and releases it at the end."""
        self._taken_bytes += length_bytes
        try:
            yield
        finally:
            self._taken_bytes -= length_bytes
            self._given_back.set()


def _is_taken(written: RescheduleWritten, status: CleanerStatus) -> bool:
    """Whether all frames are <= V: the next transaction can settle it, no earlier one could."""
    progress = status.progress
    frames = [written.copy] if written.cancel is None else [written.copy, written.cancel]
    return progress is not None and all(seq <= progress.seq(wheel) for wheel, seq in frames)


def _cancel_of(key: MessageKey, to_ms: int) -> Columns:
    """The cancel and its mark: two rows of one second, so of one frame."""
    id_, due_ms = key
    ids = np.frombuffer(id_ + mark_of(key, to_ms), dtype=np.uint8)
    dues_ms = np.array([due_ms, due_ms], dtype=np.int64)
    return Columns.of_cancels(dues_ms, ids.reshape(2, ID_LENGTH_BYTES))
