"""The topics of a group: which exist, what they take, and how missing ones are created."""

from __future__ import annotations

import struct
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined] # its stubs re-export without saying so
    AclOperation,
    AdminClient,
    ClusterMetadata,
    ConfigResource,
    OffsetSpec,
    ResourceType,
    TopicMetadata,
)
from confluent_kafka.cimpl import NewTopic

from delaywheel.consumer.kafka.failures import REFUSALS
from delaywheel.consumer.message import ConsumerError, ConsumerReason
from delaywheel.consumer.port import (
    ConsumedTopic,
    KafkaUnavailable,
    MissingRight,
    TopicTooSmall,
)
from delaywheel.consumer.records import Partition
from delaywheel.consumer.rules.subscription import TopicNames
from delaywheel.ingress import IngressLimits
from delaywheel.kafka_admin import takes_connection
from delaywheel.transactional import MIN_INSYNC

ASK_S = 5.0
TOPICS_S = 30.0
TRANSACTIONS = "__transaction_state"
NEW_TOPIC_S = 1.0
"""How long a broker may need to hear of a topic that another one knows."""
_FOR_GOOD = REFUSALS | {
    KafkaError.POLICY_VIOLATION,
    KafkaError.TOPIC_EXCEPTION,  # another topic differs from it only in '.' and '_'
    KafkaError.INVALID_PARTITIONS,
    KafkaError.INVALID_CONFIG,
}
_UNTOLD = REFUSALS | {KafkaError.UNKNOWN_TOPIC_OR_PART}
_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""What brokers before 2.8 answer."""
LARGEST_BATCH_BYTES = 90_000_000
"""What our topics and producer permit: a retry or letter is larger than its record."""
DEFAULT_BATCH_BYTES = 1_048_588
"""Kafka's default `max.message.bytes`."""


def partitions_of(admin: AdminClient) -> dict[str, int]:
    """Returns the number of partitions of each topic."""
    topics = admin.list_topics(timeout=ASK_S).topics
    return {name: len(topic.partitions) for name, topic in topics.items() if topic.error is None}


def topics_now(admin: AdminClient, names: Sequence[str]) -> dict[str, ConsumedTopic]:
    """Returns these topics as they are now, as far as they exist."""
    found: dict[str, ConsumedTopic] = {}
    if not names:
        return found
    asked = admin.describe_topics(TopicCollection(list(names)), request_timeout=ASK_S)
    for name, future in asked.items():
        try:
            described = future.result()
        except KafkaException as exception:
            code = exception.args[0].code()
            if code in REFUSALS:
                text = f"Describe on topic {name}"
                raise ConsumerError(ConsumerReason.NOT_AUTHORIZED, text) from exception
            if code != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
        else:
            topic_id = str(described.topic_id)
            found[name] = ConsumedTopic(
                "" if topic_id == _NO_ID else topic_id,
                len(described.partitions),
                {one.id for one in described.partitions if one.leader is None},
            )
    return found


def topics_unable(admin: AdminClient, names: Collection[str], timeout_s: float = ASK_S) -> set[str]:
    """Returns those of these topics of which some partition cannot be written to now.

    Each transaction that has touched such a partition stays open there, and keeps its id.
    """
    found: set[str] = set()
    are_there: dict[int, bool] = {}
    for name in sorted(names):
        seen = admin.list_topics(name, timeout=timeout_s)
        topic = seen.topics[name]
        if topic.error is not None:
            raise KafkaException(topic.error)
        lacking = [one for one in topic.partitions.values() if len(one.isrs) < len(one.replicas)]
        if _without_leader(seen, topic, are_there):
            found.add(name)
        elif lacking:
            least = int(_config(admin, name, timeout_s).get(MIN_INSYNC, "1"))
            if any(len(one.isrs) < least for one in lacking):
                found.add(name)
    return found


def ids_unable(admin: AdminClient, ids: Collection[str], timeout_s: float) -> set[str]:
    """Returns those of these transactional ids whose coordinator is not there.

    It leads the partition that the hash of an id chooses, as Java has it. None, if these
    credentials may not describe the topic of that.
    """
    seen = admin.list_topics(TRANSACTIONS, timeout=timeout_s)
    topic = seen.topics[TRANSACTIONS]
    away = _without_leader(seen, topic, {})
    return {one for one in ids if away and _hash(one) % len(topic.partitions) in away}


