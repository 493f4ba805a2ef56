"""What Kafka answers: brokers and their versions, and what a node may do beside its topics.

Nothing is created, and no client of a running node is disturbed: the transactional id that is tried
has the prefix of the node's own, and is none of them.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined] # its stubs re-export without saying so
    AclOperation,
    AdminClient,
    BrokerMetadata,
    OffsetSpec,
)

from delaywheel.transactional import LEADER_TIMEOUT_MS, MOST_TIMEOUT_ADVICE, is_timeout_refused
from delaywheel_replica.cleaner.kafka.brokers import (
    ANSWER_S,
    UNREADABLE_ADVICE,
    VERIFICATION,
    ask_brokers,
    broker_objection,
    brokers_of,
    is_passing,
)
from delaywheel_replica.cli.doing.checking.items import (
    CheckedItem,
    CheckLevel,
    fault,
    fault_of,
    ok,
    warning,
)
from delaywheel_replica.cli.doing.checking.topics import CALL_S, topic_items
from delaywheel_replica.config import Config
from delaywheel_replica.kafka_settings import KafkaSettings

_AWAY_S: Final = 5.0
"""Where no connection comes about, it does so within this time, or hardly ever."""

_TRY_S: Final = 0.5
"""How long the first question is waited for: then the client is heard, which may name a fault.

