"""Cancels in groups: how much is looked up and written for whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from types import SimpleNamespace
from typing import Any, cast

import pytest

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.record_headers import LONGEST_HOLD_MS
from delaywheel.storage.frames.columns import Columns
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.core.leader.halves import KNOWN_SINCE
from delaywheel_replica.core.protocol.progress import Done, Position, Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey, Reschedule
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role
from delaywheel_replica.server.access.callers import A_NODE, CallContext
from delaywheel_replica.server.changing import cancel_groups
from delaywheel_replica.server.changing.awaited import (
    SWEPT_AT_LEAST,
    AwaitedCall,
    Waiters,
    within_s_of,
)
from delaywheel_replica.server.changing.cancel_groups import CancelGroups
from delaywheel_replica.server.changing.cancels import Cancels
from delaywheel_replica.server.changing.pending import (
    Answered,
    Decided,
    DecisionBasis,
    PendingCancel,
    Subject,
    WaitingCancels,
)
from delaywheel_replica.server.commit.writing import Writing
from delaywheel_replica.server.lookup.places import ASKED_AT_MOST
from delaywheel_replica.server.lookup.queries import UNREAD_AT_ONCE
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.lookup.scan import Found
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.refusals import Refusal

OWN = WheelId("a", 1)
COPY = Position(OWN, 1, 0)
DUE_MS = 4_000_000_000_000


def named(number: int, due_ms: int = DUE_MS) -> Reference:
    return Reference(due_ms // 1000, number.to_bytes(16, "big"), "orders", due_ms)


@dataclass
class Site:
    """The leader's node, with a message for each reference, due far ahead.

    Attributes:
        looked_up: how many messages each look was for.
        decided: the same of looks that decide.
        written: the same of groups written.
        goes_on: looks wait for it.
        doubtful: the ids of which the first look could not read everything.
        absent: the ids of which nothing is found.
        asked_about: what the other nodes were asked for.
        others_answer: the other nodes find nothing, and say so then.
        is_current: looks find all that the progress accounts for.
        put_off: how often a look was not made, because it would not.
        refused: the rows of each group that are refused.
        unread_ids: those in seconds that the index lacks.
        read: how many were read ahead together, and for whom.
        is_read: reading ahead waits for it.
        cancels: of each message, that lie there.
        records: of other dues.
    """

    looked_up: list[int] = field(default_factory=list)
    decided: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    doubtful: set[bytes] = field(default_factory=set)
    absent: set[bytes] = field(default_factory=set)
    asked_about: list[Reference] = field(default_factory=list)
    others_answer: asyncio.Event = field(default_factory=asyncio.Event)
    is_current: bool = True
    put_off: int = 0
    refused: dict[int, Refusal] = field(default_factory=dict)
    progress: Progress = field(default_factory=lambda: Progress(0, None, {OWN: 1}))
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    counts: NodeCounts = field(default_factory=NodeCounts)
    unread_ids: set[bytes] = field(default_factory=set)
    read: list[tuple[int, object]] = field(default_factory=list)
    is_read: asyncio.Event = field(default_factory=asyncio.Event)
    cancels: list[Position] = field(default_factory=list)
    records: dict[MessageKey, Reschedule] = field(default_factory=dict)

    def basis(self) -> DecisionBasis:
        status = CleanerStatus(
            "a",
            "boot",
            1,
            0,
            0,
            Role.LEADING,
            epoch=1,
            progress=self.progress,
            reschedules=dict(self.records),
        )
        return DecisionBasis(0, status, None, leading=True, clock_skew_ms=0)

    def basis_of_look(self) -> DecisionBasis:
        self.put_off += not self.is_current
        return self.basis()._replace(current=self.is_current)

    def leader_address(self, _caller: object) -> None:
        return None

    def unread(self, references: Iterable[Reference]) -> list[Reference]:
        return [each for each in references if each.id in self.unread_ids]

    async def read_ahead(self, references: Sequence[Reference], sharer: object) -> None:
        self.read.append((len(references), sharer))
        await self.is_read.wait()
        self.unread_ids -= {each.id for each in references}

    async def find_many(self, references: list[Reference]) -> list[Subject]:
        self.looked_up.append(len(references))
        await self.goes_on.wait()
        return [
            Subject(
                each._replace(wheel=None),
                each,
                Found((DUE_MS,), [COPY], [*self.cancels], readable=each.id not in self.doubtful)
                if each.id not in self.absent
                else Found(),
            )
            for each in references
        ]

    async def nobody_has(self, named: Reference, _sharer: object) -> bool:
        self.asked_about.append(named)
        await self.others_answer.wait()
        return True

    async def look_in_kafka(self, subject: Subject, _sharer: object) -> Decided:
        self.asked_about.append(subject.named)
        await self.others_answer.wait()
        return Decided(CancelDecision.ALREADY_DELIVERED)

    async def decide_many(self, subjects: list[Subject]) -> list[Decided]:
        self.decided.append(len(subjects))
        basis = self.basis()._replace(current=self.is_current)
        for each in subjects:
            each.found.readable = True
        return [basis.after_writing(each.key, each.found) for each in subjects]

    async def submit(self, columns: Columns, _kind: object) -> object:
        self.written.append(len(columns))
        seq = 1 + sum(self.written)
        return SimpleNamespace(wheel=OWN, seq=seq, failed=self.refused)

    async def next_change(self) -> None:
        await self.changed.wait()
        self.changed.clear()

    def reach(self, seq: int, due_ms: int = 0) -> None:
        self.progress = Progress(due_ms, None, {OWN: seq})
        self.changed.set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[CancelGroups]:
        groups = CancelGroups(
            cast("Any", self),
            cast("Writing", self),
            ask=lambda _: None,
            next_change=self.next_change,
            counts=self.counts,
        )
        running = asyncio.create_task(groups.run())
        try:
            yield groups
        finally:
            running.cancel()

    async def until(self, what: Any) -> None:
        async with asyncio.timeout(20):
            while not what():  # noqa: ASYNC110 - it steps the loop
                await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("left_s", "within_s"),
    [(None, 10), (60, 10), (5, 4), (2, 1.6), (1, 0.8), (0.5, 0.3), (0.1, 0.05)],
)
def test_there_is_time_for_the_way_of_an_answer(left_s: float | None, within_s: float) -> None:
    assert within_s_of(left_s) == pytest.approx(within_s)


def cancelled(count: int = 1) -> list[Decided]:
    return [Decided(CancelDecision.CANCELLED)] * count


async def test_what_arrives_during_a_look_is_the_next_batch_and_one_group() -> None:
    site = Site()
    async with site.serving() as groups:
        calls = [asyncio.create_task(groups.cancel([named(0)], 9))]
        await site.until(lambda: site.looked_up == [1])
        calls += [asyncio.create_task(groups.cancel([named(n)], 9)) for n in range(1, 40)]
        await asyncio.sleep(0)
        site.goes_on.set()
        await site.until(lambda: site.written == [1, 39])
        assert site.looked_up == [1, 39]
        site.reach(100)
        assert [await call for call in calls] == [cancelled()] * 40
    assert not site.decided, "what was looked up needs no second look"
    ((names, times),) = site.counts.calls.read().items()
    assert (names, sum(times.counts)) == (("cancel", "CANCELLED"), 40)
    assert site.counts.cancel_load() == (0, 0, 0)
    assert site.counts.waiting() == {}


async def test_a_group_stays_together_until_a_look_can_decide_it() -> None:
    """Single looks for thousands, with each progress, would take longer than it lasts."""
    site = Site()
    site.goes_on.set()
    async with site.serving() as groups:
        call = asyncio.create_task(groups.cancel([named(n) for n in range(40)], 9))
        await site.until(lambda: site.written == [40])
        site.is_current = False
        site.reach(1, DUE_MS)
        await site.until(lambda: site.put_off)
        assert not site.decided
        site.is_current = True
        site.reach(1, DUE_MS + 1)
        assert await call == [Decided(CancelDecision.ALREADY_DELIVERED)] * 40
    assert site.decided == [40]


async def test_batches_begin_apart_so_that_single_cancels_share_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each costs two looks and a group, however few cancels it has; many do not wait."""
    monkeypatch.setattr(cancel_groups, "BATCHES_APART_S", 3_600)
    monkeypatch.setattr(cancel_groups, "_WORTH_A_BATCH", 4)
    site = Site()
    site.goes_on.set()
    async with site.serving() as groups:
        calls = [asyncio.create_task(groups.cancel([named(0)], 9))]
        await site.until(lambda: site.written == [1])
        for number in range(1, 4):
            calls.append(asyncio.create_task(groups.cancel([named(number)], 9)))
            for _ in range(20):
                await asyncio.sleep(0)
        assert (site.looked_up, groups.kept) == ([1], 4)
    for call in calls:
        call.cancel()
    full = Site()
    full.goes_on.set()
    async with full.serving() as groups:
        first = asyncio.create_task(groups.cancel([named(0)], 9))
        await full.until(lambda: full.written == [1])
        many = asyncio.create_task(groups.cancel([named(n) for n in range(1, 5)], 9))
        await full.until(lambda: full.looked_up == [1, 4])
    first.cancel()
    many.cancel()


