"""Calls that only the leader's node can answer are forwarded to it, once."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from delaywheel.client.changing.named_changes import _IN_DOUBT
from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1 import delaywheel_pb2_grpc as rpc
from delaywheel_replica.core.protocol.heartbeat import LeaderTerm
from delaywheel_replica.core.protocol.status_files import KnownPeer, ServerStatus
from delaywheel_replica.peers.states import (
    Connection,
    PeerReason,
    PeerRefusal,
    PeerState,
)
from delaywheel_replica.server.access.callers import A_NODE, ANYBODY, CallContext
from delaywheel_replica.server.changing import passed_on as passing_module
from delaywheel_replica.server.changing.cancel_groups import CancelGroups
from delaywheel_replica.server.changing.cancels import Cancels
from delaywheel_replica.server.changing.finder import MessageFinder
from delaywheel_replica.server.changing.passed_on import LATE, PassedChanges
from delaywheel_replica.server.lookup.places import AskedPlaces
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.node.calls_to_nodes import PASSED, CallsToNodes, OtherNode, Silent
from delaywheel_replica.server.node.node_view import NodeView
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError, abort
from support.core.values import heartbeat
from support.server.views import node_view
from support.services.waiting import until

NOW_MS = 50_000
REQUEST = pb.CancelRequest(messages=[pb.MessageRef(handle=f"n2.1:5:{7:032x}:orders")])


def shown_in(context: grpc.aio.ServicerContext[object, object]) -> str | None:
    """The secret that a call shows."""
    shown = dict(context.invocation_metadata() or ()).get(PASSED)
    return None if shown is None else str(shown)


class LeadersNode(rpc.DelayWheelServicer):
    """Answers as scripted.

    Attributes:
        answer: what it says; None: it ends the call without a reason.
        passed: of each call, what it showed to be a node's.
        delay_s: so long it thinks before it describes itself.
        asked: which messages each call named.
        sharers: by whom they were named.
        undecided: those that are not decided yet.
        goes_on: cancels wait for it.
        describes_to: the connections on which it was asked to describe itself.
    """

    def __init__(self) -> None:
        self.answer: pb.CancelOutcome.ValueType | Refusal | None = pb.CANCEL_OUTCOME_CANCELLED
        self.passed: list[str | None] = []
        self.delay_s = 0.0
        self.asked: list[list[str]] = []
        self.sharers: list[Sequence[int]] = []
        self.undecided: set[str] = set()
        self.describes_to: list[str] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def Cancel(
        self,
        request: pb.CancelRequest,
        context: grpc.aio.ServicerContext[object, object],
    ) -> pb.CancelResponse:
        """See the protocol."""
        self.asked.append([message.handle for message in request.messages])
        self.sharers.append(request.sharers)
        self.passed.append(shown_in(context))
        if self.answer is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no details")
        if isinstance(self.answer, Refusal):
            await abort(context, self.answer)
        await self.goes_on.wait()
        return pb.CancelResponse(
            results=[
                pb.MessageCancelled()
                if message.handle in self.undecided
                else pb.MessageCancelled(outcome=self.answer)
                for message in request.messages
            ]
        )

    async def Reschedule(
        self,
        request: pb.RescheduleRequest,
        context: grpc.aio.ServicerContext[object, object],
    ) -> pb.RescheduleResponse:
        """The first call decides nothing of the first message."""
        assert shown_in(context)
        is_first = not self.asked
        self.asked.append([each.message.handle for each in request.messages])
        self.sharers.append(request.sharers)
        done = pb.MessageRescheduled(
            outcome=pb.RESCHEDULE_OUTCOME_RESCHEDULED, due_ms=request.messages[0].deliver_at_ms
        )
        refused = pb.MessageRescheduled(error=Refusal(Reason.DRAINING).as_error())
        results = [pb.MessageRescheduled(), refused] if is_first else [done]
        return pb.RescheduleResponse(results=results)

    async def GetMessage(
        self,
        request: pb.GetMessageRequest,
        context: grpc.aio.ServicerContext[object, object],
    ) -> pb.GetMessageResponse:
        """See the protocol."""
        assert request.message == REQUEST.messages[0]
        self.passed.append(shown_in(context))
        if isinstance(self.answer, Refusal):
            await abort(context, self.answer)
        return pb.GetMessageResponse()

    async def DescribeCluster(
        self,
        request: pb.DescribeClusterRequest,
        context: grpc.aio.ServicerContext[object, object],
    ) -> pb.DescribeClusterResponse:
        """See the protocol."""
        del request
        self.describes_to.append(context.peer())
        await asyncio.sleep(self.delay_s)
        if isinstance(self.answer, Refusal):
            await abort(context, self.answer)
        return pb.DescribeClusterResponse(node="n2")


@pytest.fixture
async def leader() -> AsyncIterator[tuple[LeadersNode, str]]:
    node = LeadersNode()  # type: ignore[abstract]  # no other call comes
    server = grpc.aio.server()
    rpc.add_DelayWheelServicer_to_server(node, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield node, f"127.0.0.1:{port}"
    await server.stop(0)


def view_of(
    address: str | None, *, heard_ago_ms: int = 100, leads: bool = True, is_complete: bool = True
) -> NodeView:
    """Node n1, which hears n2."""
    term = LeaderTerm(7) if leads else None
    reported = replace(heartbeat("n2"), term=term, complete=is_complete)
    other = KnownPeer(reported, NOW_MS - heard_ago_ms)
    status = ServerStatus(heartbeat("n1"), 1, NOW_MS, peers={"n2": other})
    state = PeerState(Connection.CONNECTED, 0, "127.0.0.1:1", client_address=address)
    return node_view(lambda: status, peers=lambda: {"n2": state})


@pytest.fixture(autouse=True)
def _nothing_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing_module, "APART_S", 0)


def cancels_of(view: NodeView, other_nodes: CallsToNodes) -> Cancels:
    """The server of a node whose cleaner does not lead: it neither looks nor writes."""
    queries, places = object.__new__(Queries), object.__new__(AskedPlaces)
    finder = MessageFinder(view, queries, other_nodes, places, 0)
    passed_on = PassedChanges(other_nodes.cancel, Reason.CANCEL_UNKNOWN)
    return Cancels(finder, object.__new__(CancelGroups), passed_on)


async def test_a_cancel_is_passed_on_and_says_so(leader: tuple[LeadersNode, str]) -> None:
    node, address = leader
    view = view_of(address)
    other_nodes = CallsToNodes(view)
    answer = await cancels_of(view, other_nodes).cancel(REQUEST, CallContext(ANYBODY, "", 5))
    assert answer.results[0].outcome == pb.CANCEL_OUTCOME_CANCELLED
    assert node.passed == ["1"]
    await other_nodes.close()


async def test_the_leaders_node_is_told_who_has_named_each_message(
    leader: tuple[LeadersNode, str],
) -> None:
    node, address = leader
    other_nodes, names = CallsToNodes(view_of(address)), ["cn:shop", ("", "ipv4:10.0.0.7:5")]
    messages = REQUEST.messages
    await other_nodes.cancel(address, list(messages) * 3, 5, [*names, names[0]])
    dues = [pb.NewDue(message=messages[0], deliver_at_ms=1)]
    await other_nodes.reschedule(address, dues, 5, names[1:])
    (first, second, again), (alone,) = node.sharers
    assert first == again != second == alone
    call = CallContext(A_NODE, "n1's", 5)
    assert call.sharers([first, second], 2) == [("n1's", first), ("n1's", second)]
    older, stranger = call, call._replace(caller=ANYBODY)
    assert older.sharers([], 2) == stranger.sharers([first, second], 2) == [call.sharer] * 2
    await other_nodes.close()


async def test_what_a_node_passed_on_is_answered_where_it_arrives() -> None:
    view = view_of("there")
    queries, places = object.__new__(Queries), object.__new__(AskedPlaces)
    finder = MessageFinder(view, queries, CallsToNodes(view), places, 0)
    assert finder.leader_address(ANYBODY) == "there"
    assert finder.leader_address(A_NODE) is None


def cancel_of(number: int) -> pb.CancelRequest:
    return pb.CancelRequest(messages=[pb.MessageRef(handle=f"n2.1:5:{number:032x}:orders")])


def _passing(send: Any) -> PassedChanges[pb.MessageRef, pb.MessageCancelled]:
    return PassedChanges(send, Reason.CANCEL_UNKNOWN)


async def test_cancels_of_many_callers_are_passed_on_together(
    leader: tuple[LeadersNode, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that come while a call is under way gather, and not until it ends."""
    monkeypatch.setattr(passing_module, "APART_S", 1)
    node, address = leader
    node.goes_on.clear()
    other_nodes = CallsToNodes(view_of(address))
    cancels = cancels_of(view_of(address), other_nodes)

    def begin(number: int) -> asyncio.Task[pb.CancelResponse]:
        return asyncio.create_task(cancels.cancel(cancel_of(number), CallContext(ANYBODY, "", 20)))

    calls = [begin(number) for number in range(40)]
    gave_up = begin(99)
    await asyncio.sleep(0)
    gave_up.cancel()
    await until(lambda: len(node.asked) == 2)
    node.goes_on.set()
    for call in calls:
        assert (await call).results[0].outcome == pb.CANCEL_OUTCOME_CANCELLED
    assert [*map(len, node.asked)] == [1, 39]
    await other_nodes.close()


