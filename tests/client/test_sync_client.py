"""Client against a real gRPC server in this process that refuses, loses, hangs and drains."""

import asyncio
import re
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from delaywheel import (
    CallFailedError,
    Client,
    DelaywheelError,
    Handle,
    Message,
    Reason,
    RefusedError,
    TimedOutError,
    Tls,
)
from delaywheel.client import calls
from delaywheel.client.exchange.channel import Credentials
from delaywheel.client.exchange.retry import AttemptFailure
from delaywheel.client.transport.port import Line, finished
from delaywheel.client.transport.threads import ThreadTransport
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelStub
from support.clients.either_client import LoopClient
from support.clients.fake_service import (
    WHEEL,
    FakeService,
    abort,
    abort_bare,
    accept_but_lose_reply,
    accept_together,
    hang,
    refuse_rows,
)

SOON = timedelta(seconds=5)
GIVE_UP_S = 2.0
"""The timeout of a call that shall expire; its first attempt must have arrived by then."""


def messages(count: int) -> list[Message]:
    return [Message("t", b"value", delay=SOON) for _ in range(count)]


def test_who_is_interrupted_as_it_begins_to_ask_whether_a_node_listens_leaves_nobody_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeService() as service, Client(service.address) as client:
        known = client._calls._lines

        def now_s() -> float:
            if any(line.asked is not None for line in known.values()):
                monkeypatch.undo()
                raise KeyboardInterrupt
            return time.monotonic()

        monkeypatch.setattr(calls, "monotonic", now_s)
        with pytest.raises(KeyboardInterrupt):
            client.produce_many(messages(1))
        assert client.produce_many(messages(1), timeout=20)[0].error is None


class TestProduce:
    def test_a_message_arrives_as_it_was_given(self) -> None:
        with FakeService() as service, Client(service.address) as client:
            due = datetime(2031, 1, 1, tzinfo=UTC)
            handle = client.produce(
                "orders", None, key=b"", headers=[("a", b"1"), ("a", None)], deliver_at=due,
                id=b"0123456789abcdef", partition=3, timestamp=datetime(2020, 1, 1, tzinfo=UTC),
            )  # fmt: skip
        [[row]] = service.sent
        assert handle == Handle(WHEEL, int(due.timestamp()), b"0123456789abcdef", "orders")
        assert (row.key, row.value, row.headers) == (b"", None, (("a", b"1"), ("a", None)))
        assert (row.partition, row.timestamp_ms) == (3, 1_577_836_800_000)
        assert row.due_ms == int(due.timestamp()) * 1000

    @pytest.mark.parametrize(
        "obstacle",
        [
            abort(Reason.DRAINING),
            abort(Reason.NO_WHEEL),
            abort(Reason.BACKPRESSURE, delay_s=0.05),
            abort(Reason.WHEEL_LOST),
            abort_bare(grpc.StatusCode.UNAVAILABLE),
            abort_bare(grpc.StatusCode.UNKNOWN, "Stream removed"),
            refuse_rows({0: Reason.NOT_ENOUGH_REPLICAS}),
            accept_but_lose_reply,
            accept_together,
            hang,
        ],
        ids=lambda behaviour: getattr(behaviour, "__name__", "?"),
    )
    def test_a_retry_keeps_id_and_due(self, obstacle: object) -> None:
        attempt_s = 0.3 if obstacle is hang else 20.0
        with (
            FakeService(obstacle, obstacle) as service,  # type: ignore[arg-type]
            Client(service.address, attempt_timeout=attempt_s) as client,
        ):
            handle = client.produce("t", b"value", delay=SOON)
        first, *retries = service.sent
        assert len(retries) >= 2
        assert retries == [first] * len(retries)
        assert obstacle is hang or len(retries) == 2, "only short attempts may end too early"
        assert handle.id == first[0].id
        assert set(service.accepted) == {(first[0].id, first[0].due_ms)}

    def test_a_refusal_for_good_is_not_tried_again(self) -> None:
        with (
            FakeService(otherwise=refuse_rows({0: Reason.TOPIC_UNKNOWN})) as service,
            Client(service.address) as client,
            pytest.raises(RefusedError) as caught,
        ):
            client.produce("t", b"", delay=SOON)
        assert (caught.value.reason, caught.value.outcome_known) == (Reason.TOPIC_UNKNOWN, True)
        assert not caught.value.retry_helps
        assert len(service.sent) == 1

    def test_a_call_that_is_not_permitted_fails_at_once(self) -> None:
        not_permitted = abort_bare(grpc.StatusCode.UNAUTHENTICATED, "who?")
        with (
            FakeService(otherwise=not_permitted) as service,
            Client(service.address) as client,
            pytest.raises(CallFailedError, match=r"UNAUTHENTICATED: who\?") as caught,
        ):
            client.produce("t", b"", delay=SOON)
        assert caught.value.outcome_known

    def test_a_reason_of_tomorrow_is_passed_on_by_name(self) -> None:
        tomorrow = abort("OF_TOMORROW", code=grpc.StatusCode.FAILED_PRECONDITION)
        with (
            FakeService(otherwise=tomorrow) as service,
            Client(service.address) as client,
            pytest.raises(RefusedError) as caught,
        ):
            client.produce("t", b"", delay=SOON)
        assert (caught.value.reason, caught.value.outcome_known) == ("OF_TOMORROW", False)

    def test_the_failed_message_can_be_sent_again_as_it_is(self) -> None:
        with (
            FakeService(otherwise=accept_but_lose_reply) as service,
            Client(service.address) as client,
        ):
            with pytest.raises(DelaywheelError) as caught:
                client.produce("t", b"", delay=SOON, timeout=GIVE_UP_S)
            assert not caught.value.outcome_known
            assert caught.value.failed is not None
            service.otherwise = refuse_rows({})
            [result] = client.produce_many([caught.value.failed])
        assert result.unwrap().id == caught.value.failed.id
        assert len(service.accepted) == 1


