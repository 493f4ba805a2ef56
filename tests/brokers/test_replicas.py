"""The topics that we make on three brokers, and what is said of those with fewer replicas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]

from delaywheel.consumer import GroupTopic, RetryConsumer
from delaywheel.deadletters import DeadLetterTopic, dead_letter_topic
from delaywheel.deadletters.marks import MARKS_SUFFIX
from delaywheel.deadletters.selection import EVERYTHING
from delaywheel_replica.cleaner.kafka.clients import KafkaClients
from delaywheel_replica.cleaner.kafka.ingress_finding import IngressTopics
from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings
from local.loopback.brokers import Brokers
from support.clients.command import Command
from support.kafka.read_committed import create_topic, set_topic
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka


def clients_of(brokers: Brokers, cluster_id: str, replicas: int | None = None) -> KafkaClients:
    names = KafkaNames(cluster_id)
    settings = KafkaSettings(names, {"bootstrap.servers": brokers.address}, halves=True)
    ingress = IngressTopics(frozenset([names.ingress]), 2, replicas)
    return KafkaClients(settings, replication_factor=replicas, ingress_topics=ingress)


def own(cluster_id: str) -> list[str]:
    names = KafkaNames(cluster_id)
    return [names.control, names.outcomes, names.dead, names.halves, names.ingress]


def made(brokers: Brokers, topics: Sequence[str]) -> dict[str, tuple[set[int], str | None]]:
    """Returns the replicas of each topic's partitions, and `min.insync.replicas`."""
    admin = AdminClient({"bootstrap.servers": brokers.address})
    asked = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
    found = admin.describe_configs(asked)
    return {
        each.name: (
            {len(replicas) for replicas in brokers.copies(each.name).values()},
            found[each].result()["min.insync.replicas"].value,
        )
        for each in asked
    }


def test_whatever_we_make_has_three_replicas_and_takes_what_two_have(
    brokers: Brokers, cluster_id: str
) -> None:
    clients = clients_of(brokers, cluster_id)
    # A broker that another test has just started may answer late.
    wait_until("all answer", lambda: clients.check(has_wheels=False).warnings == ())
    clients.find_ingress(frozenset())
    assert clients.check(has_wheels=False).warnings == ()
    kafka = {"bootstrap.servers": brokers.address}
    with DeadLetterTopic(dead_letter_topic(cluster_id), kafka) as letters:
        letters.drop(EVERYTHING)
    orders = f"{cluster_id}-orders"
    create_topic(brokers.address, orders)
    with RetryConsumer(
        orders, group="g", bootstrap=brokers.address, cluster=cluster_id
    ) as consumer:
        assert consumer.receive(0.1) is None
    topics = [*own(cluster_id), f"{dead_letter_topic(cluster_id)}{MARKS_SUFFIX}"]
    topics += [f"{orders}-retry-g", f"{orders}-dead-g"]
    assert made(brokers, topics) == dict.fromkeys(topics, ({3}, "2"))


def test_replicas_that_brokers_cannot_hold_now_are_waited_for(
    brokers: Brokers, cluster_id: str
) -> None:
    """Kafka refuses a third one while a broker is about to leave, which it still names."""
    clients_of(brokers, cluster_id).find_ingress(frozenset())
    orders = f"{cluster_id}-orders"
    create_topic(brokers.address, orders)
    dead = GroupTopic(replication_factor=4)
    with RetryConsumer(
        orders, group="g", bootstrap=brokers.address, cluster=cluster_id, dead_topic=dead
    ) as consumer:
        wait_until("it waits", lambda: consumer.receive(0.1) is not None or consumer.trouble)
        assert "replicate" in (consumer.trouble or "")


def test_what_has_fewer_replicas_is_named_until_it_has_them(
    brokers: Brokers, cluster_id: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Topics of a time with one broker, say. Theirs is `min.insync.replicas` of one."""
    alone = clients_of(brokers, cluster_id, replicas=1)
    alone.check(has_wheels=False)
    alone.find_ingress(frozenset())
    clients = clients_of(brokers, cluster_id)

    def warnings() -> list[str]:
        """What the leader's status says; `config check --connect` says the same."""
        told = list(clients.check(has_wheels=False).warnings)
        settings = {
            "cluster_id": cluster_id,
            "node_id": "n1",
            "data_dir": tmp_path,
            "halves": "true",
            "kafka.bootstrap.servers": brokers.address,
        }
        flags = [word for name in settings for word in ("--set", f"{name}={settings[name]}")]
        items = Command(capsys)("config", "check", "--connect", "--json", *flags).document["items"]
        topics = [item for item in items if item["what"].startswith("topic ")]
        checked = [item["text"] for item in topics if item["level"] == "warning"]
        same = sorted(warning.partition(": ")[0] for warning in told) == sorted(checked)
        return told if same else [*told, *checked]

    few = warnings()
    for topic in own(cluster_id):
        (one,) = (warning for warning in few if f"{topic} has 1 of 3 replicas" in warning)
        assert "kafka-reassign-partitions" in one
    brokers.reassign(
        {
            (topic, partition): [1, 2, 3]
            for topic in own(cluster_id)
            for partition in brokers.copies(topic)
        }
    )
    # Of a change each broker hears a moment later, and any of them is asked.
    wait_until(
        "three replicas are seen",
        lambda: all(
            "min.insync.replicas=1 of 3 replicas: set it to 2" in one for one in warnings()
        ),
    )
    for topic in own(cluster_id):
        set_topic(brokers.address, topic, "min.insync.replicas", "2")
    wait_until("nothing is told any more", lambda: not warnings())