async def test_what_another_node_has_gathered_does_not_gather_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cancel_groups, "BATCHES_APART_S", 3_600)
    site = Site()
    site.goes_on.set()
    async with site.serving() as groups:
        calls = [asyncio.create_task(groups.cancel([named(0)], 9))]
        await site.until(lambda: site.written == [1])
        calls.append(asyncio.create_task(groups.cancel([named(1)], 9)))
        await asyncio.sleep(0.01)
        assert site.looked_up == [1]
        more = groups.cancel([named(2), named(3)], 9, are_gathered=True)
        calls.append(asyncio.create_task(more))
        await site.until(lambda: site.written == [1, 3])
        calls.append(asyncio.create_task(groups.cancel([named(4)], 9)))
        await asyncio.sleep(0.01)
        assert site.looked_up == [1, 3]
        for call in calls:
            call.cancel()


async def test_who_asks_for_a_part_hears_soon_of_what_is_decided() -> None:
    """The rest goes on, and asking again joins it."""
    site = Site()
    site.goes_on.set()
    later = named(2, DUE_MS + 60_000)
    async with site.serving() as groups:
        alone = asyncio.create_task(groups.cancel([named(1)], 9))
        await site.until(lambda: site.written == [1])
        rest = [asyncio.create_task(groups.cancel([named(1), later], 9, partly=True))]
        await site.until(lambda: site.written == [1, 1])
        site.reach(2)  # the first cancel, and not the second one
        assert await alone == cancelled()
        assert await rest[0] == [*cancelled(), None]
        rest.append(asyncio.create_task(groups.cancel([later], 9, partly=True)))
        await asyncio.sleep(0)
        site.reach(100)
        assert await rest[1] == cancelled()
    assert sum(site.written) == 2


