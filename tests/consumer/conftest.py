"""One real node for all tests of this folder, and separate topics.

`DELAYWHEEL_DRILL_KAFKAS=3` has three brokers, `DELAYWHEEL_DRILL_NODES=3` three nodes of it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from delaywheel import ingress
from local.loopback.brokers import Brokers
from local.loopback.cluster import LocalCluster
from local.loopback.kafka import KafkaBroker
from local.loopback.shared import PASSWORD, JoinedBroker
from support.kafka.read_committed import create_topic, topic_exists
from support.kafka.rights import Rights
from support.kafka.safe_listener import listen_safely, make_certificate
from support.services.trio import NO_METRICS
from support.services.waiting import wait_until

NODES = int(os.environ.get("DELAYWHEEL_DRILL_NODES", "1"))
BROKERS = int(os.environ.get("DELAYWHEEL_DRILL_KAFKAS", "1"))
USER = "user0"


class GuardedBrokers(Brokers):
    """Several, where one user may be denied what all others may.

    Attributes:
        user_settings: What a client of that user needs.
    """

    def __init__(self, count: int, folder: Path) -> None:
        """Prepares so many; nothing runs before `start`."""
        authorizer = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
        rules = {"authorizer.class.name": authorizer, "super.users": "User:ANONYMOUS"}
        super().__init__(count, settings=rules)
        certificate = make_certificate(folder)
        logins = {"PLAIN": f'user_{USER}="{PASSWORD}"'}
        safe = [listen_safely(broker, certificate, logins) for broker in self.each]
        self.user_settings = {
            "bootstrap.servers": ",".join(safe),
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(certificate),
            "sasl.mechanism": "PLAIN",
            "sasl.username": USER,
            "sasl.password": PASSWORD,
        }


@pytest.fixture(scope="session")
def kafka(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[JoinedBroker | GuardedBrokers]:
    """The broker of all tests; several, if that is asked for."""
    if BROKERS == 1:
        yield request.getfixturevalue("kafka")
        return
    with GuardedBrokers(BROKERS, tmp_path_factory.mktemp("tls")) as brokers:
        yield brokers


@pytest.fixture
def users_rights(kafka: JoinedBroker | GuardedBrokers) -> Iterator[Rights]:
    """Those of a user who has none yet."""
    if isinstance(kafka, GuardedBrokers):
        rights = Rights(kafka.address, USER, kafka.user_settings)
    else:
        rights = Rights.of(kafka)
    with rights:
        yield rights


@pytest.fixture(scope="package")
def nodes(
    kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """A running delaywheel cluster that reads its ingress topic: its id, and a node's address."""
    name = f"t{uuid.uuid4().hex[:12]}"
    folder = tmp_path_factory.mktemp("delaywheel")
    settings = {"cluster_id": name, "halves": True, **NO_METRICS}
    with LocalCluster(
        nodes=NODES, kafka=kafka.address, folder=folder, settings=settings
    ) as running:
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
