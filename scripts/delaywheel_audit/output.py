"""Writes tables, summary and page to a folder on any file system that Spark supports."""

from __future__ import annotations

import io
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from delaywheel_audit.matching.summary import Summary
from delaywheel_audit.page import write_page
from delaywheel_audit.sources.hiding import without_secrets
from delaywheel_replica.hiding import shown

SHOWN_PER_KIND = 200
SHOWN_BUCKETS = 20_000
PAGE = "page.html"
SUMMARY = "summary.json"
ENDS = "ends"
_PROBE = ".writable"


class OutputUnwritableError(Exception):
    """The folder cannot be created or written."""


class Output:
    """The output folder, accessed through Spark, so that its URI is valid on all executors.

    Attributes:
        uri: Of it.
        place: The same as it may be shown.
    """

    def __init__(self, spark: SparkSession, uri: str) -> None:
        self._spark = spark
        self.uri = uri
        self.place = shown(uri)

    def check(self) -> None:
        """Checks in advance that the folder can be written, and leaves what is in it.

        Raises:
            OutputUnwritableError: It cannot.
        """
        try:
            self.write_text(_PROBE, "")
            self._delete(_PROBE)
        except Exception as error:
            lines = str(error).splitlines() or [type(error).__name__]
            cause = without_secrets(lines[0], self.uri)
            raise OutputUnwritableError(f"{self.place}: {cause}") from error

    def begin(self) -> None:
        """Deletes an earlier summary: without one, the tables are of a run that did not end."""
        self._delete(SUMMARY)

    def write_table(self, name: str, table: DataFrame) -> None:
        """Writes a table, replacing an earlier one."""
        table.write.mode("overwrite").parquet(self._path(name))

    def read_table(self, name: str) -> DataFrame:
        """Reads a table that was written."""
        return self._spark.read.parquet(self._path(name))

    def findings_by_kind(self) -> dict[str, int]:
        """Returns the number of findings of each kind."""
        counted = self.read_table("findings").groupBy("kind").count().collect()
        return {row["kind"]: row["count"] for row in sorted(counted)}

    def some_findings(self, kinds: dict[str, int], most: int) -> list[dict[str, Any]]:
        """Returns the first findings of each kind, by due."""
        table = self.read_table("findings")
        found: list[dict[str, Any]] = []
        for kind in kinds:
            of_kind = table.where(F.col("kind") == kind).orderBy("due_ms", "id", "seq").limit(most)
            found += [row.asDict() for row in of_kind.collect()]
        return found

    def ends_counts(self) -> dict[str, int]:
        """Returns the sums of the table `ends`: counts, and minutes by state."""
        table = self.read_table(ENDS)
        names = ("said_sent", "refused", "unknown", "accepted", "consumed")
        sums = table.agg(*(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in names)).first()
        assert sums is not None
        states = {row["state"]: row["count"] for row in table.groupBy("state").count().collect()}
        return {**sums.asDict(), **{name: states[name] for name in sorted(states)}}

    def ends_by_group(self) -> list[dict[str, Any]]:
        """Returns the sums of the table `ends` by topic and group, and minutes by state."""
        names = ("said_sent", "refused", "unknown", "accepted", "forwarded", "consumed")
        table = self.read_table(ENDS).groupBy("topic", "group", "state")
        rows = table.agg(*(F.sum(n).alias(n) for n in names), F.count(F.lit(1)).alias("minutes"))
        return [row.asDict() for row in rows.orderBy("topic", "group", "state").collect()]

    def write_text(self, name: str, text: str) -> None:
        """Writes a small file."""
        files, path = self._at(name)
        stream = files.create(path, True)  # noqa: FBT003 - Java's own
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()

    def _delete(self, name: str) -> None:
        files, path = self._at(name)
        files.delete(path, False)  # noqa: FBT003 - Java's own: the path is no folder

    def _at(self, name: str) -> tuple[Any, Any]:
        """Returns Hadoop's file system and path of a file."""
        jvm = self._spark.sparkContext._jvm  # noqa: SLF001 - the way to Hadoop's file systems
        configuration = self._spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001 - as above
        assert jvm is not None
        path = jvm.org.apache.hadoop.fs.Path(self._path(name))
        return path.getFileSystem(configuration), path

    def write_page(self, summary: Summary, ledger: str) -> str:
        """Writes the page for people; returns its place without secrets."""
        buckets, interval_ms = self._some_buckets(summary.interval_ms)
        findings = self.some_findings(dict(summary.findings), SHOWN_PER_KIND)
        text = io.StringIO()
        write_page(
            text,
            summary,
            buckets,
            findings,
            ledger=shown(ledger),
            output=self.place,
            interval_ms=interval_ms,
            ends=None if summary.ends is None else self.ends_by_group(),
        )
        self.write_text(PAGE, text.getvalue())
        return f"{self.place}/{PAGE}"

    def _some_buckets(self, interval_ms: int) -> tuple[list[dict[str, Any]], int]:
        """Returns rows of the table, merged to longer intervals until they are few enough.

        A percentile of a longer interval is shown as the greatest of its parts.
        """
        table = self.read_table("buckets")
        rows = table.count()
        merged_ms = interval_ms * -(-rows // SHOWN_BUCKETS) if rows else interval_ms
        if merged_ms > interval_ms:
            most = [name for name in table.columns if name.endswith("_ms") and name != "bucket_ms"]
            summed = [n for n in table.columns if n not in (*most, "bucket_ms", "topic")]
            begin = F.col("bucket_ms") - F.col("bucket_ms") % merged_ms
            table = table.groupBy("topic", begin.alias("bucket_ms")).agg(
                *(F.sum(name).alias(name) for name in summed),
                *(F.max(name).alias(name) for name in most),
            )
        ordered = table.orderBy("bucket_ms", "topic")
        return [row.asDict() for row in ordered.collect()], merged_ms

    def _path(self, name: str) -> str:
        return f"{self.uri}/{name}"
