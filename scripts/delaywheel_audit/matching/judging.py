"""Judges each message: every acceptance gets one fate, every copy in Kafka a reason."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from delaywheel_audit.matching.matching import INGRESS, ended, wheel_table, with_answers
from delaywheel_audit.matching.terms import Facts, Terms

BEFORE_FIRST = -1
BEHIND_LAST = -2
"""Places of a hole that names do not show; otherwise its number in `Facts.holes`."""

_NUMBERS = "node string, last_number long"


def judged(messages: DataFrame, terms: Terms, facts: Facts) -> DataFrame:
    """Returns messages with their fates as counts: the columns of `buckets`, and more."""
    known = _with_strays(_with_match(messages), terms, facts)
    return with_findings(_with_fates(_with_orphans(known, terms)), terms, facts)


def _with_match(messages: DataFrame) -> DataFrame:
    """Marks copies that match an acceptance in the ledger: same wheel, same time."""

    def same(copy: str, row: str) -> Column:
        wheel = F.col(f"{copy}.wheel").eqNullSafe(F.col(f"{row}.wheel"))
        return wheel & F.col(f"{copy}.accepted_ms").eqNullSafe(F.col(f"{row}.accepted_at_ms"))

    pairs = [same(c, r) for c in ("copy", "last_copy") for r in ("row", "last_row")]
    anyone = pairs[0] | pairs[1] | pairs[2] | pairs[3]
    # Of three or more acceptances only two are at hand: the one in between may be it.
    return messages.withColumn(
        "matches", (F.col("rows") > 0) & (F.col("copies") > 0) & (anyone | (F.col("rows") > 2))
    )


def _with_strays(messages: DataFrame, terms: Terms, facts: Facts) -> DataFrame:
    """Explains copies without any row in the ledger.

    `stray` is `unpublished` (the ledger will have it), `gap` (the ledger had it; `gap_at` says
    where it is missing), `unexpected` (it was never accepted) or `unread` (undecided before the
    files of its time are read).
    """
    session = messages.sparkSession
    numbers = session.createDataFrame(sorted(facts.done.numbers.items()), _NUMBERS)
    wheels = wheel_table(messages, facts).select(
        F.col("wheel").alias("copy_wheel"),
        *("first_seq", "from_ms", "to_ms", "complete", "closed", "holes"),
    )
    accepted, wheel = F.col("copy.accepted_ms"), F.col("copy.wheel")
    found = (
        messages.withColumn("copy_wheel", wheel)
        .withColumn("node", F.substring_index(wheel, ".", 1))
        .join(F.broadcast(wheels), "copy_wheel", "left")
        .join(F.broadcast(numbers), "node", "left")
    )
    hole = F.filter("holes", lambda one: accepted.between(one["from_ms"], one["to_ms"]))
    found = found.withColumn("hole_number", F.try_element_at(hole, F.lit(1))["number"])
    found = found.withColumn("stray", _why(terms, facts)).withColumn("gap_at", _gap_place())
    return found.drop(
        *("copy_wheel", "node", "first_seq", "from_ms", "to_ms", "complete", "closed", "holes"),
        *("last_number", "hole_number"),
    )


def _why(terms: Terms, facts: Facts) -> Column:
    done = facts.done
    accepted = F.col("copy.accepted_ms")
    number = F.substring_index(F.col("copy.wheel"), ".", -1).try_cast("long")
    exists = number <= F.coalesce("last_number", F.lit(0))
    fresh = accepted >= facts.began_ms - terms.clock_tolerance_ms
    inside = F.col("first_seq").isNotNull() & (accepted < F.col("to_ms"))
    first_is_there = (accepted >= F.col("from_ms")) | (F.col("first_seq") == 1)
    long_done = F.col("copy.forwarded_ms") < done.due_ms - terms.clock_tolerance_ms
    all_published = F.col("complete") & (F.col("closed") | long_done)
    read_from_ms, read_to_ms = terms.accepted_range()
    is_read = (accepted >= read_from_ms) & (accepted < read_to_ms)
    has_files = accepted.between(F.col("from_ms"), F.col("to_ms"))
    readable = (F.length("id") == 16) & (F.col("due_ms") >= 0)
    readable = readable & accepted.isNotNull() & F.col("copy.wheel").isNotNull()
    return (
        F.when((F.col("rows") > 0) & F.col("matches"), None)
        .when(F.col("copies") == 0, None)
        .when(~readable, "unexpected")
        .when(F.col("copy.wheel") == INGRESS, "unexpected")
        .when(has_files & ~is_read, "unread")
        .when(F.col("hole_number").isNotNull(), "gap")
        .when(~exists, F.when(fresh, "unpublished").otherwise("unexpected"))
        .when(inside, F.when(first_is_there, "unexpected").otherwise("gap"))
        .when(all_published, "unexpected")
        # The floor waits for publication: everything below it was published.
        .when(F.col("due_ms") < done.floor * 1000, "gap")
        .otherwise("unpublished")
    )


def _gap_place() -> Column:
    before = F.col("first_seq").isNotNull() & (F.col("copy.accepted_ms") < F.col("from_ms"))
    outside = F.when(before, BEFORE_FIRST).otherwise(BEHIND_LAST)
    return F.when(F.col("stray") == "gap", F.coalesce("hole_number", outside))


def _with_orphans(known: DataFrame, terms: Terms) -> DataFrame:
    """Marks messages all of whose acceptances were dropped as duplicates, and that never arrived.

    One of them is not believed: it has no outcome, so it is missing. Only by due: there all that
    a duplicate may repeat is in view.
    """
    is_original = (F.col("copies") > 0) | (F.col("ended_elsewhere") > 0)
    orphan = (F.col("rows") > 0) & (F.col("duplicates_dropped") >= F.col("rows")) & ~is_original
    if terms.topics:  # what it repeats may be in a topic that was not asked for
        orphan = orphan & (F.col("differs") == 0)
    if terms.by != "due":
        orphan = F.lit(col=False)
    dropped = F.col("duplicates_dropped") - orphan.cast("long")
    return known.withColumn("orphan", orphan).withColumn("duplicates_dropped", dropped)


def _with_fates(known: DataFrame) -> DataFrame:
    rows, copies = F.col("rows"), F.col("copies")
    rest = F.greatest(rows - ended() - F.col("duplicates_dropped"), F.lit(0))
    # A copy of another acceptance of the same message, which the ledger does not show.
    elsewhere = F.coalesce(F.col("stray").isin("unpublished", "gap"), F.lit(col=False))
    return (
        known.withColumn("elsewhere", elsewhere & (copies > 0))
        .withColumn("forwarded", ((rest > 0) & (copies > 0) & ~F.col("elsewhere")).cast("long"))
        .withColumn("left", rest - F.col("forwarded"))
        .withColumn("lost", F.least("lost_rows", "left"))
        .withColumn("pending", F.least(F.col("open_rows"), F.col("left") - F.col("lost")))
        .withColumn("missing", F.col("left") - F.col("lost") - F.col("pending"))
        .withColumn("not_verifiable", F.lit(0).cast("long"))
        .withColumn("deleted_text", F.lit(None).cast("string"))
        .drop("left")
    )


def with_findings(fated: DataFrame, terms: Terms, facts: Facts) -> DataFrame:
    """Adds counts that depend on the fates."""
    forwarded = F.col("forwarded") > 0
    copies = F.col("copies")
    # A half that its sender committed arrives at once: its due was only the end of its hold.
    due = F.coalesce("copy.committed_ms", "due_ms")
    at = F.col("copy.forwarded_ms")
    tolerance = F.when(F.col("copy.by_broker"), terms.clock_tolerance_ms).otherwise(0)
    # Behind an outcome that ends a message every other acceptance is a duplicate.
    has_ended = ended() + F.col("ended_elsewhere") > 0
    never = (copies > 0) & ~F.col("elsewhere") & (~forwarded | has_ended)
    # Acceptances that the service has ended otherwise, and a copy of it all the same.
    unexpected = F.when(never, F.when(F.col("rows") == 0, copies).otherwise(1)).otherwise(0)
    unexpected = unexpected + F.col("surplus")
    legitimate = forwarded | F.col("elsewhere") | (never & (F.col("rows") > 0))
    same_topic = F.col("copy.topic").eqNullSafe(F.col("row.topic"))
    changed = forwarded & (~F.col("matches") | ~same_topic | F.col("malformed"))
    lateness = F.when(forwarded, at - due)
    # A retry may be accepted after its due.
    expected = F.greatest("due_ms", "last_row.accepted_at_ms") + terms.late_tolerance_ms
    is_overdue = expected < facts.began_ms - terms.clock_tolerance_ms
    return with_answers(fated).withColumns(
        {
            "acknowledged": (F.col("rows") > 0).cast("long"),
            "accepted": F.col("rows"),
            "unexpected": unexpected.cast("long"),
            "duplicated": F.when(legitimate, F.greatest(copies - 1, F.lit(0))).otherwise(0),
            "changed": changed.cast("long"),
            "lateness_ms": lateness,
            "delay_ms": F.when(forwarded, at - F.col("row.accepted_at_ms")),
            "early": F.coalesce(lateness < -tolerance, F.lit(col=False)).cast("long"),
            "late": F.coalesce(lateness > terms.late_tolerance_ms, F.lit(col=False)).cast("long"),
            "overdue": F.when(is_overdue, F.col("pending")).otherwise(0).cast("long"),
            "unpublished": _is_stray("unpublished"),
            "unbooked": _is_stray("gap"),
        }
    )


def _is_stray(why: str) -> Column:
    return F.coalesce(F.col("stray") == why, F.lit(col=False)).cast("long")
