"""What Kafka says about destination topics: asked in advance, off the forwarding thread.

Nothing here waits for Kafka: `find` answers from memory, and `run` (on a thread) or `round` (in a
simulation) asks Kafka for what is missing or old. Asking never creates a topic.

| state | means |
|---|---|
| PRESENT | every partition has a leader and enough replicas in sync, and we may write |
| LEADERLESS | some partition has no leader now |
| SHRUNK | some partition has fewer replicas in sync than `min.insync.replicas` asks for |
| DENIED | we may not write to it, or not ask |
| MISSING | Kafka does not have it: reported twice, half a second apart, as a topic just created is
             not known to all brokers at once |
| ILLEGAL | no topic can have this name |

Names come from two sides, and each round asks about them in this order:

| | names | asked | kept |
|---|---|---|---|
| 1 | of messages that are or soon will be due, not known yet | at once | as 3 |
| 2 | given by callers, and their server asks whether it exists | once, or until confirmed | |
|   | | | `CALLERS_AT_MOST`, for `CALLERS_WAIT_S`: no caller waits longer |
| 3 | of messages, known to take nothing | each `REFRESH_S` while in use | `FORGET_S` after their |
|   | | | use |
| 4 | of messages, well as far as known | `ROUTINE_MOST` each `REFRESH_S`, the | as 3 |
|   | | oldest answers first; each `SOON_S` | |
|   | | where this node forwards nothing | |

So however many names callers invent, a message that is due waits for one call about `CHUNK` of them
at most; and however many topics are in use, asking about those that are well costs the same. A
topic that ceases to be well is found by that, or by a transaction that fails: its topics are asked
about at once.

Of messages that are `soon` due every node asks, not only the leader: each `SOON_S`, so that a new
leader knows their topics.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from heapq import nsmallest
from itertools import islice
from typing import Any, Protocol

from delaywheel_replica.cleaner.outside.ports import KafkaAway

REFRESH_S = 0.5
CONFIRM_MISSING_S = 0.5
LIMITS_S = 30.0
IN_USE_S = 10.0
FORGET_S = 60.0
CHUNK = 500
ROUTINE_MOST = 50
SOON_S = 5.0

NAMES_AT_MOST = 20_000
"""Names of messages that are kept beyond `IN_USE_S`: Kafka's names are short, so some 10 MB."""

CALLERS_WAIT_S = 5.0
CALLERS_AT_MOST = 2_000


class TopicState(Enum):
    """Kafka's answer; see the module."""

    PRESENT = "present"
    LEADERLESS = "leaderless"
    SHRUNK = "below min.insync.replicas"
    DENIED = "denied"
    MISSING = "missing"
    ILLEGAL = "illegal"


_BY_PARTITION = (TopicState.PRESENT, TopicState.LEADERLESS)


@dataclass(frozen=True, slots=True)
class Limits:
    """A topic's requirements for each message.

    Attributes:
        max_message_bytes: The greatest batch it accepts.
        needs_key: It is compacted.
        oldest_ms: How far a timestamp may lie behind the broker's clock; None: any.
        newest_ms: How far it may lie ahead; None: any.
        min_insync: How many replicas must be in sync; fewer if there are fewer.
    """

    max_message_bytes: int
    needs_key: bool = False
    oldest_ms: int | None = None
    newest_ms: int | None = None
    min_insync: int = 1


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """Kafka's answer about one topic's partitions.

    Attributes:
        state: The topic's state, ignoring in-sync replicas.
        replicas: Of each partition that has fewer in sync than replicas: how many of both.
        fewest: How many replicas the partition has that has the fewest; 0: unknown.
    """

    state: TopicState
    partitions: int = 0
    unled: frozenset[int] = frozenset()
    replicas: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    fewest: int = 0


