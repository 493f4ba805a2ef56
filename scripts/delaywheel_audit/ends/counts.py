"""What programs have counted, from the topic of counts: cells, and what is known of reporters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from delaywheel.trace.counts import BUCKET_MS
from delaywheel.trace.reporter import COUNT_S, LIVE_S
from delaywheel_audit.ends.hashing import halves

_SCHEMA: Final = (
    "cluster string, reporter string, client string, host string, since_ms long, at_ms long,"
    " lost long, exact boolean, direction string, topic string, `group` string, bucket_ms long,"
    " messages long, refused long, unknown long, sum string, xor string"
)
_MOST: Final = 10**12
"""Messages of a cell that are believed: a program's, of a minute. Sums of them do not overflow."""
_LATEST_MS: Final = 253_402_300_799_999
"""The end of the year 9999."""
_SHOWN_TEXT: Final = 200
"""Characters of what a program calls itself."""
_IS_REPORTERS: Final = (
    f"length(reporter) between 1 and 64 and at_ms between 0 and {_LATEST_MS}"
    f" and coalesce(since_ms, 0) between 0 and {_LATEST_MS} and coalesce(lost, 0) >= 0"
    f" and coalesce(written_ms, 0) between 0 and {_LATEST_MS}"
)
"""What a record of a reporter is; anybody with the right to write there may have written others."""
_IS_CELL: Final = (
    "direction in ('sent', 'consumed') and length(topic) between 1 and 249"
    " and coalesce(length(`group`), 1) between 1 and 1000"
    f" and coalesce(bucket_ms, 0) between 0 and {_LATEST_MS}"
    f" and coalesce(bucket_ms, 0) % {BUCKET_MS} = 0"
    + "".join(f" and {name} between 0 and {_MOST}" for name in ("messages", "refused", "unknown"))
    + "".join(f" and {name} rlike '^[0-9a-f]{{16}}$'" for name in ("sum", "xor"))
)
SILENT_MS: Final = int(2.5 * LIVE_S * 1000)
"""Who has said nothing for so long, and not that it ends, was killed."""
_LAST_MS: Final = int((LIVE_S + COUNT_S) * 1000)
"""What was counted so long before a reporter was last heard may have gone on until its end."""
_ON_THE_WAY_MS: Final = 5_000
"""A record may be appended so long after it was made, and no clock is wrong."""


@dataclass(frozen=True, slots=True)
class Reporter:
    """One run of a program, by the clock of whoever keeps the records' time: the brokers.

    Attributes:
        name: For people: client, host and id.
        since_ms: When it began.
        heard_ms: When its last record came.
        has_ended: Whether it said that it ends.
        ahead_ms: How much its clock is ahead at least, negative: behind; 0: not known to differ.
        lost: Messages that it has not counted, by its own word.
    """

    id: str
    name: str
    since_ms: int
    heard_ms: int
    has_ended: bool
    ahead_ms: int
    lost: int

    def is_killed(self, now_ms: int) -> bool:
        """Whether its end was none of its own."""
        return not self.has_ended and self.heard_ms < now_ms - SILENT_MS

    def was_at_it(self, written_ms: int | None) -> bool:
        """Whether it may have counted more, if it wrote then what it counts beside transactions."""
        return written_ms is not None and written_ms >= self.heard_ms - _LAST_MS


@dataclass(frozen=True, slots=True)
class Reading:
    """One consumer group that counts what it reads of a topic.

    Attributes:
        since_ms: When the first of its reporters began.
        heard_ms: When one of them was last heard.
        is_exact: Whether nothing is counted beside transactions by one that lives.
        has_lost: Whether one has counted too little, by its own word.
        killed_from_ms: Dues from here on may have been consumed uncounted; None: nobody was killed.
        killed_to_ms: Up to here.
    """

    topic: str
    group: str
    since_ms: int
    heard_ms: int
    is_exact: bool
    has_lost: bool
    killed_from_ms: int | None
    killed_to_ms: int | None


