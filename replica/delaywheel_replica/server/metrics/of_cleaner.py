"""Metrics of forwarding, from the cleaner's status.

A dead cleaner leaves its last status behind: its counts stay visible until the next cleaner starts
from zero, and `delaywheel_row_age_seconds` shows how old that status is.
"""

from collections.abc import Callable
from typing import TypeVar

from delaywheel.ingress import HalfAnswer
from delaywheel_replica.core.protocol.progress import time_floor
from delaywheel_replica.core.protocol.status_files import (
    CleanerStatus,
    IngressStatus,
    Role,
    UnansweredHalves,
)
from delaywheel_replica.server.metrics.metric import (
    Spec,
    Value,
    Values,
    by_label,
    counter,
    counters,
    gauge,
    gauges,
    histogram,
)
from delaywheel_replica.server.metrics.scrape import Scrape

_Value = TypeVar("_Value")


def _of(value: Callable[[CleanerStatus], _Value | None]) -> Callable[[Scrape], _Value | None]:
    """Returns a value from the status, once there is one."""
    return lambda scrape: None if scrape.cleaner is None else value(scrape.cleaner)


def _each(values: Callable[[CleanerStatus], Values]) -> Callable[[Scrape], Values]:
    """Returns values from the status, once there is one."""
    return lambda scrape: [] if scrape.cleaner is None else values(scrape.cleaner)


def _counted(name: str, text: str, key: str) -> Spec:
    return counter(name, text, _of(lambda status: status.counters.get(key, 0)))


def _role(scrape: Scrape) -> Values:
    """Returns the cleaner's role; none while it is silent."""
    if scrape.cleaner is None:
        return []
    present = scrape.cleaner.role if scrape.cleaner.is_fresh(scrape.monotonic_ms) else None
    return [((role,), role is present) for role in Role]


def _overdue_s(scrape: Scrape) -> float | None:
    """Returns the overdue time of the status, plus the status' age if something was overdue."""
    status = scrape.cleaner
    if status is None or status.progress is None:
        return None
    silent_ms = max(0, scrape.monotonic_ms - status.monotonic_ms)
    return (status.lateness_ms + (silent_ms if status.lateness_ms else 0)) / 1e3


def _behind_s(scrape: Scrape) -> float | None:
    status = scrape.cleaner
    if status is None or status.progress is None:
        return None
    allowed = time_floor(status.progress.due_ms, scrape.sources.config.late_window_seconds)
    return max(0, allowed - status.progress.floor)


def _registered(status: CleanerStatus) -> Values:
    records = status.wheels.values()
    closed = sum(record.closed_at is not None for record in records)
    return [(("open",), len(records) - closed), (("closed",), closed)]


def _answered(status: CleanerStatus) -> Values:
    return [
        ((each.value,), status.counters.get(f"halves_answered_{each.name.lower()}", 0))
        for each in HalfAnswer
    ]


def _unanswered(value: Callable[[UnansweredHalves, int], float]) -> Callable[[Scrape], Values]:
    return _each(
        lambda status: [((each.group,), value(each, status.wall_ms)) for each in status.unanswered]
    )


def _of_ingress(value: Callable[[IngressStatus], Value]) -> Callable[[Scrape], Value]:
    """Returns a value of the ingress, while this node leads and reads topics."""
    return _of(lambda status: None if status.ingress is None else value(status.ingress))


_INGRESS: tuple[Spec, ...] = (
    gauge(
        "ingress_partitions",
        "Partitions of ingress topics that the leader reads.",
        _of_ingress(lambda ingress: ingress.partitions),
    ),
    gauge(
        "ingress_lag_offsets",
        "Offsets of ingress topics that are not settled.",
        _of_ingress(lambda ingress: ingress.lag),
    ),
    gauges(
        "ingress_partition_lag_offsets",
        "The same by partition; of many partitions those that are furthest behind.",
        ("partition",),
        _each(lambda status: [] if status.ingress is None else by_label(status.ingress.lags)),
    ),
    gauge(
        "ingress_held_bytes",
        "Approximate memory of ingress records in the leader.",
        _of_ingress(lambda ingress: ingress.held_bytes),
    ),
    gauge(
        "ingress_cut_off_partitions",
        "Partitions that are no longer read, since they end before what was read of them.",
        _of_ingress(lambda ingress: len(ingress.cut_off)),
    ),
    gauge(
        "ingress_open_transaction_partitions",
        "Partitions that wait for a transaction that its producer leaves open.",
        _of_ingress(lambda ingress: len(ingress.open_transactions)),
    ),
    gauge(
        "ingress_faults",
        "Reasons for not taking in ingress records: `delaywheel status` names them.",
        _of_ingress(lambda ingress: len(ingress.faults)),
    ),
    _counted(
        "ingress_announced_records",
        "Records that the leader announced, before it handed them to its server.",
        "ingress_announced",
    ),
    _counted("ingress_settled_offsets", "Offsets that were settled.", "ingress_settled"),
    _counted("ingress_held_records", "Records settled in wheels.", "ingress_held"),
    _counted(
        "ingress_forwarded_records",
        "Records that were due when they were read, and settled in their topics.",
        "ingress_forwarded",
    ),
    _counted(
        "ingress_dead_letters",
        "Records settled as dead letters.",
        "ingress_dead_letters",
    ),
    _counted(
        "ingress_deleted_offsets",
        "Offsets whose records Kafka had deleted before they were read.",
        "ingress_deleted",
    ),
    _counted(
        "ingress_cut_off_offsets",
        "Announced offsets that went with the end of their partition: accepted, or lost.",
        "ingress_cut_off",
    ),
)