@pytest.mark.parametrize("stage", ["queued", "written"])
async def test_who_has_given_up_is_not_kept_however_often_it_comes_again(stage: str) -> None:
    site = Site()
    async with site.serving() as groups:
        busy = asyncio.create_task(groups.cancel([named(9)], 9))
        await site.until(lambda: site.looked_up == [1])
        first = asyncio.create_task(groups.cancel([named(1)], 9))
        await asyncio.sleep(0)
        if stage != "queued":
            site.goes_on.set()
            await site.until(lambda: sum(site.written) == 2)
        for _ in range(20):
            again = asyncio.create_task(groups.cancel([named(1)], 9, partly=True))
            await asyncio.sleep(0)
            again.cancel()
            await asyncio.gather(again, return_exceptions=True)
        others = groups._named[named(1)].others
        assert others is not None
        assert len([*others]) < SWEPT_AT_LEAST
        first.cancel()
        busy.cancel()


def test_whoever_joins_costs_the_same_however_many_wait() -> None:
    """A thousand callers of one message were a million looks."""
    looked: list[int] = []

    class Waiting:
        @property
        def is_over(self) -> bool:
            looked.append(1)
            return False

    call: Any = Waiting()
    waiters = Waiters[Answered](call, 0)
    for row in range(1, 1_000):
        waiters.join(call, row)
    assert len([*waiters]) == 1_000
    assert len(looked) < 3 * 1_000


