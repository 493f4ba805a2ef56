"""Cancels: messages that a call names, or that a search finds, whichever node is asked.

The leader's node decides (cancel_groups.py), each message on its own; another node passes them on
to it (passed_on.py).
"""

from collections.abc import Hashable, Iterable, Sequence
from itertools import compress, repeat
from typing import Final

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.rights import Right
from delaywheel_replica.server.access.callers import CallContext
from delaywheel_replica.server.access.shared_room import SharedRoom
from delaywheel_replica.server.access.showing import searchable
from delaywheel_replica.server.changing.awaited import (
    OF_ALL,
    check_not_all_refused,
    parsed,
    within_s_of,
)
from delaywheel_replica.server.changing.cancel_groups import CancelGroups
from delaywheel_replica.server.changing.finder import MessageFinder
from delaywheel_replica.server.changing.passed_on import PassedChanges
from delaywheel_replica.server.changing.pending import Answered, Decided
from delaywheel_replica.server.changing.permission import in_order, judged
from delaywheel_replica.server.lookup.filters import Wanted, wanted_of
from delaywheel_replica.server.lookup.references import Reference, reference_of
from delaywheel_replica.server.lookup.search import Asked, Search
from delaywheel_replica.server.node.calls_to_nodes import WAIT_S, CallsToNodes, numbers_of
from delaywheel_replica.server.node.node_view import NodeView
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError

_OUTCOMES: Final = {
    CancelDecision.CANCELLED: pb.CANCEL_OUTCOME_CANCELLED,
    CancelDecision.ALREADY_DELIVERED: pb.CANCEL_OUTCOME_ALREADY_DELIVERED,
    CancelDecision.TOO_LATE: pb.CANCEL_OUTCOME_TOO_LATE,
    CancelDecision.NOT_FOUND: pb.CANCEL_OUTCOME_NOT_FOUND,
    CancelDecision.RESCHEDULED: pb.CANCEL_OUTCOME_RESCHEDULED,
}

_Answered = Answered | pb.MessageCancelled | None
"""What became of a message, here or on the leader's node; None: that is not known yet."""

# This many calls of CancelMany hold a page at once. Further ones are refused before anything is
# written.
_PAGES_AT_ONCE: Final = 16
_HELD: Final = frozenset({pb.MESSAGE_STATE_HELD, pb.MESSAGE_STATE_COMMITTED})
_HALVES: Final = _HELD | {pb.MESSAGE_STATE_ROLLED_BACK, pb.MESSAGE_STATE_ASKED}


class Cancels:
    """Answers calls that name messages. For the event loop's thread."""

    def __init__(
        self,
        finder: MessageFinder,
        groups: CancelGroups,
        passed_on: PassedChanges[pb.MessageRef, pb.MessageCancelled],
    ) -> None:
        self._finder = finder
        self._groups = groups
        self._passed_on = passed_on

    async def cancel(self, request: pb.CancelRequest, call: CallContext) -> pb.CancelResponse:
        """Cancels messages, or returns why not.

        Args:
            call: Who asks, and for how long; a node has judged its own caller.

        Raises:
            RequestRefusedError: TOO_MANY_MESSAGES, and what concerns every message: NO_LEADER,
                BACKPRESSURE; of a single message also those of references, NOT_UP_TO_DATE,
                CANCEL_UNKNOWN, and those of the writing.
        """
        # A reference is short, but for these: what one caller adds must not fill a call of many.
        request.DiscardUnknownFields()
        caller, within_s = call.caller, within_s_of(call.left_s)
        named = judged(caller, parsed(request.messages, reference_of))
        permitted = {row: each for row, each in enumerate(named) if isinstance(each, Reference)}
        cancelled: Sequence[_Answered] = ()
        if permitted and (address := self._finder.leader_address(caller)) is not None:
            messages = [request.messages[row] for row in permitted]
            cancelled = await self._passed_on.ask(
                address, messages, within_s, call.sharer, partly=request.partly
            )
        elif permitted:
            sharers = call.sharers(request.sharers, len(named))
            cancelled = await self._groups.cancel(
                [*permitted.values()],
                within_s,
                [sharers[row] for row in permitted],
                partly=request.partly,
                are_gathered=caller.is_node,
            )
        results = in_order(named, cancelled)
        check_not_all_refused(results)
        return pb.CancelResponse(results=map(_result, results))


def _result(answered: _Answered) -> pb.MessageCancelled:
    if answered is None:
        return pb.MessageCancelled()
    if isinstance(answered, Refusal):
        return pb.MessageCancelled(error=answered.as_error())
    if isinstance(answered, pb.MessageCancelled):
        return answered
    return pb.MessageCancelled(outcome=_OUTCOMES[answered.decision], due_ms=answered.moved_ms)


