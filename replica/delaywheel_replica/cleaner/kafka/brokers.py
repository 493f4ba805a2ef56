"""Requirements on brokers before this node may lead: their version, and our topics.

Asked before each candidacy, by a leader every few minutes, and after a transaction that failed: a
refusal is a sentence for the operator and goes into the cleaner's row.

| our topic | must | otherwise |
|---|---|---|
| any | be ours to write to | each transaction with such a record fails |
| control | be compacted, and keep tombstones | what was forwarded would be forgotten |
| outcomes, dead letters | not be compacted | a letter without a key is refused, and of two |
|   | | outcomes of one message the first would go |
| outcomes, dead letters | take our greatest record | it stops all forwarding |
| control | take a batch of ours | the same |

The halves topic is needed for half messages alone, and that of the trace by programs alone. So what
is wrong with them keeps no node from leading: `ensure_topics` returns it, and the leader does
without halves (delivery/halves.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection

# Its stubs re-export these without saying so.
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    BrokerMetadata,
    ConfigResource,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic

from delaywheel.transactional import (
    LEADER_TIMEOUT_MS,
    MIN_INSYNC,
    MOST_TIMEOUT_ADVICE,
    MOST_TIMEOUT_SETTING,
    is_moving,
    least_in_sync,
)
from delaywheel_replica.cleaner.kafka.client_log import error_of
from delaywheel_replica.cleaner.kafka.follower import KEPT_S
from delaywheel_replica.cleaner.kafka.topic_admin import may_write, release_leaked_id
from delaywheel_replica.cleaner.outside.ports import LeadingRefused
from delaywheel_replica.kafka_settings import DEFAULT_TOPIC_BYTES, KafkaSettings

_Answer = TypeVar("_Answer")

ANSWER_S = 2.0
REST_S = 0.5
"""How long other brokers are waited for once one has answered."""
CALL_S = 5.0
VERIFICATION = "transaction.partition.verification.enable"
BY_HAND = "set check_brokers = false"
UNREADABLE_ADVICE = (
    f"grant DescribeConfigs on the cluster, or check {VERIFICATION} by hand and {BY_HAND}"
)
_UNSEEN = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED}
"""What is no risk to a topic: it is missing, or new to this broker, or not for us to see."""
# A letter that goes before its group reads it would be a half that nobody decided.
_KEEPS_ALL = {"retention.ms": "-1", "retention.bytes": "-1"}


@dataclass(frozen=True, slots=True, eq=False)
class OwnTopic:
    """One of our topics as it should be."""

    name: str
    config: Mapping[str, str]
    compacted: bool = False
    partitions: int = 1
    """How many it gets where it is made."""
    is_written: bool = True
    """Whether the service writes to it."""
    is_made: bool = True
    """Whether it is made where it is missing; otherwise it is checked only where it is there."""
    is_needed: bool = True
    """Whether no node can lead without it."""
    otherwise: str = ""
    """What else helps where it may not be made or described."""


def own_topics(settings: KafkaSettings) -> tuple[OwnTopic, ...]:
    """Returns the topics of a cluster, the control topic first."""
    names = settings.names
    kept = {
        "cleanup.policy": "delete",
        "max.message.bytes": str(settings.max_record_bytes),
    }
    control = {
        "cleanup.policy": "compact",
        "max.message.bytes": str(max(DEFAULT_TOPIC_BYTES, settings.own_batch_bytes)),
        "delete.retention.ms": "86400000",
        # Small segments: a node that starts reads few progress records that were replaced since.
        "segment.ms": "60000",
        "segment.bytes": str(4 << 20),
        "min.cleanable.dirty.ratio": "0.1",
        "unclean.leader.election.enable": "false",
        # So that a candidate can compare its clock with the brokers'.
        "message.timestamp.type": "LogAppendTime",
    }
    topics = (
        OwnTopic(names.control, control, compacted=True),
        OwnTopic(names.outcomes, kept),
        OwnTopic(names.dead, kept),
        # Halves of another time, or of another node's settings, are asked about all the same.
        OwnTopic(
            names.halves,
            kept | _KEEPS_ALL,
            is_made=settings.halves,
            is_needed=False,
            otherwise=", or set halves = false",
        ),
    )
    if not settings.trace:
        return topics
    trace = OwnTopic(
        names.trace,
        kept | {"retention.ms": "86400000"},
        partitions=3,
        is_written=False,
        is_needed=False,
        otherwise=", or set trace = false",
    )
    counts = replace(
        trace,
        name=names.counts,
        config=kept
        | {
            "cleanup.policy": "compact,delete",
            "retention.ms": str(30 * 86_400_000),
            # Each cell is written again and again: what is written last is not compacted.
            "segment.bytes": str(64 << 20),
            # So that the audit can compare its programs' clocks with the brokers'.
            "message.timestamp.type": "LogAppendTime",
        },
    )
    return (*topics, trace, counts)


def brokers_of(
    admin: AdminClient, topic: str, *, timeout_s: float = ANSWER_S
) -> list[BrokerMetadata]:
    """Returns the brokers that are registered and not fenced, by their ids.

    Kafka names them along with any topic. The client's question about brokers alone,
    `describe_cluster`, ends the process (an assertion of librdkafka) if it has none. `admin` is one
    of `KafkaSettings.admin`, which makes no topic by asking about it.

    Raises:
        KafkaException: Kafka does not answer, or knows of no broker that takes part.
    """
    known = admin.list_topics(topic, timeout=timeout_s).brokers
    if not known:
        why = "the controller has fenced all brokers: it does not hear from them in time"
        raise KafkaException(KafkaError(KafkaError.BROKER_NOT_AVAILABLE, why))
    return [known[broker_id] for broker_id in sorted(known)]


def ask_brokers(
    admin: AdminClient, brokers: Iterable[int], *, timeout_s: float
) -> dict[int, Future[Mapping[str, Any]]]:
    """Asks each broker for its settings, all at once: the client takes one broker a call."""
    asked: dict[int, Future[Mapping[str, Any]]] = {}
    for broker in brokers:
        wanted = ConfigResource(ResourceType.BROKER, str(broker))
        asked[broker] = admin.describe_configs([wanted], request_timeout=timeout_s)[wanted]
    return asked


def check_brokers(admin: AdminClient, brokers: Iterable[int]) -> frozenset[int]:
    """Refuses brokers before Kafka 3.6, whose logs a late produce could leave hanging.

    Returns those that do not answer though another does. Kafka names a killed one until its session
    is over, and no candidacy may wait for that.

    Raises:
        LeadingRefused: A broker does not do, or may not be asked.
        KafkaException: None answers.
    """
    silent: dict[int, KafkaException] = {}
    asked = ask_brokers(admin, brokers, timeout_s=ANSWER_S)
    _wait_for_answers(asked.values())
    for broker, future in asked.items():
        try:
            config = future.result(0)
        except TimeoutError:
            silent[broker] = KafkaException(KafkaError(KafkaError._TIMED_OUT))
            continue
        except KafkaException as error:
            if error_of(error).code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED:
                raise LeadingRefused(
                    f"not allowed to read the brokers' configuration: {UNREADABLE_ADVICE}"
                ) from error
            if not is_passing(error):
                raise
            silent[broker] = error
            continue
        objection = broker_objection(str(broker), config)
        if objection is not None:
            raise LeadingRefused(objection)
    if silent.keys() == asked.keys():
        raise next(iter(silent.values()))
    return frozenset(silent)


def _wait_for_answers(asked: Iterable[Future[Any]]) -> None:
    """Waits until each has ended, though not long for the rest once one was answered."""
    until_s, waiting = time.monotonic() + CALL_S, {*asked}
    while waiting and time.monotonic() < until_s:
        left_s = until_s - time.monotonic()
        ended, waiting = wait(waiting, max(0.0, left_s), return_when=FIRST_COMPLETED)
        if any(future.exception() is None for future in ended):
            until_s = min(until_s, time.monotonic() + REST_S)


def broker_objection(broker: str, config: Mapping[str, Any]) -> str | None:
    """Returns why no node may lead on a broker with this configuration; None if it may."""
    entry = config.get(VERIFICATION)
    if entry is None:
        text = f"broker {broker} is older than Kafka 3.6, or no Kafka: it has no {VERIFICATION}"
        return f"{text}: upgrade it, or check it by hand and {BY_HAND}"
    if entry.value != "true":
        return f"broker {broker} has {VERIFICATION}={entry.value}: set it to true"
    most_ms = config.get(MOST_TIMEOUT_SETTING)
    if most_ms is not None and int(most_ms.value) < LEADER_TIMEOUT_MS:
        text = f"broker {broker} has {MOST_TIMEOUT_SETTING}={most_ms.value}"
        return f"{text}: {MOST_TIMEOUT_ADVICE}"
    return None


def ensure_topics(
    admin: AdminClient,
    settings: KafkaSettings,
    *,
    replicas: int,
    has_wheels: bool,
) -> dict[str, str]:
    """Creates missing topics of ours, with so many replicas; refuses invalid ones.

    A control topic that is missing beside wheels, and so messages, was lost, or this is another
    Kafka: a new one would forward from nothing, so it is refused.

    Returns what is wrong with those that no leader needs, by their names.

    Raises:
        LeadingRefused: Something is wrong with another one.
        KafkaException: Kafka does not answer.
    """
    topics = own_topics(settings)
    described = _described(admin, topics)
    objections = _raised(dict(_access_objections(described)))
    missing = [topic for topic, found in described.items() if found is None and topic.is_made]
    if topics[0] in missing and has_wheels:
        raise LeadingRefused(
            f"the control topic {topics[0].name} is missing, though this node holds messages:"
            " restore it, or point the node to the Kafka it belongs to"
        )
    if missing:
        objections |= _raised(dict(_refused(admin, missing, replicas)))
    objections |= {
        topic: f"topic {topic.name} is missing, or may not be seen, and none is made here"
        for topic, found in described.items()
        if found is None and not topic.is_made
    }
    topics = tuple(
        topic
        for topic, found in described.items()
        if topic not in objections and (found is not None or topic in missing)
    )
    found = once_known(lambda: dict(_config_objections(admin, topics, settings)))
    objections |= _raised(found)
    return {topic.name: objection for topic, objection in objections.items()}


def once_known(ask: Callable[[], _Answer]) -> _Answer:
    """Repeats a question while a broker does not know a topic: others know what was just made."""
    deadline = time.monotonic() + CALL_S
    while True:
        try:
            return ask()
        except KafkaException as error:
            late = time.monotonic() > deadline
            if error_of(error).code() != KafkaError.UNKNOWN_TOPIC_OR_PART or late:
                raise
        time.sleep(0.02)


def _raised(objections: dict[OwnTopic, str]) -> dict[OwnTopic, str]:
    """Returns these objections if none is to a topic that every leader needs."""
    for topic, objection in objections.items():
        if topic.is_needed:
            raise LeadingRefused(objection)
    return objections


def risks_of(
    topic: str, *, replicas: int, enough: int, config: Mapping[str, str], control: bool = False
) -> Iterator[str]:
    """Yields the risks to one of our topics that do not prevent leading.

    The partition with the fewest replicas has so many; it could have `enough`.
    """
    what = f"the control topic {topic}" if control else f"topic {topic}"
    if replicas < enough:
        yield (
            f"{what} has {replicas} of {enough} replicas: add them with"
            " kafka-reassign-partitions (docs/KAFKA.md, Adding replicas)"
        )
    insync, least = config.get(MIN_INSYNC, "1"), least_in_sync(replicas)
    if int(insync) != least:
        yield f"{what} has {MIN_INSYNC}={insync} of {replicas} replicas: set it to {least}"
    if control and config.get("unclean.leader.election.enable") == "true":
        yield (
            f"{what} has unclean.leader.election.enable=true: set it to false, or it may lose its"
            " end"
        )
    if control and config.get("message.timestamp.type") == "CreateTime":
        yield (
            f"{what} has message.timestamp.type=CreateTime: set it to LogAppendTime, so that clocks"
            " can be compared with the brokers'"
        )


def look_over(
    admin: AdminClient, settings: KafkaSettings, *, enough: int, ingress: bool
) -> tuple[str, ...]:
    """Looks for risks to our topics that do not prevent leading.

    They could have `enough` replicas; the ingress topic named after the cluster may be one of them.
    """
    names = [topic.name for topic in own_topics(settings)]
    names += [settings.names.ingress] if ingress else []
    found = admin.describe_topics(TopicCollection(names), request_timeout=CALL_S)
    wanted = [ConfigResource(ResourceType.TOPIC, name) for name in names]
    configs = admin.describe_configs(wanted, request_timeout=CALL_S).values()
    risks: list[str] = []
    for name, future in zip(names, configs, strict=True):
        control = name == settings.names.control
        try:
            described = found[name].result()
            config = {key: entry.value for key, entry in future.result().items()}
        except KafkaException as error:
            if error_of(error).code() not in _UNSEEN:
                raise
            continue
        replicas = fewest_replicas(described)
        risks += risks_of(name, replicas=replicas, enough=enough, config=config, control=control)
        release_leaked_id(described)
    return tuple(risks)


def fewest_replicas(described: Any) -> int:
    """Returns how many replicas a topic has, in the partition with the fewest."""
    return min(len(partition.replicas) for partition in described.partitions)


def _described(admin: AdminClient, topics: Sequence[OwnTopic]) -> dict[OwnTopic, Any]:
    """Returns each topic's description, or why this node gets none; None: it is missing."""
    names = TopicCollection([topic.name for topic in topics])
    found = admin.describe_topics(names, request_timeout=CALL_S, include_authorized_operations=True)
    described: dict[OwnTopic, Any] = {}
    for topic in topics:
        try:
            described[topic] = found[topic.name].result()
        except KafkaException as error:
            is_closed = error_of(error).code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
            if not is_closed and error_of(error).code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
            # Kafka says that it is closed of what is not there, too.
            described[topic] = error if is_closed and topic.is_made else None
    return described


