"""What Kafka says about the topics that messages go to: asked ahead, on a thread of its own.

Nobody waits here for Kafka: `find` answers from memory, and a topic not known yet is asked for in
the background. Topics in use are asked for again twice a second, so that the answer is fresh when a
message falls due; asking never creates a topic.

| state | means |
|---|---|
| PRESENT | all partitions have a leader, and we may write |
| LEADERLESS | some partition has no leader now |
| DENIED | we may not write to it, or not ask |
| MISSING | Kafka does not have it: told twice, half a second apart, as a topic just created is
             not known to all brokers at once |
| ILLEGAL | no topic can have this name |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined] # its stubs re-export without saying so
from confluent_kafka.cimpl import NewTopic

from delaywheel_replica.cleaner.settings import KafkaSettings

REFRESH_S = 0.5
CONFIRM_MISSING_S = 0.5
LIMITS_S = 30.0
FORGET_S = 600.0
CALL_S = 5.0
CHUNK = 500


class TopicState(Enum):
    """What Kafka said; see the module."""

    PRESENT = "present"
    LEADERLESS = "leaderless"
    DENIED = "denied"
    MISSING = "missing"
    ILLEGAL = "illegal"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a topic asks of each message.

    Attributes:
        max_message_bytes: The greatest batch it takes.
        needs_key: It is compacted.
        oldest_ms: How far a timestamp may lie behind the broker's clock; None: any.
        newest_ms: How far it may lie ahead; None: any.
    """

    max_message_bytes: int
    needs_key: bool = False
    oldest_ms: int | None = None
    newest_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Topic:
    """Kafka's newest answer about one topic."""

    state: TopicState
    asked_at: float
    """On the monotonic clock."""
    partitions: int = 0
    limits: Limits | None = None
    """None: not told (no permission to describe its configuration)."""
    limits_at: float = -LIMITS_S
    missing_since: float | None = None

    @property
    def confirmed(self) -> bool:
        """Whether this answer may be acted upon."""
        if self.state is not TopicState.MISSING or self.missing_since is None:
            return True
        return self.asked_at - self.missing_since >= CONFIRM_MISSING_S


@dataclass(frozen=True, slots=True)
class CreateTopics:
    """How missing topics are made, if the operator wants that."""

    partitions: int
    replication_factor: int | None
    """None: as many as the brokers' default says."""


