"""Reads letters and marks: committed records only, from an offset to the present end of the log.

Memory holds only what the client has fetched ahead, some MB, however long the topic is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from delaywheel.deadletters.errors import DeadLettersError, DeadLettersReason
from delaywheel.deadletters.letter import Letter, LetterPlace
from delaywheel.record_headers import headers_of
from delaywheel.transactional import ask_again_after_moves, is_moving, text_of

_Answer = TypeVar("_Answer")

BATCH_RECORDS = 500
WAIT_S = 0.2

_AWAY = frozenset(
    {
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TIMED_OUT,
        KafkaError.REQUEST_TIMED_OUT,
        # A broker that is about to leave is still named, and takes no replica of a new topic.
        KafkaError.INVALID_REPLICATION_FACTOR,
    }
)
_AWAY_IF_NAMED = _AWAY | {KafkaError._UNKNOWN_PARTITION}
"""The same, of partitions that are there: a broker that starts may not name them yet."""


class TopicReader:
    """Reads one topic, in any number of passes; joins no group, so nothing is committed."""

    def __init__(self, client: Mapping[str, Any], topic: str, *, timeout_s: float) -> None:
        """Connects when first used."""
        self._topic = topic
        self._timeout_s = timeout_s
        self._consumer = Consumer(
            {
                "client.id": f"delaywheel-letters-{topic}",
                "log_level": 0,
                "queued.max.messages.kbytes": 16_384,
                "fetch.wait.max.ms": 100,
                **client,
                "group.id": f"{topic}-reader",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
            }
        )

    def bounds(self, partitions: int) -> dict[int, tuple[int, int]]:
        """Returns the first offsets, and those after the last, of partitions that Kafka named."""
        return {number: self.bounds_of(number, _AWAY_IF_NAMED) for number in range(partitions)}

    def bounds_of(self, number: int, away: frozenset[int] = _AWAY) -> tuple[int, int]:
        """Returns the first offset of one partition, and the one after the last.

        `away` are the codes of errors that say that Kafka is away.
        """
        where = TopicPartition(self._topic, number)
        bounds = self._asked(
            lambda: self._consumer.get_watermark_offsets(where, timeout=self._timeout_s), away
        )
        if bounds is None:
            raise DeadLettersError(
                DeadLettersReason.KAFKA_UNREACHABLE, f"the end of {self._topic} is unknown"
            )
        return bounds

    def offsets_at(self, time_ms: int, bounds: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        """Returns, for each partition, the first offset at or after a time; its end if none is."""
        wanted = [TopicPartition(self._topic, number, time_ms) for number in bounds]

        def ask() -> list[TopicPartition]:
            found = self._consumer.offsets_for_times(wanted, timeout=self._timeout_s)
            for at in found:
                if at.error is not None:
                    raise KafkaException(at.error)
            return found

        found = self._asked(ask)
        return {
            at.partition: at.offset if at.offset >= 0 else bounds[at.partition][1] for at in found
        }

    def _asked(self, ask: Callable[[], _Answer], away: frozenset[int] = _AWAY) -> _Answer:
        def look() -> object:
            return self._consumer.list_topics(self._topic, timeout=self._timeout_s)

        with translated_errors(away):
            return ask_again_after_moves(ask, look, self._timeout_s)

    def read(self, ranges: Mapping[int, tuple[int, int]]) -> Iterator[Message]:
        """Yields all records of these ranges, in order within a partition."""
        left = {number: end for number, (first, end) in ranges.items() if first < end}
        starts = [TopicPartition(self._topic, number, ranges[number][0]) for number in left]
        self._consumer.assign(starts)
        heard_at = time.monotonic()
        while left:
            messages = self._consumer.consume(BATCH_RECORDS, WAIT_S)
            for message in messages:
                error = message.error()
                partition = cast("int", message.partition())
                if error is None:
                    heard_at = time.monotonic()
                    if message.offset() < left.get(partition, 0):  # type: ignore[operator]
                        yield message
                elif error.code() == KafkaError._PARTITION_EOF:
                    left.pop(partition, None)
                elif (refusal := refused(error)).reason is DeadLettersReason.KAFKA_REFUSED:
                    raise refusal
            if not messages and time.monotonic() - heard_at > self._timeout_s:
                raise DeadLettersError(
                    DeadLettersReason.KAFKA_UNREACHABLE, f"nothing of {self._topic} can be read"
                )
            self._forget_finished(left)
        self._consumer.unassign()

    def close(self) -> None:
        """Closes the consumer."""
        self._consumer.close()

    def _forget_finished(self, left: dict[int, int]) -> None:
        """Drops finished ranges: the position also passes markers and aborted records."""
        if not left:
            return
        asked = [TopicPartition(self._topic, number) for number in left]
        for at in self._consumer.position(asked):
            if at.offset >= left[at.partition]:
                del left[at.partition]


def letter_of(message: Message) -> Letter:
    """Returns the letter in a record of a dead-letter topic."""
    headers = headers_of(message) or ()
    _, timestamp_ms = message.timestamp()
    place = LetterPlace(cast("int", message.partition()), cast("int", message.offset()))
    return Letter(
        place,
        timestamp_ms,
        message.key(),
        message.value(),
        tuple(headers),
    )


@contextmanager
def translated_errors(away: frozenset[int] = _AWAY) -> Iterator[None]:
    """Raises Kafka's errors as ours."""
    try:
        yield
    except KafkaException as exception:
        raise refused(exception.args[0], away) from exception


def refused(error: KafkaError, away: frozenset[int] = _AWAY) -> DeadLettersError:
    """Returns the error to raise for one of Kafka's."""
    is_away = error.code() in away or is_moving(error) or error.retriable()
    reason = DeadLettersReason.KAFKA_UNREACHABLE if is_away else DeadLettersReason.KAFKA_REFUSED
    return DeadLettersError(reason, text_of(error))
