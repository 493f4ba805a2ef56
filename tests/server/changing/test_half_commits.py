"""What a call that commits many halves writes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.patterns import Pattern
from delaywheel_replica.rights import EVERYTHING, Granted, Right, Rights
from delaywheel_replica.server.access.callers import CallContext, Caller
from delaywheel_replica.server.changing import half_commits
from delaywheel_replica.server.changing.half_commits import HalfCommits
from delaywheel_replica.server.changing.pending import DecisionBasis
from delaywheel_replica.server.commit.committer import GROUP_BYTES, Committed
from delaywheel_replica.server.commit.own_halves import CommitWriting, OwnHalves
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.lookup.scan import Found
from delaywheel_replica.server.node.node_view import wall_ms
from delaywheel_replica.server.node.refusals import RequestRefusedError
from support.core.values import heartbeat, wheel_heartbeat, wheel_record_of
from support.server.well import cleaner_status

WHEEL, LEADERS = WheelId("n1", 1), WheelId("n2", 1)
NODE = CallContext(Caller("n2", "node", lambda: EVERYTHING), "n2")


class Wrote:
    """Takes what is written: kind, rows, and how much they release."""

    def __init__(self) -> None:
        self.requests: list[tuple[Kind, int, int]] = []

    def submit(
        self, columns: Columns, kind: Kind, wheel: WheelId | None, released_bytes: int
    ) -> asyncio.Future[Committed]:
        assert wheel == (WHEEL if kind is Kind.RELEASES else None)
        self.requests.append((kind, len(columns), released_bytes))
        answer: asyncio.Future[Committed] = asyncio.get_running_loop().create_future()
        answer.set_result(Committed(WHEEL, 1, {}))
        return answer


def commits_of(
    wrote: Wrote,
    *,
    own: OwnHalves | None = None,
    queries: Any = None,
    other_nodes: Any = None,
    near_cancels: Any = (),
    basis_of_look: Any = None,
) -> HalfCommits:
    """The commits of node n1."""
    return HalfCommits(
        "n1",
        queries,
        other_nodes,
        CommitWriting(own or OwnHalves(), cast("Any", wrote), lambda: WHEEL),
        lambda: None,
        near_cancels=near_cancels,
        basis_of_look=basis_of_look,
        clock_skew_ms=1_000,
    )


async def test_what_is_released_together_fits_into_a_group() -> None:
    """A leader takes the halves that a frame releases in one transaction."""
    third = GROUP_BYTES // 3
    due_ms = wall_ms() + 3_000
    lengths_bytes = {MessageKey(bytes([n]) * 16, due_ms, "orders"): third for n in range(4)}
    own, wrote = OwnHalves(), Wrote()
    own.accepted(WHEEL, lengths_bytes, wall_ms())
    commits = commits_of(wrote, own=own)
    others = [MessageKey(bytes([9]) * 16, due_ms, "orders")]
    for first in (True, False):
        halves = [
            pb.HalfRef(id=each.id, due_ms=each.due_ms, topic=each.topic)
            for each in [*lengths_bytes, *others]
        ]
        answer = await commits.commit(pb.CommitRequest(halves=halves), NODE)
        assert {result.outcome for result in answer.results} == {pb.COMMIT_OUTCOME_COMMITTED}
        releases = [(Kind.RELEASES, 3, 3 * third), (Kind.RELEASES, 1, third)]
        expected = [(Kind.COMMITS, 1, 0), *releases] if first else [(Kind.COMMITS, 5, 0)]
        assert wrote.requests == expected
        wrote.requests.clear()


async def test_no_half_waits_for_the_node_of_another_one() -> None:
    """It answers after a second, or not at all: a tenth of what a half is held for."""
    asked, goes_on, wrote = asyncio.Event(), asyncio.Event(), Wrote()

    class CallsToNodes:
        async def commit(self, node: str, request: pb.CommitRequest) -> None:
            assert (node, len(request.halves)) == ("n2", 1)
            asked.set()
            await goes_on.wait()

    commits = commits_of(wrote, other_nodes=CallsToNodes())
    due_ms = wall_ms() + 3_000
    halves = [
        pb.HalfRef(id=b"i" * 16, topic="orders", due_ms=due_ms, wheel="n2.7"),
        pb.HalfRef(id=b"j" * 16, topic="orders", due_ms=due_ms, wheel="n1.1"),
        pb.HalfRef(id=b"k" * 16, topic="orders", due_ms=due_ms),
        pb.HalfRef(id=b"k" * 16, topic="orders", due_ms=due_ms + 60_000),
    ]
    caller = CallContext(Caller("shop", "token", lambda: EVERYTHING), "")
    committing = asyncio.create_task(commits.commit(pb.CommitRequest(halves=halves), caller))
    await asked.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert wrote.requests == [(Kind.COMMITS, 2, 0)]
    goes_on.set()
    results = (await committing).results
    assert [each.outcome for each in results[:3]] == [pb.COMMIT_OUTCOME_COMMITTED] * 3
    assert results[3].error.reason == "HALF_INVALID", "no half is due so late"
    assert wrote.requests[1:] == [(Kind.COMMITS, 1, 0)]


async def test_a_commit_needs_the_right_to_send_to_the_topic_that_it_names() -> None:
    rights = Rights([Granted(frozenset({Right.PRODUCE}), (Pattern("orders"),))])
    due_ms = wall_ms() + 3_000
    halves = [
        pb.HalfRef(id=bytes(16), due_ms=due_ms, topic=topic) for topic in ("orders", "bills", "?")
    ]
    caller = CallContext(Caller("shop", "token", lambda: rights), "")
    answer = await commits_of(Wrote()).commit(pb.CommitRequest(halves=halves), caller)
    told = [result.error.reason for result in answer.results]
    assert told == ["", "FORBIDDEN", "TOPIC_INVALID"]


TAKEN, NOT_YET = Position(LEADERS, 1, 0), Position(LEADERS, 2, 0)


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_half_is_released_by_the_next_commit_if_none_was_written(*, leaves: bool) -> None:
    """Whether or not the caller of the first one still waits: it may have closed its connection."""
    due_ms, own = wall_ms() + 3_000, OwnHalves()
    own.accepted(WHEEL, {MessageKey(b"i" * 16, due_ms, "orders"): 10}, wall_ms())
    answers: asyncio.Queue[asyncio.Future[Committed]] = asyncio.Queue()

    class Writes:
        def submit(self, _: Columns, kind: Kind, *__: object) -> asyncio.Future[Committed]:
            kinds.append(kind)
            answer: asyncio.Future[Committed] = asyncio.get_running_loop().create_future()
            answers.put_nowait(answer)
            return answer

    kinds: list[Kind] = []
    commits = commits_of(cast("Any", Writes()), own=own)
    request = pb.CommitRequest(halves=[pb.HalfRef(id=b"i" * 16, topic="orders", due_ms=due_ms)])
    first = asyncio.create_task(commits.commit(request, NODE))
    answer = await answers.get()
    if leaves:
        first.cancel()
    answer.set_exception(RequestRefusedError(Reason.DRAINING))
    await asyncio.wait([first])
    again = asyncio.create_task(commits.commit(request, NODE))
    (await answers.get()).set_result(Committed(WHEEL, 1, {}))
    assert (await again).results[0].outcome == pb.COMMIT_OUTCOME_COMMITTED
    assert kinds == [Kind.RELEASES] * 2


class Looks:
    """What is found of halves, one look after another."""

    def __init__(self, *cancels: list[Position], held: int = 1) -> None:
        self._left = list(cancels)
        self._held = held

    async def find_many(self, named: list[Reference], sharer: object) -> list[Found]:
        assert sharer == NODE.sharer
        cancels = self._left.pop(0)
        assert len(named) == 1, "no other half is looked for"
        return [Found((named[0].due_ms or 0,), [Position(WHEEL, 1, 0)], cancels)]

    def basis(self) -> DecisionBasis:
        record, held = wheel_record_of("n1", "n2"), wheel_heartbeat(self._held)
        progress = Progress(0, None, {WHEEL: 1, LEADERS: 1})
        status = cleaner_status(progress=progress, wheels={WHEEL: record, LEADERS: record})
        own = heartbeat("n1", wheels={WHEEL: held, LEADERS: held})
        return DecisionBasis(wall_ms(), status, None, leading=False, clock_skew_ms=0).of_look(own)


@pytest.mark.parametrize(
    ("looks", "outcome"),
    [
        (Looks([TAKEN]), pb.COMMIT_OUTCOME_ROLLED_BACK),
        (Looks([NOT_YET], [TAKEN]), pb.COMMIT_OUTCOME_ROLLED_BACK),
        (Looks([NOT_YET], [NOT_YET]), pb.COMMIT_OUTCOME_COMMITTED),
        (Looks([TAKEN], held=0), pb.COMMIT_OUTCOME_COMMITTED),
        (Looks([]), pb.COMMIT_OUTCOME_COMMITTED),
    ],
    ids=["counts", "counts soon", "is undecided for long", "is not known to count", "is another's"],
)
async def test_a_commit_behind_a_cancel_says_so(
    looks: Looks, outcome: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not written. Of a half whose second has none, nothing is looked for."""
    monkeypatch.setattr(half_commits, "AGAIN_S", 0)
    undecided_s = 0 if outcome == pb.COMMIT_OUTCOME_COMMITTED else 60
    monkeypatch.setattr(half_commits, "CANCEL_WAIT_S", undecided_s)
    wrote, due_ms = Wrote(), wall_ms() + 3_000
    commits = commits_of(wrote, queries=looks, near_cancels=[due_ms], basis_of_look=looks.basis)
    halves = [
        pb.HalfRef(id=b"c" * 16, topic="orders", due_ms=due_ms),
        pb.HalfRef(id=b"d" * 16, topic="orders", due_ms=due_ms + 1_000),
    ]
    answer = await commits.commit(pb.CommitRequest(halves=halves), NODE)
    told = [result.outcome for result in answer.results]
    assert told == [outcome, pb.COMMIT_OUTCOME_COMMITTED]
    assert len(wrote.requests) == told.count(pb.COMMIT_OUTCOME_COMMITTED)
