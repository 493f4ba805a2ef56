"""The rows that are judged: what programs counted, beside what the books have, minute by minute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from delaywheel.trace.counts import BUCKET_MS
from delaywheel_audit.ends.counts import Reading
from delaywheel_audit.ends.hashing import sums, with_hash
from delaywheel_audit.ends.judging import ROW, SUMS

Positions = Mapping[tuple[str, str], Mapping[int, int]]
"""By topic and group: the next offset of each partition."""

_NAMES: Final = tuple(part.split()[0] for part in ROW.split(", "))
_READINGS: Final = (
    "topic string, group string, since_ms long, heard_ms long, has_lost boolean,"
    " killed_from_ms long, killed_to_ms long"
)


@dataclass(frozen=True, slots=True)
class Known:
    """What holds for all minutes.

    Attributes:
        from_ms: The first minute that is asked for; only whole ones are.
        to_ms: Behind the last one.
        sent_ms: Up to here all that is due was accepted, and is published.
        forwarded_ms: Up to here all of it is done.
        has_gaps: Whether the ledger lacks what may be of any of them.
        topics: None named: all.
    """

    from_ms: int
    to_ms: int
    sent_ms: int
    forwarded_ms: int
    has_gaps: bool
    topics: Sequence[str] = ()

    @classmethod
    def whole_minutes(cls, from_ms: int, to_ms: int) -> tuple[int, int]:
        """Returns the range of the minutes that lie in a range as a whole."""
        return -(-from_ms // BUCKET_MS) * BUCKET_MS, to_ms // BUCKET_MS * BUCKET_MS

    def holds(self, cells: DataFrame) -> DataFrame:
        """Returns those of a minute and a topic that are asked for."""
        wanted = cells.where(F.col("bucket_ms").between(self.from_ms, self.to_ms - BUCKET_MS))
        return wanted.where(F.col("topic").isin(*self.topics)) if self.topics else wanted


def by_minute(messages: DataFrame) -> DataFrame:
    """Returns the books' messages, judged, with the minutes of their dues."""
    minute = F.col("due_ms") - F.col("due_ms") % F.lit(BUCKET_MS)
    known = messages.where("due_ms >= 0").withColumn("bucket_ms", minute)
    known = known.withColumn("topic", F.coalesce("row.topic", "copy.topic"))
    is_read = (F.col("copies") > 0) & ~F.col("malformed")
    return known.withColumn("copies", F.when(is_read, F.col("copies")).otherwise(0))


def rows_of(
    messages: DataFrame,
    cells: DataFrame,
    readings: Sequence[Reading],
    positions: Positions,
    known: Known,
) -> DataFrame:
    """Returns the rows to judge.

    Args:
        messages: See `by_minute`.
        cells: See `counts.cells_of`.
        readings: The groups that count.
        positions: How far they have come.
        known: What holds for all minutes.
    """
    hashed = with_hash(messages).where("hash is not null")
    books = known.holds(_books(hashed))
    told = known.holds(_told(cells))
    sent = _sent(books, told.where("direction = 'sent'"), known)
    groups = messages.sparkSession.createDataFrame(
        [
            (
                *(one.topic, one.group, one.since_ms, one.heard_ms, one.has_lost),
                *(one.killed_from_ms, one.killed_to_ms),
            )
            for one in readings
        ],
        _READINGS,
    )
    passed = _passed(known.holds(_places(hashed)), groups, positions)
    consumed = told.where("direction = 'consumed'")
    return sent.unionByName(_consumed(books, consumed, groups, passed, known))


def _books(hashed: DataFrame) -> DataFrame:
    """Returns what the books have of each minute."""
    return hashed.groupBy("topic", "bucket_ms").agg(
        F.sum("rows").alias("rows"),
        F.sum("acknowledged").alias("accepted"),
        *sums("rows", "rows"),
        F.sum("copies").alias("copies"),
        *sums("copies", "copies"),
        F.sum(F.col("unpublished") + F.col("unbooked")).alias("unpublished"),
        F.sum(F.col("missing") + F.col("not_verifiable")).alias("missing"),
    )


def _told(cells: DataFrame) -> DataFrame:
    """Returns what programs have counted of each minute."""
    xors = [F.bit_xor(name).alias(f"told_{name}") for name in SUMS[2:]]
    added = [F.sum(name).alias(f"told_{name}") for name in SUMS[:2]]
    counts = [F.sum(name).alias(name) for name in ("messages", "refused", "unknown")]
    return (
        cells.where("direction in ('sent', 'consumed')")
        .groupBy("direction", "topic", "group", "bucket_ms")
        .agg(*counts, *added, *xors)
        .withColumnRenamed("messages", "told")
    )


