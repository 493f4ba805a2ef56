"""One healthy server process: every refusal, streams, queries and cancels."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
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
from delaywheel_replica.core.protocol.status_files import Role
from delaywheel_replica.link import AskTopic, CommitSoon, DeadLetter, TopicInfo
from delaywheel_replica.server.intake.known_topics import FRESH_FOR_MS
from support.server.server_process import ServerProcess, wait_until

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
    ("fields", "reason"),
    [
        ({"deliver_at_ms": 4_000_000_000_000}, Reason.DUE_BEYOND_SPAN),
        ({"deliver_at_ms": 1_000_000}, Reason.DUE_TOO_OLD),
        ({"topic": ""}, Reason.TOPIC_INVALID),
        ({"topic": "no spaces"}, Reason.TOPIC_INVALID),
        ({"topic": "delaywheel-test-control"}, Reason.TOPIC_INVALID),
        ({"topic": "nowhere"}, Reason.TOPIC_UNKNOWN),
        ({"value": bytes(2001)}, Reason.MESSAGE_TOO_LARGE),
        ({"topic": "small", "value": bytes(400)}, Reason.MESSAGE_TOO_LARGE),
        ({"headers": [pb.Header(name="dw-id", value=b"x")]}, Reason.HEADER_RESERVED),
        ({"headers": [pb.Header(name="", value=b"x")]}, Reason.HEADER_INVALID),
        ({"id": b"x"}, Reason.ID_INVALID),
        ({"id": bytes(16), "delay_ms": 5}, Reason.SENT_AT_MISSING),
        ({"level": "eternity"}, Reason.LEVEL_UNKNOWN),
        ({"delay_ms": 5, "level": "5s"}, Reason.DUE_AMBIGUOUS),
        ({"delay_ms": -5}, Reason.DELAY_INVALID),
        ({"partition": 3}, Reason.PARTITION_INVALID),
        ({"timestamp_ms": -5}, Reason.TIMESTAMP_INVALID),
    ],
    ids=lambda value: value.value if isinstance(value, Reason) else "",
)
def test_a_message_is_refused_by_name(
    server: ServerProcess, fields: dict[str, Any], reason: Reason
) -> None:
    server.cleaner.report_topics("nowhere")
    bad, good = server.produce(row(**fields), row())
    assert (bad.error.reason, bad.error.code) == (reason.value, reason.code_number)
    assert bad.handle == ""
    assert good.handle.startswith("n1.1:")


def test_a_message_without_a_due_is_refused(server: ServerProcess) -> None:
    (result,) = server.produce(pb.DelayedMessage(topic="orders"))
    assert result.error.reason == Reason.DUE_MISSING


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


def test_an_unknown_topic_is_accepted_when_nobody_can_say(server: ServerProcess) -> None:
    server.cleaner.answers_topics = False
    try:
        (result,) = server.produce(row(topic="in-doubt"))
    finally:
        server.cleaner.answers_topics = True
    assert result.handle


def test_absence_is_asked_for_once_and_forgotten_soon(server: ServerProcess) -> None:
    names = (f"later-{number}" for number in count())

    def asked_once() -> str | None:
        """The topic of the verdict, if all three came before it could be late or old."""
        name, began_s = next(names), time.monotonic()
        results = [server.produce(row(topic=name))[0] for _ in range(3)]
        if time.monotonic() - began_s >= FRESH_FOR_MS / 1000:
            return None
        assert {result.error.reason for result in results} == {Reason.TOPIC_UNKNOWN}
        assert server.cleaner.received.count(AskTopic(name)) == 1
        return name

    name = wait_until("three calls in a second", asked_once)
    server.cleaner.topics[name] = TopicInfo(1, None)
    wait_until("it is asked again", lambda: server.produce(row(topic=name))[0].handle)


def test_a_stream_answers_in_order(server: ServerProcess) -> None:
    requests = [
        pb.DelayProduceRequest(messages=[row(id=number.to_bytes(16, "big"), deliver_at_ms=due)])
        for number, due in enumerate([now_ms() + 30_000] * 200)
    ]
    answers = list(server.stub.DelayProduceStream(iter(requests), timeout=30))
    ids = [answer.results[0].handle.split(":")[2] for answer in answers]
    assert ids == [f"{number:032x}" for number in range(200)]


def test_a_columnar_request_gets_columnar_results(server: ServerProcess) -> None:
    dues = [now_ms() + 30_000, 5, now_ms() + 31_000]
    batch = pb.ColumnBatch(
        messages=3,
        ids=os.urandom(48),
        due_ms=b"".join(due.to_bytes(8, "little") for due in dues),
        topics=["orders"],
        topic_numbers=bytes(12),
        key_lengths=b"\xff" * 12,
        value_lengths=bytes(12),
        headers_lengths=bytes(12),
    )
    answer = server.stub.DelayProduce(pb.DelayProduceRequest(columns=batch), timeout=20)
    assert answer.columns.wheel == "n1.1"
    assert [(error.row, error.error.reason) for error in answer.columns.errors] == [
        (1, "DUE_TOO_OLD")
    ]
    stored = server.stub.GetMessage(
        pb.GetMessageRequest(
            message=pb.MessageRef(
                id_and_due=pb.IdAndDue(id=batch.ids[:16], due_ms=dues[0], topic=batch.topics[0])
            )
        ),
        timeout=20,
    ).message
    assert not stored.HasField("key")
    assert stored.HasField("value")
    assert stored.value == b""


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


def test_a_message_is_found_by_its_handle_and_by_id_and_due(server: ServerProcess) -> None:
    due = now_ms() + 100_000
    headers = [pb.Header(name="a", value=b"1"), pb.Header(name="a"), pb.Header(name="b", value=b"")]
    id_ = os.urandom(16)
    (result,) = server.produce(
        row(id=id_, key=b"", headers=headers, deliver_at_ms=due, partition=2, timestamp_ms=9)
    )
    by_handle, by_id = (
        server.stub.GetMessage(pb.GetMessageRequest(message=reference), timeout=20).message
        for reference in (
            pb.MessageRef(handle=result.handle),
            pb.MessageRef(id_and_due=pb.IdAndDue(id=id_, due_ms=due, topic="orders")),
        )
    )
    assert by_handle == by_id
    assert (by_id.id, by_id.due_ms, by_id.topic) == (id_, due, "orders")
    assert (by_id.partition, by_id.timestamp_ms) == (2, 9)
    assert by_id.HasField("key")
    assert (by_id.key, by_id.value, list(by_id.headers)) == (b"", b"v", headers)
    assert by_id.state == pb.MESSAGE_STATE_PENDING


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (pb.MessageRef(handle="n1.1:5"), Reason.HANDLE_INVALID),
        (pb.MessageRef(), Reason.HANDLE_AMBIGUOUS),
        (pb.MessageRef(id_and_due=pb.IdAndDue(id=b"x", due_ms=5, topic="t")), Reason.ID_INVALID),
        (pb.MessageRef(id_and_due=pb.IdAndDue(id=bytes(16), due_ms=5)), Reason.TOPIC_INVALID),
        (
            pb.MessageRef(id_and_due=pb.IdAndDue(id=bytes(16), due_ms=-5, topic="t")),
            Reason.DUE_INVALID,
        ),
        (pb.MessageRef(handle=f"n1.1:5:{0:032x}"), Reason.HANDLE_INVALID),
        (pb.MessageRef(handle=f"n1.1:5:{0:032x}:t"), Reason.MESSAGE_NOT_FOUND),
    ],
    ids=lambda value: value.value if isinstance(value, Reason) else "",
)
def test_what_cannot_be_found_is_named(
    server: ServerProcess, reference: pb.MessageRef, reason: Reason
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.stub.GetMessage(pb.GetMessageRequest(message=reference), timeout=20)
    assert status_of(caught.value)[:2] == (reason.code, reason.value)


def test_slots_and_their_messages_are_listed_page_by_page(server: ServerProcess) -> None:
    slot = now_ms() // 1000 + 400
    ids = [number.to_bytes(16, "big") for number in range(1, 8)]
    for id_ in ids:
        server.produce(row(id=id_, deliver_at_ms=slot * 1000 + 5))
    listed = server.stub.ListSlots(pb.ListSlotsRequest(from_slot=slot, to_slot=slot + 1))
    assert [(row.slot, row.messages, row.frames, row.wheels) for row in listed.slots] == [
        (slot, 7, 7, 1)
    ]
    assert listed.node == "n1"
    found, token = [], ""
    while True:
        page = server.stub.GetSlot(pb.GetSlotRequest(slot=slot, page_size=3, page_token=token))
        found += [message.id for message in page.messages]
        assert not page.messages[0].HasField("value")
        token = page.next_page_token
        if not token:
            break
    assert found == ids
    with_content = server.stub.GetSlot(pb.GetSlotRequest(slot=slot, with_content=True))
    assert with_content.messages[0].value == b"v"


def test_a_long_list_of_slots_says_where_it_goes_on(server: ServerProcess) -> None:
    slot = now_ms() // 1000 + 500
    server.produce(*[row(deliver_at_ms=(slot + number) * 1000) for number in range(5)])
    listed = server.stub.ListSlots(pb.ListSlotsRequest(from_slot=slot, limit=3))
    assert [row.slot for row in listed.slots] == [slot, slot + 1, slot + 2]
    assert listed.next_slot == slot + 3


def test_seconds_are_summed(server: ServerProcess) -> None:
    slot = (now_ms() // 60_000 + 30) * 60  # no other test's seconds are as far ahead
    server.produce(*[row(deliver_at_ms=(slot + number * 20) * 1000) for number in range(5)])
    request = pb.ListSlotsRequest(
        from_slot=slot, to_slot=slot + 180, bucket_seconds=60, all_members=True, limit=1
    )
    listed = server.stub.ListSlots(request)
    assert [(row.slot, row.messages) for row in listed.slots] == [(slot, 3)]
    assert (listed.next_slot, listed.bucket_seconds) == (slot + 60, 60)
    request.from_slot = listed.next_slot
    assert [(row.slot, row.messages) for row in server.stub.ListSlots(request).slots] == [
        (slot + 60, 2)
    ]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (pb.GetSlotRequest(slot=0), Reason.SLOT_INVALID),
        (pb.GetSlotRequest(slot=5, page_token="?"), Reason.PAGE_TOKEN_INVALID),
    ],
)
def test_a_page_that_cannot_be_is_refused(
    server: ServerProcess, request_: pb.GetSlotRequest, reason: Reason
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.stub.GetSlot(request_, timeout=20)
    assert status_of(caught.value)[1] == reason.value


def cancel(server: ServerProcess, handle: str, timeout: float = 20) -> int:
    request = pb.CancelRequest(messages=[pb.MessageRef(handle=handle)])
    return server.stub.Cancel(request, timeout=timeout).results[0].outcome


def test_cancelled_is_said_once_a_transaction_has_taken_the_cancel(server: ServerProcess) -> None:
    (result,) = server.produce(row())
    request = pb.CancelRequest(messages=[pb.MessageRef(handle=result.handle)])
    before = server.cleaner.received.count(CommitSoon())
    waiting = server.stub.Cancel.future(request, timeout=20)
    wait_until(
        "a commit is asked for", lambda: server.cleaner.received.count(CommitSoon()) > before
    )
    assert not waiting.done()

    def taken() -> bool:
        """What a node says of its wheels may be 0.25 s old."""
        server.cleaner.commit_progress(seqs=written(server))
        return bool(waiting.done())

    wait_until("it is answered", taken)
    assert waiting.result().results[0].outcome == pb.CANCEL_OUTCOME_CANCELLED
    # And again: the cancel lies there, and counts.
    assert cancel(server, result.handle) == pb.CANCEL_OUTCOME_CANCELLED
    got = server.stub.GetMessage(pb.GetMessageRequest(message=request.messages[0]))
    assert got.message.state == pb.MESSAGE_STATE_CANCELLED


def written(server: ServerProcess) -> dict[WheelId, int]:
    """The last seq of each wheel, now."""
    return {WheelId.parse(row.wheel): row.applied_seq for row in server.describe().wheels}


def test_a_cancel_that_nobody_could_mean_is_not_found(server: ServerProcess) -> None:
    assert cancel(server, f"n1.1:5:{7:032x}:orders") == pb.CANCEL_OUTCOME_NOT_FOUND


def test_a_cancel_just_before_the_due_is_too_late(server: ServerProcess) -> None:
    (result,) = server.produce(row(deliver_at_ms=now_ms() + 20))
    assert cancel(server, result.handle) == pb.CANCEL_OUTCOME_TOO_LATE


def test_a_cancel_after_delivery_says_so(server: ServerProcess) -> None:
    due = now_ms() + 1
    (result,) = server.produce(row(deliver_at_ms=due))
    seqs = written(server)
    wait_until("it is due", lambda: now_ms() > due)
    server.cleaner.commit_progress(due_ms=due, seqs=seqs)
    wait_until(
        "delivered", lambda: cancel(server, result.handle) == pb.CANCEL_OUTCOME_ALREADY_DELIVERED
    )
    assert state_of(server, result.handle) == (pb.MESSAGE_STATE_DELIVERED, "")


def state_of(server: ServerProcess, handle: str) -> tuple[int, str]:
    """The server's answer about a message: its state, and why it is a dead letter."""
    request = pb.GetMessageRequest(message=pb.MessageRef(handle=handle))
    message = server.stub.GetMessage(request, timeout=20).message
    return message.state, message.dead_reason