async def test_who_asks_again_joins_the_first_attempt() -> None:
    """By the same name before it is looked up, and by another one after."""
    site = Site()
    site.goes_on.set()
    async with site.serving() as groups:
        first = asyncio.create_task(groups.cancel([named(1)], 9))
        await site.until(lambda: site.written == [1])
        first.cancel()  # its caller gives up
        other = named(1)._replace(wheel=OWN)
        again = [asyncio.create_task(groups.cancel([name], 9)) for name in (named(1), other)]
        await site.until(lambda: len(site.looked_up) == 2)
        site.reach(100)
        assert [await call for call in again] == [cancelled()] * 2
    assert (site.looked_up, site.written) == ([1, 1], [1])
    assert groups.kept == 0


@pytest.mark.parametrize("name", [named(1), named(1)._replace(wheel=OWN)], ids=["same", "other"])
async def test_who_joins_a_look_is_not_told_that_it_found_nothing(name: Reference) -> None:
    """The message may have been accepted since that look, before this caller asked."""
    site = Site(absent={named(1).id})
    async with site.serving() as groups:
        first = [asyncio.create_task(groups.cancel([named(1)], 9)) for _ in range(2)]
        await site.until(lambda: site.looked_up == [1])
        later = [asyncio.create_task(groups.cancel([named(1)], 9))]
        site.goes_on.set()
        await site.until(lambda: groups._on_other_nodes.taken)
        site.absent.clear()
        later.append(asyncio.create_task(groups.cancel([name], 9)))
        await site.until(lambda: name == named(1) or len(site.looked_up) == 2)
        await asyncio.sleep(0)
        site.others_answer.set()
        not_found, unknown = Decided(CancelDecision.NOT_FOUND), Refusal(Reason.NOT_UP_TO_DATE)
        assert [await call for call in first] == [[not_found]] * 2
        assert [await call for call in later] == [[unknown]] * 2
    assert groups.kept == 0


async def test_who_asks_again_joins_a_group_in_which_a_message_has_two_names() -> None:
    site = Site()
    site.goes_on.set()
    other = named(1)._replace(wheel=OWN)
    async with site.serving() as groups:
        calls = [asyncio.create_task(groups.cancel([named(1), other, named(2)], 9))]
        await site.until(lambda: site.written == [2])
        calls += [asyncio.create_task(groups.cancel([name], 9)) for name in (named(2), other)]
        await asyncio.sleep(0)
        site.reach(100)
        assert [await call for call in calls] == [cancelled(3), cancelled(), cancelled()]
    assert (site.looked_up, groups.kept, groups._named) == ([3], 0, {})