def _without_leader(
    seen: ClusterMetadata, topic: TopicMetadata, are_there: dict[int, bool]
) -> set[int]:
    """Returns the partitions of a topic whose leader is not there.

    Kafka names a broker that was killed until its session has ended, 9 s later. That it takes no
    connection is known at once, or after a second if its machine is away: brokers that were
    tried before are in `are_there`.
    """
    for leader in {one.leader for one in topic.partitions.values()} - are_there.keys():
        are_there[leader] = takes_connection(seen.brokers.get(leader))
    return {number for number, one in topic.partitions.items() if not are_there[one.leader]}


def _hash(text: str) -> int:
    """Returns the absolute value of Java's hash of a text."""
    hashed = 0
    for (unit,) in struct.iter_unpack(">H", text.encode("utf-16-be")):
        hashed = (31 * hashed + unit) & 0xFFFF_FFFF
    return 0 if hashed == 1 << 31 else min(hashed, (1 << 32) - hashed)


def limits_of(reader: Consumer, ingress: str) -> IngressLimits | None:
    """Returns what ingress takes: its group says it beside the offset of partition 0.

    `reader` is a client of that group, which it does not join. An admin client's
    `list_consumer_group_offsets` ends the process if the group has just got another coordinator
    (librdkafka's issue 5040).
    """
    try:
        (found,) = reader.committed([TopicPartition(ingress, 0)], timeout=ASK_S)
    except KafkaException as exception:
        if exception.args[0].code() in REFUSALS:
            return None
        raise
    return None if found.error is not None else IngressLimits.of_note(found.metadata)


def ends_of(admin: AdminClient, partitions: Sequence[Partition]) -> dict[Partition, int]:
    """Returns the offsets after the last records."""
    latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    return _offsets(admin, dict.fromkeys(partitions, latest))


def first_since(admin: AdminClient, at: Partition, since_ms: int) -> int:
    """Returns the offset of the first record with this timestamp or a later one; else the end."""
    found = _offsets(admin, {at: OffsetSpec.for_timestamp(since_ms)})[at]
    return found if found >= 0 else ends_of(admin, [at])[at]


def _offsets(admin: AdminClient, wanted: Mapping[Partition, OffsetSpec]) -> dict[Partition, int]:
    """Returns the offsets that are asked for.

    When a partition's leader was elected again, `list_offsets` asks with the former epoch, and is
    refused, until the client's metadata is a quarter of an hour old. So what is refused is asked
    again once the client has looked.
    """
    try:
        return _listed(admin, wanted)
    except KafkaException:
        admin.list_topics(timeout=ASK_S)
        return _listed(admin, wanted)


def _listed(admin: AdminClient, wanted: Mapping[Partition, OffsetSpec]) -> dict[Partition, int]:
    asked = {TopicPartition(at.topic, at.number): spec for at, spec in wanted.items()}
    answers = admin.list_offsets(asked, request_timeout=ASK_S)
    return {
        Partition(at.topic, at.partition): future.result().offset for at, future in answers.items()
    }


def make_topics(admin: AdminClient, wanted: Sequence[NewTopic]) -> dict[str, int]:
    """Creates topics, and waits until a broker reports them; returns their partitions' numbers.

    The next question may go to a broker that does not know them yet.
    """
    for name, future in admin.create_topics(list(wanted), request_timeout=ASK_S).items():
        try:
            future.result()
        except KafkaException as exception:
            error = exception.args[0]
            if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
                continue
            if error.code() in _FOR_GOOD:
                raise ConsumerError(
                    ConsumerReason.TOPICS_NOT_MADE, f"{name}: {error.str()}"
                ) from exception
            raise
    deadline = time.monotonic() + TOPICS_S
    names = {topic.topic for topic in wanted}
    while not names <= (known := partitions_of(admin)).keys():
        if time.monotonic() > deadline:
            raise KafkaUnavailable("topics were created but are not visible yet")
        time.sleep(0.05)
    return {name: known[name] for name in names}


def check_rights(
    admin: AdminClient, topics: Iterable[TopicNames], ingress: str, *, ordered: bool
) -> None:
    """Checks that these credentials may read and write what the consumer will, if Kafka says so.

    Raises ConsumerError, NOT_AUTHORIZED, with the topic and what is missing.
    """
    for missing in rights_missing(admin, topics, ingress, ordered=ordered):
        raise ConsumerError(
            ConsumerReason.NOT_AUTHORIZED, f"{missing.operation} on topic {missing.topic}"
        )


