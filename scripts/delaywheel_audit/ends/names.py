"""Which messages a finding is about, by the index of the trace: counts alone have no ids."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from delaywheel.trace.counts import BUCKET_MS

_SHOWN: Final = 20
_MINUTE: Final = ("direction", "topic", "group", "bucket_ms")


def events_of(spark: SparkSession, index: str) -> DataFrame:
    """Returns what programs told that they sent and consumed, each event once.

    Batches that were merged are there twice until they are deleted: by their identity they are one.
    """
    files = spark.read.parquet(f"{index.rstrip('/')}/*T*/[bc]-*.parquet")
    is_sent = (F.col("kind") == "sent") & F.col("status").isin("ACCEPTED", "WRITTEN")
    told = files.where(is_sent | (F.col("kind") == "processed")).where("id is not null")
    direction = F.when(F.col("kind") == "sent", "sent").otherwise("consumed")
    return told.dropDuplicates(["kind", "reporter", "number", "row"]).select(
        direction.alias("direction"),
        "topic",
        F.coalesce("group", F.lit("")).alias("group"),
        (F.col("due_ms") - F.col("due_ms") % BUCKET_MS).alias("bucket_ms"),
        "id",
        "due_ms",
    )


def with_names(found: DataFrame, messages: DataFrame, events: DataFrame) -> DataFrame:
    """Adds to rows that are findings `names`: their messages' ids in words, the first of them.

    Args:
        found: The rows.
        messages: Those of the books: `topic`, `bucket_ms`, `id`, `due_ms`, `rows`, `copies`.
        events: See `events_of`.
    """
    minutes = found.select(*_MINUTE).fillna("", ["group"])
    message = [*_MINUTE, "id", "due_ms"]
    witnessed = F.when(F.col("direction") == "sent", F.col("rows")).otherwise(F.col("copies"))
    books = minutes.join(messages, ["topic", "bucket_ms"]).withColumn("witnessed", witnessed)
    told = events.join(minutes, list(_MINUTE)).groupBy(*message).agg(F.count("*").alias("told"))
    both = books.select(*message, "witnessed").join(told, message, "full_outer")
    more = F.coalesce("told", F.lit(0)) - F.coalesce("witnessed", F.lit(0))
    is_asked = (F.col("more") > 0) | ((F.col("more") < 0) & (F.col("direction") == "consumed"))
    named = both.withColumn("more", more).where(is_asked).withColumn("more", F.col("more") > 0)
    place = F.row_number().over(Window.partitionBy(*_MINUTE, "more").orderBy("id", "due_ms"))
    first = named.withColumn("place", place).where(F.col("place") <= _SHOWN)
    lists = first.groupBy(*_MINUTE).agg(
        _ids(F.col("more")).alias("more"), _ids(~F.col("more")).alias("fewer")
    )
    too_many = F.when(F.col("direction") == "sent", "not in the ledger: ").otherwise("too often: ")
    names = F.concat_ws(
        "; ",
        F.when(F.size("more") > 0, F.concat(too_many, F.concat_ws(", ", "more"))),
        F.when(F.size("fewer") > 0, F.concat(F.lit("not: "), F.concat_ws(", ", "fewer"))),
    )
    named = lists.select(*_MINUTE, names.alias("names"))
    keyed = found.withColumn("group", F.coalesce("group", F.lit("")))
    joined = keyed.join(named, list(_MINUTE), "left")
    return joined.withColumn("group", F.when(F.col("group") != "", F.col("group")))


def _ids(when: Column) -> Column:
    text = F.translate(F.hex("id"), "ABCDEF", "abcdef")
    return F.sort_array(F.collect_list(F.when(when, text)))
