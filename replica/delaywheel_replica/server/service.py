"""The queries of the gRPC service, dispatched to the parts that answer them.

producing.py accepts messages. Refusals become the status of a call in calls.py.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import Message

from delaywheel.reasons import Reason
from delaywheel.record_headers import HALF_GROUP
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.rights import Right, withhold_names
from delaywheel_replica.server.access.callers import CallContext
from delaywheel_replica.server.access.showing import (
    add_quotas,
    refuse_details,
    searchable,
    shown_to,
)
from delaywheel_replica.server.changing.cancels import CancelMany, Cancels
from delaywheel_replica.server.changing.half_commits import HalfCommits
from delaywheel_replica.server.changing.reschedules import Reschedules
from delaywheel_replica.server.cluster.fan_out import FanOut
from delaywheel_replica.server.lookup.filters import wanted_of
from delaywheel_replica.server.lookup.pages import LONGEST_PAGE_BYTES, page_size_of
from delaywheel_replica.server.lookup.places import AskedPlaces
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.lookup.references import Reference, reference_of
from delaywheel_replica.server.lookup.search import Search
from delaywheel_replica.server.node.calls_to_nodes import CallsToNodes
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.refusals import RequestRefusedError

_SHORT_BYTES: Final = 1 << 12
_LIST_BYTES: Final = 1 << 20
_RESULT_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class Changes:
    """The parts that change pending messages."""

    commits: HalfCommits
    cancels: Cancels
    cancel_many: CancelMany
    reschedules: Reschedules


class DelayWheelService:
    """The calls of ``delaywheel.v1.DelayWheel``, except those that produce."""

    def __init__(
        self,
        queries: Queries,
        search: Search,
        changes: Changes,
        fan_out: FanOut,
        other_nodes: CallsToNodes,
        places: AskedPlaces,
        *,
        max_message_bytes: int,
        counts: NodeCounts | None = None,
    ) -> None:
        self._queries = queries
        self._search = search
        self._other_nodes = other_nodes
        self._places = places
        self._changes = changes
        self._fan_out = fan_out
        self._max_message_bytes = max_message_bytes
        self._counts = counts or NodeCounts()

    def length_bytes(self, request: Message) -> int:
        """Returns the greatest length of an answer to a question."""
        match request:
            case pb.GetSlotRequest() | pb.SearchRequest():
                longest = LONGEST_PAGE_BYTES
                return longest + self._max_message_bytes if request.with_content else longest
            case pb.GetMessageRequest():
                return self._max_message_bytes
            case pb.ListSlotsRequest() | pb.DescribeClusterRequest() | pb.CancelManyRequest():
                return _LIST_BYTES
            case pb.CancelRequest() | pb.RescheduleRequest():
                return _SHORT_BYTES + _RESULT_BYTES * len(request.messages)
            case pb.CommitRequest():
                return _SHORT_BYTES + _RESULT_BYTES * len(request.halves)
            case _:
                return _SHORT_BYTES

    async def Commit(self, request: pb.CommitRequest, context: CallContext) -> pb.CommitResponse:
        """See the protocol."""
        context.caller.spend(len(request.halves), request.ByteSize())
        return await self._changes.commits.commit(request, context)

    async def Cancel(self, request: pb.CancelRequest, context: CallContext) -> pb.CancelResponse:
        """See the protocol."""
        context.caller.spend(len(request.messages), request.ByteSize())
        return await self._changes.cancels.cancel(request, context)

    async def CancelMany(
        self, request: pb.CancelManyRequest, context: CallContext
    ) -> pb.CancelManyResponse:
        """See the protocol.

        How many messages a page has is known once it was cancelled: they count then.
        """
        caller = context.caller
        if request.dry_run:
            _count_question(request, context)
        else:
            caller.spend(1, request.ByteSize())
        try:
            answer = await self._changes.cancel_many.cancel_many(request, context)
        except asyncio.CancelledError:  # its caller has left, and all of the page may be cancelled
            if not request.dry_run:
                caller.charge(page_size_of(request.limit) - 1)
            raise
        if not request.dry_run:
            caller.charge(len(answer.results) - 1)
        return answer

    async def Reschedule(
        self, request: pb.RescheduleRequest, context: CallContext
    ) -> pb.RescheduleResponse:
        """See the protocol."""
        context.caller.spend(len(request.messages), request.ByteSize())
        return await self._changes.reschedules.reschedule(request, context)

    async def GetMessage(
        self, request: pb.GetMessageRequest, context: CallContext
    ) -> pb.GetMessageResponse:
        """See the protocol."""
        _count_question(request, context)
        with self._counts.calls.timed("get") as outcome:
            named = reference_of(request.message)
            if not context.caller.rights.may(Right.INSPECT, named.topic):
                raise context.caller.refuse_without(Right.INSPECT, f"in topic {named.topic}")
            message = await self._get(request, named, context)
            shown_to(context.caller, [message])
            outcome.append(pb.MessageState.Name(message.state).removeprefix("MESSAGE_STATE_"))
        return pb.GetMessageResponse(message=message)

    async def _get(
        self, request: pb.GetMessageRequest, named: Reference, context: CallContext
    ) -> pb.StoredMessage:
        """Returns a message.

        The leader's node knows best what became of a finished message, whether a cancel counts, and
        which message a handle means where one was rescheduled within its second.
        """
        is_doubtful = is_undecided = False
        try:
            got = await self._queries.get_message(named, context.sharer)
            message, is_doubtful, is_undecided = got.message, got.is_doubtful, got.is_undecided
        except RequestRefusedError as error:
            answered = None
            if error.refusal.reason is Reason.HANDLE_AMBIGUOUS:
                answered = await self._ask_leader(request.message, context)
            if answered is None:
                raise
            message = answered
        if is_undecided or message.state == pb.MESSAGE_STATE_DONE:
            answered = await self._ask_leader(request.message, context)
            if answered is not None:
                message.state, message.dead_reason = answered.state, answered.dead_reason
        if is_doubtful and message.state == pb.MESSAGE_STATE_DONE:
            ended = await self._places.ended(message, context.sharer)
            is_half = any(header.name == HALF_GROUP for header in message.headers)
            if is_half and ended == pb.MESSAGE_STATE_CANCELLED:
                ended = pb.MESSAGE_STATE_ROLLED_BACK
            message.state = message.state if ended is None else ended
        if request.find_place:
            await self._places.add_place(message, context.sharer)
        return message

    async def _ask_leader(
        self, named: pb.MessageRef, context: CallContext
    ) -> pb.StoredMessage | None:
        address = self._other_nodes.leader_address()
        if address is None or context.caller.is_node:
            return None
        return await self._other_nodes.get_message(address, pb.GetMessageRequest(message=named))

    async def Search(self, request: pb.SearchRequest, context: CallContext) -> pb.SearchResponse:
        """See the protocol."""
        _count_question(request, context)
        with self._counts.calls.timed("search") as outcome:
            wanted = wanted_of(request.filter)
            found_in = searchable(context.caller, Right.INSPECT, request.filter)
            answer = await self._search.search(
                request, wanted.only_in(found_in.test), context.sharer
            )
            shown_to(context.caller, answer.messages)
            outcome.append("INCOMPLETE" if answer.looked.incomplete else "COMPLETE")
        return answer

    async def ListSlots(
        self, request: pb.ListSlotsRequest, context: CallContext
    ) -> pb.ListSlotsResponse:
        """See the protocol."""
        _count_question(request, context)
        return await self._fan_out.list_slots(request, context.left_s, context.sharer)

    async def GetSlot(self, request: pb.GetSlotRequest, context: CallContext) -> pb.GetSlotResponse:
        """See the protocol."""
        _count_question(request, context)
        answer = await self._queries.get_slot(request, context.sharer)
        if context.caller.rights.may_everywhere(Right.READ):
            return answer
        shown = shown_to(context.caller, answer.messages)
        return pb.GetSlotResponse(
            messages=shown, next_page_token=answer.next_page_token, silent=answer.silent
        )

    async def DescribeCluster(
        self, request: pb.DescribeClusterRequest, context: CallContext
    ) -> pb.DescribeClusterResponse:
        """See the protocol."""
        if request.details or request.all_members:
            refuse_details(context.caller, (Right.INSPECT, Right.OPERATE))
        caller = context.caller
        answer = await self._fan_out.describe(request, context.left_s, context.sharer)
        if caller.how == "token" and not caller.has_certificate and self._fan_out.has_token_port:
            self._fan_out.name_token_ports(answer)
        if not caller.rights.may_somewhere(Right.OPERATE):
            withhold_names(answer)
        return answer

    async def WhoAmI(self, _request: pb.WhoAmIRequest, context: CallContext) -> pb.WhoAmIResponse:
        """See the protocol."""
        caller = context.caller
        answer = pb.WhoAmIResponse(node=self._fan_out.node, unlimited=caller.principal is None)
        if caller.principal is not None:
            answer.principal, answer.shown_by = caller.principal, caller.how
            for granted in caller.rights.granted:
                answer.grants.add(
                    may=sorted(granted.may),
                    topics=[each.text for each in granted.topics],
                    groups=[each.text for each in granted.groups],
                )
            add_quotas(answer, caller)
        return answer


def _count_question(request: Message, context: CallContext) -> None:
    """Counts a question against the caller's quota, or refuses it: QUOTA_EXCEEDED."""
    context.caller.spend(0, request.ByteSize(), questions=1)
