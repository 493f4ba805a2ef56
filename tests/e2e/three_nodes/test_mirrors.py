"""Three healthy nodes: acknowledged messages are on all, and each node can answer for all."""

from __future__ import annotations

import uuid
from functools import partial

import pytest

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from local.loopback.kafka import KafkaBroker
from local.loopback.node import Node
from support.kafka.read_committed import CommittedReader
from support.services.trio import Trio, cancelled, in_sync_changes, row, send, slot_file

pytestmark = pytest.mark.kafka


def test_an_acknowledged_message_is_in_three_identical_slot_files(trio: Trio, topic: str) -> None:
    """Checked right after the answer: no caller waits for the mirrors."""
    for origin in trio.nodes:
        trio.wait("all were there", partial(are_identical, trio, origin, topic))
    trio.wait("everything is the same on all", trio.same_bytes)


def are_identical(trio: Trio, origin: Node, topic: str) -> bool:
    """Whether all nodes hold what was just acknowledged; if not, one was out of sync meanwhile."""
    trio.wait_in_sync()
    changes = in_sync_changes(origin)
    values = [uuid.uuid4().hex.encode() for _ in range(50)]
    rows = [row(topic, value, delay_s=600 + n % 7) for n, value in enumerate(values)]
    handles = send(origin, *rows)
    found = [[slot_file(node, handle) for node in (origin, *trio.nodes)] for handle in handles]
    for value, handle, (own, *_) in zip(values, handles, found, strict=True):
        assert handle.startswith(f"{origin.id}.")
        assert value in own
    if all(len(set(contents)) == 1 for contents in found):
        return True
    # A node that is paused for a second is no longer waited for: nothing else excuses it.
    trio.wait("others were in sync then", lambda: in_sync_changes(origin) > changes)
    return False


def test_the_same_id_to_another_node_before_and_after_delivery(
    trio: Trio, kafka: KafkaBroker, topic: str
) -> None:
    first, second, third = trio.nodes
    message = row(topic, b"once", delay_s=2)
    with CommittedReader(kafka.address, topic) as reader:
        handles = send(first, message) + send(second, message)
        assert [handle.split(".")[0] for handle in handles] == ["n1", "n2"], "taken twice"
        reader.wait_for(1)
        # Within the late window a retry is taken, and dropped: the caller learns that it is safe.
        assert send(third, message)
        send(third, row(topic, b"marker", delay_s=0.2))
        reader.wait_for(2)
        assert [m.value() for m in reader.read_to_end()] == [b"once", b"marker"]


def test_a_cancel_at_any_node_reaches_the_leader(
    trio: Trio, kafka: KafkaBroker, topic: str
) -> None:
    origin = trio.nodes[0]
    with CommittedReader(kafka.address, topic) as reader:
        for asked in trio.nodes:
            (handle,) = send(origin, row(topic, b"gone", delay_s=10))
            outcome = trio.wait("it is answered", partial(cancelled, asked, handle))
            assert outcome == pb.CANCEL_OUTCOME_CANCELLED, asked.id
        send(origin, row(topic, b"stays", delay_s=10.5))
        reader.wait_for(1)
        assert [m.value() for m in reader.read_to_end()] == [b"stays"]
