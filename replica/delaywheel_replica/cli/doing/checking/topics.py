"""The topics that a node will use: whether they are there, what it may do, and how they are set.

| topics | missing means |
|---|---|
| our own three, and those that records are taken from | the first node that leads creates them, if
| | it may |
| destination topics, as named by the operator | with `create_topics` the same; otherwise a fault |

Nodes lead without the halves topic, and refuse halves: whatever is wrong with it is a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined] # its stubs re-export without saying so
    AclOperation,
    AdminClient,
    ConfigResource,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic

from delaywheel.transactional import replicas_on
from delaywheel_replica.cleaner.kafka.brokers import (
    OwnTopic,
    fewest_replicas,
    own_topics,
    risks_of,
    topic_objections,
)
from delaywheel_replica.cli.doing.checking.items import (
    CheckedItem,
    fault,
    fault_of,
    lessened,
    ok,
    warning,
)
from delaywheel_replica.config import Config
from delaywheel_replica.kafka_settings import FORWARD_ROOM_BYTES
from delaywheel_replica.quantities import counted

CALL_S: Final = 15.0
"""The first call about groups or transactions has a broker create a topic of its own."""

_OWN: Final = ("Describe", "DescribeConfigs", "Read", "Write")
_TAKEN: Final = ("Describe", "DescribeConfigs", "Read")

_OPERATIONS: Final = {
    "Describe": AclOperation.DESCRIBE,
    "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS,
    "Read": AclOperation.READ,
    "Write": AclOperation.WRITE,
}


def topic_items(
    admin: AdminClient, config: Config, destinations: Iterable[str], *, brokers: int
) -> Iterator[CheckedItem]:
    """Checks our own topics, ingress topics, and these destination topics."""
    settings = config.kafka_settings
    own = {topic.name: topic for topic in own_topics(settings) if topic.is_made}
    rights = {
        **dict.fromkeys(destinations, _OWN),
        **dict.fromkeys(sorted(config.taken_topics), _TAKEN),
        **dict.fromkeys(own, _OWN),
    }
    names = [*own, *(name for name in rights if name not in own)]
    described = admin.describe_topics(
        TopicCollection(names), request_timeout=CALL_S, include_authorized_operations=True
    )
    for name in names:
        is_made = name in own or name in config.taken_topics or config.create_topics
        topic = own.get(name)
        try:
            found = described[name].result()
        except KafkaException as exception:
            items = [_absent(admin, name, exception.args[0], rights[name], is_made=is_made)]
        else:
            items = list(_forbidden(name, found, rights[name]))
        if not items:
            topic_config = _config_of(admin, name)
            if topic is not None:
                items = [*_own(topic, found, topic_config, config)]
            elif name in config.taken_topics:
                items = [*_taken(name, topic_config)]
            else:
                items = [*_destination(name, topic_config, config)]
            if topic is not None or name == settings.names.ingress:
                items += _risks(name, found, topic_config, config, brokers)
            items = items or [ok(f"topic {name}", _summary(found, topic_config))]
        yield from items if topic is None or topic.is_needed else map(lessened, items)


def _absent(
    admin: AdminClient, name: str, error: KafkaError, wanted: Iterable[str], *, is_made: bool
) -> CheckedItem:
    what = f"topic {name}"
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return fault(what, "not allowed to describe it", f"grant {', '.join(wanted)} on it")
    if error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
        raise KafkaException(error)
    if not is_made:
        advice = f"create it (delaywheel topic create {name}), or correct the name"
        return fault(what, "there is none", advice)
    new = [NewTopic(name, num_partitions=1, replication_factor=-1)]
    (tried,) = admin.create_topics(new, validate_only=True, request_timeout=CALL_S).values()
    try:
        tried.result()
    except KafkaException as exception:
        code = exception.args[0].code()
        if code == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            return fault(what, "it is missing, and may not be created", "grant Create on it")
        if code == KafkaError.TOPIC_ALREADY_EXISTS:
            return warning(what, "it is new, and not every broker knows it yet", "check again")
        return fault(what, f"it is missing: {exception.args[0].str()}", "create it by hand")
    return ok(what, "missing, and will be created")


def _forbidden(name: str, described: Any, wanted: Iterable[str]) -> Iterator[CheckedItem]:
    """Names what is not allowed; without it the rest cannot be relied on."""
    allowed = described.authorized_operations
    if allowed and AclOperation.ALL not in allowed:
        denied = ", ".join(each for each in wanted if _OPERATIONS[each] not in allowed)
        if denied:
            yield fault(f"topic {name}", f"not allowed: {denied}", f"grant {denied} on it")


def _config_of(admin: AdminClient, name: str) -> Mapping[str, Any]:
    asked = admin.describe_configs(
        [ConfigResource(ResourceType.TOPIC, name)], request_timeout=CALL_S
    )
    (future,) = asked.values()
    found: Mapping[str, Any] = future.result()
    return found


def _own(
    topic: OwnTopic, described: Any, topic_config: Mapping[str, Any], config: Config
) -> Iterator[CheckedItem]:
    """Says what the cleaner would say of one of our topics, as far as it is not in order."""
    what = f"topic {topic.name}"
    for objection in topic_objections(topic, topic_config, config.kafka_settings):
        yield fault_of(what, objection)
    if topic.compacted and len(described.partitions) != 1:
        text = f"it has {counted(len(described.partitions), 'partition')}"
        yield fault(what, text, "delete it while nothing is pending: it must have 1")


def _risks(
    name: str, described: Any, topic_config: Mapping[str, Any], config: Config, brokers: int
) -> Iterator[CheckedItem]:
    """Says what a leader would warn of, with one of our topics."""
    risks = risks_of(
        name,
        replicas=fewest_replicas(described),
        enough=config.control_replication_factor or replicas_on(brokers),
        config={name: entry.value for name, entry in topic_config.items()},
        control=name == config.kafka_settings.names.control,
    )
    for risk in risks:
        text, _, advice = risk.partition(": ")
        yield warning(f"topic {name}", text, advice)


def _taken(name: str, topic_config: Mapping[str, Any]) -> Iterator[CheckedItem]:
    if "compact" in topic_config["cleanup.policy"].value:
        advice = "set its cleanup.policy to delete: compaction removes records of a key"
        yield fault(f"topic {name}", "it is compacted, and no record is taken", advice)


def _destination(
    name: str, topic_config: Mapping[str, Any], config: Config
) -> Iterator[CheckedItem]:
    """Names what would make dead letters of messages that the node accepts."""
    takes = int(topic_config["max.message.bytes"].value)
    needed = config.max_message_bytes + FORWARD_ROOM_BYTES
    if takes < needed and not config.kafka_settings.compresses:
        text = f"takes {takes:,} bytes a message; one of max_message_bytes needs {needed:,}"
        yield warning(f"topic {name}", text, "raise max.message.bytes, or lower max_message_bytes")
    if "compact" in topic_config["cleanup.policy"].value:
        text = "it is compacted: a message without a key becomes a dead letter"
        yield warning(f"topic {name}", text, "see that every message for it has a key")
    kept_ms = int(topic_config["retention.ms"].value)
    own_times = topic_config["message.timestamp.type"].value == "CreateTime"
    if own_times and 0 <= kept_ms < config.span_seconds * 1000:
        text = f"retention.ms={kept_ms} is less than the greatest delay: a message that was sent"
        text += " with a timestamp of its own may be deleted as soon as it is delivered"
        yield warning(f"topic {name}", text, "raise retention.ms, or send without timestamps")


def _summary(described: Any, topic_config: Mapping[str, Any]) -> str:
    replicas = fewest_replicas(described)
    return (
        f"{counted(len(described.partitions), 'partition')},"
        f" {counted(replicas, 'replica')},"
        f" {topic_config['cleanup.policy'].value},"
        f" {int(topic_config['max.message.bytes'].value):,} bytes a message"
    )
