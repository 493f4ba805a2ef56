"""Reschedules at a real server with a scripted cleaner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import grpc
import pytest

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.core.leader.rescheduling import MOST
from delaywheel_replica.core.protocol.control import ControlState
from delaywheel_replica.core.protocol.progress import Done, Position
from delaywheel_replica.core.protocol.reschedules import (
    MessageKey,
    Reschedule,
    RescheduleProposal,
    RescheduleWritten,
)
from delaywheel_replica.server.access.callers import A_NODE, ANYBODY, CallContext
from delaywheel_replica.server.access.spending import TopicRoom
from delaywheel_replica.server.changing.awaited import SWEPT_AT_LEAST
from delaywheel_replica.server.changing.decided_dues import DecidedDues
from delaywheel_replica.server.changing.finder import MessageFinder
from delaywheel_replica.server.changing.pending import Decided, Subject
from delaywheel_replica.server.changing.reschedules import Reschedules, Span
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.lookup.scan import Found
from delaywheel_replica.server.node.calls_to_nodes import WAIT_S
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.node_view import monotonic_ms
from delaywheel_replica.server.node.refusals import RequestRefusedError
from support.server.fake_cleaner import FakeCleaner
from support.server.server_process import ServerProcess
from support.services.waiting import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("due") / "n1", span_seconds="600") as running:
        # A word comes whenever progress moves.
        running.cleaner.passes_time = True
        running.wait_accepting()
        yield running


def in_ms(ms: int) -> int:
    return time.time_ns() // 1_000_000 + ms


def committed_ms(cleaner: FakeCleaner) -> int:
    """w."""
    progress = cleaner.state.progress
    assert progress is not None
    return progress.due_ms


def named(handle: str) -> pb.MessageRef:
    return pb.MessageRef(handle=handle)


def produce(server: ServerProcess, due_ms: int, **fields: Any) -> str:
    message = pb.DelayedMessage(topic="orders", deliver_at_ms=due_ms, **fields)
    (result,) = server.produce(message)
    return result.handle


def reschedule(
    server: ServerProcess, handle: str, to_ms: int, timeout_s: float = 30
) -> pb.MessageRescheduled:
    due = pb.NewDue(message=named(handle), deliver_at_ms=to_ms)
    request = pb.RescheduleRequest(messages=[due])
    return server.stub.Reschedule(request, timeout=timeout_s).results[0]


def search(server: ServerProcess, wanted: pb.Filter) -> list[pb.StoredMessage]:
    """Asks page by page: each ends after two seconds of reading, whatever it has found by then."""
    request, found = pb.SearchRequest(filter=wanted), list[pb.StoredMessage]()
    while True:
        page = server.stub.Search(request, timeout=30)
        found += page.messages
        request.page_token = page.next_page_token
        if not request.page_token:
            return found


def test_a_message_is_found_where_it_went_and_its_old_handle_says_so(server: ServerProcess) -> None:
    headers = [pb.Header(name="trip", value=b"7")]
    due_ms, to_ms = in_ms(60_000), in_ms(120_000)
    handle = produce(server, due_ms, key=b"k", value=b"v", headers=headers)
    reported = reschedule(server, handle, to_ms)
    assert (reported.outcome, reported.due_ms) == (pb.RESCHEDULE_OUTCOME_RESCHEDULED, to_ms)
    found = server.stub.GetMessage(pb.GetMessageRequest(message=named(reported.handle))).message
    assert (found.due_ms, found.key, found.value) == (to_ms, b"k", b"v")
    assert list(found.headers) == headers
    assert found.state == pb.MESSAGE_STATE_PENDING

    def written() -> list[RescheduleWritten]:
        return [m for m in server.cleaner.received if isinstance(m, RescheduleWritten)]

    wait_until("the cleaner hears of it", lambda: written() and written()[-1].to_ms == to_ms)
    wait_until("the record is gone", lambda: not server.cleaner.state.reschedules)
    # A retry, a request for another due, and a cancel all get the present due.
    for again_ms in (to_ms, to_ms + 5_000):
        again = reschedule(server, handle, again_ms)
        assert (again.outcome, again.due_ms) == (reported.outcome, to_ms)
    (cancel,) = server.stub.Cancel(pb.CancelRequest(messages=[named(handle)]), timeout=30).results
    assert (cancel.outcome, cancel.due_ms) == (pb.CANCEL_OUTCOME_RESCHEDULED, to_ms)
    was = server.stub.GetMessage(pb.GetMessageRequest(message=named(handle))).message
    assert (was.state, was.rescheduled_to_ms) == (pb.MESSAGE_STATE_CANCELLED, to_ms)
    assert not found.HasField("rescheduled_to_ms")
    assert [message.due_ms for message in search(server, pb.Filter(key=b"k"))] == [to_ms]


def test_a_new_due_in_the_same_second_is_named_by_the_handle_that_is_reported(
    server: ServerProcess,
) -> None:
    second_ms = in_ms(60_000) // 1000 * 1000
    due_ms, to_ms = second_ms + 100, second_ms + 900
    handle = produce(server, due_ms, value=b"same second")
    reported = reschedule(server, handle, to_ms)
    assert (reported.outcome, reported.due_ms) == (pb.RESCHEDULE_OUTCOME_RESCHEDULED, to_ms)
    found = server.stub.GetMessage(pb.GetMessageRequest(message=named(reported.handle))).message
    assert (found.due_ms, found.state) == (to_ms, pb.MESSAGE_STATE_PENDING)
    # A caller that did not get the answer retries, for the same due.
    again = reschedule(server, handle, to_ms)
    assert (again.outcome, again.due_ms, again.handle) == (reported.outcome, to_ms, reported.handle)
    later = reschedule(server, reported.handle, second_ms + 950)
    assert later.due_ms == second_ms + 950
    elsewhere = reschedule(server, later.handle, second_ms + 5_000)
    assert elsewhere.due_ms == second_ms + 5_000
    assert reschedule(server, handle, second_ms + 7_000).due_ms == second_ms + 5_000
    was = server.stub.GetMessage(pb.GetMessageRequest(message=named(handle))).message
    assert (was.due_ms, was.rescheduled_to_ms) == (second_ms + 950, second_ms + 5_000)


def test_what_is_due_then_already_is_there(server: ServerProcess) -> None:
    due_ms = in_ms(60_000)
    handle = produce(server, due_ms)
    reported = reschedule(server, handle, due_ms)
    assert reported.outcome == pb.RESCHEDULE_OUTCOME_RESCHEDULED
    assert (reported.due_ms, reported.handle) == (due_ms, handle)


def refused(server: ServerProcess, handle: str, reason: Reason) -> None:
    """Before a caller would get an unknown outcome."""
    began_s = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        reschedule(server, handle, in_ms(90_000))
    assert reason.advice in str(caught.value)
    assert time.monotonic() - began_s < WAIT_S
    assert caught.value.code() is reason.code


def test_while_what_was_done_early_is_to_come_nothing_is_proposed(server: ServerProcess) -> None:
    handle = produce(server, in_ms(60_000))
    proposals = [m for m in server.cleaner.received if isinstance(m, RescheduleProposal)]
    server.cleaner.commit_progress(ahead=(Done(in_ms(40_000), None),))
    try:
        refused(server, handle, Reason.RESCHEDULES_RESTING)
    finally:
        server.cleaner.commit_progress(ahead=())
    assert [m for m in server.cleaner.received if isinstance(m, RescheduleProposal)] == proposals
    assert reschedule(server, handle, in_ms(90_000)).outcome == pb.RESCHEDULE_OUTCOME_RESCHEDULED


def test_each_of_many_is_answered_and_who_asks_for_a_part_does_not_wait(
    server: ServerProcess,
) -> None:
    """More are named than may stand at once: the others follow, and none is refused."""
    due_ms, to_ms = in_ms(200_000), in_ms(300_000)
    messages = [pb.DelayedMessage(topic="orders", deliver_at_ms=due_ms) for _ in range(MOST + 40)]
    produced = server.produce(*messages)
    assert not [each.error for each in produced if each.HasField("error")]
    handles = [each.handle for each in produced]
    dues = [pb.NewDue(message=named(each), deliver_at_ms=to_ms) for each in [*handles, "x"]]
    proposals = [m for m in server.cleaner.received if isinstance(m, RescheduleProposal)]
    in_part = server.stub.Reschedule(
        pb.RescheduleRequest(messages=dues, partly=True), timeout=30
    ).results
    assert in_part[-1].error.reason == Reason.HANDLE_INVALID
    assert not in_part[-2].outcome
    assert not in_part[-2].HasField("error")
    results = server.stub.Reschedule(pb.RescheduleRequest(messages=dues), timeout=30).results
    assert {each.outcome for each in results[:-1]} == {pb.RESCHEDULE_OUTCOME_RESCHEDULED}
    assert {each.due_ms for each in results[:-1]} == {to_ms}
    assert len({each.handle for each in results[:-1]}) == len(handles)
    proposed = {m.key for m in server.cleaner.received if isinstance(m, RescheduleProposal)}
    assert len(proposed - {proposal.key for proposal in proposals}) == len(handles)


def test_while_as_many_stand_as_may_no_other_is_proposed(server: ServerProcess) -> None:
    handle = produce(server, in_ms(60_000))
    to_ms = in_ms(500_000)
    stand = {
        MessageKey(n.to_bytes(16, "big"), to_ms - 1, "orders"): Reschedule(
            to_ms, Position(WheelId("n1", 1), 1, 0), is_written=True
        )
        for n in range(MOST)
    }

    def is_told() -> bool:
        """Whether it hears so before its time is over; on a busy machine it may not."""
        with pytest.raises(grpc.RpcError) as caught:
            reschedule(server, handle, in_ms(90_000), 0.5)
        return Reason.RESCHEDULES_BUSY.advice in str(caught.value)

    server.cleaner.commit(lambda state: replace(state, reschedules=stand))
    try:
        wait_until("it is refused", is_told)
    finally:
        server.cleaner.commit(lambda state: replace(state, reschedules={}))
    assert reschedule(server, handle, in_ms(90_000)).outcome == pb.RESCHEDULE_OUTCOME_RESCHEDULED


def test_a_due_that_passes_before_it_is_decided_gives_way_to_a_later_one(
    server: ServerProcess,
) -> None:
    """A leader with much to do decides late, and none that has passed: nobody waits in vain."""
    handle = produce(server, in_ms(60_000))
    cleaner = server.cleaner
    with ThreadPoolExecutor(1) as caller:
        with cleaner.deaf():
            waiting = caller.submit(reschedule, server, handle, in_ms(-5_000))
            nearest_ms = in_ms(600)
            wait_until("it has passed", lambda: committed_ms(cleaner) > nearest_ms)
        reported = waiting.result()
    assert reported.outcome == pb.RESCHEDULE_OUTCOME_RESCHEDULED
    assert reported.due_ms > nearest_ms
    found = server.stub.GetMessage(pb.GetMessageRequest(message=named(reported.handle))).message
    assert found.due_ms == reported.due_ms


def test_who_asks_again_once_the_old_second_is_deleted_is_told_the_same(
    server: ServerProcess,
) -> None:
    to_ms = in_ms(100_000)
    handle = produce(server, in_ms(20_000), value=b"asked again")
    reported = reschedule(server, handle, to_ms)
    wait_until("the record is gone", lambda: not server.cleaner.state.reschedules)
    old_slot = int(handle.split(":")[1])
    server.cleaner.commit_progress(floor=old_slot + 1)
    wait_until("it is deleted", lambda: server.describe().floor > old_slot)
    again = reschedule(server, handle, to_ms)
    assert (again.outcome, again.due_ms) == (pb.RESCHEDULE_OUTCOME_RESCHEDULED, to_ms)
    assert again.handle.split(":")[1:] == reported.handle.split(":")[1:]
    # Where it is not, nothing is known of it.
    elsewhere = reschedule(server, handle, to_ms + 1_000)
    assert elsewhere.outcome == pb.RESCHEDULE_OUTCOME_TOO_LATE


def is_waited_for(server: ServerProcess) -> bool:
    """Whether a caller waits for a reschedule, longer than a refusal takes."""
    request = pb.DescribeClusterRequest(details=True)
    (member,) = server.stub.DescribeCluster(request, timeout=30).members
    calls = member.report.waiting_calls
    return any(each.call == "reschedule" and each.longest_ms >= 200 for each in calls)


def test_a_frame_that_this_node_lacks_for_a_moment_is_waited_for(server: ServerProcess) -> None:
    """Its heartbeat may overtake it: nobody is refused for that."""
    handle, to_ms, away = produce(server, in_ms(60_000)), in_ms(90_000), WheelId("n2", 7)

    def with_another(state: ControlState) -> ControlState:
        (of_own, *_) = state.wheels.values()
        return replace(
            state, wheels={**state.wheels, away: replace(of_own, members={"n2": "disk"})}
        )

    def without(state: ControlState) -> ControlState:
        return replace(state, wheels={w: of for w, of in state.wheels.items() if w != away})

    def comes_in_time() -> bool:
        """Whether it comes while the node still waits, which it does for a second."""
        server.cleaner.commit(with_another)
        with ThreadPoolExecutor(1) as caller:
            waiting = caller.submit(reschedule, server, handle, to_ms)
            wait_until("it is asked", lambda: waiting.done() or is_waited_for(server))
            server.cleaner.commit(without)
            try:
                return waiting.result().due_ms == to_ms
            except grpc.RpcError as error:
                if Reason.NOT_UP_TO_DATE.advice not in str(error):
                    raise
                return False

    server.cleaner.commit(with_another)
    try:
        refused(server, handle, Reason.NOT_UP_TO_DATE)
        wait_until("it comes in time", comes_in_time)
    finally:
        server.cleaner.commit(without)


async def settle() -> None:
    """Has each task go on until it waits for what a test does later."""
    for _ in range(50):
        await asyncio.sleep(0)


def deciding(
    find: Callable[..., Any],
    decide: Callable[..., Any],
    read_ahead: Callable[..., Any] | None = None,
) -> Reschedules:
    """Those of the leader's node, where messages are found and decided so."""
    finder = SimpleNamespace(
        leader_address=lambda _: None,
        read_ahead=read_ahead or AsyncMock(),
        find=find,
        decide=decide,
    )
    leading = SimpleNamespace(leading=lambda: SimpleNamespace(reschedules={}))
    return Reschedules(
        *cast("Any", (SimpleNamespace(cleaner=leading), finder, None, None)),
        span=Span(600, 0),
        propose=AsyncMock(),
        next_change=asyncio.Event().wait,
        counts=NodeCounts(),
    )


