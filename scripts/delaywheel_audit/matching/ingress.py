"""Compares records of ingress topics with their outcomes.

A record that a wheel took is in the ledger, like any other acceptance. A record that was due when
it was read was forwarded directly, and only Kafka shows it: the delivered message names `ingress`
as its wheel. So, among the settled records that ask for a message,

- a directly forwarded one counts as accepted once, when it was forwarded;
- one without a trace (no row of the ledger, no copy, no outcome), although the floor has passed
  it, counts as accepted as well, and is found missing. Below the floor everything is published.

Such an acceptance has the wheel `ingress`, and the offset of its record as its seq. A copy from
`ingress` without a record that asks for it is looked for among all records of ingress topics:
those of before an outage are old. If there is none, the copy is unexpected, unless Kafka has
deleted records since; an ingress topic that begins later than the copy was accepted may have been
deleted and made anew, so it is taken at its word as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from delaywheel_audit.matching.matching import INGRESS, KEY, in_range, is_ours
from delaywheel_audit.matching.terms import Facts, Terms
from delaywheel_audit.requests import COLUMNS, SCHEMA, requests
from delaywheel_audit.sources.ledger_files import END_MS
from delaywheel_replica.core.protocol.control import IngressPartition, IngressRecord


@dataclass(frozen=True, slots=True)
class Asked:
    """The requests in settled records of ingress topics.

    Attributes:
        asked: `SCHEMA`.
        is_used: Whether there are ingress topics.
        since_ms: From when on Kafka has every record: what was accepted before is believed.
        is_whole: It was read from the beginning.
    """

    asked: DataFrame
    is_used: bool = False
    since_ms: int = END_MS
    is_whole: bool = False

    def __bool__(self) -> bool:
        return self.is_used


def ingress_requests(
    records: DataFrame, settled: Mapping[IngressPartition, IngressRecord]
) -> DataFrame:
    """Returns the requests in settled records: `SCHEMA`.

    Args:
        records: Records of the ingress topics.
        settled: How far each partition is settled.
    """
    ends = {at: (record.next_offset, dict(record.levels_ms)) for at, record in settled.items()}
    rows = records.select(*COLUMNS).rdd.mapPartitions(partial(requests, ends))
    return records.sparkSession.createDataFrame(rows, SCHEMA)


def are_all_asked(records: Asked, kafka: DataFrame, terms: Terms) -> bool:
    """Whether each message of the range that went out directly has a record that asks for it."""
    wanted = in_range(terms, F.col("due_ms"), F.col("went.dw_accepted_ms"))
    unasked = _went_directly(is_ours(kafka)).where(wanted)
    return unasked.join(records.asked, list(KEY), "left_anti").isEmpty()


def _went_directly(ours: DataFrame) -> DataFrame:
    copies = ours.where(F.col("dw_wheel") == INGRESS).groupBy(*KEY)
    return copies.agg(F.min(F.struct("dw_accepted_ms")).alias("went"))


def with_ingress(
    ledger: DataFrame,
    records: Asked,
    kafka: DataFrame,
    outcomes: DataFrame,
    terms: Terms,
    facts: Facts,
) -> DataFrame:
    """Adds to the ledger the ingress messages that were accepted and were in no wheel.

    Args:
        ledger: Its rows.
        records: The requests in settled records.
        kafka: Records of the topics.
        outcomes: Records of the outcomes topic.
        terms: The parameters.
        facts: What was known before Kafka was read.
    """
    first = F.min(F.struct("offset", "origin", "sent_ms")).alias("asked")
    asked = records.asked.groupBy(*KEY).agg(first)
    ours, taken = is_ours(kafka), ledger
    if terms.by == "due":  # a ledger's files hold dues of all the span
        wanted = in_range(terms, F.col("due_ms"), F.col("due_ms"))
        asked, ours, taken = asked.where(wanted), ours.where(wanted), taken.where(wanted)
    is_believed = F.col("asked").isNotNull() | (F.col("went.dw_accepted_ms") < records.since_ms)
    direct = (
        _went_directly(ours)
        .join(asked, list(KEY), "left")
        .where(is_believed)
        .join(taken.select(*KEY).distinct(), list(KEY), "left_anti")
    )
    rows = direct.select(
        *KEY,
        F.col("went.dw_accepted_ms").alias("accepted_at_ms"),
        F.lit(INGRESS).alias("wheel"),
        F.coalesce("asked.offset", F.lit(0)).alias("seq"),
    )
    known = ledger.unionByName(rows)
    if terms.by != "due":  # a record that left no trace has no known time of acceptance
        return known
    traces = [part.select(*KEY) for part in (taken, ours, outcomes.where("id is not null"))]
    seen = traces[0].unionByName(traces[1]).unionByName(traces[2]).distinct()
    dead = outcomes.where("origin is not null").select("origin").distinct()
    gone = (
        asked.where(F.col("due_ms") < facts.done.floor * 1000)
        .join(seen, list(KEY), "left_anti")
        .withColumn("origin", F.col("asked.origin"))
        .join(dead, "origin", "left_anti")
    )
    return known.unionByName(
        gone.select(
            *KEY,
            F.col("asked.sent_ms").alias("accepted_at_ms"),
            F.lit(INGRESS).alias("wheel"),
            F.col("asked.offset").alias("seq"),
        )
    )
