"""Reads the ingress topics on a thread of its own, so that the leader's never waits for Kafka.

The thread waits for records, and wakes the leader when there are some; it reads on once they are
taken. So beside what librdkafka fetches ahead, one batch waits at most, and while nothing comes
nobody turns.

librdkafka reads a topic by its name, and goes on reading, at the former offsets, in one that was
made anew. So Kafka is asked for the ids of the topics once a batch has come, and before it counts:
where the id is still the same, the batch came from the same topic. That is one request a batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from confluent_kafka import KafkaException

from delaywheel_replica.cleaner.kafka.ingress_topics import IngressReader
from delaywheel_replica.cleaner.outside.ports import NO_ENDS, NO_IDS, Fetched, KafkaAway
from delaywheel_replica.core.protocol.control import IngressPartition
from delaywheel_replica.kafka_settings import KafkaSettings

BATCH: Final = 2_000
"""Records that are read at once."""

WAIT_S: Final = 0.5
"""For so long the thread waits for records; then it looks whether something else is wanted."""

LAGS_S: Final = 0.5
FAULT_PAUSE_S: Final = 0.5

RENEW_S: Final = 10.0
"""After a refusal another reader is made: librdkafka tells a lasting one only once."""


class IngressThread:
    """Reads partitions in the background: `IngressPort`."""

    def __init__(
        self,
        settings: KafkaSettings,
        ids_of: Callable[[Iterable[str]], Mapping[str, str]],
        on_news: Callable[[], None],
    ) -> None:
        """Begins to read once there are partitions.

        Args:
            settings: Settings for reaching Kafka.
            ids_of: Asks Kafka for the ids of those of these topics that there are.
            on_news: Called on the thread when `poll` has something.
        """
        self._settings = settings
        self._ids_of = ids_of
        self._on_news = on_news
        self._changed = threading.Condition()
        self._closing = False
        # For the thread.
        self._positions: dict[IngressPartition, int] = {}
        self._least_ends: dict[IngressPartition, int] = {}
        self._topic_ids: dict[str, str] = {}
        self._resting: AbstractSet[IngressPartition] = frozenset()
        self._told: Mapping[IngressPartition, int] = {}
        # For the leader.
        self._fetched: list[Fetched] = []
        self._fault: str | None = None
        self._lags: dict[IngressPartition, int] = {}
        self._cut_off: Mapping[IngressPartition, int] = {}
        self._anew: frozenset[str] = frozenset()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ingress", daemon=True)
        self._thread.start()

    @property
    def cut_off(self) -> Mapping[IngressPartition, int]:
        """Returns the partitions that end before what was read or announced of them, and where."""
        return self._cut_off

    @property
    def anew(self) -> frozenset[str]:
        """Returns the topics that have another id by now, of which nothing is read any more."""
        return self._anew

    def assign(
        self,
        positions: Mapping[IngressPartition, int],
        least_ends: Mapping[IngressPartition, int] = NO_ENDS,
        topic_ids: Mapping[str, str] = NO_IDS,
    ) -> None:
        """Reads more partitions; those that it reads already go on.

        Args:
            positions: from these offsets on.
            least_ends: a partition that ends before that is cut off.
            topic_ids: Kafka's ids of their topics: under the same name, nothing of another is read.
        """
        with self._changed:
            self._topic_ids = {**topic_ids, **self._topic_ids}
            self._positions = {**positions, **self._positions}
            self._least_ends = {**least_ends, **self._least_ends}
            self._changed.notify()

    def rest(self, partitions: AbstractSet[IngressPartition]) -> None:
        """Reads no more of these for now, and of all others; a batch may be under way."""
        with self._changed:
            self._resting = partitions
            self._changed.notify()

    def poll(self, most: int, wait_s: float = 0) -> list[Fetched]:  # noqa: ARG002 - the port's
        """Returns what was read since the last call, without waiting.

        Raises:
            KafkaAway: Kafka refuses to be read, and says why.
        """
        if self._failure is not None:
            raise self._failure
        with self._changed:
            fetched, self._fetched = self._fetched, []
            fault, self._fault = self._fault, None
            self._changed.notify()
        if fault is not None and not fetched:
            raise KafkaAway(fault)
        return fetched

    def lags(self) -> dict[IngressPartition, int]:
        """Returns how many offsets follow what was read of each partition, as far as was heard."""
        return self._lags

    def tell_group(self, offsets: Mapping[IngressPartition, int]) -> None:
        """Has the consumer group show how far things are: for people, nothing reads it."""
        with self._changed:
            self._told = dict(offsets)
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread, which may take it until Kafka answers."""
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
                    self._tell_fault(exception.args[0].str())  # and another reader goes on
                finally:
                    reader.close()
        except BaseException as failure:  # noqa: BLE001 - raised again where it is heard
            self._failure = failure
            self._wake()

    def _read(self, reader: IngressReader) -> None:
        lags_at, renew_at = 0.0, float("inf")
        while True:
            with self._changed:
                while not (self._closing or self._told or self._reads):
                    self._changed.wait()
                if self._closing:
                    return
                positions, told, self._told = dict(self._positions), self._told, {}
                least_ends = dict(self._least_ends)
                reads, resting = self._reads, self._resting
            reader.assign(positions, least_ends)
            reader.tell_group(told)
            if time.monotonic() >= renew_at:
                return
            if reads:
                reader.rest(resting)
            if reads and not self._fetch(reader):
                renew_at = min(renew_at, time.monotonic() + RENEW_S)
            if time.monotonic() >= lags_at:
                lags_at = time.monotonic() + LAGS_S
                self._lags = reader.lags()

    @property
    def _reads(self) -> bool:
        """Whether to read; where all rest, what the client has fetched waits in it."""
        return self._is_taken and bool(self._positions.keys() - self._resting)

    @property
    def _is_taken(self) -> bool:
        return not self._fetched and self._fault is None

    def _fetch(self, reader: IngressReader) -> bool:
        """Returns whether it was not refused."""
        try:
            fetched = reader.poll(BATCH, WAIT_S)
        except KafkaAway as away:
            self._tell_fault(str(away))
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
                if each.at[0] not in same | self._anew
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
        """Returns those of these topics that are known to be the ones that were assigned."""
        topics -= self._anew
        try:
            ids = self._ids_of(sorted(topics)) if topics else {}
        except KafkaAway as away:
            self._tell_fault(str(away))
            return set()
        anew = {topic for topic, id_ in ids.items() if id_ != self._topic_ids.get(topic, id_)}
        if anew:
            self._anew |= anew
            self._wake()
        return topics & (ids.keys() - anew)

    def _tell_fault(self, fault: str) -> None:
        with self._changed:
            self._fault = fault
            self._changed.wait(FAULT_PAUSE_S)
        self._wake()

    def _wake(self) -> None:
        """Wakes the leader, which after `close` may be gone."""
        with self._changed:
            if not self._closing:
                self._on_news()
