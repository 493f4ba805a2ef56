"""Many messages are cancelled with one call, each separately; a retry has the same effect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.core.protocol.status_files import Role
from delaywheel_replica.link import CommitSoon
from delaywheel_replica.server.access.callers import ANYBODY, CallContext
from delaywheel_replica.server.changing.cancels import CancelMany
from delaywheel_replica.server.changing.pending import Decided
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.lookup.search import Page
from delaywheel_replica.server.node.refusals import RequestRefusedError
from support.server.server_process import ServerProcess
from support.services.waiting import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("many") / "n1", span_seconds="600") as running:
        running.wait_accepting()
        yield running


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def produce(server: ServerProcess, key: bytes, *dues_ms: int) -> list[str]:
    messages = [pb.DelayedMessage(topic="orders", key=key, deliver_at_ms=due) for due in dues_ms]
    return [result.handle for result in server.produce(*messages)]


def asked(key: bytes, **fields: Any) -> pb.CancelManyRequest:
    return pb.CancelManyRequest(filter=pb.Filter(topic="orders", key=key), **fields)


def take_everything(server: ServerProcess) -> None:
    """Commits a progress that covers everything written."""
    wheels = server.describe().wheels
    seqs = {WheelId.parse(wheel.wheel): wheel.applied_seq for wheel in wheels}
    server.cleaner.commit_progress(seqs=seqs)


def take_until_answered(server: ServerProcess, waiting: Any) -> None:
    """Commits progress again and again: what a node says of its wheels may be 0.25 s old."""

    def answered() -> bool:
        take_everything(server)
        return bool(waiting.done())

    wait_until("it is answered", answered)


def taken(server: ServerProcess, request: pb.CancelManyRequest) -> pb.CancelManyResponse:
    """The answer to a call that waits for progress."""
    waiting = server.stub.CancelMany.future(request, timeout=20)
    take_until_answered(server, waiting)
    answer: pb.CancelManyResponse = waiting.result()
    return answer


def all_pages(
    request: pb.CancelManyRequest, call: Callable[[pb.CancelManyRequest], pb.CancelManyResponse]
) -> list[pb.CancelManyResponse]:
    """Asks page by page: each ends after two seconds of reading, whatever it has found by then."""
    answers = [call(request)]
    while token := answers[-1].next_page_token:
        request.page_token = token
        answers.append(call(request))
    return answers


def outcomes(*answers: pb.CancelManyResponse) -> dict[str, int]:
    return {result.handle: result.outcome for answer in answers for result in answer.results}


def were_cancelled_before(answers: Iterable[pb.CancelManyResponse]) -> set[bool]:
    return {result.cancelled_before for answer in answers for result in answer.results}


def test_what_is_found_is_cancelled_once_progress_says_so(server: ServerProcess) -> None:
    def at_once(request: pb.CancelManyRequest) -> pb.CancelManyResponse:
        answer: pb.CancelManyResponse = server.stub.CancelMany(request, timeout=20)
        return answer

    later = now_ms() + 60_000
    handles = produce(server, b"all", *(later + 700 * number for number in range(6)))
    others = produce(server, b"others", later)
    dry = all_pages(asked(b"all", dry_run=True), at_once)
    assert outcomes(*dry) == dict.fromkeys(handles, pb.CANCEL_OUTCOME_UNSPECIFIED)
    before = server.cleaner.received.count(CommitSoon())
    waiting = server.stub.CancelMany.future(asked(b"all"), timeout=20)
    wait_until(
        "a commit is asked for", lambda: server.cleaner.received.count(CommitSoon()) > before
    )
    assert not waiting.done()
    take_until_answered(server, waiting)
    answers = [waiting.result()]
    if token := answers[0].next_page_token:
        request = asked(b"all", page_token=token)
        answers += all_pages(request, lambda request: taken(server, request))
    cancelled = dict.fromkeys(handles, pb.CANCEL_OUTCOME_CANCELLED)
    assert outcomes(*answers) == cancelled
    assert were_cancelled_before(answers) == {False}
    # A caller that did not get the answer retries: the same, and nothing more is written.
    seqs = {wheel.wheel: wheel.applied_seq for wheel in server.describe().wheels}
    again = all_pages(asked(b"all"), at_once)
    assert outcomes(*again) == cancelled
    assert were_cancelled_before(again) == {True}
    assert outcomes(*all_pages(asked(b"all", dry_run=True), at_once)) == cancelled
    assert {wheel.wheel: wheel.applied_seq for wheel in server.describe().wheels} == seqs
    state = pb.GetMessageRequest(message=pb.MessageRef(handle=others[0]))
    assert server.stub.GetMessage(state).message.state == pb.MESSAGE_STATE_PENDING


def test_nothing_is_withdrawn_while_nobody_leads(server: ServerProcess) -> None:
    produce(server, b"nobody", now_ms() + 60_000)
    server.cleaner.role = Role.STANDBY
    try:
        wait_until("it is known", lambda: not server.describe().HasField("leader"))
        with pytest.raises(grpc.RpcError) as caught:
            server.stub.CancelMany(asked(b"nobody"), timeout=20)
        assert Reason.NO_LEADER.advice in str(caught.value)
    finally:
        server.cleaner.role = Role.LEADING


async def test_only_so_many_calls_hold_a_page_each() -> None:
    """Admitted callers are answered: none is refused once its cancels are written."""
    goes_on, let_in = asyncio.Event(), list[object]()

    async def page(asked: object, _: str) -> Page:
        let_in.append(asked)
        await goes_on.wait()
        return Page()

    view: Any = SimpleNamespace(
        cleaner=SimpleNamespace(leading=object, status=None),
        status=lambda: SimpleNamespace(heartbeat=SimpleNamespace(node="n1")),
    )
    search: Any = SimpleNamespace(page=page)
    finder: Any = SimpleNamespace(leader_address=lambda _: None)
    many = CancelMany(view, finder, search, cast("Any", None), cast("Any", None))
    calls = [
        asyncio.create_task(many.cancel_many(asked(b"k"), CallContext(ANYBODY, "")))
        for _ in range(20)
    ]
    done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert (len(waiting), len(let_in)) == (8, 8)  # the other half is left to others
    for call in done:
        with pytest.raises(RequestRefusedError, match="SEARCHES_BUSY"):
            call.result()
    goes_on.set()
    assert [await call for call in waiting] == [
        pb.CancelManyResponse(looked=pb.Looked(node="n1"))
    ] * 8
    await many.cancel_many(asked(b"k"), CallContext(ANYBODY, ""))


async def test_half_messages_are_left_alone_and_counted() -> None:
    """Their senders would hear that they are committed, and nothing would be delivered."""
    states = [
        pb.MESSAGE_STATE_HELD,
        pb.MESSAGE_STATE_PENDING,
        pb.MESSAGE_STATE_COMMITTED,
        pb.MESSAGE_STATE_ROLLED_BACK,
    ]
    found = [
        pb.StoredMessage(
            handle=f"n1.1:1:{n:032x}:orders",
            id=bytes([n] * 16),
            due_ms=1,
            state=state,
            topic="orders",
        )
        for n, state in enumerate(states)
    ]
    named: list[list[bytes]] = []

    async def page(_: object, __: str) -> Page:
        return Page(found)

    async def cancel(references: list[Reference], _: float, _sharer: object) -> list[Decided]:
        named.append([each.id for each in references])
        return [Decided(CancelDecision.CANCELLED)] * len(references)

    view: Any = SimpleNamespace(
        cleaner=SimpleNamespace(leading=object, status=None),
        status=lambda: SimpleNamespace(heartbeat=SimpleNamespace(node="n1")),
    )
    search: Any = SimpleNamespace(page=page)
    finder: Any = SimpleNamespace(leader_address=lambda _: None)
    groups: Any = SimpleNamespace(cancel=cancel)
    many = CancelMany(view, finder, search, groups, cast("Any", None))
    answer = await many.cancel_many(asked(b"k"), CallContext(ANYBODY, ""))
    assert named == [[found[1].id]]
    assert [result.handle for result in answer.results] == [found[1].handle]
    assert answer.halves == 2
