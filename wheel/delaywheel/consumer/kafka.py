"""The real Kafka, on confluent-kafka.

A transaction presents the membership (member id, generation) of the assignment under which its
records were read, and brokers refuse one of an earlier generation. The membership is kept from the
moment of the assignment: what the client reports later may be newer than the records or, once the
group has expelled us, empty, and brokers do not check an empty one at all.

Kafka answers CONCURRENT_TRANSACTIONS while it is still writing the markers of the last transaction,
and the client retries after its `retry.backoff.ms`: with the leader's 30 s (decision 4), the second
of two transactions without records failed. So the backoff is short here, and the client may also
repeat the end of a transaction when a connection breaks. A late copy would end a later transaction
of the same epoch:

| a commit | is | the next transaction |
|---|---|---|
| succeeded before anything can have been repeated | committed | uses the same producer |
| succeeded later | committed; a copy may be under way | uses a new one, whose epoch fences it |
| failed, or did not end | unknown | uses a new one; the committed offsets show what happened |
"""

from __future__ import annotations

import logging
import re
import struct
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined] # its stubs re-export without saying so
from confluent_kafka.cimpl import NewTopic

from delaywheel.consumer.message import ConsumerError, ConsumerReason
from delaywheel.consumer.order import Away, check_partitions, read_away
from delaywheel.consumer.port import KafkaAway, OnPartitions, Start
from delaywheel.consumer.records import Incoming, Outgoing, Partition, Place
from delaywheel.consumer.settings import Settings
from delaywheel.ingress import ingress_topic
from delaywheel.record_headers import headers_of
from delaywheel.transactional import MAX_CALL_MS, fatal_errors_as_they_are, transactional

_LOG = logging.getLogger("delaywheel.consumer")

CALL_S = MAX_CALL_MS / 1000
ASK_S = 5.0
TOPICS_S = 30.0
AWAY_S = 30.0
FETCH_AWAY = 5_000
RETRY_BACKOFF_MS = 250
"""How long the client waits before it repeats a request, give or take a fifth."""
END_REPEATED_S = 0.8 * RETRY_BACKOFF_MS / 1000
"""The end of a transaction is not repeated sooner than this."""
OFFSETS_REPEATED_S = 0.5
"""Nor are offsets: librdkafka's own delay, whatever the backoff."""
LARGEST_BATCH_BYTES = 90_000_000
"""What our topics and producer permit: a retry or letter is larger than its record."""
DEFAULT_BATCH_BYTES = 1_048_588
"""Kafka's default `max.message.bytes`, for topics that we may not describe."""