async def test_calls_begin_apart_or_as_soon_as_one_is_worth_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each costs the leader's node the same, however few messages it has.

    Once none is under way, what has gathered waits no longer.
    """
    monkeypatch.setattr(passing_module, "WORTH_A_CALL", 4)
    monkeypatch.setattr(passing_module, "APART_S", 3_600)
    begun, end = list[int](), asyncio.Event()

    async def send(_: str, messages: Sequence[pb.MessageRef], *_more: object) -> object:
        begun.append(len(messages))
        await end.wait()
        return [pb.MessageCancelled(outcome=pb.CANCEL_OUTCOME_CANCELLED)] * len(messages)

    passed_on = _passing(send)

    async def begin(messages: int) -> asyncio.Task[Any]:
        named = [REQUEST.messages[0]] * messages
        task = asyncio.create_task(passed_on.ask("there", named, 5, partly=False))
        await asyncio.sleep(0.001)
        return task

    calls = [await begin(messages) for messages in (1, 1, 2)]
    assert begun == [1]
    calls.append(await begin(1))
    assert begun == [1, 4]
    calls.append(await begin(3))
    assert begun == [1, 4]
    end.set()
    await asyncio.gather(*calls)
    assert begun == [1, 4, 3]


async def test_nothing_is_queued_behind_what_has_waited_for_long(
    leader: tuple[LeadersNode, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader's node does not come to it: who comes later is told so, and comes again."""
    monkeypatch.setattr("delaywheel_replica.server.changing.passed_on.CALLS_AT_MOST", 1)
    node, address = leader
    node.goes_on.clear()
    other_nodes = CallsToNodes(view_of(address))
    cancels = cancels_of(view_of(address), other_nodes)
    calls = [
        asyncio.create_task(cancels.cancel(cancel_of(number), CallContext(ANYBODY, "", 20)))
        for number in range(2)
    ]
    await until(lambda: len(node.asked) == 1)
    monkeypatch.setattr("delaywheel_replica.server.changing.passed_on.QUEUED_S", 0.0)
    with pytest.raises(RequestRefusedError) as caught:
        await cancels.cancel(cancel_of(99), CallContext(ANYBODY, "", 20))
    assert caught.value.refusal.reason is Reason.BACKPRESSURE
    node.goes_on.set()
    for call in calls:
        assert (await call).results[0].outcome == pb.CANCEL_OUTCOME_CANCELLED
    await other_nodes.close()