async def test_a_defect_while_a_call_is_queued_leaves_no_name_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever names the same messages later is served; what joins a defect does not matter."""
    site = Site()
    async with site.serving() as groups:
        first = asyncio.create_task(groups.cancel([named(1)], 9))
        await site.until(lambda: site.looked_up == [1])

        def join(*_: object) -> None:
            raise KeyError("injected")

        monkeypatch.setattr(PendingCancel, "join", join)
        with pytest.raises(KeyError):
            await groups.cancel([named(2), named(1), named(3)], 9)
        monkeypatch.undo()
        later = asyncio.create_task(groups.cancel([named(2), named(3)], 9))
        site.goes_on.set()
        await site.until(lambda: sum(site.written) == 3)
        site.reach(100)
        assert [await first, await later] == [cancelled(), cancelled(2)]
        assert groups.kept == 0


@pytest.mark.parametrize("where", ["written", "not written"])
async def test_what_a_defect_leaves_in_the_table_is_answered_and_can_be_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    site = Site()
    site.goes_on.set()
    for bound in ("WAIT_S", "LEFT_BEHIND_S", "QUEUED_S"):
        monkeypatch.setattr(cancel_groups, bound, 0.05)

    def broken(*_: object, **__: object) -> None:
        raise KeyError("injected")

    async with site.serving() as groups:
        with monkeypatch.context() as defect:
            if where == "written":
                defect.setattr(WaitingCancels, "add_group", broken)
            else:
                defect.setattr(DecisionBasis, "before_writing", broken)
            call = asyncio.create_task(groups.cancel([named(1)], 9))
            await site.until(lambda: groups._pending and site.looked_up == [1])
            await site.until(lambda: site.written == [1] or where == "not written")
        site.changed.set()
        (answer,) = await call
        assert isinstance(answer, Refusal)
        is_unknown = where == "written"  # of the other it is known that nothing was written
        assert answer.reason is (Reason.CANCEL_UNKNOWN if is_unknown else Reason.NOT_UP_TO_DATE)
        assert groups.kept == 0


async def test_what_progress_alone_does_not_decide_is_looked_at_again() -> None:
    """The others of its group are answered; who joined any of them is, too."""
    site = Site(doubtful={named(2).id})
    site.goes_on.set()
    async with site.serving() as groups:
        calls = [asyncio.create_task(groups.cancel([named(n) for n in range(1, 4)], 9))]
        await site.until(lambda: site.written == [3])
        calls += [asyncio.create_task(groups.cancel([named(n)], 9)) for n in (2, 3)]
        await asyncio.sleep(0)
        site.reach(100)
        assert [await call for call in calls] == [cancelled(3), cancelled(), cancelled()]
    assert (site.looked_up, site.decided, groups.kept) == ([3], [1], 0)
    assert groups._named == {}


@pytest.mark.parametrize("when", ["looked up", "written"])
async def test_what_has_had_another_due_since_it_was_looked_up_is_looked_at_again(
    when: str,
) -> None:
    """Its record may be gone when progress reaches the cancel: then its mark is in frames."""
    site, record = Site(), Reschedule(DUE_MS + 1, COPY)
    moved, other = named(1), named(2)
    async with site.serving() as groups:
        call = asyncio.create_task(groups.cancel([moved, other], 9))
        await site.until(lambda: site.looked_up)
        if when == "written":
            site.goes_on.set()
            await site.until(lambda: site.written)
        site.records = {moved.key: record}
        site.changed.set()
        await site.until(lambda: not site.changed.is_set())
        site.records = {}
        site.goes_on.set()
        await site.until(lambda: site.written)
        site.reach(100)
        await call
    assert site.decided == [1]


async def test_a_message_whose_due_came_first_is_decided_without_its_group() -> None:
    site = Site(refused={0: Refusal(Reason.DUE_TOO_OLD), 1: Refusal(Reason.DISK_FULL)})
    site.goes_on.set()
    dues_ms = [DUE_MS, DUE_MS, DUE_MS + 1, DUE_MS + 60_000]
    async with site.serving() as groups:
        asked = [named(number, due_ms) for number, due_ms in enumerate(dues_ms)]
        call = asyncio.create_task(groups.cancel(asked, 9))
        await site.until(lambda: site.written == [4])
        site.reach(1, DUE_MS + 1)  # the message, and not the cancel
        await site.until(lambda: site.decided)
        site.reach(100, DUE_MS + 1)
        late, full, due, last = await call
    assert late == Decided(CancelDecision.TOO_LATE)
    assert isinstance(full, Refusal)
    assert full.reason is Reason.DISK_FULL
    assert [due, last] == [Decided(CancelDecision.ALREADY_DELIVERED), *cancelled()]
    assert site.decided == [1]
    assert groups.kept == 0


async def test_nothing_is_done_for_callers_who_are_gone() -> None:
    site = Site()
    async with site.serving() as groups:
        first = asyncio.create_task(groups.cancel([named(0)], 9))
        await site.until(lambda: site.looked_up == [1])
        (late,) = await groups.cancel([named(1)], 0.001)
        assert isinstance(late, Refusal)
        assert late.reason is Reason.BACKPRESSURE, "nothing was done, so it is known"
        site.goes_on.set()
        await site.until(lambda: site.written == [1])
        site.reach(100)
        assert await first == cancelled()
    assert site.looked_up == [1]


async def test_too_many_are_refused_and_told_when_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cancel_groups, "KEPT_AT_MOST", 7)
    site = Site()
    async with site.serving() as groups:
        first = asyncio.create_task(groups.cancel([named(0)], 9))
        await site.until(lambda: site.looked_up == [1])
        more = asyncio.create_task(groups.cancel([named(n) for n in range(1, 6)], 9))
        await asyncio.sleep(0)
        site.goes_on.set()
        await site.until(lambda: sum(site.written) == 4)
        site.reach(100)
        await first
        results = await more
    assert sum(site.counts.calls.read()["cancel", "BACKPRESSURE"].counts) == 2
    refused = [each for each in results if isinstance(each, Refusal)]
    assert results[:3] == cancelled(3)
    assert [each.reason for each in refused] == [Reason.BACKPRESSURE] * 2
    assert all((each.retry_delay_ms or 0) >= 50 for each in refused)


@pytest.mark.parametrize("is_known", [False, True], ids=["invented", "done with a cancel"])
async def test_who_has_much_looked_for_elsewhere_takes_none_of_others(*, is_known: bool) -> None:
    """64 ids that somebody had invented had all others refused, or told that nothing is known."""
    site = Site()
    many, others = range(ASKED_AT_MOST), range(ASKED_AT_MOST, ASKED_AT_MOST + 3)
    if is_known:
        site.cancels = [Position(OWN, 9, 0)]
        site.doubtful = {named(n).id for n in (*many, *others)}
        site.progress = Progress(DUE_MS, None, {OWN: 1})
    else:
        site.absent = {named(n).id for n in (*many, *others)}
    site.goes_on.set()
    async with site.serving() as groups:
        first = asyncio.create_task(groups.cancel([named(n) for n in many], 9, repeat("many")))
        await site.until(lambda: site.looked_up == [len(many)])
        rest = [asyncio.create_task(groups.cancel([named(n)], 9, repeat(n))) for n in others]
        await site.until(lambda: {named(n) for n in others} <= {*site.asked_about})
        site.others_answer.set()
        decision = CancelDecision.ALREADY_DELIVERED if is_known else CancelDecision.NOT_FOUND
        assert [await call for call in rest] == [[Decided(decision)]] * 3
        refused = [each for each in await first if isinstance(each, Refusal)]
    reason = Reason.CANCEL_UNKNOWN if is_known else Reason.BACKPRESSURE
    assert {each.reason for each in refused} == {reason}
    assert len(refused) >= len(many) // 2
    assert groups.kept == 0


async def test_who_names_many_messages_waits_behind_others_and_leaves_them_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cancel_groups, "KEPT_AT_MOST", 10)
    monkeypatch.setattr(cancel_groups, "_BATCH", 2)
    site = Site()
    async with site.serving() as groups:
        calls = [asyncio.create_task(groups.cancel([named(0)], 9, repeat("many")))]
        await site.until(lambda: site.looked_up == [1])
        for begin in (2, 4, 6):
            some = [named(begin), named(begin + 1)]
            calls.append(asyncio.create_task(groups.cancel(some, 9, repeat("many"))))
        calls.append(asyncio.create_task(groups.cancel([named(1)], 9, repeat("another"))))
        await asyncio.sleep(0)
        assert [groups._room.left(sharer) for sharer in ("many", "another")] == [0, 2]
        site.goes_on.set()
        await site.until(lambda: sum(site.written) == 6)
        site.reach(100)
        results = [await call for call in calls]
    assert site.looked_up[1:3] == [3, 2], "who names one message is in the next batch"
    assert results[-1] == cancelled()
    assert [isinstance(each, Refusal) for each in results[-2]] == [True, True]


async def test_who_has_much_undecided_leaves_others_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """While no transaction ends, one principal's messages filled the table for everybody."""
    monkeypatch.setattr(cancel_groups, "KEPT_AT_MOST", 8)
    site = Site()
    site.goes_on.set()
    async with site.serving() as groups:
        some = [named(n) for n in range(8)]
        many = asyncio.create_task(groups.cancel(some, 9, repeat("many")))
        await site.until(lambda: site.written)
        another = asyncio.create_task(groups.cancel([named(9)], 9, repeat("another")))
        await site.until(lambda: another.done() or sum(site.written) == 5)
        site.reach(100)
        assert await another == cancelled()
        assert [isinstance(each, Refusal) for each in await many] == [False] * 4 + [True] * 4
    assert groups.kept == 0


