"""The reader of the simulated ingress topics, as `IngressPort` wants it.

As `cleaner/kafka/ingress_topics.py` does it: it fetches between calls, and `poll` returns some
of what has arrived by now. It reads a topic by its name, and returns nothing of a topic that
was recreated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from delaywheel_replica.cleaner.outside.ports import (
    NO_ENDS,
    NO_IDS,
    Fetched,
    KafkaAway,
    TopicPartitions,
)
from delaywheel_replica.core.ingress.place import IngressPlace
from delaywheel_replica.core.ingress.reading import CommittedRecord
from delaywheel_replica.core.protocol.control import IngressPartition
from sim.kafka.line import KafkaLine
from sim.kafka.log import Entry, Partition
from sim.machine.scheduler import US_PER_S

REPORTED_EVERY_US = US_PER_S
"""Interval at which the library reports a missing topic."""

CALL_S = 5.0

MOST = 2_000
"""Records of one poll."""

PART = 0.2
"""How often a poll returns only part of what has come."""


class SimIngress:
    """Reads partitions from given offsets on."""

    def __init__(self, line: KafkaLine, on_news: Callable[[], None] = lambda: None) -> None:
        """Reads nothing yet.

        Args:
            line: The line to the brokers.
            on_news: Called when something has come.
        """
        self._line = line
        self._on_news = on_news
        current = line.scheduler.current
        self._owner = None if current is None else current.owner
        line.kafka.on_visible(self._came)
        self._positions: dict[IngressPartition, int] = {}
        self._paused: AbstractSet[IngressPartition] = frozenset()
        self._least_ends: dict[IngressPartition, int] = {}
        self._topic_ids: dict[str, str] = {}
        self._cut_off: dict[IngressPartition, int] = {}
        self._reported_us = -REPORTED_EVERY_US

    @property
    def cut_off(self) -> Mapping[IngressPartition, int]:
        """The partitions that end before what was read or announced of them, and where."""
        return self._cut_off

    @property
    def recreated(self) -> frozenset[str]:
        """The topics whose id has changed: each fetch is followed by a check."""
        kafka = self._line.kafka
        return frozenset(
            topic
            for topic, id_ in self._topic_ids.items()
            if kafka.has(topic) and kafka.topic_id(topic) != id_
        )

    def assign(
        self,
        positions: Mapping[IngressPartition, int],
        least_ends: Mapping[IngressPartition, int] = NO_ENDS,
        topic_ids: Mapping[str, str] = NO_IDS,
    ) -> None:
        """Reads these partitions from these offsets on; those already being read continue."""
        self._topic_ids = {**topic_ids, **self._topic_ids}
        new = positions.keys() - self._positions.keys()
        self._least_ends |= {at: least_ends.get(at, 0) for at in new}
        self._positions = {**positions, **self._positions}

    def pause_only(self, partitions: AbstractSet[IngressPartition]) -> None:
        """Pauses these partitions and resumes all others."""
        self._paused = partitions

    def poll(self, most: int = MOST) -> list[Fetched]:
        """Returns the records of each partition, up to `most` in total.

        Raises:
            KafkaAway: A topic is missing.
        """
        found: list[Fetched] = []
        recreated = self.recreated
        for at in self._in_turns():
            if at[0] in recreated:
                continue
            partition = self._partition(at)
            has_leader = self._line.kafka.troubles.of(at[0]) is None
            if partition is not None and has_leader:
                fetched = self._fetch(at, partition, most)
                most -= 0 if fetched is None else len(fetched.records)
                found += [] if fetched is None else [fetched]
        self._tell_missing()
        return found

    def lags(self) -> dict[IngressPartition, int]:
        """Returns the number of unread offsets of each partition, as last reported."""
        lags: dict[IngressPartition, int] = {}
        for at, position in self._positions.items():
            partition = self._partition(at)
            if partition is not None:
                lags[at] = max(0, self._heard_to(partition) - position)
        return lags

    @property
    def open_transactions(self) -> AbstractSet[IngressPartition]:
        """None: it looks only at the end of committed records."""
        return frozenset()

    def report_to_group(
        self, offsets: Mapping[IngressPartition, int], unread: AbstractSet[IngressPartition]
    ) -> None:
        """Shows progress in the group's offsets, without waiting for the answer."""
        del unread
        kafka, group = self._line.kafka, self._line.names.ingress_group

        def commit() -> None:
            for (topic, number), offset in offsets.items():
                kafka.report_to_group(group, topic, number, offset)

        self._line.send_copy(commit, 0)

    def close(self) -> None:
        """Closes the reader."""
        self._positions.clear()

    def _came(self, entries: list[Entry]) -> None:
        """Fetches at the brokers: a little later the client has it, if it lives and is online."""
        line = self._line
        if any((entry.topic, entry.partition) in self._positions for entry in entries):
            line.scheduler.call_later(line.round_trip_us, self._on_news, owner=self._owner)

    def _in_turns(self) -> Sequence[IngressPartition]:
        """The partitions, in an order that varies."""
        known = sorted(self._positions.keys() - self._paused)
        begin = self._line.random.randrange(len(known)) if known else 0
        return known[begin:] + known[:begin]

    def _partition(self, at: IngressPartition) -> Partition | None:
        topic, number = at
        partitions = self._line.kafka.partitions(topic)
        return partitions[number] if number < len(partitions) else None

    def _heard_to(self, partition: Partition) -> int:
        line = self._line
        return partition.stable_at(line.kafka.contact_us(line.node) - line.round_trip_us)

    def _fetch(self, at: IngressPartition, partition: Partition, most: int) -> Fetched | None:
        position, end = self._positions[at], self._heard_to(partition)
        if self._line.kafka.is_reachable(self._line.node):
            expected = max(position, self._least_ends.pop(at, 0))
            if len(partition.log) < expected:
                self._cut_off.setdefault(at, len(partition.log))
        if position > len(partition.log) or position >= self._cut_off.get(at, position + 1):
            return None
        if position < partition.first:
            self._positions[at] = partition.first
            return Fetched(at, (), partition.first, first_kept=partition.first)
        records: list[CommittedRecord] = []
        if self._line.chance(PART):
            most = min(most, 1)
        for entry in partition.log[position:end]:
            if entry.visible_us < 0:
                continue
            if len(records) >= most:
                end = entry.offset
                break
            records.append(_incoming(entry))
        if end <= position:
            return None
        self._positions[at] = end
        return Fetched(at, tuple(records), end)

    def _tell_missing(self) -> None:
        line = self._line
        if line.scheduler.now_us - self._reported_us < REPORTED_EVERY_US:
            return
        missing = sorted({topic for topic, _ in self._positions if not line.kafka.has(topic)})
        if missing and line.kafka.is_reachable(line.node):
            self._reported_us = line.scheduler.now_us
            raise KafkaAway(f"{missing[0]}: Broker: Unknown topic or partition")


def partitions_of(line: KafkaLine, topics: Iterable[str]) -> dict[str, TopicPartitions]:
    """Returns Kafka's id and the number of partitions of each of these topics that exists.

    Raises:
        KafkaAway: It does not answer.
    """
    kafka, names = line.kafka, list(topics)

    def describe() -> dict[str, TopicPartitions]:
        return {
            name: TopicPartitions(kafka.topic_id(name), len(kafka.partitions(name)))
            for name in names
            if kafka.has(name)
        }

    found: dict[str, TopicPartitions] | None = line.ask(describe, CALL_S)
    if found is None:
        raise KafkaAway("describing ingress topics")
    return found


def _incoming(entry: Entry) -> CommittedRecord:
    place = IngressPlace(entry.topic, entry.partition, entry.offset)
    headers = None if any(not _is_text(name) for name, _ in entry.headers) else entry.headers
    return CommittedRecord(place, entry.timestamp_ms, entry.key, entry.value, headers)


def _is_text(name: str) -> bool:
    """Decodes a name; bytes that are not UTF-8 become lone surrogates."""
    return name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)
