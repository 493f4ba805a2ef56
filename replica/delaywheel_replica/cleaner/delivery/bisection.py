"""Trial transactions: finds out which messages Kafka refuses.

A trial writes messages in a transaction that is always aborted, with transactional ids of its own,
so that nothing the leader does depends on how it ends. Trials run on a separate thread: one that
waits for an unresponsive topic must not delay the leader's idle commits.

Topics are tried side by side, in `LANES` lanes with two ids each: if several accept nothing, each
costs its lane `TRIAL_MS` twice, and delays no other lane. A topic is tried twice before it counts
as silent, since one lost answer looks the same. A lane that has many topics tries `TOGETHER` of
them in one trial first, and one by one only if that does not pass.

Each trial writes a *guard* to the outcomes topic first. A transaction to which no partition could
be added cannot be aborted (the coordinator does not know of it). A guard that is not taken says
nothing about messages: the search ends without blaming any topic. It has a key, in case the
outcomes topic is compacted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Protocol

import numpy as np

from delaywheel_replica.cleaner.delivery.outcomes import forwarded
from delaywheel_replica.cleaner.delivery.troubles import spread
from delaywheel_replica.cleaner.due.rows import DueMessage, DueRows, join_rows
from delaywheel_replica.cleaner.outside.clocks import Clock
from delaywheel_replica.cleaner.outside.ports import KafkaCallEnd, Record, RefusedRecord
from delaywheel_replica.cleaner.outside.runner import Runner
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState, is_fenced
from delaywheel_replica.kafka_settings import FORWARD_ROOM_BYTES, KafkaNames
from delaywheel_replica.process.logs import get_logger

INIT_MS = 5_000
STUCK_MS = 1_500
"""The same for an id whose transaction was stuck: Kafka may keep it until a broker is back."""

LANES = 4
TRIAL_MS = 1_000
"""How long a topic may take to answer before it counts as not answering."""

GUARDS = 5
"""It may take so many times as long as the guard just before it, which is one record for one
partition: brokers that are slow, as after one of them has died, are so for all topics."""

BYTES_A_MS = 4_000
"""It may take longer for so many bytes."""

SEARCH_S = 5.0
"""After this long a search begins with no other topic; a topic whose search takes longer counts as
unavailable."""

TRIAL_IDS = 8

TOGETHER = 32
"""How many topics are tried together, where a lane has more than `FEW` of them: most are well, and
so many cost little more than one. The price is a trial more for a topic that is not."""

FEW = 8

log = get_logger(__name__)

_TOO_LARGE = "MSG_SIZE_TOO_LARGE"
# What Kafka says of a topic as a whole; halves would say the same.
_OF_THE_TOPIC = (
    "TOPIC_AUTHORIZATION_FAILED",
    "UNKNOWN_TOPIC_OR_PART",
    "UNKNOWN_TOPIC_ID",
    "_UNKNOWN_TOPIC",
)

MessageName = tuple[str, int, int]
"""Wheel, seq and row: the name of one message."""


class TrialResult(Enum):
    """What a trial showed."""

    PASSED = "passed"
    REFUSED = "refused"
    SILENT = "silent"
    """The brokers did not answer for these messages, though they did for the guard."""
    UNGUARDED = "unguarded"
    """Nothing was tried: the brokers did not take the guard, or did not answer at all."""


@dataclass(frozen=True, slots=True)
class Trial:
    """How a trial ended, for the messages that the client accepted.

    Attributes:
        cause: Kafka's error, if it is not PASSED.
        refused: Messages that the client did not accept.
    """

    answer: TrialResult
    cause: str = ""
    refused: Sequence[RefusedRecord] = ()


@dataclass(slots=True)
class Findings:
    """The result of a search.

    Attributes:
        complete: Every trial was guarded; otherwise the rest is what was found until then.
        obstacle: Why a trial was not guarded, in Kafka's words; empty: it did not answer.
        refused: Messages that Kafka refuses, and its errors.
        unavailable: Topics that accept nothing, and why.
        batch_bytes: Topics that refuse large batches of what they accept one by one, and a size
            that passed.
    """

    complete: bool = True
    obstacle: str = ""
    refused: dict[MessageName, str] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    batch_bytes: dict[str, int] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.refused or self.unavailable or self.batch_bytes)

    def add(self, other: Findings) -> None:
        """Adds the findings about other topics."""
        self.complete &= other.complete
        self.obstacle = self.obstacle or other.obstacle
        self.refused |= other.refused
        self.unavailable |= other.unavailable
        self.batch_bytes |= other.batch_bytes
        self.tried |= other.tried


class TrialProducer(Protocol):
    """One transactional id used for trials; its calls block for a bounded time."""

    @property
    def abortable(self) -> bool:
        """Whether the client itself refuses to commit the running transaction."""

    def init(self, timeout_ms: int) -> KafkaCallEnd:
        """Fences older producers of this id and ends their transactions."""

    def begin(self) -> None:
        """Opens a transaction."""

    def write(self, records: Iterable[Record]) -> list[RefusedRecord]:
        """Hands records over; returns those that the client refuses."""

    def flush(self, timeout_ms: int) -> bool:
        """Waits for the brokers to answer every record; returns whether all answers came."""

    def cause(self) -> str | None:
        """Why the transaction failed, in Kafka's words."""

    def abort(self) -> KafkaCallEnd:
        """Drops everything written."""

    def warm(self, topics: Iterable[str], timeout_ms: int) -> bool:
        """Has the client look up topics, so that it knows their current partitions."""

    def close(self) -> None:
        """Drops what has no answer: nothing else follows."""


