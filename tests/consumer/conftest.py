"""One real node for all tests of this folder, and separate topics."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from delaywheel import ingress
from local.loopback.cluster import LocalCluster
from local.loopback.kafka import KafkaBroker
from local.loopback.shared import JoinedBroker
from support.kafka.read_committed import create_topic, topic_exists
from support.kafka.rights import Rights
from support.services.trio import NO_METRICS
from support.services.waiting import wait_until


@pytest.fixture
def users_rights(kafka: JoinedBroker) -> Iterator[Rights]:
    """Those of a user who has none yet."""
    with Rights.of(kafka) as rights:
        yield rights


@pytest.fixture(scope="package")
def nodes(
    kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """A running delaywheel cluster that reads its ingress topic: its id, and a node's address."""
    name = f"t{uuid.uuid4().hex[:12]}"
    folder = tmp_path_factory.mktemp("delaywheel")
    settings = {"cluster_id": name, "halves": True, **NO_METRICS}
    with LocalCluster(nodes=1, kafka=kafka.address, folder=folder, settings=settings) as running:
        running.wait_until_accepting()
        topic = ingress.ingress_topic(name)
        wait_until("there is an ingress topic", lambda: topic_exists(kafka.address, topic))
        yield name, running.nodes[0].address


@pytest.fixture(scope="package")
def cluster(nodes: tuple[str, str]) -> str:
    """The id of the running cluster."""
    return nodes[0]


@pytest.fixture
def orders(kafka: KafkaBroker) -> str:
    """A new topic with two partitions."""
    name = f"orders-{uuid.uuid4().hex[:8]}"
    create_topic(kafka.address, name, partitions=2)
    return name
