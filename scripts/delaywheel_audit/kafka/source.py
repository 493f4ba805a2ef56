"""Kafka as a Spark data source, on confluent-kafka: `spark.read.format("delaywheel_kafka")`.

    register(spark)
    spark.read.format("delaywheel_kafka")
        .option("kafka.bootstrap.servers", "broker:9092")
        .option("topics", "orders,bills")
        .option("startingTimestampMs", "1767225600000")
        .option("columns", "topic,offset,key,dw_id")
        .load()

A batch source for any topics, committed records only. It needs no jar that would have to match
Spark's Scala version, and reaches Kafka with the settings of delaywheel itself.

| option | |
|---|---|
| `kafka.<name>` | a setting of librdkafka, verbatim: `bootstrap.servers`, `security.protocol`, … |
| `settings` | a node's settings file: its Kafka settings; `kafka.` options win over them |
| `topics` | names, separated by commas, or a JSON list |
| `topicsPattern` | instead of them: a regular expression for whole names |
| `missingTopics` | `error` (default), or `skip`: a missing topic is empty |
| `startingTimestampMs` | first offset with this timestamp or a later one; default: the earliest |
| `endingTimestampMs` | up to before the first offset with this timestamp or a later one; default: \
the end as of planning |
| `ranges` | instead of topics and timestamps: `pin(…).to_json()` |
| `bytesPerPartition` | approximate size of one Spark task, from a few records; default 64 MiB |
| `recordsPerPartition` | instead of it: offsets of one Spark task |
| `columns` | names, see `kafka_columns`; default: all. Other columns are not built |
| `timeoutMs` | how long Kafka may give no sign of progress before it is an error; default 60000 |

Spark (4.3) does not report to Python sources which columns a query uses: name them, here or by
`.schema("offset long, dw_id binary")`. It would pass filters on, but a source that accepts them is
refused unless the session sets `spark.sql.python.filterPushdown.enabled`: so only options say what
to read.

Timestamps choose *offsets*, by Kafka's index; they are no filter. With LogAppendTime that is the
same. With CreateTime records stand in the order in which they came: some in the range may have
other timestamps, and some with timestamps of the range may stand outside of it.

**Every action of Spark plans again**, and a later plan sees a later end. A job that reads more than
once pins the ranges first: `plan = pin(options)`, then `.option("ranges", plan.to_json())`.

Difficult cases, and how they are handled (errors by name: `kafka_errors.Reason`):

| | |
|---|---|
| the last offsets of a range are markers, aborted or compacted away: none is ever seen | at the \
end when a record behind it comes or Kafka reports the partition's end there or behind it |
| nothing comes for a while | never an end; the topic is checked every 2 s, after `timeoutMs` \
without progress BROKER_AWAY. Fetching aborted records is progress |
| a transaction is open | the range ends where it begins (last stable offset); what is behind is \
not read, and reported: `Plan.remarks`, log |
| transactions later in the range's life | none: below the last stable offset all is decided, so a \
task that is run again reads the same |
| retention, or DeleteRecords, before or during the read | OFFSETS_GONE with topic, partition, \
offsets. Each fetch is from an exact offset, with no resetting to another |
| compaction during the read | cannot be seen: a record that is compacted away is not read. \
Nothing else is lost |
| topic deleted | TOPIC_GONE |
| topic deleted and recreated | TOPIC_RECREATED: topic ids are compared when a slice was read to \
its end, before its last records are given |
| partition or topic added since planning | not read; added partitions are logged |
| the partition's end went back (unclean election) | OFFSETS_NOT_THERE |
| a partition is empty; a timestamp behind the end | no task for it |
| Kafka away, or a name that does not resolve | BROKER_AWAY after `timeoutMs` |
| wrong credentials, TLS | AUTHENTICATION_FAILED at once; no right to the topic: ACCESS_DENIED |
| a missing topic | TOPIC_MISSING at planning, unless `missingTopics=skip` |
| null keys, values, header values; repeated header names | as they are |
| a damaged batch | RECORD_UNREADABLE: checksums are verified |
| large records | a batch is 16 MiB or 10,000 records, beside it the client's queue (8 MiB) |
| forks | clients of Kafka are made inside of `partitions` and `read` |

Secrets: prefer files (`ssl.key.location`), or `settings`: Spark shows options in some of its plans
and redacts those whose names look like secrets (`spark.redaction.regex`). They are in no error, log
line or plan of this source. They do go to the executors, with the task: encrypt Spark's own traffic
(`spark.network.crypto.enabled`) where that matters.

Workers run Python of the same minor version (PYSPARK_PYTHON) and need this package
(`ship_package`), confluent-kafka, numpy and pyarrow.
"""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from delaywheel_audit.kafka.columns import FIELDS, batch_of, schema_of
from delaywheel_audit.kafka.options import SourceOptions, invalid
from delaywheel_audit.kafka.plan import Plan, Slice, plan
from delaywheel_audit.kafka.questions import KafkaQuestions
from delaywheel_audit.kafka.read import read_slice, weigh

