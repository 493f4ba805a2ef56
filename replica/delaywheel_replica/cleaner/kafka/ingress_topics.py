"""Reads the ingress topics: all partitions, assigned explicitly, committed records only.

One thread at a time calls a reader (ingress_thread.py has one). Its memory is bounded: librdkafka
prefetches up to `INGRESS_FETCHED_KBYTES`, and the caller bounds the rest by not calling `poll`.
A batch of 1 MB may hold, compressed, thousands of records with 100,000 headers each, each of which
takes some 70 bytes in the library when it returns the record, and as much here: so `poll` asks for
`FEW` records at a time, and for no more once they have `HEADERS_AT_ONCE`.

If Kafka no longer has the next record, the reader continues at the first one that Kafka has, and
reports the gap. If a partition ends before what was read or announced of it, it was cut off: later
records reuse offsets. The reader reports that, and records after the end must not be taken.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Any, Final

from confluent_kafka import (
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from delaywheel.record_headers import headers_of
from delaywheel.transactional import OpenTransactionWatch
from delaywheel_replica.cleaner.kafka.client_log import LOGGER
from delaywheel_replica.cleaner.outside.ports import NO_ENDS, Fetched, ReadsRefused
from delaywheel_replica.core.ingress.place import NO_TIMESTAMP, IngressPlace
from delaywheel_replica.core.ingress.reading import CommittedRecord
from delaywheel_replica.core.protocol.control import IngressPartition
from delaywheel_replica.kafka_settings import KafkaSettings
from delaywheel_replica.process.logs import get_logger

LOOK_S: Final = 5.0

FEW: Final = 8
HEADERS_AT_ONCE: Final = 100_000

AT_ONCE: Final = 200
"""How many partitions without records one call looks at: the client is asked about each."""

PARTITIONS_NAMED: Final = 500
"""Beside an offset Kafka keeps 4 KB."""

log = get_logger(__name__)


class IngressReader:
    """Reads partitions from given offsets on."""

    def __init__(self, settings: KafkaSettings) -> None:
        """Prepares a consumer, which connects on first use."""
        # "error": the library must not choose where to continue.
        self._consumer = Consumer(
            {
                **settings.ingress_consumer(),
                "auto.offset.reset": "error",
                "on_commit": self._take_commit_result,
            },
            logger=LOGGER,
        )
        self._names = settings.names
        self._limits = settings.ingress_limits
        self._is_group_refused = False
        self._positions: dict[IngressPartition, int] = {}
        self._to_look_at: set[IngressPartition] = set()
        self._least_ends: dict[IngressPartition, int] = {}
        self._cut_off: dict[IngressPartition, int] = {}
        self._paused: set[IngressPartition] = set()
        self._refused: dict[str, str] = {}
        self._lags: dict[IngressPartition, int] = {}
        self._lag_rotation = _Rotation()
        self._open = OpenTransactionWatch[IngressPartition](self._end_of)
        self._quiet_rotation = _Rotation()

    @property
    def cut_off(self) -> Mapping[IngressPartition, int]:
        """Returns the partitions that end before what was read or announced of them, and where."""
        return self._cut_off

    def assign(
        self,
        positions: Mapping[IngressPartition, int],
        least_ends: Mapping[IngressPartition, int] = NO_ENDS,
    ) -> None:
        """See `IngressPort`; what was recreated is ingress_thread.py's to see."""
        new = {at: offset for at, offset in positions.items() if at not in self._positions}
        if new:
            self._positions |= new
            self._least_ends |= {at: least_ends.get(at, 0) for at in new}
            self._consumer.incremental_assign(
                [TopicPartition(*at, offset) for at, offset in new.items()]
            )

    def go_back(self, positions: Mapping[IngressPartition, int]) -> None:
        """Reads these partitions again from the given offsets."""
        for at, position in positions.items():
            self._positions[at] = position
            self._paused.discard(at)  # pause_only() pauses it again
            self._consumer.incremental_unassign([TopicPartition(*at)])
            self._consumer.incremental_assign([TopicPartition(*at, position)])

    def pause_only(self, partitions: AbstractSet[IngressPartition]) -> None:
        """Pauses these partitions and resumes all others; no record is skipped."""
        paused = partitions & self._positions.keys()
        for change, changed in (
            (self._consumer.pause, paused - self._paused),
            (self._consumer.resume, self._paused - paused),
        ):
            if changed:
                change([TopicPartition(*at) for at in sorted(changed)])
        self._paused = set(paused)

    def poll(self, most: int, wait_s: float = 0) -> list[Fetched]:
        """Returns the records of each partition, up to a total number; waits for the first one.

        ReadsRefused: Kafka says why. Earlier records were returned.
        """
        if self._refused:
            refused, self._refused = self._refused, {}
            raise ReadsRefused(refused)
        records: dict[IngressPartition, list[CommittedRecord]] = {}
        headers = 0
        # With a timeout, the library waits until it has all of them.
        messages = self._consumer.consume(1, wait_s)
        while messages:
            for message in messages:
                at = _partition(message)
                if message.error() is not None:
                    self._take_error(at, message)
                elif at is not None:
                    record = _incoming(message, at)
                    records.setdefault(at, []).append(record)
                    headers += len(record.headers or ())
            most -= len(messages)
            few = min(most, FEW) if headers < HEADERS_AT_ONCE else 0
            messages = self._consumer.consume(few, 0) if few else []
        for at, read in records.items():
            self._positions[at] = read[-1].place.offset + 1
        deleted = self._looked_at()
        self._compare_ends()
        fetched = [
            Fetched(at, tuple(read), read[-1].place.offset + 1) for at, read in records.items()
        ]
        return fetched + deleted + self._passed(set(records))

    def lags(self) -> dict[IngressPartition, int]:
        """Returns the unread offsets of some partitions, in turn, as last reported by Kafka."""
        for at in self._lag_rotation.next(self._positions):
            position = self._positions[at]
            with contextlib.suppress(KafkaException):
                ends = self._consumer.get_watermark_offsets(TopicPartition(*at), cached=True)
                if ends is not None and ends[1] >= 0:
                    self._lags[at] = max(0, ends[1] - position)
        return dict(self._lags)

    def open_transactions(self) -> frozenset[IngressPartition]:
        """Returns the partitions that an open transaction holds up; call `lags` before."""
        unread = (at for at, lag in self._lags.items() if lag and at not in self._paused)
        return self._open.look({at: self._positions[at] for at in unread})

    def _end_of(self, at: IngressPartition) -> int | None:
        with contextlib.suppress(KafkaException):
            return int(self._consumer.get_watermark_offsets(TopicPartition(*at), LOOK_S)[1])
        return None

    def report_to_group(
        self, offsets: Mapping[IngressPartition, int], unread: AbstractSet[IngressPartition]
    ) -> None:
        """Shows progress in the consumer group's offsets; the next call makes up for a failure."""
        if offsets:
            notes = self._notes(offsets.keys(), unread)
            next_offsets = [
                TopicPartition(*at, offset, notes[at[0]]) for at, offset in offsets.items()
            ]
            with contextlib.suppress(KafkaException):
                self._consumer.commit(offsets=next_offsets, asynchronous=True)

    def _notes(
        self, partitions: AbstractSet[IngressPartition], unread: AbstractSet[IngressPartition]
    ) -> dict[str, str]:
        """Says of each topic what is taken, and if some partitions are not read, which ones are."""
        limits = self._limits
        if limits is None:
            return {topic: "" for topic, _ in partitions}
        notes = dict.fromkeys({topic for topic, _ in partitions}, limits.as_note())
        for topic in {topic for topic, _ in partitions & unread}:
            read = sorted(number for name, number in partitions - unread if name == topic)
            named = tuple(read[:PARTITIONS_NAMED])
            notes[topic] = limits._replace(read=named, is_read=bool(read)).as_note()
        return notes

    def _take_commit_result(self, error: KafkaError | None, _: object) -> None:
        """Logs that the group may not commit offsets, once each time this begins."""
        is_refused = error is not None and error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED
        if is_refused and not self._is_group_refused:
            log.warning("not allowed to show how far ingress is", group=self._names.ingress_group)
        self._is_group_refused = is_refused

    def close(self) -> None:
        """Closes the consumer on another thread, since librdkafka's may wait for a broker."""
        threading.Thread(target=self._consumer.close, name="close ingress", daemon=True).start()

    def _take_error(self, at: IngressPartition | None, message: Message) -> None:
        error = message.error()
        assert error is not None
        code = error.code()
        if code == KafkaError.GROUP_AUTHORIZATION_FAILED:  # its offsets are only for operators
            self._take_commit_result(error, None)
        elif code == KafkaError._AUTO_OFFSET_RESET and at is not None:
            self._to_look_at.add(at)
        elif not (error.retriable() or code in _PASSING):
            topic, text = ("", error.str()) if at is None else (at[0], f"{at}: {error.str()}")
            self._refused[topic] = text

    def _looked_at(self) -> list[Fetched]:
        """Finds where to continue in partitions whose next offset Kafka does not have."""
        found: list[Fetched] = []
        for at in sorted(self._to_look_at):
            partition = TopicPartition(*at)
            try:
                first, end = self._consumer.get_watermark_offsets(partition, LOOK_S)
            except KafkaException:
                continue  # tried again by the next poll
            self._to_look_at.discard(at)
            position = self._positions[at]
            if position > end:
                self._note_cut_off(at, end, position)
                continue
            if first > position:
                position = first
                found.append(Fetched(at, (), first, first_kept=first))
            self.go_back(
                {at: position}
            )  # a seek is refused while the partition is paused after its error
        return found

    def _compare_ends(self) -> None:
        """Finds partitions that end before what was announced, though not before what is next.

        The end that comes with records is free, but may lag if the broker has just become the
        partition's leader; an end requested explicitly never lags.
        """
        for at, least in list(self._least_ends.items()):
            partition = TopicPartition(*at)
            with contextlib.suppress(KafkaException):  # tried again by the next poll
                cached = self._consumer.get_watermark_offsets(partition, cached=True)
                if self._positions[at] < least and (cached is None or cached[1] < 0):
                    continue
                if self._positions[at] < least and cached[1] < least:
                    _, end = self._consumer.get_watermark_offsets(partition, LOOK_S)
                    if end < least:
                        self._note_cut_off(at, end, least)
                del self._least_ends[at]

    def _note_cut_off(self, at: IngressPartition, end: int, expected: int) -> None:
        if at not in self._cut_off:
            log.error("an ingress partition is cut off", at=at, end=end, expected=expected)
        self._cut_off.setdefault(at, end)

    def _passed(self, read: set[IngressPartition]) -> list[Fetched]:
        """Returns partitions that advanced by markers and aborted records only; some in turn."""
        quiet = [
            TopicPartition(*at)
            for at in self._quiet_rotation.next(self._positions)
            if at not in read
        ]
        passed: list[Fetched] = []
        for reached in self._consumer.position(quiet) if quiet else []:
            at = reached.topic, reached.partition
            if reached.offset > self._positions[at]:
                self._positions[at] = reached.offset
                passed.append(Fetched(at, (), reached.offset))
        return passed


class _Rotation:
    """Takes the partitions in turn, `AT_ONCE` at a time, however many there are."""

    def __init__(self) -> None:
        self._begin = 0

    def next(self, partitions: Collection[IngressPartition]) -> list[IngressPartition]:
        begin = self._begin if self._begin < len(partitions) else 0
        self._begin = begin + AT_ONCE
        return list(islice(partitions, begin, begin + AT_ONCE))


_PASSING = {
    KafkaError._PARTITION_EOF,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
}


def _partition(message: Message) -> IngressPartition | None:
    topic, partition = message.topic(), message.partition()
    return None if topic is None or partition is None or partition < 0 else (topic, partition)


def _incoming(message: Message, at: IngressPartition) -> CommittedRecord:
    offset: Any = message.offset()
    kind, timestamp_ms = message.timestamp()
    return CommittedRecord(
        IngressPlace(*at, offset),
        NO_TIMESTAMP if kind == TIMESTAMP_NOT_AVAILABLE else timestamp_ms,
        _bytes(message.key()),
        _bytes(message.value()),
        headers_of(message),
    )


def _bytes(content: bytes | str | None) -> bytes | None:
    return content.encode() if isinstance(content, str) else content
