"""Planned ranges read by Spark's connector, whole or not at all, on the real broker. About 30 s."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from pyspark.sql import DataFrame, Row, SparkSession

from delaywheel_audit.kafka import connector
from delaywheel_audit.kafka.client import ClientSettings
from delaywheel_audit.kafka.errors import KafkaSourceError, Reason
from delaywheel_audit.kafka.plan import Plan, Range, TopicPlan
from delaywheel_audit.matching.retention import Deleted, deleted
from delaywheel_audit.shipping import archive_in
from delaywheel_audit.sources.inputs import KafkaPlace
from delaywheel_audit.sources.ledger_files import END_MS
from local.loopback.kafka import KafkaBroker
from support.kafka.audit_topic import AuditTopic, numbered
from support.kafka.proxy import KafkaProxy
from support.kafka.unreadable import send_unreadable

pytestmark = pytest.mark.kafka

MakeTopic = Callable[..., AuditTopic]

OURS = [
    ("dw-id", b"0190f5ee7d5a7cc0b8a60123456789ab"),
    ("dw-due", b"1767225600123"),
    ("dw-accepted", b"1767225600000"),
    ("dw-wheel", b"shop/node-1.7"),
]


class Reading:
    """Reads topics as a reconciliation does."""

    def __init__(self, spark: SparkSession, topic: AuditTopic, *, timeout_s: float = 60) -> None:
        self._spark = spark
        self._topic = topic
        self.place = KafkaPlace(topic.client(timeout_s=timeout_s), "shop")

    def rows(self, plan: Plan | None = None) -> DataFrame:
        """Of a plan, or of all that is there now."""
        return self.place.read(self._spark, plan or self._topic.plan())

    def values(self, plan: Plan | None = None) -> list[bytes | None]:
        """In order."""
        found = self.rows(plan).select("partition", "offset", "value").collect()
        return [row.value and bytes(row.value) for row in sorted(found)]

    def between(self, *ranges: tuple[int, int]) -> list[list[int]]:
        """The offsets that are found in each of some ranges of partition 0, by one job."""
        plans = [Plan((TopicPlan(self._topic.name, None, (Range(0, *r),)),)) for r in ranges]
        frames = [self.rows(p).selectExpr("offset", f"{n} AS n") for n, p in enumerate(plans)]
        whole = frames[0]
        for frame in frames[1:]:
            whole = whole.unionAll(frame)
        rows = whole.collect()
        return [sorted(row.offset for row in rows if row.n == n) for n in range(len(ranges))]

    def failure(self, plan: Plan) -> KafkaSourceError:
        """What is said of a read that does not come to its end."""
        with pytest.raises(Exception) as caught:  # noqa: PT011 - Spark has several for it
            self.rows(plan).collect()
        assert isinstance(caught.value, Exception)
        found = self.place.why(caught.value)
        assert found is not None, caught.value
        return found


Read = Callable[..., Reading]


@pytest.fixture
def read(spark: SparkSession) -> Read:
    def read_(topic: AuditTopic, *, timeout_s: float = 60) -> Reading:
        return Reading(spark, topic, timeout_s=timeout_s)

    return read_


def with_range(plan: Plan, start: int, end: int) -> Plan:
    """The plan of one partition, with another range."""
    (only,) = plan.topics
    return replace(plan, topics=(replace(only, ranges=(Range(0, start, end),)),))


def test_all_columns_of_all_partitions(topic: MakeTopic, read: Read) -> None:
    made = topic(partitions=3)  # the second stays empty
    made.produce([b"v"], key=b"k", timestamps=[1_767_225_600_124], headers=[*OURS, ("n", None)])
    made.produce([None], partition=2, timestamps=[1_767_225_600_999])
    first, last = read(made).rows().orderBy("partition").collect()
    assert first.asDict() == {
        "topic": made.name,
        "partition": 0,
        "offset": 0,
        "timestamp_ms": 1_767_225_600_124,
        "timestamp_type": "CREATE_TIME",
        "key": b"k",
        "value": b"v",
        "headers": [Row(name=name, value=value) for name, value in [*OURS, ("n", None)]],
    }
    assert (last.partition, last.key, last.value, last.headers) == (2, None, None, [])


def test_the_brokers_own_time_is_told(topic: MakeTopic, read: Read) -> None:
    made = topic(config={"message.timestamp.type": "LogAppendTime"})
    made.produce([b"v"], timestamps=[5])
    (row,) = read(made).rows().collect()
    assert row.timestamp_type == "LOG_APPEND_TIME"
    assert row.timestamp_ms > 5


def test_nothing_to_read_is_no_rows(topic: MakeTopic, read: Read) -> None:
    assert read(topic(partitions=2)).rows().collect() == []


def test_a_name_of_a_header_that_is_no_utf_8_stops_nothing(topic: MakeTopic, read: Read) -> None:
    made = topic()
    send_unreadable(made.bootstrap, made.name)
    made.produce([b"behind"], headers=[("trace", b"1")])
    assert read(made).values() == [b"v", b"behind"]


def test_ranges_whose_last_offsets_are_never_seen_come_to_their_end(
    topic: MakeTopic, read: Read
) -> None:
    made = topic()
    made.produce(numbered(2))  # 0, 1
    made.transaction(numbered(2, start=2))  # 2, 3, its marker 4
    made.transaction([b"aborted"] * 3, commits=False)  # 5, 6, 7, its marker 8
    plan = made.plan()
    assert plan.ends() == {made.name: {0: 9}}
    assert read(made).values(plan) == numbered(4)
    # Ends in the middle: before a marker, at aborted records; and starts there.
    ranges = (0, 4), (0, 6), (1, 3), (3, 5), (4, 5), (4, 8), (6, 7), (8, 9)
    found = read(made).between(*ranges)
    assert found == [list(range(start, min(end, 4))) for start, end in ranges]


def test_several_tasks_read_what_one_does(
    topic: MakeTopic, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = topic(partitions=2)
    made.transaction(numbered(40))
    made.transaction([b"aborted"] * 20, commits=False)
    made.transaction(numbered(40, start=40))
    made.produce(numbered(10, start=80), partition=1)
    one = read(made).rows()
    monkeypatch.setitem(connector._OPTIONS, "maxRecordsPerPartition", "18")
    many = read(made).rows()
    assert (one.rdd.getNumPartitions(), many.rdd.getNumPartitions()) == (2, 7)
    assert sorted(one.collect()) == sorted(many.collect())
    assert read(made).values() == numbered(90)


def test_an_open_transaction_is_not_read_and_a_second_try_reads_the_same(
    topic: MakeTopic, read: Read
) -> None:
    made = topic()
    made.produce(numbered(3))
    producer = made.open_transaction(numbered(2, start=3))
    plan = made.plan()
    assert read(made).values(plan) == numbered(3)
    producer.commit_transaction(10)
    made.settle()
    made.produce(numbered(2, start=5))
    assert read(made).values(plan) == numbered(3)
    assert read(made).values() == numbered(7)


def test_what_retention_took_before_it_was_read_is_missed_by_name(
    topic: MakeTopic, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = topic()
    for start in range(0, 30, 10):
        made.produce(numbered(10, start=start))
    plan, reading = made.plan(), read(made)
    made.produce(numbered(10, start=30))
    # While it is read: the first of three tasks has fetched what the second one is to read.
    monkeypatch.setitem(connector._OPTIONS, "maxRecordsPerPartition", "10")
    monkeypatch.setitem(connector._OPTIONS, "kafka.max.partition.fetch.bytes", "1")
    rows = reading.rows(plan).toLocalIterator()
    assert next(rows).offset == 0
    made.delete_records(25)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Spark has several for it
        list(rows)
    assert isinstance(caught.value, Exception)
    said = f"OFFSETS_GONE: {made.name} [0]: offsets 0 to 25 of a range that ends at 30"
    assert str(reading.place.why(caught.value)).startswith(said)
    # What is still there may be read.
    assert read(made).values(with_range(plan, 25, 30)) == numbered(5, start=25)
    # All of the range.
    made.delete_records(35)
    assert read(made).failure(plan).reason is Reason.OFFSETS_GONE


@pytest.mark.parametrize("records", [3, 10])
def test_a_topic_made_again_since_planning(topic: MakeTopic, read: Read, records: int) -> None:
    made = topic()
    made.produce(numbered(10))
    plan, reading = made.plan(), read(made, timeout_s=6)
    made.delete()
    made.create()
    made.produce([b"of another"] * records)
    if records < 10:
        assert reading.failure(plan).reason is Reason.TOPIC_RECREATED
    else:  # nothing shows in what is read
        assert reading.values(plan) == [b"of another"] * 10
    with pytest.raises(KafkaSourceError, match="TOPIC_RECREATED"):
        reading.place.confirm()


def test_offsets_that_never_were_are_said(topic: MakeTopic, read: Read) -> None:
    made = topic()
    made.produce(numbered(5))
    further = with_range(made.plan(), 0, 9)
    failure = read(made, timeout_s=4).failure(further)
    assert failure.reason is Reason.OFFSETS_NOT_THERE
    assert "ends at 5" in failure.message


def test_a_broker_that_stays_away_is_said_in_bounded_time(kafka: KafkaBroker, read: Read) -> None:
    with KafkaProxy(kafka):
        made = AuditTopic(kafka.proxy_address)
        made.produce(numbered(10))
        plan = made.plan()
    began = time.monotonic()
    failure = read(made, timeout_s=5).failure(plan)
    assert failure.reason is Reason.BROKER_AWAY
    assert kafka.proxy_address in failure.message
    assert time.monotonic() - began < 60


def test_what_is_not_kafkas_fault_is_not_said_to_be(
    spark: SparkSession, topic: MakeTopic, read: Read
) -> None:
    made = topic()
    made.produce(numbered(2))
    plan, reading = made.plan(), read(made)
    reading.values(plan)
    made.delete_records(1)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Spark has several for it
        spark.range(1).selectExpr("raise_error('disk')").collect()
    assert isinstance(caught.value, Exception)
    assert reading.place.why(caught.value) is None


@contextmanager
def quick_cleaner(bootstrap: str) -> Iterator[None]:
    """The broker looks for segments to compact ten times a second, not every 15 s."""
    admin = AdminClient({"bootstrap.servers": bootstrap})

    def change(how: AlterConfigOpType) -> None:
        entry = ConfigEntry("log.cleaner.backoff.ms", "100", incremental_operation=how)
        wanted = ConfigResource(ResourceType.BROKER, "1", incremental_configs=[entry])
        admin.incremental_alter_configs([wanted])[wanted].result()

    change(AlterConfigOpType.SET)
    try:
        yield
    finally:
        change(AlterConfigOpType.DELETE)


def test_gaps_of_compaction_are_no_end(kafka: KafkaBroker, topic: MakeTopic, read: Read) -> None:
    settings = {
        "cleanup.policy": "compact",
        "segment.bytes": str(1024 * 1024),
        "min.cleanable.dirty.ratio": "0.01",
    }
    made = topic(config=settings)
    count = 24  # of 200 kB: five to a segment
    random = np.random.default_rng(5)
    pieces = [(start, start + 2) for start in range(0, count, 5)]
    with quick_cleaner(kafka.address):
        for number in range(count):
            made.produce([b"%d" % number + random.bytes(200_000)], key=b"%d" % (number % 2))
        assert made.plan().ends() == {made.name: {0: count}}
        deadline = time.monotonic() + 60
        # Segments are exchanged one after another: what is compared must be of one state.
        kept, found = list(range(count)), [[0]]
        while len(kept) > count // 2 or found[0] != kept:
            assert time.monotonic() < deadline, "nothing was compacted, or without end"
            kept = read(made).between((0, count))[0]
            found = read(made).between((0, count), *pieces)
    assert kept[-1] == count - 1
    assert found[1:] == [[at for at in kept if at in range(*piece)] for piece in pieces]


def test_secrets_are_in_no_plan(spark: SparkSession, topic: MakeTopic) -> None:
    made = topic()
    made.produce(numbered(1))
    secrets = {"ssl.key.password": "hush-1", "ssl.key.pem": "hush-2", "ssl.certificate.pem": "x"}
    login = {"sasl.mechanism": "PLAIN", "sasl.username": "a", "sasl.password": "hush-3"}
    # Nothing of it is used where neither TLS nor a login is asked for.
    client = ClientSettings({"bootstrap.servers": made.bootstrap} | secrets | login)
    frame = KafkaPlace(client, "shop").read(spark, made.plan()).where("offset >= 0")
    assert frame.count() == 1
    reported = io.StringIO()
    with redirect_stdout(reported):
        frame.explain(mode="extended")
        frame.explain(mode="formatted")
    jvm: Any = frame
    reported.write(jvm._jdf.queryExecution().toString())
    frame.createOrReplaceTempView("records")
    spark.sql("DESCRIBE EXTENDED records").show(truncate=False)
    assert "Kafka" in reported.getvalue()
    assert "hush" not in reported.getvalue()


def test_what_is_deleted_reaches_up_to_the_first_of_our_records_that_is_left(
    spark: SparkSession, topic: MakeTopic
) -> None:
    cut, emptied, whole, outcomes = topic(partitions=2), topic(partitions=2), topic(), topic()
    latest = topic(config={"cleanup.policy": "compact,delete"})
    for made in (cut, emptied, whole):
        made.produce([b"ours"] * 2, headers=OURS, timestamps=[1_000, 2_000])
        made.produce([b"somebody else's"], timestamps=[9_000])
        made.produce([b"ours"] * 2, headers=OURS, timestamps=[3_000, 4_000])
    outcomes.produce([b"{}"] * 2, timestamps=[5_000, 6_000])
    cut.delete_records(2)
    emptied.produce([b"ours"], partition=1, headers=OURS)
    emptied.delete_records(1, partition=1)
    outcomes.delete_records(1)
    place = KafkaPlace(cut.client(), "shop")
    names = [each.name for each in (cut, emptied, whole, latest)]
    compacted = place.compacted([*names, "no-such-topic"])
    assert compacted == {latest.name}

    def read(plan: Plan) -> DataFrame:
        return place.records(spark, plan)

    left = place.pin([*names, outcomes.name], None, None)
    found = deleted(left, outcomes.name, compacted, read)
    assert found == Deleted({cut.name: 3_000, emptied.name: END_MS}, 6_000, frozenset(compacted))
    whole_plan = place.pin([whole.name], None, None)
    assert not deleted(whole_plan, outcomes.name, set(), read)
    assert deleted(whole_plan, outcomes.name, {outcomes.name}, read).outcomes_ms == END_MS


def test_executors_get_all_that_they_import_but_numpy(tmp_path: Path) -> None:
    """Isolated: nothing that is installed is found."""
    archive = archive_in(tmp_path)
    (tmp_path / "installed").mkdir()
    for folder in (Path(np.__path__[0]), *Path(np.__path__[0]).parent.glob("numpy.libs")):
        (tmp_path / "installed" / folder.name).symlink_to(folder)
    code = (
        f"import sys; sys.path[:0] = [{str(archive)!r}, {str(tmp_path / 'installed')!r}]\n"
        "import delaywheel_audit.requests as it; print(it.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"{archive}/delaywheel_audit/requests.py"
