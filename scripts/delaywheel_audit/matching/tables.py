"""The tables that are written: `buckets` and `findings`; docs/AUDIT.md describes their columns."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from delaywheel_audit.matching.judging import BEFORE_FIRST
from delaywheel_audit.matching.matching import PASSED_ON_BY, is_unread, wheel_table
from delaywheel_audit.matching.summary import COUNTS
from delaywheel_audit.matching.terms import Facts, Terms
from delaywheel_audit.sources.ledger_files import Hole

PERCENTILE_ACCURACY = 10_000
"""A percentile is off by at most 1/10,000 of the messages, counted in order."""

FINDING = (
    "kind string, topic string, id string, due_ms long, accepted_at_ms long, wheel string,"
    " seq long, partition int, offset long, forwarded_at_ms long, lateness_ms long, detail string"
)
_PART = "struct<first: long, last: long, from_ms: long, to_ms: long>"
_DROPPED = "this acceptance was dropped, its content is not in Kafka"
_COLUMNS = tuple(part.split()[0] for part in FINDING.split(","))


def topic_of() -> Column:
    """Returns a message's destination or, if it was never accepted, where it is."""
    return F.coalesce("row.topic", "copy.topic")


def buckets(judged: DataFrame, terms: Terms) -> DataFrame:
    """Returns counts, lateness and delay by topic and time."""
    # A due that cannot be read is replaced by when it came.
    due = F.when(F.col("due_ms") >= 0, F.col("due_ms")).otherwise(F.col("copy.forwarded_ms"))
    accepted = F.coalesce("row.accepted_at_ms", "copy.accepted_ms", "copy.forwarded_ms")
    time = due if terms.by == "due" else accepted
    interval = F.lit(terms.interval_ms).cast("long")
    counted = [F.sum(name).cast("long").alias(name) for name in COUNTS]
    return (
        judged.withColumn("bucket_topic", topic_of())
        .withColumn("bucket_ms", time - time % interval)
        .groupBy(F.col("bucket_topic").alias("topic"), "bucket_ms")
        .agg(*counted, *_spread("lateness"), *_spread("delay"))
        .orderBy("bucket_ms", "topic")
    )


def totals(judged: DataFrame) -> DataFrame:
    """Returns one row with all counts, the total lateness, and unread times of acceptance."""
    names = (*COUNTS, "unpublished", "unbooked", "changed")
    unread = F.when(F.col("stray") == "unread", F.col("copy.accepted_ms"))
    return judged.agg(
        *(F.coalesce(F.sum(name), F.lit(0)).cast("long").alias(name) for name in names),
        *_spread("lateness"),
        *_spread("delay"),
        F.min(unread).alias("unread_from_ms"),
        F.max(unread).alias("unread_to_ms"),
    )


def _spread(name: str) -> list[Column]:
    column = F.col(f"{name}_ms")
    return [
        F.percentile_approx(column, 0.5, PERCENTILE_ACCURACY).cast("long").alias(f"{name}_p50_ms"),
        F.percentile_approx(column, 0.99, PERCENTILE_ACCURACY).cast("long").alias(f"{name}_p99_ms"),
        F.max(column).cast("long").alias(f"{name}_max_ms"),
    ]


def gap_counts(judged: DataFrame) -> DataFrame:
    """Returns how many copies in Kafka fall into each hole of the ledger."""
    return (
        judged.where("stray = 'gap'")
        .groupBy("gap_at", F.col("copy.wheel").alias("wheel"))
        .agg(
            F.sum("copies").alias("messages"),
            F.min("copy.accepted_ms").alias("from_ms"),
            F.max("copy.accepted_ms").alias("to_ms"),
        )
    )


def outer_hole(wheel: str, place: int, from_ms: int, to_ms: int) -> Hole:
    """Returns a hole that is visible only through messages in Kafka."""
    where = "before its first" if place == BEFORE_FIRST else "behind its last"
    why = f"messages that were forwarded are in no file of the wheel: one {where} is not there"
    return Hole(wheel, 0, None, from_ms, to_ms, why)


