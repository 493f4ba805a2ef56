"""One healthy server process: statuses of calls, streams, and what a node alone can show.

Each question, reason and outcome of the protocol, tests/client/table asks of a node.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.link import AskTopic, TopicInfo
from support.server.server_process import ServerProcess
from support.services.waiting import wait_until

SETTINGS = {
    "span_seconds": "3600",
    "late_window_seconds": "20",
    "max_message_bytes": "2000",
    "max_request_messages": "50",
    "max_request_bytes": "60000",
    "max_caller_in_flight_bytes": "60000",
    "max_in_flight_bytes": "70000",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server") / "n1", **SETTINGS) as running:
        running.cleaner.topics = {"orders": TopicInfo(3, 1_000_000), "small": TopicInfo(1, 500)}
        running.wait_accepting()
        running.wait_spare()
        yield running


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def row(**fields: Any) -> pb.DelayedMessage:
    message = {"topic": "orders", "value": b"v", **fields}
    if not {"deliver_at_ms", "delay_ms", "level"} & message.keys():
        message["delay_ms"] = 60_000
    return pb.DelayedMessage(**message)


def status_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, str, str, int | None]:
    """Code, reason, domain and retry delay of a call's end."""
    call = cast("grpc.Call", error)  # whatever a stub raises is both
    details = dict(call.trailing_metadata() or ())
    status = status_pb2.Status.FromString(details["grpc-status-details-bin"])
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    delay = None
    if len(status.details) > 1:
        assert status.details[1].Unpack(retry)
        delay = retry.retry_delay.ToMilliseconds()
    assert status.code == call.code().value[0]
    return call.code(), info.reason, info.domain, delay


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (pb.DelayProduceRequest(), Reason.REQUEST_MALFORMED),
        (pb.DelayProduceRequest(messages=[row()] * 51), Reason.TOO_MANY_MESSAGES),
        (pb.DelayProduceRequest(messages=[row(value=bytes(60_000))]), Reason.REQUEST_TOO_LARGE),
        (
            pb.DelayProduceRequest(columns=pb.ColumnBatch(messages=2)),
            Reason.REQUEST_MALFORMED,
        ),
    ],
    ids=lambda value: value.value if isinstance(value, Reason) else "",
)
def test_a_request_is_refused_as_the_status_of_the_call(
    server: ServerProcess, request_: pb.DelayProduceRequest, reason: Reason
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.stub.DelayProduce(request_, timeout=20)
    assert status_of(caught.value) == (reason.code, reason.value, "delaywheel", None)
    # On a stream it is an answer, and the stream continues.
    good = pb.DelayProduceRequest(messages=[row()])
    answers = list(server.stub.DelayProduceStream(iter([request_, good]), timeout=20))
    assert answers[0].error.reason == reason
    assert answers[1].results[0].handle


def test_a_stream_answers_in_order(server: ServerProcess) -> None:
    requests = [
        pb.DelayProduceRequest(messages=[row(id=number.to_bytes(16, "big"), deliver_at_ms=due)])
        for number, due in enumerate([now_ms() + 30_000] * 200)
    ]
    answers = list(server.stub.DelayProduceStream(iter(requests), timeout=30))
    ids = [answer.results[0].handle.split(":")[2] for answer in answers]
    assert ids == [f"{number:032x}" for number in range(200)]


def test_too_much_in_flight_is_backpressure(server: ServerProcess) -> None:
    # One request waits for the word on its topics; another finds its caller's bound reached.
    server.cleaner.answers_topics = False
    names = (f"slow-{number}" for number in count())

    def refused() -> grpc.RpcError | None:
        """The reason, if the first one was not answered before the second one came."""
        topics = [next(names) for _ in range(20)]
        waits = [row(topic=topic, value=bytes(1900)) for topic in topics]
        waiting = server.stub.DelayProduce.future(pb.DelayProduceRequest(messages=waits))
        wait_until("it waits", lambda: AskTopic(topics[-1]) in server.cleaner.received)
        found = None
        try:
            server.produce(*[row(value=bytes(1900))] * 20)
        except grpc.RpcError as error:
            found = error
        assert all(result.handle for result in waiting.result(60).results)
        return found

    try:
        code, reason, _, delay = status_of(wait_until("backpressure", refused))
    finally:
        server.cleaner.answers_topics = True
    assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "BACKPRESSURE")
    assert delay


def test_a_stream_waits_where_a_call_would_be_refused(server: ServerProcess) -> None:
    request = pb.DelayProduceRequest(messages=[row(value=bytes(1900))] * 20)
    answers = server.stub.DelayProduceStream(iter([request] * 30), timeout=60)
    assert all(len(answer.results) == 20 for answer in answers)