async def test_what_one_caller_adds_is_not_passed_on_in_the_call_of_many(
    leader: tuple[LeadersNode, str],
) -> None:
    """Unknown fields made the call too long: nobody's message in it was cancelled."""
    _, address = leader
    other_nodes = CallsToNodes(view_of(address))
    named = REQUEST.messages[0].SerializeToString()
    added = b"\xfa\x01" + pb.MessageRef(handle="x" * (5 << 20)).SerializeToString()[1:]
    message = pb.MessageRef.FromString(named + added)
    assert message.ByteSize() > 4 << 20
    request = pb.CancelRequest(messages=[message])
    answer = await cancels_of(view_of(address), other_nodes).cancel(
        request, CallContext(ANYBODY, "", 20)
    )
    assert answer.results[0].outcome == pb.CANCEL_OUTCOME_CANCELLED
    await other_nodes.close()


async def test_nobody_waits_for_what_another_caller_named(
    leader: tuple[LeadersNode, str],
) -> None:
    node, address = leader
    node.undecided.add(cancel_of(1).messages[0].handle)
    other_nodes = CallsToNodes(view_of(address))
    cancels = cancels_of(view_of(address), other_nodes)
    both = pb.CancelRequest(messages=[*cancel_of(1).messages, *cancel_of(2).messages])
    slow = asyncio.create_task(cancels.cancel(both, CallContext(ANYBODY, "", 20)))
    quick = await cancels.cancel(cancel_of(2), CallContext(ANYBODY, "", 20))
    assert quick.results[0].outcome == pb.CANCEL_OUTCOME_CANCELLED
    assert not slow.done()
    both.partly = True
    in_part = await cancels.cancel(both, CallContext(ANYBODY, "", 20))
    wanted = [pb.CANCEL_OUTCOME_UNSPECIFIED, pb.CANCEL_OUTCOME_CANCELLED]
    assert [each.outcome for each in in_part.results] == wanted
    node.undecided.clear()
    outcomes = [each.outcome for each in (await slow).results]
    assert outcomes == [pb.CANCEL_OUTCOME_CANCELLED] * 2
    await other_nodes.close()


