"""A cancel from its scans to its answer, on a simulated node. Starts no process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import cast

import pytest

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.record_headers import HALF_GROUP
from delaywheel.storage.frames.columns import Columns
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role, ServerStatus
from delaywheel_replica.server.access.callers import A_NODE, ANYBODY, CallContext
from delaywheel_replica.server.changing.cancel_groups import CancelGroups
from delaywheel_replica.server.changing.cancels import Cancels
from delaywheel_replica.server.changing.finder import MessageFinder
from delaywheel_replica.server.changing.passed_on import PassedChanges
from delaywheel_replica.server.changing.pending import Decided
from delaywheel_replica.server.commit.writing import Writing
from delaywheel_replica.server.lookup.places import AskedPlaces
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.lookup.scan import Found
from delaywheel_replica.server.node.calls_to_nodes import WAIT_S, CallsToNodes
from delaywheel_replica.server.node.node_view import CleanerView, monotonic_ms, wall_ms
from delaywheel_replica.server.node.refusals import RequestRefusedError
from support.core.values import heartbeat, wheel_heartbeat, wheel_record_of
from support.server.views import node_view
from support.wheels.messages import Message, columns_of

OWN, OTHERS = WheelId("a", 1), WheelId("b", 1)
COPY, OWN_CANCEL, CANCEL_OF_ANOTHER = (
    Position(OWN, 1, 0),
    Position(OWN, 2, 0),
    Position(OTHERS, 1, 0),
)

CALL = CallContext(ANYBODY, "ipv4:10.0.0.7:5")


@dataclass
class Site:
    """Node a, whose cleaner leads; a message lies in its wheel, and is due in a minute.

    Attributes:
        scans: what each look at the slot finds, the last one from then on.
        words: what happens while the cleaner's next words are awaited.
        during: what happens while each look is made.
        held: how much of the other node's wheel is held here.
        others: by how many of the others must have nothing, whether that is so.
        asked: what was looked for.
    """

    scans: list[Found]
    words: list[Callable[[], None]] = field(default_factory=list)
    during: list[Callable[[], None]] = field(default_factory=list)
    held: int = 1
    others: dict[int, bool] = field(default_factory=dict)
    asked: list[Reference] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    sharers: list[object] = field(default_factory=list)
    ends_as: pb.MessageState.ValueType | None = None
    due_ms: int = field(default_factory=lambda: wall_ms() + 60_000)

    def __post_init__(self) -> None:
        self.cleaner = CleanerView(
            CleanerStatus(
                node="a",
                boot="boot",
                pid=1,
                monotonic_ms=monotonic_ms() + 60_000,  # it stays fresh
                wall_ms=0,
                role=Role.LEADING,
                progress=Progress(self.due_ms - 100, None, {OWN: 1}),
                wheels={wheel: wheel_record_of("a", "b") for wheel in (OWN, OTHERS)},
            )
        )

    def done(self, *, others: int, role: Role = Role.STANDBY) -> None:
        """Progress without the node's own cancel, by which the message is done."""
        progress = Progress(self.due_ms, None, {OWN: 1, OTHERS: others})
        assert self.cleaner.status is not None
        self.cleaner.status = replace(self.cleaner.status, progress=progress, role=role)

    def finish(self) -> None:
        """The floor passes the message's second."""
        progress = Progress(self.due_ms, None, {OWN: 1}, floor=self.due_ms // 1000 + 1)
        assert self.cleaner.status is not None
        self.cleaner.status = replace(self.cleaner.status, progress=progress)

    def status(self) -> ServerStatus:
        wheels = {OWN: wheel_heartbeat(2), OTHERS: wheel_heartbeat(self.held)}
        return ServerStatus(heartbeat("a", open_=OWN, wheels=wheels), 1, monotonic_ms())

    def unread(self, _references: list[Reference]) -> list[Reference]:
        return []

    async def find_many(self, references: list[Reference], _: object = "") -> list[Found]:
        self.asked += references
        if self.during:
            self.during.pop(0)()
        return [self.scans.pop(0) if len(self.scans) > 1 else self.scans[0] for _ in references]

    def leader_address(self) -> None:
        return None

    async def others_have_none(
        self, _message: pb.MessageRef, *, wanted: int, sharer: object
    ) -> bool:
        self.sharers.append(sharer)
        return self.others[wanted]

    async def message(self, _slot: int, _place: Position, _: object) -> Columns:
        of_half = ((HALF_GROUP, b"shop"),)
        message = Message(id=bytes(16), due_ms=self.due_ms, topic="orders", headers=of_half)
        return columns_of([message])

    async def ended(
        self, message: pb.StoredMessage, sharer: object
    ) -> pb.MessageState.ValueType | None:
        self.sharers.append(sharer)
        assert (message.id, message.due_ms, message.topic) == (bytes(16), self.due_ms, "orders")
        # A half may have its end before its due: by its headers the look begins early enough.
        assert [header.name for header in message.headers] == [HALF_GROUP]
        return self.ends_as

    async def submit(self, columns: Columns, _kind: object) -> object:
        self.written.append(len(columns))
        return SimpleNamespace(wheel=OWN, seq=2, failed={})

    async def next_change(self) -> None:
        if not self.words:
            await asyncio.Event().wait()
        self.words.pop(0)()

    async def cancel(
        self, named: pb.MessageRef | None = None
    ) -> pb.CancelOutcome.ValueType | Reason:
        """What is answered."""
        named = named or pb.MessageRef(
            id_and_due=pb.IdAndDue(id=bytes(16), due_ms=self.due_ms, topic="orders")
        )
        async with self.serving() as cancels:
            try:
                request = pb.CancelRequest(messages=[named])
                answer = await cancels.cancel(request, CALL)
                return answer.results[0].outcome
            except RequestRefusedError as error:
                return error.refusal.reason

    def finder(self) -> MessageFinder:
        view = node_view(self.status, cleaner=self.cleaner)
        return MessageFinder(
            view, cast("Queries", self), cast("CallsToNodes", self), cast("AskedPlaces", self), 0
        )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Cancels]:
        """The part of a node that cancels."""
        view, finder = node_view(self.status, cleaner=self.cleaner), self.finder()
        groups = CancelGroups(
            finder, cast("Writing", self), ask=lambda _: None, next_change=self.next_change
        )
        running = asyncio.create_task(groups.run())
        try:
            passed_on = PassedChanges(CallsToNodes(view).cancel, Reason.CANCEL_UNKNOWN)
            yield Cancels(finder, groups, passed_on)
        finally:
            running.cancel()


