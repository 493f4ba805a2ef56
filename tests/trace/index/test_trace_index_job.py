"""The job on real Kafka and Spark: what is told becomes an index, each event once."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession

from delaywheel_audit.kafka import plan
from delaywheel_audit.kafka.errors import KafkaSourceError
from delaywheel_trace.index.folder import IndexFolder
from delaywheel_trace.job import batches, job
from delaywheel_trace.job.lock import only_job
from local.loopback.kafka import KafkaBroker, free_ports
from local.loopback.shared import JoinedBroker
from support.kafka.read_committed import create_topic, delete_topic
from support.kafka.rights import Rights, documented_of
from support.kafka.told import Told
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka


@pytest.fixture
def told(kafka: KafkaBroker, cluster_id: str, tmp_path: Path) -> Told:
    return Told(kafka, cluster_id, tmp_path)


@pytest.fixture
def as_listed(told: Told, kafka: JoinedBroker) -> Iterator[None]:
    """The job is a user with the rights that docs/KAFKA.md lists."""
    with Rights.of(kafka) as rights:
        rights.allow_all(documented_of("trace-index", told.cluster))
        told.write_settings(rights.user_settings)
        yield


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_TRIGGER", "100 milliseconds")


@contextmanager
def running(told: Told, spark: SparkSession, **more: Any) -> Iterator[list[Exception]]:
    """A job on a thread; what it ends with is in the list."""
    ended, failures = threading.Event(), []

    def run() -> None:
        try:
            job.run(told.options(**more), ended, spark)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield failures
    finally:
        ended.set()
        thread.join(60)
        assert not thread.is_alive()


def wait_for(holds: Callable[[], bool], failures: list[Exception]) -> None:
    def is_so() -> bool:
        if failures:
            raise failures[0]
        return holds()

    wait_until("it is in the index", is_so, timeout_s=300)  # a first query on a busy machine


@pytest.mark.usefixtures("as_listed")
def test_both_topics_are_in_the_index_and_what_is_broken_beside_it(
    told: Told, spark: SparkSession
) -> None:
    told.tell(3)
    outcome = {"outcome": "cancelled", "id": "07" * 16, "due_ms": 9, "topic": "orders", "seq": 5}
    told.send(1, json.dumps(outcome).encode(), b'"none"')
    told.send(0, b"{", b'{"v":1}')
    (port,) = free_ports(1)
    with running(told, spark, metrics_listen=("127.0.0.1", port)) as failures:
        wait_for(lambda: len(told.events()) == 4 and len(told.layout().bad) > 0, failures)
        for path, answer in (("healthz", b"ok\n"), ("metrics", b"_index_events_total")):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=30) as said:
                assert answer in said.read()
        told.tell(2)
        wait_for(lambda: len(told.events()) == 6, failures)
    kinds = sorted((event["kind"], event["status"]) for event in told.events())
    assert kinds == [("outcome", "cancelled")] + [("sent", None)] * 5
    assert sum(bad.records for bad in told.layout().bad) == 3
    (line, *_) = (told.index / told.layout().bad[0].path).read_text().splitlines()
    assert set(json.loads(line)) == {"place", "reason", "begins"}


def test_each_event_is_there_once_whatever_fails_between_its_steps(
    told: Told, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = IndexFolder._move
    moments: list[str] = []

    def failing(self: IndexFolder, path: str, final: str) -> None:
        moment = moments.pop() if moments and "/b-" in final else ""
        if moment == "before":
            raise RuntimeError(moment)
        move(self, path, final)
        if moment == "after":
            raise RuntimeError(moment)

    monkeypatch.setattr(IndexFolder, "_move", failing)

    def goes_on_until(moment: str, failures: list[Exception]) -> None:
        if told.number > 0:  # what the one before has left is done with
            told.tell(3)
            wait_for(lambda: len(told.events()) == 3 * told.number, failures)
        moments.append(moment)
        told.tell(3)
        wait_for(lambda: False, failures)

    for moment in ("after", "before"):
        with running(told, spark) as failures, pytest.raises(RuntimeError, match=moment):
            goes_on_until(moment, failures)
        assert len(told.events()) == 3 * (told.number - (moment == "before"))
    with running(told, spark) as failures:
        wait_for(lambda: len(told.events()) == 3 * told.number, failures)
    numbers = range(1, told.number + 1)
    assert told.identities() == {(told.reporter, n, row) for n in numbers for row in range(3)}


def test_a_second_job_is_told_who_is_the_first(
    told: Told, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with only_job(told.folder):
        assert job.main(told.options()) == job.COULD_NOT_GO_ON
    assert f"INDEX_TAKEN: {told.index}: process {os.getpid()} on" in capfd.readouterr().err


def test_a_lost_checkpoint_has_everything_read_again_and_nothing_overwritten(
    told: Told, spark: SparkSession
) -> None:
    told.tell(3)
    with running(told, spark) as failures:
        wait_for(lambda: len(told.events()) == 3, failures)
    before = {file.path for file in told.layout().counting}
    shutil.rmtree(told.index / "checkpoint")
    told.tell(2)
    with running(told, spark) as failures:
        wait_for(lambda: len(told.identities()) == 5 and len(told.events()) == 8, failures)
    assert before < {file.path for file in told.layout().counting}


def test_records_that_are_gone_end_it_and_from_now_on_the_gap_is_noted(
    told: Told, spark: SparkSession
) -> None:
    told.send(1, b"{}")
    with running(told, spark) as failures:
        wait_for(lambda: len(told.layout().bad) == 1, failures)
    told.send(1, b"{}", b"{}")
    place = TopicPartition(told.topics[1], 0, 2)
    admin = AdminClient({"bootstrap.servers": told.kafka.address})
    admin.delete_records([place])[place].result(60)
    with running(told, spark) as failures, pytest.raises(KafkaSourceError, match="OFFSETS_GONE"):
        wait_for(lambda: False, failures)
    with running(told, spark, from_now=True) as failures:
        wait_for(lambda: len(told.layout().gaps) == 1, failures)
        (gap,) = told.layout().gaps
        noted = json.loads((told.index / gap.path).read_text())
        assert (noted["from"][told.topics[1]], noted["to"][told.topics[1]]) == ({"0": 1}, {"0": 3})
        told.tell(1)
        wait_for(lambda: len(told.events()) == 1, failures)
    assert sum(bad.records for bad in told.layout().bad) == 1


def test_outcomes_that_are_gone_before_an_index_begins_are_a_gap_up_to_the_first_that_is_there(
    told: Told, spark: SparkSession
) -> None:
    told.send(1, b"{}")
    time.sleep(0.01)
    told.send(1, b"{}")
    place = TopicPartition(told.topics[1], 0, 1)
    admin = AdminClient({"bootstrap.servers": told.kafka.address})
    admin.delete_records([place])[place].result(60)
    gone_ms = int(time.time() * 1000)
    with running(told, spark) as failures:
        wait_for(lambda: len(told.layout().bad) == 1, failures)
    (gap,) = told.layout().gaps
    assert gap.from_ms == 0
    assert gone_ms - 60_000 < gap.to_ms <= gone_ms


def test_topics_that_were_made_anew_end_it(told: Told, spark: SparkSession) -> None:
    for _ in range(3):
        told.tell(1)
    with running(told, spark) as failures:
        wait_for(lambda: len(told.events()) == 3, failures)
    for topic in told.topics:
        delete_topic(told.kafka.address, topic)
    told.make_topics()
    for more in (0, 4):  # then there are fewer than were read, and more
        for _ in range(more):
            told.tell(1)
        with (
            running(told, spark) as failures,
            pytest.raises(KafkaSourceError, match="TOPIC_RECREATED"),
        ):
            wait_for(lambda: False, failures)
        assert len(told.events()) == 3


def test_a_topic_that_is_made_anew_while_it_runs_ends_it(
    told: Told, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    told.tell(3)
    check = plan.check_topics

    def made_anew_first(*arguments: Any) -> None:
        monkeypatch.setattr(batches, "check_topics", check)
        delete_topic(told.kafka.address, told.topics[0])
        create_topic(told.kafka.address, told.topics[0], partitions=3)
        check(*arguments)

    monkeypatch.setattr(batches, "check_topics", made_anew_first)
    with running(told, spark) as failures, pytest.raises(KafkaSourceError, match="TOPIC_RECREATED"):
        wait_for(lambda: False, failures)
    assert told.events() == []


def test_a_full_disk_is_waited_for(
    told: Told,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    put, is_full = IndexFolder.put, threading.Event()
    is_full.set()

    def full(self: IndexFolder, path: str, write: Callable[[Any], object]) -> None:
        if is_full.is_set() and "/b-" in path:
            raise OSError(errno.ENOSPC, "No space left on device")
        put(self, path, write)

    monkeypatch.setattr(IndexFolder, "put", full)
    monkeypatch.setattr(batches, "_AGAIN_S", 0.1)
    told.tell(3)
    with running(told, spark) as failures:
        said = ""
        while "waiting: the index cannot be written: [Errno 28] No space" not in said:
            assert not failures
            said += capfd.readouterr().err
            time.sleep(0.05)
        assert told.events() == []
        is_full.clear()
        wait_for(lambda: len(told.events()) == 3, failures)


def test_spark_keeps_nothing_of_a_batch_that_was_read(spark: SparkSession) -> None:
    def used_bytes() -> int:
        assert spark._jvm is not None
        machine = spark._jvm.java.lang.Runtime.getRuntime()
        machine.gc()
        return int(machine.totalMemory() - machine.freeMemory())

    records = spark.sql("SELECT repeat('x', 4 << 20) AS value FROM range(2)")
    before_bytes = used_bytes()
    for _ in range(8):
        assert sum(len(row["value"]) for row in batches._rows_of(records)) == 8 << 20
    # What the tests before this one leave behind comes and goes, some of it after a second
    # collection; of these 64 MiB nothing would ever go.
    wait_for(lambda: used_bytes() - before_bytes < 24 << 20, failures=[])
