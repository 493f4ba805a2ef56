"""DescribeCluster and ListSlots: what this node knows, or what all members say, joined."""

import asyncio
from collections.abc import Callable
from typing import Final

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1 import delaywheel_pb2_grpc as rpc
from delaywheel_replica.config import Config
from delaywheel_replica.server.describing import describe_cluster
from delaywheel_replica.server.details import Details
from delaywheel_replica.server.merging import joined, slots_joined
from delaywheel_replica.server.passing import Passing
from delaywheel_replica.server.queries import Queries, slots_at_most
from delaywheel_replica.server.refusals import Refusal
from delaywheel_replica.server.status import NodeView

_ANSWER_S: Final = 2.0
# Of the time that a caller waits, so much is for the others' answers: ours shall still arrive.
_SHARE: Final = 0.7


class Asking:
    """Answers for the whole cluster. For the event loop's thread."""

    def __init__(
        self,
        config: Config,
        view: NodeView,
        passing: Passing,
        queries: Queries,
        details: Details,
        *,
        address: Callable[[], str],
        refusal: Callable[[], Refusal | None],
    ) -> None:
        """Prepares.

        Args:
            config: of the node.
            view: what its parts know.
            passing: makes calls to the other nodes.
            queries: looks at what this node holds.
            details: looks at its disk for what is described.
            address: where callers reach the node.
            refusal: why it takes no messages now; None: it does.
        """
        self._config = config
        self._view = view
        self._passing = passing
        self._queries = queries
        self._details = details
        self._address = address
        self._refusal = refusal

    async def describe(
        self, request: pb.DescribeClusterRequest, remaining_s: float | None
    ) -> pb.DescribeClusterResponse:
        """The cluster.

        Args:
            request: with or without details, of one node or all.
            remaining_s: how long the caller waits; None: as long as it takes.
        """
        if not request.all_members:
            return await self._described(details=request.details)
        question = pb.DescribeClusterRequest(details=True)
        own, others = await asyncio.gather(
            self._described(details=True),
            self._passing.ask_all(
                lambda channel, within_s: rpc.DelayWheelStub(channel).DescribeCluster(
                    question, timeout=within_s
                ),
                within_s=_within_s(remaining_s),
            ),
        )
        return joined(own, others)

    async def list_slots(
        self, request: pb.ListSlotsRequest, remaining_s: float | None
    ) -> pb.ListSlotsResponse:
        """The seconds that hold messages.

        Args:
            request: of this node or of all.
            remaining_s: how long the caller waits; None: as long as it takes.
        """
        if not request.all_members:
            return await self._queries.list_slots(request)
        question = pb.ListSlotsRequest()
        question.CopyFrom(request)
        question.all_members = False
        others = await self._passing.ask_all(
            lambda channel, within_s: rpc.DelayWheelStub(channel).ListSlots(
                question, timeout=within_s
            ),
            within_s=_within_s(remaining_s),
        )
        own = await self._queries.list_slots(question)
        return await self._queries.for_lists(
            lambda: slots_joined(own, others, slots_at_most(request))
        )

    async def _described(self, *, details: bool) -> pb.DescribeClusterResponse:
        status = self._view.status()
        answer = describe_cluster(
            self._config, self._view, status, self._address(), refusal=self._refusal()
        )
        if details:
            await asyncio.to_thread(self._details.add_to, answer, status)
        return answer


def _within_s(remaining_s: float | None) -> float:
    return _ANSWER_S if remaining_s is None else min(_ANSWER_S, remaining_s * _SHARE)
