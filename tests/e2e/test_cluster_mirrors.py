"""Three healthy nodes: what is acknowledged lies on all, and each of them stands for all."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from local.kafka import KafkaBroker
from support.read_committed import CommittedReader
from support.trio import Trio, row, send, slot_file, stub_of

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def trio(kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    folder = tmp_path_factory.mktemp("mirrors") / "cluster"
    with Trio(kafka.address, folder, f"t{uuid.uuid4().hex[:12]}") as running:
        running.wait_in_sync()
        yield running


def test_an_acknowledged_message_is_in_three_identical_slot_files(trio: Trio, topic: str) -> None:
    """Looked at right after the answer: nobody waits for the mirrors."""
    for origin in trio.nodes:
        values = [uuid.uuid4().hex.encode() for _ in range(50)]
        rows = [row(topic, value, delay_s=600 + n % 7) for n, value in enumerate(values)]
        for value, handle in zip(values, send(origin, *rows), strict=True):
            assert handle.startswith(f"{origin.id}.")
            contents = [slot_file(node, handle) for node in trio.nodes]
            assert value in contents[0]
            assert contents[0] == contents[1] == contents[2]
    trio.wait("everything is the same on all", trio.same_bytes)


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
            (handle,) = send(origin, row(topic, b"gone", delay_s=4))
            request = pb.CancelRequest(message=pb.MessageRef(handle=handle))
            with stub_of(asked) as stub:
                answer = stub.Cancel(request, timeout=20)
            assert answer.outcome == pb.CANCEL_OUTCOME_CANCELLED, asked.id
        send(origin, row(topic, b"stays", delay_s=4.5))
        reader.wait_for(1)
        assert [m.value() for m in reader.read_to_end()] == [b"stays"]
