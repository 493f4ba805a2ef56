"""Processes are killed at random: what goes through ingress, or is changed, arrives once, in time.

Some records go to consumers that fail by a plan, and whose retries are records of the ingress topic
again: each history must be exactly its plan's. Meanwhile other messages are sent to a node, and
rescheduled, or cancelled in groups: none of them is at both dues, and none at neither. In the end
nothing is left behind, and the books show the same. As many records as `DELAYWHEEL_STORM_RECORDS`
says; the figures are printed (`pytest -s`).

A night's. A push kills each of them by itself: consumers
(tests/consumer/storms/test_killed_consumers.py), nodes and their processes under load
(tests/e2e/one_node/test_exactly_once.py), leaders, a broker of three; and the demo compares a run's
messages across a kill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from confluent_kafka import Message as KafkaMessage
from pyspark.sql import SparkSession

from delaywheel import Client
from delaywheel_audit import job
from delaywheel_audit.options import Options
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from local.loopback.cluster import LocalCluster
from local.loopback.kafka import KafkaBroker
from local.loopback.node import PROCESSES, Node, send_signal
from support.consumer.killed import Consumers, check_histories
from support.consumer.plan import Plan
from support.kafka.read_committed import CommittedReader, create_topic, read_all
from support.process.night import at_night
from support.services.changing import Changing
from support.services.ingress import IngressLoad, faults_of
from support.services.trio import seen_by
from support.services.waiting import wait_until

pytestmark = [at_night, pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]

RECORDS = int(os.environ.get("DELAYWHEEL_STORM_RECORDS", "1400"))
SEED = int(os.environ.get("DELAYWHEEL_STORM_SEED", "12"))
"""With 1,400 records the leader is killed, and then the broker."""
PER_TURN = max(30, RECORDS // 2_000)
AHEAD_MS = 8_000
WORK_PER_TURN = 2
"""Records for the consumers, in each tenth of a second."""
PARTITIONS = 3
CHANGES = "changes"
"""The topic of messages that are rescheduled and cancelled."""
PATIENCE_S = 300
LOOK_EVERY = 500
"""Messages; then nodes that died are started again."""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KafkaBroker]:
    """A broker that the test may kill."""
    with KafkaBroker(tmp_path / "kafka") as running:
        yield running


@pytest.fixture
def cluster(broker: KafkaBroker, tmp_path: Path) -> Iterator[LocalCluster]:
    settings = {
        "cluster_id": "storm",
        "late_window_seconds": 30,
        "ledger_seal_seconds": 1,
        "metrics_listen": None,
        "ledger_uri": str(tmp_path / "ledger"),
    }
    with LocalCluster(
        nodes=3, kafka=broker.address, folder=tmp_path / "cluster", settings=settings
    ) as running:
        running.wait_until_accepting()
        yield running


class Storm:
    """Kills random processes, and waits until messages are accepted again.

    Attributes:
        kills: how often each was killed.
    """

    def __init__(self, cluster: LocalCluster, broker: KafkaBroker, consumers: Consumers) -> None:
        self.kills: Counter[str] = Counter()
        self._cluster = cluster
        self._broker = broker
        self._consumers = consumers
        self._random = random.Random(SEED)

    def strike(self) -> None:
        """Kills a consumer, and one of the things it depends on."""
        self._consumers.kill(self._random.randrange(3))
        self.kills["consumer"] += 1
        kind = self._random.choice(["cleaner", "server", "node", "any node", "broker"])
        self.kills[kind] += 1
        if kind == "broker":
            self._broker.kill()
            self._broker.start()
        elif kind == "any node":
            self._random.choice(self._cluster.nodes).kill()
        else:
            leader = self._leader()
            which = PROCESSES if kind == "node" else (f"{kind}_pid",)
            send_signal(leader.pids(which), signal.SIGKILL)
        self.watched("all take messages", lambda: self._cluster.accepts)

    def watched(self, what: str, holds: Callable[[], bool]) -> None:
        """Waits; nodes that died are started again meanwhile."""

        def look() -> bool:
            self._cluster.watch()
            return holds()

        wait_until(what, look, timeout_s=PATIENCE_S, every_s=0.1)

    def _leader(self) -> Node:
        found: list[Node] = []

        def leads() -> bool:
            found[:] = filter(None, [self._cluster.leader()])
            return bool(found)

        self.watched("somebody leads", leads)
        return found[0]


def reconciled(broker: KafkaBroker, folder: Path, spark: SparkSession) -> dict[str, Any]:
    """The report of the audit, which does not know what was sent."""
    arguments = [
        *("--cluster", "storm", "--ledger", str(folder / "ledger"), "--kafka", broker.address),
        *("--output", str(folder / "books"), "--late-tolerance", "600s", "--no-page"),
    ]
    report = job.run(spark, Options.parse(arguments))
    rows = pq.read_table(folder / "books" / "buckets").to_pylist()
    counts = ("accepted", "acknowledged", "forwarded", "duplicates_dropped")
    through_ingress = {
        name: sum(row[name] for row in rows if row["topic"] != CHANGES) for name in counts
    }
    return {"findings": report.findings, "cancelled": report.counts["cancelled"], **through_ingress}


class Work:
    """Records for consumers, and their histories.

    Attributes:
        plan: What the consumers do.
        load: Sends to them through ingress.
    """

    def __init__(self, broker: KafkaBroker, folder: Path) -> None:
        self.plan = Plan(broker.address, "storm", "work", "crew", SEED, str(folder / "handled"))
        self.load = IngressLoad(
            broker.address,
            "storm",
            "work",
            ahead_ms=AHEAD_MS,
            per_turn=WORK_PER_TURN,
            seed=SEED,
            first_number=0,
        )
        self._broker = broker
        create_topic(broker.address, "work", partitions=PARTITIONS)

    @property
    def retries(self) -> int:
        """How many retries the plan has for the records sent."""
        return sum(map(self.plan.retries, range(len(self.load.sent))))

    def have_all_come_back(self) -> bool:
        """Whether every retry and every dead letter is there, if not more."""
        deaths = sum(map(self.plan.dies, range(len(self.load.sent))))
        return len(self._read("work-retry-crew")) >= self.retries and (
            len(self._read("work-dead-crew")) >= deaths
        )

    def check(self) -> int:
        """Checks deliveries and each history; returns the greatest lateness of a retry."""
        faults = faults_of(self._read("work"), self.load.sent)
        assert not faults, faults
        back, dead = self._read("work-retry-crew"), self._read("work-dead-crew")
        return check_histories(self.plan, len(self.load.sent), back, dead)

    def _read(self, topic: str) -> list[KafkaMessage]:
        return read_all(self._broker.address, topic, partitions=PARTITIONS)


def test_everything_is_killed_at_random(
    cluster: LocalCluster, broker: KafkaBroker, tmp_path: Path, spark: SparkSession
) -> None:
    create_topic(broker.address, "orders", partitions=PARTITIONS)
    create_topic(broker.address, CHANGES)
    work = Work(broker, tmp_path)
    changing = Changing(Client(cluster.nodes[0].address, timeout=30.0), CHANGES)
    with Consumers(work.plan, tmp_path) as consumers:
        storm = Storm(cluster, broker, consumers)
        figures = blown_through(storm, work, changing, broker)
        consumers.check_alive()
    last_s = max(time.time(), *changing.rescheduled.values())
    storm.watched("nothing of it is left", lambda: is_tidy(cluster, last_s))
    with CommittedReader(broker.address, CHANGES) as reader:
        changing.assert_true(reader)
    print(json.dumps(figures))  # noqa: T201 - what was asked for
    books = reconciled(broker, tmp_path, spark)
    sent = figures["sent"] + figures["work"] + figures["retries"]
    assert (books["findings"], books["acknowledged"]) == ({}, sent), figures
    assert books["forwarded"] == sent


def blown_through(
    storm: Storm, work: Work, changing: Changing, broker: KafkaBroker
) -> dict[str, Any]:
    """Sends and kills, waits for everything, and checks it; returns the figures."""
    began = time.monotonic()
    pauses = random.Random(SEED)
    load = IngressLoad(
        broker.address, "storm", "orders", ahead_ms=AHEAD_MS, per_turn=PER_TURN, seed=SEED
    )
    with load, work.load, changing:
        while len(load.sent) < RECORDS:
            load.wait_for_more(round(PER_TURN * pauses.uniform(5, 40)))
            storm.watched("more are changed", changing.has_more)
            storm.strike()
    sent_s = time.monotonic() - began
    with CommittedReader(broker.address, "orders", partitions=PARTITIONS) as reader:
        missing, seen = set(load.sent), 0

        def all_came() -> bool:
            nonlocal seen
            enough = min(seen + LOOK_EVERY, seen + len(missing))
            came = reader.wait_for(enough, timeout_s=PATIENCE_S)
            missing.difference_update(message.value() or b"" for message in came[seen:])
            seen = len(came)
            return not missing

        storm.watched("all is there", all_came)
    storm.watched("all retries are there", work.have_all_come_back)
    faults = faults_of(read_all(broker.address, "orders", partitions=PARTITIONS), load.sent)
    figures = {
        "sent": len(load.sent),
        "kills": dict(storm.kills),
        "seconds": round(sent_s),
        **asdict(faults),
        "work": len(work.load.sent),
        "retries": work.retries,
        "rescheduled": len(changing.rescheduled),
        "cancelled": len(changing.cancelled),
        "latest_retry_ms": work.check(),
    }
    assert not faults, figures
    return figures


def is_tidy(cluster: LocalCluster, last_s: float) -> bool:
    """Only wheels in use are left on every node, and no slot file up to this time."""
    in_use = {pb.WHEEL_STATE_OPEN, pb.WHEEL_STATE_SPARE}
    for node in cluster.nodes:
        seen = seen_by(node)
        is_over = seen.floor > last_s and len(seen.wheels) == 2 * len(cluster.nodes)
        if not is_over or any(row.state not in in_use for row in seen.wheels):
            return False
        try:
            slots = [int(path.stem) for path in node.data.rglob("*.slot")]
        except FileNotFoundError:
            return False  # it is being tidied up
        if any(slot < seen.floor for slot in slots):
            return False
    return True
