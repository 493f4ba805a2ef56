"""A batch of the query, made a file of the index: decoded here, in columns, and put there whole.

Nothing is kept between batches, and of one as many records are in memory as one of Spark's tasks
has: a batch after an hour's pause may be large.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, Row

from delaywheel.ingress import trace_topic
from delaywheel.trace.batch import BatchInvalidError, decode
from delaywheel_audit.kafka.plan import Plan, check_topics
from delaywheel_audit.kafka.questions import KafkaQuestions
from delaywheel_trace.index.events import (
    GROUP_ROWS,
    OF_THE_SERVICE,
    of_batch,
    of_outcome,
    of_rows,
    open_writer,
)
from delaywheel_trace.index.folder import UNREACHED, IndexFolder
from delaywheel_trace.index.layout import HOUR_MS, BadFile, BatchFile
from delaywheel_trace.job.checkpoint import Checkpoint
from delaywheel_trace.job.health import IndexHealth

_MOST_EVENTS: Final = 10_000
"""In a record; no reporter writes more than 2,000."""
_MOST_BAD: Final = 1_000
_SHOWN_BYTES: Final = 200
_OUTCOMES_AT_ONCE: Final = 5_000
_AGAIN_S: Final = 5.0


class RecordsLostError(Exception):
    """Spark has ended while its records were read."""


class BatchWriter:
    """What the query calls with each batch; another thread may ask `failure`."""

    def __init__(
        self,
        folder: IndexFolder,
        checkpoint: Checkpoint,
        query: str,
        cluster: str,
        plan: Plan,
        asked: KafkaQuestions,
        health: IndexHealth,
        is_ending: Callable[[], bool],
    ) -> None:
        self._folder = folder
        self._checkpoint = checkpoint
        self._query = query
        self._cluster = cluster
        self._plan = plan
        self._asked = asked
        self._health = health
        self._is_ending = is_ending
        self.failure: Exception | None = None
        """Why a batch was not written: Spark has only its text."""

    def __call__(self, records: DataFrame, batch: int) -> None:
        """Writes a batch; waits while the index cannot be written."""
        try:
            while True:
                try:
                    self._write(records, batch)
                except UNREACHED as error:
                    self._health.waits(f"the index cannot be written: {error}")
                    if self._is_ending():
                        raise
                    time.sleep(_AGAIN_S)
                else:
                    self._health.goes_on()
                    return
        except Exception as error:
            self.failure = error
            raise

    def _write(self, records: DataFrame, batch: int) -> None:
        planned_ms = self._checkpoint.planned(batch).time_ms
        hour_ms = planned_ms // HOUR_MS * HOUR_MS
        made = _Made(self._cluster, {topic.name: topic.topic_id for topic in self._plan.topics})
        tables = _in_groups(made.events(_rows_of(records)))
        begun = list(islice(tables, 1))

        def write(stream: Any) -> None:
            with open_writer(stream) as writer:
                for table in chain(begun, tables):
                    writer.write_table(table, row_group_size=GROUP_ROWS)
            check_topics(self._plan, self._asked)  # else these may be another topic's records

        if begun:
            self._folder.put(BatchFile(hour_ms, self._query, batch).path, write)
        if made.bad_count:
            bad = BadFile(hour_ms, self._query, batch, made.bad_count)
            content = "".join(json.dumps(line) + "\n" for line in made.bad).encode()
            self._folder.put(bad.path, lambda stream: stream.write(content))
        self._health.wrote(made.rows, made.bad_count)


class _Made:
    """What becomes of a batch's records.

    Attributes:
        rows: How many events they had.
        bad_count: How many records could not be read.
        bad: The first of these.
    """

    def __init__(self, cluster: str, topic_ids: Mapping[str, str | None]) -> None:
        self._cluster = cluster
        self._trace = trace_topic(cluster)
        self._topic_ids = topic_ids
        self.rows = 0
        self.bad_count = 0
        self.bad: list[Mapping[str, Any]] = []

    def events(self, records: Iterable[Row]) -> Iterator[pa.RecordBatch]:
        """Returns the events of all records, some at once."""
        outcomes: list[Mapping[str, Any]] = []
        for record in records:
            try:
                if record["topic"] == self._trace:
                    yield self._counted(self._batch(bytes(record["value"] or b"")))
                else:
                    outcomes.append(self._outcome(record))
            except (ValueError, RecursionError, pa.ArrowException) as error:
                self._note(record, error)
            if len(outcomes) >= _OUTCOMES_AT_ONCE:
                yield self._counted(of_rows(outcomes).to_batches()[0])
                outcomes = []
        if outcomes:
            yield self._counted(of_rows(outcomes).combine_chunks().to_batches()[0])

    def _batch(self, record: bytes) -> pa.RecordBatch:
        head, rows = decode(record)
        if head.cluster != self._cluster:
            raise BatchInvalidError(f"it is of cluster {head.cluster[:_SHOWN_BYTES]}")
        if head.kind in OF_THE_SERVICE:
            raise BatchInvalidError(f"no program tells what is {head.kind}")
        if len(next(iter(rows.values()))) > _MOST_EVENTS:
            raise BatchInvalidError(f"it has more than {_MOST_EVENTS} events")
        return of_batch(head, rows)

    def _outcome(self, record: Row) -> Mapping[str, Any]:
        outcome = json.loads(bytes(record["value"] or b""))
        if not isinstance(outcome, dict):
            raise ValueError("no JSON object")  # noqa: TRY004 - what a topic has is a value
        topic = record["topic"]
        place = record["partition"], record["offset"]
        return of_outcome(outcome, self._topic_ids.get(topic) or topic, *place, record["time_ms"])

    def _counted(self, events: pa.RecordBatch) -> pa.RecordBatch:
        self.rows += len(events)
        return events

    def _note(self, record: Row, error: Exception) -> None:
        self.bad_count += 1
        if len(self.bad) < _MOST_BAD:
            place = f"{record['topic']}/{record['partition']}/{record['offset']}"
            begins = bytes(record["value"] or b"")[:_SHOWN_BYTES].decode(errors="backslashreplace")
            reason = str(error).encode(errors="backslashreplace")[:_SHOWN_BYTES].decode()
            self.bad.append({"place": place, "reason": reason, "begins": begins})


def _rows_of(records: DataFrame) -> Iterator[Row]:
    """Returns the records of one task after another.

    Raises:
        RecordsLostError: Spark's end of the line is gone; nothing is wrong with the index.
    """
    try:
        # Spark 4.2 keeps all results of a data frame's own iterator: their jobs begin once the
        # query has ended by whose end they are forgotten.
        yield from records.rdd.toLocalIterator()
    except OSError as error:
        raise RecordsLostError(str(error)) from error


def _in_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Returns them as row groups are to be."""
    kept: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        kept.append(batch)
        rows += len(batch)
        if rows >= GROUP_ROWS:
            yield pa.Table.from_batches(kept)
            kept, rows = [], 0
    if kept:
        yield pa.Table.from_batches(kept)