def test_a_dead_letter_is_distinguished_from_what_was_delivered_and_from_what_is_not_known(
    server: ServerProcess,
) -> None:
    due = now_ms() + 1
    results = server.produce(*(row(deliver_at_ms=due) for _ in range(3)))
    ids = [bytes.fromhex(result.handle.split(":")[2]) for result in results]
    dead = DeadLetter(ids[0], due, "orders", "TOPIC_MISSING")
    server.cleaner.commit_dead(dead, due_ms=due, seqs=written(server))
    expected = [(pb.MESSAGE_STATE_DEAD_LETTERED, "TOPIC_MISSING")]
    expected += [(pb.MESSAGE_STATE_DELIVERED, "")] * 2
    wait_until(
        "the row is read",
        lambda: [state_of(server, result.handle) for result in results] == expected,
    )
    page = server.stub.GetSlot(pb.GetSlotRequest(slot=due // 1000), timeout=20)
    reported = {message.id: (message.state, message.dead_reason) for message in page.messages}
    assert [reported[id_] for id_ in ids] == [expected[0], *[(pb.MESSAGE_STATE_DONE, "")] * 2]
    # The link was full: what was done meanwhile may be a dead letter or not.
    due = now_ms() + 1
    (result,) = server.produce(row(deliver_at_ms=due))
    server.cleaner.commit_dead(
        DeadLetter(bytes(16), due, "orders", "REFUSED"),
        reported=False,
        due_ms=due,
        seqs=written(server),
    )
    wait_until("it is done", lambda: state_of(server, result.handle)[0] == pb.MESSAGE_STATE_DONE)


def test_what_lies_below_the_floor_is_not_there_any_more(tmp_path: Path) -> None:
    """Its row in the index outlives its file; answering "ask again" would never end."""
    with ServerProcess(tmp_path / "n1", late_window_seconds="1") as server:
        server.wait_accepting()

        def taken() -> pb.ProduceResult | None:
            """A message that is due now, unless it came too late."""
            (result,) = server.produce(row(deliver_at_ms=now_ms()))
            return result if result.handle else None

        result = wait_until("it is taken", taken)
        slot = result.due_ms // 1000
        wait_until("it is sealed", lambda: now_ms() // 1000 > slot + 1)
        server.cleaner.commit_progress(floor=slot + 1)
        wait_until("its file is gone", lambda: not list(server.data.rglob(f"{slot}.slot")))
        assert cancel(server, result.handle) == pb.CANCEL_OUTCOME_TOO_LATE
        with pytest.raises(grpc.RpcError) as caught:
            server.stub.GetMessage(
                pb.GetMessageRequest(message=pb.MessageRef(handle=result.handle)), timeout=10
            )
        assert status_of(caught.value)[1] == "MESSAGE_NOT_FOUND"
        # A look-up there all the same finds nothing, and no fault of the wheel.
        page = server.stub.GetSlot(pb.GetSlotRequest(slot=slot), timeout=10)
        assert not page.messages
        assert server.produce(row())[0].handle.startswith("n1.1:")


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


def test_without_a_leader_nothing_is_withdrawn(server: ServerProcess) -> None:
    (result,) = server.produce(row())
    server.cleaner.role = Role.STANDBY
    try:
        wait_until("no leader", lambda: not server.describe().HasField("leader"))
        with pytest.raises(grpc.RpcError) as caught:
            cancel(server, result.handle)
    finally:
        server.cleaner.role = Role.LEADING
    assert status_of(caught.value)[:2] == (grpc.StatusCode.UNAVAILABLE, "NO_LEADER")
    wait_until("a leader", lambda: server.describe().HasField("leader"))


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


def test_a_missing_second_member_is_reported_by_name(tmp_path: Any) -> None:
    server = ServerProcess(tmp_path / "n1")

    def prepare(cleaner: Any) -> None:
        cleaner.members = {"n2": "storage-2"}
        cleaner.min_insync = 2

    server.start(prepare=prepare)
    try:
        wait_until("it has a wheel", lambda: server.describe().wheels)
        wait_until("it says so", lambda: "NOT_ENOUGH_REPLICAS" in _refusal(server))
        assert _refusal(server) == (grpc.StatusCode.UNAVAILABLE, "NOT_ENOUGH_REPLICAS")
        assert not server.describe().members[0].accepting
    finally:
        server.kill()


def _refusal(server: ServerProcess) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        server.produce(row())
    return status_of(caught.value)[:2]


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


def test_a_replaced_storage_gets_no_wheel(tmp_path: Any) -> None:
    server = ServerProcess(tmp_path / "n1")
    server.start()
    try:
        server.wait_accepting()
        server.kill()
        wheels = server.cleaner.state.wheels  # no spare comes any more
        other = ServerProcess(tmp_path / "emptied")
        other.cleaner = server.cleaner  # the control topic stays
        other.start()
        try:
            assert other.cleaner.state.wheels == wheels
            with pytest.raises(grpc.RpcError, match="no open wheel"):
                other.produce(row())
            assert replace(other.cleaner.state, progress=None).wheels == wheels
        finally:
            other.kill()
    finally:
        server.kill()
