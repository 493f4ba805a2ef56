"""Finds the ingress topics, creates missing ones, and checks them.

| a topic that is | then |
|---|---|
| in the settings, but missing | it is created; if that is not allowed, a fault is reported |
| compacted | a fault is reported, and it is not read: compaction deletes older records of a key |
| not to be described, or hides its cleanup.policy | a fault is reported, and it is not read |
| missing, and no longer in the settings |  a fault is reported: announced records hold the floor |

None of these faults keeps a node from leading.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection

# Its stubs re-export these without saying so.
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from delaywheel.transactional import MIN_INSYNC, least_in_sync, replicas_on
from delaywheel_replica.cleaner.kafka.brokers import brokers_of, once_known
from delaywheel_replica.cleaner.kafka.client_log import error_of
from delaywheel_replica.cleaner.kafka.topic_admin import release_leaked_id
from delaywheel_replica.cleaner.outside.ports import IngressFound, KafkaAway, TopicPartitions

CALL_S: Final = 5.0
KNOWN_AGAIN_S: Final = 0.05

_DENIED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
}


@dataclass(frozen=True, slots=True)
class IngressTopics:
    """The ingress topics of the settings, and how to create them.

    Attributes:
        replication_factor: Of a new topic; None: one replica per broker, up to three.
        max_message_bytes: The largest record that a new topic accepts.
    """

    names: frozenset[str] = frozenset()
    partitions: int = 1
    replication_factor: int | None = None
    max_message_bytes: int = 1_000_000


def find_ingress(
    admin: AdminClient, wanted: IngressTopics, also: AbstractSet[str] = frozenset()
) -> IngressFound:
    """Finds topics that records can be taken from; those in `also` are not created."""
    try:
        found, faults = _described(admin, sorted(wanted.names | also))
        missing = sorted(name for name in wanted.names if name not in found | faults)
        if missing:
            faults |= _made(admin, missing, wanted)
            made, refused = _known(admin, [name for name in missing if name not in faults])
            found |= made
            faults |= refused
        for name in sorted(also - wanted.names):
            if name not in found | faults:
                faults[name] = (
                    f"the ingress topic {name} is missing, but has announced records, so that"
                    " nothing is deleted any more: add it to ingress_topics to have it recreated"
                )
        faults |= once_known(lambda: _unsuited(admin, sorted(found)))
    except KafkaException as exception:
        raise KafkaAway(error_of(exception).str()) from exception
    topics = {name: topic for name, topic in found.items() if name not in faults}
    return IngressFound(topics, dict(sorted(faults.items())))


def topic_ids(admin: AdminClient, names: Iterable[str]) -> dict[str, str]:
    """Returns Kafka's ids of these topics, except those missing or not allowed to be described."""
    try:
        found, _ = _described(admin, names)
    except KafkaException as exception:
        raise KafkaAway(error_of(exception).str()) from exception
    return {name: topic.topic_id for name, topic in found.items()}


def _described(
    admin: AdminClient, names: Iterable[str]
) -> tuple[dict[str, TopicPartitions], dict[str, str]]:
    """Returns the topics that exist, and the faults of others; missing topics are in neither."""
    found: dict[str, TopicPartitions] = {}
    faults: dict[str, str] = {}
    names = list(names)
    if not names:
        return found, faults
    futures = admin.describe_topics(TopicCollection(names), request_timeout=CALL_S)
    for name, future in futures.items():
        try:
            topic = future.result()
        except KafkaException as exception:
            error = error_of(exception)
            if error.code() in _DENIED:
                faults[name] = (
                    f"not allowed to take records from the ingress topic {name}: grant Describe,"
                    " DescribeConfigs and Read"
                )
            elif error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
        else:
            found[name] = TopicPartitions(str(topic.topic_id), len(topic.partitions))
            release_leaked_id(topic)
    return found, faults


def _known(
    admin: AdminClient, names: Iterable[str]
) -> tuple[dict[str, TopicPartitions], dict[str, str]]:
    """Returns topics that were just created, once all brokers know them."""
    names = set(names)
    deadline = time.monotonic() + CALL_S
    while True:
        found, faults = _described(admin, sorted(names))
        unknown = names - (found.keys() | faults.keys())
        if not unknown:
            return found, faults
        if time.monotonic() >= deadline:
            made = {
                name: f"the ingress topic {name} was created, but brokers do not know it yet"
                for name in unknown
            }
            return found, faults | made
        time.sleep(KNOWN_AGAIN_S)


def _made(admin: AdminClient, names: Sequence[str], wanted: IngressTopics) -> dict[str, str]:
    """Creates topics; returns the faults of those that could not be created."""
    brokers = len(brokers_of(admin, names[0], timeout_s=CALL_S))
    copies = wanted.replication_factor or replicas_on(brokers)
    new = [
        NewTopic(
            name,
            num_partitions=wanted.partitions,
            replication_factor=copies,
            config={
                "cleanup.policy": "delete",
                MIN_INSYNC: str(least_in_sync(copies)),
                "unclean.leader.election.enable": "false",
                "max.message.bytes": str(wanted.max_message_bytes),
            },
        )
        for name in names
    ]
    faults: dict[str, str] = {}
    for name, future in admin.create_topics(new, request_timeout=CALL_S).items():
        try:
            future.result()
        except KafkaException as exception:
            error = error_of(exception)
            if error.code() != KafkaError.TOPIC_ALREADY_EXISTS:  # another node was faster
                faults[name] = (
                    f"the ingress topic {name} is missing, and cannot be created: {error.str()};"
                    " create it, grant Create, or set ingress = false"
                )
    return faults


def _unsuited(admin: AdminClient, names: Iterable[str]) -> dict[str, str]:
    """Returns the faults of topics that may lose records before they are read."""
    faults: dict[str, str] = {}
    wanted = [ConfigResource(ResourceType.TOPIC, name) for name in names]
    if not wanted:
        return faults
    for resource, future in admin.describe_configs(wanted, request_timeout=CALL_S).items():
        name = resource.name
        try:
            entry = future.result().get("cleanup.policy")
            policy = None if entry is None else entry.value
        except KafkaException as exception:
            if error_of(exception).code() not in _DENIED:
                raise
            faults[name] = (
                f"not allowed to read the configuration of the ingress topic {name}: grant"
                " DescribeConfigs, so that its cleanup.policy can be checked"
            )
        else:
            if policy is None:
                faults[name] = (
                    f"Kafka does not report the cleanup.policy of the ingress topic {name}: check"
                    " its configuration; a compacted topic would lose records before they are read"
                )
            elif "compact" in policy:
                faults[name] = (
                    f"the ingress topic {name} has cleanup.policy={policy}: set it to delete;"
                    " compaction deletes older records of a key before they are read"
                )
    return faults