def test_a_long_list_of_slots_says_where_it_goes_on(server: ServerProcess) -> None:
    slot = now_ms() // 1000 + 500
    server.produce(*[row(deliver_at_ms=(slot + number) * 1000) for number in range(5)])
    listed = server.stub.ListSlots(pb.ListSlotsRequest(from_slot=slot, limit=3))
    assert [row.slot for row in listed.slots] == [slot, slot + 1, slot + 2]
    assert listed.next_slot == slot + 3


def test_a_damaged_frame_that_somebody_comes_upon_ends_its_wheel(tmp_path: Path) -> None:
    """An origin that cannot serve a frame of its own opens its spare; the leader learns of it."""
    with ServerProcess(tmp_path / "n1") as server:
        server.wait_accepting()
        (result,) = server.produce(row())
        slot = int(result.handle.split(":")[1])
        (file,) = server.data.rglob(f"{slot}.slot")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        assert not server.stub.GetSlot(pb.GetSlotRequest(slot=slot), timeout=10).messages
        # What all lack is committed as lost, and is no longer reported.
        wait_until("it is reported", lambda: server.cleaner.state.lost == {(WheelId("n1", 1), 1)})
        wait_until("the spare is open", lambda: _wheel_of(server).startswith("n1.2:"))


def _wheel_of(server: ServerProcess) -> str:
    try:
        return str(server.produce(row())[0].handle)
    except grpc.RpcError:
        return ""


def test_the_cluster_is_described(server: ServerProcess) -> None:
    answer = server.describe()
    assert (answer.cluster_id, answer.node, answer.min_insync) == ("test", "n1", 1)
    assert (answer.leader.node, answer.leader.epoch) == ("n1", 7)
    (member,) = answer.members
    assert (member.address, member.accepting, member.complete) == (server.address, True, True)
    states = {wheel.wheel: wheel.state for wheel in answer.wheels}
    assert states == {"n1.1": pb.WHEEL_STATE_OPEN, "n1.2": pb.WHEEL_STATE_SPARE}
    assert answer.limits.max_message_bytes == 2000
    assert {level.name: level.delay_ms for level in answer.levels}["1m"] == 60_000


def test_health_and_reflection_are_there(server: ServerProcess) -> None:
    assert server.address is not None
    with grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="delaywheel.v1.DelayWheel")
        wait_until(
            "healthy",
            lambda: health.Check(request).status == health_pb2.HealthCheckResponse.SERVING,
        )
        for version in ("v1", "v1alpha"):
            ask = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                reflection_pb2.ServerReflectionRequest.SerializeToString,
                reflection_pb2.ServerReflectionResponse.FromString,
            )
            (answer,) = ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            names = [service.name for service in answer.list_services_response.service]
            assert {"delaywheel.v1.DelayWheel", "delaywheel.v1.DelayWheelAdmin"} <= {*names}
            questions = [
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
                for name in names
            ]
            answers = list(ask(iter(questions)))
            assert all(answer.HasField("file_descriptor_response") for answer in answers)


def test_a_disk_at_its_reserve_refuses_by_name(tmp_path: Any) -> None:
    with ServerProcess(tmp_path / "n1", disk_reserve_bytes=str(1 << 60)) as server:
        with pytest.raises(grpc.RpcError) as caught:
            server.produce(row())
        code, reason, _, delay = status_of(caught.value)
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "DISK_FULL")
        assert delay


def test_without_a_wheel_the_reason_of_kafka_is_reported(tmp_path: Any) -> None:
    server = ServerProcess(tmp_path / "n1")

    def prepare(cleaner: Any) -> None:
        cleaner.registers = False
        cleaner.kafka_error = "brokers are on holiday"

    server.start(prepare=prepare)
    try:
        wait_until("the row is read", lambda: server.describe().HasField("leader"))
        with pytest.raises(grpc.RpcError, match="holiday") as caught:
            server.produce(row())
        assert status_of(caught.value)[:2] == (grpc.StatusCode.UNAVAILABLE, "NO_WHEEL")
        assert not server.describe().members[0].accepting
    finally:
        server.kill()


def test_where_topics_are_created_none_is_refused(tmp_path: Any) -> None:
    with ServerProcess(tmp_path / "n1", create_topics="true") as server:
        server.wait_accepting()
        (result,) = server.produce(row(topic="brand-new"))
        assert result.handle
        assert AskTopic("brand-new") not in server.cleaner.received