def _sent(books: DataFrame, told: DataFrame, known: Known) -> DataFrame:
    both = told.drop("direction", "group").join(books, ["topic", "bucket_ms"], "full_outer")
    is_published = F.coalesce("unpublished", F.lit(0)) == 0
    return _row(
        both,
        "rows",
        direction=F.lit("sent"),
        group=F.lit(None),
        is_closed=F.col("bucket_ms") + BUCKET_MS <= known.sent_ms,
        is_proven=is_published & F.lit(not known.has_gaps),
        is_counted=F.lit(col=True),
        is_excused=F.lit(col=False),
    )


def _consumed(
    books: DataFrame, told: DataFrame, groups: DataFrame, passed: DataFrame, known: Known
) -> DataFrame:
    key = ["topic", "group", "bucket_ms"]
    forwarded = books.join(F.broadcast(groups.select("topic", "group")), "topic")
    both = told.drop("direction").join(forwarded, key, "full_outer")
    both = both.where("told > 0 or copies > 0").join(F.broadcast(groups), ["topic", "group"])
    both = both.join(passed, key, "left")
    begin, end = F.col("bucket_ms"), F.col("bucket_ms") + BUCKET_MS
    is_heard = (begin >= F.col("since_ms")) & (begin <= F.col("heard_ms"))
    is_excused = (begin >= F.col("killed_from_ms")) & (begin <= F.col("killed_to_ms"))
    # Of a minute without any copy the books know nothing: another cluster's, perhaps.
    is_known = (F.coalesce("copies", F.lit(0)) > 0) & (F.coalesce("missing", F.lit(0)) == 0)
    return _row(
        both,
        "copies",
        direction=F.lit("consumed"),
        group=F.col("group"),
        is_closed=(end <= known.forwarded_ms) & F.coalesce("has_passed", F.lit(col=True)),
        is_proven=is_known,
        is_counted=is_heard & ~F.col("has_lost"),
        is_excused=is_excused,
    )


def _row(both: DataFrame, witnessed: str, **values: Column) -> DataFrame:
    """Returns the columns of a row."""
    own = {
        **{name: F.coalesce(name, F.lit(0)) for name in ("told", "refused", "unknown", "accepted")},
        "witnessed": F.coalesce(witnessed, F.lit(0)),
        "forwarded": F.coalesce("copies", F.lit(0)),
        "topic": F.col("topic"),
        "bucket_ms": F.col("bucket_ms"),
        **{name: F.coalesce(value, F.lit(col=False)) if name[:3] == "is_" else value
           for name, value in values.items()},
    }  # fmt: skip
    sides = {"told": "told", "witnessed": witnessed}
    halves = [
        F.coalesce(f"{name}_{half}", F.lit(0)).cast("long").alias(f"{side}_{half}")
        for side, name in sides.items()
        for half in SUMS
    ]
    types = dict(part.split() for part in ROW.split(", "))
    columns = [own[name].cast(types[name]).alias(name) for name in _NAMES]
    return both.select(*columns, *halves)


def _places(hashed: DataFrame) -> DataFrame:
    """Returns the last copy in each partition that is of a minute."""
    copies = hashed.where("copies > 0").withColumn("topic", F.col("copy.topic"))
    both = F.explode(F.array("copy", "last_copy")).alias("at")
    return (
        copies.select("topic", "bucket_ms", both)
        .groupBy("topic", "bucket_ms", F.col("at.partition").alias("partition"))
        .agg(F.max("at.offset").alias("offset"))
    )


def _passed(places: DataFrame, groups: DataFrame, positions: Positions) -> DataFrame:
    """Returns of which minutes a group has passed every copy."""
    next_offsets = places.sparkSession.createDataFrame(
        [
            (topic, group, partition, offset)
            for (topic, group), of in positions.items()
            for partition, offset in of.items()
        ],
        "topic string, group string, partition int, next long",
    )
    has_passed = F.coalesce(F.col("next") > F.col("offset"), F.lit(col=False))
    return (
        places.join(F.broadcast(groups.select("topic", "group")), "topic")
        .join(F.broadcast(next_offsets), ["topic", "group", "partition"], "left")
        .groupBy("topic", "group", "bucket_ms")
        .agg(F.min(has_passed).alias("has_passed"))
    )
