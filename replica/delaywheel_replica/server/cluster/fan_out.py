"""DescribeCluster and ListSlots: what this node knows, or the answers of all members combined."""

import asyncio
from collections.abc import Callable, Hashable
from typing import Final

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.config import Config
from delaywheel_replica.server.cluster.details import Details
from delaywheel_replica.server.cluster.merging import joined, slots_joined
from delaywheel_replica.server.lookup.describe import describe_cluster
from delaywheel_replica.server.lookup.queries import Queries, slots_at_most
from delaywheel_replica.server.node.calls_to_nodes import CallsToNodes
from delaywheel_replica.server.node.node_view import NodeView
from delaywheel_replica.server.node.refusals import Refusal
from delaywheel_replica.server.node.turns import TurnsAtOnce

_ANSWER_S: Final = 2.0
# How much of the time that a caller waits is for the others' answers: ours must still arrive.
_SHARE: Final = 0.7
# Details are reused for this long, and for this many times as long as it took to read them: a
# caller that asks without end takes at most a tenth of the node's time with them.
_DETAILS_AGE_S: Final = 0.25
_DETAILS_PAUSE_FACTOR: Final = 10
# How many callers at once may have all other nodes asked.
_ASKS: Final = 4


class FanOut:
    """Answers for the whole cluster. For the event loop's thread."""

    def __init__(
        self,
        config: Config,
        view: NodeView,
        other_nodes: CallsToNodes,
        queries: Queries,
        details: Details,
        *,
        address: Callable[[], str],
        refusal: Callable[[], Refusal | None],
    ) -> None:
        """Prepares; `refusal` returns why the node accepts no messages now; None: it does."""
        self._config = config
        self._view = view
        self._other_nodes = other_nodes
        self._queries = queries
        self._details = details
        self._address = address
        self._refusal = refusal
        # The details that were read last, or are being read; None: they are too old.
        self._details_made: asyncio.Future[pb.DescribeClusterResponse] | None = None
        self._asks = TurnsAtOnce(_ASKS)

    @property
    def node(self) -> str:
        """The id of this node."""
        return self._config.node_id

    @property
    def has_token_port(self) -> bool:
        """Whether callers with tokens have a port of their own."""
        return self._config.token_listen is not None

    def name_token_ports(self, answer: pb.DescribeClusterResponse) -> None:
        """Replaces the nodes' addresses by those for callers with tokens."""
        peers = self._view.peers()
        for member in answer.members:
            if member.node == self.node:
                member.address = self._config.token_address
            else:
                peer = peers.get(member.node)
                member.address = "" if peer is None else peer.token_address

    async def describe(
        self, request: pb.DescribeClusterRequest, remaining_s: float | None, sharer: Hashable = ""
    ) -> pb.DescribeClusterResponse:
        """Describes the cluster, with or without details, of one node or all."""
        if not request.all_members:
            return await self._described(details=request.details)
        question = pb.DescribeClusterRequest(details=True)
        async with self._asks.turn(sharer):
            own, others = await asyncio.gather(
                self._described(details=True),
                self._other_nodes.ask_all(
                    lambda node: node.ask(node.stub.DescribeCluster, question),
                    within_s=_within_s(remaining_s),
                ),
            )
        return joined(own, others)

    async def list_slots(
        self, request: pb.ListSlotsRequest, remaining_s: float | None, sharer: Hashable = ""
    ) -> pb.ListSlotsResponse:
        """Lists the seconds that hold messages, of this node or of all."""
        if not request.all_members:
            return await self._queries.list_slots(request, sharer)
        question = pb.ListSlotsRequest()
        question.CopyFrom(request)
        question.all_members = False
        async with self._asks.turn(sharer):
            others = await self._other_nodes.ask_all(
                lambda node: node.ask(node.stub.ListSlots, question),
                within_s=_within_s(remaining_s),
            )
        own = await self._queries.list_slots(question, sharer)
        return await self._queries.for_lists(
            sharer, lambda: slots_joined(own, others, slots_at_most(request))
        )

    async def _described(self, *, details: bool) -> pb.DescribeClusterResponse:
        if not details:
            return self._without_details()
        if self._details_made is None:
            self._details_made = asyncio.ensure_future(self._with_details())
        answer = pb.DescribeClusterResponse()
        answer.CopyFrom(await asyncio.shield(self._details_made))
        return answer

    def _without_details(self) -> pb.DescribeClusterResponse:
        return describe_cluster(
            self._config, self._view, self._view.status(), self._address(), refusal=self._refusal()
        )

    async def _with_details(self) -> pb.DescribeClusterResponse:
        """Adds details from the disk; one reading serves all callers for a short while."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            answer = self._without_details()
            await asyncio.to_thread(self._details.add_to, answer, self._view.status())
        except BaseException:
            self._forget_details()
            raise
        took_s = loop.time() - began_s
        loop.call_later(max(_DETAILS_AGE_S, took_s * _DETAILS_PAUSE_FACTOR), self._forget_details)
        return answer

    def _forget_details(self) -> None:
        self._details_made = None


def _within_s(remaining_s: float | None) -> float:
    return _ANSWER_S if remaining_s is None else min(_ANSWER_S, remaining_s * _SHARE)
