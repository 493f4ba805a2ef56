"""The source in Spark, on the real broker: what needs Spark to show. About 30 s."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from delaywheel_audit.kafka.columns import schema_of
from delaywheel_audit.kafka.errors import KafkaSourceError, Reason, reason_of
from delaywheel_audit.kafka.plan import Plan
from delaywheel_audit.kafka.source import FORMAT, all_columns, archive_in, register
from delaywheel_audit.matching.retention import Deleted, deleted
from delaywheel_audit.sources.inputs import KafkaPlace
from delaywheel_audit.sources.ledger_files import END_MS
from support.kafka.audit_topic import AuditTopic, numbered

pytestmark = pytest.mark.kafka

MakeTopic = Callable[..., AuditTopic]

OURS = [
    ("dw-id", b"0190f5ee7d5a7cc0b8a60123456789ab"),
    ("dw-due", b"1767225600123"),
    ("dw-accepted", b"1767225600000"),
    ("dw-wheel", b"shop/node-1.7"),
]


@pytest.fixture
def load(spark: SparkSession) -> Callable[..., DataFrame]:
    register(spark)

    def load_(topic: AuditTopic, *, schema: str | None = None, **more: str) -> DataFrame:
        reader = spark.read.format(FORMAT).options(**topic.options(**more))
        return (reader if schema is None else reader.schema(schema)).load()

    return load_


Load = Callable[..., DataFrame]


def reason(read: Callable[[], Any]) -> KafkaSourceError:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Spark has several for it
        read()
    found = reason_of(caught.value)
    assert found is not None, caught.value
    return found


def test_the_types_are_those_that_spark_wants() -> None:
    assert to_arrow_schema(all_columns(), timezone="UTC") == schema_of(None)


def test_the_package_is_sent_in_one_file(tmp_path: Path) -> None:
    archive = archive_in(tmp_path)
    code = "import delaywheel_audit; print(delaywheel_audit.__file__)"
    # Isolated: nothing that is installed is found.
    first = f"import sys; sys.path.insert(0, {str(archive)!r}); "
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", first + code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"{archive}/delaywheel_audit/__init__.py"
    assert "delaywheel_audit/kafka/source.py" in zipfile.ZipFile(archive).namelist()


def test_all_columns_of_all_partitions(topic: MakeTopic, load: Load) -> None:
    made = topic(partitions=3)  # the second stays empty
    made.produce([b"v"], key=b"k", timestamps=[1_767_225_600_124], headers=[*OURS, ("n", None)])
    made.produce([None], partition=2, timestamps=[1_767_225_600_999])
    first, last = load(made).orderBy("partition").collect()
    assert first.asDict() == {
        "topic": made.name,
        "partition": 0,
        "offset": 0,
        "timestamp_ms": 1_767_225_600_124,
        "timestamp_type": "CREATE_TIME",
        "key": b"k",
        "value": b"v",
        "headers": [Row(name=name, value=value) for name, value in [*OURS, ("n", None)]],
        "dw_id": bytes.fromhex("0190f5ee7d5a7cc0b8a60123456789ab"),
        "dw_due_ms": 1_767_225_600_123,
        "dw_accepted_ms": 1_767_225_600_000,
        "dw_cluster": "shop",
        "dw_wheel": "node-1.7",
        "dw_forwarded_ms": None,
        "dw_committed_ms": None,
        "dw_malformed": False,
    }
    assert (last.partition, last.key, last.value, last.headers) == (2, None, None, [])


def test_several_input_partitions_give_the_rows_of_one(topic: MakeTopic, load: Load) -> None:
    made = topic()
    made.transaction(numbered(40))
    made.transaction([b"aborted"] * 20, commits=False)
    made.transaction(numbered(40, start=40))
    one = load(made, recordsPerPartition="1000", columns="offset,value")
    many = load(made, recordsPerPartition="18", columns="offset,value")
    assert (one.rdd.getNumPartitions(), many.rdd.getNumPartitions()) == (1, 6)
    assert one.collect() == many.collect()
    assert [bytes(row.value) for row in many.collect()] == numbered(80)


def test_only_the_columns_asked_for(topic: MakeTopic, load: Load) -> None:
    made = topic()
    made.produce(numbered(2), headers=OURS)
    by_option = load(made, columns="dw_wheel,offset")
    assert by_option.columns == ["dw_wheel", "offset"]
    by_schema = load(made, schema="dw_wheel string, offset long")
    assert by_option.collect() == by_schema.collect() == [("node-1.7", 0), ("node-1.7", 1)]
    nested = "headers array<struct<name: string, value: binary>>"
    assert load(made, schema=nested).collect()[0].headers[0].name == "dw-id"
    assert load(made, columns="topic").count() == 2
    error = reason(lambda: load(made, schema="offset string").collect())
    assert error.reason is Reason.OPTION_INVALID
    assert "no offset string; there are topic string" in error.message


def test_nothing_to_read_is_no_rows(topic: MakeTopic, load: Load) -> None:
    assert load(topic(partitions=2)).collect() == []


def test_pinned_ranges_are_read_by_every_action(topic: MakeTopic, load: Load) -> None:
    made = topic()
    made.produce(numbered(5))
    pinned = load(made, columns="offset", ranges=made.plan().to_json())
    today = load(made, columns="offset")
    made.produce(numbered(5))
    assert (pinned.count(), today.count()) == (5, 10)
    assert pinned.unionAll(pinned).count() == 10


def test_what_goes_wrong_has_its_name_in_spark_too(topic: MakeTopic, load: Load) -> None:
    made = topic()
    made.produce(numbered(10))
    assert reason(lambda: load(made, column="x")).reason is Reason.OPTION_INVALID
    missing = reason(lambda: load(made, topics="no-such-topic").collect())
    assert missing.reason is Reason.TOPIC_MISSING
    # Planned, then taken away before the tasks run.
    planned = load(made, columns="offset")
    planned.rdd.getNumPartitions()
    made.delete_records(5)
    gone = reason(planned.rdd.count)
    assert gone.reason is Reason.OFFSETS_GONE
    assert f"{made.name} [0]: offsets 0 to 5 of a range that ends at 10" in gone.message


def test_secrets_are_in_no_plan(spark: SparkSession, topic: MakeTopic, load: Load) -> None:
    made = topic()
    made.produce(numbered(1))
    secrets = {"kafka.sasl.password": "hush-1", "kafka.ssl.key.password": "hush-2"}
    frame = load(made, columns="offset", **secrets).where("offset >= 0")
    assert frame.count() == 1
    reported = io.StringIO()
    with redirect_stdout(reported):
        frame.explain(mode="extended")
        frame.explain(mode="formatted")
    jvm: Any = frame
    reported.write(jvm._jdf.queryExecution().toString())
    frame.createOrReplaceTempView("records")
    spark.sql("DESCRIBE EXTENDED records").show(truncate=False)
    assert FORMAT in reported.getvalue()
    assert "hush" not in reported.getvalue()
    error = reason(lambda: load(made, topics="no-such-topic", **secrets).collect())
    assert error.reason is Reason.TOPIC_MISSING


def test_what_is_deleted_reaches_up_to_the_first_of_our_records_that_is_left(
    spark: SparkSession, topic: MakeTopic
) -> None:
    register(spark)
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
    place = KafkaPlace({"bootstrap.servers": cut.bootstrap}, "shop")
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