async def test_who_has_seconds_read_ahead_delays_no_others_of_the_same_node() -> None:
    """Nor are they read for a call that is over; who asks again goes on from there."""
    site = Site()
    site.goes_on.set()
    site.unread_ids = {named(n).id for n in range(1, 40)}
    request = pb.CancelRequest(sharers=[1] * 39 + [2], partly=True)
    for number in (*range(1, 40), 99):
        request.messages.add().id_and_due.CopyFrom(
            pb.IdAndDue(id=named(number).id, due_ms=DUE_MS, topic="orders")
        )
    node = CallContext(A_NODE, "n2", 10)
    async with site.serving() as groups:
        cancels = Cancels(cast("Any", site), groups, cast("Any", None))
        first = asyncio.create_task(cancels.cancel(request, node))
        await site.until(lambda: site.written == [1])
        site.reach(100)
        *unread, known = [each.outcome for each in (await first).results]
        assert ({*unread}, known) == ({0}, pb.CANCEL_OUTCOME_CANCELLED)
        site.is_read.set()
        await site.until(lambda: len(site.unread_ids) == 39 - UNREAD_AT_ONCE)
        assert site.read == [(UNREAD_AT_ONCE, ("n2", 1))]
        again = asyncio.create_task(cancels.cancel(request, node))
        await site.until(lambda: sum(site.written) == 41)
        site.reach(100)
        assert {each.outcome for each in (await again).results} == {pb.CANCEL_OUTCOME_CANCELLED}
    assert groups.kept == 0


