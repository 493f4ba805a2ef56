"""Cancels many messages: those that a search finds, page by page.

A page is searched for, its cancels are written as one request, and each message is answered by
itself, as `core/leader/cancel.py` decides for a message of which nothing else is known:

| a message of the page | its answer is |
|---|---|
| due within the next 100 ms, or its second is sealed or finished | TOO_LATE |
| a cancel of it was seen to count, by committed progress | CANCELLED |
| it has been rescheduled | RESCHEDULED |
| none of these within 10 s | UNSPECIFIED: the cancel may count or not |

A repeated call finds again what is not due yet, with the earlier cancels, and reports the same. So
a caller that did not receive the answer repeats the call.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import numpy as np

from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import ID_LENGTH_BYTES, Columns
from delaywheel.storage.frames.format import Kind
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import (
    CancelDecision,
    CancelView,
    after_writing_many,
    before_writing,
)
from delaywheel_replica.core.leader.holders import holds_progress
from delaywheel_replica.core.protocol.progress import Position
from delaywheel_replica.core.protocol.status_files import CleanerStatus
from delaywheel_replica.link import CommitSoon
from delaywheel_replica.server.commit.writing import Writing
from delaywheel_replica.server.lookup.filters import wanted_of
from delaywheel_replica.server.lookup.scan import message_key
from delaywheel_replica.server.lookup.search import Asked, Page, PageCancels, Search
from delaywheel_replica.server.node.calls_to_nodes import Passing
from delaywheel_replica.server.node.node_view import NodeView, wall_ms
from delaywheel_replica.server.node.refusals import RefusedError

_WAIT_S: Final = 10.0
# This many calls hold a page at once. Further calls are refused before anything is written.
_RUNNING_AT_MOST: Final = 16

_OUTCOMES: Final = {
    CancelDecision.CANCELLED: pb.CANCEL_OUTCOME_CANCELLED,
    CancelDecision.TOO_LATE: pb.CANCEL_OUTCOME_TOO_LATE,
    CancelDecision.RESCHEDULED: pb.CANCEL_OUTCOME_RESCHEDULED,
}


class CancelMany:
    """Cancels the messages that a search finds. For the event loop's thread."""

    def __init__(
        self,
        view: NodeView,
        search: Search,
        writing: Writing,
        passing: Passing,
        *,
        ask: Callable[[CommitSoon], object],
        next_change: Callable[[], Awaitable[object]],
    ) -> None:
        """Prepares; as `Cancels`, with `search` to find messages."""
        self._view = view
        self._search = search
        self._writing = writing
        self._passing = passing
        self._ask = ask
        self._next_change = next_change
        self._running = 0

    async def cancel_many(
        self, request: pb.CancelManyRequest, *, passed: bool
    ) -> pb.CancelManyResponse:
        """Cancels a page of messages, or only returns them.

        Raises:
            RefusedError: FILTER_MISSING, NO_LEADER, SEARCHES_BUSY, and those of filters and of the
                writing.
        """
        wanted = wanted_of(request.filter)
        if not wanted.names_something:
            raise RefusedError(Reason.FILTER_MISSING)
        if self._view.cleaner.leading() is None:
            address = None if passed else self._passing.leader_address()
            if address is None:
                raise RefusedError(Reason.NO_LEADER)
            return await self._passing.cancel_many(address, request)
        if self._running >= _RUNNING_AT_MOST:
            raise RefusedError(Reason.SEARCHES_BUSY)
        self._running += 1
        try:
            asked = Asked(wanted, request.page_token, request.limit, with_cancelled=True)
            page = await self._search.page(asked)
            decisions = await (self._known(page) if request.dry_run else self._cancel(page))
        finally:
            self._running -= 1
        return self._answer(page, decisions)

    async def _cancel(self, page: Page) -> dict[bytes, CancelDecision]:
        """Returns the decision on each message of a page."""
        copies = _places(page)
        cancels = PageCancels(copies)
        # What was not examined yet is written again, and examined before it is answered.
        await self._search.look_for_cancels(cancels)
        decisions = {
            key: before_writing(self._sight(key, place, cancels, self._view.cleaner.status))
            for key, place in copies.items()
        }
        if CancelDecision.NO_LEADER in decisions.values():
            raise RefusedError(Reason.NO_LEADER)
        chosen = [key for key, decided in decisions.items() if decided is CancelDecision.WRITE]
        if chosen:
            written = await self._writing.submit(_cancels_of(chosen), Kind.CANCELS)
            for row, refusal in written.failed.items():
                too_late = refusal.reason is Reason.DUE_TOO_OLD
                decisions[chosen[row]] = (
                    CancelDecision.TOO_LATE if too_late else CancelDecision.UNKNOWN
                )
            await self._search.look_for_cancels(cancels)
        waiting = {
            key: copies[key]
            for key, decided in decisions.items()
            if decided in {CancelDecision.WRITE, CancelDecision.WAIT, CancelDecision.CONFIRM}
        }
        if waiting:
            decisions |= await self._wait(waiting, cancels)
        return decisions

    async def _known(self, page: Page) -> dict[bytes, CancelDecision]:
        """Returns decisions on messages that were cancelled before."""
        copies = _places(page, pb.MESSAGE_STATE_CANCELLED)
        return await self._confirmed(copies, PageCancels(copies)) if copies else {}

    async def _confirmed(
        self, copies: Mapping[bytes, Position], cancels: PageCancels
    ) -> dict[bytes, CancelDecision]:
        """Decides after a scan that has every frame up to V of the deciding progress."""
        status = self._view.cleaner.status
        if status is None or not holds_progress(status.control, self._view.status().heartbeat):
            return dict.fromkeys(copies, CancelDecision.WAIT)
        readable = await self._search.look_for_cancels(cancels)
        return after_writing_many(
            {
                key: self._sight(key, place, cancels, status, confirmed=True, readable=readable)
                for key, place in copies.items()
            }
        )

    async def _wait(
        self, waiting: Mapping[bytes, Position], cancels: PageCancels
    ) -> dict[bytes, CancelDecision]:
        """Follows committed progress until every message is decided, or time is up."""
        self._ask(CommitSoon())
        decisions = dict.fromkeys(waiting, CancelDecision.WAIT)
        try:
            async with asyncio.timeout(_WAIT_S):
                while True:
                    status = self._view.cleaner.status
                    decisions |= after_writing_many(
                        {
                            key: self._sight(key, place, cancels, status)
                            for key, place in waiting.items()
                            if decisions[key] is CancelDecision.WAIT
                        }
                    )
                    doubtful = {
                        key: waiting[key]
                        for key, decided in decisions.items()
                        if decided is CancelDecision.CONFIRM
                    }
                    if doubtful:
                        decisions |= await self._confirmed(doubtful, cancels)
                    if CancelDecision.WAIT not in decisions.values():
                        return decisions
                    await self._next_change()
        except TimeoutError:
            return decisions

    def _sight(
        self,
        key: bytes,
        copy: Position,
        cancels: PageCancels,
        status: CleanerStatus | None,
        *,
        confirmed: bool = False,
        readable: bool = True,
    ) -> CancelView:
        due_ms = int.from_bytes(key[ID_LENGTH_BYTES:], "little")
        found = cancels.found[key]
        return CancelView(
            due_ms=due_ms,
            now_ms=wall_ms(),
            leading=self._view.cleaner.leading() is not None,
            progress=None if status is None else status.progress,
            copies=(copy,),
            cancels=found.places,
            complete=False,  # other copies are unknown
            readable=readable,
            rescheduled=found.rescheduled
            or (status is not None and (key[:ID_LENGTH_BYTES], due_ms) in status.reschedules),
            confirmed=confirmed,
        )

    def _answer(
        self, page: Page, decisions: Mapping[bytes, CancelDecision]
    ) -> pb.CancelManyResponse:
        answer = pb.CancelManyResponse(
            next_page_token=page.next_token,
            looked=page.looked(self._view.status().heartbeat.node),
        )
        for message in page.messages:
            decided = decisions.get(message_key(message.id, message.due_ms))
            answer.results.add(
                handle=message.handle,
                due_ms=message.due_ms,
                topic=message.topic,
                outcome=pb.CANCEL_OUTCOME_UNSPECIFIED
                if decided is None
                else _OUTCOMES.get(decided, pb.CANCEL_OUTCOME_UNSPECIFIED),
            )
        return answer


def _places(page: Page, state: "pb.MessageState.ValueType | None" = None) -> dict[bytes, Position]:
    """Returns the positions of a page's messages; with a state, only of those in it."""
    return {
        message_key(message.id, message.due_ms): place
        for message, place in zip(page.messages, page.places, strict=True)
        if state in {None, message.state}
    }


def _cancels_of(keys: list[bytes]) -> Columns:
    dues_ms = [int.from_bytes(key[ID_LENGTH_BYTES:], "little") for key in keys]
    ids = np.frombuffer(b"".join(key[:ID_LENGTH_BYTES] for key in keys), dtype=np.uint8)
    return Columns.of_cancels(np.array(dues_ms, dtype=np.int64), ids.reshape(-1, ID_LENGTH_BYTES))
