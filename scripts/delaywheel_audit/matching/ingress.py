"""Compares records of ingress topics with their outcomes.

A record that a wheel took is in the ledger, like any other acceptance. A record that was due when
it was read was forwarded directly, and only Kafka shows it: the delivered message names `ingress`
as its wheel. So, among the settled records that ask for a message,

- a directly forwarded one counts as accepted once, when it was forwarded;
- one without a trace (no row of the ledger, no copy, no outcome), although the floor has passed
  it, counts as accepted as well, and is found missing. Below the floor everything is published.

Such an acceptance has the wheel `ingress`, and the offset of its record as its seq.

What a leader has deferred, or passed on to the ingress topic at its commit, was accepted, and must
be accepted from there again. Its outcome says until when it is there:

| of its name (topic, id, and that due) | so it |
|---|---|
| there is a row of the ledger, a copy, an outcome, or a dead letter of its record | came back |
| none of these, but a record that is unread | is pending, by that record's place |
| none of these, and the floor has passed it | has not come back |
| none of these | may be accepted, and not published yet: it is not counted |

The second and third count as accepted, since nobody else will count them. A copy from
`ingress` without a record that asks for it is looked for among all records of ingress topics:
those of before an outage are old. If there is none, the copy is unexpected, unless Kafka has
deleted records since; an ingress topic that begins later than the copy was accepted may have been
deleted and made anew, so it is taken at its word as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from delaywheel.ingress import PLACE_ID_PREFIX, id_to_send_again
from delaywheel_audit.matching.matching import INGRESS, KEY, PASSED_ON_BY, in_range, is_ours
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
        unread: The requests in the other records.
        is_held_back: By an open transaction: there may be other unread records.
        since_ms: From when on Kafka has every record: what was accepted before is believed.
        is_whole: It was read from the beginning.
    """

    asked: DataFrame
    unread: DataFrame
    is_used: bool = False
    is_held_back: bool = False
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
    asked = _requested(records, outcomes)
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
        F.coalesce("asked.seq", F.lit(0)).alias("seq"),
    )
    known = ledger.unionByName(rows)
    if terms.by != "due":  # a record that left no trace has no known time of acceptance
        return known
    traces = [part.select(*KEY) for part in (taken, ours, outcomes.where("id is not null"))]
    seen = traces[0].unionByName(traces[1]).unionByName(traces[2]).distinct()
    dead = outcomes.where("origin is not null").select("origin").distinct()
    is_passed = F.col("due_ms") < facts.done.floor * 1000
    has_passed_on = F.col("passed_on").isNotNull()
    is_gone = is_passed & (has_passed_on | F.col("asked").isNotNull())
    if records.is_held_back:
        is_gone = is_passed & F.col("asked").isNotNull()
    is_unread = has_passed_on & F.col("unread").isNotNull()
    traceless = (
        asked.where(is_gone | is_unread)
        .join(seen, list(KEY), "left_anti")
        .withColumn("origin", F.col("asked.origin"))
        .join(dead, "origin", "left_anti")
    )
    at = F.when(is_unread, F.col("unread")).when(has_passed_on, F.col("passed_on"))
    at = F.coalesce(at, F.col("asked"))
    return known.unionByName(
        traceless.select(
            *KEY,
            at["accepted_at_ms"].alias("accepted_at_ms"),
            at["wheel"].alias("wheel"),
            at["seq"].alias("seq"),
        )
    )


def _requested(records: Asked, outcomes: DataFrame) -> DataFrame:
    """Returns a row for each message that records, or leaders, say must come from ingress topics.

    Each column is null, or what stands for an acceptance, if there is no other trace of it:
    `asked` by a settled record, `unread` by one that is not, `passed_on` by an outcome.
    """
    sent_ms = F.col("sent_ms")

    def acceptance(accepted_at_ms: Column, wheel: Column, seq: Column) -> Column:
        at = accepted_at_ms.alias("accepted_at_ms"), wheel.alias("wheel"), seq.alias("seq")
        return F.struct(*at, "origin")

    own, of_place = F.col("id"), len(PLACE_ID_PREFIX)
    again = F.concat(F.lit(id_to_send_again(PLACE_ID_PREFIX)), F.substring(own, of_place + 1, 16))
    is_of_place = F.substring(own, 1, of_place) == F.lit(PLACE_ID_PREFIX)
    again = F.when(is_of_place, again).otherwise(own)
    by = F.concat(F.lit(PASSED_ON_BY), F.coalesce("wheel", F.lit(INGRESS)))
    offset = F.substring_index("origin", "/", -1).try_cast("long")
    rows = {
        "asked": records.asked.select(
            *KEY, acceptance(sent_ms, F.lit(INGRESS), F.col("offset")).alias("asked")
        ),
        "unread": records.unread.select(
            *KEY,
            acceptance(sent_ms, F.substring_index("origin", "/", 2), F.col("offset")).alias(
                "unread"
            ),
        ),
        "passed_on": outcomes.where("until_ms is not null").select(
            "topic",
            again.alias("id"),
            F.col("until_ms").alias("due_ms"),
            acceptance(F.coalesce("accepted_at_ms", "due_ms"), by, F.coalesce("seq", offset)).alias(
                "passed_on"
            ),
        ),
    }
    together, *others = rows.values()
    for each in others:
        together = together.unionByName(each, allowMissingColumns=True)
    return together.groupBy(*KEY).agg(*(F.min(name).alias(name) for name in rows))