async def test_who_joins_a_look_is_not_told_that_it_found_nothing() -> None:
    """The message may have been accepted since that look, before this caller asked."""
    reference = Reference.of(MessageKey(bytes(16), in_ms(3_000), "t"))
    others_answer = asyncio.Event()

    async def decide(_subject: Subject, _sharer: object) -> Decided:
        await others_answer.wait()
        return Decided(CancelDecision.NOT_FOUND)

    reschedules = deciding(
        find=AsyncMock(return_value=Subject(reference, reference, Found())),
        decide=decide,
    )
    due = pb.NewDue(message=named(f"n1.1:5:{7:032x}:t"), deliver_at_ms=in_ms(60_000))
    request = pb.RescheduleRequest(messages=[due, due])
    first = asyncio.create_task(reschedules.reschedule(request, CallContext(ANYBODY, "", 10)))
    await settle()
    later = asyncio.create_task(reschedules.reschedule(request, CallContext(ANYBODY, "", 10)))
    await settle()
    others_answer.set()
    outcomes = [each.outcome for each in (await first).results]
    assert outcomes == [pb.RESCHEDULE_OUTCOME_NOT_FOUND] * 2
    assert [each.error.reason for each in (await later).results] == [Reason.NOT_UP_TO_DATE] * 2


async def test_who_names_many_messages_waits_behind_others_and_leaves_them_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2,048 of one principal's were before everybody's, or had them refused."""
    monkeypatch.setattr("delaywheel_replica.server.changing.reschedules.QUEUED_AT_MOST", 8)
    monkeypatch.setattr("delaywheel_replica.server.changing.reschedules.MOST", 1)
    sought, goes_on = list[int](), asyncio.Event()

    async def find(reference: Reference) -> Subject:
        sought.append(int.from_bytes(reference.id, "big"))
        await goes_on.wait()
        return Subject(reference, reference, Found())

    reschedules = deciding(
        find=find,
        decide=AsyncMock(return_value=Decided(CancelDecision.CANCELLED)),
    )

    def begin(address: str, *numbers: int) -> asyncio.Task[pb.RescheduleResponse]:
        dues = [
            pb.NewDue(message=named(f"n1.1:5:{number:032x}:t"), deliver_at_ms=in_ms(60_000))
            for number in numbers
        ]
        request = pb.RescheduleRequest(messages=dues)
        call = CallContext(ANYBODY, address, 10)
        return asyncio.create_task(reschedules.reschedule(request, call))

    begun = [begin("many", 1)]
    await settle()
    begun += [begin("many", *range(2, 10)), begin("another", 99)]
    await settle()
    goes_on.set()
    _, most, other = [(await each).results for each in begun]
    assert [each.error.reason for each in most] == [""] * 4 + [Reason.RESCHEDULES_BUSY] * 4
    assert other[0].outcome == pb.RESCHEDULE_OUTCOME_CANCELLED
    assert [*dict.fromkeys(sought)] == [1, 99, 2, 3, 4, 5]


async def test_who_has_seconds_read_ahead_delays_no_others_of_the_same_node() -> None:
    async def read_ahead(_: object, sharer: object) -> None:
        if sharer != ("n2", 2):
            await asyncio.Event().wait()

    reference = Reference.of(MessageKey(bytes(16), in_ms(3_000), "t"))
    reschedules = deciding(
        find=AsyncMock(return_value=Subject(reference, reference, Found())),
        decide=AsyncMock(return_value=Decided(CancelDecision.CANCELLED)),
        read_ahead=read_ahead,
    )
    dues = [
        pb.NewDue(message=named(f"n1.1:5:{number:032x}:t"), deliver_at_ms=in_ms(60_000))
        for number in range(2)
    ]
    request = pb.RescheduleRequest(messages=dues, sharers=[1, 2], partly=True)
    answer = await asyncio.wait_for(
        reschedules.reschedule(request, CallContext(A_NODE, "n2", 10)), 9
    )
    assert [each.outcome for each in answer.results] == [0, pb.RESCHEDULE_OUTCOME_CANCELLED]


async def test_a_half_whose_commit_lies_there_keeps_its_due_at_once() -> None:
    """A cancel of it waits for what becomes of it; other dues are never given to halves."""
    place = Position(WheelId("n1", 1), 1, 0)
    found = Found((in_ms(3_000),), [place], commits=[place])
    meant, moved = (Reference.of(MessageKey(bytes(16), ms, "t")) for ms in (found.dues_ms[0], 5))
    subject = Subject(meant, moved, found)
    reschedules = deciding(
        find=AsyncMock(return_value=subject),
        decide=AsyncMock(return_value=Decided(CancelDecision.WAIT)),
    )
    dues = [pb.NewDue(message=named(f"n1.1:5:{7:032x}:t"), deliver_at_ms=in_ms(60_000))]
    with pytest.raises(RequestRefusedError) as refused:
        await reschedules.reschedule(
            pb.RescheduleRequest(messages=dues), CallContext(ANYBODY, "", 10)
        )
    assert refused.value.refusal.reason is Reason.HALF_KEEPS_DUE


async def test_a_topic_that_is_full_gives_no_other_dues() -> None:
    """Each is one message more on the disk: one of a quota's last was a thousand."""
    place = Position(WheelId("n1", 1), 1, 0)
    due_ms = in_ms(300_000_000)
    key = MessageKey(bytes(16), due_ms, "small")
    subject = Subject(Reference.of(key), Reference.of(key), Found((due_ms,), [place]))
    finder = SimpleNamespace(
        leader_address=lambda _: None,
        read_ahead=AsyncMock(),
        find=AsyncMock(return_value=subject),
        decide=AsyncMock(return_value=Decided(CancelDecision.WRITE)),
        is_half=AsyncMock(return_value=False),
    )
    leading = SimpleNamespace(leading=lambda: SimpleNamespace(reschedules={}))
    decided_dues = DecidedDues(
        *cast("Any", (None, None, None)),
        report=AsyncMock(),
        next_change=asyncio.Event().wait,
        topic_rooms=lambda: {"small": TopicRoom(9, 0), "other": TopicRoom(9, 9)}.get,
    )
    reschedules = Reschedules(
        *cast("Any", (SimpleNamespace(cleaner=leading), finder, decided_dues, None)),
        span=Span(600_000, 0),
        propose=AsyncMock(),
        next_change=asyncio.Event().wait,
        counts=NodeCounts(),
    )
    dues = [pb.NewDue(message=named(f"n1.1:5:{7:032x}:small"), deliver_at_ms=in_ms(60_000))]
    with pytest.raises(RequestRefusedError, match="bytes are pending in small") as refused:
        await reschedules.reschedule(
            pb.RescheduleRequest(messages=dues), CallContext(ANYBODY, "", 10)
        )
    assert refused.value.refusal.reason is Reason.QUOTA_EXCEEDED