async def test_who_waits_for_seconds_in_vain_hears_that_nothing_was_written() -> None:
    site = Site()
    site.unread_ids = {named(1).id}
    async with site.serving() as groups:
        (answered,) = await groups.cancel([named(1)], 0.01)
        assert isinstance(answered, Refusal)
        assert answered.reason is Reason.BACKPRESSURE


async def test_a_queue_that_does_not_move_takes_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cancel_groups, "QUEUED_S", 0.05)
    site = Site()
    async with site.serving() as groups:
        first = asyncio.create_task(groups.cancel([named(0)], 9))
        await site.until(lambda: site.looked_up == [1])
        second = asyncio.create_task(groups.cancel([named(1)], 9))
        await asyncio.sleep(0.06)
        (refused,) = await groups.cancel([named(2)], 9)
        assert isinstance(refused, Refusal)
        assert refused.reason is Reason.BACKPRESSURE
        for call in (first, second):
            call.cancel()


def pending(
    call: AwaitedCall[Answered], row: int, reference: Reference, **changes: Any
) -> PendingCancel:
    subject = Subject(reference, reference, Found((reference.due_ms or 0,), [COPY]))
    return PendingCancel(reference, 0, call, row, subject=subject, **changes)


@pytest.mark.parametrize(
    ("what", "decides"),
    [
        ("nothing else", True),
        ("V is short of the cancel", False),
        ("w has reached the due", False),
        ("something is done ahead", False),
        ("another epoch leads", False),
        ("it was not plain", False),
        ("a record of another due stands", False),
        ("it may be a half", False),
        ("it is due so soon, and there are no halves", True),
    ],
)
async def test_progress_alone_decides_of_a_plain_message(what: str, *, decides: bool) -> None:
    progress = Progress(DUE_MS - 1, None, {OWN: 5})
    status = CleanerStatus(
        "a", "boot", 1, 0, 0, Role.LEADING, epoch=3, progress=progress, needs=KNOWN_SINCE
    )
    now_ms = DUE_MS - LONGEST_HOLD_MS - 2 * 7 - 1
    one = pending(AwaitedCall[Answered].of(1), 0, named(1), plain_in=3, cancel=Position(OWN, 5, 0))
    match what:
        case "V is short of the cancel":
            status = replace(status, progress=Progress(DUE_MS - 1, None, {OWN: 4}))
        case "w has reached the due":
            status = replace(status, progress=Progress(DUE_MS, None, {OWN: 5}))
        case "something is done ahead":
            ahead = (Done(DUE_MS + 9, None, {}),)
            status = replace(status, progress=replace(progress, ahead=ahead))
        case "another epoch leads":
            status = replace(status, epoch=4)
        case "it was not plain":
            one.plain_in = None
        case "a record of another due stands":
            status = replace(status, reschedules={one.key: Reschedule(DUE_MS + 1, COPY)})
        case "it may be a half":
            now_ms += 1
        case "it is due so soon, and there are no halves":
            now_ms, status = now_ms + 1, replace(status, needs=KNOWN_SINCE - 1)
    basis = DecisionBasis(now_ms, status, None, leading=True, clock_skew_ms=7)
    assert basis.is_cancelled(one) is decides