FORMAT = "delaywheel_kafka"

_log = logging.getLogger("delaywheel_audit.kafka")


class KafkaSource(DataSource):
    """The data source; see above."""

    @classmethod
    def name(cls) -> str:
        """Returns the name for `spark.read.format`."""
        return FORMAT

    def schema(self) -> StructType:
        """Returns the requested columns."""
        return from_arrow_schema(schema_of(SourceOptions.of(self.options).columns))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Returns a reader of these columns."""
        return KafkaReader(SourceOptions.of(self.options), _arrow(schema))


class KafkaReader(DataSourceReader):
    """One read: planned on the driver, then sent to the executors."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """Returns what each task reads."""
        found = planned(self._options)
        for line in found.remarks():
            _log.warning("%s", line)
        slices = found.slices(
            records=self._options.records_per_partition, size=self._options.bytes_per_partition
        )
        return [InputPartition(piece) for piece in slices]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yields the records of one task."""
        piece: Slice | None = partition.value
        if piece is None:  # nothing was planned, but Spark wants one task all the same
            return
        for messages in read_slice(self._options.client, piece, timeout_s=self._options.timeout_s):
            yield batch_of(
                messages, topic=piece.topic, partition=piece.partition, schema=self._schema
            )


def _arrow(schema: StructType) -> pa.Schema:
    """Returns the schema that Spark wants, if it can be provided."""
    wanted = to_arrow_schema(schema, timezone="UTC")
    for field in wanted:
        if FIELDS.get(field.name) != field.type:
            there = ", ".join(f"{f.name} {f.dataType.simpleString()}" for f in all_columns())
            raise invalid(f"schema: no {field.name} {field.type}; there are {there}")
    return wanted


def all_columns() -> StructType:
    """Returns all columns of the source."""
    return from_arrow_schema(schema_of(None))


def planned(options: SourceOptions) -> Plan:
    """Asks Kafka for the ranges to read."""
    found = plan(options, KafkaQuestions(options.client, timeout_s=options.timeout_s))
    # An earlier plan has its record sizes already.
    if options.records_per_partition is not None or options.ranges is not None:
        return found
    return weigh(options.client, found)


def pin(options: Mapping[str, str]) -> Plan:
    """Returns the ranges that a read with these options would read now, for the option `ranges`.

    Args:
        options: As for `spark.read`.

    Raises:
        KafkaSourceError: It cannot be read.
    """
    return planned(SourceOptions.of(options))


def register(spark: SparkSession) -> None:
    """Registers the format with a session."""
    spark.dataSource.register(KafkaSource)


def ship_package(spark: SparkSession) -> Path:
    """Sends this package to the executors; not needed where it is installed, or on local[…].

    `spark-submit --py-files` with what `archive_in` makes does the same.
    """
    folder = Path(tempfile.mkdtemp(prefix="delaywheel-audit-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    archive = archive_in(folder)
    spark.sparkContext.addPyFile(str(archive))
    return archive


def archive_in(folder: Path) -> Path:
    """Packs this package into a file that Python can import from."""
    package = Path(__file__).parents[1]
    archive = folder / f"{package.name}.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        for file in sorted(package.rglob("*.py")):
            zipped.write(file, Path(package.name) / file.relative_to(package))
    return archive
