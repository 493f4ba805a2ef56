"""Dead letters, each with its reason and place."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from delaywheel_audit.matching.matching import KEY, forwarded_ms
from delaywheel_audit.matching.tables import finding


def letter_findings(judged: DataFrame, records: DataFrame) -> DataFrame:
    """Returns a row for each dead letter listed in the outcomes."""
    letters = (
        records.where("dw_id is not null and dw_due_ms is not null")
        .withColumn("forwarded_ms", forwarded_ms())
        .select(
            _header("dw-dead-topic").alias("topic"),
            F.col("dw_id").alias("id"),
            F.col("dw_due_ms").alias("due_ms"),
            F.struct(
                "offset",
                "partition",
                "topic",
                "forwarded_ms",
                F.col("dw_wheel").alias("wheel"),
                F.col("dw_accepted_ms").alias("accepted_ms"),
                F.lit(None).cast("long").alias("committed_ms"),
                _header("dw-dead-partition").alias("wanted_partition"),
                _header("dw-dead-detail").alias("detail_header"),
            ).alias("letter"),
        )
        .groupBy(*KEY)
        .agg(F.max("letter").alias("letter"))
    )
    dead = judged.where("dead > 0").join(letters, list(KEY), "left")
    row = F.struct("dead_at.*", F.col("row.topic").alias("topic"))
    found = finding(F.lit(col=True), "dead_letter", _detail(), copy="letter", row=row)
    return dead.select(found.alias("found")).select("found.*")


def _header(name: str) -> Column:
    """Returns the last header of that name, as text."""
    values = F.filter("headers", lambda header: header["name"] == name)
    return F.try_element_at(values, F.lit(-1))["value"].cast("string")


def _detail() -> Column:
    letter = F.col("letter")
    place = F.format_string(
        "in %s [%d] at offset %d", letter["topic"], letter["partition"], letter["offset"]
    )
    gone = F.lit("its letter is not in the dead-letter topic (any more)")
    return F.concat_ws(
        "; ",
        F.col("dead_at.reason"),
        F.when(letter.isNotNull(), place).otherwise(gone),
        F.concat(F.lit("for partition "), letter["wanted_partition"]),
        letter["detail_header"],
    )