class TestWaitingCancels:
    def resting(self, waiting: WaitingCancels, seq: int, *dues_ms: int) -> list[PendingCancel]:
        """Adds a group whose cancels are in frames up to this one."""
        call, place = AwaitedCall[Answered].of(len(dues_ms)), Position(OWN, seq, 0)
        group = [pending(call, row, named(row, due_ms)) for row, due_ms in enumerate(dues_ms)]
        waiting.add_group(group, place, 0)
        return group

    async def test_a_progress_costs_what_it_can_decide(self) -> None:
        waiting = WaitingCancels()
        (early,) = self.resting(waiting, 5, DUE_MS)
        due, late = self.resting(waiting, 9, 2_000, DUE_MS)
        assert waiting.covered(Progress(0, None, {OWN: 4})) == []
        assert waiting.covered(Progress(0, None, {OWN: 5})) == [early]
        early.settle(*cancelled())
        assert waiting.covered(Progress(1_999, None, {OWN: 5})) == []
        assert waiting.covered(Progress(1_999, Position(OWN, 1, 0), {OWN: 5})) == [due]
        assert waiting.covered(Progress(2_000, None, {OWN: 9})) == [due, late], "it is not decided"
        due.settle(*cancelled())
        late.settle(*cancelled())
        assert waiting.covered(Progress(99_000, None, {OWN: 99})) == []

    async def test_what_may_be_decided_already_is_looked_at_until_it_is(self) -> None:
        waiting = WaitingCancels()
        one = pending(AwaitedCall[Answered].of(1), 0, named(1))
        waiting.add(one)
        for _ in range(2):
            assert waiting.covered(Progress(0, None)) == [one]
        one.waits = False
        assert waiting.covered(Progress(0, None)) == []

    async def test_all_are_looked_at_when_w_was_set_back(self) -> None:
        waiting = WaitingCancels()
        group = self.resting(waiting, 5, DUE_MS, DUE_MS + 1)
        assert waiting.covered(Progress(0, None, {OWN: 4})) == []
        assert waiting.covered(Progress(0, None, {OWN: 4}, set_backs=1)) == group

    async def test_what_is_decided_takes_no_room(self) -> None:
        waiting = WaitingCancels()
        for _ in range(3):
            for each in self.resting(waiting, 1_000_000, *[DUE_MS] * 100):
                each.settle(*cancelled())
        self.resting(waiting, 1_000_000, 2_000)[0].settle(*cancelled())
        assert waiting.covered(Progress(2_000, None)) == []
        assert not waiting._groups
