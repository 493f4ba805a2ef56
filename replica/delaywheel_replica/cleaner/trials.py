"""Trial transactions: which messages does Kafka refuse?

A trial writes messages in a transaction that is always aborted, with transactional ids of its
own, so that nothing the leader does depends on how it ends. Trials run on a thread of their own:
one that waits for a topic that does not answer must not hold up the leader's idle commits.

Each trial writes a *guard* to the outcomes topic first. A transaction to which no partition could
be added cannot be aborted (the coordinator does not know of it), and a guard that does not come
through says that Kafka is away, not a topic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from time import monotonic, time_ns

import numpy as np
import structlog

from delaywheel_replica.cleaner.outcomes import FORWARD_ROOM_BYTES, forwarded
from delaywheel_replica.cleaner.ports import Record, RefusedRecord
from delaywheel_replica.cleaner.producers import TransactionalProducer
from delaywheel_replica.cleaner.rows import DueMessage, DueRows
from delaywheel_replica.cleaner.settings import KafkaSettings
from delaywheel_replica.core.reports import Verdict

INIT_MS = 5_000
TRIAL_MS = 1_500
"""How long a topic may take to answer before it counts as not answering."""

SEARCH_S = 5.0
"""A search ends after so long; a topic of which it found no end counts as unavailable."""

TRIAL_IDS = 8

log = structlog.get_logger(__name__)

_TOO_LARGE = "MSG_SIZE_TOO_LARGE"
# What Kafka says of a topic as a whole; halves would say the same.
_OF_THE_TOPIC = (
    "TOPIC_AUTHORIZATION_FAILED",
    "UNKNOWN_TOPIC_OR_PART",
    "UNKNOWN_TOPIC_ID",
    "_UNKNOWN_TOPIC",
)

Place = tuple[str, int, int]
"""Wheel, seq and row: the name of one message."""


class Answer(Enum):
    """What a trial showed."""

    PASSED = "passed"
    REFUSED = "refused"
    SILENT = "silent"
    """The brokers did not answer for these messages, though they did for the guard."""
    AWAY = "away"
    """Kafka did not answer at all."""


@dataclass(frozen=True, slots=True)
class Trial:
    """How a trial ended.

    Attributes:
        answer: For the messages that the client took.
        cause: Kafka's words, if it is not PASSED.
        refused: Messages that the client did not take.
    """

    answer: Answer
    cause: str = ""
    refused: Sequence[RefusedRecord] = ()


@dataclass(slots=True)
class Findings:
    """What a search found.

    Attributes:
        complete: Kafka answered all along; otherwise the rest is what was found until then.
        refused: Messages that Kafka refuses, and its words.
        unavailable: Topics that take nothing, and why.
        batch_bytes: Topics that refuse large batches of messages which they take one by one, and
            a size that passed.
        tried: The topics that were tried.
    """

    complete: bool = True
    refused: dict[Place, str] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    batch_bytes: dict[str, int] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        """Whether anything was found."""
        return bool(self.refused or self.unavailable or self.batch_bytes)


class Trials:
    """Searches for what Kafka refuses, one at a time, in the background."""

    def __init__(
        self, settings: KafkaSettings, *, on_found: Callable[[], None] = lambda: None
    ) -> None:
        """Starts nothing yet.

        Args:
            settings: How to reach Kafka.
            on_found: Called on the thread of this class when a search has ended.
        """
        self._on_found = on_found
        self._guard = Record(settings.names.outcomes, None, b"trial", [])
        self._producers = _TrialProducers(settings)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trials")

    def search(self, rows: DueRows) -> Future[Findings]:
        """Finds which of these messages, or of their topics, make a transaction fail."""
        future = self._thread.submit(self._search, rows)
        future.add_done_callback(lambda _: self._on_found())
        return future

    def close(self) -> None:
        """Ends the thread; a search under way is waited for, within its bounds."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._producers.close()

    def _search(self, rows: DueRows) -> Findings:
        findings = Findings()
        deadline = monotonic() + SEARCH_S
        for number in np.unique(rows.topic_numbers).tolist():
            if monotonic() > deadline or not findings.complete:
                break
            topic = rows.topics[number]
            findings.tried.add(topic)
            search = _TopicSearch(self._try, findings, topic, deadline)
            search.run(rows.take(rows.topic_numbers == number))
        self._producers.clear()
        return findings

    def _try(self, topic: str, rows: DueRows) -> Trial:
        """One trial with messages of one topic."""
        began = monotonic()
        producer = self._producers.take()
        trial = Trial(Answer.AWAY) if producer is None else self._try_with(producer, topic, rows)
        log.debug(
            "trial",
            topic=topic,
            messages=len(rows),
            answer=trial.answer.value,
            cause=trial.cause,
            seconds=round(monotonic() - began, 3),
        )
        return trial

    def _try_with(self, producer: TransactionalProducer, topic: str, rows: DueRows) -> Trial:
        producer.begin()
        producer.write([self._guard])
        if not producer.flush(TRIAL_MS) or not producer.warm([topic], TRIAL_MS):
            self._producers.drop(stuck=True)
            return Trial(Answer.AWAY)
        refused = producer.write(forwarded(rows, time_ns() // 1_000_000))
        answered = producer.flush(TRIAL_MS)
        producer.write([self._guard])  # the client takes no more once the transaction failed
        cause = producer.cause()
        if not answered and not producer.abortable:
            self._producers.drop(stuck=True)
            return Trial(Answer.SILENT, cause or "", refused)
        aborted = producer.abort().verdict is Verdict.ABORTED
        if cause is None and aborted:
            return Trial(Answer.PASSED, refused=refused)
        self._producers.drop()
        return Trial(Answer.REFUSED, cause or "", refused)


class _TrialProducers:
    """Producers of trials, each good until a trial fails.

    The library skips the numbers of a refused batch and mends that, when it notices, with an init
    that takes half a second. Another id has nothing to be mended, so ids take turns, and the next
    producer is made ready while the one before is tried.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._producer: TransactionalProducer | None = None
        self._next: Future[TransactionalProducer | None] | None = None
        self._number = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trial init")

    def take(self) -> TransactionalProducer | None:
        """A producer that is ready; None: Kafka does not answer."""
        if self._producer is None:
            coming = self._next or self._thread.submit(self._make)
            self._next = None
            self._producer = coming.result()
        return self._producer

    def drop(self, *, stuck: bool = False) -> None:
        """The producer's trial failed: there will be others.

        Args:
            stuck: Its transaction could not be aborted; the next producer of its id does that.
        """
        self._producer = None
        if not stuck:
            self._number = (self._number + 1) % TRIAL_IDS
        self._next = self._thread.submit(self._make)

    def clear(self) -> None:
        """The search is over."""
        self._producer, self._next = None, None

    def close(self) -> None:
        """Ends the thread."""
        self.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _make(self) -> TransactionalProducer | None:
        name = self._settings.names.trial_id(self._number)
        # Quiet: that transactions fail is what it is for.
        producer = TransactionalProducer(self._settings, name, log_level=2)
        return producer if producer.init(INIT_MS).verdict is Verdict.CONTINUE else None


@dataclass(frozen=True, slots=True)
class _TopicSearch:
    """Looks among messages of one topic, by halves."""

    attempt: Callable[[str, DueRows], Trial]
    findings: Findings
    topic: str
    deadline: float

    def run(self, rows: DueRows) -> None:
        """Adds to the findings what makes these messages fail."""
        trial = self.attempt(self.topic, rows)
        if trial.refused:
            numbers = np.array([refused.number for refused in trial.refused])
            for refused, message in zip(trial.refused, rows.take(numbers), strict=True):
                self.findings.refused[place_of(message)] = refused.reason
            rows = rows.take(np.delete(np.arange(len(rows)), numbers))
        match trial.answer:
            case Answer.AWAY:
                self.findings.complete = False
            case Answer.SILENT:
                self.findings.unavailable[self.topic] = trial.cause
            case Answer.REFUSED:
                self._narrow(rows, trial.cause)

    def _narrow(self, rows: DueRows, cause: str) -> None:
        """These messages together were refused."""
        if cause.partition(":")[0] in _OF_THE_TOPIC or monotonic() > self.deadline:
            self.findings.unavailable[self.topic] = cause
            return
        if len(rows) == 1:
            (message,) = rows
            self.findings.refused[place_of(message)] = cause
            return
        before = len(self.findings.refused)
        halves = rows.take(slice(None, len(rows) // 2)), rows.take(slice(len(rows) // 2, None))
        for half in halves:
            if self.findings.complete and self.topic not in self.findings.unavailable:
                self.run(half)
        each_passed = self.findings.complete and len(self.findings.refused) == before
        if each_passed and cause.startswith(_TOO_LARGE):
            size = max(sent_bytes(half) for half in halves)
            known = self.findings.batch_bytes.get(self.topic, size)
            self.findings.batch_bytes[self.topic] = min(known, size)


def place_of(message: DueMessage) -> Place:
    """The name of one message."""
    return str(message.wheel), message.seq, message.row


def sent_bytes(rows: DueRows) -> int:
    """What these messages take in Kafka, at most."""
    return rows.length_bytes + len(rows) * FORWARD_ROOM_BYTES