class TestGivingUp:
    def test_no_half_is_begun_when_its_hold_is_over(self) -> None:
        messages = [Message("t", b"", delay=SOON) for _ in range(2)]
        with FakeService(otherwise=hang) as service, Client(service.address) as client:
            began_s = time.monotonic()
            with pytest.raises(TimedOutError):
                client.begin("t", b"", group="shop", hold="200ms", timeout=60)
            with pytest.raises(TimedOutError):
                client.begin_many(messages, group="shop", hold="200ms", timeout=60)
            assert time.monotonic() - began_s < 30

    @pytest.mark.parametrize("make", [Client, LoopClient])
    def test_the_deadline_holds(self, make: Any) -> None:
        started_s = time.monotonic()
        with (
            FakeService(otherwise=hang) as service,
            make(service.address, timeout=60, attempt_timeout=60) as client,
        ):
            with pytest.raises(TimedOutError):
                client.produce("t", b"", delay=SOON, timeout=0.3)
            [result] = client.produce_many(messages(1), timeout=0.3)
            assert isinstance(result.error, TimedOutError)
            assert 0.25 < time.monotonic() - started_s < 25, "all else ends later"


class TestProduceMany:
    def test_results_come_in_the_order_of_the_messages(self) -> None:
        many = messages(25)
        limits = pb.Limits(max_request_messages=10, max_request_bytes=1 << 20)
        with FakeService(otherwise=refuse_rows({3: Reason.TOPIC_UNKNOWN})) as service:
            service.limits = limits
            with Client(service.address) as client:
                results = client.produce_many(many)
        assert [result.message for result in results] == many
        assert sorted(len(rows) for rows in service.sent) == [5, 10, 10]
        refused = [number for number, result in enumerate(results) if result.error]
        assert refused == [3, 13, 23]
        for number, result in enumerate(results):
            if number not in refused:
                assert result.unwrap().id == many[number].id

    @pytest.mark.parametrize("make", [Client, LoopClient])
    def test_several_requests_of_a_thousand_are_under_way_at_once(self, make: Any) -> None:
        many = messages(3_500)
        with (
            FakeService(otherwise=accept_together(4)) as service,
            make(service.address) as client,
        ):
            results = client.produce_many(many)
        assert [result.unwrap().id for result in results] == [message.id for message in many]
        assert sorted(len(rows) for rows in service.sent) == [500, 1_000, 1_000, 1_000]

    def test_what_is_under_way_is_bounded_in_bytes(self) -> None:
        large = [Message("t", bytes(600_000), delay=SOON) for _ in range(8)]
        with FakeService() as service, Client(service.address) as client:
            assert all(result.handle for result in client.produce_many(large))
        assert sorted(len(rows) for rows in service.sent) == [2, 3, 3]

    def test_an_unknown_outcome_is_that_of_its_request_alone(self) -> None:
        many = messages(3_000)
        lost = abort_bare(grpc.StatusCode.INVALID_ARGUMENT)
        with FakeService(lost) as service, Client(service.address) as client:
            results = client.produce_many(many)
        accepted = {message_id for message_id, _ in service.accepted}
        [failed] = [rows for rows in service.sent if rows[0].id not in accepted]
        reported = {result.message.id for result in results if result.error}
        assert reported == {row.id for row in failed}
        assert not any(result.error.outcome_known for result in results if result.error)

    def test_a_service_that_does_not_describe_itself_is_sent_to_all_the_same(self) -> None:
        with FakeService() as service:
            service.describe = abort_bare(grpc.StatusCode.UNIMPLEMENTED)
            with Client(service.address) as client:
                assert all(result.handle for result in client.produce_many(messages(3)))
                assert all(result.handle for result in client.produce_many(messages(3)))
        assert service.describes == 1

    def test_none_is_none(self) -> None:
        with FakeService() as service, Client(service.address) as client:
            assert client.produce_many([]) == []
        assert not service.sent