def found(*cancels: Position) -> Found:
    return Found(copies=[COPY], cancels=list(cancels))


@pytest.mark.parametrize("others_have_none", [False, True])
async def test_not_found_is_what_others_do_not_have_either(*, others_have_none: bool) -> None:
    """One of two wheels with two members, of which one is enough, is not closed: both must know."""
    site = Site([Found()], others={1: others_have_none})
    answer = pb.CANCEL_OUTCOME_NOT_FOUND if others_have_none else Reason.NOT_UP_TO_DATE
    assert await site.cancel() == answer
    assert site.sharers == [CALL.sharer]


async def test_what_a_node_passes_on_is_asked_about_for_those_who_named_it() -> None:
    """One of its callers had those of all others refused."""
    site = Site([Found()], others={1: True})
    named = [
        pb.MessageRef(id_and_due=pb.IdAndDue(id=id_, due_ms=site.due_ms, topic="orders"))
        for id_ in (b"a" * 16, b"b" * 16)
    ]
    request = pb.CancelRequest(messages=named, sharers=[7, 8])
    async with site.serving() as cancels:
        await cancels.cancel(request, CallContext(A_NODE, "n2's", WAIT_S))
    assert site.sharers == [("n2's", 7), ("n2's", 8)]


@pytest.mark.parametrize("is_asked_only", [False, True])
async def test_what_is_deleted_while_it_is_looked_for_is_too_late_as_well(
    *, is_asked_only: bool
) -> None:
    """That nothing was found of it does not mean that it was never accepted."""
    site = Site([Found()], others={1: True})
    site.during.append(site.finish)
    if is_asked_only:
        named = Reference(site.due_ms // 1000, bytes(16), "orders", site.due_ms)
        assert await site.finder().known([named], "one") == [Decided(CancelDecision.TOO_LATE)]
    else:
        assert await site.cancel() == pb.CANCEL_OUTCOME_TOO_LATE


async def test_what_was_delivered_is_said_to_be() -> None:
    site = Site([found(), found(OWN_CANCEL)])
    site.words.append(lambda: site.done(others=1))
    assert await site.cancel() == pb.CANCEL_OUTCOME_ALREADY_DELIVERED


async def test_once_found_by_its_handle_it_stays_that_message() -> None:
    """Another due of the same id may be in that second when the cancel is written."""
    site = Site([found(), found(OWN_CANCEL)])
    site.scans[0].dues_ms = (site.due_ms,)
    site.words.append(lambda: site.done(others=1))
    slot = site.due_ms // 1000
    handle = pb.MessageRef(handle=f"{OWN}:{slot}:{bytes(16).hex()}:orders")
    assert await site.cancel(handle) == pb.CANCEL_OUTCOME_ALREADY_DELIVERED
    pinned = Reference(slot, bytes(16), "orders", site.due_ms, OWN)
    assert site.asked == [pinned._replace(due_ms=None), pinned]


async def test_a_cancel_that_a_next_leader_took_meanwhile_is_not_passed_over() -> None:
    """It is in another wheel, and cancelled the message that is done without the own cancel."""
    site = Site([found(), found(OWN_CANCEL, CANCEL_OF_ANOTHER)])
    site.words.append(lambda: site.done(others=1))
    assert await site.cancel() == Reason.CANCEL_UNKNOWN


async def test_a_cancel_may_lie_in_what_progress_took_and_this_node_lacks() -> None:
    site = Site([found(), found(OWN_CANCEL)], held=1)
    site.words.append(lambda: site.done(others=2))
    assert await site.cancel() == Reason.CANCEL_UNKNOWN


async def test_what_is_below_the_floor_by_then_cannot_be_said_any_more() -> None:
    site = Site([found(), Found()])
    site.words.append(lambda: site.done(others=1))
    assert await site.cancel() == Reason.CANCEL_UNKNOWN


@pytest.mark.parametrize(
    ("cancels", "others", "answer"),
    [
        ([], 1, pb.CANCEL_OUTCOME_ALREADY_DELIVERED),
        ([], 2, Reason.NOT_UP_TO_DATE),
        ([CANCEL_OF_ANOTHER], 1, Reason.CANCEL_UNKNOWN),
    ],
    ids=["delivered", "a cancel may lie in what is not here", "a cancel counts"],
)
async def test_a_look_that_has_all_that_progress_took_decides_before_anything_is_written(
    cancels: list[Position], others: int, answer: pb.CancelOutcome.ValueType | Reason
) -> None:
    site = Site([found(*cancels)])
    site.done(others=others, role=Role.LEADING)
    assert await site.cancel() == answer
    assert not site.written


async def test_what_progress_takes_during_a_look_is_decided_by_the_next_one() -> None:
    """Another's cancel may have been taken with it, and this look has begun before."""
    twice = replace(found(), copies=[COPY, Position(OTHERS, 1, 0)])
    site = Site([twice, found(CANCEL_OF_ANOTHER)])
    site.during.append(lambda: site.done(others=1, role=Role.LEADING))
    assert await site.cancel() == Reason.CANCEL_UNKNOWN


async def test_what_others_acknowledge_meanwhile_does_not_count_of_what_is_done() -> None:
    """Under load they always have; each such cancel was asked about again, or in Kafka."""
    behind = [replace(each, complete=False) for each in (found(), found(OWN_CANCEL))]
    site = Site(behind)
    site.words.append(lambda: site.done(others=1))
    assert await site.cancel() == pb.CANCEL_OUTCOME_ALREADY_DELIVERED


@pytest.mark.parametrize(
    ("ends_as", "marked", "answer"),
    [
        (pb.MESSAGE_STATE_CANCELLED, None, pb.CANCEL_OUTCOME_CANCELLED),
        (pb.MESSAGE_STATE_CANCELLED, 17, pb.CANCEL_OUTCOME_RESCHEDULED),
        (pb.MESSAGE_STATE_DELIVERED, None, pb.CANCEL_OUTCOME_ALREADY_DELIVERED),
        (pb.MESSAGE_STATE_ASKED, None, pb.CANCEL_OUTCOME_ALREADY_DELIVERED),
        (None, None, Reason.CANCEL_UNKNOWN),
    ],
    ids=["cancelled", "moved", "delivered", "asked about", "nothing is found"],
)
async def test_what_progress_does_not_show_is_looked_for_in_kafka(
    ends_as: pb.MessageState.ValueType | None,
    marked: int | None,
    answer: pb.CancelOutcome.ValueType | Reason,
) -> None:
    """A cancel lies there, and counts, of a message that is done: who asks again is told."""
    last = found(CANCEL_OF_ANOTHER)
    last.rescheduled_to = marked
    site = Site([found(CANCEL_OF_ANOTHER), last], ends_as=ends_as)
    site.done(others=1, role=Role.LEADING)
    assert await site.cancel() == answer


async def test_a_message_that_is_looked_at_again_shows_new_cancels_until_it_is_deleted() -> None:
    site = Site([found(), found(OWN_CANCEL), Found()])
    finder = site.finder()
    subject = await finder.find(Reference(site.due_ms // 1000, bytes(16), "orders", site.due_ms))
    assert subject.found.cancels == []
    for _ in range(2):
        await finder.look_again(subject)
        assert subject.found == found(OWN_CANCEL)


async def test_a_node_that_passes_cancels_on_does_not_wait_for_the_first_decision() -> None:
    """It makes four calls at once: for ten seconds nothing else was passed on behind them."""
    site = Site([found()])
    named = pb.MessageRef(id_and_due=pb.IdAndDue(id=bytes(16), due_ms=site.due_ms, topic="orders"))
    request = pb.CancelRequest(messages=[named], partly=True)
    async with site.serving() as cancels, asyncio.timeout(WAIT_S / 2):
        (undecided,) = (await cancels.cancel(request, CallContext(A_NODE, "", WAIT_S))).results
    assert (undecided, site.written) == (pb.MessageCancelled(), [1])