@dataclass(frozen=True, slots=True)
class Topic:
    """Kafka's newest answer about one topic."""

    state: TopicState
    asked_at: float
    """On the monotonic clock."""
    partitions: int = 0
    limits: Limits | None = None
    """None: unknown (no permission to describe its configuration)."""
    limits_at: float = -LIMITS_S
    missing_since: float | None = None
    troubled: frozenset[int] = frozenset()
    """The partitions that take nothing; none: if the topic takes nothing, that is all of it."""
    fewest: int = 0
    """See `TopicDescription`."""

    @property
    def needs_all_brokers(self) -> bool:
        """Whether some partition takes nothing while any of its brokers is away."""
        least = 1 if self.limits is None else self.limits.min_insync
        return 0 < self.fewest <= max(1, least)

    @property
    def may_move(self) -> bool:
        """Whether each partition is known to have replicas enough to be led by another broker."""
        return self.fewest > 0 and not self.needs_all_brokers

    @property
    def confirmed(self) -> bool:
        """Whether this answer may be acted on."""
        if self.state is not TopicState.MISSING or self.missing_since is None:
            return True
        return self.asked_at - self.missing_since >= CONFIRM_MISSING_S


@dataclass(frozen=True, slots=True)
class CreateTopics:
    """How to create missing topics, if the operator wants that."""

    partitions: int
    replication_factor: int | None
    """None: as many as the brokers' default says."""


class TopicAdmin(Protocol):
    """Kafka's answers about topics; calls block for a bounded time."""

    def describe(self, names: Sequence[str]) -> Mapping[str, TopicDescription]:
        """Returns Kafka's present description of each topic; topics without an answer are absent.

        KafkaAway: it answers about none.
        """

    def limits(self, names: Sequence[str]) -> Mapping[str, Limits | None]:
        """Returns each topic's limits; None if this node may not read them."""

    def create(self, names: Sequence[str], how: CreateTopics) -> None:
        """Creates topics, as far as possible."""


@dataclass(slots=True)
class _TopicEntry:
    """One topic name and the questions about it.

    Attributes:
        used_at: When it was last asked about.
        found_at: When the thread that forwards last asked about it.
        stale_before: Only an answer to a question asked from then on will do, limits included;
            None: there is one.
        tried_at: When Kafka was last asked.
    """

    used_at: float
    stale_before: float | None
    found_at: float = float("-inf")
    tried_at: float = float("-inf")
    topic: Topic | None = None

    @property
    def is_urgent(self) -> bool:
        """Whether an answer is waited for."""
        return self.stale_before is not None or self.topic is None or not self.topic.confirmed

    @property
    def is_well(self) -> bool:
        """Whether an answer is known by which messages can be forwarded."""
        return (
            not self.is_urgent and self.topic is not None and self.topic.state is TopicState.PRESENT
        )

    def is_idle(self, now: float) -> bool:
        """Whether this node has forwarded nothing there for a while."""
        return now - self.found_at >= IN_USE_S

    def due_at(self, now: float) -> float:
        """Returns when to ask Kafka next."""
        if self.stale_before is not None and self.tried_at < self.stale_before:
            return self.stale_before
        if self.topic is not None and not self.topic.confirmed:
            return self.tried_at + CONFIRM_MISSING_S
        return self.tried_at + (SOON_S if self.is_well and self.is_idle(now) else REFRESH_S)

    def learn(self, topic: Topic) -> bool:
        """Takes an answer; returns whether it is new."""
        before, self.topic = self.topic, topic
        answers = self.stale_before is not None and topic.asked_at >= self.stale_before
        if answers:
            self.stale_before = None
        return answers or before is None or _reported(before) != _reported(topic)