def _access_objections(
    described: Mapping[OwnTopic, Any],
) -> Iterator[tuple[OwnTopic, str]]:
    """Yields the topics that this node may not use, and the control topic if it has partitions."""
    for topic, found in described.items():
        if found is None:
            continue
        if isinstance(found, KafkaException):
            advice = f"grant Describe and Write on it{topic.otherwise}"
            yield topic, f"not allowed to describe topic {topic.name}: {advice}"
        elif topic.compacted and len(found.partitions) != 1:
            count = len(found.partitions)
            yield topic, f"the control topic {topic.name} has {count} partitions: it must have 1"
        elif topic.is_written and not may_write(found):
            yield topic, f"not allowed to write to topic {topic.name}: grant Write on it"


def _refused(
    admin: AdminClient, missing: Sequence[OwnTopic], replicas: int
) -> Iterator[tuple[OwnTopic, str]]:
    """Makes topics; yields those that this node may not make.

    A topic that is not needed is yielded whatever Kafka has against it: a policy, or a quota.
    """
    insync = {MIN_INSYNC: str(least_in_sync(replicas))}
    wanted = [
        NewTopic(
            topic.name,
            num_partitions=topic.partitions,
            replication_factor=replicas,
            config={**insync, **topic.config},
        )
        for topic in missing
    ]
    made = admin.create_topics(wanted, request_timeout=CALL_S)
    for topic in missing:
        try:
            made[topic.name].result()
        except KafkaException as error:
            if error_of(error).code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                why = "is missing, and this node may not make it: make it, grant Create"
                yield topic, f"topic {topic.name} {why}{topic.otherwise}"
            elif error_of(error).code() == KafkaError.TOPIC_ALREADY_EXISTS:
                continue  # another node was quicker
            elif topic.is_needed or is_passing(error):
                raise
            else:
                why = f"is missing, and Kafka does not make it ({error_of(error).str()}): make it"
                yield topic, f"topic {topic.name} {why}{topic.otherwise}"


