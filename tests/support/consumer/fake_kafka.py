"""A Kafka in memory, with the faults that a consumer must live with; ingress delivers at once.

Members get partitions when `rebalance` says so. A transaction may fail before it is committed, or
be committed and not say so; a member may have lost its partitions before it hears of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from delaywheel.consumer.message import ConsumerError, ConsumerReason
from delaywheel.consumer.order import Away, fold
from delaywheel.consumer.port import (
    ConsumedTopic,
    KafkaUnavailable,
    MissingRight,
    OnPartitions,
    Start,
    TopicTooSmall,
    TransactionFailure,
    Unread,
)
from delaywheel.consumer.records import (
    FetchedRecords,
    Incoming,
    Partition,
    Passed,
    Place,
    RecordHeaders,
    fetched_of,
)
from delaywheel.consumer.rules.subscription import TopicNames
from delaywheel.ingress import ANSWER, IngressLimits
from delaywheel.transactional import Outgoing

INGRESS = "delaywheel-fake-ingress"


class Fault(Enum):
    """The fate of the next transaction of a member."""

    FAILS = "fails"
    UNKNOWN = "is committed, and reported as failed"


@dataclass
class FakeKafka:
    """Topics, the group's offsets, and its generation.

    Attributes:
        more: The ids of further topics, by name.
        written: The names of those that only handlers write to.
        refused: The sources for which the group cannot have topics.
        most_bytes: The largest record that is taken.
        dead_bytes: The largest one that the topic of dead letters is said to take.
        source_bytes: The same of the source.
        retry_bytes: The same of the topic of retries.
        denied: The topics that the members may not read, or write to.
        is_group_denied: Whether they may not commit as members, which nobody else says.
        hidden: Those of them that they may not even describe.
        in_time: How many records of a transaction are answered in time.
    """

    in_time: int = 1_000_000
    partitions: int = 2
    source: str = "orders"
    retry: str = "orders-retry-g"
    order: str = "orders-order-g"
    dead: str = "orders-dead-g"
    most_bytes: int = 1 << 40
    dead_bytes: int = 20_000
    source_bytes: int = 10_000
    retry_bytes: int = 10_000
    logs: dict[Partition, list[Incoming]] = field(default_factory=dict)
    unseen: set[Place] = field(default_factory=set)
    """Records that readers do not get: aborted, or compacted away."""
    offsets: dict[Partition, int] = field(default_factory=dict)
    passed: dict[Partition, Passed] = field(default_factory=dict)
    topic_id: str = "first"
    limits: IngressLimits | None = None
    retry_partitions: int | None = None
    more: dict[str, str] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    denied: set[str] = field(default_factory=set)
    is_group_denied: bool = False
    hidden: set[str] = field(default_factory=set)
    held_up: set[Partition] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    """Topics that do not answer what is written to them."""
    unable: set[str] = field(default_factory=set)
    """Those of which it is known why: a partition has no leader."""
    leaderless: set[Partition] = field(default_factory=set)
    """Those of the source, and of the order topic, that nobody leads."""
    committed_records: list[Outgoing] = field(default_factory=list)
    generation: int = 0
    is_incremental: bool = False
    now_ms: int = 1_000_000

    def send(
        self, value: bytes, *, key: bytes | None = None, headers: RecordHeaders | None = None
    ) -> None:
        """Puts a record into the source topic."""
        number = sum(key or value) % self.partitions
        self._append(Partition(self.source, number), key, value, headers or [])

    def rebalance(
        self, given: Mapping[FakeBroker, Sequence[Partition]], lost: Sequence[FakeBroker] = ()
    ) -> None:
        """Assigns each member its partitions; members in `lost` were taken for dead meanwhile."""
        for member, partitions in given.items():
            if member not in lost:
                member.leave(partitions)
        self.generation += 1
        for member, partitions in given.items():
            member.join(list(partitions), was_lost=member in lost)

    def recreate(self) -> None:
        """Deletes and recreates the source topic."""
        self.topic_id += "'"
        for number in range(self.partitions):
            self.logs.pop(Partition(self.source, number), None)

    def delete(self, *topics: str) -> None:
        """Deletes further topics."""
        for topic in topics:
            del self.more[topic]
            for number in range(self.partitions):
                self.logs.pop(Partition(topic, number), None)

    def write(self, records: Sequence[Outgoing], offsets: Mapping[Partition, Passed]) -> None:
        """A transaction is committed."""
        self.passed.update(offsets)
        self.offsets.update({at: passed.offset for at, passed in offsets.items()})
        self.committed_records += records
        for record in records:
            if record.topic == INGRESS and ANSWER not in dict(record.headers):
                passed = [
                    (name, value)
                    for name, value in record.headers
                    if not name.startswith("dw-") or name.startswith("dw-retry-")
                ]
                own = (("dw-id", b"1"), ("dw-due", b"1"), ("dw-wheel", b"w"))
                number = sum(record.key or record.value or b"") % self.partitions
                reported = dict(record.headers)
                if reported.get("dw-partition") is not None:
                    number = int(reported["dw-partition"] or b"")
                topic = (reported["dw-topic"] or b"").decode()
                where = Partition(topic, number)
                self._append(where, record.key, record.value, [*passed, *own])

    def _append(
        self, where: Partition, key: bytes | None, value: bytes | None, headers: RecordHeaders
    ) -> None:
        log = self.logs.setdefault(where, [])
        place = Place(where.topic, where.number, len(log), self.now_ms)
        log.append(Incoming(place, key, value, headers))


class FakeBroker:
    """One member's clients: `Broker`."""

    def __init__(self, kafka: FakeKafka) -> None:
        self.kafka = kafka
        self.fault: Fault | None = None
        self.renewals = 0
        self.order_left: list[int] = []
        """How many records of order topics are unread after each 5 s."""
        self.subscribed: list[tuple[str, ...]] = []
        self._callbacks: dict[str, OnPartitions] = {}
        self._events: list[tuple[str, list[Partition]]] = []
        self._positions: dict[Partition, int] = {}
        self._paused: set[Partition] = set()
        self._generation = 0
        self._is_broken = False
        self._is_closed = False
        self._away = 0
        self._refusal: str | None = None
        self._ends_met: dict[Partition, int] = {}

    @property
    def is_current(self) -> bool:
        """Whether the member still belongs to the group."""
        return self._generation == self.kafka.generation

    @property
    def is_incremental(self) -> bool:
        """See `Broker`."""
        return self.kafka.is_incremental

    def leave(self, stay: Sequence[Partition]) -> None:
        """Asks the member to give up its partitions, while it still belongs to the group."""
        self._call_back()
        if not self.is_incremental:
            self._callbacks["revoked"](self._give_up())
        elif going := [at for at in self._positions if at not in stay]:
            self._callbacks["revoked"](going)
            for at in going:
                del self._positions[at]

    def join(self, partitions: list[Partition], *, was_lost: bool) -> None:
        """Informs the member, when it fetches, of its present assignment."""
        if was_lost:
            self._events.append(("lost", []))
        elif self.is_incremental:
            self._generation = self.kafka.generation
            partitions = [at for at in partitions if at not in self._positions]
        if partitions or not self.is_incremental:
            self._events.append(("assigned", partitions))

    def _give_up(self) -> list[Partition]:
        had = list(self._positions)
        self._positions.clear()
        return had

    def _call_back(self) -> None:
        while self._events:
            event, partitions = self._events.pop(0)
            if event == "assigned":
                self._generation = self.kafka.generation
            if event == "lost":
                self._generation = self.kafka.generation
                partitions = self._give_up()
            self._callbacks[event](partitions)

    def _answer(self) -> None:
        if self._away:
            self._away -= 1
            raise KafkaUnavailable("away on purpose")

    def be_away(self, times: int) -> None:
        """The next questions find no answer."""
        self._away = times

    def start(self) -> Start:
        """See `Broker`."""
        return Start(INGRESS, self.sizes([]))

    def sizes(self, topics: Sequence[TopicNames]) -> dict[str, int]:
        """See `Broker`."""
        self._answer()
        kafka = self.kafka
        for name, most in ((kafka.dead, kafka.dead_bytes), (kafka.retry, kafka.retry_bytes)):
            if most < kafka.source_bytes:
                text = f"max.message.bytes of {name} is {most:,}"
                text += f", that of {kafka.source} {kafka.source_bytes:,}"
                raise TopicTooSmall(name, text)
        more = {name: 10_000 for names in topics for name in names.own}
        return {
            **more,
            INGRESS: 10_000,
            kafka.dead: kafka.dead_bytes,
            kafka.retry: kafka.retry_bytes,
        }

    def limits(self) -> IngressLimits | None:
        """See `Broker`."""
        return self.kafka.limits

    def all_topics(self) -> set[str]:
        """See `Broker`."""
        self._answer()
        return {self.kafka.source, self.kafka.retry, self.kafka.dead, INGRESS, *self.kafka.more}

    def prepare(self, topics: Sequence[TopicNames]) -> dict[str, int]:
        """See `Broker`."""
        for names in topics:
            if names.source in self.kafka.refused:
                raise ConsumerError(ConsumerReason.TOPICS_NOT_MADE, names.retry)
        own = {name: 10_000 for names in topics for name in names.own}
        self.kafka.more |= {name: "own" for name in own if name not in self.kafka.more}
        return own

    def subscribe(
        self,
        topics: Sequence[str],
        *,
        on_assign: OnPartitions,
        on_revoke: OnPartitions,
        on_lost: OnPartitions,
    ) -> None:
        """See `Broker`."""
        self.subscribed = [tuple(topics)]
        self._callbacks = {"assigned": on_assign, "revoked": on_revoke, "lost": on_lost}

    def resubscribe(self, topics: Sequence[str]) -> None:
        """See `Broker`."""
        self.subscribed.append(tuple(topics))

    def fetch(self, most: int, timeout_s: float) -> Sequence[FetchedRecords]:  # noqa: ARG002
        """See `Broker`: records first, so that some come with a rebalance."""
        found: list[Incoming] = []
        for partition, position in list(self._positions.items()):
            if partition in self._paused | self.kafka.leaderless:
                continue
            if partition.topic in self.kafka.denied | self.kafka.hidden:
                self._refusal = f"{partition}: Topic authorization failed"
            else:
                log = self.kafka.logs.get(partition, [])
                at = 0 if position > len(log) else position  # as `auto.offset.reset` says
                seen = (one for one in log[at:] if one.place not in self.kafka.unseen)
                taken = list(islice(seen, 3))
                found += taken
                self._positions[partition] = taken[-1].place.offset + 1 if taken else len(log)
                if not taken:
                    self._ends_met[partition] = len(log)
        self._call_back()
        return fetched_of(found[:most])

    def ends_met(self) -> Mapping[Partition, int]:
        """See `Broker`."""
        ends, self._ends_met = self._ends_met, {}
        return ends

    def refusal(self) -> str | None:
        """See `Broker`."""
        refusal, self._refusal = self._refusal, None
        return refusal

    def missing_rights(self) -> list[MissingRight]:
        """See `Broker`."""
        hidden = self.kafka.hidden
        return [
            MissingRight(topic, "Describe" if topic in hidden else "Read")
            for topic in sorted((self.kafka.denied | hidden) - self.kafka.written)
        ]

    def may_write(self, topic: str) -> bool | None:
        """See `Broker`."""
        self._answer()
        denied = self.kafka.denied | self.kafka.hidden
        return topic not in denied if topic in self.kafka.more else None

    def topics(self, names: Collection[str]) -> dict[str, ConsumedTopic]:
        """See `Broker`."""
        self._look_for(self.kafka.hidden.intersection(names))
        count = self.kafka.partitions

        def leaderless(topic: str) -> set[int]:
            return {at.number for at in self.kafka.leaderless if at.topic == topic}

        source, order = self.kafka.source, self.kafka.order
        known = {
            source: ConsumedTopic(self.kafka.topic_id, count, leaderless(source)),
            order: ConsumedTopic("of orders", count, leaderless(order)),
            self.kafka.retry: ConsumedTopic("of retries", self.kafka.retry_partitions or count),
            INGRESS: ConsumedTopic("of ingress", count),
            **{name: ConsumedTopic(topic_id, count) for name, topic_id in self.kafka.more.items()},
        }
        return {name: one for name, one in known.items() if name in names}

    def committed(self, partitions: Sequence[Partition]) -> dict[Partition, Passed | None]:
        """See `Broker`."""
        self._answer()
        self._look_for(self.kafka.hidden.intersection(at.topic for at in partitions))
        return {partition: self.kafka.passed.get(partition) for partition in partitions}

    def unable(self, topics: Collection[str]) -> set[str]:
        """See `Broker`."""
        self._answer()
        return self.kafka.unable & set(topics)

    def ends(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """See `Broker`."""
        topics = {at.topic for at in partitions}
        if topics - self.topics(topics).keys():
            raise KafkaUnavailable("UNKNOWN_TOPIC_OR_PART")
        if self.kafka.leaderless.intersection(partitions):
            raise KafkaUnavailable("LEADER_NOT_AVAILABLE")
        return {partition: len(self.kafka.logs.get(partition, [])) for partition in partitions}

    def first_since(self, at: Partition, since_ms: int) -> int:
        """See `Broker`."""
        assert since_ms >= 0, "-1 is Kafka's end of a partition"
        self._answer()
        log = self.kafka.logs.get(at, [])
        return next(
            (n for n, one in enumerate(log) if one.place.timestamp_ms >= since_ms), len(log)
        )

    def unread(self, positions: Mapping[Partition, int | None]) -> dict[Partition, Unread]:
        """See `Broker`."""
        ends = {at: len(self.kafka.logs.get(at, [])) for at in positions}
        return {at: Unread(one or 0, ends[at] - (one or 0)) for at, one in positions.items()}

    def held_up(self, places: Mapping[Partition, int]) -> set[Partition]:
        """See `Broker`."""
        return self.kafka.held_up & places.keys()

    def away(
        self, lanes: Sequence[Partition], tell: Callable[[int], None] = lambda _: None
    ) -> dict[Partition, list[Away]]:
        """See `Broker`."""
        for unread in self.order_left:
            tell(unread)
        there = {self.kafka.order, *self.kafka.more}
        self._look_for(self.kafka.hidden.intersection(f"{lane.topic}-order-g" for lane in lanes))
        if not {f"{lane.topic}-order-g" for lane in lanes} <= there:
            raise KafkaUnavailable("UNKNOWN_TOPIC_OR_PART")
        if self.kafka.leaderless & {Partition(f"{at.topic}-order-g", at.number) for at in lanes}:
            raise KafkaUnavailable("LEADER_NOT_AVAILABLE")
        away: dict[Partition, dict[int, Away]] = {lane: {} for lane in lanes}
        for record in self.kafka.committed_records:
            if record.topic.endswith("-order-g"):
                lane = Partition(record.topic.removesuffix("-order-g"), record.partition or 0)
                if lane in away:
                    fold(away[lane], record.key, record.value)
        return {lane: list(known.values()) for lane, known in away.items()}

    def assign(self, positions: Mapping[Partition, int | None]) -> None:
        """See `Broker`."""
        given = {one: offset or 0 for one, offset in positions.items()}
        self._positions = self._positions | given if self.is_incremental else given
        self._paused -= given.keys()

    def seek(self, positions: Mapping[Partition, int | None]) -> None:
        """See `Broker`."""
        assert positions.keys() <= self._positions.keys()
        self._positions |= {one: offset or 0 for one, offset in positions.items()}

    def membership(self) -> bytes | None:
        """See `Broker`: reports of a member that was put out are not checked."""
        is_out = any(event == "lost" for event, _ in self._events)
        if self.is_incremental and is_out:
            return None  # it joins again only after it has heard of the loss
        return b"%d" % (self.kafka.generation if is_out else self._generation)

    def pause(self, partitions: Sequence[Partition]) -> None:
        """See `Broker`."""
        self._paused |= set(partitions)

    def resume(self, partitions: Sequence[Partition]) -> None:
        """See `Broker`."""
        self._paused -= set(partitions)

    def commit(
        self,
        records: Sequence[Outgoing],
        offsets: Mapping[Partition, Passed],
        membership: bytes,
        *,
        one_by_one: bool = False,
    ) -> TransactionFailure | None:
        """See `Broker`."""
        if self._is_closed:
            return TransactionFailure("no transactional producer")
        assert not self._is_broken, "a producer that failed was used again"
        if (failure := self._failure(records, offsets, one_by_one=one_by_one)) is not None:
            self._is_broken = True
            return failure
        if len(records) > self.kafka.in_time:
            self._is_broken = True
            return TransactionFailure("no answer in time", is_late=True)
        fault, self.fault = self.fault, None
        if fault is not Fault.FAILS:
            if int(membership) != self.kafka.generation:
                self._is_broken = True
                return TransactionFailure("ILLEGAL_GENERATION")
            self.kafka.write(records, offsets)
        if fault is not None:
            self._is_broken = True
            return TransactionFailure(fault.value)
        return None

    def _failure(
        self,
        records: Sequence[Outgoing],
        offsets: Mapping[Partition, Passed],
        *,
        one_by_one: bool,
    ) -> TransactionFailure | None:
        """Says why a transaction is not committed, if the topics or rights are why."""
        if self.kafka.is_group_denied:
            return TransactionFailure("the group", is_forbidden=True, has_begun_to_end=False)
        written = {one.topic for one in records}
        touched = written | {at.topic for at in offsets}
        if denied := sorted(touched & (self.kafka.denied | self.kafka.hidden)):
            return TransactionFailure(denied[0], is_forbidden=True, has_begun_to_end=False)
        if (refused := self._refused(records, one_by_one=one_by_one)) is not None:
            return TransactionFailure(refused, is_refusal=True)
        if silent := self.kafka.silent & written:
            unable = frozenset(self.kafka.unable & silent)
            return TransactionFailure("no answer", unanswered=frozenset(silent), unable=unable)
        return None

    def _refused(self, records: Sequence[Outgoing], *, one_by_one: bool) -> str | None:
        """Says why a topic does not take one of these, if so; otherwise all are one batch there."""
        batches = Counter[str]()
        there = {self.kafka.dead, self.kafka.order, INGRESS, *self.kafka.more}
        for one in records:
            if one.topic not in there:
                return f"{one.topic}: unknown topic"
            batches[one.topic] = one.length_bytes + batches[one.topic] * (not one_by_one)
            if batches[one.topic] > self.kafka.most_bytes:
                return f"{one.topic}: too large"
        return None

    def renew_producer(self, unseen: AbstractSet[str]) -> None:
        """See `Broker`."""
        self._look_for(self.kafka.hidden - unseen - self.kafka.written)
        self._answer()
        self.renewals += 1
        self._is_broken = False

    @staticmethod
    def _look_for(hidden: Collection[str]) -> None:
        if hidden:
            raise ConsumerError(ConsumerReason.NOT_AUTHORIZED, f"Describe on {min(hidden)}")

    def close(self) -> None:
        """See `Broker`: as the client does, it gives up what it still has."""
        self._is_closed = True
        if self._positions:
            self._callbacks["revoked"](self._give_up())
