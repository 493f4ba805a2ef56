"""Client.cancel and Client.get against a real gRPC server in this process."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest

from delaywheel import (
    CallFailedError,
    Cancelled,
    CancelOutcome,
    Client,
    Handle,
    MessageInvalidError,
    MessageState,
    Reason,
    RefusedError,
    RescheduleOutcome,
)
from delaywheel.client.searching import CancellingMany
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.clients.fake_service import (
    Behaviour,
    FakeService,
    abort,
    abort_bare,
    answer,
    cancelled,
    rescheduled,
)


class TestCancel:
    @pytest.mark.parametrize("number", pb.CancelOutcome.values()[1:])
    def test_every_outcome_has_a_name(self, number: pb.CancelOutcome.ValueType) -> None:
        with FakeService(cancelled(number)) as service, Client(service.address) as client:
            outcome = client.cancel(Handle("a.1", 17, bytes(16), "orders")).outcome
        assert pb.CancelOutcome.Name(number) == f"CANCEL_OUTCOME_{outcome}"
        assert service.cancels[0].messages[0].handle == "a.1:17:" + "0" * 32 + ":orders"

    def test_of_what_was_rescheduled_the_new_due_is_reported_with_one_call(self) -> None:
        reported = cancelled(pb.CANCEL_OUTCOME_RESCHEDULED, 19_000)
        with FakeService(reported) as service, Client(service.address) as client:
            came_to = client.cancel(Handle("a.1", 17, bytes(16), "orders"))
            assert came_to == Cancelled(CancelOutcome.RESCHEDULED, 19_000)
            assert client.cancel(Handle("a.1", 19, bytes(16), "orders")).due_ms is None
        assert len(service.cancels) == 2

    def test_by_topic_id_and_due(self) -> None:
        with FakeService() as service, Client(service.address) as client:
            due = datetime(2031, 1, 1, microsecond=1, tzinfo=UTC)
            cancelled = client.cancel(topic="orders", id=bytes(16), due=due)
        assert cancelled.outcome is CancelOutcome.CANCELLED
        named = service.cancels[0].messages[0].id_and_due
        due_ms = int(due.timestamp()) * 1000 + 1
        assert (named.topic, named.id, named.due_ms) == ("orders", bytes(16), due_ms)

    def test_after_a_lost_reply_only_what_excludes_it_is_an_outcome(self) -> None:
        lost = abort_bare(grpc.StatusCode.UNAVAILABLE)
        with (
            FakeService(lost, cancelled(pb.CANCEL_OUTCOME_NOT_FOUND)) as service,
            Client(service.address) as client,
            pytest.raises(RefusedError) as caught,
        ):
            client.cancel(Handle("a.1", 17, bytes(16), "orders"))
        assert (caught.value.reason, caught.value.outcome_known) == (Reason.CANCEL_UNKNOWN, False)


class TestGet:
    def test_a_stored_message(self) -> None:
        handle = Handle("a.1", 17, bytes(16), "orders")
        stored = pb.StoredMessage(
            handle=str(handle), id=bytes(16), due_ms=17_500, topic="t", accepted_at_ms=3,
            wheel="a.1", seq=9, state=pb.MESSAGE_STATE_PENDING, value=b"",
            headers=[pb.Header(name="a"), pb.Header(name="b", value=b"")],
        )  # fmt: skip
        response = answer(pb.GetMessageResponse(message=stored))
        with FakeService(response) as service, Client(service.address) as client:
            found = client.get(str(handle))
        assert found is not None
        assert (found.handle, found.state) == (handle, MessageState.PENDING)
        assert (found.key, found.value, found.partition) == (None, b"", None)
        assert found.headers == (("a", None), ("b", b""))
        assert found.rescheduled_to_ms is None

    def test_what_may_not_be_read_is_not_null(self) -> None:
        stored = pb.StoredMessage(
            handle=f"a.1:17:{bytes(16).hex()}:orders", topic="t", content_withheld=True,
            key_length_bytes=-1, value_length_bytes=7, headers_length_bytes=9,
        )  # fmt: skip
        response = answer(pb.GetMessageResponse(message=stored))
        with FakeService(response) as service, Client(service.address) as client:
            found = client.get(stored.handle)
        assert found is not None
        assert found.content is None
        lengths = (found.key_length_bytes, found.value_length_bytes, found.headers_length_bytes)
        assert lengths == (None, 7, 9)
        for field in ("key", "value", "headers"):
            with pytest.raises(RefusedError, match="'read' in topic t") as raised:
                getattr(found, field)
            assert raised.value.reason is Reason.FORBIDDEN

    def test_what_is_not_there_is_none(self) -> None:
        with FakeService() as service, Client(service.address) as client:
            assert client.get(Handle("a.1", 17, bytes(16), "orders")) is None


class TestSearch:
    def test_pages_are_asked_for_until_there_are_enough(self) -> None:
        def page(*numbers: int, token: str = "") -> Behaviour:
            found = [
                pb.StoredMessage(
                    handle=f"a.1:17:{number:032x}:orders", id=number.to_bytes(16, "big")
                )
                for number in numbers
            ]
            return answer(pb.SearchResponse(messages=found, next_page_token=token))

        with (
            FakeService(page(token="x"), page(1, 2, token="y"), page(2, 3)) as service,
            Client(service.address) as client,
        ):
            found = client.search("orders", key=b"k", header=("trip", b"7"), limit=1_500)
        assert [each.handle.id[-1] for each in found.messages] == [1, 2, 3]
        assert found.complete
        assert [each.page_token for each in service.searches] == ["", "x", "y"]
        assert [each.page_size for each in service.searches] == [1_000, 1_000, 1_000]
        wanted = service.searches[0].filter
        assert (wanted.topic, wanted.key, wanted.header.value) == ("orders", b"k", b"7")
        assert not wanted.HasField("id")

    @pytest.mark.parametrize(("token", "incomplete"), [("x", False), ("", True), ("x", True)])
    def test_what_was_cut_off_or_could_not_be_read_is_reported(
        self, token: str, *, incomplete: bool
    ) -> None:
        page = pb.SearchResponse(
            messages=[pb.StoredMessage(handle="a.1:17:" + "0" * 32 + ":orders")],
            next_page_token=token,
            looked=pb.Looked(incomplete=incomplete),
        )
        with FakeService(answer(page)) as service, Client(service.address) as client:
            assert not client.search(limit=1).complete


class TestCancelMany:
    def test_each_outcome_is_reported_over_all_pages(self) -> None:
        def page(*outcomes: pb.CancelOutcome.ValueType, token: str = "") -> Behaviour:
            results = [
                pb.CancelResult(handle=f"a.1:{17 + outcome}:{0:032x}:orders", outcome=outcome)
                for outcome in outcomes
            ]
            return answer(pb.CancelManyResponse(results=results, next_page_token=token))

        first = page(pb.CANCEL_OUTCOME_CANCELLED, pb.CANCEL_OUTCOME_TOO_LATE, token="x")
        # A reply is lost: the next one shows what that attempt did.
        lost = abort_bare(grpc.StatusCode.UNAVAILABLE)
        second = page(pb.CANCEL_OUTCOME_UNSPECIFIED)
        with (
            FakeService(first, lost, second) as service,
            Client(service.address) as client,
        ):
            came_to = client.cancel_many("orders", key=b"k", dry_run=True)
        assert [handle.slot for handle in came_to.cancelled] == [18]
        assert [handle.slot for handle in came_to.too_late] == [20]
        assert [handle.slot for handle in came_to.unknown] == [17]
        assert came_to.complete
        assert [each.page_token for each in service.many] == ["", "x", "x"]
        assert all(each.dry_run and each.filter.key == b"k" for each in service.many)

    def test_what_was_rescheduled_is_reported_unless_it_is_found_where_it_is_by_now(self) -> None:
        moved, done = pb.CANCEL_OUTCOME_RESCHEDULED, pb.CANCEL_OUTCOME_CANCELLED
        # One within its second, so by the same handle; one to another second; one not found again.
        results = [
            pb.CancelResult(
                handle=f"a.1:{slot}:{number:032x}:orders", due_ms=due_ms, outcome=outcome
            )
            for slot, number, due_ms, outcome in (
                (17, 1, 17_000, moved),
                (17, 1, 17_500, done),
                (17, 2, 17_000, moved),
                (19, 2, 19_000, done),
                (17, 3, 17_000, moved),
            )
        ]
        page = answer(pb.CancelManyResponse(results=results))
        with FakeService(page) as service, Client(service.address) as client:
            came_to = client.cancel_many("orders")
        assert [(h.slot, h.id[-1]) for h in came_to.cancelled] == [(17, 1), (19, 2)]
        assert [handle.id[-1] for handle in came_to.rescheduled] == [3]
        assert came_to.unknown == ()

    def test_an_outcome_that_only_a_newer_service_knows_is_told_to_a_trace(self) -> None:
        handle = f"a.1:17:{1:032x}:orders"
        newer: Any = 99
        many = CancellingMany(pb.Filter(), 1, dry_run=False)
        result = pb.CancelResult(handle=handle, due_ms=17_000, outcome=newer)
        many.add(pb.CancelManyResponse(results=[result]))
        assert list(many.outcomes()) == [(handle, 17_000, "UNKNOWN")]
        assert list(map(str, many.result().unknown)) == [handle]


LOST = abort_bare(grpc.StatusCode.DATA_LOSS)
FIRST_PAGE = answer(
    pb.CancelManyResponse(
        results=[
            pb.CancelResult(handle=f"a.1:17:{0:032x}:orders", outcome=pb.CANCEL_OUTCOME_CANCELLED)
        ],
        next_page_token="x",
    )
)


class TestOutcomeKnown:
    """Whether a failed question may have changed something."""

    @pytest.mark.parametrize(
        ("ask", "known"),
        [
            (lambda client: client.get(Handle("a.1", 17, bytes(16), "orders")), True),
            (lambda client: client.search("orders"), True),
            (lambda client: client.cancel_many("orders", dry_run=True), True),
            (lambda client: client.cancel_many("orders"), False),
        ],
        ids=["get", "search", "dry run", "cancel many"],
    )
    def test_after_a_lost_reply(self, ask: Callable[[Client], object], *, known: bool) -> None:
        with FakeService(LOST) as service, Client(service.address) as client:
            service.otherwise_many = LOST
            with pytest.raises(CallFailedError) as caught:
                ask(client)
        assert caught.value.outcome_known is known

    @pytest.mark.parametrize("dry_run", [False, True])
    def test_after_an_earlier_page(self, *, dry_run: bool) -> None:
        refuse = abort(Reason.HANDLE_INVALID)
        with (
            FakeService(FIRST_PAGE, refuse) as service,
            Client(service.address) as client,
            pytest.raises(RefusedError) as caught,
        ):
            client.cancel_many("orders", dry_run=dry_run)
        assert caught.value.outcome_known is dry_run


class TestReschedule:
    TO = datetime(2031, 1, 1, tzinfo=UTC)

    def test_the_new_due_and_handle_are_reported(self) -> None:
        with FakeService() as service, Client(service.address) as client:
            reported = client.reschedule(Handle("a.1", 17, bytes(16), "orders"), to=self.TO)
        assert reported.outcome is RescheduleOutcome.RESCHEDULED
        assert reported.due_ms == int(self.TO.timestamp()) * 1000
        assert reported.handle == Handle("a.1", reported.due_ms // 1000, bytes(16), "orders")
        assert service.reschedules[0].messages[0].message.handle == "a.1:17:" + "0" * 32 + ":orders"

    def test_a_delay_counts_from_now(self) -> None:
        handle = Handle("a.1", 17, bytes(16), "orders")
        with FakeService() as service, Client(service.address) as client:
            began_ms = time.time_ns() // 1_000_000
            one = client.reschedule(handle, delay="1h")
            (many,) = client.reschedule_many([(handle, timedelta(hours=1))])
            ended_ms = time.time_ns() // 1_000_000
            for rescheduled_to in (one, many.unwrap()):
                assert rescheduled_to.due_ms is not None
                assert began_ms <= rescheduled_to.due_ms - 3_600_000 <= ended_ms + 1
            for when in ({}, {"to": self.TO, "delay": "1h"}):
                with pytest.raises(MessageInvalidError, match="either `to` or `delay`"):
                    client.reschedule(handle, **when)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "outcome", set(RescheduleOutcome) - {RescheduleOutcome.RESCHEDULED}, ids=str
    )
    def test_every_other_outcome_has_a_name_and_no_handle(self, outcome: RescheduleOutcome) -> None:
        number = pb.RescheduleOutcome.Value(f"RESCHEDULE_OUTCOME_{outcome}")
        response = rescheduled(number)
        with FakeService(response) as service, Client(service.address) as client:
            reported = client.reschedule(Handle("a.1", 17, bytes(16), "orders"), to=self.TO)
        assert (reported.outcome, reported.handle, reported.due_ms) == (outcome, None, None)