MakeProducer = Callable[[int], TrialProducer]
"""A new producer of the trials' id with this number."""


class Bisection:
    """Searches for messages that Kafka refuses, one search at a time, in the background."""

    def __init__(
        self,
        make_producer: MakeProducer,
        names: KafkaNames,
        *,
        runner: Runner,
        clock: Clock,
        on_found: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts nothing yet; the topic of the outcomes receives the guards."""
        self._runner = runner
        self._clock = clock
        self._on_found = on_found
        self._lanes = [
            _Lane(make_producer, names, clock, range(number, TRIAL_IDS, LANES))
            for number in range(LANES)
        ]

    def search(
        self, rows: DueRows, everywhere: Mapping[str, int] = MappingProxyType({})
    ) -> Future[Findings]:
        """Finds which of these messages, or of their topics, make a transaction fail.

        Of topics in `everywhere` all partitions are tried, not those of these messages alone.
        """
        future: Future[Findings] = Future()

        def job() -> None:
            try:
                future.set_result(self._search(rows, everywhere))
            except BaseException as error:
                future.set_exception(error)
                raise
            finally:
                self._on_found()
            self._runner.together([lane.release for lane in self._lanes if lane.stuck])

        self._runner.start(job)
        return future

    def close(self) -> None:
        """Starts no further searches; one under way ends within its bounds."""
        self._runner.close()

    def _search(self, rows: DueRows, everywhere: Mapping[str, int]) -> Findings:
        names = sorted(rows.topic_names())
        deadline = self._clock.monotonic() + SEARCH_S
        free = sorted(self._lanes, key=lambda lane: lane.stuck)
        shares = [(lane, names[n::LANES]) for n, lane in enumerate(free) if names[n::LANES]]
        calls = [partial(lane.search, rows, share, everywhere, deadline) for lane, share in shares]
        findings = Findings()
        for found in self._runner.together(calls):
            findings.add(found)
        return findings


class _Lane:
    """Tests one topic after another.

    A producer is usable until a trial with it fails. The library skips the numbers of a refused
    batch and repairs that, when it notices, with an init that takes half a second. A transaction
    that is not answered is *stuck* until the next init of its id, which takes as long. Another id
    needs neither, so two ids take turns.

    While a partition that it has written to takes nothing, Kafka keeps a stuck id, and no init of
    it succeeds. So lanes with fewer of them come first, and none waits long for one: nothing is
    forwarded while a search waits.
    """

    def __init__(
        self, make: MakeProducer, names: KafkaNames, clock: Clock, numbers: Sequence[int]
    ) -> None:
        self._make = make
        self._names = names
        self._guard = Record(names.outcomes, b"trial", b"", [])
        self._clock = clock
        self._numbers = numbers
        self._id_in_use = 0
        self._producer: TrialProducer | None = None
        self._stuck: set[int] = set()

    @property
    def stuck(self) -> int:
        """For how many of its transactions readers wait."""
        return len(self._stuck)

    def release(self) -> None:
        """Ends its transactions that are stuck: readers of everything they wrote to wait."""
        for number in sorted(self._stuck):
            self._init(number)

    def search(
        self, rows: DueRows, names: Sequence[str], everywhere: Mapping[str, int], deadline: float
    ) -> Findings:
        findings = Findings()
        size = TOGETHER if len(names) > FEW else 1
        for group in (names[at : at + size] for at in range(0, len(names), size)):
            if self._clock.monotonic() > deadline or not findings.complete:
                break
            if len(group) > 1 and self._pass_together(rows, group, everywhere):
                findings.tried.update(group)
            else:
                self._search_each(rows, group, everywhere, deadline, findings)
        self._close()
        return findings

    def _pass_together(
        self, rows: DueRows, names: Sequence[str], everywhere: Mapping[str, int]
    ) -> bool:
        """Whether nothing is wrong with these topics and their messages."""
        spreads = [
            spread(rows.of_topics([name]), everywhere[name])
            for name in names
            if everywhere.get(name, 1) > 1
        ]
        samples = join_rows(spreads, rows.wheels) if spreads else None
        trial = self._try(names, rows.of_topics(names), samples)
        return trial.answer is TrialResult.PASSED and not trial.refused

    def _search_each(
        self,
        rows: DueRows,
        names: Sequence[str],
        everywhere: Mapping[str, int],
        deadline: float,
        findings: Findings,
    ) -> None:
        """Adds what each of these topics refuses to the findings."""
        for name in names:
            now = self._clock.monotonic()
            if now > deadline or not findings.complete:
                break
            findings.tried.add(name)
            mine = rows.of_topics([name])
            samples = spread(mine, everywhere[name]) if name in everywhere else None
            _TopicSearch(self._try, findings, name, self._clock, now + SEARCH_S).run(mine, samples)

    def _try(self, topics: Sequence[str], rows: DueRows, samples: DueRows | None) -> Trial:
        """Runs one trial with messages of some topics, and perhaps samples beside them."""
        began = self._clock.monotonic()
        if self._producer is None:
            self._producer = self._ready()
        producer = self._producer
        trial = Trial(TrialResult.UNGUARDED)
        if producer is not None:
            trial = self._try_with(producer, topics, rows, samples)
        log.debug(
            "trial",
            topic=topics[0],
            topics=len(topics),
            messages=len(rows),
            answer=trial.answer.value,
            cause=trial.cause,
            seconds=round(self._clock.monotonic() - began, 3),
        )
        return trial

    def _try_with(
        self,
        producer: TrialProducer,
        topics: Sequence[str],
        rows: DueRows,
        samples: DueRows | None,
    ) -> Trial:
        producer.begin()
        producer.write([self._guard])
        began = self._clock.monotonic()
        answered = producer.flush(TRIAL_MS)
        guard_ms = round((self._clock.monotonic() - began) * 1000)
        producer.write([self._guard])  # shows whether the first one was refused
        cause = producer.cause()
        if not answered or cause is not None or not producer.warm(topics, TRIAL_MS):
            is_aborted = answered and producer.abort().verdict is TransactionState.ABORTED
            self._drop(stuck=not is_aborted)
            return Trial(TrialResult.UNGUARDED, cause or "")
        refused = producer.write(forwarded(self._names, rows, self._clock.wall_ms()))
        if samples is not None:
            producer.write(forwarded(self._names, samples, self._clock.wall_ms()))
        usual_ms = max(TRIAL_MS, GUARDS * guard_ms)
        answered = producer.flush(usual_ms + sent_bytes(rows) // BYTES_A_MS)
        producer.write([self._guard])  # the client accepts nothing once the transaction failed
        cause = producer.cause()
        if not answered and not producer.abortable:
            self._drop(stuck=True)
            return Trial(TrialResult.SILENT, cause or "", refused)
        aborted = producer.abort().verdict is TransactionState.ABORTED
        if cause is not None and not is_fenced(cause):
            self._drop(stuck=False)
            return Trial(TrialResult.REFUSED, cause, refused)
        if cause is None and aborted:
            return Trial(TrialResult.PASSED, refused=refused)
        # Another leader's trials have begun, or Kafka is away: this says nothing about the topic.
        self._drop(stuck=True)
        return Trial(TrialResult.UNGUARDED)

    def _drop(self, *, stuck: bool) -> None:
        """Discards a producer whose trial failed; stuck: its transaction could not be aborted."""
        self._close()
        if stuck:
            self._stuck.add(self._numbers[self._id_in_use])
        self._take_turns()

    def _take_turns(self) -> None:
        self._id_in_use = (self._id_in_use + 1) % len(self._numbers)

    def _close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def _ready(self) -> TrialProducer | None:
        """Makes one of its ids ready; None: Kafka does not answer, or keeps them."""
        for _ in self._numbers:
            number = self._numbers[self._id_in_use]
            was_stuck = number in self._stuck
            producer = self._init(number)
            if producer is not None or not was_stuck:
                return producer
            self._take_turns()
        return None

    def _init(self, number: int) -> TrialProducer | None:
        """Makes an id ready, and ends what it left behind; None: Kafka does not answer."""
        producer = self._make(number)
        ended = producer.init(STUCK_MS if number in self._stuck else INIT_MS)
        if ended.verdict is not TransactionState.CONTINUE:
            return None
        self._stuck.discard(number)
        return producer


@dataclass(frozen=True, slots=True)
class _TopicSearch:
    """Searches among the messages of one topic by halving."""

    attempt: Callable[[Sequence[str], DueRows, DueRows | None], Trial]
    findings: Findings
    topic: str
    clock: Clock
    deadline: float

    def run(self, rows: DueRows, samples: DueRows | None = None) -> None:
        """Adds the causes of these messages' failure to the findings.

        Samples are tried with them at first: what refuses them refuses one of the messages, too.
        """
        trial = self.attempt([self.topic], rows, samples)
        if trial.answer is TrialResult.SILENT:
            trial = self.attempt([self.topic], rows, samples)
        if trial.refused:
            numbers = np.array([refused.number for refused in trial.refused])
            for refused, message in zip(trial.refused, rows.take(numbers), strict=True):
                self.findings.refused[name_of(message)] = refused.reason
            rows = rows.take(np.delete(np.arange(len(rows)), numbers))
        match trial.answer:
            case TrialResult.UNGUARDED:
                self.findings.complete = False
                self.findings.obstacle = trial.cause
            case TrialResult.SILENT:
                self.findings.unavailable[self.topic] = trial.cause
            case TrialResult.REFUSED:
                self._narrow(rows, trial.cause)

    def _narrow(self, rows: DueRows, cause: str) -> None:
        """Halves messages that were refused together."""
        if cause.partition(":")[0] in _OF_THE_TOPIC or self.clock.monotonic() > self.deadline:
            self.findings.unavailable[self.topic] = cause
            return
        if len(rows) == 1:
            (message,) = rows
            self.findings.refused[name_of(message)] = cause
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


def name_of(message: DueMessage) -> MessageName:
    """Returns the name of one message."""
    return str(message.wheel), message.seq, message.row


def sent_bytes(rows: DueRows) -> int:
    """Returns how many bytes these messages take in Kafka, at most."""
    return rows.length_bytes + len(rows) * FORWARD_ROOM_BYTES
