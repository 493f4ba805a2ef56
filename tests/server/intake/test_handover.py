"""Ingress records on their way from the cleaner to the server, over real sockets."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast
from unittest.mock import AsyncMock

import pytest

from delaywheel.headers import encode_headers
from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.record_headers import HALF_GROUP
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.ingress.reading import ABSENT, Delayed, HalfCommit, Withdrawn
from delaywheel_replica.core.ingress.term import Handed
from delaywheel_replica.core.ingress.underway import RecordAnswer, RecordUnderWay
from delaywheel_replica.handover.answers import ANSWER_HEAD, encode_answers
from delaywheel_replica.handover.batches import (
    BATCH_BYTES,
    FORMAT,
    HEAD,
    LONGEST_BYTES,
    UNANSWERED_BYTES,
    encode,
)
from delaywheel_replica.handover.sending import Handover
from delaywheel_replica.link import HandoverBegins, Link, Wake
from delaywheel_replica.server.access.callers import CallOrigin
from delaywheel_replica.server.commit.committer import Committed
from delaywheel_replica.server.commit.own_halves import CommitWriting
from delaywheel_replica.server.commit.writing import Writing
from delaywheel_replica.server.intake import handover as handover_module
from delaywheel_replica.server.intake.admission import Admission
from delaywheel_replica.server.intake.handover import HandoverServer
from delaywheel_replica.server.intake.known_topics import KnownTopics
from delaywheel_replica.server.intake.producing import IntakeStages
from delaywheel_replica.server.intake.validate import IntakeRules
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.node_view import wall_ms
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError
from support.services.waiting import until

WHEEL = WheelId("n1", 1)
AT = ("ingress", 0)


@dataclass
class Asked:
    """The writes that were requested, to be answered by the test."""

    columns: Columns
    kind: Kind
    answer: asyncio.Future[Committed]

    def held(self, failed: dict[int, Refusal] | None = None) -> None:
        self.answer.set_result(Committed(WHEEL, 1, failed or {}))

    def refused(self, reason: Reason) -> None:
        self.answer.set_exception(RequestRefusedError(reason))


class Ends:
    """A cleaner's link, and the server at its other end.

    Attributes:
        asked: of the writing.
        refusal: why the node takes no messages.
    """

    def __init__(self, folder: Path, *, max_caller_bytes: int = 64 << 20) -> None:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.cleaners, self.servers = Link(one.detach()), Link(other.detach())
        self.asked: list[Asked] = []
        self.refusal: Refusal | None = None
        self.counts = NodeCounts()
        self.admission = Admission(max_bytes=64 << 20, max_caller_bytes=max_caller_bytes)
        rules = IntakeRules(7_200, 60, 500, 1_000_000, 10_000, 16 << 20, {}, frozenset())
        stages = IntakeStages(
            refusal=lambda: self.refusal,
            rules=rules,
            admission=self.admission,
            topics=KnownTopics(
                PosixDisk(), folder / "topics", ask=lambda _: False, refuses_absent=True
            ),
            writing=cast("Writing", self),
            counts=self.counts,
            check_ids=AsyncMock(),
        )
        commits = CommitWriting(stages.halves, stages.writing, lambda: WHEEL)
        self.server = HandoverServer(stages, commits)
        self.made: list[Handover] = []

    def submit(
        self,
        columns: Columns,
        kind: Kind,
        wheel: WheelId | None = None,
        released_bytes: int = 0,
    ) -> asyncio.Future[Committed]:
        assert (wheel, released_bytes > 0) == (
            (WHEEL, True) if kind is Kind.RELEASES else (None, False)
        )
        answer = asyncio.get_running_loop().create_future()
        self.asked.append(Asked(columns, kind, answer))
        return answer

    def is_asked(self, while_looking: Answered) -> bool:
        """Whether a write waits for its answer."""
        while_looking.look()
        return any(not each.answer.done() for each in self.asked)

    def begin(self) -> Handover:
        """A term begins."""
        made = Handover.begun(self.cleaners.send)
        assert made is not None
        self.made.append(made)
        self.hear()
        return made

    def hear(self) -> None:
        """The server reads the link."""
        for message in self.servers.receive():
            if isinstance(message, HandoverBegins):
                self.server.begin(message)

    async def close(self) -> None:
        self.server.close()
        for made in self.made:
            made.close()
        self.cleaners.close()
        self.servers.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)


@pytest.fixture
async def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ends]:
    monkeypatch.setattr(handover_module, "_REFUSED_S", 0.001)
    made = Ends(tmp_path)
    yield made
    await made.close()


def delayed(number: int, size: int = 10) -> Handed:
    """A record that becomes a message."""
    request = Delayed(
        number.to_bytes(16, "big"), 9_000, "orders", ABSENT, ABSENT, None, bytes(size), b""
    )
    return Handed(AT, RecordUnderWay(number, request, None))


def withdrawn(number: int) -> Handed:
    """A record that becomes a cancel."""
    return Handed(
        AT, RecordUnderWay(number, Withdrawn(number.to_bytes(16, "big"), 9_000, "orders"), None)
    )


def half(number: int, due_ms: int) -> Handed:
    """A record that becomes a half message."""
    headers = encode_headers([(HALF_GROUP, b"shop")])
    request = Delayed(
        number.to_bytes(16, "big"), due_ms, "orders", ABSENT, ABSENT, None, b"v", headers
    )
    return Handed(AT, RecordUnderWay(number, request, None))


def commit(number: int, of: int, due_ms: int) -> Handed:
    """A record that commits one."""
    request = HalfCommit(of.to_bytes(16, "big"), due_ms, "orders")
    return Handed(AT, RecordUnderWay(number, request, None))


@dataclass
class Answered:
    """The answers of a hand-over, by offset."""

    handover: Handover
    found: dict[int, RecordAnswer] = field(default_factory=dict)

    def look(self) -> dict[int, RecordAnswer]:
        for handed, answer in self.handover.answers():
            assert handed.taken.offset not in self.found, "each is answered once"
            self.found[handed.taken.offset] = answer
        return self.found

    async def all_of(self, *offsets: int) -> dict[int, RecordAnswer]:
        await until(lambda: set(offsets) <= set(self.look()))
        return self.found


async def test_a_commit_lets_go_the_half_that_was_handed_over_with_it(ends: Ends) -> None:
    due_ms = wall_ms() + 60_000
    handover = ends.begin()
    answered = Answered(handover)
    handover.hand([delayed(1), half(2, due_ms), half(3, due_ms), commit(4, 2, due_ms)])
    handover.hand([commit(5, 3, due_ms), commit(6, 9, due_ms)])
    await until(lambda: len(ends.asked) == 1)
    await asyncio.sleep(0)
    assert len(ends.asked) == 1, "commits wait for the halves before them"
    ends.asked[0].held({2: Refusal(Reason.SLOT_FULL)})
    await until(lambda: len(ends.asked) == 3)
    (_, first, second) = ends.asked
    assert [each.kind for each in ends.asked] == [Kind.MESSAGES, Kind.RELEASES, Kind.COMMITS]
    assert [*first.columns.ids[:, -1]] == [2]
    assert [*second.columns.ids[:, -1]] == [3, 9], "one that is refused, one of another node"
    first.held()
    second.refused(Reason.NO_WHEEL)
    found = await answered.all_of(1, 2, 3, 4, 5, 6)
    assert [found[number] for number in range(1, 7)] == [
        *(RecordAnswer.HELD, RecordAnswer.HELD, RecordAnswer.FULL, RecordAnswer.HELD),
        *(RecordAnswer.NOT_NOW, RecordAnswer.NOT_NOW),
    ]
    handover.hand([commit(7, 2, due_ms)])
    await until(lambda: len(ends.asked) == 4)
    assert ends.asked[3].kind is Kind.COMMITS, "it was released before"


@pytest.mark.parametrize(("reason", "writes"), [(Reason.NO_WHEEL, 2), (Reason.WHEEL_LOST, 3)])
async def test_a_commit_that_was_surely_not_written_lets_no_half_go_that_comes_later(
    ends: Ends, reason: Reason, writes: int
) -> None:
    """Its caller was told that nothing was committed, and may roll the half back."""
    due_ms = wall_ms() + 60_000
    handover = ends.begin()
    answered = Answered(handover)
    handover.hand([commit(1, 2, due_ms)])
    await until(lambda: len(ends.asked) == 1)
    ends.asked[0].refused(reason)
    await answered.all_of(1)
    handover.hand([half(2, due_ms)])
    await until(lambda: len(ends.asked) == 2)
    ends.asked[1].held()
    if writes > 2:
        await until(lambda: len(ends.asked) == writes)
        ends.asked[2].held()
    await answered.all_of(1, 2)
    assert len(ends.asked) == writes


@pytest.mark.parametrize(
    ("reason", "kind"), [(Reason.NO_WHEEL, Kind.RELEASES), (Reason.WHEEL_LOST, Kind.COMMITS)]
)
async def test_a_release_is_written_again_if_surely_none_was(
    ends: Ends, reason: Reason, kind: Kind
) -> None:
    due_ms = wall_ms() + 60_000
    handover = ends.begin()
    handover.hand([half(1, due_ms)])
    await until(lambda: ends.asked)
    ends.asked[0].held()
    handover.hand([commit(2, 1, due_ms)])
    await until(lambda: len(ends.asked) == 2)
    ends.asked[1].refused(reason)
    await Answered(handover).all_of(1, 2)
    handover.hand([commit(3, 1, due_ms)])
    await until(lambda: len(ends.asked) == 3)
    assert ends.asked[2].kind is kind


async def test_each_record_is_answered_once_it_is_held(ends: Ends) -> None:
    handover = ends.begin()
    answered = Answered(handover)
    handover.hand([delayed(1), delayed(2)])
    await until(lambda: ends.asked)
    (asked,) = ends.asked
    assert [bytes(each) for each in asked.columns.ids] == [n.to_bytes(16, "big") for n in (1, 2)]
    assert asked.kind is Kind.MESSAGES
    assert not answered.look()
    assert ends.admission.in_flight_bytes > 0
    asked.held()
    assert await answered.all_of(1, 2) == {1: RecordAnswer.HELD, 2: RecordAnswer.HELD}
    assert ends.admission.in_flight_bytes == 0
    assert ends.counts.handed[RecordAnswer.HELD] == 2
    assert handover.room_bytes == UNANSWERED_BYTES


async def test_the_descriptor_shows_when_there_are_answers(ends: Ends) -> None:
    handover = ends.begin()
    handover.hand([delayed(1)])
    await until(lambda: ends.asked)
    poll = select.poll()
    poll.register(handover.fileno(), select.POLLIN)
    assert not poll.poll(0)
    ends.asked[0].held()
    await until(lambda: poll.poll(0))
    assert handover.answers()
    assert not poll.poll(0)


async def test_messages_and_cancels_go_apart(ends: Ends) -> None:
    handover = ends.begin()
    handover.hand([delayed(1), withdrawn(2), delayed(3), withdrawn(4)])
    await until(lambda: len(ends.asked) == 2)
    assert [(each.kind, len(each.columns)) for each in ends.asked] == [
        (Kind.MESSAGES, 2),
        (Kind.CANCELS, 2),
    ]
    for asked in ends.asked:
        asked.held()
    assert set((await Answered(handover).all_of(1, 2, 3, 4)).values()) == {RecordAnswer.HELD}


@pytest.mark.parametrize(
    ("reason", "answer", "whole"),
    [
        (Reason.DUE_TOO_OLD, RecordAnswer.SEALED, [False]),
        (Reason.SLOT_FULL, RecordAnswer.FULL, [False]),
        (Reason.WHEEL_LOST, RecordAnswer.UNKNOWN, [False, True]),
        (Reason.INTERNAL, RecordAnswer.UNKNOWN, [False, True]),
        (Reason.DISK_STALLED, RecordAnswer.NOT_NOW, [True]),
        (Reason.NOT_ENOUGH_REPLICAS, RecordAnswer.NOT_NOW, [True]),
        (Reason.NO_WHEEL, RecordAnswer.NOT_NOW, [True]),
    ],
)
async def test_a_record_or_its_whole_batch_that_is_refused(
    ends: Ends, reason: Reason, answer: RecordAnswer, whole: list[bool]
) -> None:
    handover = ends.begin()
    for number, is_whole in enumerate(whole):
        handover.hand([delayed(1), delayed(2)])
        await until(lambda: len(ends.asked) > number)  # noqa: B023
        if is_whole:
            ends.asked[number].refused(reason)
        else:
            ends.asked[number].held({1: Refusal(reason)})
        first = answer if is_whole else RecordAnswer.HELD
        assert await Answered(handover).all_of(1, 2) == {1: first, 2: answer}


async def test_nothing_is_written_while_the_node_takes_nothing_but_cancels(ends: Ends) -> None:
    ends.refusal = Refusal(Reason.DISK_FULL)
    handover = ends.begin()
    handover.hand([delayed(1), withdrawn(2)])
    await until(lambda: ends.asked)
    ends.asked[0].held()
    assert await Answered(handover).all_of(1, 2) == {1: RecordAnswer.NOT_NOW, 2: RecordAnswer.HELD}
    assert [each.kind for each in ends.asked] == [Kind.CANCELS]


async def test_what_is_in_flight_already_is_refused_and_comes_again(ends: Ends) -> None:
    ticket = ends.admission.admit(CallOrigin("a caller"), 64 << 20)
    handover = ends.begin()
    handover.hand([delayed(1)])
    assert await Answered(handover).all_of(1) == {1: RecordAnswer.NOT_NOW}
    assert not ends.asked
    with ticket:
        pass


async def test_a_defect_may_have_written_it(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(ends, "submit", fail)
    handover = ends.begin()
    handover.hand([delayed(1)])
    assert await Answered(handover).all_of(1) == {1: RecordAnswer.UNKNOWN}
    assert not handover.is_broken


async def test_batches_are_answered_in_any_order(ends: Ends) -> None:
    handover = ends.begin()
    answered = Answered(handover)
    handover.hand([delayed(1)])
    handover.hand([delayed(2)])
    await until(lambda: len(ends.asked) == 2)
    ends.asked[1].held()
    assert await answered.all_of(2) == {2: RecordAnswer.HELD}
    ends.asked[0].refused(Reason.NO_WHEEL)
    assert (await answered.all_of(1))[1] is RecordAnswer.NOT_NOW


async def test_much_goes_in_batches_and_one_record_of_any_length(ends: Ends) -> None:
    handover = ends.begin()
    records = [delayed(number, 300_000) for number in range(9)]
    handover.hand(records)
    assert 0 < handover.room_bytes < UNANSWERED_BYTES - 9 * 300_000
    handover.hand([delayed(9, 6 << 20)])
    assert handover.room_bytes == 0

    async def hold() -> None:
        while True:
            await until(lambda: any(not each.answer.done() for each in ends.asked))
            for each in ends.asked:
                if not each.answer.done():
                    each.held()

    holding = asyncio.create_task(hold())
    assert set((await Answered(handover).all_of(*range(10))).values()) == {RecordAnswer.HELD}
    holding.cancel()
    assert handover.room_bytes == UNANSWERED_BYTES
    lengths = [len(each.columns.blob) for each in ends.asked]
    assert all(length <= BATCH_BYTES for length in lengths[:-1])
    assert lengths[-1] == 6 << 20


async def test_no_more_is_read_than_may_be_in_flight(tmp_path: Path) -> None:
    ends = Ends(tmp_path, max_caller_bytes=2 << 20)
    handover = ends.begin()
    handover.hand([delayed(number, 1 << 20) for number in range(4)])
    answered = Answered(handover)
    for turn in range(1, 5):
        await until(partial(ends.is_asked, answered))
        assert len(ends.asked) == turn
        assert ends.admission.in_flight_bytes < 2 << 20
        ends.asked[-1].held()
    await answered.all_of(*range(4))
    await ends.close()


async def test_the_server_lets_go_and_nobody_knows(ends: Ends) -> None:
    handover = ends.begin()
    answered = Answered(handover)
    handover.hand([delayed(1), withdrawn(2)])
    await until(lambda: len(ends.asked) == 2)
    ends.asked[0].held()
    await answered.all_of(1)
    ends.server.close()
    assert (await answered.all_of(2))[2] is RecordAnswer.UNKNOWN
    assert handover.is_broken
    assert handover.room_bytes == 0
    handover.hand([delayed(3)])
    assert answered.look()[3] is RecordAnswer.NOT_NOW


async def test_a_server_that_restarts_never_read_it(ends: Ends) -> None:
    """The link is the supervisor's: what waits in it is read by the next server."""
    handover = Handover.begun(ends.cleaners.send)
    assert handover is not None
    ends.made.append(handover)
    handover.hand([delayed(1)])
    assert not handover.answers()
    handover.close()  # its cleaner is killed with the server
    ends.made.clear()
    ends.hear()
    await until(lambda: ends.asked)
    newer = ends.begin()
    newer.hand([delayed(1)])
    await until(lambda: len(ends.asked) == 2)
    ends.asked[1].held()
    assert await Answered(newer).all_of(1) == {1: RecordAnswer.HELD}


