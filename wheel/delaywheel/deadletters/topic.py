"""A dead-letter topic: its letters, and operations on them. `marks.py` says why they are safe."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import ConfigResource, ResourceType  # type: ignore[attr-defined] # its stubs re-export without saying so
from confluent_kafka.cimpl import NewTopic

from delaywheel.client.exchange.settings import check_trace
from delaywheel.consumer.kafka.topics import limits_of
from delaywheel.deadletters.counting import LetterCounts, Settled
from delaywheel.deadletters.errors import DeadLettersError, DeadLettersReason
from delaywheel.deadletters.letter import Letter, LetterPlace
from delaywheel.deadletters.marks import MARKS_SUFFIX, LetterState, Mark, Marks
from delaywheel.deadletters.origin import Origins
from delaywheel.deadletters.reading import TopicReader, letter_of, refused, translated_errors
from delaywheel.deadletters.selection import CLOCKS_MS, EVERYTHING, Selection
from delaywheel.deadletters.settling import BATCH_LETTERS, DROP, Drop, Replay, Settling
from delaywheel.deadletters.tracing import LettersToTell
from delaywheel.deadletters.writing import LetterWriter
from delaywheel.ingress import IngressLimits, halves_topic, ingress_topic, is_reserved_topic
from delaywheel.kafka_admin import KafkaAdmin
from delaywheel.transactional import MIN_INSYNC, Outgoing, least_in_sync, replicas_on

if TYPE_CHECKING:  # a program that does not trace imports nothing of it
    from delaywheel.trace.reports import EventReports

_LOG = logging.getLogger("delaywheel.deadletters")

MOST_TOPICS: Final = 10_000
_CLUSTERS_OWN: Final = re.compile(r"delaywheel-(.+)-dead")
RETRY_S: Final = 0.02
CLAIMS: Final = 3
"""How often a claim is attempted."""

KNOWN_S: Final = 10.0
"""How long it counts what a topic was found to be: a consumer's claim may last for weeks."""

_INGRESS_UNREAD = "INGRESS_UNREAD"


def dead_letter_topic(cluster_id: str) -> str:
    """Returns the name of a cluster's own dead-letter topic."""
    return f"delaywheel-{cluster_id}-dead"


def undecided_topic(cluster_id: str, group: str) -> str:
    """Returns the topic of a group's undecided halves, `delaywheel-main-halves-dead-shop`."""
    return f"{halves_topic(cluster_id)}-dead-{group}"


OffsetRanges: TypeAlias = dict[int, tuple[int, int]]
"""For each partition, the first offset and the one after the last."""


