"""Settings of a consumer: topics, group, retry levels, bounds; checked at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, cast

from delaywheel.client.exchange.settings import check_trace
from delaywheel.consumer.rules.backoff import DEFAULT_RETRY, Backoff, Delays, delays_of
from delaywheel.consumer.rules.breaker import CircuitBreaker
from delaywheel.consumer.rules.deserializers import Deserializer, Field, deserializers_of
from delaywheel.consumer.rules.middleware import Middleware
from delaywheel.consumer.rules.routing import Route
from delaywheel.consumer.rules.subscription import Subscription, TopicNames
from delaywheel.consumer.rules.topics import GroupTopic, digest
from delaywheel.consumer.watching.events import ConsumerEvents, check_events
from delaywheel.levels import Duration, length_ms
from delaywheel.record_headers import TTL_HEADER

if TYPE_CHECKING:  # a program that does not trace imports nothing of it
    from delaywheel.trace.reports import EventReports

_TRANSACTIONAL_IDS: Final = 8
"""Each partition without leader, or with too few replicas in sync, can hold one once it is written
to."""

KEPT_SETTINGS: Final = frozenset(
    {
        "auto.offset.reset",
        "bootstrap.servers",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.idempotence",
        "enable.partition.eof",
        "group.id",
        "group.instance.id",
        "group.protocol",
        "isolation.level",
        "message.max.bytes",
        "message.timeout.ms",
        "partition.assignment.strategy",
        "partitioner",
        "retry.backoff.max.ms",
        "retry.backoff.ms",
        "transaction.timeout.ms",
        "transactional.id",
    }
)
"""Settings of the Kafka clients that the promises rest on; callers cannot change them."""


_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "retry_by": (Mapping,),
    "breaker": (CircuitBreaker, NoneType),
    "middleware": (Sequence,),
    "events": (ConsumerEvents, NoneType),
    "kafka": (Mapping,),
    "retry_topic": (GroupTopic,),
    "dead_topic": (GroupTopic,),
    "order_topic": (GroupTopic,),
}
"""Options whose wrong kind nothing else would name."""


class GroupOptions(TypedDict, total=False):
    """Options of whatever reads topics as a group, retries, and writes dead letters.

    docs/CONSUMER_REFERENCE.md, "Settings", says what each means, and its default.

    Attributes:
        retry: Where a function of message and error raises, or returns no delay, the default
            counts.
        jitter: By how much of itself a delay becomes longer at most. Not for `retry(after=…)`.
        instance: A name that no other consumer of the group has, and that this one keeps over
            restarts (a static member, in Kafka's words). After a crash it gets its partitions back
            at once, and transactions it had begun are ended at once; but other consumers get its
            partitions only after `session.timeout.ms`, even if it was stopped.
    """

    retry: Backoff
    jitter: float
    stuck_after: Duration
    handler_timeout: Duration | None
    max_deliveries: int | None
    commit_every: Duration
    drain: Duration
    max_held_bytes: int
    max_held: int
    wait_for_rights: Duration | None
    create_topics: bool
    retry_topic: GroupTopic
    dead_topic: GroupTopic
    events: ConsumerEvents | None
    trace: EventReports | None
    rebalances: Literal["eager", "cooperative", "consumer"]
    instance: str | None
    kafka: Mapping[str, Any]


class Options(GroupOptions, total=False):
    """Options of a consumer besides its topics, group and Kafka: these, and `GroupOptions`.

    docs/CONSUMER_REFERENCE.md, "Settings", says what each means, and its default.
    """

    cluster: str | None
    retry_by: Mapping[type[Exception], Backoff]
    retry_for: Duration | None
    retry_on: type[Exception] | Sequence[type[Exception]]
    dead_on: type[Exception] | Sequence[type[Exception]]
    causes: bool
    breaker: CircuitBreaker | None
    route: Iterable[str] | None
    expired: Literal["skip", "dead"]
    ttl_header: str | None
    value_deserializer: Deserializer | None
    key_deserializer: Deserializer | None
    middleware: Sequence[Middleware]
    keep_partition: bool
    ordered: bool
    max_away_bytes: int
    lost_after: Duration
    start: Literal["earliest", "latest"]
    order_topic: GroupTopic


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """The checked `Options`; durations in milliseconds.

    Attributes:
        meant_for: A header, and what it holds in records that are read; others are skipped.
        asks_about_halves: Whether what fails to the end is UNDECIDED.
    """

    topics: Subscription
    group: str
    bootstrap: str
    cluster: str | None
    retry: Delays
    retry_by: tuple[tuple[type[Exception], Delays], ...]
    retry_for_ms: int | None
    jitter: float
    retry_on: tuple[type[Exception], ...]
    dead_on: tuple[type[Exception], ...]
    causes: bool
    breaker: CircuitBreaker | None
    route: Route | None
    expired: Literal["skip", "dead"]
    ttl_header: str | None
    deserializers: Mapping[Field, Deserializer]
    middleware: tuple[Middleware, ...]
    keep_partition: bool
    ordered: bool
    max_away_bytes: int
    lost_after_ms: int
    start: Literal["earliest", "latest"]
    stuck_after_ms: int
    handler_timeout_ms: int | None
    max_deliveries: int | None
    commit_every_ms: int
    drain_ms: int
    max_held_bytes: int
    max_held: int
    wait_for_rights_ms: int | None
    create_topics: bool
    events: ConsumerEvents | None
    trace: EventReports | None
    rebalances: Literal["eager", "cooperative", "consumer"]
    instance: str | None
    kafka: Mapping[str, Any]
    made: Mapping[str, GroupTopic]
    meant_for: tuple[str, bytes] | None = None
    asks_about_halves: bool = False

    def made_topics(self, names: TopicNames) -> dict[str, GroupTopic]:
        """Returns the topics that belong to this source topic and are created if missing."""
        own = {"retry": names.retry, "dead": names.dead}
        if self.ordered:
            own["order"] = names.order
        return {name: self.made.get(use, GroupTopic()) for use, name in own.items()}


def read_settings(
    topics: str | Iterable[str], group: str, bootstrap: str, options: Options
) -> ConsumerSettings:
    """Checks the settings of a consumer; raises ValueError or TypeError, which name the one."""
    _check_kinds(options)
    sources = (topics,) if isinstance(topics, str) else tuple(topics)
    if not sources or len(set(sources)) < len(sources):
        raise ValueError(f"topics {sources!r}: at least one, each once")
    if not group or not bootstrap:
        raise ValueError("group and bootstrap must not be empty")
    kafka = dict(options.get("kafka", {}))
    kept = sorted(KEPT_SETTINGS & set(kafka))
    if kept:
        raise ValueError(f"kafka: {', '.join(kept)}: the consumer sets this itself")
    route, expired = options.get("route"), options.get("expired", "skip")
    start = options.get("start", "earliest")
    most, timeout = options.get("max_deliveries", 3), options.get("handler_timeout")
    retry_for, jitter = options.get("retry_for"), options.get("jitter", 0.0)
    waits, by = options.get("wait_for_rights"), options.get("retry_by", {})
    if (events := options.get("events")) is not None:
        check_events(events)
    check_trace(trace := options.get("trace"))
    if not 0 <= jitter <= 1:
        raise ValueError(f"jitter={jitter}: from 0 to 1")
    if expired not in ("skip", "dead"):
        raise ValueError(f"expired={expired!r}: neither 'skip' nor 'dead'")
    if start not in ("earliest", "latest"):
        raise ValueError(f"start={start!r}: neither 'earliest' nor 'latest'")
    given = {use: options.get(f"{use}_topic", GroupTopic()) for use in ("retry", "dead", "order")}
    made = cast("Mapping[str, GroupTopic]", given)
    subscription = Subscription(sources, group, made)
    if subscription.has_patterns and start == "latest":
        raise ValueError(
            "start='latest' with a pattern: the first records of topics that appear later would be"
            " skipped; name the topics, or begin with 'earliest'"
        )
    return ConsumerSettings(
        topics=subscription,
        made=made,
        group=group,
        bootstrap=bootstrap,
        cluster=options.get("cluster"),
        retry=delays_of(options.get("retry", DEFAULT_RETRY)),
        retry_by=tuple(zip(_exceptions([*by]), map(delays_of, by.values()), strict=True)),
        retry_for_ms=None if retry_for is None else length_ms(retry_for),
        jitter=jitter,
        retry_on=_exceptions(options.get("retry_on", Exception)),
        dead_on=_exceptions(options.get("dead_on", ())),
        causes=options.get("causes", True),
        breaker=options.get("breaker"),
        route=None if route is None else Route(route),
        expired=expired,
        ttl_header=options.get("ttl_header", TTL_HEADER),
        deserializers=deserializers_of(
            {
                "key": options.get("key_deserializer"),
                "value": options.get("value_deserializer"),
            }
        ),
        middleware=tuple(options.get("middleware", ())),
        keep_partition=options.get("keep_partition", False),
        ordered=options.get("ordered", False),
        max_away_bytes=_positive("max_away_bytes", options.get("max_away_bytes", 64_000_000)),
        start=start,
        lost_after_ms=length_ms(options.get("lost_after", "6h")),
        stuck_after_ms=length_ms(options.get("stuck_after", "5m")),
        handler_timeout_ms=None if timeout is None else length_ms(timeout),
        max_deliveries=None if most is None else _positive("max_deliveries", most),
        commit_every_ms=length_ms(options.get("commit_every", "200ms")),
        drain_ms=length_ms(options.get("drain", "10s")),
        max_held_bytes=_positive("max_held_bytes", options.get("max_held_bytes", 16_000_000)),
        max_held=_positive("max_held", options.get("max_held", 50_000)),
        wait_for_rights_ms=None if waits is None else length_ms(waits),
        create_topics=options.get("create_topics", True),
        events=events,
        trace=trace,
        rebalances=_rebalances(options),
        instance=options.get("instance"),
        kafka=kafka,
    )


def _check_kinds(options: Options) -> None:
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        raise TypeError(f"unknown options: {', '.join(unknown)}")
    for name, given in options.items():
        kinds = _KINDS.get(name)
        if kinds is not None and not isinstance(given, kinds):
            raise TypeError(f"{name} must be a {kinds[0].__name__}, not {type(given).__name__}")


def _rebalances(options: Options) -> Literal["eager", "cooperative", "consumer"]:
    how = options.get("rebalances", "eager")
    if how not in ("eager", "cooperative", "consumer"):
        raise ValueError(f"rebalances={how!r}: 'eager', 'cooperative' or 'consumer'")
    if options.get("ordered") and how != "eager":
        raise ValueError(f"ordered, rebalances={how!r}: partitions move in pairs: 'eager'")
    if options.get("instance") and how == "cooperative":
        raise ValueError(
            f"instance, rebalances={how!r}: a partition that is given up while a member of that"
            " name starts again may stay with nobody: 'eager' or 'consumer'"
        )
    return how


def transactional_ids(group: str, instance: str) -> list[str]:
    """Returns the ids of a consumer's producers, which no other group and instance have."""
    first = f"delaywheel-retry-{group}-{digest(group, instance)}"
    return [first, *(f"{first}-{number}" for number in range(1, _TRANSACTIONAL_IDS))]


def _exceptions(
    given: type[Exception] | Sequence[type[Exception]],
) -> tuple[type[Exception], ...]:
    classes = tuple(given) if isinstance(given, Iterable) else (given,)
    for one in classes:
        if not (isinstance(one, type) and issubclass(one, Exception)):
            raise TypeError(f"{one!r} is not an exception class")
    return classes


def _positive(name: str, number: int) -> int:
    if number < 1:
        raise ValueError(f"{name}={number}: at least 1")
    return number
