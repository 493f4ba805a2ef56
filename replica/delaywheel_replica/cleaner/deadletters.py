"""Which of the messages that are due can go to their topics, and what becomes of the others.

Looked at before anything is produced:

| seen | then |
|---|---|
| topic not asked for yet | wait for Kafka's answer, `PATIENCE_S` at most; then try |
| topic missing, or its name illegal | dead letter |
| topic without a leader, or denied to us; one that a search found to take nothing | wait |
|   | `PATIENCE_S` once, then dead letters until it takes messages again |
| a message that its topic would refuse (suitability.py) | dead letter |
| found guilty by a search | dead letter |

When a transaction fails all the same, trial transactions (trials.py) look for the reason; nothing
is forwarded meanwhile, but the leader goes on with idle commits. So one bad topic holds up the
others once, and a bad message only for as long as it takes to find it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from delaywheel_replica.cleaner.outcomes import DeadReason
from delaywheel_replica.cleaner.rows import DueMessage, DueRows
from delaywheel_replica.cleaner.suitability import Unsuited, find_unsuited
from delaywheel_replica.cleaner.topics import Topic, TopicState
from delaywheel_replica.cleaner.trials import Findings, Place, place_of

PATIENCE_S = 5.0
FIRST_PROBE_S = 1.0
LAST_PROBE_S = 30.0
SEARCH_PAUSE_S = 1.0
"""Between searches that could not be done."""

_TAKES_NOTHING = (TopicState.LEADERLESS, TopicState.DENIED)
_UNLIMITED = 1 << 62


class TopicsPort(Protocol):
    """What Kafka is known to say about topics."""

    def find(self, names: Iterable[str]) -> Mapping[str, Topic]:
        """The topics that are known now; the others are asked for."""

    def ask(self, names: Iterable[str]) -> None:
        """Asks Kafka anew, at once."""


class TrialsPort(Protocol):
    """Searches in the background."""

    def search(self, rows: DueRows) -> Future[Findings]:
        """Finds which of these messages, or of their topics, make a transaction fail."""


@dataclass(frozen=True, slots=True)
class Condemned:
    """One message that goes to the dead letters."""

    message: DueMessage
    reason: DeadReason
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with the messages of a step.

    Attributes:
        rows: Those to be forwarded.
        dead: Those to be dead-lettered.
        batch_limits: Topics whose largest batch is below the client's, in bytes.
        look_up: Topics that the clients should look up first: a transaction failed, and nothing
            is wrong with its messages, so they may know something that is no longer so.
    """

    rows: DueRows
    dead: list[Condemned] = field(default_factory=list)
    batch_limits: Mapping[str, int] = field(default_factory=dict)
    look_up: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Hold:
    """Nothing can be forwarded now; why."""

    why: str


@dataclass(slots=True)
class _Trouble:
    """A topic that takes nothing."""

    since: float
    cause: str
    sample: DueRows | None
    """A message to probe with; None: Kafka itself says when it is over."""
    probe_at: float = 0.0
    pause_s: float = FIRST_PROBE_S