def findings(judged: DataFrame) -> DataFrame:
    """Returns one row for each message and kind of finding, in one scan."""
    lost = F.struct("lost_at.*", F.col("row.topic").alias("topic"))
    differs = F.struct("differs_at.*", topic_of().alias("topic"))
    by = F.substring(F.col("row.wheel"), len(PASSED_ON_BY) + 1, 64)
    passed_on = F.struct("row.accepted_at_ms", by.alias("wheel"), "row.seq", "row.topic")
    is_missing = F.col("missing") > 0
    has_not_returned = F.coalesce(F.col("row.wheel").startswith(PASSED_ON_BY), F.lit(col=False))
    unread = F.lit("its record is unread: wheel and seq are its partition and offset")
    unread = F.when(is_unread(F.col("row.wheel")), unread)
    undelivered = (F.col("lost") > 0) & (F.col("forwarded") == 0) & ~F.col("elsewhere")
    findings = [
        finding(is_missing & ~has_not_returned, "missing", _missing_detail()),
        finding(is_missing & has_not_returned, "not_returned", F.lit(""), row=passed_on),
        finding(F.col("overdue") > 0, "overdue", unread),
        finding(F.col("not_verifiable") > 0, "not_verifiable", F.col("deleted_text")),
        finding(F.col("duplicated") > 0, "duplicated", _copies_detail(), copy="last_copy"),
        finding(F.col("early") > 0, "early", F.lit("")),
        finding(undelivered, "lost", F.col("lost_at.reason"), row=lost),
        finding(F.col("changed") > 0, "changed", _changes()),
        finding(F.col("unexpected") > 0, "unexpected", _unexpected_detail()),
        finding(F.col("late") > 0, "late", F.lit("")),
        finding(F.col("differs") > 0, "content_differs", F.lit(_DROPPED), row=differs),
    ]
    kinds = F.filter(F.array(*findings), lambda one: one.isNotNull())
    return judged.select(F.explode(kinds).alias("found")).select("found.*")


def gap_findings(like: DataFrame, gaps: list[tuple[Hole, int]]) -> DataFrame:
    """Returns the findings for holes, each with its number of messages in Kafka."""
    rows = []
    for hole, messages in gaps:
        seqs = f"seqs {hole.first_seq} to {hole.last_seq}: " if hole.last_seq else ""
        detail = f"{seqs}{hole.why}; {messages} forwarded messages fall into it"
        rows.append(
            ("ledger_gap", None, None, None, hole.from_ms or None, hole.wheel,
             hole.first_seq or None, None, None, None, None, detail)
        )  # fmt: skip
    return like.sparkSession.createDataFrame(rows, FINDING)


def unbooked_losses(outcomes: DataFrame, terms: Terms, facts: Facts) -> DataFrame:
    """Returns a finding for each range of lost frames that no file of the ledger covers.

    Which messages were in them is unknown. Only frames that may be of the requested time count: by
    the seconds that the outcome names or, if it names none, by the times of acceptance around them.
    """
    known = wheel_table(outcomes, facts).withColumnRenamed("wheel", "of_wheel")
    first, last = F.col("seq"), F.col("last_seq")
    is_known = F.col("first_seq").isNotNull()
    end = F.when(F.col("end_seq") > first, F.least(last, "end_seq")).otherwise(last)
    before = F.struct(
        first.alias("first"),
        F.least(end, F.col("first_seq") - 1).alias("last"),
        F.lit(0).cast("long").alias("from_ms"),
        F.col("from_ms").alias("to_ms"),
    )
    behind = F.struct(
        F.when(is_known, F.greatest(first, F.col("last_seq_known") + 1)).otherwise(first),
        end,
        F.coalesce("to_ms", F.lit(0).cast("long")),
        F.lit(facts.began_ms).cast("long"),
    )
    has_slots = F.col("slot") > 0
    may_hold = ~has_slots | (F.col("messages") > 0)
    parts = F.array(F.when(is_known, before), behind.cast(_PART))
    from_ms, to_ms = terms.accepted_range()
    part = F.col("part")
    is_asked = (part["to_ms"] >= from_ms) & (part["from_ms"] < to_ms)
    if terms.by == "due":
        begins, ends = F.col("slot") * 1000, (F.col("last_slot") + 1) * 1000
        is_asked = F.when(has_slots, (ends > terms.start_ms) & (begins < terms.end_ms)).otherwise(
            is_asked
        )
    text = F.format_string(
        "frames %d to %d, which no file of the ledger has; messages in all that were given up with"
        " them, as far as known: %d; %s",
        part["first"],
        part["last"],
        F.col("messages"),
        F.col("reason"),
    )
    values = {"kind": F.lit("lost"), "wheel": F.col("wheel"), "seq": part["first"], "detail": text}
    columns = [values.get(name, F.lit(None)).alias(name) for name in _COLUMNS]
    return (
        outcomes.where("outcome = 'lost'")
        .where(may_hold)
        .join(
            F.broadcast(known.withColumnRenamed("last_seq", "last_seq_known")),
            F.col("wheel") == F.col("of_wheel"),
            "left",
        )
        .withColumn("part", F.explode(F.array_compact(parts)))
        .where(part["first"] <= part["last"])
        .where(is_asked)
        .select(*columns)
        .to(outcomes.sparkSession.createDataFrame([], FINDING).schema)
    )


