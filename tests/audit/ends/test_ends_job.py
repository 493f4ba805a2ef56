"""Both ends by the whole job, on real Kafka and Spark: consumers that commit, are killed, reset.

A push has one that reads some again and one that lags; each finding is judged in
test_ends_judged.py, and what a killed consumer has counted in tests/consumer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from pyspark.sql import SparkSession

from delaywheel import Handle, Message
from delaywheel.identity import WheelId
from delaywheel.ingress import counts_topic, ingress_topic, trace_topic
from delaywheel.message import Result
from delaywheel.trace import Trace
from delaywheel_audit.job import run
from delaywheel_audit.options import Options
from delaywheel_replica.core.protocol.control import progress_record
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.kafka_settings import KafkaNames
from local.books import make
from local.loopback.kafka import KafkaBroker
from support.consumer.counted import consume
from support.kafka.read_committed import create_topic
from support.process.night import NIGHT

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

MESSAGES = 300
COPIES = MESSAGES - 3  # of each hundred one is cancelled
WHEELS = [WheelId(node, 1) for node in ("n1", "n2", "n3")]


class Groups:
    """Consumer groups of one topic."""

    def __init__(self, address: str, cluster: str, topic: str) -> None:
        self._address = address
        self._cluster = cluster
        self._topic = topic

    def consume(self, group: str, most: int = COPIES, how: str = "ended") -> None:
        given = (self._address, self._cluster, self._topic, group, str(most), how)
        if how != "killed":
            consume(*given)
            return
        ended = subprocess.run(
            [sys.executable, "-m", "support.consumer.counted", *given],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=200,
            check=False,
        )
        assert ended.returncode == 9

    def move(self, group: str, by: int) -> None:
        """Moves the group's offset in one partition, by hand."""
        settings = {"bootstrap.servers": self._address, "group.id": group}
        consumer = Consumer(settings)
        try:
            at = TopicPartition(self._topic, 0)
            (now,) = consumer.committed([at], timeout=30)
            begin = max(now.offset, 0)
            consumer.commit(
                offsets=[TopicPartition(self._topic, 0, begin + by)], asynchronous=False
            )
        finally:
            consumer.close()


def send(address: str, cluster: str, ledger: Path, topic: str) -> None:
    """A program says that it sent what the ledger has of a topic, and one message more."""
    rows = [row for row in pq.read_table(ledger).to_pylist() if row["topic"] == topic]
    results = []
    for row in (*rows, {**rows[0], "id": bytes(16)}):
        due = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=row["due_ms"])
        message = Message(topic, b"v", id=row["id"], deliver_at=due)
        results.append(Result(message, Handle("n1.1", 1, message.id, topic), None))
    with Trace({"bootstrap.servers": address, "client.id": "web"}, cluster=cluster) as trace:
        trace.sent(results, 0.001, 1)
        assert trace.flush(60)


def test_faults_at_both_ends_are_found_and_told_apart(
    spark: SparkSession, kafka: KafkaBroker, cluster_id: str, tmp_path: Path
) -> None:
    topic = f"{cluster_id}-orders"
    while not 2 < time.time() % 60 < 55:  # all are due in one minute
        time.sleep(0.5)
    make(MESSAGES, tmp_path / "ledger", kafka.address, cluster=cluster_id, topics=[topic],
         rows_per_file=100)  # fmt: skip
    now_ms = int(time.time() * 1000)
    producer = Producer({"bootstrap.servers": kafka.address})
    key, value = progress_record(Progress(now_ms, None, dict.fromkeys(WHEELS, 5), now_ms // 1000))
    producer.produce(KafkaNames(cluster_id).control, value, key)
    assert producer.flush(60) == 0
    for name in (trace_topic(cluster_id), ingress_topic(cluster_id)):
        create_topic(kafka.address, name)
    stamped = {"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime"}
    create_topic(kafka.address, counts_topic(cluster_id), partitions=3, config=stamped)

    send(kafka.address, cluster_id, tmp_path / "ledger", topic)
    groups = Groups(kafka.address, cluster_id, topic)
    groups.consume("doubling")
    groups.move("doubling", -3)
    groups.consume("doubling", 3)
    groups.consume("lagging", 50)
    if NIGHT:
        groups.move("dropping", 5)
        groups.consume("dropping", COPIES - 5)
        groups.consume("killed", 50, "killed")
        groups.consume("killed", COPIES - 50)

    arguments = ["--cluster", cluster_id, "--ledger", str(tmp_path / "ledger"), "--ends"]
    output = ("--output", str(tmp_path / "output"))
    summary = run(spark, Options.parse([*arguments, "--kafka", kafka.address, *output]))

    found = pq.read_table(tmp_path / "output" / "findings").to_pylist()
    whose = Counter((row["kind"], row["detail"].partition(":")[0]) for row in found)
    assert whose == {
        ("lost_before", "sent"): 1,
        ("consumed_twice", "group doubling"): 1,
    } | ({("lost_after", "group dropping"): 1} if NIGHT else {})
    assert not summary.balanced
    rows = pq.read_table(tmp_path / "output" / "ends").to_pylist()
    (sent,) = (row for row in rows if row["group"] is None)
    counts = sent["said_sent"], sent["acceptances"], sent["forwarded"]
    assert counts == (MESSAGES + 1, MESSAGES, COPIES)
    more = {"dropping": ("lost_after", COPIES - 5), "killed": ("whole", COPIES)} if NIGHT else {}
    assert {row["group"]: (row["state"], row["consumed"]) for row in rows if row["group"]} == {
        "doubling": ("consumed_twice", COPIES + 3),
        "lagging": ("open", 50),
        **more,
    }
    assert summary.ends is not None
    assert summary.ends["said_sent"] == MESSAGES + 1
    page = (tmp_path / "output" / "page.html").read_text()
    assert "\u2192 doubling" in page
