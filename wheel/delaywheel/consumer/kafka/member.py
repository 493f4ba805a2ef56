"""The real Kafka, on confluent-kafka.

A transaction presents the membership (member id, generation) of the assignment under which its
records were read, and brokers refuse one of an earlier generation. The membership is kept from the
moment of the assignment: what the client reports later may be newer than the records or, once the
group has expelled us, empty, and brokers do not check an empty one at all.

Where partitions move one by one, generations (in the newer protocol, epochs) go on while a member
keeps its partitions, so the membership of the moment is presented. It cannot be newer than the loss
of a partition: the client joins again only after our callback has given that up.

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

A new producer of the same id ends what the former one has begun. That does not come to its end
while a partition that was written to has no leader, or too few replicas in sync: Kafka answers
CONCURRENT_TRANSACTIONS to every producer of the id until the marker is written there; or its
coordinator may be away. So the next one has another id, one whose coordinator is there if that can
be known, and each one that fails has the next wait for longer: brokers may just be busy. What is
left of the former transaction, and why it decides nothing any more, is in decision 302.
"""

from __future__ import annotations

import logging
import re
import struct
import threading
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, cast

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from delaywheel.consumer.kafka.failures import FENCED, REFUSALS, translated_errors
from delaywheel.consumer.kafka.fencing import InstanceFences
from delaywheel.consumer.kafka.fetching import in_columns
from delaywheel.consumer.kafka.order_topic import ORDER_CONFIG, OrderTopics
from delaywheel.consumer.kafka.topics import (
    ASK_S,
    LARGEST_BATCH_BYTES,
    check_policies,
    check_rights,
    check_sizes,
    ends_of,
    first_since,
    ids_unable,
    limits_of,
    make_topics,
    may_write,
    partitions_of,
    rights_missing,
    topics_now,
    topics_unable,
)
from delaywheel.consumer.kafka.transaction import (
    CALL_S,
    RETRY_BACKOFF_MS,
    UNANSWERED_S,
    Transaction,
    read_note,
)
from delaywheel.consumer.message import ConsumerError, ConsumerReason
from delaywheel.consumer.order import Away, check_partitions
from delaywheel.consumer.port import (
    ConsumedTopic,
    IngressToCome,
    KafkaUnavailable,
    MissingRight,
    OnPartitions,
    Start,
    TransactionFailure,
    Unread,
)
from delaywheel.consumer.records import FetchedRecords, Partition, Passed
from delaywheel.consumer.rules.subscription import TopicNames
from delaywheel.consumer.settings import ConsumerSettings, transactional_ids
from delaywheel.ingress import IngressLimits, ingress_topic
from delaywheel.kafka_admin import KafkaAdmin
from delaywheel.transactional import (
    MIN_INSYNC,
    OpenTransactionWatch,
    Outgoing,
    least_in_sync,
    replicas_on,
    transactional,
)

_LOG = logging.getLogger("delaywheel.consumer")

TOPICS_EVERY_MS: Final = 10_000
"""How often the client looks for topics that were recreated, and for new partitions.

Its own five minutes are how long a group reads nothing of a topic whose absence it has seen.
"""

ENDED_S: Final = 3.0
"""So long Kafka has at first to end the former transaction of an id, before another id is tried."""
UNENDED_S: Final = 0.5
"""So long it has if it has said why it cannot: it ends at once what it can, in other partitions."""

_GROUP: Final[dict[str, dict[str, str]]] = {
    "eager": {"group.protocol": "classic", "partition.assignment.strategy": "range"},
    "cooperative": {
        "group.protocol": "classic",
        "partition.assignment.strategy": "cooperative-sticky",
    },
    "consumer": {"group.protocol": "consumer"},
}

_METADATA = struct.Struct("=7si")
_METADATA_MAGIC = b"CGMDv2:"


