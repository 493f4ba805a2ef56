"""Records that Kafka has deleted: whether messages were among them is unknown.

If a partition begins above offset 0, records before that were deleted. It is written in the order
of forwarding, so what is gone was forwarded no later than the first of our records that is left. A
message is forwarded at its due or later: one due up to then may be among the deleted ones,
whichever partition its key would have chosen. The same holds for the outcomes topic.

| the message | may be deleted if it was due up to the first record left |
|---|---|
| has no copy, and no outcome | in any cut partition of its topic, or of the outcomes topic |
| has a copy, and an acceptance without an outcome | of the outcomes topic |

A compacted topic keeps the newest record of each key: any other may be deleted, whatever its time.

Asked for only when something is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from delaywheel_audit.kafka.plan import Plan, Range
from delaywheel_audit.matching.matching import forwarded_ms, is_ours
from delaywheel_audit.matching.terms import Terms
from delaywheel_audit.sources.ledger_files import END_MS, moment

Place = tuple[str, int]

_NO_TIME_MS = 253_402_300_800_000
"""The year 10,000: a forged header may say more."""

_FIRST_LOOK = 10_000
"""Offsets of each partition that are examined first: with others' records between, more."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """Up to when forwarded messages may be deleted, in Unix ms; `END_MS`: all of them.

    Attributes:
        topics: Topics whose begin is missing.
        outcomes_ms: For the outcomes topic; None: nothing is missing.
        compacted: Topics that are compacted; they may be among the others, too.
    """

    topics: Mapping[str, int] = field(default_factory=dict)
    outcomes_ms: int | None = None
    compacted: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        """Whether anything may be deleted."""
        return bool(self.topics or self.compacted) or self.outcomes_ms is not None


def deleted(
    plan: Plan, outcomes: str, compacted: Collection[str], read: Callable[[Plan], DataFrame]
) -> Deleted:
    """Returns how far some topics' records are deleted.

    Args:
        plan: All that is left of them.
        outcomes: The name of the outcomes topic among them.
        compacted: Those of them that are compacted.
        read: Reads the records of a plan.
    """
    cut = {(t.name, r.partition): r for t in plan.topics for r in t.ranges if r.start > 0}
    found: dict[Place, int] = {}
    for length in (_FIRST_LOOK, None):
        unknown = {place: r for place, r in cut.items() if place not in found}
        wanted = _only(plan, unknown, length)
        if any(r.start < r.end for topic in wanted.topics for r in topic.ranges):
            found |= _firsts(read(wanted), outcomes)
    by_topic: dict[str, int] = {}
    for name, partition in cut:
        at_ms = found.get((name, partition), END_MS)
        by_topic[name] = max(at_ms, by_topic.get(name, 0))
    outcomes_ms = END_MS if outcomes in compacted else by_topic.get(outcomes)
    topics = {name: at_ms for name, at_ms in by_topic.items() if name != outcomes}
    return Deleted(topics, outcomes_ms, frozenset(compacted) - {outcomes})


def _only(plan: Plan, places: Mapping[Place, Range], length: int | None) -> Plan:
    """Returns the beginnings of some partitions only."""

    def of(topic: str, one: Range) -> Range:
        if (topic, one.partition) not in places:
            return replace(one, start=one.end)
        return one if length is None else replace(one, end=min(one.end, one.start + length))

    return Plan(
        tuple(replace(t, ranges=tuple(of(t.name, r) for r in t.ranges)) for t in plan.topics)
    )


def _firsts(records: DataFrame, outcomes: str) -> dict[Place, int]:
    """Returns when the first remaining record of ours was written, by partition."""
    ended = records.where(F.col("topic") == outcomes).withColumn("forwarded_ms", forwarded_ms())
    columns = ["topic", "partition", "offset", "forwarded_ms"]
    ours = is_ours(records.where(F.col("topic") != outcomes)).select(*columns)
    rows = ours.unionByName(ended.select(*columns)).groupBy("topic", "partition")
    first = rows.agg(F.min_by("forwarded_ms", "offset").alias("at_ms")).collect()
    known = [row for row in first if row["at_ms"] is not None]
    return {(row["topic"], row["partition"]): row["at_ms"] for row in known}


def with_deleted(fated: DataFrame, deleted: Deleted, terms: Terms) -> DataFrame:
    """Marks missing messages as not verifiable if their records may be deleted."""
    outcomes_ms = -1 if deleted.outcomes_ms is None else deleted.outcomes_ms
    rows = [
        (topic, at_ms, _deleted_text(topic, at_ms))
        for topic, at_ms in sorted(deleted.topics.items())
        if topic not in deleted.compacted
    ] + [
        (topic, END_MS, f"{topic} is compacted: a later record of its key may have replaced it")
        for topic in sorted(deleted.compacted)
    ]
    schema = "of_topic string, topic_ms long, topic_text string"
    topics = fated.sparkSession.createDataFrame(rows, schema)
    due, missing = F.col("due_ms") - terms.clock_tolerance_ms, F.col("missing")
    in_topic = F.coalesce((F.col("forwarded") == 0) & (due <= F.col("topic_ms")), F.lit(col=False))
    in_outcomes = due <= F.lit(outcomes_ms).cast("long")
    is_deleted = (missing > 0) & (in_topic | in_outcomes)
    text = F.when(in_topic, F.col("topic_text")).otherwise(
        _deleted_text("the outcomes topic", outcomes_ms)
    )
    return (
        fated.join(F.broadcast(topics), F.col("row.topic") == F.col("of_topic"), "left")
        .withColumns(  # at once: each is of what was missing before
            {
                "not_verifiable": F.when(is_deleted, missing).otherwise(0).cast("long"),
                "missing": F.when(is_deleted, 0).otherwise(missing).cast("long"),
                "deleted_text": F.when(is_deleted, text),
            }
        )
        .drop("of_topic", "topic_ms", "topic_text")
    )


def _deleted_text(place: str, at_ms: int) -> str:
    if at_ms >= _NO_TIME_MS:
        return f"{place} was recreated since: all that was forwarded there is deleted"
    return f"{place}: what was forwarded before {moment(max(0, at_ms))} may be deleted"