def _config_objections(
    admin: AdminClient, topics: Sequence[OwnTopic], settings: KafkaSettings
) -> Iterator[tuple[OwnTopic, str]]:
    """Yields the topics whose configuration does not do, with the first thing that is wrong."""
    wanted = [ConfigResource(ResourceType.TOPIC, topic.name) for topic in topics]
    described = admin.describe_configs(wanted, request_timeout=CALL_S)
    for topic, future in zip(topics, described.values(), strict=True):
        try:
            config = future.result()
        except KafkaException as error:
            if error_of(error).code() != KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise
            advice = f"grant DescribeConfigs on it{topic.otherwise}"
            yield topic, f"not allowed to see the settings of topic {topic.name}: {advice}"
            continue
        for objection in topic_objections(topic, config, settings):
            yield topic, objection
            break


def topic_objections(
    topic: OwnTopic, config: Mapping[str, Any], settings: KafkaSettings
) -> Iterator[str]:
    """Returns what is wrong with a topic's present configuration."""
    policy = config["cleanup.policy"].value
    if topic.compacted and policy != "compact":
        yield f"the control topic {topic.name} has cleanup.policy={policy}: compact it"
    if "compact" not in topic.config["cleanup.policy"] and "compact" in policy:
        yield (
            f"topic {topic.name} has cleanup.policy={policy}: set it to delete, a compacted"
            " topic refuses what has no key, and removes records that are to be kept"
        )
    kept_ms = int(config["delete.retention.ms"].value)
    if topic.compacted and kept_ms < KEPT_S * 1000:
        yield (
            f"the control topic {topic.name} has delete.retention.ms={kept_ms}: a node that"
            f" reads it could miss what was removed; set at least {KEPT_S * 1000}"
        )
    takes = int(config["max.message.bytes"].value)
    ours = settings.own_batch_bytes if topic.compacted else settings.max_record_bytes
    if takes < ours:
        yield (
            f"topic {topic.name} takes {takes} bytes a message, and ours may have"
            f" {ours}: raise its max.message.bytes"
        )


def is_passing(error: KafkaException) -> bool:
    """Whether the same call may succeed soon; else Kafka has answered it."""
    cause = error_of(error)
    is_own = int(cause.code()) < 0  # the client library's: there was no answer
    return bool(cause.retriable()) or is_own or is_moving(cause)
