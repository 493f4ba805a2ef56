"""Writes what the leader decided about other dues: the copy, then the cancel with its mark.

The leader's node does this, whichever node received the request (core/leader/rescheduling.py). It
reports what is written to its cleaner until the record is gone, or shows that it is written.

What is decided while a batch is copied forms the next one. A batch is read with one hand-over to a
thread that reads nothing else, and each of its halves is one group on the wheel: all copies, then
all cancels. The next one is copied while these are written.
The bytes of its copies are bounded; what is beyond comes next. If a cancel fails, its copy is not
written again.

| a message is | until | then |
|---|---|---|
| decided | the batch before is copied | read and copied, with all that are decided by then |
| copied | W members hold its copy | its callers are answered; cancelled, beside the next batch |
| cancelled | W members hold that, or it is refused | reported; or cancelled at the next progress |
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from math import inf
from typing import Final, NamedTuple

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.protocol.reschedules import (
    MessageKey,
    Reschedule,
    RescheduleWritten,
    mark_of,
)
from delaywheel_replica.core.protocol.status_files import CleanerStatus
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.access.spending import TopicRooms, no_quotas, no_room
from delaywheel_replica.server.commit.committer import Committed
from delaywheel_replica.server.commit.writing import Writing
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.node.naming import rows_naming
from delaywheel_replica.server.node.node_view import NodeView
from delaywheel_replica.server.node.refusals import RequestRefusedError, refusal_of

COPIES_BYTES: Final = 4 << 20
"""The copies of a batch hold at most this much together, unless there is only one."""

_log = get_logger(__name__)


class Copy(NamedTuple):
    """A copy that W members hold: for this due, in this frame."""

    to_ms: int
    wheel: WheelId
    seq: int


class DecidedDues:
    """Writes decided reschedules, while this node's cleaner leads. For the event loop's thread."""

    def __init__(
        self,
        view: NodeView,
        queries: Queries,
        writing: Writing,
        *,
        report: Callable[[RescheduleWritten], object],
        next_change: Callable[[], Awaitable[object]],
        topic_rooms: TopicRooms = no_quotas,
    ) -> None:
        """Prepares; `run` writes.

        Args:
            next_change: Waits for a new progress or role in the cleaner's row.
            topic_rooms: A copy is one more message until its due: it needs room.
        """
        self._topic_rooms = topic_rooms
        self._view = view
        self._queries = queries
        self._writing = writing
        self._report = report
        self._next_change = next_change
        self._copies: dict[MessageKey, Copy] = {}
        self._written: dict[MessageKey, RescheduleWritten] = {}
        self._cancelling: set[MessageKey] = set()
        self._progressed = asyncio.Event()
        # In the order in which they came.
        self._waiting: dict[MessageKey, dict[asyncio.Future[None], None]] = {}
        self._seen: Mapping[MessageKey, Reschedule] = {}

    def check_room(self, topic: str) -> None:
        """Refuses a copy, once as much as its quota allows is pending in a topic on this node.

        Raises:
            RequestRefusedError: QUOTA_EXCEEDED.
        """
        room_in = self._topic_rooms()
        room = None if room_in is None else room_in(topic)
        if room is not None and min(room) <= 0:
            what = "messages" if room.messages <= 0 else "bytes"
            raise RequestRefusedError.of(no_room(topic, what))

    async def run(self) -> None:
        """Writes decided reschedules until the task is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._write_batches(tasks))

    async def _follow(self) -> None:
        """Reports what is written, and wakes callers whose record has changed, at each progress."""
        while True:
            leading = self._view.cleaner.leading()
            if leading is not None:
                self._report_taken(leading)
                self._progressed.set()
            self._wake(leading)
            await self._next_change()

    async def _write_batches(self, tasks: asyncio.TaskGroup) -> None:
        """Writes; what is not written now is tried again at the next progress."""
        while True:
            await self._progressed.wait()
            self._progressed.clear()
            tried: set[MessageKey] = set()
            while batch := self._to_write(tried):
                try:
                    examined = await self._copy(batch)
                except Exception as error:  # noqa: BLE001 - it is named, and tried again
                    refusal_of(error)
                    break
                tried.update(examined)
                copied = {
                    key: batch[key] for key in examined if _has(self._copies, key, batch[key])
                }
                self._cancelling.update(copied)
                tasks.create_task(self._cancel(copied))

    def copy(self, key: MessageKey) -> Copy | None:
        """Returns the copy of a message whose record stands: it can be found at that due."""
        return self._copies.get(key)

    async def await_change(self, key: MessageKey, within_s: float) -> None:
        """Waits until the record of a message changes, or its copy is held; at most so long.

        Progress comes some forty times a second; nearly all of it is of other messages. So those
        that wait for it do not look at each.
        """
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, {})[changed] = None
        try:
            async with asyncio.timeout(within_s):
                await changed
        except TimeoutError:
            pass
        finally:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.pop(changed, None)
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
            if key.due_ms <= done_ms or records.get(key) != self._seen.get(key):
                self._tell(key)
        self._seen = records

    def _tell(self, key: MessageKey) -> None:
        for told in self._waiting.pop(key, ()):
            if not told.done():
                told.set_result(None)

    def _report_taken(self, status: CleanerStatus) -> None:
        for known in (self._written, self._copies):
            for key in known.keys() - status.reschedules.keys():
                del known[key]
        for key, written in self._written.items():
            record = status.reschedules[key]
            is_asked_for = not record.is_written and written.to_ms == record.to_ms
            if is_asked_for and _is_taken(written, status):
                self._report(written)

    def _to_write(self, tried: set[MessageKey]) -> dict[MessageKey, Reschedule]:
        """Returns what is decided, not written, and not tried since the last progress."""
        leading = self._view.cleaner.leading()
        if leading is None:
            return {}
        return {
            key: record
            for key, record in leading.reschedules.items()
            if not record.is_written
            and key not in tried
            and key not in self._cancelling
            and not _has(self._written, key, record)
        }

    async def _copy(self, batch: Mapping[MessageKey, Reschedule]) -> Collection[MessageKey]:
        """Writes the copies; the cancels come after, as they alone would remove the messages.

        Returns:
            The messages that were examined.
        """
        uncopied = {
            key: record
            for key, record in sorted(batch.items(), key=lambda item: item[1].place)
            if not _has(self._copies, key, record)
        }
        places = [(key.due_ms // 1000, record.place) for key, record in uncopied.items()]
        read = await self._queries.to_copy(places, COPIES_BYTES) if places else []
        examined = batch.keys() - [*uncopied][len(read) :]
        copies = {
            key: replace(columns, due_ms=np.array([batch[key].to_ms], dtype=np.int64))
            for key, columns in zip(uncopied, read, strict=False)
            if columns is not None  # otherwise the frame is missing and requested
        }
        for key, wrote in await self._submitted(copies, Kind.MESSAGES):
            if not wrote.failed:  # otherwise it is too late for this due: the leader puts it off
                self._copies[key] = Copy(batch[key].to_ms, wrote.wheel, wrote.seq)
                self._tell(key)
        return examined

    async def _cancel(self, copied: Mapping[MessageKey, Reschedule]) -> None:
        """Writes the cancels of messages whose copies are held, and reports both.

        Copies are forgotten with their records: those that are gone by now need no cancel.
        """
        copies = {key: self._copies[key] for key in copied if key in self._copies}
        cancels = {key: _cancel_of(key, copied[key]) for key in copies}
        try:
            for key, cancelled in await self._submitted(cancels, Kind.CANCELS):
                copy = copies[key]
                reasons = {refusal.reason for refusal in cancelled.failed.values()}
                if reasons <= {Reason.DUE_TOO_OLD}:
                    written = self._written[key] = RescheduleWritten(
                        key,
                        copy.to_ms,
                        (copy.wheel, copy.seq),
                        None if reasons else (cancelled.wheel, cancelled.seq),
                    )
                    self._report(written)
        except Exception as error:  # noqa: BLE001 - it is named, and tried again
            refusal_of(error)
        finally:
            self._cancelling.difference_update(copied)

    async def _submitted(
        self, requests: Mapping[MessageKey, Columns], kind: Kind
    ) -> list[tuple[MessageKey, Committed]]:
        """Writes requests together; returns those that were not refused as a whole.

        If they are too many for a group, each has the frames of its own one.
        """
        answers = [self._writing.submit(columns, kind) for columns in requests.values()]
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
        committed: list[tuple[MessageKey, Committed]] = []
        for key, outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, RequestRefusedError):
                reason = outcome.refusal.reason.value
                _log.info("a reschedule is not written", reason=reason)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                committed.append((key, outcome))
        return committed


def _has(
    known: Mapping[MessageKey, Copy] | Mapping[MessageKey, RescheduleWritten],
    key: MessageKey,
    record: Reschedule,
) -> bool:
    """Whether this is known for the due that the record states by now."""
    each = known.get(key)
    return each is not None and each.to_ms == record.to_ms


def _is_taken(written: RescheduleWritten, status: CleanerStatus) -> bool:
    """Whether all frames are <= V: the next transaction can settle it, no earlier one could."""
    progress = status.progress
    frames = [written.copy] if written.cancel is None else [written.copy, written.cancel]
    return progress is not None and all(seq <= progress.seq(wheel) for wheel, seq in frames)


def _cancel_of(key: MessageKey, record: Reschedule) -> Columns:
    """The cancel and its mark: two rows of one second, side by side."""
    return rows_naming([key, key._replace(id=mark_of(key, record.to_ms))])