def rights_missing(
    admin: AdminClient, topics: Iterable[TopicNames], ingress: str, *, ordered: bool
) -> list[MissingRight]:
    """Returns which of the topics these credentials may not read or write, if Kafka says so."""
    wanted = {ingress: AclOperation.WRITE}
    for names in topics:
        wanted |= {names.source: AclOperation.READ, names.retry: AclOperation.READ}
        wanted |= {names.dead: AclOperation.WRITE}
        if ordered:
            wanted |= {names.order: AclOperation.WRITE}
    found = []
    for name, allowed in _allowed(admin, wanted).items():
        if allowed is None:
            found.append(MissingRight(name, "Describe"))
        elif allowed and wanted[name] not in allowed:
            found.append(MissingRight(name, wanted[name].name.capitalize()))
    return found


def may_write(admin: AdminClient, topic: str) -> bool | None:
    """Returns whether these credentials may write to a topic, if Kafka says so; None: no topic."""
    allowed = _allowed(admin, [topic])
    if topic not in allowed:
        return None
    operations = allowed[topic]
    return operations is not None and (not operations or AclOperation.WRITE in operations)


def _allowed(
    admin: AdminClient, topics: Iterable[str]
) -> dict[str, Collection[AclOperation] | None]:
    """Returns what may be done with topics that are there; empty: nobody says; None: not seen."""
    described = admin.describe_topics(
        TopicCollection(list(topics)), include_authorized_operations=True, request_timeout=ASK_S
    )
    found: dict[str, Collection[AclOperation] | None] = {}
    for name, asked in described.items():
        try:
            found[name] = asked.result().authorized_operations or ()
        except KafkaException as exception:
            code = exception.args[0].code()
            if code in REFUSALS:
                found[name] = None
            elif code != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
    return found


def check_policies(admin: AdminClient, topics: Iterable[TopicNames], *, ordered: bool) -> None:
    """Raises ConsumerError unless topics of retries and letters keep all, of orders the last."""
    for names in topics:
        for name in (names.retry, names.dead):
            if "compact" in _config(admin, name).get("cleanup.policy", "delete"):
                raise ConsumerError(
                    ConsumerReason.TOPIC_COMPACTED, f"cleanup.policy of {name} must be delete"
                )
        if ordered:
            policy = _config(admin, names.order).get("cleanup.policy", "compact")
            if policy != "compact":
                raise ConsumerError(
                    ConsumerReason.ORDER_IMPOSSIBLE,
                    f"cleanup.policy of {names.order} is {policy}, and must be compact",
                )


def check_sizes(admin: AdminClient, topics: Iterable[TopicNames], ingress: str) -> dict[str, int]:
    """Returns the largest batch that the ingress topic and those of retries and letters take.

    Raises TopicTooSmall if one of these takes less than the topic whose records go there.
    """
    most_bytes = {ingress: _largest_batch(admin, ingress) or LARGEST_BATCH_BYTES}
    for names in topics:
        source_bytes = _largest_batch(admin, names.source) or 0
        # We would hear that a letter is refused, but not that a retry is.
        unknown = {names.dead: LARGEST_BATCH_BYTES, names.retry: DEFAULT_BATCH_BYTES}
        for name, unknown_bytes in unknown.items():
            most_bytes[name] = _largest_batch(admin, name) or unknown_bytes
            if most_bytes[name] < source_bytes:
                raise TopicTooSmall(
                    name,
                    f"max.message.bytes of {name} is {most_bytes[name]:,},"
                    f" that of {names.source} {source_bytes:,}",
                )
    return most_bytes


def _largest_batch(admin: AdminClient, topic: str) -> int | None:
    """Returns `max.message.bytes`; None if we may not know it."""
    found = _config(admin, topic).get("max.message.bytes")
    return None if found is None else int(found)


def _config(admin: AdminClient, topic: str, timeout_s: float = ASK_S) -> dict[str, str]:
    """Returns the settings of a topic; empty if it is not there, or we lack the permission.

    A topic that one broker does not know is new, or gone: so others are asked for a moment.
    """
    resource = ConfigResource(ResourceType.TOPIC, topic)
    deadline = time.monotonic() + NEW_TOPIC_S
    while True:
        try:
            asked = admin.describe_configs([resource], request_timeout=timeout_s)
            answer = asked[resource].result()
        except KafkaException as exception:
            code = exception.args[0].code()
            if code == KafkaError.UNKNOWN_TOPIC_OR_PART and time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            if code not in _UNTOLD:
                raise
            return {}
        break
    return {name: str(entry.value) for name, entry in answer.items()}