class DeadLetterTopic:
    """The letters of one topic: delaywheel's own, or those of a `RetryConsumer`.

    One call at a time. `replay` and `drop` of several processes exclude one another: the later one
    continues, the earlier one ends with OVERTAKEN.
    """

    def __init__(
        self,
        topic: str,
        client: Mapping[str, Any],
        *,
        timeout_s: float = 15.0,
        trace: EventReports | None = None,
    ) -> None:
        """Connects when first used; raises KafkaException for a setting that the client lacks.

        `timeout_s` is how long to wait for Kafka; `trace` hears of letters that are replayed or
        dropped.
        """
        check_trace(trace)
        self._trace = trace
        self.name = topic
        self._marks_name = f"{topic}{MARKS_SUFFIX}"
        self._client = dict(client)
        self._timeout_s = timeout_s
        self._admin = KafkaAdmin(
            {"client.id": f"delaywheel-letters-{topic}", "log_level": 0, **self._client}
        )
        self._reader = TopicReader(self._client, topic, timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; a trace is written, for 2 s at most."""
        self._reader.close()
        if self._trace is not None:
            self._trace.flush()

    # --- looking

    def letters(self, selection: Selection = EVERYTHING) -> Iterator[tuple[Letter, LetterState]]:
        """Yields the selected letters with their states, in order within a partition.

        Raises:
            DeadLettersError: TOPIC_MISSING, KAFKA_UNREACHABLE or KAFKA_REFUSED.
        """
        bounds, marks = self.look()
        for letter in self.read(selection, bounds):
            yield letter, marks.state_of(letter.place)

    def count(self, selection: Selection = EVERYTHING) -> LetterCounts:
        """Counts the selected letters; raises as `letters` does."""
        counts = LetterCounts()
        for letter, state in self.letters(selection):
            counts.add(letter, state)
        return counts

    def get(self, place: LetterPlace) -> tuple[Letter, Mark | None]:
        """Returns one letter, and its mark if it was replayed or dropped.

        Raises DeadLettersError: LETTER_MISSING, or as `letters`.
        """
        bounds, marks = self._look()
        found: list[Mark] = []

        def look(partition: int, mark: Mark) -> None:
            if partition == place.partition and mark.covers(place.offset):
                found.append(mark)

        self._read_marks(marks, until=None, on_mark=look)
        for letter in self.read(Selection(places=frozenset([place])), bounds):
            return letter, found[0] if found else None
        raise DeadLettersError(DeadLettersReason.LETTER_MISSING, f"none at {place} of {self.name}")

    def groups_with_undecided(self) -> list[str]:
        """Returns the groups for which half messages lie in topics of their own, undecided.

        None, unless this is a cluster's own topic. Letters that were dealt with may be among them.
        """
        cluster = _CLUSTERS_OWN.fullmatch(self.name)
        if cluster is None:
            return []
        with translated_errors():
            topics = self._admin.list_topics(timeout=self._timeout_s).topics
        prefix = undecided_topic(cluster[1], "")
        named = (
            name for name in topics if name.startswith(prefix) and not name.endswith(MARKS_SUFFIX)
        )
        return [name.removeprefix(prefix) for name in sorted(named) if self._has_letters(name)]

    def _has_letters(self, name: str) -> bool:
        with DeadLetterTopic(name, self._client, timeout_s=self._timeout_s) as topic:
            return any(first < end for first, end in topic.bounds()[0].values())

    # --- dealing with them

    def replay(
        self,
        selection: Selection,
        *,
        to: str | None = None,
        as_new: bool = False,
        limit: int | None = None,
        on_progress: Callable[[Settled], None] | None = None,
    ) -> Settled:
        """Sends the messages of selected letters that still wait again, each exactly once.

        A letter that lacks a part of its record is made whole from where the record lies; if it is
        gone from there, the letter is refused with ORIGIN_MISSING. A message goes to its own topic
        unless `to` is another; `as_new`: without the partition and timestamp that it was given.
        `limit` is the most letters to deal with; `on_progress` is called after each transaction,
        with what was done so far. After a DeadLettersError what was done by then stays done, and
        repeating the call does the rest.
        """
        if to is not None and self._is_reserved(to):
            raise DeadLettersError(
                DeadLettersReason.TOPIC_RESERVED, f"{to}: a program keeps its own records there"
            )
        return self._settle(selection, Replay(to, as_new), limit, on_progress)

    def drop(
        self,
        selection: Selection,
        *,
        limit: int | None = None,
        on_progress: Callable[[Settled], None] | None = None,
    ) -> Settled:
        """Marks the selected letters that still wait as dropped; otherwise like `replay`."""
        return self._settle(selection, DROP, limit, on_progress)

    def _settle(
        self,
        selection: Selection,
        decision: Replay | Drop,
        limit: int | None,
        on_progress: Callable[[Settled], None] | None,
    ) -> Settled:
        to_tell = LettersToTell(self.name, self._trace)
        with self.claimed(limit=limit, on_progress=on_progress) as (bounds, settling):
            try:
                for letter in self.read(selection, bounds):
                    if settling.marks.state_of(letter.place) is LetterState.WAITING:
                        why = settling.take(letter, decision)
                        if why is None:
                            to_tell.add(letter, decision, None)
                        else:
                            to_tell.refused(letter, why)
                    if settling.has_reached_limit():
                        break
                    if not settling.is_under_way:
                        to_tell.tell(settling)
                settling.end()
                to_tell.tell(settling)
            finally:  # of an error nothing is known but what was committed before
                to_tell.tell(settling, has_ended=False)
            return settling.settled

    @contextmanager
    def claimed(
        self,
        *,
        limit: int | None = None,
        on_progress: Callable[[Settled], None] | None = None,
    ) -> Iterator[tuple[OffsetRanges, Settling]]:
        """Claims the letters: whoever had claimed them before settles no more.

        Yields the topic's present first offsets and ends, and what settles letters.
        """
        self._make_marks_topic()
        writer, claim = self._claim()
        bounds, marks = self._look()
        self._read_marks(marks, until=claim)
        for begin in range(0, len(marks.obsolete), BATCH_LETTERS):
            writer.forget([(key, None) for key in marks.obsolete[begin : begin + BATCH_LETTERS]])
        origins = Origins(self._client, timeout_s=self._timeout_s)
        obstacle = lru_cache(MOST_TOPICS)(lambda topic, _: self._obstacle(topic))
        limits = lru_cache(MOST_TOPICS)(lambda topic, _: self._ingress_limits(topic))

        def record_or_obstacle(letter: Letter, decision: Replay) -> Outgoing | str:
            whole = origins.whole(letter)
            if isinstance(whole, str):
                return whole
            record = whole.again(
                self.name,
                to=decision.to,
                as_new=decision.as_new,
                is_traced=self._trace is not None,
            )
            while_known = record.topic, time.monotonic() // KNOWN_S
            why = obstacle(*while_known)
            goes_back = letter.is_of_ingress and decision.to is None
            taken = limits(*while_known) if goes_back and why is None else None
            if taken is None:
                return why or record
            if not taken.is_read:
                return f"{_INGRESS_UNREAD}: no leader reads {record.topic}"
            return record.to_one_of(taken.read)

        try:
            yield bounds, Settling(writer, marks, record_or_obstacle, limit, on_progress)
        finally:
            origins.close()

    def _claim(self) -> tuple[LetterWriter, bytes]:
        """Returns a writer and its claim.

        A claim sends no letters, so if one failed or may have failed, another follows: the client
        does not retry on its own, and a topic that was just created may not answer at once.
        """
        for attempt in range(CLAIMS):
            writer = LetterWriter(self._client, self.name, self._marks_name)
            try:
                return writer, writer.claim()
            except DeadLettersError as error:
                if attempt == CLAIMS - 1 or not error.retry_helps:
                    raise
        raise AssertionError("the last attempt returns or raises")

    # --- Kafka

    def bounds(self) -> tuple[OffsetRanges, str]:
        """Returns the topic's present first offsets and ends, and Kafka's id of it."""
        bounds, marks = self._look()
        return bounds, marks.topic_id

    def look(self) -> tuple[OffsetRanges, Marks]:
        """Returns the topic's present first offsets and ends, and what is marked now."""
        bounds, marks = self._look()
        self._read_marks(marks, until=None)
        return bounds, marks

    def _look(self) -> tuple[OffsetRanges, Marks]:
        """Returns the topic's present first offsets and ends, without marks."""
        described = self._describe(self.name)
        if described is None:
            text = f"there is no topic {self.name}: it never had a letter, or has another name"
            raise DeadLettersError(DeadLettersReason.TOPIC_MISSING, text)
        bounds = self._reader.bounds(len(described.partitions))
        firsts = {number: first for number, (first, _) in bounds.items()}
        return bounds, Marks(str(described.topic_id), firsts)

    def read(self, selection: Selection, bounds: Mapping[int, tuple[int, int]]) -> Iterator[Letter]:
        """Yields the selected letters within these offsets, in order within a partition."""
        ranges = dict(bounds)
        if selection.places:
            ranges = _around(selection.places, bounds)
        if selection.from_ms is not None:
            firsts = self._reader.offsets_at(selection.from_ms, ranges)
            ranges = {n: (max(first, firsts[n]), end) for n, (first, end) in ranges.items()}
        if selection.to_ms is not None:
            ends = self._reader.offsets_at(selection.to_ms + CLOCKS_MS, ranges)
            ranges = {n: (first, min(end, ends[n])) for n, (first, end) in ranges.items()}
        for message in self._reader.read(ranges):
            letter = letter_of(message)
            if selection.takes(letter):
                yield letter

    def _read_marks(
        self,
        marks: Marks,
        *,
        until: bytes | None,
        on_mark: Callable[[int, Mark], None] | None = None,
    ) -> None:
        """Reads all committed marks; with a claim, all up to it.

        A commit is answered before it is visible, so the claim may have to be waited for.
        """
        # After a claim the topic exists: a broker that does not know it is not believed.
        if until is None and self._describe(self._marks_name) is None:
            return
        reader = TopicReader(self._client, self._marks_name, timeout_s=self._timeout_s)
        try:
            position, deadline = 0, time.monotonic() + self._timeout_s
            while True:
                first, end = reader.bounds(1)[0]
                for message in reader.read({0: (max(first, position), end)}):
                    marks.changed_ms = message.timestamp()[1]
                    key, value = message.key(), message.value()
                    if until is not None and value == until:
                        return
                    parsed = marks.read(key, value)
                    if parsed is not None and on_mark is not None:
                        on_mark(*parsed)
                position = max(position, end)
                if until is None:
                    return
                if time.monotonic() > deadline:
                    raise DeadLettersError(
                        DeadLettersReason.OVERTAKEN, "another process has claimed the topic since"
                    )
                time.sleep(RETRY_S)
        finally:
            reader.close()
            if marks.foreign:
                _LOG.warning("%s: %d records are no marks", self._marks_name, marks.foreign)

    def _make_marks_topic(self) -> None:
        """Creates the topic of marks, which keeps them, if it is missing."""
        try:
            replicas = replicas_on(len(self._admin.list_topics(timeout=self._timeout_s).brokers))
            insync = str(least_in_sync(replicas))
            wanted = NewTopic(
                self._marks_name,
                num_partitions=1,
                replication_factor=replicas,
                config={"cleanup.policy": "compact", MIN_INSYNC: insync},
            )
            self._admin.create_topics([wanted], request_timeout=self._timeout_s)[
                self._marks_name
            ].result()
        except KafkaException as exception:
            error = exception.args[0]
            if error.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise refused(error) from exception
        if self._marks_config()["cleanup.policy"].value != "compact":
            raise DeadLettersError(
                DeadLettersReason.MARKS_NOT_COMPACTED,
                f"set cleanup.policy of {self._marks_name} to compact",
            )

    def _marks_config(self) -> Any:
        """Returns the settings of the topic of marks, once a new one has a leader."""
        resource = ConfigResource(ResourceType.TOPIC, self._marks_name)
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                asked = self._admin.describe_configs([resource], request_timeout=self._timeout_s)
                config = asked[resource].result()
                described = self._describe(self._marks_name)
                if described is not None and described.partitions[0].leader is not None:
                    return config
            except KafkaException as exception:
                error = exception.args[0]
                if error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise refused(error) from exception
            if time.monotonic() > deadline:
                raise DeadLettersError(
                    DeadLettersReason.KAFKA_UNREACHABLE, f"{self._marks_name} has no leader"
                )
            time.sleep(RETRY_S)

    def _describe(self, topic: str) -> Any | None:
        """Returns Kafka's description of a topic; None if it does not exist."""
        try:
            asked = self._admin.describe_topics(
                TopicCollection([topic]), request_timeout=self._timeout_s
            )
            return asked[topic].result()
        except KafkaException as exception:
            error = exception.args[0]
            if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return None
            raise refused(error) from exception

    def _obstacle(self, topic: str) -> str | None:
        """Returns why nothing can be sent to a topic; None if it can.

        What goes to the cluster's halves topic are its letters, with which nobody could be asked.
        """
        if not topic:
            return f"{DeadLettersReason.TOPIC_MISSING}: it names none"
        own = _CLUSTERS_OWN.fullmatch(self.name)
        is_asked = own is not None and topic == halves_topic(own[1])
        if self._is_reserved(topic) and not is_asked:
            return f"{DeadLettersReason.TOPIC_RESERVED}: {topic}"
        try:
            described = self._describe(topic)
        except DeadLettersError as error:
            if error.reason is DeadLettersReason.KAFKA_REFUSED:
                return str(error)
            raise
        return None if described is not None else f"{DeadLettersReason.TOPIC_MISSING}: {topic}"

    def _ingress_limits(self, topic: str) -> IngressLimits | None:
        """Returns what a leader has said of an ingress topic; None: it has not, or not to us."""
        own = _CLUSTERS_OWN.fullmatch(self.name)
        if own is None:
            return None
        group = {"group.id": ingress_topic(own[1]), "enable.auto.commit": False}
        looking = Consumer({"log_level": 0, **self._client, **group})
        try:
            with translated_errors():
                return limits_of(looking, topic)
        finally:
            looking.close()

    def _is_reserved(self, topic: str) -> bool:
        return is_reserved_topic(topic) or topic in {self.name, self._marks_name}


def _around(
    places: frozenset[LetterPlace], bounds: Mapping[int, tuple[int, int]]
) -> dict[int, tuple[int, int]]:
    """Returns the smallest range of each partition that contains these places."""
    ranges: dict[int, tuple[int, int]] = {}
    for partition, (first, end) in bounds.items():
        offsets = [place.offset for place in places if place.partition == partition]
        if offsets:
            ranges[partition] = max(first, min(offsets)), min(end, max(offsets) + 1)
    return ranges