class KafkaBroker:
    """`Broker`, as a consumer uses it."""

    def __init__(self, settings: ConsumerSettings) -> None:
        """Does not connect before `start`."""
        self._settings = settings
        instance = settings.instance or uuid.uuid4().hex
        self._ids = deque(transactional_ids(settings.group, instance))
        self._consumer: Consumer | None = None
        self._callbacks: dict[str, Callable[[Consumer, list[TopicPartition]], None]] = {}
        self._raised: Exception | None = None
        self._refusal: str | None = None
        self._fences = InstanceFences()
        self._fence: str | None = None
        self._ends_met: dict[Partition, int] = {}
        self._producer: Producer | None = None
        self._is_copy_loose = False
        self._ended_s = ENDED_S
        self._ingress: str | None = None
        self._admin: AdminClient | None = None
        self._ingress_group: Consumer | None = None
        self._order: OrderTopics | None = None
        self._open = OpenTransactionWatch(self._stable_end)

    @property
    def is_incremental(self) -> bool:
        return self._settings.rebalances != "eager"

    def start(self) -> Start:
        try:
            with translated_errors():
                ingress = self._ingress = self._ingress_topic(partitions_of(self._asking))
            return Start(ingress, self.prepare(list(self._settings.topics)))
        except IngressToCome:
            raise
        except KafkaUnavailable as gone:  # at the start the address may be the wrong one
            raise KafkaUnavailable(f"{self._settings.bootstrap}: {gone}") from gone

    @translated_errors()
    def all_topics(self) -> AbstractSet[str]:
        return partitions_of(self._asking).keys()

    @translated_errors()
    def prepare(self, topics: Sequence[TopicNames]) -> Mapping[str, int]:
        assert self._ingress is not None
        admin, ordered = self._asking, self._settings.ordered
        known = partitions_of(admin)
        for names in topics:
            if names.source not in known:
                raise ConsumerError(ConsumerReason.TOPIC_MISSING, f"topic {names.source}")
        if self._settings.create_topics:
            known = known | self._create(admin, topics, known)
        self._check_made(topics, known)
        if ordered:
            check_partitions(topics, known)
        check_policies(admin, topics, ordered=ordered)
        self._check_rights(topics)
        return check_sizes(admin, topics, self._ingress)

    @translated_errors()
    def sizes(self, topics: Sequence[TopicNames]) -> Mapping[str, int]:
        assert self._ingress is not None
        return check_sizes(self._asking, topics, self._ingress)

    def subscribe(
        self,
        topics: Sequence[str],
        *,
        on_assign: OnPartitions,
        on_revoke: OnPartitions,
        on_lost: OnPartitions,
    ) -> None:

        def assigned(partitions: list[Partition]) -> None:
            self._fences.assigned(self._member_id)
            on_assign(partitions)

        self._callbacks = {
            "on_assign": self._kept(assigned),
            "on_revoke": self._kept(on_revoke),
            "on_lost": self._kept(on_lost),
        }
        self._join(topics)

    def _join(self, topics: Sequence[str]) -> None:
        """Joins the group, as a new member of it."""
        instance = self._settings.instance
        # With the newer protocol these two are the broker's to say.
        timeouts = {"session.timeout.ms": 10_000, "heartbeat.interval.ms": 3_000}
        if self._settings.rebalances == "consumer":
            timeouts = {}
        self._consumer = self._made(
            {
                **({} if instance is None else {"group.instance.id": instance}),
                **timeouts,
                "queued.max.messages.kbytes": 16_384,
                "fetch.wait.max.ms": 100,
                "topic.metadata.refresh.interval.ms": TOPICS_EVERY_MS,
                **self._client(),
                "group.id": self._settings.group,
                **_GROUP[self._settings.rebalances],
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
            }
        )
        self.resubscribe(topics)

    def resubscribe(self, topics: Sequence[str]) -> None:
        if topics:
            self._joined.subscribe(list(topics), **self._callbacks)
        else:
            self._joined.unsubscribe()

    @staticmethod
    @translated_errors()
    def _made(settings: dict[str, Any]) -> Consumer:
        return Consumer(settings, logger=_LOG)

    def _kept(self, call: OnPartitions) -> Callable[[Consumer, list[TopicPartition]], None]:
        """Keeps what a callback raises, which the library would lose: `fetch` raises it.

        A static member may be assigned what its instance read before, until the group has heard of
        other topics: those partitions are left alone.
        """
        knows = self._settings.topics.knows

        def called(_: Consumer, given: list[TopicPartition]) -> None:
            try:
                call([Partition(one.topic, one.partition) for one in given if knows(one.topic)])
            except Exception as error:  # noqa: BLE001 - see above
                self._raised = error

        return called

    def fetch(self, most: int, timeout_s: float) -> list[FetchedRecords]:
        messages = self._joined.consume(most, timeout_s)
        if self._raised is not None:
            raise self._raised
        if any(map(Message.error, messages)):
            messages = [one for one in messages if self._is_record(one)]
        if self._fence is not None:
            self._join_anew(self._fence)
        return in_columns(messages)

    def _join_anew(self, fence: str) -> None:
        """Joins for a client that is fenced, and has ended by that.

        Raises ConsumerError if another consumer has the instance.
        """
        if not self._fences.should_join_anew(self._member_id):
            raise self._taken(fence)
        _LOG.warning("joining the group anew: %s", fence)
        self._fence = None
        self._joined.close()
        self._join(self._settings.topics.read_topics)

    @property
    def _member_id(self) -> str:
        return self._joined.memberid() or ""

    def ends_met(self) -> Mapping[Partition, int]:
        ends, self._ends_met = self._ends_met, {}
        return ends

    def refusal(self) -> str | None:
        refusal, self._refusal = self._refusal, None
        return refusal

    @translated_errors()
    def missing_rights(self) -> list[MissingRight]:
        assert self._ingress is not None
        topics, ordered = list(self._settings.topics), self._settings.ordered
        return rights_missing(self._asking, topics, self._ingress, ordered=ordered)

    @translated_errors()
    def may_write(self, topic: str) -> bool | None:
        return may_write(self._asking, topic)

    def _is_record(self, message: Message) -> bool:
        """Whether it is a record; raises an error with which nothing goes on, and logs others."""
        error = message.error()
        if error is None:
            return True
        if error.code() == KafkaError._PARTITION_EOF:
            at = Partition(cast("str", message.topic()), cast("int", message.partition()))
            self._ends_met[at] = cast("int", message.offset())
            return False
        if error.fatal() or error.code() == KafkaError._FATAL:
            if any(KafkaError(code).str() in error.str() for code in FENCED):
                self._fence = error.str()  # the client's code is that of any fatal error
                return False
            raise ConsumerError(ConsumerReason.KAFKA_FATAL, error.str())
        if error.code() in REFUSALS:
            self._refusal = error.str()
            return False
        if error.code() == KafkaError.INCONSISTENT_GROUP_PROTOCOL:
            raise ConsumerError(ConsumerReason.GROUP_DIFFERS, error.str())
        _LOG.warning("Kafka: %s", error.str())
        return False

    @translated_errors()
    def limits(self) -> IngressLimits | None:
        assert self._ingress is not None
        if self._ingress_group is None:
            self._ingress_group = self._made(
                {**self._client(), "group.id": self._ingress, "enable.auto.commit": False}
            )
        return limits_of(self._ingress_group, self._ingress)

    @translated_errors()
    def topics(self, names: Collection[str]) -> dict[str, ConsumedTopic]:
        return topics_now(self._asking, sorted(names))

    @translated_errors()
    def unable(self, topics: Collection[str]) -> AbstractSet[str]:
        return topics_unable(self._asking, topics)

    @translated_errors()
    def committed(self, partitions: Sequence[Partition]) -> dict[Partition, Passed | None]:
        if not partitions:
            return {}
        wanted = [TopicPartition(*at) for at in partitions]
        answer = self._joined.committed(wanted, timeout=ASK_S)
        found: dict[Partition, Passed | None] = {}
        for one in answer:
            if one.error is not None:
                raise KafkaException(one.error)
            at = Partition(one.topic, one.partition)
            found[at] = read_note(one.offset, one.metadata) if one.offset >= 0 else None
        return found

    @translated_errors()
    def away(
        self, lanes: Sequence[Partition], tell: Callable[[int], None]
    ) -> dict[Partition, list[Away]]:
        if not lanes:
            return {}
        if self._order is None:
            self._order = OrderTopics(self._client(), self._settings.group, self.ends)
        where = {
            lane: Partition(self._settings.topics.names_of(lane.topic).order, lane.number)
            for lane in lanes
        }
        found = self._order.read(list(where.values()), tell)
        return {lane: found[at] for lane, at in where.items()}

    def unread(self, positions: Mapping[Partition, int | None]) -> dict[Partition, Unread]:
        if not positions:
            return {}
        found: dict[Partition, Unread] = {}
        for at, position in positions.items():
            known = self._joined.get_watermark_offsets(TopicPartition(*at), cached=True)
            if known is not None and known[1] >= 0:
                offset = known[0] if position is None else position
                found[at] = Unread(offset, max(0, known[1] - offset))
        return found

    def held_up(self, places: Mapping[Partition, int]) -> frozenset[Partition]:
        return self._open.look(places)

    def _stable_end(self, at: Partition) -> int | None:
        try:
            return int(self._joined.get_watermark_offsets(TopicPartition(*at), ASK_S)[1])
        except KafkaException:
            return None

    @translated_errors()
    def ends(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        return ends_of(self._asking, partitions) if partitions else {}

    @translated_errors()
    def first_since(self, at: Partition, since_ms: int) -> int:
        return first_since(self._asking, at, since_ms)

    def assign(self, positions: Mapping[Partition, int | None]) -> None:
        wanted = _places(positions)
        if self.is_incremental:
            self._joined.incremental_assign(wanted)
            self._joined.resume(wanted)
        else:
            self._joined.assign(wanted)

    @translated_errors()
    def seek(self, positions: Mapping[Partition, int | None]) -> None:
        for place in _places(positions):
            self._joined.seek(place)

    def membership(self) -> bytes | None:
        answer = cast("bytes | None", self._joined.consumer_group_metadata())
        # Who has forgotten its id (fencing.py) still has a generation: Kafka would fence it.
        if answer is None or len(answer) < _METADATA.size or not self._member_id:
            return None
        magic, generation = _METADATA.unpack_from(answer)
        return None if magic != _METADATA_MAGIC or generation < 0 else answer

    def pause(self, partitions: Sequence[Partition]) -> None:
        self._joined.pause([TopicPartition(*at) for at in partitions])

    def resume(self, partitions: Sequence[Partition]) -> None:
        self._joined.resume([TopicPartition(*at) for at in partitions])

    def commit(
        self,
        records: Sequence[Outgoing],
        offsets: Mapping[Partition, Passed],
        membership: bytes,
        *,
        one_by_one: bool = False,
    ) -> TransactionFailure | None:
        if self._is_copy_loose:
            try:
                self._replace_producer()
            except KafkaUnavailable as gone:
                return TransactionFailure(str(gone))
        if self._producer is None:
            return TransactionFailure("no transactional producer")
        transaction = Transaction(self._producer, self._unable_soon, self._should_leave_id)
        failure = transaction.commit(records, offsets, membership, one_by_one=one_by_one)
        self._is_copy_loose = transaction.is_copy_loose
        if failure is not None and failure.is_fenced:
            raise self._taken(failure.text)
        if failure is not None and failure.unable:
            self._ended_s = UNENDED_S
        return failure

    def _unable_soon(self, topics: Collection[str]) -> AbstractSet[str]:
        """Returns which of these topics cannot be written to now, if Kafka says so soon."""
        try:
            with translated_errors():
                return topics_unable(self._asking, topics, UNANSWERED_S)
        except (KafkaUnavailable, ConsumerError):
            return frozenset()

    def _should_leave_id(self) -> bool:
        """Whether the coordinator of this id is away; then one that has its own is the next."""
        try:
            with translated_errors():
                away = ids_unable(self._asking, self._ids, UNANSWERED_S)
        except (KafkaUnavailable, ConsumerError):
            return False
        number = next((n for n, one in enumerate(self._ids) if one not in away), 0)
        self._ids.rotate(-number)
        return number > 0

    def _taken(self, text: str) -> ConsumerError:
        instance, group = self._settings.instance, self._settings.group
        return ConsumerError(
            ConsumerReason.INSTANCE_TAKEN, f"instance {instance!r} of group {group!r}: {text}"
        )

    @translated_errors()
    def renew_producer(self, unseen: AbstractSet[str]) -> None:
        self._replace_producer()
        if self._ingress is None:
            return
        known = {**dict.fromkeys(unseen, 0), **partitions_of(self._asking)}
        topics = self._settings.topics
        # A topic that a pattern matched may be deleted with all that belongs to it.
        there = [one for one in topics if one.source in known or one.source in topics.named]
        try:
            if self._ingress not in known:
                raise _no_ingress(self._ingress)
            self._check_made(there, known)
        except ConsumerError:
            # What these credentials may not describe looks like what does not exist.
            self._check_rights(there)
            raise

    @translated_errors()
    def _replace_producer(self) -> None:
        self._drop_producer()
        try:
            self._producer = Producer(
                {
                    "linger.ms": 5,
                    **self._client(),
                    **transactional(self._ids[0]),
                    "retry.backoff.ms": RETRY_BACKOFF_MS,
                    "retry.backoff.max.ms": RETRY_BACKOFF_MS,
                    "message.max.bytes": LARGEST_BATCH_BYTES,
                    # Not the default 30 s: a transaction waits for a missing topic for so long.
                    "topic.metadata.propagation.max.ms": 1_000,
                },
                logger=_LOG,
            )
            self._producer.init_transactions(self._ended_s)  # ends what the former one has begun
            self._is_copy_loose, self._ended_s = False, ENDED_S
        except KafkaException as exception:
            error = exception.args[0]
            if error.retriable() or error.code() == KafkaError.CONCURRENT_TRANSACTIONS:
                self._ids.rotate(-1)
                self._ended_s = min(max(2 * self._ended_s, ENDED_S), CALL_S)
            self._drop_producer()
            raise

    def close(self) -> None:
        self._drop_producer()
        for client in (self._consumer, self._ingress_group):
            if client is not None:
                client.close()
        self._consumer = self._ingress_group = None

    @property
    def _joined(self) -> Consumer:
        assert self._consumer is not None
        return self._consumer

    @property
    def _asking(self) -> AdminClient:
        if self._admin is None:
            # Its log would go to stderr, 20 lines a second while Kafka is away; errors are told.
            self._admin = KafkaAdmin({**self._client(), "log_level": 0})
        return self._admin

    def _client(self) -> dict[str, Any]:
        purpose = "checker" if self._settings.asks_about_halves else "consumer"
        return {
            "client.id": f"delaywheel-{purpose}-{self._settings.group}",
            "log_level": 3,
            **self._settings.kafka,
            "bootstrap.servers": self._settings.bootstrap,
        }

    def _ingress_topic(self, topics: Mapping[str, int]) -> str:
        cluster = self._settings.cluster
        every = sorted(topic for topic in topics if re.fullmatch(ingress_topic(".+"), topic))
        found = [topic for topic in every if not cluster or topic == ingress_topic(cluster)]
        if not found:
            text = _no_ingress(ingress_topic(cluster or "<cluster>")).text
            others = f"; there is {', '.join(every)}: is the cluster another one?" if every else ""
            raise IngressToCome(text + others)
        if len(found) > 1:
            raise ConsumerError(ConsumerReason.CLUSTER_AMBIGUOUS, ", ".join(found))
        return found[0]

    def _check_rights(self, topics: Sequence[TopicNames]) -> None:
        assert self._ingress is not None
        check_rights(self._asking, topics, self._ingress, ordered=self._settings.ordered)

    def _check_made(self, topics: Sequence[TopicNames], known: Mapping[str, int]) -> None:
        missing = [
            name
            for names in topics
            for name in self._settings.made_topics(names)
            if name not in known
        ]
        if missing:
            raise ConsumerError(ConsumerReason.TOPICS_NOT_MADE, ", ".join(missing))

    def _create(
        self, admin: AdminClient, topics: Sequence[TopicNames], known: Mapping[str, int]
    ) -> dict[str, int]:
        """Creates missing topics; returns the number of partitions of each."""
        missing = [
            (names, name, made)
            for names in topics
            for name, made in self._settings.made_topics(names).items()
            if name not in known
        ]
        if not missing:
            return {}
        enough = replicas_on(len(admin.list_topics(timeout=ASK_S).brokers))
        large = {"max.message.bytes": str(LARGEST_BATCH_BYTES)}
        wanted = []
        for names, name, made in missing:
            replicas = made.replication_factor or enough
            ours = {MIN_INSYNC: str(least_in_sync(replicas))}
            ours |= ORDER_CONFIG if name == names.order else large
            partitions = made.partitions or known[names.source]
            wanted.append(NewTopic(name, partitions, replicas, config={**ours, **made.config}))
        return make_topics(admin, wanted)

    def _drop_producer(self) -> None:
        """Drops it on another thread: librdkafka joins its own ones."""
        dropped, self._producer = [self._producer], None
        threading.Thread(target=dropped.clear, name="destroy producer", daemon=True).start()


def _places(positions: Mapping[Partition, int | None]) -> list[TopicPartition]:
    """Returns the next offsets as the client has them; None: the first existing one."""
    return [
        TopicPartition(*at, OFFSET_BEGINNING if offset is None else offset)
        for at, offset in positions.items()
    ]


def _no_ingress(topic: str) -> ConsumerError:
    return ConsumerError(
        ConsumerReason.INGRESS_MISSING,
        f"Kafka has no topic {topic}, from which delaywheel takes what is to come back, or these"
        " credentials may not describe it",
    )
