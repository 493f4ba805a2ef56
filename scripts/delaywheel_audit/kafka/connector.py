"""Reads what is planned of Kafka by Spark's own connector, and names what went wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession

from delaywheel_audit.kafka.client import ClientSettings
from delaywheel_audit.kafka.columns import records_of
from delaywheel_audit.kafka.errors import KafkaSourceError, reason_in_java
from delaywheel_audit.kafka.plan import Plan, check
from delaywheel_audit.kafka.questions import KafkaQuestions

_RECORDS_PER_TASK = 250_000
_FETCH_BYTES = 4 * 1024 * 1024
_REQUEST_TIMEOUT_MS = 30_000
"""The default of Java's client."""

_OPTIONS = {
    "includeHeaders": "true",
    "failOnDataLoss": "true",
    "fetchOffset.numRetries": "1",  # each waits for as long
    "maxRecordsPerPartition": str(_RECORDS_PER_TASK),
    "kafka.client.id": "delaywheel-audit",
    "kafka.isolation.level": "read_committed",
    # After each poll the connector asks for the partition's begin and end: one poll is to take all
    # of a fetch, not 500 records of it.
    "kafka.max.poll.records": "20000",
    "kafka.max.partition.fetch.bytes": str(_FETCH_BYTES),
}

_SCHEMA = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp,"
    " timestampType int, headers array<struct<key: string, value: binary>>"
)
"""The connector's own."""


def read(spark: SparkSession, client: ClientSettings, plan: Plan) -> DataFrame:
    """Returns the committed records of a plan, in the columns of `records_of`.

    Raises:
        KafkaSourceError: CLIENT_REFUSED.
    """
    offsets = plan.offsets()
    if not offsets:
        return records_of(spark.createDataFrame([], _SCHEMA))
    starts = {topic: {p: r.start for p, r in of.items()} for topic, of in offsets.items()}
    ends = {topic: {p: r.end for p, r in of.items()} for topic, of in offsets.items()}
    timeout_ms = int(client.timeout_s * 1000)
    options = {
        "assign": json.dumps({topic: sorted(of) for topic, of in offsets.items()}),
        "startingOffsets": json.dumps(starts),
        "endingOffsets": json.dumps(ends),
        "kafkaConsumer.pollTimeoutMs": str(timeout_ms),
        "kafka.default.api.timeout.ms": str(timeout_ms),
        "kafka.request.timeout.ms": str(min(timeout_ms, _REQUEST_TIMEOUT_MS)),
        **{f"kafka.{name}": value for name, value in client.java().items()},
    }
    return records_of(spark.read.format("kafka").options(**{**_OPTIONS, **options}).load())


def why(error: Exception, plans: Sequence[Plan], client: ClientSettings) -> KafkaSourceError | None:
    """Returns what of Kafka made Spark fail; None: nothing of Kafka."""
    text = f"{error} {getattr(error, 'stackTrace', '')}"
    if "kafka" not in text.lower():
        return None
    try:
        asked = KafkaQuestions(client)
        for plan in plans:
            check(plan, asked)
    except KafkaSourceError as found:
        return found
    reason = reason_in_java(text)
    if reason is None:
        return None
    last = [line.strip() for line in text.splitlines() if "Exception" in line][-1:]
    return KafkaSourceError(
        reason,
        f"Spark's tasks could not read Kafka at {client.bootstrap}, though it answers here: "
        f"{client.masked(' '.join(last))}; see that it is reached from them, too, and run this "
        "again",
    )
