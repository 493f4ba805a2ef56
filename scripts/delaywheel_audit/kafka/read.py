"""Reads a range of one partition, completely or not at all.

Under read_committed the end of a range need not show as a record: the last offsets may be
transaction markers, aborted records, or nothing after compaction. So a range is at its end when a
later record arrives, or Kafka reports the partition's end, there or later. Silence is never
an end: after a bounded time it is an error.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from delaywheel_audit.kafka.errors import (
    RANGE_CODES,
    TOPIC_CODES,
    KafkaSourceError,
    Reason,
    final_reason,
)
from delaywheel_audit.kafka.headers import headers_of
from delaywheel_audit.kafka.options import ClientSettings
from delaywheel_audit.kafka.plan import Plan, Slice, TopicPlan, check_topic, offsets_gone
from delaywheel_audit.kafka.questions import Heard, KafkaQuestions, made

BATCH_RECORDS = 10_000
BATCH_BYTES = 16 * 1024 * 1024
"""Limit for keys and values; beside it there is the client's queue, which is bounded too."""

_WAIT_S = 0.1
_LOOK_AGAIN_S = 2.0
"""How long nothing may come before the topic is checked."""

_SAMPLE_RECORDS = 100
_SAMPLE_S = 5.0
_RECORD_OVERHEAD = 16

_log = logging.getLogger("delaywheel_audit.kafka")


def read_slice(
    client: ClientSettings,
    piece: Slice,
    *,
    timeout_s: float,
    batch_records: int = BATCH_RECORDS,
    batch_bytes: int = BATCH_BYTES,
) -> Iterator[list[Message]]:
    """Yields the committed records of a slice, in order, in lists of bounded size.

    It creates its own client: no Kafka client survives a fork, or moves between processes.

    Raises:
        KafkaSourceError: Something of the slice cannot be read. What was given before is not the
            whole then, and of no use.
    """
    reader = _SliceReader(client, piece, timeout_s)
    try:
        yield from reader.read(batch_records, batch_bytes)
    finally:
        reader.close()


class _SliceReader:
    """One pass over one slice."""

    def __init__(self, client: ClientSettings, piece: Slice, timeout_s: float) -> None:
        self._client = client
        self._piece = piece
        self._timeout_s = timeout_s
        self._heard = Heard(client)
        self._position = piece.start
        """All earlier records were yielded, and the rest holds no committed record."""
        self._fetched_to = piece.start
        self._progress_at = self._looked_at = time.monotonic()
        settings = {
            **client.consumer(),
            "error_cb": self._heard.listen,
            "stats_cb": self._on_stats,
            "statistics.interval.ms": 1_000,
        }
        self._consumer: Consumer = made(client, lambda: Consumer(settings))

    def close(self) -> None:
        """Closes the connections."""
        self._consumer.close()

    def read(self, batch_records: int, batch_bytes: int) -> Iterator[list[Message]]:
        """See `read_slice`."""
        piece = self._piece
        self._consumer.assign([TopicPartition(piece.topic, piece.partition, piece.start)])
        batch: list[Message] = []
        size = 0
        while self._position < piece.end:
            messages = self._take(batch_records - len(batch))
            batch += messages
            size += _bytes_of(messages)
            if len(batch) >= batch_records or size >= batch_bytes:
                yield batch
                batch, size = [], 0
        self._confirm()
        if batch:
            yield batch

    def _take(self, count: int) -> list[Message]:
        """Takes up to `count` arrived records; moves the position."""
        # Waits only for one, then takes what has arrived: so the client's queue bounds the batch.
        got = self._consumer.consume(1, _WAIT_S)
        if not got:
            self._wait_on()
            return []
        if count > 1:
            got += self._consumer.consume(count - 1, 0)
        errors = list(map(Message.error, got))
        events = [message for message, error in zip(got, errors, strict=True) if error is not None]
        if events:
            got = [message for message, error in zip(got, errors, strict=True) if error is None]
        taken = self._within(got)
        for event in events:
            self._on_event(event)
        return taken

    def _within(self, messages: list[Message]) -> list[Message]:
        """Returns records within the slice; they arrive in order of offsets."""
        if not messages:
            return messages
        first, last = _offset(messages[0]), _offset(messages[-1])
        if first < self._position or last >= self._piece.end:
            inside = range(self._position, self._piece.end)
            messages = [message for message in messages if _offset(message) in inside]
        self._reach(last + 1)
        return messages

    def _reach(self, position: int) -> None:
        self._position = max(self._position, position)
        self._progress_at = self._looked_at = time.monotonic()

    def _on_event(self, event: Message) -> None:
        error = event.error()
        assert error is not None
        code = error.code()
        if code == KafkaError._PARTITION_EOF:
            # Before the end of the range: a new leader may not know all of its end yet. It is
            # waited for, and does not count as progress.
            if _offset(event) >= self._piece.end:
                self._reach(_offset(event))
        elif code in RANGE_CODES:
            self._judge_range(error)
        elif code in TOPIC_CODES:
            self._look()
        elif (reason := final_reason(error)) is not None:
            raise self._heard.as_error(reason, error, about=self._about)

    def _wait_on(self) -> None:
        """Handles a poll without records: checks timeouts and whether more is to come."""
        if self._fetched_to == self._position == self._piece.start:
            self._heard.check()  # later, a broker that restarts may refuse for a moment
        now = time.monotonic()
        if now - self._progress_at >= self._timeout_s:
            self._heard.check()
            self._look()
            raise self._silent()
        if now - self._looked_at >= _LOOK_AGAIN_S:
            self._look()
            self._looked_at = time.monotonic()

    def _silent(self) -> KafkaSourceError:
        """Returns why reading does not advance although the topic exists."""
        _, end = self._watermarks()
        if end < self._piece.end:
            return self._not_there(end)
        return KafkaSourceError(
            Reason.BROKER_AWAY,
            f"{self._about}: no further than offset {self._position} of {self._piece.end} for "
            f"{self._timeout_s:g} s, though Kafka answers; see that the partition's leader is well "
            "and that what is read may be fetched, then run this again (option timeoutMs)",
        )

    def _judge_range(self, error: KafkaError) -> None:
        """Decides whether an offset outside the partition was deleted or never existed."""
        self._look()
        low, end = self._watermarks()
        if low > self._position:
            piece = self._piece
            raise offsets_gone(
                piece.topic, piece.partition, wanted=self._position, end=piece.end, low=low
            )
        if end < self._piece.end:
            raise self._not_there(end)
        raise self._heard.as_error(Reason.KAFKA_FAILED, error, about=self._about)

    def _not_there(self, end: int) -> KafkaSourceError:
        return KafkaSourceError(
            Reason.OFFSETS_NOT_THERE,
            f"{self._about}: the partition ends at {end}, and at planning there was something up "
            f"to {self._piece.end}: Kafka lost its end (an unclean leader election?)",
        )

    def _watermarks(self) -> tuple[int, int]:
        place = TopicPartition(self._piece.topic, self._piece.partition)
        try:
            low, end = self._consumer.get_watermark_offsets(place, timeout=self._timeout_s)
        except KafkaException as exception:
            self._heard.listen(exception.args[0])
            self._heard.check()
            raise self._heard.away(self._timeout_s) from None
        return low, end

    def _look(self) -> int:
        """Returns the topic's number of partitions; raises if it is no longer the planned topic."""
        piece = self._piece
        left_s = max(1.0, self._progress_at + self._timeout_s - time.monotonic())
        questions = KafkaQuestions(self._client, timeout_s=left_s)
        now = questions.describe([piece.topic])[piece.topic]
        check_topic(piece.topic, piece.topic_id, now)
        return 0 if now is None else len(now.partitions)

    def _confirm(self) -> None:
        """Confirms that everything was read from the planned topic, since ids are never reused."""
        self._progress_at = time.monotonic()
        partitions = self._look()
        if partitions > self._piece.partitions:
            _log.warning(
                "%s: has %d partitions now, %d are read: those there were at planning",
                *(self._piece.topic, partitions, self._piece.partitions),
            )

    def _on_stats(self, text: str) -> None:
        """Takes statistics, which show progress even where nothing is committed."""
        topics = json.loads(text).get("topics", {})
        partitions = topics.get(self._piece.topic, {}).get("partitions", {})
        fetched_to = partitions.get(str(self._piece.partition), {}).get("next_offset", -1)
        if fetched_to > self._fetched_to:
            self._fetched_to = fetched_to
            self._progress_at = self._looked_at = time.monotonic()

    @property
    def _about(self) -> str:
        return f"{self._piece.topic} [{self._piece.partition}]"