def finding(
    when: Column, kind: str, detail: Column, *, copy: str = "copy", row: Column | None = None
) -> Column:
    """Returns a row of the table as a struct; null unless the condition holds.

    Args:
        when: The condition.
        kind: Of the finding.
        detail: In words.
        copy: The column with the record in Kafka.
        row: The acceptance; None: the first of the message.
    """
    found, accepted = F.col(copy), F.col("row") if row is None else row
    due = F.when(F.col("due_ms") >= 0, F.col("due_ms"))
    values = {
        "kind": F.lit(kind),
        "topic": topic_of(),
        # `lower` would first have tables of all of Unicode computed: 2 CPU s in each executor.
        "id": F.when(F.length("id") == 16, F.translate(F.hex("id"), "ABCDEF", "abcdef")),
        "due_ms": due,
        "accepted_at_ms": F.coalesce(accepted["accepted_at_ms"], found["accepted_ms"]),
        "wheel": F.coalesce(accepted["wheel"], found["wheel"]),
        "seq": accepted["seq"],
        "partition": found["partition"],
        "offset": found["offset"],
        "forwarded_at_ms": found["forwarded_ms"],
        "lateness_ms": found["forwarded_ms"] - F.coalesce(found["committed_ms"], due),
        "detail": F.coalesce(detail, F.lit("")),
    }
    return F.when(when, F.struct(*(values[name].alias(name) for name in _COLUMNS)))


def _missing_detail() -> Column:
    some = F.format_string("accepted %d times; %d without an outcome", "rows", "missing")
    delivered = F.concat(some, F.lit(", though it was forwarded once"))
    return (
        F.when(F.col("forwarded") > 0, delivered)
        .when(F.col("orphan"), "dropped as a duplicate of nothing that arrived")
        .when(F.col("rows") > 1, some)
        .otherwise("")
    )


def _copies_detail() -> Column:
    first = F.col("copy")
    return F.format_string(
        "%d copies; the first in %s [%d] at offset %d",
        F.col("copies"), first["topic"], first["partition"], first["offset"],
    )  # fmt: skip


def _changes() -> Column:
    """Describes what differs between ledger and Kafka."""

    def differs(name: str, was: Column, found: Column) -> Column:
        shown = F.coalesce(found.cast("string"), F.lit("not readable"))
        text = F.concat(F.lit(f"{name} was "), was.cast("string"), F.lit(", is "), shown)
        return F.when(~was.eqNullSafe(found), text)

    copy, row = F.col("copy"), F.col("row")
    return F.concat_ws(
        "; ",
        differs("due", F.col("due_ms"), copy["due_ms"]),
        differs("topic", row["topic"], copy["topic"]),
        differs("accepted", row["accepted_at_ms"], copy["accepted_ms"]),
        differs("wheel", row["wheel"], copy["wheel"]),
        F.when(F.col("malformed"), "a header of ours cannot be read, or is there twice"),
    )


def _unexpected_detail() -> Column:
    ended = F.format_string(
        "accepted, and ended otherwise (%d cancelled, %d dropped as duplicates, %d dead letters,"
        " %d halves asked about, %d passed on, %d deferred)",
        "cancelled", "duplicates_dropped", "dead", "asked", "committed", "deferred",
    )  # fmt: skip
    unreadable = F.lit("headers of ours that cannot be read")
    wheel = F.concat(F.lit("no such acceptance in the ledger of wheel "), F.col("copy.wheel"))
    return (
        F.when(F.col("surplus") > 0, F.concat(F.lit("more outcomes than acceptances; "), ended))
        .when(F.col("rows") > 0, ended)
        .when((F.length("id") != 16) | (F.col("due_ms") < 0), unreadable)
        .otherwise(F.coalesce(wheel, unreadable))
    )