async def test_who_names_many_messages_waits_behind_others_and_leaves_them_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, bound in (("CALLS_AT_MOST", 1), ("MESSAGES_AT_MOST", 4), ("KEPT_AT_MOST", 32)):
        monkeypatch.setattr(f"delaywheel_replica.server.changing.passed_on.{name}", bound)
    asked: list[list[str]] = []
    of_another, goes_on = cancel_of(99).messages[0].handle, asyncio.Event()

    async def send(
        _: str, messages: Sequence[pb.MessageRef], __: float | None, sharers: Iterable[Hashable]
    ) -> Sequence[pb.MessageCancelled]:
        asked.append([each.handle for each in messages])
        assert [*sharers] == ["another" if each == of_another else "many" for each in asked[-1]]
        await goes_on.wait()
        return [pb.MessageCancelled(outcome=pb.CANCEL_OUTCOME_CANCELLED)] * len(messages)

    passed_on = _passing(send)

    def begin(sharer: str, *numbers: int) -> asyncio.Task[list[Any]]:
        named = [cancel_of(number).messages[0] for number in numbers]
        return asyncio.create_task(passed_on.ask("there", named, 20, sharer, partly=False))

    calls = [begin("many", *range(4)), begin("many", *range(4, 16))]
    await until(lambda: len(asked) == 1)
    with pytest.raises(RequestRefusedError):  # also what was sent has its place
        await begin("many", 16)
    calls.append(begin("another", 99))
    await asyncio.sleep(0)
    goes_on.set()
    await asyncio.gather(*calls)
    assert of_another in asked[1]
    assert not passed_on._queues