def cells_of(records: DataFrame, cluster: str) -> DataFrame:
    """Returns the last record of each key: `_SCHEMA`, with halves of the hashes, and `written_ms`.

    What cannot be read or believed has a `direction` of null, and its `place`; what is of another
    cluster is not there.
    """
    value = F.struct("value", "timestamp_ms", "timestamp_type", "topic", "partition", "offset")
    last = records.groupBy("key").agg(F.max_by(value, F.col("offset")).alias("last"))
    found = (
        last.where("last.value is not null")
        .select(
            F.from_json(F.col("last.value").cast("string"), _SCHEMA).alias("cell"),
            F.col("last.timestamp_ms").alias("written_ms"),
            (F.col("last.timestamp_type") == "LOG_APPEND_TIME").alias("is_brokers_time"),
            F.concat_ws("/", "last.topic", "last.partition", "last.offset").alias("place"),
        )
        .select("cell.*", "written_ms", "is_brokers_time", "place")
        .where((F.col("cluster") == cluster) | F.col("cluster").isNull())
        .withColumn("is_cell", F.expr(_IS_CELL))
    )
    is_known = F.expr(f"{_IS_REPORTERS} and (direction in ('live', 'end') or is_cell)")
    columns = {"direction": F.when(is_known, F.col("direction"))}
    for name in ("sum", "xor"):
        high, low = halves(F.when(F.col("is_cell"), F.col(name)))
        columns |= {f"{name}_high": high, f"{name}_low": low}
    columns |= {name: F.substring(name, 1, _SHOWN_TEXT) for name in ("client", "host")}
    return found.withColumns(columns).drop("is_cell")


def reporters_of(cells: DataFrame, clock_tolerance_ms: int) -> dict[str, Reporter]:
    """Returns all reporters by their ids."""
    ahead = F.when(F.col("is_brokers_time"), F.col("at_ms") - F.col("written_ms"))
    since = F.when(F.col("is_brokers_time"), F.col("since_ms") - ahead).otherwise(F.col("since_ms"))
    known = cells.groupBy("reporter").agg(
        F.max("client").alias("client"),
        F.max("host").alias("host"),
        F.min(since).alias("since_ms"),
        F.max("written_ms").alias("heard_ms"),
        F.max(F.col("direction") == "end").alias("has_ended"),
        F.max(ahead).alias("ahead_ms"),
        F.max("lost").alias("lost"),
    )  # fmt: skip
    return {
        row["reporter"]: Reporter(
            row["reporter"],
            f'client "{row["client"] or ""}" on {row["host"]}, reporter {row["reporter"]}',
            row["since_ms"] or 0,
            row["heard_ms"] or 0,
            row["has_ended"],
            _difference(row["ahead_ms"] or 0, clock_tolerance_ms),
            row["lost"] or 0,
        )
        for row in known.collect()
    }


def _difference(ahead_ms: int, tolerance_ms: int) -> int:
    is_known = ahead_ms > tolerance_ms or ahead_ms < -tolerance_ms - _ON_THE_WAY_MS
    return ahead_ms if is_known else 0


def readings_of(cells: DataFrame, reporters: Mapping[str, Reporter], now_ms: int) -> list[Reading]:
    """Returns the groups that count, each with a topic that it reads."""
    heard = cells.groupBy("reporter").agg(F.max("written_ms").alias("heard_ms"))
    is_beside = ~F.coalesce("exact", F.lit(col=False))
    is_last = is_beside & (F.col("written_ms") >= F.col("heard_ms") - _LAST_MS)
    rows = (
        cells.where("direction = 'consumed' and `group` is not null")
        .join(F.broadcast(heard), "reporter")
        .groupBy("topic", "group", "reporter")
        .agg(
            F.max(is_beside).alias("is_beside"),
            F.min(F.when(is_last, F.col("bucket_ms"))).alias("last_ms"),
        )
        .collect()
    )
    found: dict[tuple[str, str], list[tuple[Reporter, bool, int | None]]] = {}
    for row in rows:
        reporter, last_ms = reporters[row["reporter"]], row["last_ms"]
        if last_ms is not None:  # what came after that may be of just then
            last_ms = min(last_ms, (reporter.heard_ms - _LAST_MS) // BUCKET_MS * BUCKET_MS)
        is_killed = reporter.is_killed(now_ms)
        goes_on = bool(row["is_beside"]) and not is_killed and not reporter.has_ended
        one = reporter, goes_on, last_ms if is_killed else None
        found.setdefault((row["topic"], row["group"]), []).append(one)
    return [_reading(*at, of) for at, of in sorted(found.items())]


def _reading(topic: str, group: str, of: Sequence[tuple[Reporter, bool, int | None]]) -> Reading:
    killed = [(from_ms, one.heard_ms) for one, _, from_ms in of if from_ms is not None]
    return Reading(
        topic,
        group,
        since_ms=min(one.since_ms for one, _, _ in of),
        heard_ms=max(one.heard_ms for one, _, _ in of),
        is_exact=not any(is_beside for _, is_beside, _ in of),
        has_lost=any(one.lost for one, _, _ in of),
        killed_from_ms=min((from_ms for from_ms, _ in killed), default=None),
        killed_to_ms=max((heard_ms + _LAST_MS for _, heard_ms in killed), default=None),
    )