Each further one is waited for twice as long, up to what a node waits for.
"""

_POLL_S: Final = 0.05
_CLOCKS_MS: Final = 2_000
"""The newest record of a leading node is younger than this, as far as the clocks agree."""

_REFUSED: Final = {KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError._RESOLVE}
_WRONG_PROTOCOL: Final = re.compile(r"SSL handshake failed|incorrect security\.protocol")
"""What the library says, as of a broken connection, where one side has TLS and the other none."""

_NO_COORDINATOR: Final = {
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_COORDINATOR,
}
"""What a broker answers about the first group that it is asked about, until it has its topic."""


def _silent_logger() -> logging.Logger:
    logger = logging.getLogger("delaywheel.silent")
    logger.disabled = True
    return logger


_SILENT: Final = _silent_logger()
"""For a client whose failures are items: the library prints what is fatal, whatever its level."""


class _Objections:
    """What the client library reports of connections; it repeats itself."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}

    def __call__(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN:
            text = error.str().partition(" (after ")[0].partition(", ")[0]
            self.texts.setdefault(text, error.code())

    @property
    def refusal(self) -> str | None:
        """What no further attempt will change."""
        return next(
            (
                text
                for text, code in self.texts.items()
                if code in _REFUSED or _WRONG_PROTOCOL.search(text)
            ),
            None,
        )


def kafka_items(config: Config, topics: Sequence[str]) -> Iterator[CheckedItem]:
    """Checks everything that a node needs of Kafka, and destination topics as well."""
    settings = config.kafka_settings
    objections = _Objections()
    client: dict[str, Any] = {**settings.admin("check"), "log_level": 0, "error_cb": objections}
    admin = AdminClient(client)
    try:
        brokers = _answer(admin, settings.names.control, objections)
    except KafkaException as exception:
        yield _away(settings, objections, exception)
        return
    try:
        if config.check_brokers:
            yield from _brokers(admin, brokers)
        else:
            yield warning("brokers", config.unchecked, f"see that each has {VERIFICATION}=true")
        yield _brokers_clock(admin, settings)
        yield from topic_items(admin, config, topics, brokers=len(brokers))
        yield _transactional_id(settings)
        yield from _groups(admin, config)
    except KafkaException as exception:
        yield _away(settings, objections, exception)


def _answer(admin: AdminClient, topic: str, objections: _Objections) -> list[BrokerMetadata]:
    """Returns Kafka's brokers, unless the client cannot get through."""
    begin, timeout_s = time.monotonic(), _TRY_S
    while True:
        try:
            return brokers_of(admin, topic, timeout_s=timeout_s)
        except KafkaException:
            admin.poll(_POLL_S)
            waited_s = time.monotonic() - begin
            is_away = waited_s > (_AWAY_S if objections.texts else CALL_S)
            if is_away or objections.refusal is not None:
                raise
            timeout_s = min(2 * timeout_s, ANSWER_S)


def _away(
    settings: KafkaSettings, objections: _Objections, exception: KafkaException
) -> CheckedItem:
    servers = settings.client["bootstrap.servers"]
    if objections.refusal is not None:
        advice = "correct the settings in [kafka]: security.protocol, sasl.*, ssl.* or the address"
        return fault("kafka", objections.refusal, advice)
    text = next(iter(objections.texts), exception.args[0].str())
    advice = "see that the brokers run, and that this machine reaches the addresses they advertise"
    return CheckedItem("kafka", CheckLevel.AWAY, f"{servers}: {text}", advice)


def _brokers(admin: AdminClient, brokers: Sequence[BrokerMetadata]) -> Iterator[CheckedItem]:
    asked = ask_brokers(admin, [broker.id for broker in brokers], timeout_s=_AWAY_S)
    for broker in brokers:
        what, at = f"broker {broker.id}", f"{broker.host}:{broker.port}"
        try:
            config = asked[broker.id].result()
        except KafkaException as exception:
            if exception.args[0].code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED:
                text = f"{at}: not allowed to read its configuration"
                yield fault(what, text, UNREADABLE_ADVICE)
            elif len(brokers) > 1 and is_passing(exception):
                text = f"{at} does not answer ({exception.args[0].str()})"
                yield fault(what, text, "start it, or see that this machine reaches that address")
            else:
                raise
            continue
        objection = broker_objection(str(broker.id), config)
        yield fault_of(what, objection) if objection else ok(what, f"{at}, {release(config)}")


def release(config: Mapping[str, Any]) -> str:
    """Returns which Kafka a broker is, as far as its configuration shows."""
    entry = config.get("inter.broker.protocol.version")  # gone since 4.0
    return "Kafka 4.0 or later" if entry is None else f"Kafka {entry.value}"


def _brokers_clock(admin: AdminClient, settings: KafkaSettings) -> CheckedItem:
    """Compares the clocks by the newest record that a leading node has written."""
    what = "kafka's clock"
    control = TopicPartition(settings.names.control, 0)
    newest: OffsetSpec = OffsetSpec.max_timestamp()  # type: ignore[no-untyped-call]
    asked = admin.list_offsets({control: newest}, request_timeout=CALL_S)
    try:
        stamp_ms = asked[control].result().timestamp
    except KafkaException:
        stamp_ms = -1
    behind_ms = stamp_ms - int(time.time() * 1000)
    if abs(behind_ms) <= _CLOCKS_MS:
        return ok(what, f"agrees within {_CLOCKS_MS // 1000} s")
    if behind_ms > 0:
        text = f"{behind_ms / 1000:,.1f} s ahead of this machine's"
        return warning(what, text, "correct one of the two clocks")
    return ok(what, "not compared, as no node leads; each one that is to lead compares them")


def _transactional_id(settings: KafkaSettings) -> CheckedItem:
    """Opens a transactional producer, as a node that is to lead does."""
    prefix = f"delaywheel-{settings.names.cluster_id}-"
    what = "transactional ids"
    own = settings.names.check_id
    wanted = settings.producer(own, purpose="check", timeout_ms=LEADER_TIMEOUT_MS)
    producer = Producer(wanted, logger=_SILENT)
    try:
        producer.init_transactions(CALL_S)
    except KafkaException as exception:
        error = exception.args[0]
        if error.code() == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            text = f"not allowed to use {own}"
            return fault(what, text, f"grant Describe and Write on {prefix}, prefixed")
        if is_timeout_refused(error):
            return fault(what, error.str(), MOST_TIMEOUT_ADVICE)
        return CheckedItem(
            what, CheckLevel.AWAY, error.str(), "see what the brokers log of transactions"
        )
    return ok(what, f"{prefix}… may be used")


def _groups(admin: AdminClient, config: Config) -> Iterator[CheckedItem]:
    settings = config.kafka_settings
    wanted = [(str(settings.consumer()["group.id"]), AclOperation.DESCRIBE)]
    if config.taken_topics:
        wanted.append((settings.names.ingress_group, AclOperation.READ))
    for name, operation in wanted:
        what, right = f"group {name}", operation.name.title()
        allowed = _allowed(admin, name)
        if allowed is None or {operation, AclOperation.ALL} & set(allowed):
            yield ok(what, f"{right} is allowed")
        else:
            yield warning(what, f"{right} is not allowed", f"grant {right} on it")


def _allowed(admin: AdminClient, group: str) -> list[AclOperation] | None:
    """Returns what may be done with a group; None if the brokers allow everything."""
    deadline = time.monotonic() + CALL_S
    while True:
        asked = admin.describe_consumer_groups(
            [group], request_timeout=CALL_S, include_authorized_operations=True
        )
        try:
            allowed: list[AclOperation] | None = asked[group].result().authorized_operations
        except KafkaException as exception:
            code = exception.args[0].code()
            if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
                return []
            if code not in _NO_COORDINATOR or time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)
        else:
            return allowed