@pytest.mark.parametrize("is_refused", [True, False])
async def test_a_large_call_is_passed_on_once_and_waits_behind_no_other(
    *, is_refused: bool
) -> None:
    """It was asked for again every half second, in place of being decided, and in pieces."""
    asked: list[tuple[int, float | None]] = []
    goes_on = asyncio.Event()

    async def send(
        _: str, messages: Sequence[pb.MessageRef], whole_within_s: float | None, *_more: object
    ) -> Sequence[pb.MessageCancelled]:
        asked.append((len(messages), whole_within_s))
        await goes_on.wait()
        if is_refused:
            raise RequestRefusedError(Reason.BACKPRESSURE)
        refused = Refusal(Reason.BACKPRESSURE).as_error()
        each = pb.MessageCancelled(outcome=pb.CANCEL_OUTCOME_CANCELLED)
        unknown = pb.MessageCancelled()
        return [pb.MessageCancelled(error=refused), unknown, *[each] * (len(messages) - 2)]

    passed_on = _passing(send)

    def begin(messages: int) -> asyncio.Task[list[pb.MessageCancelled | Refusal | None]]:
        named = [REQUEST.messages[0]] * messages
        return asyncio.create_task(passed_on.ask("there", named, 5, partly=False))

    small = [begin(2) for _ in range(4)]
    large = [begin(1_000) for _ in range(17)]
    await until(lambda: len(asked) == 4 + 17)
    assert sorted(asked, key=str) == [(1_000, 5)] * 17 + [(2, None)] * 4
    with pytest.raises(RequestRefusedError):  # as many as the leader's node takes are there
        await begin(1)
    goes_on.set()
    for call in large:
        results = [each.reason if isinstance(each, Refusal) else each for each in await call]
        if is_refused:
            assert results == [Reason.BACKPRESSURE] * 1_000
        else:
            assert results[:2] == [Reason.BACKPRESSURE, Reason.CANCEL_UNKNOWN]
            assert len(results) == 1_000
    for other in small:
        other.cancel()


@pytest.mark.parametrize("is_of_one", [True, False])
@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (Reason.NO_LEADER, Reason.CANCEL_UNKNOWN),
        (Reason.BACKPRESSURE, Reason.CANCEL_UNKNOWN),
        (Reason.FORBIDDEN, Reason.FORBIDDEN),
        (pb.CANCEL_OUTCOME_TOO_LATE, Reason.CANCEL_UNKNOWN),
        (pb.CANCEL_OUTCOME_NOT_FOUND, Reason.CANCEL_UNKNOWN),
    ],
)
async def test_what_was_being_decided_is_in_doubt_if_the_next_answer_knows_nothing_of_it(
    reason: Reason | pb.CancelOutcome.ValueType, told: Reason, *, is_of_one: bool
) -> None:
    """Another node may lead by then; the cancel was written, perhaps."""
    asked: list[int] = []

    async def send(
        _: str, messages: Sequence[pb.MessageRef], __: float | None, *_more: object
    ) -> Sequence[pb.MessageCancelled]:
        asked.append(len(messages))
        if len(asked) == 1:
            return [pb.MessageCancelled()]
        if not isinstance(reason, Reason):
            return [pb.MessageCancelled(outcome=reason)]
        if is_of_one:
            return [pb.MessageCancelled(error=Refusal(reason).as_error())]
        raise RequestRefusedError(reason)

    passed_on = _passing(send)
    (result,) = await passed_on.ask("there", REQUEST.messages, 20, partly=False)
    assert isinstance(result, Refusal)
    assert (result.reason, asked) == (told, [1, 1])