class DestinationTopics:
    """Answers about topics, refreshed in the background."""

    def __init__(
        self,
        admin: TopicAdmin,
        *,
        create: CreateTopics | None = None,
        on_news: Callable[[], None] = lambda: None,
        on_wanted: Callable[[], None] = lambda: None,
        soon: Callable[[], Iterable[str]] = tuple,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins without answers; asks nothing before `run` or `round`.

        Args:
            create: Create missing topics with this; None: never.
            on_news: Called on the asking thread when an answer changed.
            on_wanted: Called when there is something to ask at once.
            soon: Returns topics of messages that will be due; called on the asking thread.
        """
        self._admin = admin
        self._create = create
        self._on_news = on_news
        self._on_wanted = on_wanted
        self._soon = soon
        self._soon_at = self._routine_at = float("-inf")
        self._monotonic = monotonic
        self._used: dict[str, _TopicEntry] = {}
        self._callers: dict[str, _TopicEntry] = {}
        self._news: dict[str, Topic] = {}
        self._wanted = False
        self._closing = False
        self._changed = threading.Condition()

    # --- for the thread that forwards

    def find(self, names: Iterable[str]) -> dict[str, Topic]:
        """Returns the topics that are known now, and requests the others, which messages need."""
        now = self._monotonic()
        found = {}
        wanted = False
        with self._changed:
            for name in names:
                known = self._used.get(name)
                if known is None:
                    self._used[name] = _TopicEntry(now, stale_before=now, found_at=now)
                    wanted = True
                    continue
                wanted |= known.is_idle(now)  # it is asked about each `REFRESH_S` from now on
                known.found_at = known.used_at = now
                if known.topic is not None and known.topic.confirmed:
                    found[name] = known.topic
        if wanted:
            self._ask_soon()
        return found

    def ask(self, names: Iterable[str]) -> None:
        """Asks Kafka again, immediately, since the known answers do not suffice."""
        now = self._monotonic()
        with self._changed:
            for name in names:
                known = self._used.setdefault(name, _TopicEntry(now, stale_before=now))
                known.found_at = known.used_at = known.stale_before = now
        self._ask_soon()

    def ask_for_caller(self, name: str) -> None:
        """Asks Kafka for a name from a caller; when there are too many, leaves it unanswered."""
        now = self._monotonic()
        with self._changed:
            if name not in self._callers and len(self._callers) >= CALLERS_AT_MOST:
                return
            self._callers[name] = _TopicEntry(now, stale_before=now)
        self._ask_soon()

    def news(self) -> Mapping[str, Topic]:
        """Returns answers that changed since the last call, and those that callers requested."""
        with self._changed:
            news, self._news = self._news, {}
        return {name: topic for name, topic in news.items() if topic.confirmed}

    def close(self) -> None:
        """Ends `run`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    # --- for the thread that asks

    def run(self) -> None:
        """Asks round after round until closed."""
        while True:
            pause_s = self.round()
            with self._changed:
                if not (self._wanted or self._closing):
                    self._changed.wait(pause_s)
                if self._closing:
                    return

    def round(self) -> float:
        """Asks every question that is due; returns how long until the next one."""
        self._look_ahead()
        with self._changed:
            self._forget()
        while not self._closing:
            with self._changed:
                self._wanted = False
                names, due_at = self._next()
            if not names:
                return max(0.0, due_at - self._monotonic())
            try:
                self._ask_kafka(names)
            except KafkaAway:
                return REFRESH_S
        return 0.0

    def _look_ahead(self) -> None:
        now = self._monotonic()
        if now < self._soon_at:
            return
        self._soon_at = now + SOON_S
        names = self._soon()
        with self._changed:
            for name in names:
                self._used.setdefault(name, _TopicEntry(now, stale_before=now)).used_at = now

    def _ask_soon(self) -> None:
        with self._changed:
            self._wanted = True
            self._changed.notify_all()
        self._on_wanted()

    def _forget(self) -> None:
        now = self._monotonic()
        keep_s = FORGET_S if len(self._used) <= NAMES_AT_MOST else IN_USE_S
        callers, used = self._callers.items(), self._used.items()
        self._callers = {n: known for n, known in callers if now - known.used_at <= CALLERS_WAIT_S}
        self._used = {n: known for n, known in used if now - known.used_at <= keep_s}

    def _next(self) -> tuple[list[str], float]:
        """Returns the questions to ask now, the most urgent kind only; or when there are some."""
        now = self._monotonic()
        in_use = {
            name: known
            for name, known in self._used.items()
            if known.is_urgent or now - known.used_at < IN_USE_S
        }
        urgent = {name: known for name, known in in_use.items() if known.is_urgent}
        unwell = {name: known for name, known in in_use.items() if not known.is_well}
        for kind in (urgent, self._callers, unwell):
            due = (name for name, known in kind.items() if known.due_at(now) <= now)
            names = list(islice(due, CHUNK))
            if names:
                return names, now
        well = [(known.due_at(now), name) for name, known in in_use.items() if known.is_well]
        if now >= self._routine_at:
            names = [name for at, name in nsmallest(ROUTINE_MOST, well) if at <= now]
            if names:
                self._routine_at = now + REFRESH_S
                return names, now
        times = [known.due_at(now) for kind in (unwell, self._callers) for known in kind.values()]
        times += [max(self._routine_at, min(well)[0])] if well else []
        return [], min([*times, self._soon_at])

    def _ask_kafka(self, names: Sequence[str]) -> None:
        asked_at = self._monotonic()
        with self._changed:
            for name in names:
                for known in self._of(name):
                    known.tried_at = asked_at
        answers = dict(self._admin.describe(names))
        if self._create is not None:
            missing = [
                n for n, described in answers.items() if described.state is TopicState.MISSING
            ]
            wanted = [name for name in missing if name in self._used]
            if wanted:
                self._admin.create(wanted, self._create)
                answers |= self._admin.describe(wanted)
        due = [
            name
            for name, described in answers.items()
            if self._needs_limits(name, described, asked_at)
        ]
        limits = self._admin.limits(due) if due else {}
        self._learn(answers, limits, asked_at)

    def _of(self, name: str) -> list[_TopicEntry]:
        kinds = (self._used.get(name), self._callers.get(name))
        return [known for known in kinds if known is not None]

    def _needs_limits(self, name: str, described: TopicDescription, now: float) -> bool:
        """Whether to ask for the topic's limits as well.

        If replicas are missing, `min.insync.replicas` decides: an operator may lower it.
        """
        if described.state not in _BY_PARTITION:
            return False
        known = self._callers.get(name) or self._used.get(name)
        if known is None or known.stale_before is not None or known.topic is None:
            return True
        return bool(described.replicas) or now - known.topic.limits_at >= LIMITS_S

    def _learn(
        self,
        answers: Mapping[str, TopicDescription],
        limits: Mapping[str, Limits | None],
        asked_at: float,
    ) -> None:
        changed = False
        with self._changed:
            for name, described in answers.items():
                for known in self._of(name):
                    after = _joined(known.topic, described, name, limits, asked_at)
                    if known.learn(after):
                        self._news[name] = after
                        changed = True
                asked = self._callers.get(name)
                if asked is not None and asked.topic is not None and asked.topic.confirmed:
                    del self._callers[name]
        if changed:
            self._on_news()


def _joined(
    before: Topic | None,
    described: TopicDescription,
    name: str,
    limits: Mapping[str, Limits | None],
    asked_at: float,
) -> Topic:
    """Returns what is known of a topic after an answer."""
    if described.state is TopicState.MISSING:
        since = None if before is None else before.missing_since
        return Topic(described.state, asked_at, missing_since=asked_at if since is None else since)
    topic = Topic(
        described.state,
        asked_at,
        described.partitions,
        troubled=described.unled,
        fewest=described.fewest,
    )
    if name in limits:
        topic = replace(topic, limits=limits[name], limits_at=asked_at)
    elif before is not None:
        topic = replace(topic, limits=before.limits, limits_at=before.limits_at)
    if topic.state in _BY_PARTITION and topic.limits is not None:
        least = topic.limits.min_insync
        shrunk = {
            number
            for number, (in_sync, replicas) in described.replicas.items()
            if in_sync < min(least, replicas)
        }
        if shrunk:
            is_led = topic.state is TopicState.PRESENT
            state = TopicState.SHRUNK if is_led else topic.state
            return replace(topic, state=state, troubled=topic.troubled | shrunk)
    return topic


def _reported(topic: Topic) -> tuple[Any, ...]:
    """Returns the part of an answer that is reported."""
    return topic.state, topic.partitions, topic.limits, topic.confirmed, topic.troubled
