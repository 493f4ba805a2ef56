"""Reads the ingress topics on its own thread, so that the leader's never waits for Kafka.

The thread waits for records, wakes the leader when there are some, and continues once the leader
has taken them. So at most one batch waits beside librdkafka's own queue, and the leader is not
woken while no records come.

librdkafka reads a topic by its name, and continues at the former offsets in a recreated one. So
the thread asks Kafka for the topics' ids after each batch, before the batch counts: if an id is
unchanged, the batch came from the same topic. This takes one request per batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from confluent_kafka import KafkaException

from delaywheel_replica.cleaner.kafka.client_log import error_of
from delaywheel_replica.cleaner.kafka.ingress_topics import IngressReader
from delaywheel_replica.cleaner.outside.ports import NO_ENDS, NO_IDS, Fetched, KafkaAway
from delaywheel_replica.core.protocol.control import IngressPartition
from delaywheel_replica.kafka_settings import KafkaSettings

BATCH: Final = 2_000
"""Limit for one batch, in records: less than 50 ms of work for the leader."""

WAIT_S: Final = 0.5
"""The thread waits for records no longer than this, then checks for other work."""

LAGS_S: Final = 0.5
FAULT_PAUSE_S: Final = 0.5

RENEW_S: Final = 10.0
"""A refused reader is replaced so often: librdkafka reports a lasting refusal only once."""


class IngressThread:
    """Reads partitions in the background: `IngressPort`."""

    def __init__(
        self,
        settings: KafkaSettings,
        ids_of: Callable[[Iterable[str]], Mapping[str, str]],
        on_news: Callable[[], None],
    ) -> None:
        """Begins to read once there are partitions; `ids_of` leaves out missing topics."""
        self._settings = settings
        self._ids_of = ids_of
        self._on_news = on_news
        self._changed = threading.Condition()
        self._closing = False
        # For the thread.
        self._positions: dict[IngressPartition, int] = {}
        self._least_ends: dict[IngressPartition, int] = {}
        self._topic_ids: dict[str, str] = {}
        self._paused: AbstractSet[IngressPartition] = frozenset()
        self._to_report: tuple[Mapping[IngressPartition, int], AbstractSet[IngressPartition]]
        self._to_report = {}, frozenset()
        # For the leader.
        self._fetched: list[Fetched] = []
        self._fault: KafkaAway | None = None
        self._lags: dict[IngressPartition, int] = {}
        self._open: frozenset[IngressPartition] = frozenset()
        self._cut_off: Mapping[IngressPartition, int] = {}
        self._recreated: frozenset[str] = frozenset()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ingress", daemon=True)
        self._thread.start()

    @property
    def cut_off(self) -> Mapping[IngressPartition, int]:
        """Returns the partitions that end before what was read or announced of them, and where."""
        return self._cut_off

    @property
    def recreated(self) -> frozenset[str]:
        """Returns the topics whose id has changed; they are no longer read."""
        return self._recreated

    def assign(
        self,
        positions: Mapping[IngressPartition, int],
        least_ends: Mapping[IngressPartition, int] = NO_ENDS,
        topic_ids: Mapping[str, str] = NO_IDS,
    ) -> None:
        """See `IngressPort`."""
        with self._changed:
            self._topic_ids = {**topic_ids, **self._topic_ids}
            self._positions = {**positions, **self._positions}
            self._least_ends = {**least_ends, **self._least_ends}
            self._changed.notify()

    def pause_only(self, partitions: AbstractSet[IngressPartition]) -> None:
        """Pauses these partitions and resumes all others; a batch of them may still come."""
        with self._changed:
            self._paused = partitions
            self._changed.notify()

    def poll(self) -> list[Fetched]:
        """Returns what was read since the last call; KafkaAway: Kafka refuses reads."""
        if self._failure is not None:
            raise self._failure
        with self._changed:
            fetched, self._fetched = self._fetched, []
            fault, self._fault = self._fault, None
            self._changed.notify()
        if fault is not None and not fetched:
            raise fault
        return fetched

    def lags(self) -> dict[IngressPartition, int]:
        """Returns the number of unread offsets of each partition, as last reported by Kafka."""
        return self._lags

    @property
    def open_transactions(self) -> frozenset[IngressPartition]:
        """Returns the partitions that are held up by a transaction that stays open."""
        return self._open

    def report_to_group(
        self, offsets: Mapping[IngressPartition, int], unread: AbstractSet[IngressPartition]
    ) -> None:
        """Shows progress in the consumer group's offsets, and which partitions are not read."""
        with self._changed:
            self._to_report = dict(offsets), frozenset(unread)
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread, which may have to wait for Kafka's answer first."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    # --- on the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                reader = IngressReader(self._settings)
                try:
                    self._read(reader)
                except KafkaException as exception:
                    self._report_fault(
                        KafkaAway(error_of(exception).str())
                    )  # and another reader continues
                finally:
                    reader.close()
        except BaseException as failure:  # noqa: BLE001 - raised again by poll()
            self._failure = failure
            self._wake()

    def _read(self, reader: IngressReader) -> None:
        lags_at, renew_at = 0.0, float("inf")
        while True:
            with self._changed:
                while not (self._closing or self._to_report[0] or self._reads):
                    self._changed.wait()
                if self._closing:
                    return
                positions = dict(self._positions)
                report, self._to_report = self._to_report, ({}, frozenset())
                least_ends = dict(self._least_ends)
                reads, paused = self._reads, self._paused
            reader.assign(positions, least_ends)
            reader.report_to_group(*report)
            if time.monotonic() >= renew_at:
                return
            if reads:
                reader.pause_only(paused)
            if reads and not self._fetch(reader):
                renew_at = min(renew_at, time.monotonic() + RENEW_S)
            if time.monotonic() >= lags_at:
                lags_at = time.monotonic() + LAGS_S
                self._lags = reader.lags()
                self._open = reader.open_transactions()

    @property
    def _reads(self) -> bool:
        """Whether to read; while all partitions are paused, fetched records wait in the client."""
        is_taken = not self._fetched and self._fault is None
        return is_taken and bool(self._positions.keys() - self._paused)

    def _fetch(self, reader: IngressReader) -> bool:
        """Fetches a batch; returns whether Kafka allowed it."""
        try:
            fetched = reader.poll(BATCH, WAIT_S)
        except KafkaAway as away:
            self._report_fault(away)
            return False
        cut_off = {at: end for at, end in reader.cut_off.items() if at not in self._cut_off}
        same = self._same({each.at[0] for each in fetched} | {topic for topic, _ in cut_off})
        self._cut_off = {
            **self._cut_off,
            **{at: end for at, end in cut_off.items() if at[0] in same},
        }
        reader.go_back(
            {
                each.at: self._positions[each.at]
                for each in fetched
                if each.at[0] not in same | self._recreated
            }
        )
        fetched = [each for each in fetched if each.at[0] in same]
        if fetched:
            with self._changed:
                self._positions |= {each.at: each.position for each in fetched}
                self._fetched += fetched
            self._wake()
        return True

    def _same(self, topics: set[str]) -> set[str]:
        """Returns those of these topics that surely have the id they were assigned with."""
        topics -= self._recreated
        try:
            ids = self._ids_of(sorted(topics)) if topics else {}
        except KafkaAway as away:
            self._report_fault(away)
            return set()
        recreated = {topic for topic, id_ in ids.items() if id_ != self._topic_ids.get(topic, id_)}
        if recreated:
            self._recreated |= recreated
            self._wake()
        return topics & (ids.keys() - recreated)

    def _report_fault(self, fault: KafkaAway) -> None:
        with self._changed:
            self._fault = fault
            self._changed.wait(FAULT_PAUSE_S)
        self._wake()

    def _wake(self) -> None:
        """Wakes the leader, which may be gone after `close`."""
        with self._changed:
            if not self._closing:
                self._on_news()