_PARTITION_EOF = KafkaError._PARTITION_EOF  # noqa: SLF001 - its name in the library
_METADATA = struct.Struct("=7si")
_METADATA_MAGIC = b"CGMDv2:"
_REFUSALS = frozenset(
    {
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)


class KafkaBroker:
    """`Broker`, as a consumer uses it."""

    def __init__(self, settings: Settings) -> None:
        """Does not connect before `start`."""
        self._settings = settings
        instance = settings.instance or uuid.uuid4().hex
        self._transactional_id = f"delaywheel-retry-{settings.group}-{instance}"
        self._consumer: Consumer | None = None
        self._raised: Exception | None = None
        self._producer: Producer | None = None
        self._is_copy_loose = False
        self._ingress: str | None = None

    def start(self) -> Start:
        """See `Broker`."""
        try:
            admin = AdminClient(self._client())
            partitions = _partitions(admin)
            ingress = self._ingress = self._ingress_topic(partitions)
            for source in (names.source for names in self._settings.topics):
                if source not in partitions:
                    raise ConsumerError(ConsumerReason.TOPIC_MISSING, f"topic {source}")
            if self._settings.create_topics:
                self._create(admin, partitions)
            known = _partitions(admin)
            missing = [
                name
                for names in self._settings.topics
                for name in self._settings.made_topics(names)
                if name not in known
            ]
            if missing:
                raise ConsumerError(ConsumerReason.TOPICS_NOT_MADE, ", ".join(missing))
            if self._settings.ordered:
                check_partitions(self._settings.topics, known)
            return Start(ingress, _largest_batch(admin, ingress))
        except KafkaException as exception:
            raise _away(exception) from exception

    def subscribe(
        self, *, on_assign: OnPartitions, on_revoke: OnPartitions, on_lost: OnPartitions
    ) -> None:
        """See `Broker`."""
        instance = self._settings.instance
        consumer = Consumer(
            {
                **({} if instance is None else {"group.instance.id": instance}),
                "session.timeout.ms": 10_000,
                "heartbeat.interval.ms": 3_000,
                "queued.max.messages.kbytes": 16_384,
                "fetch.wait.max.ms": 100,
                **self._client(),
                "group.id": self._settings.group,
                "group.protocol": "classic",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "partition.assignment.strategy": "range",
            },
            logger=_LOG,
        )
        self._consumer = consumer
        consumer.subscribe(
            self._settings.read_topics,
            on_assign=self._kept(on_assign),
            on_revoke=self._kept(on_revoke),
            on_lost=self._kept(on_lost),
        )

    def _kept(self, call: OnPartitions) -> Callable[[Consumer, list[TopicPartition]], None]:
        """Keeps what a callback raises, which the library would lose: `fetch` raises it.

        A static member may be assigned what its instance read before, until the group has heard of
        other topics: those partitions are left alone.
        """
        own = set(self._settings.read_topics)

        def called(_: Consumer, given: list[TopicPartition]) -> None:
            try:
                call([Partition(one.topic, one.partition) for one in given if one.topic in own])
            except Exception as error:  # noqa: BLE001 - see above
                self._raised = error

        return called

    def fetch(self, most: int, timeout_s: float) -> list[Incoming]:
        """See `Broker`."""
        records = []
        messages = self._joined.consume(most, timeout_s)
        if self._raised is not None:
            raise self._raised
        for message in messages:
            error = message.error()
            if error is None:
                records.append(_incoming(message))
            elif error.fatal():
                raise ConsumerError(ConsumerReason.KAFKA_FATAL, error.str())
            elif error.code() in _REFUSALS:
                raise ConsumerError(ConsumerReason.NOT_AUTHORIZED, error.str())
            else:
                _LOG.warning("Kafka: %s", error.str())
        return records

    def committed(self, partitions: Sequence[Partition]) -> dict[Partition, int | None]:
        """See `Broker`."""
        if not partitions:
            return {}
        wanted = [TopicPartition(topic, number) for topic, number in partitions]
        try:
            answer = self._joined.committed(wanted, timeout=ASK_S)
        except KafkaException as exception:
            raise _away(exception) from exception
        found: dict[Partition, int | None] = {}
        for one in answer:
            if one.error is not None:
                raise KafkaAway(one.error.str())
            found[Partition(one.topic, one.partition)] = one.offset if one.offset >= 0 else None
        return found

    def away(self, lanes: Sequence[Partition]) -> dict[Partition, list[Away]]:
        """See `Broker`."""
        if not lanes:
            return {}
        topics = {lane: self._settings.names_of(lane.topic).order for lane in lanes}
        wanted = {lane: TopicPartition(topic, lane.number) for lane, topic in topics.items()}
        try:
            return _read_away(self._client(), self._settings.group, wanted)
        except KafkaException as exception:
            raise _away(exception) from exception

    def ends(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """See `Broker`."""
        found = {}
        try:
            for partition in partitions:
                answer = self._joined.get_watermark_offsets(
                    TopicPartition(partition.topic, partition.number), timeout=ASK_S
                )
                if answer is None:
                    raise KafkaAway(f"the end of {partition} is unknown")
                found[partition] = answer[1]
        except KafkaException as exception:
            raise _away(exception) from exception
        return found

    def assign(self, positions: Mapping[Partition, int | None]) -> None:
        """See `Broker`."""
        self._joined.assign(
            [
                TopicPartition(topic, number, OFFSET_BEGINNING if offset is None else offset)
                for (topic, number), offset in positions.items()
            ]
        )

    def membership(self) -> bytes | None:
        """See `Broker`."""
        answer = cast("bytes | None", self._joined.consumer_group_metadata())
        if answer is None or len(answer) < _METADATA.size:
            return None
        magic, generation = _METADATA.unpack_from(answer)
        return None if magic != _METADATA_MAGIC or generation < 0 else answer

    def pause(self, partitions: Sequence[Partition]) -> None:
        """See `Broker`."""
        self._joined.pause([TopicPartition(topic, number) for topic, number in partitions])

    def resume(self, partitions: Sequence[Partition]) -> None:
        """See `Broker`."""
        self._joined.resume([TopicPartition(topic, number) for topic, number in partitions])

    def commit(
        self, records: Sequence[Outgoing], offsets: Mapping[Partition, int], membership: bytes
    ) -> str | None:
        """See `Broker`."""
        if self._is_copy_loose:
            try:
                self._replace_producer()
            except KafkaAway as away:
                return str(away)
        producer = self._producer
        if producer is None:
            return "no transactional producer"
        passed = [
            TopicPartition(topic, number, offset) for (topic, number), offset in offsets.items()
        ]
        try:
            producer.begin_transaction()
            for record in records:
                _write(producer, record)
            with fatal_errors_as_they_are():
                unanswered = producer.flush(CALL_S)
            if unanswered:
                return f"no answer to {unanswered} records"
            began_s = time.monotonic()
            _send_offsets(producer, passed, membership)
            ending_s = time.monotonic()
            producer.commit_transaction(CALL_S)
        except (KafkaException, BufferError, KafkaAway) as exception:
            return str(exception)
        ended_s = time.monotonic()
        self._is_copy_loose = (
            ending_s - began_s >= OFFSETS_REPEATED_S or ended_s - ending_s >= END_REPEATED_S
        )
        return None

    def renew_producer(self) -> None:
        """See `Broker`."""
        self._replace_producer()
        if self._ingress is not None:
            try:
                known = AdminClient(self._client()).list_topics(timeout=ASK_S).topics
            except KafkaException as exception:
                raise _away(exception) from exception
            if self._ingress not in known:
                raise _no_ingress(self._ingress)

    def _replace_producer(self) -> None:
        self._drop_producer()
        try:
            self._producer = Producer(
                {
                    "linger.ms": 5,
                    **self._client(),
                    **transactional(self._transactional_id),
                    "retry.backoff.ms": RETRY_BACKOFF_MS,
                    "retry.backoff.max.ms": RETRY_BACKOFF_MS,
                    "message.max.bytes": LARGEST_BATCH_BYTES,
                },
                logger=_LOG,
            )
            self._producer.init_transactions(CALL_S)
            self._is_copy_loose = False
        except KafkaException as exception:
            self._drop_producer()
            raise _away(exception) from exception

    def close(self) -> None:
        """See `Broker`."""
        self._drop_producer()
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    @property
    def _joined(self) -> Consumer:
        assert self._consumer is not None
        return self._consumer

    def _client(self) -> dict[str, Any]:
        return {
            "log_level": 3,
            **self._settings.kafka,
            "bootstrap.servers": self._settings.bootstrap,
        }

    def _ingress_topic(self, topics: Mapping[str, int]) -> str:
        cluster = self._settings.cluster
        name = re.escape(ingress_topic(cluster)) if cluster else ingress_topic(".+")
        found = [topic for topic in topics if re.fullmatch(name, topic)]
        if not found:
            raise _no_ingress(ingress_topic(cluster or "<cluster>"))
        if len(found) > 1:
            raise ConsumerError(ConsumerReason.CLUSTER_AMBIGUOUS, ", ".join(sorted(found)))
        return found[0]

    def _create(self, admin: AdminClient, known: Mapping[str, int]) -> None:
        """Creates missing topics."""
        large = {"max.message.bytes": str(LARGEST_BATCH_BYTES)}
        compacted = {"cleanup.policy": "compact", "segment.ms": "600000"}
        _make(
            admin,
            [
                NewTopic(
                    name,
                    num_partitions=known[names.source],
                    replication_factor=-1,
                    config=compacted if name == names.order else large,
                )
                for names in self._settings.topics
                for name in self._settings.made_topics(names)
                if name not in known
            ],
        )

    def _drop_producer(self) -> None:
        """Drops it on another thread: librdkafka joins its own ones."""
        dropped, self._producer = [self._producer], None
        threading.Thread(target=dropped.clear, name="destroy producer", daemon=True).start()


def _send_offsets(producer: Producer, offsets: list[TopicPartition], membership: bytes) -> None:
    """Adds offsets to a transaction, on a thread that may be abandoned.

    The call of librdkafka does not end while the group's coordinator is away, whatever its time-out
    (its issue 5456), and when a single broker was restarted it did not end at all. The producer is
    replaced then, which fences the transaction that the call belongs to.

    Raises:
        KafkaException: Kafka, or the client, refused.
        KafkaAway: The call did not end.
    """
    raised: list[Exception] = []
    has_ended = threading.Event()

    def call() -> None:
        try:
            producer.send_offsets_to_transaction(offsets, membership, CALL_S)
        except Exception as error:  # noqa: BLE001 - it is raised where the caller waits
            raised.append(error)
        has_ended.set()

    threading.Thread(target=call, name="delaywheel-offsets", daemon=True).start()
    if not has_ended.wait(CALL_S):
        raise KafkaAway("the coordinator of the group did not answer")
    if raised:
        raise raised[0]


def _no_ingress(topic: str) -> ConsumerError:
    return ConsumerError(
        ConsumerReason.INGRESS_MISSING,
        f"Kafka has no topic {topic}, from which delaywheel takes what is to come back",
    )


def _partitions(admin: AdminClient) -> dict[str, int]:
    """Returns the number of partitions of each topic."""
    topics = admin.list_topics(timeout=ASK_S).topics
    return {name: len(topic.partitions) for name, topic in topics.items() if topic.error is None}


def _make(admin: AdminClient, wanted: Sequence[NewTopic]) -> None:
    """Creates topics, and waits until the brokers report them."""
    if not wanted:
        return
    for name, future in admin.create_topics(list(wanted), request_timeout=ASK_S).items():
        try:
            future.result()
        except KafkaException as exception:
            error = exception.args[0]
            if error.code() in _REFUSALS or error.code() == KafkaError.POLICY_VIOLATION:
                raise ConsumerError(
                    ConsumerReason.TOPICS_NOT_MADE, f"{name}: {error.str()}"
                ) from exception
            if error.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
    deadline = time.monotonic() + TOPICS_S
    while not {topic.topic for topic in wanted} <= _partitions(admin).keys():
        if time.monotonic() > deadline:
            raise KafkaAway("topics were created but are not visible yet")
        time.sleep(0.05)


def _read_away(
    client: Mapping[str, Any], group: str, wanted: Mapping[Partition, TopicPartition]
) -> dict[Partition, list[Away]]:
    """Reads partitions of order topics up to their present ends, open transactions included."""
    settings = {**client, "group.id": group, "enable.auto.commit": False}
    dirty = Consumer({**settings, "isolation.level": "read_uncommitted"}, logger=_LOG)
    reader = Consumer(
        {
            **settings,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 50,
        },
        logger=_LOG,
    )
    try:
        ends: dict[tuple[str, int], int] = {}
        for where in wanted.values():
            answer = dirty.get_watermark_offsets(where, timeout=ASK_S)
            if answer is None:
                raise KafkaAway("the end of an order topic is unknown")
            ends[where.topic, where.partition] = answer[1]
        reader.assign([TopicPartition(topic, number, 0) for topic, number in ends])
        read: dict[tuple[str, int], list[tuple[bytes | None, bytes | None]]]
        read = {where: [] for where in ends}
        deadline = time.monotonic() + AWAY_S
        while any(ends.values()):
            if time.monotonic() > deadline:
                raise KafkaAway("the end of an order topic was not reached in time")
            for message in reader.consume(FETCH_AWAY, 0.05):
                topic, partition, offset = message.topic(), message.partition(), message.offset()
                assert topic is not None
                assert partition is not None
                assert offset is not None
                error = message.error()
                if error is None:
                    read[topic, partition].append((message.key(), message.value()))
                # The end of committed records would come too early: a transaction may be open
                # there.
                elif error.code() == _PARTITION_EOF and offset >= ends[topic, partition]:
                    ends[topic, partition] = 0
    finally:
        dirty.close()
        reader.close()
    return {lane: read_away(read[where.topic, where.partition]) for lane, where in wanted.items()}


def _largest_batch(admin: AdminClient, topic: str) -> int:
    resource = ConfigResource(ResourceType.TOPIC, topic)
    try:
        answer = admin.describe_configs([resource], request_timeout=ASK_S)[resource].result()
        return int(answer["max.message.bytes"].value)
    except KafkaException:  # we may lack the permission
        return DEFAULT_BATCH_BYTES


def _incoming(message: Message) -> Incoming:
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None
    assert partition is not None
    assert offset is not None
    place = Place(topic, partition, offset, message.timestamp()[1])
    return Incoming(place, message.key(), message.value(), headers_of(message) or [])


def _write(producer: Producer, record: Outgoing) -> None:
    def hand_over() -> None:
        producer.produce(
            record.topic,
            value=record.value,
            key=record.key,
            headers=record.headers,  # type: ignore[arg-type]  # its list is typed as invariant
            partition=record.partition,
        )

    try:
        hand_over()
    except BufferError:
        # The client's queue is full: once that is sent, there is room.
        with fatal_errors_as_they_are():
            producer.flush(CALL_S)
        hand_over()


def _away(exception: KafkaException) -> Exception:
    error = exception.args[0]
    if error.code() in _REFUSALS:
        return ConsumerError(ConsumerReason.NOT_AUTHORIZED, error.str())
    return KafkaAway(f"{error.name()}: {error.str()}")
