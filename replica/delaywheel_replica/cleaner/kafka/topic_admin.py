"""The real Kafka's answers about topics."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined] # its stubs re-export without saying so
    AclOperation,
    ConfigResource,
    OffsetSpec,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic

from delaywheel.kafka_admin import KafkaAdmin
from delaywheel_replica.cleaner.delivery.topics import (
    CreateTopics,
    Limits,
    TopicDescription,
    TopicState,
)
from delaywheel_replica.cleaner.kafka.client_log import LOGGER, error_of
from delaywheel_replica.cleaner.outside.ports import KafkaAway
from delaywheel_replica.kafka_settings import KafkaSettings

CALL_S = 5.0

SERVED_MOST = 20_000

_ANY_MS = 1 << 62
_REFERENCES = 2
_NOT_LED = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
}
"""What a broker answers about a partition that it is to lead, but does not yet."""
_STATES = {
    KafkaError.UNKNOWN_TOPIC_OR_PART: TopicState.MISSING,
    KafkaError.TOPIC_EXCEPTION: TopicState.ILLEGAL,
    KafkaError.TOPIC_AUTHORIZATION_FAILED: TopicState.DENIED,
}
"""What a refusal to describe a topic means for its state."""


class KafkaTopicAdmin:
    """Asks the brokers: `TopicAdmin` for the cleaner."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._admin = KafkaAdmin(settings.admin("topics"), logger=LOGGER)
        # How many partitions of each topic were seen to be led.
        self._served: dict[str, int] = {}

    def describe(self, names: Sequence[str]) -> Mapping[str, TopicDescription]:
        """Returns Kafka's present description of each topic; unanswered ones are absent."""
        self._admin.poll(0)  # logs what the client has reported meanwhile
        answers = {}
        error: KafkaException | None = None
        try:
            futures = self._admin.describe_topics(
                TopicCollection(list(names)),
                request_timeout=CALL_S,
                include_authorized_operations=True,
            )
        except KafkaException as exception:
            raise KafkaAway(str(exception)) from exception
        for name in names:
            try:
                topic = futures[name].result()
                answers[name] = _described(topic)
                release_leaked_id(topic)
            except KafkaException as exception:
                state = _STATES.get(error_of(exception).code())
                if state is None:
                    error = exception
                else:
                    answers[name] = TopicDescription(state)
        if error is not None and not answers:
            raise KafkaAway(str(error)) from error
        return answers | self._unserved(answers)

    def _unserved(self, answers: Mapping[str, TopicDescription]) -> dict[str, TopicDescription]:
        """Returns topics of which some partition's leader does not lead it yet.

        Metadata names the leader of a new partition before that has made its log. A producer that
        comes earlier is refused, and repeats nothing within a call: the transaction would time out.
        So each topic is asked for until its leaders answer once; and again if it has got
        partitions since, or was missing.
        """
        if len(self._served) > SERVED_MOST:
            self._served.clear()
        for name, answer in answers.items():
            if answer.state is TopicState.MISSING:
                self._served.pop(name, None)
        new = {
            name: answer
            for name, answer in answers.items()
            if answer.state is TopicState.PRESENT and self._served.get(name) != answer.partitions
        }
        if not new:
            return {}
        latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        asked = self._admin.list_offsets(
            {
                TopicPartition(name, number): latest
                for name, answer in new.items()
                for number in range(answer.partitions)
            },
            request_timeout=CALL_S,
        )
        unserved: dict[str, set[int]] = {}
        for at, future in asked.items():
            if _is_not_led(future):
                unserved.setdefault(at.topic, set()).add(at.partition)
        self._served |= {name: new[name].partitions for name in new.keys() - unserved.keys()}
        return {
            name: replace(new[name], state=TopicState.LEADERLESS, unled=frozenset(numbers))
            for name, numbers in unserved.items()
        }

    def limits(self, names: Sequence[str]) -> Mapping[str, Limits | None]:
        """Returns each topic's limits; None if this node may not read them."""
        wanted = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        limits: dict[str, Limits | None] = {}
        for resource, future in self._admin.describe_configs(
            wanted, request_timeout=CALL_S
        ).items():
            try:
                limits[resource.name] = _limits_of(future.result())
            except KafkaException:
                limits[resource.name] = None
        return limits

    def create(self, names: Sequence[str], how: CreateTopics) -> None:
        """Creates topics, as far as possible: the next answer shows which exist."""
        wanted = [
            NewTopic(
                name,
                num_partitions=how.partitions,
                replication_factor=how.replication_factor or -1,
            )
            for name in names
        ]
        for future in self._admin.create_topics(wanted, request_timeout=CALL_S).values():
            try:
                future.result()
            except KafkaException:
                continue


def _is_not_led(future: Future[Any]) -> bool:
    try:
        future.result()
    except KafkaException as exception:
        return error_of(exception).code() in _NOT_LED
    return False


def release_leaked_id(topic: Any) -> None:
    """Gives up the reference to a described topic's id that confluent-kafka 2.16 never gives up.

    Each description leaks one `Uuid`, and a topic in use is described twice a second: 2 GB a day
    for fifty. What counts as leaked is a reference beside the description's own and that of this
    call: where the library keeps none, nothing is done.
    """
    if sys.getrefcount(topic.topic_id) > _REFERENCES:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(topic.topic_id))


def may_write(topic: Any) -> bool:
    """Whether a topic's description, with authorized operations, says that we may write to it."""
    allowed = topic.authorized_operations
    return not allowed or AclOperation.WRITE in allowed or AclOperation.ALL in allowed


def _described(topic: Any) -> TopicDescription:
    unled = frozenset(each.id for each in topic.partitions if each.leader is None)
    state = TopicState.LEADERLESS if unled else TopicState.PRESENT
    if not may_write(topic):
        state = TopicState.DENIED
    lagging = {
        each.id: (len(each.isr), len(each.replicas))
        for each in topic.partitions
        if len(each.isr) < len(each.replicas)
    }
    fewest = min((len(each.replicas) for each in topic.partitions), default=0)
    return TopicDescription(state, len(topic.partitions), unled, lagging, fewest)


def _limits_of(config: Mapping[str, Any]) -> Limits:
    def bound(name: str) -> int | None:
        entry = config.get(name)
        given = config["message.timestamp.type"].value == "CreateTime" and entry is not None
        # Kafka writes "any" as the greatest long, to which nothing can be added.
        limited = given and entry is not None and int(entry.value) < _ANY_MS
        return int(entry.value) if limited and entry is not None else None

    return Limits(
        max_message_bytes=int(config["max.message.bytes"].value),
        needs_key="compact" in config["cleanup.policy"].value,
        oldest_ms=bound("message.timestamp.before.max.ms"),
        newest_ms=bound("message.timestamp.after.max.ms"),
        min_insync=int(config["min.insync.replicas"].value),
    )