@pytest.mark.parametrize("result", LATE)
def test_what_says_nothing_of_earlier_attempts_is_no_outcome_in_doubt(result: Any) -> None:
    """Neither nodes nor clients may answer, of what was perhaps done, that nothing was."""
    says = dict.fromkeys(("CANCELLED", "RESCHEDULED", "ALREADY_DELIVERED"), True)
    says |= dict.fromkeys(("TOO_LATE", "NOT_FOUND"), False)
    outcomes = result.DESCRIPTOR.fields_by_name["outcome"].enum_type.values
    named = {each.name.partition("_OUTCOME_")[2]: each.number for each in outcomes if each.number}
    assert says == {name: number not in LATE[result] for name, number in named.items()}
    assert says == {name: name not in _IN_DOUBT for name in named}


async def test_a_reschedule_is_passed_on_with_its_due(leader: tuple[LeadersNode, str]) -> None:
    """What is not decided is asked for again; how that node is, says nothing of this one."""
    node, address = leader
    other_nodes = CallsToNodes(view_of(address))
    passed_on = PassedChanges(other_nodes.reschedule, Reason.RESCHEDULE_UNKNOWN)
    dues = [
        pb.NewDue(message=cancel_of(number).messages[0], deliver_at_ms=number) for number in (1, 2)
    ]
    results = await passed_on.ask(address, dues, 20, partly=False)
    refused = Refusal(Reason.NO_LEADER, "The leader's node cannot write it: DRAINING")
    assert results == [
        pb.MessageRescheduled(outcome=pb.RESCHEDULE_OUTCOME_RESCHEDULED, due_ms=1),
        refused,
    ]
    assert node.asked == [
        [dues[0].message.handle, dues[1].message.handle],
        [dues[0].message.handle],
    ]
    await other_nodes.close()


async def test_a_caller_hears_when_the_leaders_node_wants_it_back(
    leader: tuple[LeadersNode, str],
) -> None:
    node, address = leader
    node.answer = Refusal(Reason.BACKPRESSURE, "busy", after_ms=777)
    other_nodes = CallsToNodes(view_of(address))
    with pytest.raises(RequestRefusedError) as caught:
        await cancels_of(view_of(address), other_nodes).cancel(REQUEST, CallContext(ANYBODY, "", 5))
    refusal = caught.value.refusal
    assert (refusal.reason, refusal.retry_delay_ms) == (Reason.BACKPRESSURE, 777)
    await other_nodes.close()


@pytest.mark.parametrize(
    ("answer", "wanted", "is_complete", "have_none"),
    [
        (Refusal(Reason.MESSAGE_NOT_FOUND), 1, True, True),
        (Refusal(Reason.MESSAGE_NOT_FOUND), 1, False, False),
        (Refusal(Reason.MESSAGE_NOT_FOUND), 2, True, False),
        (Refusal(Reason.NOT_UP_TO_DATE), 1, True, False),
        (None, 1, True, False),
        (None, 0, True, True),
    ],
    ids=["has none", "has forgotten", "too few", "cannot say", "has it", "nobody is asked"],
)
async def test_others_are_asked_whether_they_have_none(
    leader: tuple[LeadersNode, str],
    answer: Refusal | None,
    wanted: int,
    is_complete: bool,
    have_none: bool,
) -> None:
    node, address = leader
    node.answer = answer
    other_nodes = CallsToNodes(view_of(address, is_complete=is_complete))
    assert await other_nodes.others_have_none(REQUEST.messages[0], wanted=wanted) is have_none
    assert node.passed == (["1"] if wanted else [])


