"""The query: both topics, read by Spark's connector, and what of Kafka makes it fail.

What the connector does not notice, or says in its own words, Kafka is asked for: before the query
starts, before a batch counts, and after a failure. The topics' ids are those with which the
checkpoint began.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from delaywheel_audit.kafka.client import ClientSettings
from delaywheel_trace.job.checkpoint import Offsets

_TRIGGER: Final = "5 seconds"
_OPTIONS: Final = {
    "failOnDataLoss": "true",
    "fetchOffset.numRetries": "1",  # each waits for as long
    "kafka.client.id": "delaywheel-trace-index",
    "kafka.isolation.level": "read_committed",
    # After each poll the connector asks for the partition's begin and end: one poll is to take all
    # of a fetch, not 500 records of it.
    "kafka.max.poll.records": "20000",
    "kafka.max.partition.fetch.bytes": str(1 << 20),
    "kafka.fetch.max.bytes": str(8 << 20),
}
TRACE_LIMITS: Final = {"maxOffsetsPerTrigger": "10000", "maxRecordsPerPartition": "200"}
"""A record may have 512 KiB, and the records of a task are in memory together."""
OUTCOMES_LIMITS: Final = {"maxOffsetsPerTrigger": "100000", "maxRecordsPerPartition": "20000"}
_COLUMNS: Final = ("topic", "partition", "offset", "unix_millis(timestamp) AS time_ms", "value")
SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.adaptive.enabled": "false",
    # To generate and compile code costs more than to interpret it for a few hundred records.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.streaming.minBatchesToRetain": "10",
    "spark.sql.streaming.numRecentProgressUpdates": "2",
    # What a user interface would show is kept without one, too.
    "spark.ui.retainedJobs": "5",
    "spark.ui.retainedStages": "5",
    "spark.ui.retainedTasks": "20",
    "spark.sql.ui.retainedExecutions": "1",
    "spark.eventLog.enabled": "false",
}


def start(
    spark: SparkSession,
    client: ClientSettings,
    limits: Mapping[str, Mapping[str, str]],
    starts: Offsets | None,
    checkpoint: str,
    write: Callable[[DataFrame, int], None],
) -> StreamingQuery:
    """Starts the query, from where its checkpoint is.

    Args:
        spark: The session.
        client: How Kafka is reached.
        limits: The topics, each with how much is taken at once.
        starts: Where a new checkpoint begins; None: at the topics' beginning.
        checkpoint: Where it is.
        write: Called with each batch.

    Raises:
        KafkaSourceError: CLIENT_REFUSED.
    """
    timeout_ms = str(int(client.timeout_s * 1000))
    reached = {f"kafka.{name}": value for name, value in client.java().items()}
    reached |= {"kafka.default.api.timeout.ms": timeout_ms, "kafka.request.timeout.ms": timeout_ms}
    records: DataFrame | None = None
    for topic, of_topic in limits.items():
        begin = "earliest" if starts is None else json.dumps({topic: starts[topic]})
        options: dict[str, Any] = {**_OPTIONS, **reached, **of_topic}
        reader = spark.readStream.format("kafka").options(**options)
        some = reader.option("subscribe", topic).option("startingOffsets", begin).load()
        some = some.selectExpr(*_COLUMNS)
        records = some if records is None else records.unionAll(some)
    assert records is not None
    writer = records.writeStream.queryName("trace-index").foreachBatch(write)
    return writer.option("checkpointLocation", checkpoint).trigger(processingTime=_TRIGGER).start()
