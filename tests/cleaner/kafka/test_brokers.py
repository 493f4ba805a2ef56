"""What brokers and our own topics must be like, and risks with which a node may still lead."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicCollection

# Its stubs re-export these without saying so.
from confluent_kafka.admin import AdminClient, ConfigResource, ConfigSource, ResourceType  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from delaywheel_replica.cleaner.kafka import brokers
from delaywheel_replica.cleaner.kafka.brokers import (
    VERIFICATION,
    broker_objection,
    check_brokers,
    ensure_topics,
    risks_of,
)
from delaywheel_replica.cleaner.outside.ports import LeadingRefused
from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import create_topic, set_topic, topic_exists


@pytest.mark.parametrize(
    ("replicas", "enough", "insync", "reported"),
    [
        (1, 1, 1, []),
        (1, 3, 1, ["1 of 3 replicas"]),
        (2, 3, 1, ["2 of 3 replicas"]),
        (3, 3, 2, []),
        (3, 3, 1, ["min.insync.replicas=1 of 3 replicas: set it to 2"]),
        (2, 2, 2, ["min.insync.replicas=2 of 2 replicas: set it to 1"]),
        (3, 1, 2, []),
    ],
)
def test_too_few_replicas_or_too_many_that_must_be_in_sync(
    replicas: int, enough: int, insync: int, reported: list[str]
) -> None:
    config = {"min.insync.replicas": str(insync)}
    found = list(risks_of("t", replicas=replicas, enough=enough, config=config))
    assert len(found) == len(reported)
    assert all(part in risk for part, risk in zip(reported, found, strict=True))


@pytest.mark.parametrize(
    "config",
    [{"unclean.leader.election.enable": "true"}, {"message.timestamp.type": "CreateTime"}],
)
def test_what_would_lose_the_control_topics_end_or_the_brokers_time(config: dict[str, str]) -> None:
    config |= {"min.insync.replicas": "2"}
    assert not list(risks_of("t", replicas=3, enough=3, config=config))
    (risk,) = risks_of("t", replicas=3, enough=3, config=config, control=True)
    assert next(iter(config)) in risk


@pytest.fixture
def admin(settings: KafkaSettings) -> AdminClient:
    return AdminClient(settings.admin())


@pytest.mark.kafka
@pytest.mark.parametrize(
    ("which", "config", "objection"),
    [
        ("dead", {"cleanup.policy": "compact,delete"}, "cleanup.policy=compact,delete: set it"),
        ("outcomes", {"cleanup.policy": "compact"}, "cleanup.policy=compact: set it to delete"),
        ("outcomes", {"max.message.bytes": "900000"}, "raise its max.message.bytes"),
        ("control", {"cleanup.policy": "delete"}, "cleanup.policy=delete: compact it"),
        (
            "control",
            {"cleanup.policy": "compact", "max.message.bytes": "900000"},
            "raise its max.message.bytes",
        ),
    ],
)
def test_an_unsuited_topic_of_our_own_is_refused_by_name(
    kafka: KafkaBroker,
    settings: KafkaSettings,
    admin: AdminClient,
    which: str,
    config: dict[str, str],
    objection: str,
) -> None:
    name = getattr(settings.names, which)
    create_topic(kafka.address, name, config={"max.message.bytes": "1200000", **config})
    with pytest.raises(LeadingRefused, match=name) as refused:
        ensure_topics(admin, settings, replicas=1, has_wheels=False)
    assert objection in str(refused.value)


@pytest.mark.kafka
def test_a_control_topic_that_is_gone_is_not_made_again_beside_messages(
    kafka: KafkaBroker, settings: KafkaSettings, admin: AdminClient
) -> None:
    with pytest.raises(LeadingRefused, match=f"{settings.names.control} is missing"):
        ensure_topics(admin, settings, replicas=1, has_wheels=True)
    assert not topic_exists(kafka.address, settings.names.control)


@pytest.mark.kafka
def test_what_is_wrong_with_the_halves_topic_is_told_and_keeps_no_node_from_leading(
    kafka: KafkaBroker, settings: KafkaSettings, admin: AdminClient
) -> None:
    """Halves are not wanted any more here, and those of before are asked about.

    Where the topic is gone, too: a letter would fail each transaction.
    """
    halves = settings.names.halves
    assert "is missing" in ensure_topics(admin, settings, replicas=1, has_wheels=False)[halves]
    create_topic(kafka.address, settings.names.halves, config={"max.message.bytes": "900000"})
    told = ensure_topics(admin, settings, replicas=1, has_wheels=False).get(settings.names.halves)
    assert told is not None
    assert "raise its max.message.bytes" in told


class Denied:
    """A broker that has no topic of ours, and lets none be described, or none be made.

    Args:
        code: What it answers where topics are to be described.
        made: What it answers where the last one is to be made.
        unset: The topic whose settings may not be seen.
    """

    def __init__(
        self, code: int, made: int = KafkaError.TOPIC_AUTHORIZATION_FAILED, unset: str = ""
    ) -> None:
        self.code = code
        self.made = made
        self.unset = unset

    def describe_topics(self, names: TopicCollection, **_: Any) -> dict[str, Future[None]]:
        return {name: _failed(self.code) for name in names.topic_names}

    def create_topics(self, topics: list[NewTopic], **_: Any) -> dict[str, Future[None]]:
        made = {topic.topic: _failed(KafkaError.TOPIC_ALREADY_EXISTS) for topic in topics}
        return made | {topics[-1].topic: _failed(self.made)}

    def describe_configs(
        self, topics: list[ConfigResource], **_: Any
    ) -> dict[ConfigResource, Future[Any]]:
        described: dict[ConfigResource, Future[Any]] = {}
        for topic in topics:
            if topic.name == self.unset:
                described[topic] = _failed(KafkaError.TOPIC_AUTHORIZATION_FAILED)
                continue
            policy = "compact" if topic.name == KafkaNames("c").control else "delete"
            values = {
                "cleanup.policy": policy,
                "delete.retention.ms": "86400000",
                "max.message.bytes": "9999999",
            }
            future: Future[Any] = Future()
            future.set_result(
                {name: SimpleNamespace(value=value) for name, value in values.items()}
            )
            described[topic] = future
        return described


def _failed(code: int) -> Future[None]:
    future: Future[None] = Future()
    future.set_exception(KafkaException(KafkaError(code)))
    return future


def test_a_topic_that_may_not_be_seen_is_named() -> None:
    settings = KafkaSettings(KafkaNames("c"), {}, halves=True)
    admin = cast("AdminClient", Denied(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    with pytest.raises(LeadingRefused, match=settings.names.control) as refused:
        ensure_topics(admin, settings, replicas=1, has_wheels=False)
    assert str(refused.value).endswith("Describe and Write on it")


def test_a_halves_topic_that_may_not_be_made_is_told_with_the_way_without() -> None:
    settings = KafkaSettings(KafkaNames("c"), {}, halves=True)
    admin = cast("AdminClient", Denied(KafkaError.UNKNOWN_TOPIC_OR_PART))
    told = ensure_topics(admin, settings, replicas=1, has_wheels=False).get(settings.names.halves)
    assert told is not None
    assert settings.names.halves in told
    assert told.endswith("grant Create, or set halves = false")


def test_whatever_kafka_has_against_the_halves_topic_keeps_no_node_from_leading() -> None:
    """A policy of its brokers, say, or a right to its settings; a lost connection does."""
    settings = KafkaSettings(KafkaNames("c"), {}, halves=True)
    unknown = KafkaError.UNKNOWN_TOPIC_OR_PART

    def told(code: int, unset: str = "") -> str | None:
        admin = cast("AdminClient", Denied(unknown, code, unset))
        objections = ensure_topics(admin, settings, replicas=1, has_wheels=False)
        return objections.get(settings.names.halves)

    for code in (KafkaError.POLICY_VIOLATION, KafkaError.INVALID_REPLICATION_FACTOR):
        assert "Kafka does not make it" in (told(code) or "")
    made = KafkaError.TOPIC_ALREADY_EXISTS
    assert "grant DescribeConfigs" in (told(made, settings.names.halves) or "")
    with pytest.raises(LeadingRefused, match="grant DescribeConfigs"):
        told(made, settings.names.dead)
    for code in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT):
        with pytest.raises(KafkaException):
            told(code)


class Brokers:
    """Brokers that are asked for their settings one in each call, as the client demands it."""

    def __init__(self, **answers: int | str | None) -> None:
        self.answers = answers

    def describe_configs(
        self, brokers: list[ConfigResource], **_: Any
    ) -> dict[ConfigResource, Future[Any]]:
        (broker,) = brokers
        answer = self.answers[f"b{broker.name}"]
        if isinstance(answer, int):
            return {broker: _failed(answer)}
        future: Future[Any] = Future()
        if answer is not None:
            future.set_result({VERIFICATION: SimpleNamespace(value=answer)})
        return {broker: future}

    def checked(self) -> frozenset[int]:
        return check_brokers(cast("AdminClient", self), [int(name[1:]) for name in self.answers])


def test_each_of_many_brokers_is_checked() -> None:
    assert Brokers(b1="true", b2="true", b3="true").checked() == set()
    with pytest.raises(LeadingRefused, match="broker 3"):
        Brokers(b1="true", b2="true", b3="false").checked()


def test_brokers_that_cannot_be_checked_are_refused_with_the_way_by_hand() -> None:
    """A hosted Kafka refuses the question, a compatible one does not know the setting."""
    with pytest.raises(LeadingRefused, match="check_brokers = false"):
        Brokers(b1=KafkaError.CLUSTER_AUTHORIZATION_FAILED).checked()
    assert "check_brokers = false" in (broker_objection("1", {}) or "")


def test_a_broker_that_was_killed_keeps_no_node_from_leading_on_the_others() -> None:
    """Kafka names it among its brokers until its session is over."""
    silent = KafkaError._TIMED_OUT
    assert Brokers(b1=silent, b2="true").checked() == {1}
    assert Brokers(b1=None, b2="true").checked() == {1}
    with pytest.raises(KafkaException):
        Brokers(b1=silent, b2=silent).checked()
    with pytest.raises(LeadingRefused, match="DescribeConfigs"):
        Brokers(b1=silent, b2=KafkaError.CLUSTER_AUTHORIZATION_FAILED).checked()


def test_brokers_that_say_nothing_at_all_are_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client says so in time, unless this process stood still: it ended for that."""
    monkeypatch.setattr(brokers, "CALL_S", 0.01)
    with pytest.raises(KafkaException):
        Brokers(b1=None, b2=None).checked()