CLEANER_METRICS: tuple[Spec, ...] = (
    gauges(
        "role",
        "1 for what the node's cleaner does now; all 0 while it is silent.",
        ("role",),
        _role,
    ),
    gauge(
        "leader_epoch",
        "Offset in the control topic at which the leader's term began, as far as this node read it."
        " By how much it grows says nothing: elections are counted by themselves.",
        _of(lambda status: None if status.leader is None else status.leader.epoch),
    ),
    _counted("elections", "Times that this node began to lead.", "elections"),
    _counted("forwarded_messages", "Messages committed to their topics by this node.", "forwarded"),
    _counted(
        "deferred_messages",
        "Messages whose topic took nothing, and that come back through the ingress topic.",
        "deferred",
    ),
    _counted("cancelled_messages", "Messages cancelled by their callers.", "cancelled"),
    _counted("duplicate_messages", "Retries dropped at their due.", "duplicates"),
    _counted(
        "asked_halves",
        "Half messages that nobody committed in time: letters to their groups.",
        "halves_asked",
    ),
    _counted(
        "passed_on_halves",
        "Committed half messages that are due later: they went to the ingress topic.",
        "halves_passed_on",
    ),
    counters(
        "answered_halves",
        "What groups have answered about them; undecided: a dead letter of the group.",
        ("answer",),
        _each(_answered),
    ),
    gauges(
        "unanswered_halves",
        "Letters about half messages that a group has not read yet, as the leader sees it; of at"
        " most 20 groups.",
        ("group",),
        _unanswered(lambda each, _: each.letters),
    ),
    gauges(
        "unanswered_halves_age_seconds",
        "How long the first of them has waited: without a checker of the group, nobody answers.",
        ("group",),
        _unanswered(lambda each, now_ms: max(0, now_ms - each.oldest_ms) / 1e3),
    ),
    counters(
        "topic_forwarded_messages",
        "Forwarded messages by topic.",
        ("topic",),
        _each(lambda status: by_label(status.forwarded_by_topic)),
    ),
    counters(
        "dead_letters",
        "Messages committed to the dead-letter topic.",
        ("reason",),
        _each(lambda status: by_label(status.dead_by_reason)),
    ),
    counters(
        "topic_dead_letters",
        "Dead letters by the topic that the messages were to go to.",
        ("topic",),
        _each(lambda status: by_label(status.dead_by_topic)),
    ),
    _counted("lost_frames", "Frames reported as lost: no node could read them.", "lost_frames"),
    _counted("commits", "Transactions committed, idle ones too.", "transactions"),
    _counted(
        "failed_commits",
        "Transactions that ended in any other way, or are not known to be committed.",
        "failed_transactions",
    ),
    counter(
        "kafka_throttled_seconds",
        "For how long Kafka has throttled the leader, for a quota of its own.",
        _of(lambda status: status.counters.get("throttled_ms", 0) / 1e3),
    ),
    histogram(
        "commit_duration_seconds",
        "Time from the begin of a committed transaction to the answer to its commit.",
        _of(lambda status: status.commit_times),
    ),
    histogram(
        "lateness_seconds",
        "Of forwarded messages: from due to the answer to the commit, by the leader's clock.",
        _of(lambda status: status.lateness),
    ),
    gauge(
        "overdue_seconds",
        "How late the oldest message is that is due and not done; 0: none is. Where what is due"
        " cannot be read, how late it may be.",
        _overdue_s,
    ),
    gauge(
        "progress_timestamp_seconds",
        "Everything due up to this Unix time is done, as committed.",
        _of(lambda status: None if status.progress is None else status.progress.due_ms / 1e3),
    ),
    gauge(
        "floor_timestamp_seconds",
        "Everything due before this Unix time is done and may be deleted, as committed.",
        _of(lambda status: status.floor),
    ),
    gauge(
        "floor_behind_seconds",
        "How far the floor is behind what forwarding has finished, late window included.",
        _behind_s,
    ),
    gauges(
        "registered_wheels",
        "Wheels of all nodes that forwarding knows of and is not done with.",
        ("state",),
        _each(_registered),
    ),
    gauge(
        "kafka_error",
        "1 while something keeps the cleaner from leading or forwarding, else 0.",
        _of(lambda status: float(status.kafka_error is not None)),
    ),
    gauge(
        "kafka_warnings",
        "Why the control topic is in danger, and why half messages are refused: how many reasons.",
        _of(lambda status: len(status.kafka_warnings)),
    ),
    gauge(
        "unavailable_topics",
        "Topics that take nothing now: their messages are deferred, or dead-lettered; 100 at most.",
        _of(lambda status: len(status.unavailable)),
    ),
    gauge(
        "unreadable_frames",
        "Frames that forwarding waits for.",
        _of(lambda status: len(status.unreadable)),
    ),
    *_INGRESS,
)
