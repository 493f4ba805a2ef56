"""Three brokers behind TLS that let users in, with exactly the rights that docs/KAFKA.md lists.

A push has the users with tokens, for whom each right is given by its whole name; at night a broker
restarts meanwhile. Rights by prefixes, and passwords, tests/e2e/test_acls.py has on one broker, and
SCRAM a night.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined] # its stubs re-export without saying so
    AdminClient,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from delaywheel import Client, ingress
from delaywheel_replica.cleaner.delivery.bisection import TRIAL_IDS
from delaywheel_replica.cleaner.outside.ports import IDS
from delaywheel_replica.kafka_settings import KafkaNames
from local.loopback.brokers import Brokers
from local.loopback.cluster import LocalCluster
from support.clients.command import Command
from support.kafka.read_committed import CommittedReader, create_topic
from support.kafka.rights import Rights, documented
from support.kafka.token_server import token_server
from support.process.night import NIGHT, at_night
from support.services.ingress import Sender
from support.services.trio import NO_METRICS

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(400)]

PASSWORD = "hush-hush"
TOKEN_S = 20
"""A token's life: clients must get others while they run."""


@pytest.fixture
def login(
    request: pytest.FixtureRequest, guarded: tuple[Brokers, str], cluster_id: str, certificate: Path
) -> Iterator[dict[str, str]]:
    """The settings of a client of the user, whose name is the cluster's."""
    brokers, address = guarded
    settings = {
        "bootstrap.servers": address,
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(certificate),
        "sasl.mechanism": request.param,
    }
    with ExitStack() as stack:
        if request.param == "OAUTHBEARER":
            settings |= {
                "sasl.oauthbearer.method": "oidc",
                "sasl.oauthbearer.client.id": cluster_id,
                "sasl.oauthbearer.client.secret": PASSWORD,
                "sasl.oauthbearer.token.endpoint.url": stack.enter_context(
                    token_server(cluster_id, lives_s=TOKEN_S)
                ),
            }
        else:
            settings |= {"sasl.username": cluster_id, "sasl.password": PASSWORD}
            info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
            wanted = UserScramCredentialUpsertion(cluster_id, info, PASSWORD.encode())
            admin = AdminClient({"bootstrap.servers": brokers.address})
            admin.alter_user_scram_credentials([wanted])[cluster_id].result()
        yield settings


def allow(rights: Rights, cluster: str, topics: dict[str, str], *, literally: bool) -> None:
    """Grants what the document lists; each name by itself, if that is asked for."""
    names = KafkaNames(cluster)
    each = {
        ResourceType.TOPIC: [
            *(names.control, names.outcomes, names.dead, names.halves, names.ingress),
        ],
        ResourceType.TRANSACTIONAL_ID: [
            *map(names.leader_id, range(IDS)),
            *map(names.trial_id, range(TRIAL_IDS)),
            names.check_id,
        ],
    }
    for one in documented(cluster, topics):
        is_split = literally and one.is_prefix
        for name in each[one.kind] if is_split else [one.name]:
            for operation in one.operations:
                rights.allow(one.kind, name, operation, prefixed=one.is_prefix and not literally)


@pytest.mark.parametrize(
    ("login", "literally"),
    [pytest.param("SCRAM-SHA-512", False, marks=at_night), ("OAUTHBEARER", True)],
    indirect=["login"],
)
def test_what_is_listed_is_enough(
    guarded: tuple[Brokers, str],
    login: dict[str, str],
    cluster_id: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    literally: bool,
) -> None:
    """Tokens are also enough while a broker restarts: clients fetch new ones."""
    brokers, _ = guarded
    orders, more = f"orders-{cluster_id}", f"more-{cluster_id}"
    for topic in (orders, more):
        create_topic(brokers.address, topic)
    soon = timedelta(milliseconds=300)
    kafka = {"cluster_id": cluster_id, "kafka": login, "ingress_topics": [more], **NO_METRICS}
    with (
        Rights(brokers.address, cluster_id, login) as rights,
        CommittedReader(brokers.address, orders) as reader,
    ):
        topics = {"`ingress_topics`": more, "destination topics": orders}
        allow(rights, cluster_id, topics, literally=literally)
        with LocalCluster(kafka=brokers.address, folder=tmp_path, settings=kafka) as cluster:
            cluster.wait_until_accepting()
            (node,) = cluster.nodes
            leader = brokers.leaders()[KafkaNames(cluster_id).control, 0]
            with Client(node.address) as client:
                sender = Sender(brokers.address, cluster_id)
                restarts = NIGHT and "sasl.oauthbearer.method" in login
                for number in range(1, 3):
                    if restarts and number > 1:
                        brokers.each[leader - 1].restart()
                    client.produce(orders, b"by gRPC", delay=soon)
                    sender.send(orders, b"by ingress", (ingress.DELAY_MS, b"300"))
                    sender.flush()
                    reader.wait_for(2 * number, timeout_s=120)
            assert "uthoriz" not in node.log.read_text()
        settings = {"node_id": "n9", "data_dir": tmp_path / "n9", "cluster_id": cluster_id}
        settings |= {f"kafka.{name}": value for name, value in login.items()}
        flags = [f"--set={name}={value}" for name, value in settings.items()]
        flags += ["--set", f"ingress_topics={more}"]
        ended = Command(capsys)("config", "check", "--connect", "--json", "--topic", orders, *flags)
        wrong = [one for one in ended.document["items"] if one["level"] != "ok"]
        assert not [
            one for one in wrong if one["what"].startswith(("topic", "group", "trans", "br"))
        ]
    assert len(reader.messages) == 4
