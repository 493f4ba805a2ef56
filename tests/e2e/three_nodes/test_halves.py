"""A half is released by the node that has it, whichever node hears that it is committed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import grpc
import pytest

from delaywheel.message import Handle
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelStub
from local.loopback.kafka import KafkaBroker
from local.loopback.node import Node
from support.kafka.read_committed import CommittedReader
from support.services.trio import Trio, in_sync_changes, send
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka

HOLD_MS = 9_500


def begun(node: Node, topic: str) -> pb.HalfRef:
    """Begins a half at a node, and returns what it is committed by."""
    message = pb.DelayedMessage(
        id=uuid.uuid4().bytes,
        topic=topic,
        headers=[pb.Header(name="dw-half", value=b"shop")],
        deliver_at_ms=time.time_ns() // 1_000_000 + HOLD_MS,
    )
    (handle,) = send(node, message)  # again until all nodes know halves
    wheel = Handle.parse(handle).wheel
    return pb.HalfRef(id=message.id, due_ms=message.deliver_at_ms, wheel=wheel, topic=topic)


def states(stub: DelayWheelStub, half: pb.HalfRef) -> tuple[str, set[str]]:
    """The state of a half by its name, and the states that a search for its id finds."""
    key = pb.IdAndDue(id=half.id, due_ms=half.due_ms, topic=half.topic)
    named = pb.MessageRef(id_and_due=key)
    got = stub.GetMessage(pb.GetMessageRequest(message=named, find_place=True)).message
    found = stub.Search(pb.SearchRequest(filter=pb.Filter(id=half.id))).messages
    listed = {pb.MessageState.Name(each.state) for each in found}
    return pb.MessageState.Name(got.state), listed


def test_a_commit_goes_to_the_node_that_has_the_half(
    trio: Trio, kafka: KafkaBroker, new_topic: Callable[..., str]
) -> None:
    trio.wait("it has it at once", lambda: is_delivered_at_once(trio, kafka, new_topic()))


def is_delivered_at_once(trio: Trio, kafka: KafkaBroker, topic: str) -> bool:
    """Whether a half is that another node commits; if not, its own was missed meanwhile."""
    first, second, _ = trio.nodes
    with (
        grpc.insecure_channel(first.address) as one,
        grpc.insecure_channel(second.address) as other,
        CommittedReader(kafka.address, topic) as reader,
    ):
        begun(second, topic)  # that node knows halves then; nobody commits this one
        half = begun(first, topic)
        held = "MESSAGE_STATE_HELD"
        assert states(DelayWheelStub(one), half) == (held, {held})
        trio.wait_in_sync()
        changes = in_sync_changes(second)
        (result,) = DelayWheelStub(other).Commit(pb.CommitRequest(halves=[half])).results
        assert result.outcome == pb.COMMIT_OUTCOME_COMMITTED
        reader.wait_for(1)
        if reader.messages[0].timestamp()[1] >= half.due_ms - 1_000:
            # At the end of its hold: a node that is away does not hear of the commit.
            trio.wait("it was away then", lambda: in_sync_changes(second) > changes)
            return False
        delivered = "MESSAGE_STATE_DELIVERED", set[str]()
        # The node hears from the leader how far forwarding is.
        wait_until("it is known", lambda: states(DelayWheelStub(one), half) == delivered)
        return True
