"""The reconciliation of both ends: its table, its findings, and how they come about.

It looks in this order, so that what is judged is complete on both sides: first the books; then how
far the groups have come; then, where consumers count beside their transactions, as long as that may
take; last the counts. So of what a group had passed at the second nothing is missing at the last.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from delaywheel.ingress import counts_topic
from delaywheel.trace.reporter import COUNT_S
from delaywheel_audit.ends.counts import (
    Reading,
    Reporter,
    cells_of,
    readings_of,
    reporters_of,
)
from delaywheel_audit.ends.judging import KINDS, judged
from delaywheel_audit.ends.names import events_of, with_names
from delaywheel_audit.ends.rows import Known, Positions, by_minute, rows_of
from delaywheel_audit.matching.tables import FINDING
from delaywheel_audit.matching.terms import Facts, Terms
from delaywheel_audit.sources.inputs import KafkaPlace
from delaywheel_audit.sources.ledger_files import moment

_IS_BELIEVED: Final = "(direction is not null)"
_SHOWN: Final = 5
_SETTLED_S: Final = COUNT_S + 2
_COLUMNS: Final = tuple(part.split()[0] for part in FINDING.split(","))


@dataclass(frozen=True, slots=True)
class Ends:
    """The result, before it is written.

    Attributes:
        table: docs/AUDIT.md has its columns.
        findings: The table's columns of findings.
        notes: For readers of the figures.
        kept: What is to be freed once they are written.
    """

    table: DataFrame
    findings: DataFrame
    notes: Sequence[str]
    kept: Sequence[DataFrame]


class EndsReport:
    """Reads what programs have counted, and judges it by the books of one run."""

    def __init__(
        self,
        spark: SparkSession,
        place: KafkaPlace,
        terms: Terms,
        facts: Facts,
        index: str | None = None,
    ) -> None:
        """Prepares.

        Args:
            spark: The session.
            place: Kafka.
            terms: What is asked.
            facts: What was known before Kafka was read.
            index: The trace's index, which names messages; None: none is given.
        """
        self._index: Final = index
        self._spark: Final = spark
        self._place: Final = place
        self._terms: Final = terms
        self._facts: Final = facts
        self._notes: Final[list[str]] = []
        self._remarks: Sequence[str] = ()

    def of(self, messages: DataFrame, *, has_gaps: bool) -> Ends:
        """Returns the report.

        Args:
            messages: The books' messages, judged.
            has_gaps: Whether the ledger has any.
        """
        known = self._known(has_gaps=has_gaps)
        now_ms = self._facts.began_ms
        cells = self._cells().where(_IS_BELIEVED)
        tolerance_ms = self._terms.clock_tolerance_ms
        readings = readings_of(cells, reporters_of(cells, tolerance_ms), now_ms)
        positions = self._positions(readings)
        if not all(one.is_exact for one in readings):
            time.sleep(_SETTLED_S)
        records = self._cells().persist(StorageLevel.DISK_ONLY)
        self._note_unreadable(records)
        cells = records.where(_IS_BELIEVED)
        reporters = reporters_of(cells, tolerance_ms)
        readings = readings_of(cells, reporters, now_ms)
        messages = by_minute(messages)
        rows = judged(rows_of(messages, cells, readings, positions, known))
        kept = rows.persist(StorageLevel.DISK_ONLY)
        wrong = kept.where(F.col("state").isin(*KINDS))
        named = wrong.withColumn("names", F.lit(""))
        if self._index is not None:
            named = with_names(wrong, messages, events_of(self._spark, self._index))
        heard = known.holds(cells).select("reporter").distinct()
        active = {row["reporter"] for row in heard.collect()}
        said = [one for one in reporters.values() if one.id in active]
        found = _of_rows(named).unionByName(self._of_reporters(said, cells, known))

        return Ends(_table(kept), found, [*self._remarks, *self._notes], (kept, records))

    def _known(self, *, has_gaps: bool) -> Known:
        facts, terms = self._facts, self._terms
        from_ms, to_ms = Known.whole_minutes(terms.start_ms, terms.end_ms)
        done_ms = sent_ms = facts.done.floor * 1000
        if not self._place.are_settled(facts.done.ingress, min(to_ms, done_ms)):
            sent_ms = 0
            self._notes.append(
                "records of ingress topics are not settled: what was sent is not judged yet"
            )
        if has_gaps:
            self._notes.append("the ledger has gaps: what was sent is not judged")
        return Known(from_ms, to_ms, sent_ms, done_ms, has_gaps, terms.topics)

    def _cells(self) -> DataFrame:
        cluster = self._place.cluster
        plan = self._place.pin([counts_topic(cluster)], None, None)
        self._remarks = plan.remarks()
        return cells_of(self._place.read(self._spark, plan), cluster)

    def _note_unreadable(self, records: DataFrame) -> None:
        wrong = records.where(f"not {_IS_BELIEVED}")
        first = ", ".join(row["place"] for row in wrong.orderBy("place").limit(_SHOWN).collect())
        if first:
            count = f"{wrong.count():,} records of counts cannot be read, or believed"
            self._notes.append(f"{count}: {first}, the first of them")

    def _positions(self, readings: Sequence[Reading]) -> Positions:
        """Asks how far groups have come in the topics that they read."""
        topics: dict[str, list[str]] = {}
        for one in readings:
            topics.setdefault(one.group, []).append(one.topic)
        found = {}
        for group, own in topics.items():
            known = self._place.committed(group, own)
            if known is None:
                self._notes.append(
                    f"Kafka does not say how far group {group} has come: what it consumed is not "
                    "judged (DESCRIBE on the group is needed)"
                )
                continue
            found.update({(topic, group): of for topic, of in known.items()})
        return found

    def _of_reporters(
        self, reporters: Sequence[Reporter], cells: DataFrame, known: Known
    ) -> DataFrame:
        """Returns the findings about programs that counted something of the range."""
        rows = []
        now_ms = self._facts.began_ms
        beside = known.holds(cells).where("not coalesce(exact, false)")
        written = beside.groupBy("reporter").agg(F.max("written_ms").alias("written_ms"))
        last = {row["reporter"]: row["written_ms"] for row in written.collect()}
        for one in sorted(reporters, key=lambda one: one.id):
            if one.is_killed(now_ms) and one.was_at_it(last.get(one.id)):
                at = moment(one.heard_ms)
                text = f"{one.name}: last heard at {at}, and it did not say that it ends"
                rows.append(_finding("reporter_ended", one.heard_ms, text))
            if one.ahead_ms:
                how = "ahead" if one.ahead_ms > 0 else "behind"
                text = f"{one.name}: its clock is {abs(one.ahead_ms):,} ms {how} at least"
                rows.append(_finding("clock_differs", one.heard_ms, text))
        return self._spark.createDataFrame(rows, FINDING)


def _finding(kind: str, at_ms: int, text: str) -> tuple[object, ...]:
    values = {"kind": kind, "due_ms": at_ms, "detail": text}
    return tuple(values.get(name) for name in _COLUMNS)


def _of_rows(rows: DataFrame) -> DataFrame:
    """Returns the findings about minutes that are such, with `names`."""
    group = F.concat(F.lit("group "), F.col("group"), F.lit(": "))
    whose = F.coalesce(group, F.lit("sent: "))
    before = F.format_string(
        "%d said to be sent, %d accepted: %d are lost at least", "told", "witnessed", "difference"
    )
    most = F.format_string(
        ", %d at most: of %d it is not known whether they were accepted",
        F.col("difference") + F.col("unknown"), "unknown",
    )  # fmt: skip
    most = F.when(F.col("unknown") > 0, most)
    after = F.format_string("%d forwarded, %d consumed", "witnessed", "told")
    same = F.format_string("%d on both sides, and not the same ones", "told")
    text = (
        F.when(F.col("state") == "ids_differ", same)
        .when(F.col("state") == "lost_before", F.concat(before, F.coalesce(most, F.lit(""))))
        .otherwise(after)
    )
    values = {
        "kind": F.col("state"),
        "topic": F.col("topic"),
        "due_ms": F.col("bucket_ms"),
        "detail": F.concat_ws("; ", F.concat(whose, text), F.nullif("names", F.lit(""))),
    }
    columns = [values.get(name, F.lit(None)).alias(name) for name in _COLUMNS]
    return rows.select(*columns).to(rows.sparkSession.createDataFrame([], FINDING).schema)


def _table(rows: DataFrame) -> DataFrame:
    """Returns the table `ends`."""
    is_sent = F.col("direction") == "sent"
    return rows.select(
        "topic",
        "group",
        "bucket_ms",
        F.when(is_sent, F.col("told")).alias("said_sent"),
        F.when(is_sent, F.col("refused")).alias("refused"),
        F.when(is_sent, F.col("unknown")).alias("unknown"),
        F.when(is_sent, F.col("witnessed")).alias("acceptances"),
        F.when(is_sent, F.col("accepted")).alias("accepted"),
        "forwarded",
        F.when(~is_sent, F.col("told")).alias("consumed"),
        "state",
        F.when(~F.col("state").isin("open", "unproven"), F.col("difference")).alias("difference"),
    ).orderBy("bucket_ms", "topic", "group")
