"""Three healthy nodes: one of them forwards what was sent to several.

What lies on all of them, tests/server/serving/test_three_servers.py shows without Kafka.
"""

from __future__ import annotations

import pytest

from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import CommittedReader
from support.services.trio import Trio, row, send

pytestmark = pytest.mark.kafka


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
