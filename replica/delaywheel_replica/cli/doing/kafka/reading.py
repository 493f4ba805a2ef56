"""Reads topics as they grow: committed records only, without a group.

Each partition begins at an offset that was asked for first, so nothing between the question and
the reading is missed. Memory holds what the client has fetched ahead, 16 MB, and of `last`
messages as many as were asked for.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple, cast

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from delaywheel.transactional import ask_again_after_moves
from delaywheel_replica.cli.asking.kafka import AWAY, kafka_failure
from delaywheel_replica.cli.failures import CommandFailure
from delaywheel_replica.cli.printing.text import note

_BATCH_RECORDS: Final = 500
_WAIT_S: Final = 0.2
_PARTITIONS_EVERY_S: Final = 15.0
_MISSING: Final = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
    }
)


class ReadPartition(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


class TopicRecords:
    """The records of some topics, from a place that is chosen once."""

    def __init__(self, consumer: Consumer, topics: Iterable[str], *, timeout_s: float) -> None:
        """Asks nothing yet.

        Args:
            consumer: Reads committed records, reports ends of partitions, commits nothing.
            timeout_s: How long to wait for Kafka where it must answer.
        """
        self._consumer = consumer
        self._topics = list(topics)
        self._timeout_s = timeout_s
        self._is_away = False

    def read(self, *, from_beginning: bool, last: int | None, until_end: bool) -> Iterator[Message]:
        """Returns the records, as they appear; asks Kafka where they begin before it returns.

        Args:
            last: Begin with this many of the latest records, by their timestamps.
            until_end: End where the partitions end now.

        Raises:
            CommandFailure: A topic is missing, or Kafka is away or refuses.
        """
        places = self._places()
        if last is not None:
            return self._read_last(places, last, until_end=until_end)
        if from_beginning:
            starts = dict.fromkeys(places, OFFSET_BEGINNING)
        else:
            starts = {place: end for place, (_, end) in self._bounds(places).items()}
        if until_end:
            return self._read_to_ends(starts, {})
        return self._follow(starts)

    def _read_last(
        self, places: Iterable[ReadPartition], number: int, *, until_end: bool
    ) -> Iterator[Message]:
        """Reads ever more of each partition's end until there are enough.

        Ends of transactions take offsets too, and one partition may have all of the records.
        """
        bounds = self._bounds(places)
        back = 2 * number + 16
        while True:
            starts = {place: max(first, end - back) for place, (first, end) in bounds.items()}
            ends: dict[ReadPartition, int] = {}
            latest = heapq.nlargest(number, self._read_to_ends(starts, ends), key=_moment)
            is_all = all(starts[place] == first for place, (first, _) in bounds.items())
            if len(latest) == number or is_all:
                break
            back *= 8
        yield from reversed(latest)
        if not until_end:
            yield from self._follow(ends)

    def _read_to_ends(
        self, starts: Mapping[ReadPartition, int], ends: dict[ReadPartition, int]
    ) -> Iterator[Message]:
        """Yields records up to each partition's end, and fills in the offsets of the ends."""
        self._assign(starts)
        left = set(starts)
        heard_at = time.monotonic()
        while left:
            messages = self._consumer.consume(_BATCH_RECORDS, _WAIT_S)
            for message in messages:
                place = _place(message)
                if self._is_record(message):
                    if place in left:
                        yield message
                elif _is_end(message):
                    left.discard(place)
                    ends[place] = cast("int", message.offset())
                else:
                    continue
                heard_at = time.monotonic()
            if time.monotonic() - heard_at > self._timeout_s:
                raise kafka_failure(
                    KafkaError(KafkaError._TIMED_OUT),
                    f"nothing was heard for {self._timeout_s:g} s",
                )

    def _follow(self, starts: Mapping[ReadPartition, int]) -> Iterator[Message]:
        """Yields records for ever, also those of partitions that are added meanwhile."""
        self._assign(starts)
        known = set(starts)
        looked_at = time.monotonic()
        while True:
            for message in self._consumer.consume(_BATCH_RECORDS, _WAIT_S):
                if self._is_record(message):
                    yield message
            if time.monotonic() - looked_at > _PARTITIONS_EVERY_S:
                looked_at = time.monotonic()
                new = set() if self._is_away else set(self._places()) - known
                known |= new
                if new:
                    self._consumer.incremental_assign(_assignment(dict.fromkeys(new, 0)))

    def _is_record(self, message: Message) -> bool:
        """Whether it is a record; waits out a Kafka that is away, and says so once."""
        error = message.error()
        if error is None:
            self._is_away = False
            return True
        if error.code() == KafkaError._PARTITION_EOF:
            return False
        if error.code() in _MISSING:
            raise _missing(str(message.topic()))
        if error.code() not in AWAY and not error.retriable():
            raise kafka_failure(error, message.topic() or "Kafka")
        if not self._is_away:
            self._is_away = True
            note(f"Kafka does not answer: {error.str()}; waiting for it")
        return False

    def _assign(self, starts: Mapping[ReadPartition, int]) -> None:
        self._consumer.assign(_assignment(starts))

    def _places(self) -> list[ReadPartition]:
        places = []
        for topic in self._topics:
            try:
                found = self._consumer.list_topics(topic, timeout=self._timeout_s).topics[topic]
            except KafkaException as exception:
                raise kafka_failure(exception.args[0], topic) from exception
            if found.error is not None:
                if found.error.code() in _MISSING:
                    raise _missing(topic)
                raise kafka_failure(found.error, topic)
            places += [ReadPartition(topic, number) for number in found.partitions]
        return places

    def _bounds(self, places: Iterable[ReadPartition]) -> dict[ReadPartition, tuple[int, int]]:
        """Asks for each partition's first offset, and the one behind its last record."""
        return {place: self._bounds_of(place) for place in places}

    def _bounds_of(self, place: ReadPartition) -> tuple[int, int]:
        try:
            return ask_again_after_moves(
                lambda: self._consumer.get_watermark_offsets(
                    TopicPartition(*place), timeout=self._timeout_s
                ),
                lambda: self._consumer.list_topics(place.topic, timeout=self._timeout_s),
                self._timeout_s,
            )
        except KafkaException as exception:
            raise kafka_failure(exception.args[0], place.topic) from exception


def _assignment(starts: Mapping[ReadPartition, int]) -> list[TopicPartition]:
    return [TopicPartition(*place, offset) for place, offset in starts.items()]


def _place(message: Message) -> ReadPartition:
    return ReadPartition(cast("str", message.topic()), cast("int", message.partition()))


def _is_end(message: Message) -> bool:
    error = message.error()
    return error is not None and error.code() == KafkaError._PARTITION_EOF


def _moment(message: Message) -> tuple[int, str, int, int]:
    _, timestamp_ms = message.timestamp()
    return timestamp_ms, *_place(message), cast("int", message.offset())


def _missing(topic: str) -> CommandFailure:
    return CommandFailure(
        "TOPIC_MISSING", f"Kafka has no topic {topic}: delaywheel topic create {topic} makes it"
    )
