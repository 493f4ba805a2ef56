"""The rows of ledger and Kafka, as DataFrames, read in the order that `reconcile` requires."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from delaywheel_audit.kafka.client import ClientSettings
from delaywheel_audit.kafka.columns import with_own_headers
from delaywheel_audit.kafka.connector import read, why
from delaywheel_audit.kafka.errors import KafkaSourceError
from delaywheel_audit.kafka.groups import committed
from delaywheel_audit.kafka.plan import Plan, check_topics, plan
from delaywheel_audit.kafka.questions import KafkaQuestions, Place
from delaywheel_audit.sources.ledger_files import LedgerFolder, Listing
from delaywheel_replica.core.protocol.control import IngressRecord

LEDGER_SCHEMA = "id binary, due_ms long, accepted_at_ms long, topic string, wheel string, seq long"
_COLUMNS = (
    *("topic", "partition", "offset", "timestamp_ms", "timestamp_type"),
    *("dw_id", "dw_due_ms", "dw_accepted_ms", "dw_wheel", "dw_forwarded_ms", "dw_committed_ms"),
    "dw_malformed",
)
_WHOLE = {"ignoreMissingFiles": "false", "ignoreCorruptFiles": "false"}
"""Whatever the session says: a file that is not read would be missing acceptances."""
_OPEN_TRANSACTION_S = 30.0
"""The service's own transactions end within ten seconds."""


class HeldBackError(Exception):
    """An unfinished transaction holds back Kafka's records from every reader."""


class KafkaPlace:
    """How Kafka is reached, and what of it is read.

    Attributes:
        cluster: Whose messages are read: others may deliver to the same topics.
    """

    def __init__(self, client: ClientSettings, cluster: str) -> None:
        self.cluster = cluster
        self._client = client
        self._read: list[Plan] = []

    def pin(self, topics: Sequence[str], from_ms: int | None, to_ms: int | None) -> Plan:
        """Fixes what is read of some topics; absent ones count as empty."""
        return plan(topics, self._questions(), from_ms=from_ms, to_ms=to_ms)

    def read(self, spark: SparkSession, plan: Plan) -> DataFrame:
        """Reads the records of a plan."""
        self._read.append(plan)
        return read(spark, self._client, plan)

    def records(self, spark: SparkSession, plan: Plan) -> DataFrame:
        """Returns messages with the parsed content of our headers, but no other cluster's.

        One whose headers name no cluster is of an earlier release, or nobody's.
        """
        cluster = F.col("dw_cluster")
        found = with_own_headers(self.read(spark, plan))
        return found.where(cluster.isNull() | (cluster == self.cluster)).select(*_COLUMNS)

    def confirm(self) -> None:
        """Confirms, after all reads, that they were of the topics that were planned.

        Raises:
            KafkaSourceError: TOPIC_GONE or TOPIC_RECREATED.
        """
        asked = self._questions()
        for each in self._read:
            check_topics(each, asked)

    def why(self, error: Exception) -> KafkaSourceError | None:
        """Returns what of Kafka made Spark fail; None: nothing of Kafka."""
        return why(error, self._read, self._client)

    def compacted(self, topics: Sequence[str]) -> set[str]:
        """Returns which of these topics are compacted, as far as that may be known."""
        asked = self._questions()
        there = [name for name, found in asked.describe(topics).items() if found is not None]
        return asked.compacted(there)

    def wait_for_transactions(self, topics: Sequence[str]) -> None:
        """Waits until every transaction that is in Kafka now has ended.

        A progress record may be seen a moment before the messages of its own transaction: each
        partition learns of the end for itself.

        Raises:
            HeldBackError: Some transaction does not end.
        """
        asked = self._questions()
        described = asked.describe(topics)
        places = [
            (name, partition)
            for name, found in described.items()
            if found is not None
            for partition in found.partitions
        ]
        ends = asked.log_ends(places)
        deadline = time.monotonic() + _OPEN_TRANSACTION_S
        while True:
            stable = asked.stable_ends(places)
            behind = [place for place in places if stable[place] < ends[place]]
            if not behind:
                return
            if time.monotonic() > deadline:
                topic, partition = behind[0]
                raise HeldBackError(
                    f"{topic} [{partition}]: a transaction is open at offset {stable[behind[0]]} "
                    f"of {ends[behind[0]]} for {_OPEN_TRANSACTION_S:.0f} s, so records behind "
                    "it cannot be read; find its producer (kafka-transactions.sh find-hanging), "
                    "or run this again when it has ended"
                )
            time.sleep(0.1)

    def are_settled(self, settled: Mapping[Place, IngressRecord], before_ms: int) -> bool:
        """Whether the records of ingress topics that were written before a time are settled."""
        asked = self._questions()
        later = asked.first_since(settled, before_ms)
        last = asked.latest(settled)  # behind it there may be ends of transactions
        ends = {at: last[at] + 1 if offset is None else offset for at, offset in later.items()}
        return all(record.next_offset >= ends[at] for at, record in settled.items())

    def committed(self, group: str, topics: Sequence[str]) -> dict[str, dict[int, int]] | None:
        """Returns how far a group has come in topics; None: Kafka does not say it."""
        found = self._questions().describe(topics)
        partitions = {name: one.partitions for name, one in found.items() if one is not None}
        return committed(self._client, group, partitions)

    def _questions(self) -> KafkaQuestions:
        return KafkaQuestions(self._client)


def read_ledger(spark: SparkSession, folder: LedgerFolder, listing: Listing) -> DataFrame:
    """Reads the rows of these files, each once."""
    rows: DataFrame | None = None
    for each in listing.reads():
        reader = spark.read.schema(LEDGER_SCHEMA).options(**_WHOLE)
        part = reader.parquet(*folder.spark_paths(each.files))
        if each.behind_seq:
            part = part.where(F.col("seq") > each.behind_seq)
        rows = part if rows is None else rows.unionByName(part)
    return spark.createDataFrame([], LEDGER_SCHEMA) if rows is None else rows


def topics_in(*rows: DataFrame) -> list[str]:
    """Returns the topics named by ledger and outcomes, reading one column of each."""
    found = [part.select("topic").where("topic is not null").distinct() for part in rows]
    return sorted({row["topic"] for part in found for row in part.collect()})
