"""A cancelled message is never delivered; a late cancel is answered as late.

Half messages are delivered at their commit, and not before; without a word their group is asked.
"""

from __future__ import annotations

import re
import time
import uuid
from datetime import UTC, datetime, timedelta

import grpc
import pytest

from delaywheel import CancelOutcome, MessageState, RefusedError, TimedOutError
from delaywheel.headers import decode_headers
from delaywheel.reasons import Reason
from delaywheel.transactions import CommitOutcome
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelStub
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import CommittedReader, headers_of
from support.services.service import Service, wait_until

pytestmark = pytest.mark.kafka

AHEAD_S = 10
"""A cancel takes some milliseconds; on a busy machine it may take until a node leads again."""


def test_before_the_due(service: Service, kafka: KafkaBroker, topic: str) -> None:
    """By handle, and by id and due: the same message sent again is refused."""
    own_id = uuid.uuid4().bytes
    due = datetime.now(UTC) + timedelta(seconds=AHEAD_S)
    with service.client() as client, CommittedReader(kafka.address, topic) as reader:
        gone = client.produce(topic, b"gone", deliver_at=due)
        client.produce(topic, b"gone by id", deliver_at=due, id=own_id)
        assert client.cancel(gone).outcome is CancelOutcome.CANCELLED
        assert client.cancel(gone).outcome is CancelOutcome.CANCELLED, (
            "asked again: the same answer"
        )
        assert client.cancel(topic=topic, id=own_id, due=due).outcome is CancelOutcome.CANCELLED
        with pytest.raises(RefusedError, match="ID_CANCELLED"):
            client.produce(topic, b"gone by id", deliver_at=due, id=own_id)
        client.produce(topic, b"stays", deliver_at=due + timedelta(milliseconds=300))
        reader.wait_for(1)
        assert [m.value() for m in reader.read_to_end()] == [b"stays"]


def test_after_the_due(service: Service, kafka: KafkaBroker, topic: str) -> None:
    epoch = service.status().leader.epoch
    with service.client() as client, CommittedReader(kafka.address, topic) as reader:
        handle = client.produce(topic, b"v", delay=timedelta(milliseconds=200))
        reader.wait_for(1)
        answers: list[CancelOutcome] = []

        def is_known() -> bool:
            answers.append(client.cancel(handle).outcome)
            return answers[-1] is CancelOutcome.ALREADY_DELIVERED

        wait_until("the node learns of the delivery", is_known)
        assert set(answers) <= {CancelOutcome.TOO_LATE, CancelOutcome.ALREADY_DELIVERED}
        stored = client.get(handle)
        assert stored is not None
        # A later leader knows only that it is done, unless it has delivered it itself.
        if service.status().leader.epoch == epoch or stored.state is not MessageState.DONE:
            assert stored.state is MessageState.DELIVERED


def test_near_the_due(service: Service, kafka: KafkaBroker, topic: str) -> None:
    """Whatever the answer, it is true: CANCELLED never arrives, all else does.

    A node so busy that it sees one commit with both the cancel and the due in it cannot tell which
    came first, and says so.
    """
    wanted = {CancelOutcome.TOO_LATE, CancelOutcome.CANCELLED}
    unknown: set[bytes] = set()
    with service.client() as client, CommittedReader(kafka.address, topic) as reader:
        answers: dict[bytes, CancelOutcome] = {}
        ahead = timedelta(milliseconds=80)
        # On a busy machine both answers are given only for dues that are further ahead.
        while len(answers) < 40 or not wanted <= set(answers.values()):
            assert ahead < timedelta(seconds=15), answers
            value = b"%d" % (len(answers) + len(unknown))
            handle = client.produce(topic, value, delay=ahead)
            try:
                answers[value] = client.cancel(handle, timeout=10).outcome
            except (RefusedError, TimedOutError) as error:
                if error.outcome_known:
                    raise
                unknown.add(value)
            assert len(unknown) <= 3
            ahead += timedelta(milliseconds=5)
        client.produce(topic, b"marker", delay=ahead)
        while b"marker" not in {m.value() for m in reader.messages}:
            reader.wait_for(len(reader.messages) + 1)
        arrived = {m.value() for m in reader.read_to_end()} - {b"marker"}
    assert arrived - unknown == {v for v, a in answers.items() if a is not CancelOutcome.CANCELLED}


def test_unknown(service: Service) -> None:
    with service.client() as client:
        outcome = client.cancel(
            topic="orders", id=uuid.uuid4().bytes, due=datetime.now(UTC) + timedelta(seconds=30)
        ).outcome
        assert outcome is CancelOutcome.NOT_FOUND


LONG_MS, SHORT_MS = 9_500, 1_500


