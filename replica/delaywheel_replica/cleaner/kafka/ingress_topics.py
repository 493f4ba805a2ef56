"""Reading the ingress topics: all partitions, assigned by hand, committed records only.

One thread at a time calls a reader (ingress_thread.py has one). What it holds is bounded:
librdkafka fetches no more than `INGRESS_FETCHED_KBYTES` ahead, and what `poll` returns is the
caller's to bound, by not calling it.

Where Kafka no longer has what comes next, the reader goes on with the first record that it has,
and says so. Where it has less than was read or announced before, the partition was cut off: then
records may come under offsets that were given before. That is told; what lies behind the end is not
to be taken.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
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
from delaywheel_replica.cleaner.kafka.client_log import LOGGER
from delaywheel_replica.cleaner.outside.ports import NO_ENDS, Fetched, KafkaAway
from delaywheel_replica.core.ingress.place import NO_TIMESTAMP, Place
from delaywheel_replica.core.ingress.reading import Incoming
from delaywheel_replica.core.protocol.control import IngressPartition
from delaywheel_replica.kafka_settings import KafkaSettings
from delaywheel_replica.process.logs import get_logger

LOOK_S: Final = 5.0

log = get_logger(__name__)


class IngressReader:
    """Reads partitions from given offsets on."""

    def __init__(self, settings: KafkaSettings) -> None:
        """Connects when first asked.

        Args:
            settings: how to reach Kafka.
        """
        # "error": where to go on is not for the library to choose.
        self._consumer = Consumer(
            {
                **settings.ingress_consumer(),
                "auto.offset.reset": "error",
                "on_commit": self._hear_of_group,
            },
            logger=LOGGER,
        )
        self._group = settings.names.ingress_group
        self._is_group_refused = False
        self._positions: dict[IngressPartition, int] = {}
        self._to_look_at: set[IngressPartition] = set()
        self._least_ends: dict[IngressPartition, int] = {}
        self._cut_off: dict[IngressPartition, int] = {}
        self._resting: set[IngressPartition] = set()
        self._refused: str | None = None

    @property
    def cut_off(self) -> Mapping[IngressPartition, int]:
        """Returns the partitions that end before what was read or announced of them, and where."""
        return self._cut_off

    def assign(
        self,
        positions: Mapping[IngressPartition, int],
        least_ends: Mapping[IngressPartition, int] = NO_ENDS,
    ) -> None:
        """Reads more partitions; those already being read continue.

        Args:
            positions: from these offsets on.
            least_ends: a partition that ends before that is cut off.
        """
        new = {at: offset for at, offset in positions.items() if at not in self._positions}
        if new:
            self._positions |= new
            self._least_ends |= {at: least_ends.get(at, 0) for at in new}
            self._consumer.incremental_assign(
                [TopicPartition(*at, offset) for at, offset in new.items()]
            )

    def go_back(self, positions: Mapping[IngressPartition, int]) -> None:
        """Reads these partitions again from these offsets on."""
        for at, position in positions.items():
            self._positions[at] = position
            self._resting.discard(at)  # it is told again
            self._consumer.incremental_unassign([TopicPartition(*at)])
            self._consumer.incremental_assign([TopicPartition(*at, position)])

    def rest(self, partitions: AbstractSet[IngressPartition]) -> None:
        """Returns nothing of these until they are not among them any more; then all of it."""
        resting = partitions & self._positions.keys()
        for change, changed in (
            (self._consumer.pause, resting - self._resting),
            (self._consumer.resume, self._resting - resting),
        ):
            if changed:
                change([TopicPartition(*at) for at in sorted(changed)])
        self._resting = set(resting)

    def poll(self, most: int, wait_s: float = 0) -> list[Fetched]:
        """Returns the records of each partition, up to a total number; waits for the first one.

        Raises:
            KafkaAway: Kafka refuses to be read, and says why. What came before was returned.
        """
        if self._refused is not None:
            refused, self._refused = self._refused, None
            raise KafkaAway(refused)
        records: dict[IngressPartition, list[Incoming]] = {}
        # With a time to wait, the library waits for all of them.
        messages = self._consumer.consume(1, wait_s)
        if messages and most > 1:
            messages += self._consumer.consume(most - 1, 0)
        for message in messages:
            at = _partition(message)
            if message.error() is not None:
                self._take_error(at, message)
            elif at is not None:
                records.setdefault(at, []).append(_incoming(message, at))
        for at, read in records.items():
            self._positions[at] = read[-1].place.offset + 1
        deleted = self._looked_at()
        self._compare_ends()
        fetched = [
            Fetched(at, tuple(read), read[-1].place.offset + 1) for at, read in records.items()
        ]
        return fetched + deleted + self._passed(set(records))

    def lags(self) -> dict[IngressPartition, int]:
        """Returns how many offsets lie beyond what was read of each partition, as last heard."""
        lags: dict[IngressPartition, int] = {}
        for at, position in self._positions.items():
            with contextlib.suppress(KafkaException):
                ends = self._consumer.get_watermark_offsets(TopicPartition(*at), cached=True)
                if ends is not None and ends[1] >= 0:
                    lags[at] = max(0, ends[1] - position)
        return lags

    def tell_group(self, offsets: Mapping[IngressPartition, int]) -> None:
        """Shows progress by the consumer group; a failure is made good by the next call."""
        if offsets:
            told = [TopicPartition(*at, offset) for at, offset in offsets.items()]
            with contextlib.suppress(KafkaException):
                self._consumer.commit(offsets=told, asynchronous=True)

    def _hear_of_group(self, error: KafkaError | None, _: object) -> None:
        """Logs that the group may not show progress, once each time that it begins."""
        is_refused = error is not None and error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED
        if is_refused and not self._is_group_refused:
            log.warning("not allowed to show how far ingress is", group=self._group)
        self._is_group_refused = is_refused

    def close(self) -> None:
        """Closes the consumer on another thread, since librdkafka's may wait for a broker."""
        threading.Thread(target=self._consumer.close, name="close ingress", daemon=True).start()

    def _take_error(self, at: IngressPartition | None, message: Message) -> None:
        error = message.error()
        assert error is not None
        code = error.code()
        if code == KafkaError.GROUP_AUTHORIZATION_FAILED:  # what it shows is for people
            self._hear_of_group(error, None)
        elif code == KafkaError._AUTO_OFFSET_RESET and at is not None:  # noqa: SLF001 - its names
            self._to_look_at.add(at)
        elif not (error.retriable() or code in _PASSING):
            self._refused = f"{at}: {error.str()}" if at is not None else error.str()

    def _looked_at(self) -> list[Fetched]:
        """Finds where partitions continue whose next offset Kafka does not have."""
        found: list[Fetched] = []
        for at in sorted(self._to_look_at):
            partition = TopicPartition(*at)
            try:
                first, end = self._consumer.get_watermark_offsets(partition, LOOK_S)
            except KafkaException:
                continue  # looked at again with the next poll
            self._to_look_at.discard(at)
            position = self._positions[at]
            if position > end:
                self._tell_cut_off(at, end, position)
                continue
            if first > position:
                position = first
                found.append(Fetched(at, (), first, first_kept=first))
            self.go_back({at: position})  # a seek is refused while it rests after its error
        return found

    def _compare_ends(self) -> None:
        """Finds partitions that end before what was announced, though not before what is next.

        The end that comes with records is free, but of a broker that has just come to lead one it
        may lag behind what others have heard; one that is asked for never does.
        """
        for at, least in list(self._least_ends.items()):
            partition = TopicPartition(*at)
            with contextlib.suppress(KafkaException):  # looked at again with the next poll
                heard = self._consumer.get_watermark_offsets(partition, cached=True)
                if self._positions[at] < least and (heard is None or heard[1] < 0):
                    continue
                if self._positions[at] < least and heard[1] < least:
                    _, end = self._consumer.get_watermark_offsets(partition, LOOK_S)
                    if end < least:
                        self._tell_cut_off(at, end, least)
                del self._least_ends[at]

    def _tell_cut_off(self, at: IngressPartition, end: int, expected: int) -> None:
        if at not in self._cut_off:
            log.error("an ingress partition is cut off", at=at, end=end, expected=expected)
        self._cut_off.setdefault(at, end)

    def _passed(self, heard: set[IngressPartition]) -> list[Fetched]:
        """Returns partitions of which only markers and aborted records came."""
        quiet = [TopicPartition(*at) for at in self._positions if at not in heard]
        passed: list[Fetched] = []
        for told in self._consumer.position(quiet) if quiet else []:
            at = told.topic, told.partition
            if told.offset > self._positions[at]:
                self._positions[at] = told.offset
                passed.append(Fetched(at, (), told.offset))
        return passed


_PASSING = {
    KafkaError._PARTITION_EOF,  # noqa: SLF001 - its names
    KafkaError._TRANSPORT,  # noqa: SLF001
    KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
    KafkaError._RESOLVE,  # noqa: SLF001
}


def _partition(message: Message) -> IngressPartition | None:
    topic, partition = message.topic(), message.partition()
    return None if topic is None or partition is None or partition < 0 else (topic, partition)


def _incoming(message: Message, at: IngressPartition) -> Incoming:
    offset: Any = message.offset()
    kind, timestamp_ms = message.timestamp()
    return Incoming(
        Place(*at, offset),
        NO_TIMESTAMP if kind == TIMESTAMP_NOT_AVAILABLE else timestamp_ms,
        _bytes(message.key()),
        _bytes(message.value()),
        headers_of(message),
    )


def _bytes(content: bytes | str | None) -> bytes | None:
    return content.encode() if isinstance(content, str) else content