async def test_who_asks_for_a_part_and_hears_nothing_in_time_finds_it_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It begins again otherwise, behind all others that wait, each time."""

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    leading = SimpleNamespace(leading=lambda: SimpleNamespace(reschedules={}))
    view = SimpleNamespace(cleaner=leading)
    others = SimpleNamespace()
    finder = MessageFinder(*cast("Any", (view, others, others, others, 0)))
    monkeypatch.setattr(finder, "find", never)
    others.read_ahead = AsyncMock()
    reschedules = Reschedules(
        *cast("Any", (view, finder, others, others)),
        span=Span(600, 0),
        propose=never,
        next_change=never,
        counts=NodeCounts(),
    )
    dues = [pb.NewDue(message=named(f"n1.1:5:{7:032x}:orders"), deliver_at_ms=in_ms(60_000))]
    request = pb.RescheduleRequest(messages=dues, partly=True)
    for _ in range(SWEPT_AT_LEAST + 1):
        with pytest.raises(RequestRefusedError) as refused:
            await reschedules.reschedule(request, CallContext(ANYBODY, "", 0.002))
        assert refused.value.refusal.reason is Reason.RESCHEDULE_UNKNOWN
        (attempt,) = reschedules._attempts.values()
        assert attempt.is_awaited
    assert len([*attempt.callers]) < SWEPT_AT_LEAST, "callers that have left are kept"
    monkeypatch.setattr("delaywheel_replica.server.changing.reschedules.PASSED_ON_S", 0.01)
    (undecided,) = (await reschedules.reschedule(request, CallContext(A_NODE, "", 10))).results
    assert undecided == pb.MessageRescheduled()
    # That node asks again, and may come late: what was done until then is not to be done anew.
    assert attempt.kept_until_ms > monotonic_ms() + 5_000
    # What waits for its turn is not said to be unchanged while it may still have it.
    monkeypatch.setattr("delaywheel_replica.server.changing.reschedules.MOST", 0)
    for is_kept, reason in [(True, Reason.RESCHEDULE_UNKNOWN), (False, Reason.RESCHEDULES_BUSY)]:
        handle = f"n1.1:5:{8 + is_kept:032x}:orders"
        dues = [pb.NewDue(message=named(handle), deliver_at_ms=in_ms(60_000))]
        request = pb.RescheduleRequest(messages=dues, partly=is_kept)
        with pytest.raises(RequestRefusedError) as refused:
            await reschedules.reschedule(request, CallContext(ANYBODY, "", 0.02))
        assert refused.value.refusal.reason is reason
    for task in reschedules._tasks:
        task.cancel()