def half(topic: str, hold_ms: int, value: bytes) -> pb.DelayedMessage:
    return pb.DelayedMessage(
        id=uuid.uuid4().bytes,
        topic=topic,
        value=value,
        headers=[pb.Header(name="dw-half", value=b"shop")],
        deliver_at_ms=time.time_ns() // 1_000_000 + hold_ms,
    )


def begun(stub: DelayWheelStub, *halves: pb.DelayedMessage) -> None:
    """Begins halves; the first one waits until the leader has seen that all nodes know them."""

    def accepted() -> bool:
        results = stub.DelayProduce(pb.DelayProduceRequest(messages=halves)).results
        return not any(result.error.reason for result in results)

    wait_until("the halves are accepted", accepted)


def name_of(half: pb.DelayedMessage) -> pb.MessageRef:
    named = pb.IdAndDue(id=half.id, due_ms=half.deliver_at_ms, topic=half.topic)
    return pb.MessageRef(id_and_due=named)


def half_ref(message: pb.DelayedMessage) -> pb.HalfRef:
    return pb.HalfRef(id=message.id, due_ms=message.deliver_at_ms, topic=message.topic)


def test_a_committed_half_is_delivered_at_once_and_another_is_asked_about(
    service: Service, kafka: KafkaBroker, topic: str
) -> None:
    """By plain calls, as of programs in other languages."""
    letters = f"delaywheel-{service.cluster_id}-halves"
    with (
        grpc.insecure_channel(service.address) as channel,
        CommittedReader(kafka.address, topic) as reader,
        CommittedReader(kafka.address, letters) as asked,
    ):
        stub = DelayWheelStub(channel)
        begun(stub, half(topic, SHORT_MS, b"the first waits for the leader"))
        committed, left = half(topic, LONG_MS, b"committed"), half(topic, SHORT_MS, b"left")
        begun(stub, committed, left)
        moved = pb.NewDue(message=name_of(committed), deliver_at_ms=committed.deliver_at_ms + 1000)
        with pytest.raises(grpc.RpcError, match=re.escape(Reason.HALF_KEEPS_DUE.advice)):
            stub.Reschedule(pb.RescheduleRequest(messages=[moved]))
        (told,) = stub.Commit(pb.CommitRequest(halves=[half_ref(committed)])).results
        assert told.outcome == pb.COMMIT_OUTCOME_COMMITTED
        reader.wait_for(1)
        (first,) = reader.messages
        assert first.value() == b"committed"
        assert first.timestamp()[1] < committed.deliver_at_ms - 2_000, "not at the end of its hold"
        assert not any(name.startswith("dw-half") for name, _ in headers_of(first))
        wait_until("its group is asked", lambda: b"left" in asked_about(asked, topic))
        question = pb.GetMessageRequest(message=name_of(left))

        def state() -> pb.MessageState.ValueType:
            return stub.GetMessage(question).message.state

        wait_until("the node learns of the letter", lambda: state() != pb.MESSAGE_STATE_HELD)
        assert state() == pb.MESSAGE_STATE_ASKED
        (late,) = stub.Commit(pb.CommitRequest(halves=[half_ref(left)])).results
        assert late.outcome == pb.COMMIT_OUTCOME_LEFT_TO_CHECK
        assert len(reader.read_to_end()) == 1


def asked_about(letters: CommittedReader, topic: str) -> set[bytes | None]:
    """The halves for a topic about which groups were asked: other tests have theirs."""
    found = letters.read_to_end()
    return {m.value() for m in found if dict(headers_of(m))["dw-half-topic"] == topic.encode()}


def test_a_half_with_a_delay_is_delivered_at_its_due(
    service: Service, kafka: KafkaBroker, topic: str
) -> None:
    """By the SDK. What its block raises leaves it to the check; a rollback or cancel drops it."""
    with service.client() as client, CommittedReader(kafka.address, topic) as reader:
        with client.begin(topic, b"delayed", group="shop", hold="9s", delay="5s") as delayed:
            own_due = dict(decode_headers(delayed.message.encoded_headers))["dw-half-deliver-at"]
            delayed.commit()
        assert delayed.outcome is CommitOutcome.COMMITTED
        with client.begin(topic, b"gone", group="shop", hold="9s") as gone:
            gone.rollback()
        cancelled = client.begin(topic, b"cancelled", group="shop", hold="9s")
        client.cancel(cancelled.handle)
        assert cancelled.commit() is CommitOutcome.ROLLED_BACK
        with pytest.raises(KeyError), client.begin(topic, b"left", group="shop", hold="3s"):
            raise KeyError
        reader.wait_for(1)
        (record,) = reader.messages
        headers = dict(headers_of(record))
        assert (headers["dw-id"], headers["dw-due"]) == (delayed.id.hex().encode(), own_due)
        assert record.timestamp()[1] >= int(own_due or 0)
        assert len(reader.read_to_end()) == 1