class TestDues:
    def test_levels_are_resolved_once(self) -> None:
        with FakeService() as service, Client(service.address) as client:
            message = Message("t", b"", level="30s")
            for _ in range(3):
                client.produce("t", b"", level="1m")
            [result] = client.produce_many([message])
            service.levels = {"30s": 1}
            [again] = client.produce_many([message])
        assert service.describes == 1
        assert again.handle == result.handle
        due_ms = message.due_ms
        assert due_ms is not None
        assert 0 < due_ms - (message.made_ns // 1_000_000 + 30_000) <= 1
        assert {row.due_ms for row in service.sent[3] + service.sent[4]} == {due_ms}

    def test_levels_that_cannot_be_asked_for_are_an_error_with_a_known_outcome(self) -> None:
        with FakeService() as service, Client(service.address) as client:
            service.describe = abort(Reason.DRAINING)
            with pytest.raises(TimedOutError) as caught:
                client.produce("t", b"", level="30s", timeout=GIVE_UP_S)
        assert caught.value.outcome_known
        assert caught.value.failed is not None


def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    pair = (key.read_bytes(), certificate.read_bytes())
    with FakeService().with_tls(grpc.ssl_server_credentials([pair])) as service:
        with Client(service.address, tls=Tls(certificate)) as client:
            assert client.produce("t", b"", delay=SOON)
        with Client(service.address) as plain, pytest.raises(TimedOutError):
            plain.produce("t", b"", delay=SOON, timeout=0.5)
    assert len(service.sent) == 1


@pytest.mark.parametrize("wrong", [{"past_due": "drop"}, {"timeout": 0}, {"attempt_timeout": -1}])
def test_options_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="past_due|timeout"):  # noqa: RUF043  alternatives
        Client("127.0.0.1:1", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("addresses", "options"),
    [
        ([7420], {}),
        ("a:1", {"timeout": "5"}),
        ("a:1", {"attempt_timeout": None}),
        ("a:1", {"queue": None}),
    ],
)
def test_options_of_other_types_are_refused_by_name(
    addresses: Any, options: dict[str, Any]
) -> None:
    name = next(iter(options), "addresses")
    with pytest.raises(TypeError, match=f"^{name} "):
        Client(addresses, **options)


