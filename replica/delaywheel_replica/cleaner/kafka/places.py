"""Where messages went: looks for their records in Kafka, only on request.

Nothing is kept of what is forwarded: delivery reports would cost time for each message, and only
one leader would have them. A record names its message: id and due (`dw-id`, `dw-due`), and the
topic, by where it lies, or by `dw-dead-topic`, `dw-half-topic`. Whoever knows id and due may have
sent them to a topic of its own, cancelled that, or had it die: that is another message. A record
names its cluster, too (`dw-wheel`): another one may deliver the same message to the same topic,
above all after a move. Its timestamp is when it was forwarded, not before its due, or the one that
its caller set: a search begins at that time.

| searched | from | for messages that |
|---|---|---|
| the topic itself | due, or the caller's timestamp, if that is earlier | may be delivered |
| the dead-letter topic | due | may be dead letters |
| the outcomes topic, first | due | are named by a cancel: if it took effect, that is there; |
|   |   | or what became of it instead, other than that it was delivered |
| the halves topic | due | are halves that a group was asked about: its letter |
| then the outcomes topic, all of it | due | the same: its answer |
| then the dead-letter topic | due | the same, if it has no letter, and no answer is known: |
|   |   | nobody could be asked |

A half message may have its end at its commit, so its due counts as the longest hold earlier.

All that one principal asks for while a search runs are its next one, if their records begin within
`TOGETHER_MS`: each topic is read once for them. When a leader was killed hundreds of cancels are
asked about at once, and a search for each found a few in a second. Principals have turns, a search
each: whoever asks for records that lie far apart, or behind many others, waits for itself. All
searches have one client, which fetches nothing between them; after `IDLE_S` without a search, or
one that failed, it is closed.

Of several answers the last counts. UNDECIDED is told only by a search that came to the end of the
outcomes: whoever was undecided may have been asked again, and have answered. A partition that
cannot be read, be it once, is not waited for, and not at its end.

A search ends with the records, with the end of all partitions, after `RECORDS_AT_MOST`, or after
`SEARCH_S`; only a record proves anything. One search runs at a time, on a thread of its own; at
most `WAITING_AT_MOST` wait, and not for longer than `ANSWER_S`.
"""

from __future__ import annotations

import json
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from delaywheel.ingress import TOPIC, HalfAnswer
from delaywheel.record_headers import DELIVERED_BY, HALF_TOPIC, headers_of, last_of
from delaywheel_replica.cleaner.kafka.client_log import LOGGER, error_of
from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings
from delaywheel_replica.link import AskPlace, LinkPlace, PlaceFound
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.process.round_robin import RoundRobin

SEARCH_S = 2.0
ANSWER_S = 4.0
RECORDS_AT_MOST = 50_000
PARTITIONS_AT_MOST = 1_000
WAITING_AT_MOST = 256
TOGETHER_MS = 60_000
IDLE_S = 30.0