async def test_a_new_term_takes_the_place_of_the_one_before(ends: Ends) -> None:
    before = ends.begin()
    before.hand([delayed(1)])
    await until(lambda: ends.asked)
    newer = ends.begin()
    newer.hand([delayed(1)])
    await until(lambda: len(ends.asked) == 2)
    assert await Answered(before).all_of(1) == {1: RecordAnswer.UNKNOWN}
    for asked in ends.asked:
        asked.held()
    assert await Answered(newer).all_of(1) == {1: RecordAnswer.HELD}


async def test_the_end_of_a_term_leaves_what_was_written_written(ends: Ends) -> None:
    handover = ends.begin()
    handover.hand([delayed(1)])
    await until(lambda: ends.asked)
    handover.close()
    ends.made.clear()
    ours = asyncio.current_task()
    await until(lambda: asyncio.all_tasks() == {ours})
    assert not ends.asked[0].answer.cancelled()
    assert ends.admission.in_flight_bytes > 0, "until it is written"
    ends.asked[0].held()
    await until(lambda: ends.admission.in_flight_bytes == 0)


def raw(ends: Ends) -> socket.socket:
    """A hand-over whose bytes the test writes itself."""
    ours, theirs = socket.socketpair()
    with theirs:
        assert ends.cleaners.send(HandoverBegins(FORMAT, theirs.fileno()))
    ends.hear()
    ours.settimeout(0)
    return ours