class DeadLetters:
    """Decides for each step; called by the leader's main thread only."""

    def __init__(
        self,
        topics: TopicsPort,
        trials: TrialsPort,
        *,
        compresses: bool,
        batch_size_bytes: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Knows no trouble yet.

        Args:
            topics: What Kafka says about topics.
            trials: To search with.
            compresses: The producers compress, so sizes are not known before.
            batch_size_bytes: The largest batch that the producers make of several messages.
            monotonic: The clock.
        """
        self._topics = topics
        self._trials = trials
        self._compresses = compresses
        self._batch_size_bytes = batch_size_bytes
        self._monotonic = monotonic
        self._troubles: dict[str, _Trouble] = {}
        self._unknown_since: dict[str, float] = {}
        self._guilty: dict[Place, str] = {}
        self._batch_limits: dict[str, int] = {}
        self._search: Future[Findings] | None = None
        self._probe: tuple[str, Future[Findings]] | None = None
        self._suspect = False
        self._failed_at = 0.0
        self._look_up: set[str] = set()
        self._search_after = 0.0

    @property
    def unavailable_topics(self) -> tuple[str, ...]:
        """Topics that are dead-lettered until they take messages again."""
        now = self._monotonic()
        return tuple(
            sorted(
                name
                for name, trouble in self._troubles.items()
                if now - trouble.since >= PATIENCE_S
            )
        )

    def failed(self, rows: DueRows) -> None:
        """A transaction with these messages failed: look before the next one."""
        self._suspect = True
        self._failed_at = self._monotonic()
        self._topics.ask(rows.topic_names())

    def committed(self) -> None:
        """A planned step is done: what was found guilty in it is dealt with."""
        self._guilty.clear()
        self._look_up.clear()

    def plan(self, rows: DueRows) -> Plan | Hold:
        """What to do with these messages now."""
        now = self._monotonic()
        self._take_probe(now)
        if not len(rows):
            return Plan(rows)
        held = self._look(rows, now)
        if held is not None:
            return held
        topics = self._topics.find(rows.topic_names())
        held = self._wait_for(rows, topics, now)
        if held is not None:
            return held
        return self._divide(rows, topics)

    def _look(self, rows: DueRows, now: float) -> Hold | None:
        """Starts a search when one is called for, and takes what it found."""
        if self._search is None and self._suspect and now >= self._search_after:
            self._suspect = False
            topics = self._topics.find(rows.topic_names())
            known_bad = {n for n, topic in topics.items() if topic.state is not TopicState.PRESENT}
            untried = _without_topics(rows, known_bad | self._troubles.keys())
            if len(untried):
                self._search = self._trials.search(untried)
        if self._search is None:
            return None
        if not self._search.done():
            return Hold("looking for what Kafka refused")
        findings, self._search = self._search.result(), None
        self._learn(findings, rows, now)
        return None

    def _learn(self, findings: Findings, rows: DueRows, now: float) -> None:
        if not findings.complete:
            self._search_after = now + SEARCH_PAUSE_S
        elif not findings:
            self._look_up |= findings.tried
        self._guilty |= findings.refused
        self._batch_limits |= findings.batch_bytes
        for name, cause in findings.unavailable.items():
            sample = rows.take(_of_topics(rows, {name})).take(slice(0, 1))
            if len(sample):
                probe_at = now + FIRST_PROBE_S
                trouble = _Trouble(self._failed_at, cause, _copied(sample), probe_at)
                self._troubles.setdefault(name, trouble)

    def _take_probe(self, now: float) -> None:
        """Lets a topic back in once a probe went through, and sends the next probe."""
        if self._probe is not None:
            name, future = self._probe
            if not future.done():
                return
            self._probe = None
            findings = future.result()
            trouble = self._troubles[name]
            if findings.complete and name not in findings.unavailable:
                del self._troubles[name]
            else:
                in_patience = now - trouble.since < PATIENCE_S
                trouble.pause_s = FIRST_PROBE_S if in_patience else trouble.pause_s * 2
                trouble.probe_at = now + min(trouble.pause_s, LAST_PROBE_S)
        for name, trouble in list(self._troubles.items()):
            if now < trouble.probe_at:
                continue
            if trouble.sample is not None:
                self._probe = name, self._trials.search(trouble.sample)
                return
            trouble.probe_at = now + FIRST_PROBE_S
            topic = self._topics.find([name]).get(name)
            if topic is not None and topic.state not in _TAKES_NOTHING:
                del self._troubles[name]

    def _wait_for(self, rows: DueRows, topics: Mapping[str, Topic], now: float) -> Hold | None:
        """Whether a topic of these messages has to be waited for."""
        names = rows.topic_names()
        for name in names:
            topic = topics.get(name)
            if topic is None:
                since = self._unknown_since.setdefault(name, now)
                if now - since < PATIENCE_S:
                    return Hold(f"asking Kafka for topic {name}")
                continue
            self._unknown_since.pop(name, None)
            trouble = self._troubles.get(name)
            if topic.state in _TAKES_NOTHING:
                trouble = trouble or _Trouble(now, topic.state.value, None)
                self._troubles[name] = trouble
            elif trouble is not None and (
                trouble.sample is None or topic.state is not TopicState.PRESENT
            ):
                self._forget(name)
                trouble = None
            if trouble is not None and now - trouble.since < PATIENCE_S:
                return Hold(f"topic {name} takes nothing: {trouble.cause}")
        return None

    def _forget(self, name: str) -> None:
        if self._probe is None or self._probe[0] != name:
            del self._troubles[name]

    def _divide(self, rows: DueRows, topics: Mapping[str, Topic]) -> Plan:
        """Parts the messages that can be forwarded from those that cannot."""
        good = np.ones(len(rows), dtype=np.bool_)
        dead: list[Condemned] = []
        batch_limits: dict[str, int] = {}
        for number in np.unique(rows.topic_numbers).tolist():
            name = rows.topics[number]
            topic = topics.get(name)
            verdict = self._verdict(name, topic)
            if verdict is not None:
                mask = rows.topic_numbers == number
                good &= ~mask
                dead += [Condemned(message, *verdict) for message in rows.take(mask)]
                continue
            known = _UNLIMITED
            if topic is not None and topic.limits is not None:
                known = topic.limits.max_message_bytes
            limit = min(known, self._batch_limits.get(name, _UNLIMITED))
            if limit < self._batch_size_bytes:
                batch_limits[name] = limit
        unsuited = find_unsuited(
            rows, topics, compresses=self._compresses, now_ms=time.time_ns() // 1_000_000
        )
        if self._guilty:
            unsuited |= self._found_guilty(rows)
        for row, verdict in sorted(unsuited.items()):
            if good[row]:
                good[row] = False
                (message,) = rows.take(slice(row, row + 1))
                dead.append(Condemned(message, *verdict))
        sound = rows if good.all() else rows.take(good)
        return Plan(sound, dead, batch_limits, frozenset(self._look_up))

    def _verdict(self, name: str, topic: Topic | None) -> tuple[DeadReason, str | None] | None:
        """Why all messages of a topic are dead letters, if they are."""
        if topic is not None and topic.state is TopicState.MISSING:
            return DeadReason.TOPIC_MISSING, None
        if topic is not None and topic.state is TopicState.ILLEGAL:
            return DeadReason.TOPIC_ILLEGAL, None
        if trouble := self._troubles.get(name):
            return DeadReason.TOPIC_UNAVAILABLE, trouble.cause
        return None

    def _found_guilty(self, rows: DueRows) -> Unsuited:
        found: Unsuited = {}
        for row, message in enumerate(rows):
            cause = self._guilty.get(place_of(message))
            if cause is not None:
                found[row] = _reason_of(cause), cause
        return found


def condemn(message: DueMessage, code: str) -> Condemned:
    """A message that the client refused with this code when it was produced."""
    return Condemned(message, _reason_of(code), code)


def _reason_of(cause: str) -> DeadReason:
    code = cause.partition(":")[0]
    if code == "MSG_SIZE_TOO_LARGE":
        return DeadReason.MESSAGE_TOO_LARGE
    if code == "_UNKNOWN_PARTITION":
        return DeadReason.PARTITION_UNKNOWN
    return DeadReason.REFUSED


def _of_topics(rows: DueRows, names: set[str]) -> NDArray[np.bool_]:
    chosen = np.array([topic in names for topic in rows.topics], dtype=np.bool_)
    return chosen[rows.topic_numbers]


def _copied(sample: DueRows) -> DueRows:
    """One message that does not keep the map of its slot file alive."""
    (number, start), length = sample.records[["blob", "start"]].tolist()[0], sample.length_bytes
    records = sample.records.copy()
    records["blob"], records["start"] = 0, 0
    content = memoryview(bytes(sample.blobs[number][start : start + length]))
    return replace(sample, records=records, blobs=[content])


def _without_topics(rows: DueRows, names: set[str]) -> DueRows:
    return rows.take(~_of_topics(rows, names)) if names else rows