async def test_who_has_many_messages_asked_about_waits_for_itself(
    leader: tuple[LeadersNode, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, address = leader
    other_nodes, asked, goes_on = CallsToNodes(view_of(address)), list[int](), asyncio.Event()

    async def ask_all(*_: object, **_more: object) -> dict[str, object]:
        asked.append(len(asked))
        await goes_on.wait()
        return {}

    monkeypatch.setattr(other_nodes, "ask_all", ask_all)
    ask = partial(other_nodes.others_have_none, REQUEST.messages[0], wanted=1)
    many = [asyncio.create_task(ask(sharer="many")) for _ in range(20)]
    await asyncio.sleep(0)
    another = asyncio.create_task(ask(sharer="another"))
    await asyncio.sleep(0)
    assert len(asked) == 4
    goes_on.set()
    await another
    assert len(asked) < 12, "it was the 21st"
    await asyncio.gather(*many)
    assert node.passed == []


async def test_the_leaders_reason_is_the_answer(leader: tuple[LeadersNode, str]) -> None:
    node, address = leader
    other_nodes = CallsToNodes(view_of(address))
    for answer, reason in (
        (Refusal(Reason.NOT_UP_TO_DATE), Reason.NOT_UP_TO_DATE),
        (None, Reason.CANCEL_UNKNOWN),
    ):
        node.answer = answer
        with pytest.raises(RequestRefusedError) as caught:
            await other_nodes.cancel(address, REQUEST.messages, 5)
        assert caught.value.refusal.reason is reason
    await other_nodes.close()


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (Reason.DRAINING, Reason.NO_LEADER),
        (Reason.NO_WHEEL, Reason.NO_LEADER),
        (Reason.NOT_ENOUGH_REPLICAS, Reason.NO_LEADER),
        (Reason.DISK_FULL, Reason.NO_LEADER),
        (Reason.WHEEL_LOST, Reason.CANCEL_UNKNOWN),
        (Reason.INTERNAL, Reason.CANCEL_UNKNOWN),
        (Reason.CANCEL_UNKNOWN, Reason.CANCEL_UNKNOWN),
        (Reason.SLOT_FULL, Reason.SLOT_FULL),
    ],
)
async def test_how_the_leaders_node_is_says_nothing_of_this_one(
    leader: tuple[LeadersNode, str], there: Reason, here: Reason
) -> None:
    """A client leaves a draining node: that node alone, not all that pass its answers on."""
    node, address = leader
    node.answer = Refusal(there)
    other_nodes = CallsToNodes(view_of(address))
    with pytest.raises(RequestRefusedError) as caught:
        await other_nodes.cancel(address, REQUEST.messages, 5)
    assert caught.value.refusal.reason is here
    if here is not there:
        assert caught.value.refusal.detail == f"The leader's node cannot write it: {there}"
    await other_nodes.close()


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
    assert CallsToNodes(view).leader_address() is None


