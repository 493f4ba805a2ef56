"""Where messages went: looks for their records in Kafka, only on request.

Nothing is kept of what is forwarded: delivery reports would cost time for each message, and only
one leader would have them. A record names its message (`dw-id`, `dw-due`). Its timestamp is when it
was forwarded, not before its due, or the one that its caller set: a search begins at that time.

| searched | from | for messages that |
|---|---|---|
| the topic itself | due, or the caller's timestamp, if that is earlier | may be delivered |
| the dead-letter topic | due | may be dead letters |
| the outcomes topic, first | due | are named by a cancel: if it took effect, that is there |

A search ends with the record, with the end of all partitions, after `RECORDS_AT_MOST`, or
`SEARCH_S` after it was requested; only a record proves anything. One search runs at a time, with a
thread and a client of its own; at most `WAITING_AT_MOST` wait.
"""

from __future__ import annotations

import json
import queue
import time
from collections import deque
from collections.abc import Callable

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from delaywheel.record_headers import headers_of
from delaywheel_replica.cleaner.kafka.client_log import LOGGER
from delaywheel_replica.kafka_settings import KafkaSettings
from delaywheel_replica.link import AskPlace, LinkPlace, PlaceFound
from delaywheel_replica.process.logs import get_logger

SEARCH_S = 2.0
RECORDS_AT_MOST = 20_000
PARTITIONS_AT_MOST = 1_000
WAITING_AT_MOST = 16

_SLACK_MS = 5_000
"""The clock of a broker that stamps records itself may be behind by this much."""
_BATCH = 500
_BATCH_S = 0.1
_FETCHED_BYTES = 4 << 20

log = get_logger(__name__)


class PlaceFinder:
    """Looks for records. `ask` and `report` are for one thread, `run` for another."""

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        send: Callable[[PlaceFound], bool],
        on_found: Callable[[], object],
    ) -> None:
        """Begins without requests.

        Args:
            settings: Settings for reaching Kafka.
            send: Sends to the server; False: the link is full, and the message is dropped.
            on_found: Called when there is something to report.
        """
        self._settings = settings
        self._send = send
        self._on_found = on_found
        self._asked: queue.Queue[tuple[float, AskPlace]] = queue.Queue(WAITING_AT_MOST)
        self._found: deque[PlaceFound] = deque()

    def ask(self, asked: AskPlace) -> None:
        """Queues a search for a record; ignored when too many wait."""
        try:
            self._asked.put_nowait((time.monotonic() + SEARCH_S, asked))
        except queue.Full:
            self._found.append(PlaceFound(asked.question))

    def report(self) -> None:
        """Reports what was found to the server."""
        while self._found:
            self._send(self._found.popleft())

    def run(self) -> None:
        """Searches for as long as the process lives."""
        while True:
            deadline, asked = self._asked.get()
            try:
                found = _Search(self._settings, asked, deadline).run()
            except KafkaException as exception:
                log.info("place not found", topic=asked.topic, cause=exception.args[0].str())
                found = PlaceFound(asked.question)
            except Exception:  # a malformed record must not end a leader
                log.exception("place not found", topic=asked.topic)
                found = PlaceFound(asked.question)
            self._found.append(found)
            self._on_found()


class _Search:
    """The search for one record."""

    def __init__(self, settings: KafkaSettings, asked: AskPlace, deadline: float) -> None:
        self._settings = settings
        self._asked = asked
        self._deadline = deadline
        self._records_left = RECORDS_AT_MOST
        self._id, self._due = asked.id.hex().encode(), b"%d" % asked.due_ms

    def run(self) -> PlaceFound:
        """Returns the place; raises KafkaException if Kafka does not answer or allow it."""
        asked = self._asked
        if self._left_s <= 0:
            return PlaceFound(asked.question)
        settings = self._settings.consumer() | {"queued.max.messages.kbytes": _FETCHED_BYTES >> 10}
        consumer = Consumer(settings, logger=LOGGER)
        try:
            found = None
            if asked.is_named_by_cancel:
                outcomes = self._settings.names.outcomes
                found = self._look(consumer, outcomes, asked.due_ms, self._is_withdrawn)
            if found is None and asked.is_dead is not True:
                own_ms = asked.due_ms if asked.timestamp_ms is None else asked.timestamp_ms
                found = self._look(consumer, asked.topic, min(own_ms, asked.due_ms))
            if found is None and asked.is_dead is not False:
                found = self._look(consumer, self._settings.names.dead, asked.due_ms)
        finally:
            consumer.close()
        if found is None:
            return PlaceFound(asked.question)
        topic, partition, offset = found.topic(), found.partition(), found.offset()
        assert topic is not None
        assert partition is not None
        assert offset is not None
        reason = _header(found, "dw-dead-reason") if topic == self._settings.names.dead else None
        return PlaceFound(
            asked.question,
            LinkPlace(topic, partition, offset),
            None if reason is None else reason.decode(errors="replace"),
            was_withdrawn=topic == self._settings.names.outcomes,
        )

    @property
    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def _look(
        self,
        consumer: Consumer,
        topic: str,
        since_ms: int,
        is_it: Callable[[Message], bool] | None = None,
    ) -> Message | None:
        is_wanted = is_it or self._is_it
        known = consumer.list_topics(topic, timeout=max(self._left_s, 0.01)).topics[topic]
        partitions = sorted(known.partitions or ())[:PARTITIONS_AT_MOST]
        since = [TopicPartition(topic, n, max(0, since_ms - _SLACK_MS)) for n in partitions]
        if known.error is not None or not since:
            return None
        begins = consumer.offsets_for_times(since, timeout=max(self._left_s, 0.01))
        begins = [begin for begin in begins if begin.error is None and begin.offset >= 0]
        unread = {begin.partition for begin in begins}
        consumer.assign(begins)
        while unread and self._records_left > 0 and self._left_s > 0:
            for message in consumer.consume(_BATCH, min(_BATCH_S, max(self._left_s, 0))):
                if message.error() is not None:
                    unread.discard(message.partition())  # at its end, or not readable
                elif is_wanted(message):
                    return message
                else:
                    self._records_left -= 1
        return None

    def _is_withdrawn(self, message: Message) -> bool:
        """Whether a record is the outcome of this message, cancelled or moved to another due."""
        if message.key() != self._asked.id:
            return False
        outcome = json.loads(message.value() or b"{}")
        told = outcome.get("outcome"), outcome.get("due_ms")
        return told == ("cancelled", self._asked.due_ms)

    def _is_it(self, message: Message) -> bool:
        return _header(message, "dw-id") == self._id and _header(message, "dw-due") == self._due


def _header(message: Message, name: str) -> bytes | None:
    """Returns the last header of this name: ours follow the caller's."""
    for found, value in reversed(headers_of(message) or []):
        if found == name:
            return value if isinstance(value, bytes) else None
    return None