class CancelMany:
    """Cancels the messages that a search finds. For the event loop's thread.

    The messages of a page are cancelled as those of a `Cancel` call that names them. A repeated
    call finds again what is not due yet, with the earlier cancels, and reports the same. So a
    caller that did not receive the answer repeats the call.

    Half messages are left alone, and counted: whoever has something to do with their topic would
    decide over transactions that are open. Their senders roll them back, or a cancel names them.

    The node that is asked judges its caller, as for all calls. It passes on in which topics that
    may change something, so that the leader's node finds nothing else, whatever grants it has
    itself.
    """

    def __init__(
        self,
        view: NodeView,
        finder: MessageFinder,
        search: Search,
        groups: CancelGroups,
        other_nodes: CallsToNodes,
    ) -> None:
        self._view = view
        self._finder = finder
        self._search = search
        self._groups = groups
        self._other_nodes = other_nodes
        self._room = SharedRoom(_PAGES_AT_ONCE)

    async def cancel_many(
        self, request: pb.CancelManyRequest, call: CallContext
    ) -> pb.CancelManyResponse:
        """Cancels a page of messages, or only returns them.

        Args:
            call: Who asks: only what they may change is found.

        Raises:
            RequestRefusedError: FILTER_MISSING, FORBIDDEN, NO_LEADER, SEARCHES_BUSY, BACKPRESSURE,
                and those of filters.
        """
        wanted = wanted_of(request.filter)
        found_in = searchable(call.caller, Right.CHANGE, request.filter).within(request.within)
        wanted = wanted.only_in(found_in.test)
        if not wanted.names_something:
            raise RequestRefusedError(Reason.FILTER_MISSING)
        (sharer,) = call.sharers(request.sharers, 1)
        with self._room.place(sharer) as has_place:
            if not has_place:
                raise RequestRefusedError(Reason.SEARCHES_BUSY)
            if (address := self._finder.leader_address(call.caller)) is not None:
                passed = pb.CancelManyRequest()
                passed.CopyFrom(request)
                del passed.within[:]
                passed.within.extend(found_in.encoded())
                passed.sharers[:] = numbers_of([sharer])
                return await self._other_nodes.cancel_many(address, passed)
            return await self._page(request, wanted, sharer)

    async def _page(
        self, request: pb.CancelManyRequest, wanted: Wanted, sharer: Hashable
    ) -> pb.CancelManyResponse:
        if self._view.cleaner.leading() is None:
            raise RequestRefusedError(Reason.NO_LEADER)
        asked = Asked(wanted, request.page_token, request.limit, with_cancelled=True)
        page = await self._search.page(asked, sharer)
        messages = [message for message in page.messages if message.state not in _HALVES]
        results = await self._results(messages, sharer, dry_run=request.dry_run)
        answer = pb.CancelManyResponse(
            next_page_token=page.next_token,
            looked=page.looked(self._view.status().heartbeat.node),
            halves=sum(message.state in _HELD for message in page.messages),
        )
        for message, outcome in zip(messages, results, strict=True):
            was_cancelled = message.state == pb.MESSAGE_STATE_CANCELLED
            answer.results.add(
                handle=message.handle,
                due_ms=message.due_ms,
                topic=message.topic,
                outcome=outcome,
                cancelled_before=was_cancelled and outcome == pb.CANCEL_OUTCOME_CANCELLED,
            )
        return answer

    async def _results(
        self, messages: Sequence[pb.StoredMessage], sharer: Hashable, *, dry_run: bool
    ) -> Iterable["pb.CancelOutcome.ValueType"]:
        references = [
            Reference.of(MessageKey(message.id, message.due_ms, message.topic))
            for message in messages
        ]
        if not references:
            return ()
        if not dry_run:
            cancelled = await self._groups.cancel(references, WAIT_S, repeat(sharer))
            return [*map(_outcome, cancelled)]
        # What is known of messages that have a cancel; of all others nothing is said.
        are_cancelled = [message.state == pb.MESSAGE_STATE_CANCELLED for message in messages]
        known = await self._finder.known([*compress(references, are_cancelled)], sharer)
        decided = iter(known)
        return [
            _outcome(next(decided)) if is_cancelled else pb.CANCEL_OUTCOME_UNSPECIFIED
            for is_cancelled in are_cancelled
        ]


def _outcome(answered: Answered | None) -> "pb.CancelOutcome.ValueType":
    """The outcome of one message; raises what concerns all of them."""
    if isinstance(answered, Decided):
        if answered.decision is CancelDecision.NO_LEADER:
            raise RequestRefusedError(Reason.NO_LEADER)
        return _OUTCOMES.get(answered.decision, pb.CANCEL_OUTCOME_UNSPECIFIED)
    if answered is not None and answered.reason in OF_ALL:
        raise RequestRefusedError.of(answered)
    return pb.CANCEL_OUTCOME_UNSPECIFIED