def weigh(client: ClientSettings, plan: Plan) -> Plan:
    """Adds record sizes to the plan, sampled from the middle of each topic."""
    topics = {topic.name: topic for topic in plan.topics}
    middles = {name: middle for name, t in topics.items() if (middle := _middle(t)) is not None}
    if not middles:
        return plan
    settings = client.consumer()
    consumer: Consumer = made(client, lambda: Consumer(settings))
    try:
        consumer.assign(list(middles.values()))
        means = _means(consumer, middles)
    finally:
        consumer.close()
    return replace(
        plan,
        topics=tuple(
            replace(t, record_bytes=means.get(t.name, t.record_bytes)) for t in plan.topics
        ),
    )


def _middle(topic: TopicPlan) -> TopicPartition | None:
    longest = max(topic.ranges, key=lambda r: r.end - r.start, default=None)
    if longest is None or longest.end - longest.start <= 1:
        return None
    return TopicPartition(topic.name, longest.partition, (longest.start + longest.end) // 2)


def _means(consumer: Consumer, middles: dict[str, TopicPartition]) -> dict[str, int]:
    """Returns the mean size of records; topics without samples in time are left out."""
    sizes: dict[str, list[int]] = {name: [] for name in middles}
    open_ = set(middles)
    deadline = time.monotonic() + _SAMPLE_S
    while open_ and time.monotonic() < deadline:
        for message in consumer.consume(_SAMPLE_RECORDS, _WAIT_S):
            name = message.topic()
            if name not in open_:
                continue
            if message.error() is None:
                sizes[name].append(_weight(message))
            if message.error() is not None or len(sizes[name]) >= _SAMPLE_RECORDS:
                open_.discard(name)
                consumer.pause([middles[name]])
    return {name: sum(found) // len(found) for name, found in sizes.items() if found}


def _weight(message: Message) -> int:
    headers = headers_of(message) or ()
    in_headers = sum(len(name) + len(value or b"") for name, value in headers)
    return _RECORD_OVERHEAD + len(message.key() or b"") + len(message.value() or b"") + in_headers


def _bytes_of(messages: Sequence[Message]) -> int:
    size: Callable[[Message], int] = len
    return sum(map(size, messages))


def _offset(message: Message) -> int:
    offset = message.offset()
    assert offset is not None
    return offset
