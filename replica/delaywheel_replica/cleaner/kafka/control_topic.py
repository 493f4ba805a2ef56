"""Reads the control topic: all committed records, in order, up to the last stable offset.

Standbys follow it; a candidate reads it to its end before it trusts it; a leader reads nothing,
because no other node can commit while it leads.

The topic is compacted, so a reader starts at its beginning and misses nothing that still counts, as
long as it does not fall behind by hours: follower.py decides when to start over.
"""

from __future__ import annotations

import threading
import time

from confluent_kafka import (
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from delaywheel.transactional import ask_again_after_moves
from delaywheel_replica.cleaner.kafka.client_log import LOGGER, error_of
from delaywheel_replica.cleaner.outside.ports import (
    ControlNotReadInTime,
    ControlUnreadable,
    StoredRecord,
)
from delaywheel_replica.kafka_settings import KafkaSettings

BATCH = 1_000


class ControlReader:
    """Reads the control topic once from its beginning. For one thread at a time.

    Attributes:
        position: The offset of the next record to be read. Never goes back.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self.position = 0
        self._read: list[StoredRecord] = []  # not yet handed out
        self._partition = TopicPartition(settings.names.control, 0, 0)
        # "error": when the topic was recreated, starting over would mix two histories.
        self._consumer = Consumer(
            {**settings.consumer(), "auto.offset.reset": "error"}, logger=LOGGER
        )
        self._consumer.assign([self._partition])

    def poll(self) -> list[StoredRecord]:
        """Returns the records that arrived since the last call, without waiting."""
        self._take(0)
        return self._hand_out()

    def read_to_end(self, timeout_s: float) -> list[StoredRecord]:
        """Returns all records up to the current last stable offset.

        An open transaction in the topic holds that offset back: a candidate calls this only
        after it has ended all of them by initialising every transactional id.
        """
        deadline = time.monotonic() + timeout_s
        try:
            # Asked as read_committed, the broker answers with the last stable offset.
            _, end = ask_again_after_moves(
                lambda: self._consumer.get_watermark_offsets(self._partition, timeout_s),
                lambda: self._consumer.list_topics(self._partition.topic, timeout=timeout_s),
                timeout_s,
            )
        except KafkaException as exception:
            error = error_of(exception)
            # The client that asked is needed: to connect to brokers that are far, and to greet
            # them, may take longer than one reading has.
            is_late = error.code() in (KafkaError._TIMED_OUT, KafkaError._ALL_BROKERS_DOWN)
            kind = ControlNotReadInTime if is_late else ControlUnreadable
            raise kind(f"the control topic's end: {error.str()}") from exception
        if self.position > end:
            raise ControlUnreadable(
                f"the control topic ends at {end}, but was read up to {self.position}:"
                " it was recreated, or lost its end"
            )
        while self.position < end:
            if time.monotonic() > deadline:
                raise ControlNotReadInTime(f"read {self.position} of {end} in {timeout_s:g} s")
            self._take(0.05)
        return self._hand_out()

    def close(self) -> None:
        """Closes the consumer, on another thread: librdkafka's own may be waiting for a broker."""
        threading.Thread(target=self._consumer.close, name="close reader", daemon=True).start()

    def _hand_out(self) -> list[StoredRecord]:
        records, self._read = self._read, []
        return records

    def _take(self, wait_s: float) -> None:
        for message in self._consumer.consume(BATCH, wait_s):
            record = _record(message)
            if record is not None:
                self.position = record.offset + 1
                self._read.append(record)
        # The consumer's own position also passes markers and aborted records.
        (at,) = self._consumer.position([self._partition])
        self.position = max(self.position, at.offset)


def _record(message: Message) -> StoredRecord | None:
    """Returns the record in a message; None for librdkafka's own events."""
    error = message.error()
    if error is not None:
        code = error.code()
        if code in (KafkaError._PARTITION_EOF, KafkaError._TRANSPORT):
            return None
        if error.retriable() or code == KafkaError._ALL_BROKERS_DOWN:
            return None
        raise ControlUnreadable(f"the control topic: {error.str()}")
    key, value, offset = message.key(), message.value(), message.offset()
    assert offset is not None
    if key is None:
        return None  # nothing of ours: every record of ours has a key
    kind, timestamp_ms = message.timestamp()
    return StoredRecord(
        _bytes(key),
        None if value is None else _bytes(value),
        offset,
        timestamp_ms if kind == TIMESTAMP_LOG_APPEND_TIME else -1,
    )


def _bytes(value: bytes | str) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