DEAD_TOPIC = "dw-dead-topic"
_SLACK_MS = 5_000
"""The clock of a broker that stamps records itself may be behind by this much."""
_BATCH = 50
"""A record may have 100,000 headers, of 70 bytes each in the library."""
_BATCH_S = 0.1
_CLIENT = {
    "queued.max.messages.kbytes": (4 << 20) >> 10,
    # The end of a partition is told only after such a wait, and the next question waits behind it.
    "fetch.wait.max.ms": 10,
}

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
        """Begins without requests; `send` drops a message, False, while the link is full."""
        self._settings = settings
        self._send = send
        self._on_found = on_found
        self._asked: queue.Queue[_Asked] = queue.Queue(WAITING_AT_MOST)
        self._found: deque[PlaceFound] = deque(maxlen=2 * WAITING_AT_MOST)
        self._consumer: Consumer | None = None

    def ask(self, asked: AskPlace) -> None:
        """Queues a search for a record; when too many wait, none is found, at once."""
        try:
            self._asked.put_nowait(_Asked(time.monotonic() + ANSWER_S, asked))
        except queue.Full:
            self._found.append(PlaceFound(asked.question))

    def report(self) -> None:
        """Reports what was found to the server; what finds no room in the link, next time."""
        while self._found and self._send(self._found[0]):
            self._found.popleft()

    def run(self) -> None:
        """Searches for as long as the process lives."""
        waiting = RoundRobin[_Asked]()
        while True:
            for each in self._take_asked(wait=not waiting):
                waiting.add(each.asked.sharer, each)
            together = _next_together(waiting)
            now_s = time.monotonic()
            search = _Search(
                self._settings, [each.asked for each in together if each.until_s > now_s]
            )
            try:
                self._search(search)
            except KafkaException as exception:
                self._close()
                log.info("places not found", cause=error_of(exception).str())
            except Exception:  # a malformed record must not end a leader
                self._close()
                log.exception("places not found")
            questions = (each.asked.question for each in together)
            self._found.extend(search.found.get(each, PlaceFound(each)) for each in questions)
            self._on_found()

    def _take_asked(self, *, wait: bool) -> list[_Asked]:
        asked: list[_Asked] = []
        if wait and self._consumer is not None:
            try:
                asked.append(self._asked.get(timeout=IDLE_S))
            except queue.Empty:
                self._close()
        if wait and not asked:
            asked.append(self._asked.get())
        try:
            while len(asked) < WAITING_AT_MOST:
                asked.append(self._asked.get_nowait())
        except queue.Empty:
            pass
        return asked

    def _search(self, search: _Search) -> None:
        """Searches with the one client; raises KafkaException if Kafka does not answer."""
        if not search.is_wanted:
            return
        if self._consumer is None:
            self._consumer = Consumer(self._settings.consumer("places") | _CLIENT, logger=LOGGER)
        search.run(self._consumer)
        self._consumer.unassign()

    def _close(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()


def _next_together(waiting: RoundRobin[_Asked]) -> list[_Asked]:
    """Takes out what one search looks for: of one sharer, and of one time."""
    first = waiting.take()
    others = waiting.of(first.asked.sharer)
    near = [each for each in others if abs(each.since_ms - first.since_ms) <= TOGETHER_MS]
    for each in near:
        waiting.discard(first.asked.sharer, each)
    return [first, *near]


class _Asked(NamedTuple):
    """A question, and until when somebody waits for the answer."""

    until_s: float
    asked: AskPlace

    @property
    def since_ms(self) -> int:
        """When its record was written at the earliest."""
        return _since_ms(self.asked)


_Named = tuple[bytes, bytes, str]
"""A message, by its id in hex digits and its due, as headers have them, and its topic."""


class _Search:
    """One search for the records of some messages."""

    def __init__(self, settings: KafkaSettings, asked: Iterable[AskPlace]) -> None:
        self.found: dict[int, PlaceFound] = {}
        self._settings = settings
        self._open = {each.question: each for each in asked}
        self._deadline = time.monotonic() + SEARCH_S
        self._records_left = RECORDS_AT_MOST

    @property
    def is_wanted(self) -> bool:
        return bool(self._open)

    def run(self, consumer: Consumer) -> None:
        """Looks in each topic; raises KafkaException if Kafka does not answer or allow it."""
        names = self._settings.names
        named = [each for each in self._open.values() if each.is_named_by_cancel]
        self._look(consumer, names.outcomes, named, _done_ms, _ended)
        # The letter first: all outcomes since then may be more than a search may read.
        asked = [each for each in self._open.values() if each.is_asked_half]
        delivered = partial(_delivered, names)
        self._look(consumer, names.halves, asked, _done_ms, delivered)
        self._look(consumer, names.outcomes, asked, _done_ms, _answered)
        alive: dict[str, list[AskPlace]] = {}
        for each in self._open.values():
            if each.is_dead is not True and not each.is_asked_half:
                alive.setdefault(each.topic, []).append(each)
        for topic, messages in alive.items():
            self._look(consumer, topic, messages, _since_ms, delivered)
        answered = {question for question, found in self.found.items() if found.answer}
        dead = [
            each
            for each in self._open.values()
            if each.is_dead is not False and each.question not in answered
        ]
        self._look(consumer, names.dead, dead, _done_ms, delivered)

    @property
    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def _look(
        self,
        consumer: Consumer,
        topic: str,
        asked: Sequence[AskPlace],
        since_ms: Callable[[AskPlace], int],
        named_by: Callable[[Message], _Named | None],
    ) -> None:
        if not asked:
            return
        wanted: dict[_Named, list[int]] = {}
        for each in asked:
            name = each.id.hex().encode(), b"%d" % each.due_ms, each.topic
            wanted.setdefault(name, []).append(each.question)
        from_ms = max(0, min(map(since_ms, asked)) - _SLACK_MS)
        known = consumer.list_topics(topic, timeout=max(self._left_s, 0.01)).topics[topic]
        if known.error is not None or not known.partitions:
            return
        partitions = sorted(known.partitions)
        since = [TopicPartition(topic, n, from_ms) for n in partitions[:PARTITIONS_AT_MOST]]
        is_to_the_end = False
        try:
            begins = consumer.offsets_for_times(since, timeout=max(self._left_s, 0.01))
            is_read = self._read(consumer, begins, wanted, named_by)
            is_to_the_end = is_read and len(since) == len(partitions)
        finally:
            if named_by is _answered and not is_to_the_end:
                self._forget_undecided()

    def _read(
        self,
        consumer: Consumer,
        begins: Sequence[TopicPartition],
        wanted: dict[_Named, list[int]],
        named_by: Callable[[Message], _Named | None],
    ) -> bool:
        """Reads until all that is wanted is found; returns whether it came to the end of all."""
        readable = [begin for begin in begins if begin.error is None and begin.offset >= 0]
        unread = {begin.partition for begin in readable}
        has_failed = any(begin.error is not None for begin in begins)
        consumer.assign(readable)
        while wanted and unread and self._records_left > 0 and self._left_s > 0:
            for message in consumer.consume(_BATCH, min(_BATCH_S, max(self._left_s, 0))):
                error = message.error()
                if error is not None:
                    unread.discard(message.partition())
                    has_failed |= error.code() != KafkaError._PARTITION_EOF
                    continue
                self._records_left -= 1
                named = named_by(message)
                if named is not None and named in wanted:
                    self._note(message, wanted, named, is_answer=named_by is _answered)
        return not unread and not has_failed

    def _note(
        self, found: Message, wanted: dict[_Named, list[int]], named: _Named, *, is_answer: bool
    ) -> None:
        """Notes a record that was looked for; of answers others may follow."""
        for question in wanted[named] if is_answer else wanted.pop(named):
            if is_answer:
                known = self.found.get(question, PlaceFound(question))
                answer = str(_outcome(found).get("answer"))
                self.found[question] = replace(known, answer=answer)
            else:
                self._take(question, found)

    def _forget_undecided(self) -> None:
        """Forgets answers that may not be the last ones: who was undecided may be asked again."""
        for question, found in self.found.items():
            if found.answer == HalfAnswer.UNDECIDED:
                self.found[question] = replace(found, answer=None)

    def _take(self, question: int, found: Message) -> None:
        topic, partition, offset = found.topic(), found.partition(), found.offset()
        assert topic is not None
        assert partition is not None
        assert offset is not None
        names = self._settings.names
        reason = _header(found, "dw-dead-reason") if topic == names.dead else None
        del self._open[question]
        self.found[question] = PlaceFound(
            question,
            LinkPlace(topic, partition, offset),
            None if reason is None else reason.decode(errors="replace"),
            outcome=str(_outcome(found).get("outcome")) if topic == names.outcomes else None,
        )


def _since_ms(asked: AskPlace) -> int:
    """When the record of a message was written at the earliest, by its own timestamp."""
    done_ms = _done_ms(asked)
    return done_ms if asked.timestamp_ms is None else min(asked.timestamp_ms, done_ms)


def _done_ms(asked: AskPlace) -> int:
    """When a message was done at the earliest."""
    return asked.due_ms - asked.early_ms


def _ended(message: Message) -> _Named | None:
    """The message that an outcome says was withdrawn or deferred, or the half that has an end."""
    return _named_by_outcome(message, "cancelled", "deferred", "asked", "committed")


def _answered(message: Message) -> _Named | None:
    """The half about which an outcome says what its group has answered."""
    return _named_by_outcome(message, "answered")


def _named_by_outcome(message: Message, *kinds: str) -> _Named | None:
    key, outcome = message.key(), _outcome(message)
    if not isinstance(key, bytes) or outcome.get("outcome") not in kinds:
        return None
    return key.hex().encode(), str(outcome.get("due_ms")).encode(), str(outcome.get("topic"))


def _outcome(message: Message) -> dict[str, Any]:
    """Reads an outcome; others may write to that topic."""
    try:
        outcome = json.loads(message.value() or b"{}")
    except ValueError:
        return {}
    return outcome if isinstance(outcome, dict) else {}


def _delivered(names: KafkaNames, message: Message) -> _Named | None:
    """The message of which this is the record, unless another cluster has written it."""
    id_, due_ms = _header(message, "dw-id"), _header(message, "dw-due")
    cluster, separator, _ = (_header(message, DELIVERED_BY) or b"").partition(b"/")
    if separator and cluster != names.cluster_id.encode():  # none: of a release that named none
        return None
    topic = message.topic()
    if topic in {names.dead, names.halves}:
        # Of a record that could not be delayed all headers but ours (`dw-dead-…`) are a stranger's.
        is_ours = topic == names.halves or _header(message, DEAD_TOPIC) is not None
        said = (_header(message, name) for name in (HALF_TOPIC, TOPIC, DEAD_TOPIC) if is_ours)
        topic = next((name.decode(errors="replace") for name in said if name), None)
    return None if id_ is None or due_ms is None or topic is None else (id_, due_ms, topic)


def _header(message: Message, name: str) -> bytes | None:
    return last_of(headers_of(message) or [], name)
