"""Cancels many messages: those that a search finds, page by page.

The messages of a page are cancelled as those of a `Cancel` call that names them (gathering.py). A
repeated call finds again what is not due yet, with the earlier cancels, and reports the same. So a
caller that did not receive the answer repeats the call.

The node that is asked judges its caller, as for all calls. It passes on in which topics that may
change something, so that the leader's node finds nothing else, whatever grants it has itself.
"""

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Final

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.server.access.callers import Caller
from delaywheel_replica.server.access.rights import Right
from delaywheel_replica.server.access.showing import searchable
from delaywheel_replica.server.changing.awaited import OF_ALL
from delaywheel_replica.server.changing.cancels import OUTCOMES
from delaywheel_replica.server.changing.gathering import CancelGroups
from delaywheel_replica.server.changing.waiting import Answered, Decided
from delaywheel_replica.server.lookup.filters import wanted_of
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.lookup.search import Asked, Page, Search
from delaywheel_replica.server.node.calls_to_nodes import WAIT_S, Passing
from delaywheel_replica.server.node.node_view import NodeView
from delaywheel_replica.server.node.refusals import RequestRefusedError

# This many calls hold a page at once. Further calls are refused before anything is written.
_RUNNING_AT_MOST: Final = 16
_CANCELLED: Final = frozenset({pb.MESSAGE_STATE_CANCELLED, pb.MESSAGE_STATE_ROLLED_BACK})


class CancelMany:
    """Cancels the messages that a search finds. For the event loop's thread."""

    def __init__(
        self, view: NodeView, search: Search, groups: CancelGroups, passing: Passing
    ) -> None:
        self._view = view
        self._search = search
        self._groups = groups
        self._passing = passing
        self._running = 0

    async def cancel_many(
        self, request: pb.CancelManyRequest, caller: Caller
    ) -> pb.CancelManyResponse:
        """Cancels a page of messages, or only returns them.

        Args:
            caller: Who asks: only what they may change is found.

        Raises:
            RefusedError: FILTER_MISSING, FORBIDDEN, NO_LEADER, SEARCHES_BUSY, BACKPRESSURE, and
                those of filters.
        """
        wanted = wanted_of(request.filter)
        found_in = searchable(caller, Right.CHANGE, request.filter).within(request.within)
        wanted = wanted.only_in(found_in.test)
        if not wanted.names_something:
            raise RequestRefusedError(Reason.FILTER_MISSING)
        if self._view.cleaner.leading() is None:
            address = None if caller.is_node else self._passing.leader_address()
            if address is None:
                raise RequestRefusedError(Reason.NO_LEADER)
            passed = pb.CancelManyRequest()
            passed.CopyFrom(request)
            del passed.within[:]
            passed.within.extend(found_in.encoded())
            return await self._passing.cancel_many(address, passed)
        if self._running >= _RUNNING_AT_MOST:
            raise RequestRefusedError(Reason.SEARCHES_BUSY)
        self._running += 1
        try:
            asked = Asked(wanted, request.page_token, request.limit, with_cancelled=True)
            page = await self._search.page(asked)
            results = await self._results(page, dry_run=request.dry_run)
        finally:
            self._running -= 1
        answer = pb.CancelManyResponse(
            next_page_token=page.next_token,
            looked=page.looked(self._view.status().heartbeat.node),
        )
        for message, outcome in zip(page.messages, results, strict=True):
            was_cancelled = message.state in _CANCELLED
            answer.results.add(
                handle=message.handle,
                due_ms=message.due_ms,
                topic=message.topic,
                outcome=outcome,
                cancelled_before=was_cancelled and outcome == pb.CANCEL_OUTCOME_CANCELLED,
            )
        return answer

    async def _results(
        self, page: Page, *, dry_run: bool
    ) -> Iterable["pb.CancelOutcome.ValueType"]:
        references = [
            Reference(message.due_ms // 1000, message.id, message.due_ms)
            for message in page.messages
        ]
        if not references:
            return ()
        if dry_run:
            return await self._cancelled_before(page, references)
        return list(map(_outcome, await self._groups.cancel(references, WAIT_S)))

    async def _cancelled_before(
        self, page: Page, references: Sequence[Reference]
    ) -> Iterable["pb.CancelOutcome.ValueType"]:
        """What is known of messages that have a cancel; of all others nothing is said."""
        are_cancelled = [message.state in _CANCELLED for message in page.messages]
        decided = iter(await self._groups.known(list(compress(references, are_cancelled))))
        return [
            _outcome(next(decided)) if is_cancelled else pb.CANCEL_OUTCOME_UNSPECIFIED
            for is_cancelled in are_cancelled
        ]


def _outcome(answered: Answered | None) -> "pb.CancelOutcome.ValueType":
    """The outcome of one message; raises what concerns all of them."""
    if isinstance(answered, Decided):
        if answered.decision is CancelDecision.NO_LEADER:
            raise RequestRefusedError(Reason.NO_LEADER)
        return OUTCOMES.get(answered.decision, pb.CANCEL_OUTCOME_UNSPECIFIED)
    if answered is not None and answered.reason in OF_ALL:
        raise RequestRefusedError.of(answered)
    return pb.CANCEL_OUTCOME_UNSPECIFIED
