"""Calls that only the leader's node can answer: passed on to it, once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1 import delaywheel_pb2_grpc as rpc
from delaywheel_replica.core.beat import Office
from delaywheel_replica.core.status import PeerSight, ServerStatus
from delaywheel_replica.peers.states import Connection, PeerState
from delaywheel_replica.server.cancels import Cancels
from delaywheel_replica.server.passing import Passing, was_passed
from delaywheel_replica.server.queries import Queries
from delaywheel_replica.server.refusals import Refusal, RefusedError, abort
from delaywheel_replica.server.status import NodeView
from delaywheel_replica.server.writing import Writing
from support.core_values import beat

NOW_MS = 50_000
REQUEST = pb.CancelRequest(message=pb.MessageRef(handle=f"n2.1:5:{7:032x}"))


class LeadersNode(rpc.DelayWheelServicer):
    """Answers as it is told.

    Attributes:
        answer: what it says; None: it ends the call without a reason.
        passed: of each call, whether it said that it was passed on.
    """

    def __init__(self) -> None:
        self.answer: pb.CancelOutcome.ValueType | Refusal | None = pb.CANCEL_OUTCOME_CANCELLED
        self.passed: list[bool] = []

    async def Cancel(  # noqa: N802 - gRPC's names
        self,
        request: pb.CancelRequest,
        context: grpc.aio.ServicerContext[object, object],
    ) -> pb.CancelResponse:
        """See the protocol."""
        assert request == REQUEST
        self.passed.append(was_passed(context.invocation_metadata()))
        if self.answer is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no details")
        if isinstance(self.answer, Refusal):
            await abort(context, self.answer)
        return pb.CancelResponse(outcome=self.answer)


@pytest.fixture
async def leader() -> AsyncIterator[tuple[LeadersNode, str]]:
    node = LeadersNode()  # type: ignore[abstract]  # no other call comes
    server = grpc.aio.server()
    rpc.add_DelayWheelServicer_to_server(node, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield node, f"127.0.0.1:{port}"
    await server.stop(0)


def view_of(address: str | None, *, heard_ago_ms: int = 100, leads: bool = True) -> NodeView:
    """Node n1, which hears n2."""
    office = Office(7) if leads else None
    other = PeerSight(replace(beat("n2"), office=office), NOW_MS - heard_ago_ms)
    status = ServerStatus(beat("n1"), 1, NOW_MS, peers={"n2": other})
    state = PeerState(Connection.CONNECTED, 0, "127.0.0.1:1", client_address=address)
    return NodeView(status=lambda: status, peers=lambda: {"n2": state})


def cancels_of(view: NodeView, passing: Passing) -> Cancels:
    """Of a node whose cleaner does not lead: it neither looks nor writes."""
    nothing = object.__new__(Queries), object.__new__(Writing)
    return Cancels(view, *nothing, passing, ask=lambda _: None, next_word=None)  # type: ignore[arg-type]


async def test_a_cancel_is_passed_on_and_says_so(leader: tuple[LeadersNode, str]) -> None:
    node, address = leader
    view = view_of(address)
    passing = Passing(view)
    answer = await cancels_of(view, passing).cancel(REQUEST, passed=False)
    assert answer.outcome == pb.CANCEL_OUTCOME_CANCELLED
    assert node.passed == [True]
    await passing.close()


async def test_the_leaders_reason_is_the_answer(leader: tuple[LeadersNode, str]) -> None:
    node, address = leader
    passing = Passing(view_of(address))
    for answer, reason in (
        (Refusal(Reason.NOT_UP_TO_DATE), Reason.NOT_UP_TO_DATE),
        (None, Reason.CANCEL_UNKNOWN),
    ):
        node.answer = answer
        with pytest.raises(RefusedError) as caught:
            await passing.cancel(address, REQUEST)
        assert caught.value.refusal.reason is reason
    await passing.close()


@pytest.mark.parametrize(
    "view",
    [
        view_of(None),
        view_of("127.0.0.1:1", leads=False),
        view_of("127.0.0.1:1", heard_ago_ms=5_000),
    ],
    ids=["address unknown", "nobody leads", "not heard"],
)
def test_nobody_is_asked_whose_leadership_is_not_heard(view: NodeView) -> None:
    assert Passing(view).leader_address() is None


@pytest.mark.parametrize(
    ("metadata", "passed"),
    [(None, False), ((("user-agent", "x"),), False), ((("dw-passed", "1"),), True)],
)
def test_a_passed_call_is_known(metadata: tuple[tuple[str, str], ...] | None, passed: bool) -> None:
    assert was_passed(metadata) is passed
