"""What a consumer in memory has for Kafka: topics of the service, and groups that have read them.

Of the members of a group the one that began last has all partitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Final

from delaywheel.consumer.message import ConsumerError, ConsumerReason
from delaywheel.consumer.order import Away, fold
from delaywheel.consumer.port import (
    ConsumedTopic,
    MissingRight,
    OnPartitions,
    Start,
    TransactionFailure,
    Unread,
)
from delaywheel.consumer.records import (
    FetchedRecords,
    Incoming,
    Partition,
    Passed,
    fetched_of,
)
from delaywheel.consumer.rules.subscription import TopicNames
from delaywheel.consumer.settings import ConsumerSettings
from delaywheel.ingress import IngressLimits, ingress_topic
from delaywheel.testing.halves import CLUSTER
from delaywheel.transactional import Outgoing

if TYPE_CHECKING:
    from delaywheel.testing.service import MemoryService

INGRESS: Final = ingress_topic(CLUSTER)
MOST_BYTES: Final = 1_048_588
"""Kafka's default for the largest batch of a topic."""


class MemoryGroup:
    """What a group has committed, and its member."""

    def __init__(self) -> None:
        self.passed: Final[dict[Partition, Passed]] = {}
        self.member: MemoryBroker | None = None


class MemoryBroker:
    """`Broker` of a consumer in memory.

    `written` is what its transactions have written, without what went to the ingress topic;
    `events` is how often anything has happened here.
    """

    is_incremental = True

    def __init__(self, service: MemoryService, settings: ConsumerSettings) -> None:
        self._service: Final = service
        self._settings: Final = settings
        self._group: Final = service.groups[settings.group]
        self._read: Sequence[str] = ()
        self._callbacks: dict[str, OnPartitions] = {}
        self._positions: dict[Partition, int] = {}
        self._paused: Final = set[Partition]()
        self.written: Final[list[Outgoing]] = []
        self.events = 0

    def start(self) -> Start:
        """See `Broker`."""
        self._group.member = self
        return Start(INGRESS, {INGRESS: MOST_BYTES, **self.prepare(list(self._settings.topics))})

    def all_topics(self) -> AbstractSet[str]:
        """See `Broker`."""
        return self._service.topics

    def prepare(self, topics: Sequence[TopicNames]) -> Mapping[str, int]:
        """See `Broker`."""
        for names in topics:
            if not self._service.has_topic(names.source):
                raise ConsumerError(ConsumerReason.TOPIC_MISSING, f"topic {names.source}")
            own = self._settings.made_topics(names)
            missing = [one for one in own if not self._service.has_topic(one)]
            if missing and not self._settings.create_topics:
                raise ConsumerError(ConsumerReason.TOPICS_NOT_MADE, ", ".join(missing))
            self._service.add_topics(own)
        return self.sizes(topics)

    def sizes(self, topics: Sequence[TopicNames]) -> Mapping[str, int]:
        """See `Broker`."""
        return {name: MOST_BYTES for names in topics for name in names.own}

    def subscribe(
        self,
        topics: Sequence[str],
        *,
        on_assign: OnPartitions,
        on_revoke: OnPartitions,
        on_lost: OnPartitions,
    ) -> None:
        """See `Broker`."""
        self._callbacks = {"assign": on_assign, "revoke": on_revoke, "lost": on_lost}
        self.resubscribe(topics)

    def resubscribe(self, topics: Sequence[str]) -> None:
        """See `Broker`."""
        self._read = topics

    def _assigned(self) -> list[Partition]:
        """Returns this member's partitions: of a topic as many as of its retries."""
        if self.membership() is None:
            return []
        names_of = self._settings.topics.names_of
        pairs = ((names_of(topic).source, names_of(topic).retry) for topic in self._read)
        counts = {
            topic: max(map(self._service.partitions_of, pair))
            for pair in pairs
            for topic in pair
            if topic in self._read and self._service.has_topic(topic)
        }
        return [Partition(topic, n) for topic, count in counts.items() for n in range(count)]

    def rebalance(self) -> None:
        """Has partitions assigned and revoked as things are now."""
        now = self._assigned()
        gone = [at for at in self._positions if at not in now]
        new = [at for at in now if at not in self._positions]
        if gone:
            self._callbacks["lost" if self.membership() is None else "revoke"](gone)
            for at in gone:
                del self._positions[at]
        if new:
            self._callbacks["assign"](new)
        self.events += len(gone) + len(new)

    def fetch(self, most: int, timeout_s: float) -> Sequence[FetchedRecords]:  # noqa: ARG002
        """See `Broker`: records come in the order in which they appeared."""
        found: list[tuple[int, Incoming]] = []
        for at, position in self._positions.items():
            if at not in self._paused:
                found += self._service.records_from(at, position, most)
        taken = [record for _, record in sorted(found, key=lambda one: one[0])[:most]]
        for record in taken:
            at = Partition(record.place.topic, record.place.partition)
            self._positions[at] = record.place.offset + 1
        self.events += len(taken)
        return fetched_of(taken)

    def ends_met(self) -> Mapping[Partition, int]:
        """See `Broker`: ends of transactions have no offsets here."""
        return {}

    def refusal(self) -> None:
        """See `Broker`: nothing is refused for want of a right."""

    def missing_rights(self) -> list[MissingRight]:
        """See `Broker`."""
        return []

    def may_write(self, topic: str) -> bool | None:
        """See `Broker`."""
        return True if self._service.has_topic(topic) else None

    def limits(self) -> IngressLimits:
        """See `Broker`."""
        return self._service.ingress_limits

    def topics(self, names: Collection[str]) -> dict[str, ConsumedTopic]:
        """See `Broker`."""
        there = filter(self._service.has_topic, names)
        return {one: ConsumedTopic(one, self._service.partitions_of(one)) for one in there}

    def unable(self, topics: Collection[str]) -> AbstractSet[str]:  # noqa: ARG002
        """See `Broker`."""
        return frozenset()

    def committed(self, partitions: Sequence[Partition]) -> dict[Partition, Passed | None]:
        """See `Broker`."""
        return {at: self._group.passed.get(at) for at in partitions}

    def ends(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """See `Broker`."""
        return {at: self._service.end_of(at) for at in partitions}

    def first_since(self, at: Partition, since_ms: int) -> int:
        """See `Broker`."""
        records = self._service.records_from(at, 0, self._service.end_of(at))
        places = (record.place for _, record in records)
        later = (place.offset for place in places if place.timestamp_ms >= since_ms)
        return next(later, self._service.end_of(at))

    def unread(self, positions: Mapping[Partition, int | None]) -> dict[Partition, Unread]:
        """See `Broker`."""
        ends = self.ends(list(positions))
        return {at: Unread(one or 0, ends[at] - (one or 0)) for at, one in positions.items()}

    def held_up(self, places: Mapping[Partition, int]) -> AbstractSet[Partition]:  # noqa: ARG002
        """See `Broker`: no transaction is left open."""
        return frozenset()

    def away(
        self,
        lanes: Sequence[Partition],
        tell: Callable[[int], None],  # noqa: ARG002
    ) -> dict[Partition, list[Away]]:
        """See `Broker`."""
        found: dict[Partition, list[Away]] = {}
        for lane in lanes:
            known: dict[int, Away] = {}
            at = Partition(self._settings.topics.names_of(lane.topic).order, lane.number)
            for _, record in self._service.records_from(at, 0, self._service.end_of(at)):
                fold(known, record.key, record.value)
            found[lane] = list(known.values())
        return found

    def assign(self, positions: Mapping[Partition, int | None]) -> None:
        """See `Broker`."""
        self.seek(positions)
        self._paused.difference_update(positions)

    def seek(self, positions: Mapping[Partition, int | None]) -> None:
        """See `Broker`."""
        self._positions |= {at: offset or 0 for at, offset in positions.items()}

    def membership(self) -> bytes | None:
        """See `Broker`."""
        return b"member" if self._group.member is self else None

    def pause(self, partitions: Sequence[Partition]) -> None:
        """See `Broker`."""
        self._paused.update(partitions)

    def resume(self, partitions: Sequence[Partition]) -> None:
        """See `Broker`."""
        self._paused.difference_update(partitions)

    def commit(
        self,
        records: Sequence[Outgoing],
        offsets: Mapping[Partition, Passed],
        membership: bytes,  # noqa: ARG002
        *,
        one_by_one: bool = False,
    ) -> TransactionFailure | None:
        """See `Broker`."""
        sums = Counter[str]()
        for record in records:
            sums[record.topic] = record.length_bytes + sums[record.topic] * (not one_by_one)
            if sums[record.topic] > MOST_BYTES:
                return TransactionFailure(f"{record.topic}: too large", is_refusal=True)
        self.events += 1
        self._group.passed.update(offsets)
        for record in records:
            if record.topic == INGRESS:
                self._service.take_record(record)
            else:
                self.written.append(record)
                self._service.write(record)
        return None

    def renew_producer(self, unseen: AbstractSet[str]) -> None:
        """See `Broker`."""

    def close(self) -> None:
        """See `Broker`."""
        gone = list(self._positions)
        self._positions.clear()
        if gone:
            self._callbacks["revoke"](gone)
        if self._group.member is self:
            self._group.member = None