async def test_a_channel_that_was_replaced_is_closed(
    leader: tuple[LeadersNode, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its calls have ended; so there is one for each node, however often files are renewed."""
    node, address = leader
    other_nodes = CallsToNodes(view_of(address))
    shown = SimpleNamespace(current=None)
    monkeypatch.setattr(other_nodes, "_certificates", shown)
    monkeypatch.setattr(other_nodes, "_open", lambda at, *_, **__: grpc.aio.insecure_channel(at))
    view_peers = {"n2": replace(SECRETIVE, client_address=address, client_tls=True)}
    monkeypatch.setattr(
        other_nodes, "_view", node_view(view_of(None).status, peers=lambda: view_peers)
    )
    node.goes_on.clear()
    slow = asyncio.create_task(other_nodes.cancel(address, REQUEST.messages, 20))
    await until(lambda: len(node.asked) == 1)
    for shown.current in range(3):
        with pytest.raises(RequestRefusedError):
            await other_nodes.cancel(address, REQUEST.messages, 0.05)
    assert len(other_nodes._channels) == 1
    node.goes_on.set()
    assert (await slow)[0].outcome == pb.CANCEL_OUTCOME_CANCELLED
    await until(lambda: not other_nodes._closing)
    assert set(node.passed) == {SECRETIVE.call_secret.hex()}
    await other_nodes.close()


_NONE = grpc.aio.Metadata()
SECRETIVE = PeerState(Connection.CONNECTED, 0, "127.0.0.1:1", call_secret=b"secret")


def peer(address: str | None, refusal: PeerRefusal | None = None) -> PeerState:
    return PeerState(Connection.CONNECTING, 0, "peer:1", refusal=refusal, client_address=address)


async def asked(
    peers: dict[str, PeerState], *, within_s: float
) -> dict[str, pb.DescribeClusterResponse | Silent]:
    """The answers of each node to one that asks them all."""
    other_nodes = CallsToNodes(node_view(view_of(None).status, peers=lambda: peers))
    try:
        return await other_nodes.ask_all(
            lambda node: node.stub.DescribeCluster(
                pb.DescribeClusterRequest(), timeout=node.within_s
            ),
            within_s=within_s,
        )
    finally:
        await other_nodes.close()


async def test_all_are_asked_at_once_and_silent_nodes_are_reported_with_the_reason(
    leader: tuple[LeadersNode, str],
) -> None:
    node, address = leader
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        nowhere = f"127.0.0.1:{nobody.getsockname()[1]}"
        refused = PeerRefusal(PeerReason.SETTINGS_DISAGREE, "min_insync: 2 here, 1 there")
        peers = {
            "n2": peer(address),
            "n3": peer(nowhere),
            "n4": peer(None),
            "n5": peer(address, refused),
        }
        answers = await asked(peers, within_s=30)
    assert answers == {
        "n2": pb.DescribeClusterResponse(node="n2"),
        "n3": Silent(f"no node is reached at {nowhere}"),
        "n4": Silent("it was never reached, so its address for callers is not known"),
        "n5": Silent("SETTINGS_DISAGREE: min_insync: 2 here, 1 there"),
    }
    node.answer = Refusal(Reason.INTERNAL)
    silent = (await asked({"n2": peer(address)}, within_s=30))["n2"]
    assert isinstance(silent, Silent)
    assert silent.why.startswith(f"{address} answered INTERNAL: ")


async def test_nobody_is_waited_for_longer_than_that(leader: tuple[LeadersNode, str]) -> None:
    node, address = leader
    node.delay_s = 60
    began = time.monotonic()
    answers = await asked({"n2": peer(address), "n3": peer(address)}, within_s=0.3)
    assert set(answers.values()) == {Silent(f"no answer from {address} within 0.3 s")}
    assert time.monotonic() - began < node.delay_s


async def test_who_came_back_is_found_at_once() -> None:
    """Nothing is remembered of a time without nodes, and of one that answers its connection."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{place.getsockname()[1]}"
        other_nodes = CallsToNodes(
            node_view(view_of(None).status, peers=lambda: {"n2": peer(address)})
        )

    async def ask() -> pb.DescribeClusterResponse | Silent:
        answers = await other_nodes.ask_all(
            lambda node: node.stub.DescribeCluster(
                pb.DescribeClusterRequest(), timeout=node.within_s
            ),
            within_s=30,
        )
        return answers["n2"]

    for _ in range(2):
        assert isinstance(await ask(), Silent)
        node = LeadersNode()  # type: ignore[abstract]
        server = grpc.aio.server()
        rpc.add_DelayWheelServicer_to_server(node, server)
        server.add_insecure_port(address)
        await server.start()
        answer = pb.DescribeClusterResponse(node="n2")
        assert [await ask(), await ask(), await ask()] == [answer] * 3
        assert len(node.describes_to) == 3
        assert len(set(node.describes_to)) == 1
        assert [*await asyncio.gather(ask(), ask())] == [answer] * 2
        assert len(set(node.describes_to)) == 2
        await server.stop(0)
    await other_nodes.close()


async def test_a_node_that_was_restarted_is_asked_again_on_a_new_connection(
    leader: tuple[LeadersNode, str],
) -> None:
    _, address = leader
    other_nodes = CallsToNodes(node_view(view_of(None).status, peers=lambda: {"n2": peer(address)}))
    calls = list[str]()

    async def ends_once(there: OtherNode) -> str:
        calls.append(there.metadata[0][1])
        if len(calls) == 2:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, _NONE, _NONE)
        return "answer"

    for number in (1, 3):
        assert await other_nodes.ask_all(ends_once, within_s=30) == {"n2": "answer"}
        assert len(calls) == number
    await other_nodes.close()