@pytest.mark.kafka
def test_topics_that_are_made_are_not_refused(settings: KafkaSettings, admin: AdminClient) -> None:
    """And letters about half messages are kept until somebody answers them."""
    ensure_topics(admin, settings, replicas=1, has_wheels=False)
    assert settings.names.halves not in admin.list_topics(timeout=60).topics
    settings = replace(settings, halves=True)
    for _ in range(2):
        check_brokers(admin, [1])
        ensure_topics(admin, settings, replicas=1, has_wheels=False)
    halves = ConfigResource(ResourceType.TOPIC, settings.names.halves)
    (described,) = admin.describe_configs([halves]).values()
    config = described.result()
    for name in ("retention.ms", "retention.bytes"):  # whatever the broker does with others
        assert (config[name].value, config[name].source) == (
            "-1",
            ConfigSource.DYNAMIC_TOPIC_CONFIG.value,
        )


@pytest.mark.kafka
def test_the_topic_of_the_trace_is_made_where_it_is_wanted_and_keeps_no_node_from_leading(
    kafka: KafkaBroker, settings: KafkaSettings, admin: AdminClient
) -> None:
    traced = replace(settings, trace=True)
    assert settings.names.trace not in ensure_topics(admin, settings, replicas=1, has_wheels=False)
    assert not topic_exists(kafka.address, settings.names.trace)
    assert settings.names.trace not in ensure_topics(admin, traced, replicas=1, has_wheels=False)
    found = admin.list_topics(settings.names.trace, timeout=60).topics[settings.names.trace]
    assert len(found.partitions) == 3
    assert topic_exists(kafka.address, settings.names.counts)
    set_topic(kafka.address, settings.names.trace, "cleanup.policy", "compact")
    told = ensure_topics(admin, traced, replicas=1, has_wheels=False)
    assert "set it to delete" in told[settings.names.trace]
    assert settings.names.counts not in told