def test_arguments_of_other_types_are_refused_before_anything_is_sent() -> None:
    with FakeService() as node, Client(node.address) as client:
        with pytest.raises(TypeError, match="class Message, not NoneType"):
            client.produce_many([Message("t", b"", delay=SOON), None])  # type: ignore[list-item]
        with pytest.raises(TypeError, match="timeout must be a number of seconds, not str"):
            client.produce("t", b"", delay=SOON, timeout="5")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="timeout nan"):
            client.produce("t", b"", delay=SOON, timeout=float("nan"))
    assert not node.sent


def test_the_sdk_is_light_and_the_wheel_needs_no_grpc() -> None:
    program = """
import sys
import delaywheel
assert "grpc" not in sys.modules
for name in delaywheel.__all__:
    getattr(delaywheel, name)
assert set(delaywheel.__all__) <= set(dir(delaywheel))
heavy = {"numpy", "confluent_kafka", "pyspark", "pyarrow", "pydantic", "delaywheel_replica"}
heavy |= {"delaywheel.trace", "opentelemetry"}
print(*sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


ASKED: Final = pb.DescribeClusterRequest()


def describe(
    stub: DelayWheelStub,
) -> "grpc.UnaryUnaryMultiCallable[pb.DescribeClusterRequest, pb.DescribeClusterResponse]":
    return stub.DescribeCluster


async def halved(number: int) -> int:
    if number % 2:
        raise ValueError(number)
    return number // 2


def test_a_coroutine_that_never_suspends_blocks() -> None:
    assert finished(halved(4)) == 2
    with pytest.raises(ValueError, match="3"):
        finished(halved(3))


def test_one_that_suspends_is_a_defect() -> None:
    ended = []

    async def suspends() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            ended.append(True)

    with pytest.raises(AssertionError, match="has suspended"):
        finished(suspends())
    assert ended


@pytest.mark.parametrize("count", [0, 1, 5])
def test_side_by_side_keeps_the_order(count: int) -> None:
    items = [number * 2 for number in range(count)]
    assert finished(ThreadTransport().side_by_side(halved, items, 2)) == list(range(count))


def closed_line() -> Line:
    line = ThreadTransport().open("127.0.0.1:1", Credentials(0, None))
    finished(line.close())
    return line


def test_nothing_is_sent_on_a_closed_line() -> None:
    call = closed_line().call(describe, ASKED, 1.0)
    answer = finished(call)
    assert isinstance(answer, AttemptFailure)
    assert answer.code is grpc.StatusCode.CANCELLED
    assert answer.unsent


def test_what_is_asked_on_a_closed_line_is_not_answered() -> None:
    async def then(answer: pb.DescribeClusterResponse | AttemptFailure) -> None:
        raise AssertionError(answer)

    closed_line().ask(describe, ASKED, 1.0, then)


@pytest.mark.parametrize(
    ("ahead_ms", "told"),
    [(3_600_000, r"3,(600|599) s behind"), (-60_000, "60 s ahead of"), (300, None)],
)
def test_a_clock_that_is_off_is_named_in_refusals_for_the_time_and_logged_once(
    ahead_ms: int, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    too_old, unknown = (
        refuse_rows({0: reason}) for reason in (Reason.DUE_TOO_OLD, Reason.TOPIC_UNKNOWN)
    )
    with FakeService(too_old, too_old, unknown) as service, Client(service.address) as client:
        service.ahead_ms = ahead_ms
        errors = [client.produce_many([Message("t", b"", delay=SOON)])[0].error for _ in range(3)]
    for error in errors[:2]:
        assert isinstance(error, RefusedError)
        assert error.reason is Reason.DUE_TOO_OLD
        if told is None:
            assert "clock" not in str(error)
        else:
            assert re.search(f"Scripted; the clock here is {told} the node's$", str(error))
    assert "clock" not in str(errors[2])
    logged = [record for record in caplog.records if "the clock here" in record.getMessage()]
    assert len(logged) == (told is not None)