async def test_a_batch_that_comes_byte_by_byte(ends: Ends) -> None:
    request = delayed(1).taken.request
    assert isinstance(request, Delayed)
    with raw(ends) as ours:
        for byte in b"".join(encode(7, [request])):
            assert not ends.asked
            ours.send(bytes((byte,)))
            await asyncio.sleep(0)
        await until(lambda: ends.asked)
        ends.asked[0].held()
        answer = await asyncio.get_running_loop().sock_recv(ours, 64)
        assert answer == encode_answers(7, [RecordAnswer.HELD])


async def test_half_a_batch_is_none(ends: Ends) -> None:
    request = delayed(1).taken.request
    assert isinstance(request, Delayed)
    ours = raw(ends)
    ours.send(b"".join(encode(7, [request]))[:-1])
    ours.close()
    task = asyncio.current_task()
    await until(lambda: asyncio.all_tasks() == {task})
    assert not ends.asked


@pytest.mark.parametrize(
    "content",
    [
        HEAD.pack(LONGEST_BYTES + 1, 1, 1, 1),
        HEAD.pack(24, 1, 9, 1),
        HEAD.pack(24, 1, 1, 1) + bytes(24),
    ],
)
async def test_what_is_no_batch_ends_it(ends: Ends, content: bytes) -> None:
    with raw(ends) as ours:
        ours.send(content)
        assert await asyncio.get_running_loop().sock_recv(ours, 64) == b""
    assert not ends.asked


async def test_what_is_no_answer_ends_it(ends: Ends) -> None:
    ours, theirs = socket.socketpair()
    handover = Handover(ours)
    ends.made.append(handover)
    with theirs:
        handover.hand([delayed(1)])
        theirs.send(ANSWER_HEAD.pack(1, 7))
        ((_, answer),) = handover.answers()
        assert answer is RecordAnswer.UNKNOWN
        assert handover.is_broken


async def test_another_release_takes_nothing(ends: Ends) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        assert ends.cleaners.send(HandoverBegins(FORMAT + 1, theirs.fileno()))
    ends.hear()
    ours.settimeout(0)
    with ours:
        assert await asyncio.get_running_loop().sock_recv(ours, 64) == b""


def test_a_full_link_begins_nothing() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = Link(one.detach())
    while link.send(Wake()):
        pass
    assert Handover.begun(link.send) is None
    link.close()
    other.close()
