"""A Kafka that throttles the leader: all comes once, no term is lost, and the status says why."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from delaywheel import Client, Message
from local.loopback.cluster import LocalCluster, described
from local.loopback.kafka import KafkaBroker
from support.kafka.quotas import set_quota
from support.kafka.read_committed import CommittedReader, create_topic
from support.services.trio import NO_METRICS
from support.services.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def test_what_is_due_at_once_goes_out_as_the_quota_has_it(
    kafka: KafkaBroker, tmp_path: Path, cluster_id: str
) -> None:
    bytes_per_s, messages = 200_000, 3_000
    many, beside = f"orders-{cluster_id}", f"mails-{cluster_id}"
    for topic in (many, beside):
        create_topic(kafka.address, topic, partitions=3)
    settings = {"cluster_id": cluster_id, **NO_METRICS}
    with (
        LocalCluster(kafka=kafka.address, folder=tmp_path, settings=settings) as cluster,
        CommittedReader(kafka.address, many, partitions=3) as orders,
        CommittedReader(kafka.address, beside, partitions=3) as mails,
    ):
        cluster.wait_until_accepting()
        leader = f"delaywheel-{cluster_id}-{cluster.nodes[0].id}-leader"
        set_quota(kafka.address, leader, "producer_byte_rate", bytes_per_s)
        node = cluster.nodes[0].address
        epoch = leader_of(node)
        with Client(node) as client:
            due = datetime.fromtimestamp(time.time() + 5, UTC)
            sent = [
                Message(many, b"%d" % n + b"." * 1_000, key=b"%d" % n, deliver_at=due)
                for n in range(messages)
            ]
            assert all(result.handle for result in client.produce_many(sent))
            client.produce(beside, b"beside", delay="6s")
        wait_until("it says so", lambda: "throttles" in said(node), timeout_s=60)
        mails.wait_for(1, timeout_s=120)
        orders.wait_for(messages, timeout_s=120)
        assert len({one.key() for one in orders.read_to_end()}) == messages
        assert len(orders.messages) == messages
        assert leader_of(node) == epoch


def leader_of(node: str) -> int:
    """The epoch of the leader: another one for each term."""
    return wait_until("it answers", lambda: described(node)).leader.epoch


def said(node: str) -> str:
    """What the node says of Kafka."""
    answer = described(node, details=True)
    return "" if answer is None else answer.members[0].report.kafka_error
