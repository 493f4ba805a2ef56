"""The job: holds the lock, runs the query for as long as it is wanted, and says why it ends.

| what happens | then |
|---|---|
| a topic was made anew, records are gone, the end went back, no right | it ends, with the reason |
| Kafka is away, or a topic is not there yet; the index cannot be written | it waits, and says so |
| it is killed | the batch that was planned is written again, with the same name |
| Spark fails otherwise | it ends: whoever supervises it starts it again |

What of Kafka the connector does not notice, or says in its own words, Kafka is asked for: before
the query starts, before a batch counts, and after a failure. The topics' ids are those with which
the checkpoint began.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from delaywheel.ingress import trace_topic
from delaywheel_audit.kafka.client import ClientSettings
from delaywheel_audit.kafka.errors import KafkaSourceError, Reason, reason_in_java
from delaywheel_audit.kafka.plan import Plan, TopicPlan, check
from delaywheel_audit.kafka.questions import KafkaQuestions
from delaywheel_audit.session import CouldNotRun, exit_code_of, spark_session
from delaywheel_audit.sources.ledger_files import LedgerFolder, LedgerUnreadableError
from delaywheel_replica.config_sources import ConfigError, load_config
from delaywheel_replica.kafka_settings import KafkaNames
from delaywheel_trace.index.folder import UNREACHED, IndexFolder, IndexUnreadableError
from delaywheel_trace.index.layout import QUERY_DIGITS, Gap
from delaywheel_trace.job.batches import BatchWriter
from delaywheel_trace.job.checkpoint import Checkpoint, Offsets
from delaywheel_trace.job.command import IndexOptions
from delaywheel_trace.job.health import IndexHealth, serving
from delaywheel_trace.job.keeping import IndexKeeper
from delaywheel_trace.job.lock import only_job

STOPPED, COULD_NOT_GO_ON = 0, 2
_LOOK_S: Final = 1
_AGAIN_S: Final = 5.0
_JAVA: Final = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:+UseSerialGC -XX:TieredStopAtLevel=1"
    " -XX:MaxMetaspaceSize=192m -XX:ReservedCodeCacheSize=48m -XX:MinHeapFreeRatio=10"
    " -XX:MaxHeapFreeRatio=30 -Xms64m -Xss512k"
)
"""A small JVM: most of the time it waits for the next five seconds. Its heap begins small:
otherwise with 1/64 of the machine's memory, 384 MB of 24 GB, which it never gives back."""
_PASSING: Final = {Reason.BROKER_AWAY, Reason.TOPIC_GONE}
_NO_QUERY: Final = "0" * QUERY_DIGITS
_FULL = ("No space left", "Disk quota exceeded", "Read-only file system", "Input/output error")
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
_TRACE_LIMITS: Final = {"maxOffsetsPerTrigger": "10000", "maxRecordsPerPartition": "200"}
"""A record may have 512 KiB, and the records of a task are in memory together."""
_OUTCOMES_LIMITS: Final = {"maxOffsetsPerTrigger": "100000", "maxRecordsPerPartition": "20000"}
_COLUMNS: Final = ("topic", "partition", "offset", "unix_millis(timestamp) AS time_ms", "value")
_SETTINGS: Final = {
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


def main(options: IndexOptions) -> int:
    """Runs the job until it is stopped; returns the exit code."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())

    def work() -> int:
        try:
            with only_job(IndexFolder(options.index)):
                run(options, ended)
        except IndexUnreadableError as why:
            raise CouldNotRun("INDEX_UNREADABLE", str(why)) from why
        return STOPPED

    return exit_code_of(work, COULD_NOT_GO_ON)


def run(options: IndexOptions, ended: threading.Event, spark: SparkSession | None = None) -> None:
    """Runs the job in a session, or in one of its own.

    Args:
        options: The checked options.
        ended: Set by whoever wants it to end.
        spark: The session.

    Raises:
        CouldNotRun: It could not go on.
        KafkaSourceError: Because of Kafka.
    """
    job = IndexJob(options, ended)
    health = job.health
    with serving(health, options.metrics_listen):
        if spark is not None:
            job.run(spark)
            return
        job.prepare()
        with spark_session(
            "trace-index",
            _SETTINGS,
            master=options.master,
            memory=options.memory,
            java=_JAVA,
            threads="2",
        ) as own:
            job.run(own)


class IndexJob:
    """One run.

    Attributes:
        health: How it is.
    """

    def __init__(self, options: IndexOptions, ended: threading.Event) -> None:
        try:
            config = load_config(file=options.settings)
            ledger = LedgerFolder(config.ledger_place)
        except (ConfigError, OSError, LedgerUnreadableError) as error:
            faults = "; ".join(str(error).splitlines())
            raise CouldNotRun("SETTINGS_UNREADABLE", f"{options.settings}: {faults}") from error
        self.health = IndexHealth()
        self._ended = ended
        self._cluster = config.cluster_id
        self._is_traced = config.trace
        self._client = ClientSettings(dict(config.kafka))
        self._asked = KafkaQuestions(self._client)
        self._folder = IndexFolder(options.index)
        self._checkpoint = Checkpoint(self._folder)
        self._starts: Offsets | None = None
        self._from_now = options.from_now
        self._keeper = IndexKeeper(
            self._folder, ledger, self._cluster, options.keep_ms, self.health
        )
        self._limits: Mapping[str, Mapping[str, str]] = {
            trace_topic(self._cluster): _TRACE_LIMITS,
            KafkaNames(self._cluster).outcomes: _OUTCOMES_LIMITS,
        }

    def prepare(self) -> None:
        """Has what the query needs: waits for topics, and makes a checkpoint or judges it."""
        while not (self._ended.is_set() or self._patiently(self._begin)):
            pass

    def run(self, spark: SparkSession) -> None:
        """Runs the query, again and again while what it waits for may come."""
        self._keeper.start()
        try:
            while not self._ended.is_set():
                self._patiently(lambda: self._run_query(spark))
        finally:
            self._keeper.stop()

    def _patiently(self, step: Callable[[], object]) -> bool:
        """Does something, or waits a while if it may be possible then; returns whether it did.

        Raises:
            KafkaSourceError: It will not be.
        """
        try:
            step()
        except KafkaSourceError as error:
            if error.reason not in _PASSING:
                raise
            self.health.waits(str(error))
        except UNREACHED as error:
            self.health.waits(f"the index cannot be written: {error}")
        else:
            return True
        self._ended.wait(_AGAIN_S)
        return False

    def _begin(self) -> None:
        ids = self._topic_ids()
        query = self._checkpoint.query()
        if self._from_now:
            self._pass_over(query, ids)
            self._from_now = False
        elif query is None:
            self._note_what_is_gone()
            self._checkpoint.begin(ids)
        else:
            noted = self._checkpoint.topic_ids(query, ids)
            check(self._checkpoint.left(noted), self._asked, is_followed=True)

    def _topic_ids(self) -> dict[str, str | None]:
        found = self._asked.describe(list(self._limits))
        missing = [name for name, topic in found.items() if topic is None]
        if missing:
            hint = "" if self._is_traced else "; the settings do not say trace = true"
            raise KafkaSourceError(Reason.TOPIC_GONE, f"{', '.join(missing)}: not there{hint}")
        return {name: topic.topic_id for name, topic in found.items() if topic is not None}

    def _pass_over(self, query: str | None, ids: Mapping[str, str | None]) -> None:
        """Begins a new checkpoint at the topics' ends, and notes what is between."""
        described = self._asked.describe(list(ids))
        places = [(name, p) for name, t in described.items() if t is not None for p in t.partitions]
        ends = self._asked.stable_ends(places)
        self._starts = {name: {p: ends[name, p] for t, p in places if t == name} for name in ids}
        before = self._checkpoint.newest()[0] if query is not None else None
        gap = Gap(before.time_ms if before else 0, int(time.time() * 1000), query or _NO_QUERY)
        said = {"from": before.ends if before else {}, "to": self._starts, "reason": "--from-now"}
        content = json.dumps(said).encode()
        self._folder.put(gap.path, lambda stream: stream.write(content))
        self._checkpoint.begin(ids)

    def _note_what_is_gone(self) -> None:
        """Notes a gap up to the first outcome that Kafka still has, if there were others before.

        The ledger may go back further: what it has as accepted may have been cancelled.
        """
        outcomes = KafkaNames(self._cluster).outcomes
        described = self._asked.describe([outcomes])[outcomes]
        places = [(outcomes, p) for p in (described.partitions if described else ())]
        firsts = self._asked.earliest(places)
        gone = [place for place, offset in firsts.items() if offset > 0]
        if not gone:
            return
        began_ms = self._asked.times_since(gone, 0).values()
        now_ms = int(time.time() * 1000)
        gap = Gap(0, max(now_ms if ms is None else ms for ms in began_ms), _NO_QUERY)
        to = {outcomes: {p: offset for (_, p), offset in firsts.items()}}
        said = {"from": {}, "to": to, "reason": "outcomes are gone"}
        content = json.dumps(said).encode()
        self._folder.put(gap.path, lambda stream: stream.write(content))

    def _run_query(self, spark: SparkSession) -> None:
        self._begin()
        query = self._checkpoint.query()
        assert query is not None
        ids = self._checkpoint.topic_ids(query, {})
        write = BatchWriter(
            self._folder,
            self._checkpoint,
            query,
            self._cluster,
            Plan(tuple(TopicPlan(name, ids.get(name), ()) for name in self._limits)),
            self._asked,
            self.health,
            self._ended.is_set,
        )
        running = None
        try:
            running = _start(
                spark, self._client, self._limits, self._starts, self._checkpoint.uri, write
            )
            self._follow(running)
        except (PySparkException, Py4JError) as error:
            if not self._ended.is_set():
                self._judge(write.failure or error)
        finally:
            if running is not None:
                running.stop()

    def _follow(self, query: StreamingQuery) -> None:
        """Waits for the end that is wanted, or for a failure."""
        said = -1
        while not self._ended.is_set():
            if query.awaitTermination(_LOOK_S):
                return
            status: dict[str, Any] = query.status
            if not status["isTriggerActive"] and not status["isDataAvailable"]:
                self.health.has_all_until(time.time() - _LOOK_S)
                self.health.goes_on()
            progress = query.lastProgress
            if progress is not None and progress["batchId"] != said:
                said = progress["batchId"]
                self.health.goes_on()
                if not any(_is_behind(source) for source in progress["sources"]):
                    self.health.has_all_until(_unix_s(progress["timestamp"]))

    def _judge(self, error: Exception) -> None:
        """Says what a failure means.

        Raises:
            KafkaSourceError: Something of Kafka's.
            OSError: The index or the checkpoint cannot be written.
            CouldNotRun: Anything that does not pass.
        """
        if isinstance(error, KafkaSourceError):
            raise error
        text = f"{error} {getattr(error, 'stackTrace', '')}"
        if isinstance(error, UNREACHED):
            raise error
        if (full := next((words for words in _FULL if words in text), None)) is not None:
            raise OSError(full) from error
        if "kafka" in text.lower():
            self._begin()  # which says what of Kafka it was, if that shows
            if (reason := reason_in_java(text)) is not None:
                last = [line.strip() for line in text.splitlines() if "Exception" in line][-1:]
                raise KafkaSourceError(reason, self._client.masked(" ".join(last)))
        if not isinstance(error, PySparkException | Py4JError):
            raise error
        lines = text.strip().splitlines() or [type(error).__name__]
        raise CouldNotRun("SPARK_FAILED", lines[0])


def _start(
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


def _is_behind(source: Mapping[str, Any]) -> bool:
    metrics = source["metrics"] or {}
    return float(metrics.get("maxOffsetsBehindLatest", 0)) > 0


def _unix_s(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
