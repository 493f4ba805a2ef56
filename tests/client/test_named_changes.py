"""Cancels and reschedules of many messages: each is settled on its own, over all attempts."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from grpc import StatusCode

from delaywheel import (
    AsyncClient,
    CancelOutcome,
    Client,
    Handle,
    Reason,
    RefusedError,
    Rescheduled,
    RescheduleOutcome,
    TimedOutError,
)
from delaywheel.client.changing.named_changes import (
    CANCEL,
    LATE_ASKED_AT_MOST,
    Again,
    Doubts,
    NamedChanges,
    outcome_of,
)
from delaywheel.client.exchange.retry import AttemptFailure
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.clients.fake_service import FakeService, abort, answer, hang

CANCELLED = pb.MessageCancelled(outcome=pb.CANCEL_OUTCOME_CANCELLED)
LATE = pb.MessageCancelled(outcome=pb.CANCEL_OUTCOME_TOO_LATE)


def handle(number: int) -> Handle:
    return Handle("a.1", 17, number.to_bytes(16, "big"), "orders")


def error(reason: Reason) -> pb.MessageCancelled:
    refused = pb.Error(code=reason.code_number, reason=reason.value, retry_delay_ms=1)
    return pb.MessageCancelled(error=refused)


def many(_service: object, request: pb.CancelRequest, _context: object) -> pb.CancelResponse:
    """All are cancelled."""
    return pb.CancelResponse(results=[CANCELLED] * len(request.messages))


def refs(count: int) -> list[pb.MessageRef]:
    return [pb.MessageRef(handle=str(handle(number))) for number in range(count)]


class TestNamedChanges:
    def test_only_what_is_not_settled_is_asked_for_again(self) -> None:
        cancels = NamedChanges(CANCEL, refs(3))
        first = [CANCELLED, error(Reason.CANCEL_UNKNOWN), error(Reason.HANDLE_AMBIGUOUS)]
        report = cancels.answered(pb.CancelResponse(results=first))
        assert (report.healthy, report.elsewhere, report.everywhere) == (True, True, False)
        assert list(cancels.request().messages) == refs(3)[1:2]
        cancels.answered(pb.CancelResponse(results=[CANCELLED]))
        assert cancels.done
        one, two, three = cancels.results
        assert outcome_of(one) == outcome_of(two)
        with pytest.raises(RefusedError, match="HANDLE_AMBIGUOUS"):
            outcome_of(three)

    def test_what_may_have_been_cancelled_is_not_too_late(self) -> None:
        cancels = NamedChanges(CANCEL, refs(2))
        cancels.answered(
            pb.CancelResponse(results=[error(Reason.CANCEL_UNKNOWN), error(Reason.NO_LEADER)])
        )
        cancels.answered(pb.CancelResponse(results=[LATE, LATE]))
        for _ in range(LATE_ASKED_AT_MOST):
            assert not cancels.done
            cancels.answered(pb.CancelResponse(results=[LATE]))
        doubtful, certain = cancels.results
        with pytest.raises(RefusedError, match="CANCEL_UNKNOWN"):
            outcome_of(doubtful)
        assert outcome_of(certain).outcome is CancelOutcome.TOO_LATE

    def test_too_late_in_doubt_is_asked_again_until_it_is_known_what_was_first(self) -> None:
        cancels = NamedChanges(CANCEL, refs(2))
        cancels.failed(AttemptFailure.of_error(error(Reason.CANCEL_UNKNOWN).error))
        done = pb.MessageCancelled(outcome=pb.CANCEL_OUTCOME_ALREADY_DELIVERED)
        report = cancels.answered(pb.CancelResponse(results=[LATE, CANCELLED]))
        assert (report.healthy, report.everywhere) == (True, True)
        assert list(cancels.request().messages) == refs(2)[:1]
        cancels.answered(pb.CancelResponse(results=[done]))
        assert [outcome_of(each).outcome.name for each in cancels.results] == [
            "ALREADY_DELIVERED",
            "CANCELLED",
        ]

    def test_in_part_each_is_told_and_what_has_no_outcome_is_let_go(self) -> None:
        told: dict[int, Any] = {}
        cancels = NamedChanges(CANCEL, refs(5), told.__setitem__, Doubts({3: 0, 4: 99}))
        assert cancels.request().partly
        first = [error(Reason.BACKPRESSURE), pb.MessageCancelled(), CANCELLED, LATE, LATE]
        cancels.answered(pb.CancelResponse(results=first))
        assert cancels.done
        busy = f"BACKPRESSURE: {first[0].error.message}"
        assert told[0] == Again(0.001, is_doubtful=False, why=busy)
        assert told[1] == Again()
        assert told[2].outcome is CancelOutcome.CANCELLED
        assert told[3] == Again(0.25, is_late=True, why="TOO_LATE in doubt")
        assert told[4].reason is Reason.CANCEL_UNKNOWN

    def test_who_gives_up_knows_what_stays_true(self) -> None:
        """Otherwise its message is changed later, though its error said that it was not."""
        doubts = Doubts({2: 0})
        cancels = NamedChanges(CANCEL, refs(5), lambda *_: None, doubts)
        assert doubts.withdraw(0), "nothing was sent yet"
        assert list(cancels.request().messages) == refs(5)[1:]
        assert not doubts.withdraw(1), "an attempt is under way"
        cancels.failed(AttemptFailure(StatusCode.UNAVAILABLE, "no", unsent=True))
        assert (doubts.withdraw(2), doubts.withdraw(3)) == (False, True)
        assert doubts.why == "UNAVAILABLE: no"
        assert list(cancels.request().messages) == refs(5)[4:]

    @pytest.mark.parametrize(
        ("failure", "is_let_go"),
        [
            (AttemptFailure.of_error(error(Reason.CANCEL_UNKNOWN).error), True),
            (AttemptFailure(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"), True),
            (AttemptFailure.of_error(error(Reason.NO_LEADER).error), True),
            (AttemptFailure(StatusCode.UNAVAILABLE, "failed to connect"), False),
        ],
        ids=["unknown", "hangs", "no leader", "nobody answers"],
    )
    def test_in_part_a_call_goes_on_only_where_nobody_answers(
        self, failure: AttemptFailure, *, is_let_go: bool
    ) -> None:
        """Sixteen calls whose attempts time out kept others from being named at all."""
        told: dict[int, Any] = {}
        cancels = NamedChanges(CANCEL, refs(1), told.__setitem__)
        cancels.failed(failure)
        assert not cancels.done, "another node is asked"
        report = cancels.failed(failure)
        assert report.healthy is (failure.reason is not None)
        assert cancels.done is is_let_go
        is_doubtful = not failure.verdict.outcome_known
        again = Again(failure.retry_delay_s or 0.0, is_doubtful=is_doubtful, why=str(failure))
        assert told == ({0: again} if is_let_go else {})

    def test_an_address_that_failed_is_not_healthy_because_nobody_waits_any_more(self) -> None:
        """Of a node that hangs, callers who wait for less than an attempt never heard."""
        doubts = Doubts()
        cancels = NamedChanges(CANCEL, refs(1), lambda _number, _result: None, doubts)
        cancels.request()
        doubts.withdraw(0)
        hangs = AttemptFailure(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        assert not cancels.failed(hangs).healthy
        assert cancels.done

    @pytest.mark.parametrize("whole", [True, False])
    def test_a_service_with_too_much_to_do_is_left_alone(self, *, whole: bool) -> None:
        cancels = NamedChanges(CANCEL, refs(2))
        if whole:
            failure = AttemptFailure.of_error(error(Reason.BACKPRESSURE).error)
            report = cancels.failed(failure)
        else:
            results = [CANCELLED, error(Reason.BACKPRESSURE)]
            report = cancels.answered(pb.CancelResponse(results=results))
        assert report.everywhere
        assert report.healthy is (None if whole else True), "messages may be sent there"
        assert not cancels.done

    def test_what_has_no_answer_in_time_says_whether_it_may_have_an_effect(self) -> None:
        cancels = NamedChanges(CANCEL, refs(2))
        results = [error(Reason.CANCEL_UNKNOWN), error(Reason.BACKPRESSURE)]
        cancels.answered(pb.CancelResponse(results=results))
        cancels.give_up("over")
        known = [each.outcome_known for each in cancels.results if isinstance(each, TimedOutError)]
        assert known == [False, True]

    def test_results_that_do_not_fit_settle_nothing_by_guessing(self) -> None:
        cancels = NamedChanges(CANCEL, refs(2))
        cancels.answered(pb.CancelResponse(results=[CANCELLED]))
        assert [getattr(each, "outcome_known", True) for each in cancels.results] == [False] * 2


def many_of(service: FakeService) -> list[int]:
    """How many messages each call named."""
    return [len(request.messages) for request in service.cancels]


@pytest.mark.parametrize("is_async", [False, True])
async def test_without_a_leader_it_is_known_in_the_end_that_nothing_was_cancelled(
    *, is_async: bool
) -> None:
    async def cancel(address: str) -> None:
        if is_async:
            async with AsyncClient(address) as aio:
                await aio.cancel(handle(0), timeout=3)
        else:
            with Client(address) as client:
                client.cancel(handle(0), timeout=3)

    # When its time is over no attempt is under way, of which nothing would be known.
    refused = [abort(Reason.NO_LEADER, delay_s=30.0)] * 99
    with FakeService(*refused) as service, pytest.raises(TimedOutError, match="NO_LEADER") as why:
        await cancel(service.address)
    assert why.value.outcome_known


async def test_cancels_that_are_awaited_together_are_sent_together() -> None:
    with FakeService(*[many] * 50) as service:
        async with AsyncClient(service.address) as client:
            await client.cancel(handle(0))
            cancelled = await asyncio.gather(*(client.cancel(handle(n)) for n in range(500)))
    assert {each.outcome for each in cancelled} == {CancelOutcome.CANCELLED}
    counts = many_of(service)
    assert sum(counts) == 501
    assert [counts[0], min(counts[1:])] == [1, 1], "a lone one waits for nothing"
    assert len(counts) < 100, "however slowly they are asked for"


async def test_reschedules_that_are_awaited_together_are_sent_together() -> None:
    to = datetime(2031, 1, 1, tzinfo=UTC)
    with FakeService() as service:
        async with AsyncClient(service.address) as client:
            calls = (client.reschedule(handle(n), to=to + timedelta(seconds=n)) for n in range(300))
            rescheduled = await asyncio.gather(*calls)
    due_s = int(to.timestamp())
    assert [each.due_ms for each in rescheduled] == [(due_s + n) * 1000 for n in range(300)]
    assert len(service.reschedules) < 60, "however slowly they are asked for"


@pytest.mark.parametrize("is_async", [False, True])
async def test_each_of_many_is_given_its_own_due(*, is_async: bool) -> None:
    """What is not known yet is asked for again; a refusal concerns one of them alone."""
    to = datetime(2031, 1, 1, tzinfo=UTC)
    dues = [(handle(n), to + timedelta(seconds=n)) for n in range(3)]
    moved = pb.MessageRescheduled(
        outcome=pb.RESCHEDULE_OUTCOME_RESCHEDULED, due_ms=7, handle=str(handle(9))
    )
    gone = pb.MessageRescheduled(outcome=pb.RESCHEDULE_OUTCOME_NOT_FOUND)
    unknown, taken = (
        pb.MessageRescheduled(error=error(reason).error)
        for reason in (Reason.RESCHEDULE_UNKNOWN, Reason.DUE_TAKEN)
    )
    script = [[moved, unknown, taken], [gone]]
    answers = [answer(pb.RescheduleResponse(results=results)) for results in script]
    with FakeService(*answers) as service:
        if is_async:
            async with AsyncClient(service.address) as aio:
                first, doubtful, refused = await aio.reschedule_many(dues)
        else:
            with Client(service.address) as client:
                first, doubtful, refused = client.reschedule_many(dues)
    assert first.handle == handle(0)
    assert first.unwrap() == Rescheduled(RescheduleOutcome.RESCHEDULED, handle(9), 7)
    with pytest.raises(RefusedError, match="RESCHEDULE_UNKNOWN: NOT_FOUND now"):
        doubtful.unwrap()
    with pytest.raises(RefusedError, match="DUE_TAKEN"):
        refused.unwrap()
    again = service.reschedules[1].messages
    assert [each.message.handle for each in again] == [str(handle(1))]


async def test_each_of_those_sent_together_has_its_own_time() -> None:
    with FakeService(hang, *[many] * 9) as service:
        async with AsyncClient(service.address, attempt_timeout=2) as client:
            first = asyncio.create_task(client.cancel(handle(0), timeout=10))
            await asyncio.sleep(0.01)
            with pytest.raises(TimedOutError):
                await client.cancel(handle(1), timeout=0.005)
            assert (await client.cancel(handle(2))).outcome is CancelOutcome.CANCELLED
            assert (await first).outcome is CancelOutcome.CANCELLED


def test_many_handles_are_cancelled_by_a_thousand() -> None:
    with FakeService(*[many] * 9) as service, Client(service.address) as client:
        came_to = client.cancel_many(handles=[str(handle(n)) for n in range(2_500)])
    assert len(came_to.cancelled) == 2_500
    assert came_to.complete
    assert sorted(many_of(service)) == [500, 1_000, 1_000]


async def test_each_of_many_is_reported_as_what_became_of_it() -> None:
    outcomes = list(CancelOutcome)
    results = [
        pb.MessageCancelled(outcome=pb.CancelOutcome.Value(f"CANCEL_OUTCOME_{each}"))
        for each in outcomes
    ]
    results.append(error(Reason.HANDLE_AMBIGUOUS))
    handles = [handle(n) for n in range(len(results))]
    with FakeService(answer(pb.CancelResponse(results=results))) as service:
        async with AsyncClient(service.address) as client:
            came_to = await client.cancel_many(handles=handles)
    reported = [getattr(came_to, each.lower()) for each in (*outcomes, "UNKNOWN")]
    assert reported == [(each,) for each in handles]
    assert not came_to.complete


def test_handles_and_conditions_exclude_each_other() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(ValueError, match="either handles"):
        client.cancel_many("orders", handles=[handle(1)])
