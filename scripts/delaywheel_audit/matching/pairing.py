"""Pairs missing messages with stray records, which are often the same message, altered.

Done only when messages are missing, since it reads Kafka a second time: all records, whatever
their time, for the missing ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from delaywheel_audit.matching.matching import KEY, copy_struct, is_ours

MAX_SOUGHT = 100_000
"""More missing messages than this are no matter of single records: a topic is gone."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs that were found.

    Attributes:
        found: Topic, id, due_ms of a missing message, and the copy that is it.
        used: Topic, id, due_ms of records reported as unexpected that are such a copy.
    """

    found: DataFrame
    used: DataFrame


def pair(judged: DataFrame, kafka: DataFrame, ledger: DataFrame) -> Pairs:
    """Searches all of Kafka's records once for the missing messages.

    Args:
        judged: The messages with their fates.
        kafka: All records there are: also those of times that were not asked for.
        ledger: Its rows, also of other times: an id may be accepted for several dues.
    """
    missing = _at_hand(
        judged.where("missing > 0 and copies = 0").select(
            "id",
            F.col("topic").alias("wanted_topic"),
            F.col("due_ms").alias("wanted_due_ms"),
            "row",
            "last_row",
        )
    )
    others = _at_hand(_others(judged, ledger, missing))
    taken = others.where("not is_doubtful").drop("is_doubtful")
    doubtful = others.where("is_doubtful")
    # By its id; of a record without one, by all else that names an acceptance.
    sought = missing.withColumn(
        "key",
        F.explode(
            F.array("id", _place("wanted_due_ms", "row.accepted_at_ms", "row.wheel")),
        ),
    )
    records = (
        is_ours(kafka)
        .select(
            "topic", "dw_id", F.col("id").alias("copy_id"), "due_ms", copy_struct().alias("copy")
        )
        .withColumn(
            "key", F.coalesce("dw_id", _place("copy.due_ms", "copy.accepted_ms", "copy.wheel"))
        )
    )
    is_same = _is_of("copy", "row") | _is_of("copy", "last_row")
    # With another due, or in another topic, it must be the same acceptance.
    is_own = (F.col("due_ms") == F.col("wanted_due_ms")) & F.col("is_doubtful").isNull()
    is_own = is_own & (F.col("topic") == F.col("wanted_topic"))
    candidates = (
        records.join(F.broadcast(sought), "key")
        .join(F.broadcast(taken), list(KEY), "left_anti")
        .join(F.broadcast(doubtful), list(KEY), "left")
        .where(F.col("dw_id").isNull() | is_own | is_same)
        .select(
            *("id", "wanted_topic", "wanted_due_ms", "copy", "copy_id"),
            F.col("due_ms").alias("copy_due_ms"),
        )
    )
    return _one_to_one(candidates)


def _others(judged: DataFrame, ledger: DataFrame, missing: DataFrame) -> DataFrame:
    """Returns other messages with ids of missing ones, whose copies do not count.

    What some acceptance has sent is no other message changed. What may be sent by one that the
    ledger does not show (`is_doubtful`) is so only where it identifies itself as the missing
    one.
    """
    has_rows = F.col("rows") > 0
    counted = judged.where((F.col("copies") > 0) & (has_rows | F.col("elsewhere")))
    counted = counted.select(*KEY, (~has_rows).alias("is_doubtful"))
    own = missing.select(
        "id", F.col("wanted_topic").alias("topic"), F.col("wanted_due_ms").alias("due_ms")
    )
    siblings = ledger.select(*KEY, F.lit(col=False).alias("is_doubtful")).join(
        F.broadcast(own), list(KEY), "left_anti"
    )
    ids = missing.select("id").distinct()
    return counted.unionByName(siblings).join(F.broadcast(ids), "id", "left_semi").distinct()


def _at_hand(few: DataFrame) -> DataFrame:
    """Persists the rows on the executors, instead of recomputing them.

    Each later step plans the earlier ones again: with few rows that costs more than the rows.
    """
    return few.localCheckpoint()


def _place(due: str, accepted: str, wheel: str) -> Column:
    """Identifies an acceptance, besides its id; null where a part is null."""
    parts = [F.lit("of"), F.col(due).cast("string"), F.col(accepted).cast("string"), F.col(wheel)]
    between = [part for one in parts for part in (one, F.lit("/"))]
    return F.concat(*between).cast("binary")


def _is_of(copy: str, row: str) -> Column:
    """Whether a copy's own headers name this acceptance."""
    wheel = F.col(f"{copy}.wheel").eqNullSafe(F.col(f"{row}.wheel"))
    return wheel & F.col(f"{copy}.accepted_ms").eqNullSafe(F.col(f"{row}.accepted_at_ms"))


def _one_to_one(candidates: DataFrame) -> Pairs:
    """Pairs each missing message with one copy, and each copy with one message."""
    is_exact = F.col("copy_due_ms") == F.col("wanted_due_ms")
    exact_first = ~(is_exact & (F.col("copy.topic") == F.col("wanted_topic")))
    of_message = Window.partitionBy("wanted_topic", "id", "wanted_due_ms").orderBy(
        exact_first, "copy"
    )
    of_copy = Window.partitionBy("copy.topic", "copy.partition", "copy.offset").orderBy(
        exact_first, "wanted_due_ms", "id", "wanted_topic"
    )
    chosen = (
        candidates.withColumn("of_copy", F.row_number().over(of_copy))
        .where("of_copy = 1")
        .withColumn("of_message", F.row_number().over(of_message))
        .where("of_message = 1")
    )
    chosen = _at_hand(chosen.drop("of_copy", "of_message"))
    return Pairs(
        chosen.select(
            "id",
            F.col("wanted_topic").alias("topic"),
            F.col("wanted_due_ms").alias("due_ms"),
            F.col("copy").alias("found_copy"),
            (F.col("copy_id") != F.col("id")).alias("is_nameless"),
        ),
        chosen.select(
            F.col("copy.topic").alias("topic"),
            F.col("copy_id").alias("id"),
            F.col("copy_due_ms").alias("due_ms"),
        ).distinct(),
    )


def with_pairs(judged: DataFrame, pairs: Pairs) -> DataFrame:
    """Turns missing messages that were found into forwarded ones, and counts again."""
    used = pairs.used.withColumn("is_used", F.lit(col=True))
    found = F.col("found_copy").isNotNull()
    is_same = _is_of("found_copy", "row") | _is_of("found_copy", "last_row")
    same_due = F.col("found_copy.due_ms").eqNullSafe(F.col("due_ms"))
    return (
        judged.join(F.broadcast(pairs.found), list(KEY), "left")
        .join(F.broadcast(used), list(KEY), "left")
        # A record that was reported as unexpected is now reported with the message that it is.
        .where(~((F.col("rows") == 0) & F.coalesce("is_used", F.lit(col=False))))
        .withColumns(
            {
                "matches": F.when(found, is_same & same_due).otherwise(F.col("matches")),
                "copies": F.when(found, 1).otherwise(F.col("copies")).cast("long"),
                "copy": F.coalesce("found_copy", "copy"),
                "last_copy": F.coalesce("found_copy", "last_copy"),
                "forwarded": F.when(found, 1).otherwise(F.col("forwarded")).cast("long"),
                "missing": F.when(found, F.col("missing") - 1).otherwise(F.col("missing")),
                "malformed": F.coalesce("is_nameless", "malformed"),
            }
        )
        .drop("found_copy", "is_used", "is_nameless")
    )
