"""Finds the ingress topics, makes those that are missing, and checks them.

| a topic | then |
|---|---|
| of the settings that is missing | is made; where that is not allowed, it is told |
| that is compacted | is told, and not read: of records with one key the older ones would be gone |
| that may not be described, or whose cleanup.policy is not told | is told, and not read |
| that is no longer in the settings, and missing | is told: what was announced of it keeps the floor where it is |

None of it keeps a node from leading.
"""  # noqa: E501 - rows of a table

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection

# Its stubs re-export these without saying so.
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from delaywheel_replica.cleaner.outside.ports import IngressFound, KafkaAway, TopicPartitions

CALL_S: Final = 5.0
KNOWN_AGAIN_S: Final = 0.05

_DENIED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
}


@dataclass(frozen=True, slots=True)
class IngressTopics:
    """The ingress topics of the settings, and how they are made.

    Attributes:
        names: of the topics.
        partitions: of one that is made.
        replication_factor: likewise; None: one a broker, three at most.
        max_message_bytes: the greatest record that one takes that is made.
    """

    names: frozenset[str] = frozenset()
    partitions: int = 1
    replication_factor: int | None = None
    max_message_bytes: int = 1_000_000


def find_ingress(
    admin: AdminClient, wanted: IngressTopics, also: AbstractSet[str] = frozenset()
) -> IngressFound:
    """Finds topics that records can be taken from.

    Args:
        admin: The client to ask.
        wanted: The topics of the settings.
        also: Others, which are not made.

    Raises:
        KafkaAway: It does not answer.
    """
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
                    f"the ingress topic {name} is gone, of which something is announced, so that"
                    " nothing is deleted any more: name it in ingress_topics, and it is made anew"
                )
        faults |= _unsuited(admin, sorted(found))
    except KafkaException as exception:
        raise KafkaAway(_error(exception).str()) from exception
    topics = {name: topic for name, topic in found.items() if name not in faults}
    return IngressFound(topics, tuple(faults[name] for name in sorted(faults)))


def topic_ids(admin: AdminClient, names: Iterable[str]) -> dict[str, str]:
    """Returns Kafka's ids of those of these topics that there are, and that may be described.

    Raises:
        KafkaAway: It does not answer.
    """
    try:
        found, _ = _described(admin, names)
    except KafkaException as exception:
        raise KafkaAway(_error(exception).str()) from exception
    return {name: topic.topic_id for name, topic in found.items()}


def _described(
    admin: AdminClient, names: Iterable[str]
) -> tuple[dict[str, TopicPartitions], dict[str, str]]:
    """Returns the topics that there are, and what is wrong with others; none is missing."""
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
            error = _error(exception)
            if error.code() in _DENIED:
                faults[name] = (
                    f"not allowed to take records from the ingress topic {name}: grant Describe,"
                    " DescribeConfigs and Read"
                )
            elif error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
        else:
            found[name] = TopicPartitions(str(topic.topic_id), len(topic.partitions))
    return found, faults


def _known(
    admin: AdminClient, names: Iterable[str]
) -> tuple[dict[str, TopicPartitions], dict[str, str]]:
    """Returns topics that were made just now, once all brokers know them."""
    names = set(names)
    deadline = time.monotonic() + CALL_S
    while True:
        found, faults = _described(admin, sorted(names))
        unknown = names - (found.keys() | faults.keys())
        if not unknown:
            return found, faults
        if time.monotonic() >= deadline:
            made = {name: f"the ingress topic {name} was made, and is unknown" for name in unknown}
            return found, faults | made
        time.sleep(KNOWN_AGAIN_S)


def _made(admin: AdminClient, names: Iterable[str], wanted: IngressTopics) -> dict[str, str]:
    """Makes topics; returns why one could not be made."""
    brokers = len(admin.describe_cluster(request_timeout=CALL_S).result().nodes)
    copies = wanted.replication_factor or min(3, brokers)
    new = [
        NewTopic(
            name,
            num_partitions=wanted.partitions,
            replication_factor=copies,
            config={
                "cleanup.policy": "delete",
                "min.insync.replicas": str(max(1, copies - 1)),
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
            error = _error(exception)
            if error.code() != KafkaError.TOPIC_ALREADY_EXISTS:  # another node was quicker
                faults[name] = (
                    f"the ingress topic {name} is missing, and cannot be made: {error.str()}; make"
                    " it, grant Create, or set ingress = false"
                )
    return faults


def _unsuited(admin: AdminClient, names: Iterable[str]) -> dict[str, str]:
    """Returns which of these topics lose records that were not taken."""
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
            if _error(exception).code() not in _DENIED:
                raise
            faults[name] = (
                f"not allowed to read the configuration of the ingress topic {name}: grant"
                " DescribeConfigs, so that its cleanup.policy can be checked"
            )
        else:
            if policy is None:
                faults[name] = (
                    f"Kafka does not tell the cleanup.policy of the ingress topic {name}: look at"
                    " its configuration: a compacted one would lose records before they are read"
                )
            elif "compact" in policy:
                faults[name] = (
                    f"the ingress topic {name} has cleanup.policy={policy}: set it to delete, for"
                    " of records with one key the older ones would be gone before they are read"
                )
    return faults


def _error(exception: KafkaException) -> KafkaError:
    error = exception.args[0]
    assert isinstance(error, KafkaError)
    return error