class KnownTopics:
    """Answers about topics, kept fresh in the background."""

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        create: CreateTopics | None = None,
        on_news: Callable[[], None] = lambda: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts asking.

        Args:
            settings: How to reach Kafka.
            create: Make missing topics so; None: never.
            on_news: Called on the thread of this class when an answer changed.
            monotonic: The clock.
        """
        self._admin = AdminClient(settings.admin())
        self._create = create
        self._on_news = on_news
        self._monotonic = monotonic
        self._known: dict[str, Topic] = {}
        self._used_at: dict[str, float] = {}
        self._news: dict[str, Topic] = {}
        self._wanted: set[str] = set()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="topics", daemon=True)
        self._thread.start()

    def find(self, names: Iterable[str]) -> dict[str, Topic]:
        """The topics that are known now; the others are asked for, with the state None."""
        now = self._monotonic()
        found = {}
        unknown = []
        for name in names:
            self._used_at[name] = now
            topic = self._known.get(name)
            if topic is not None and topic.confirmed:
                found[name] = topic
            elif topic is None:
                unknown.append(name)
        if unknown:
            self.ask(unknown)
        return found

    def ask(self, names: Iterable[str]) -> None:
        """Asks Kafka anew, at once."""
        now = self._monotonic()
        with self._changed:
            for name in names:
                self._used_at[name] = now
                self._wanted.add(name)
            self._changed.notify_all()

    def news(self) -> Mapping[str, Topic]:
        """Answers that changed since the last call, and those that `ask` wanted."""
        with self._changed:
            news, self._news = self._news, {}
        return {name: topic for name, topic in news.items() if topic.confirmed}

    def wait(self, name: str, *, newer_than: float, timeout_s: float) -> Topic | None:
        """Blocks until a confirmed answer of after `newer_than` is there; for other threads."""
        deadline = self._monotonic() + timeout_s
        with self._changed:
            while not self._closing:
                topic = self._known.get(name)
                if topic is not None and topic.asked_at > newer_than and topic.confirmed:
                    return topic
                left = deadline - self._monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
        return None

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CALL_S + 1)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._wanted and not self._closing:
                    self._changed.wait(self._pause_s())
                if self._closing:
                    return
                wanted, self._wanted = self._wanted, set()
            self._refresh(wanted)

    def _pause_s(self) -> float:
        unconfirmed = any(not topic.confirmed for topic in self._known.values())
        return CONFIRM_MISSING_S if unconfirmed else REFRESH_S

    def _refresh(self, wanted: set[str]) -> None:
        now = self._monotonic()
        for name, used_at in list(self._used_at.items()):
            if now - used_at > FORGET_S:
                self._used_at.pop(name, None)
                self._known.pop(name, None)
        names = sorted(self._used_at.keys() | wanted)
        for start in range(0, len(names), CHUNK):
            try:
                answers = self._describe(names[start : start + CHUNK])
            except KafkaException:
                return  # Kafka is away: what was known stays, and the next round asks again
            self._learn(answers, wanted)

    def _describe(self, names: Sequence[str]) -> dict[str, Topic]:
        asked_at = self._monotonic()
        futures = self._admin.describe_topics(
            TopicCollection(list(names)), request_timeout=CALL_S, include_authorized_operations=True
        )
        answers = {}
        for name in names:
            topic = _answer(futures[name], asked_at)
            if topic is not None:
                answers[name] = topic
        if self._create is not None:
            self._make([n for n, topic in answers.items() if topic.state is TopicState.MISSING])
        return self._with_limits(answers, asked_at)

    def _with_limits(self, answers: dict[str, Topic], now: float) -> dict[str, Topic]:
        """Adds the greatest message that each topic takes, asked for now and then."""
        due = []
        for name, topic in answers.items():
            known = self._known.get(name)
            if known is not None and now - known.limits_at < LIMITS_S:
                answers[name] = replace(topic, limits=known.limits, limits_at=known.limits_at)
            elif topic.state in (TopicState.PRESENT, TopicState.LEADERLESS):
                due.append(name)
        if due:
            for name, limits in self._limits(due).items():
                answers[name] = replace(answers[name], limits=limits, limits_at=now)
        return answers

    def _limits(self, names: Sequence[str]) -> dict[str, Limits | None]:
        wanted = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        futures = self._admin.describe_configs(wanted, request_timeout=CALL_S)
        limits: dict[str, Limits | None] = {}
        for resource, future in futures.items():
            try:
                limits[resource.name] = _limits_of(future.result())
            except KafkaException:
                limits[resource.name] = None
        return limits

    def _make(self, names: Sequence[str]) -> None:
        create = self._create
        if create is None or not names:
            return
        wanted = [
            NewTopic(
                name,
                num_partitions=create.partitions,
                replication_factor=create.replication_factor or -1,
            )
            for name in names
        ]
        for future in self._admin.create_topics(wanted, request_timeout=CALL_S).values():
            try:
                future.result()
            except KafkaException:
                continue  # the next answer says whether it is there
        self.ask(names)

    def _learn(self, answers: Mapping[str, Topic], wanted: set[str]) -> None:
        changed = False
        with self._changed:
            for name, topic in answers.items():
                before = self._known.get(name)
                since = None if before is None else before.missing_since
                if topic.state is TopicState.MISSING and since is not None:
                    topic = replace(topic, missing_since=since)  # noqa: PLW2901 - the same topic
                self._known[name] = topic
                if name in wanted or before is None or _differs(before, topic):
                    self._news[name] = topic
                    changed = True
            self._changed.notify_all()
        if changed:
            self._on_news()


def _answer(future: Future[Any], asked_at: float) -> Topic | None:
    """What Kafka says about one topic; None: not now."""
    try:
        described = future.result()
    except KafkaException as exception:
        return _refusal(exception, asked_at)
    state = TopicState.PRESENT
    if any(partition.leader is None for partition in described.partitions):
        state = TopicState.LEADERLESS
    allowed = described.authorized_operations
    if allowed and AclOperation.WRITE not in allowed and AclOperation.ALL not in allowed:
        state = TopicState.DENIED
    return Topic(state, asked_at, partitions=len(described.partitions))


_ANY_MS = 1 << 62


def _limits_of(config: Mapping[str, Any]) -> Limits:
    def bound(name: str) -> int | None:
        entry = config.get(name)
        given = config["message.timestamp.type"].value == "CreateTime" and entry is not None
        # Kafka writes "any" as the greatest long, to which nothing can be added.
        limited = given and entry is not None and int(entry.value) < _ANY_MS
        return int(entry.value) if limited and entry is not None else None

    return Limits(
        max_message_bytes=int(config["max.message.bytes"].value),
        needs_key="compact" in config["cleanup.policy"].value,
        oldest_ms=bound("message.timestamp.before.max.ms"),
        newest_ms=bound("message.timestamp.after.max.ms"),
    )


def _refusal(exception: KafkaException, asked_at: float) -> Topic | None:
    code = exception.args[0].code()
    if code == KafkaError.UNKNOWN_TOPIC_OR_PART:
        return Topic(TopicState.MISSING, asked_at, missing_since=asked_at)
    if code == KafkaError.TOPIC_EXCEPTION:
        return Topic(TopicState.ILLEGAL, asked_at)
    if code == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return Topic(TopicState.DENIED, asked_at)
    return None


def _differs(before: Topic, after: Topic) -> bool:
    def told(topic: Topic) -> tuple[Any, ...]:
        return topic.state, topic.partitions, topic.limits, topic.confirmed

    return told(before) != told(after)
