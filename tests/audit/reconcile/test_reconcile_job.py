"""The whole job on real Kafka and Spark, over made-up books: some 60 s."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession

from delaywheel_audit.job import run
from delaywheel_audit.kafka.client import ClientSettings
from delaywheel_audit.matching.summary import COUNTS, Summary
from delaywheel_audit.options import Options
from delaywheel_audit.session import CouldNotRun
from delaywheel_audit.sources.inputs import KafkaPlace
from delaywheel_replica.core.protocol.control import IngressRecord, ingress_record
from delaywheel_replica.kafka_settings import KafkaNames
from local.books import make
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import create_topic
from support.process.night import at_night

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

NONE = dict.fromkeys((*COUNTS, "unpublished", "unbooked"), 0)


@pytest.fixture
def options(kafka: KafkaBroker, cluster_id: str, tmp_path: Path) -> Options:
    ledger = tmp_path / "ledger [1]"  # it is no pattern
    topics = (f"{cluster_id}-orders", f"{cluster_id}-bills")
    make(1_500, ledger, kafka.address, cluster=cluster_id, topics=topics, rows_per_file=100)
    settings = tmp_path / "node.toml"
    settings.write_text(
        f'cluster_id = "another"\nnode_id = "n1"\ndata_dir = "{tmp_path / "data"}"\n'
        f'ledger_uri = "{ledger}"\n'
        f'[kafka]\n"bootstrap.servers" = "{kafka.address}"\n'
    )
    output = ("--output", str(tmp_path / "output"))
    return Options.parse(["--settings", str(settings), "--cluster", cluster_id, *output])


def delete_first(address: str, topic: str, most: int) -> int:
    """Makes Kafka delete the first records of each partition; returns how many."""
    place = KafkaPlace(ClientSettings({"bootstrap.servers": address}), "any")
    ends = place.pin([topic], None, None).ends()[topic]
    cuts = [TopicPartition(topic, number, min(most, end)) for number, end in ends.items()]
    admin = AdminClient({"bootstrap.servers": address})
    for done in admin.delete_records(cuts).values():
        done.result(30)
    return sum(cut.offset for cut in cuts)


def forward_by(cluster: str, address: str, topic: str, due_ms: int) -> None:
    """Delivers messages as another cluster does, of wheels with the same names."""
    producer = Producer({"bootstrap.servers": address})
    for number in range(5):
        headers: list[tuple[str, str | bytes | None]] = [
            ("dw-id", f"{number:032x}"),
            ("dw-due", str(due_ms)),
            ("dw-accepted", str(due_ms - 1)),
            ("dw-wheel", f"{cluster}/n1.1" if number else f"{cluster}/ingress"),
        ]
        producer.produce(topic, b"another's", headers=headers)
    assert producer.flush(30) == 0


def send_on(cluster: str, address: str, topic: str) -> None:
    """Defers two messages: one's record is unread, the other's is gone."""
    names, producer = KafkaNames(cluster), Producer({"bootstrap.servers": address})
    create_topic(address, names.ingress)
    due_ms = int(time.time() * 1000) - 600_000
    key, value = ingress_record((names.ingress, 0), IngressRecord("id", 0))
    producer.produce(names.control, value, key)
    for number in (1, 2):
        named = {"outcome": "deferred", "id": f"{number:032x}", "due_ms": due_ms - 1}
        place = {"accepted_at_ms": due_ms - 2, "wheel": "n9.1", "seq": number}
        told = {**named, **place, "topic": topic, "until_ms": due_ms}
        producer.produce(names.outcomes, json.dumps(told))
    headers: dict[str, str | bytes | None] = {"dw-topic": topic, "dw-id": f"{1:032x}"}
    headers["dw-deliver-at"] = str(due_ms)
    producer.produce(names.ingress, headers=headers, partition=0, timestamp=due_ms - 1)
    assert producer.flush(30) == 0


def test_books_with_a_file_lost_and_records_deleted(
    spark: SparkSession, kafka: KafkaBroker, options: Options, tmp_path: Path
) -> None:
    assert options.cluster is not None
    elsewhere = f"{options.cluster}-elsewhere"
    reported = {"outcome": "cancelled", "id": "00" * 16, "due_ms": 1, "topic": elsewhere}
    producer = Producer({"bootstrap.servers": kafka.address})
    producer.produce(KafkaNames(options.cluster).outcomes, json.dumps(reported))
    assert producer.flush(30) == 0
    send_on(options.cluster, kafka.address, f"{options.cluster}-bills")
    files = sorted((tmp_path / "ledger [1]").rglob("n2.1-*.parquet"))
    files[len(files) // 2].unlink()
    deleted = delete_first(kafka.address, f"{options.cluster}-orders", 7)

    summary = run(spark, options)
    assert not summary.balanced
    assert summary.findings == {
        "ledger_gap": 1,
        "not_verifiable": deleted,
        "not_returned": 1,
        "overdue": 1,
    }
    (gap,) = summary.ledger_gaps
    assert gap["wheel"] == "n2.1"
    assert gap["last_seq"] - gap["first_seq"] == 4
    assert gap["messages"] == 99
    assert elsewhere in summary.topics, "only an outcome names it"
    assert any("not final: the floor" in note for note in summary.notes)
    expected = {
        "accepted": 1_402, "acknowledged": 1_402, "forwarded": 1_386 - deleted,
        "cancelled": 14, "not_verifiable": deleted, "missing": 1, "pending": 1, "unbooked": 99,
    }  # fmt: skip
    assert summary.counts == NONE | expected
    assert Summary.from_json((tmp_path / "output" / "summary.json").read_text()) == summary
    assert "balance" in (tmp_path / "output" / "page.html").read_text().lower()
    written = pq.read_table(tmp_path / "output" / "buckets").to_pylist()
    assert sum(row["accepted"] for row in written) == 1_402
    assert {row["lateness_max_ms"] for row in written} == {8, None}


def test_what_cannot_run_says_why_and_leaves_the_earlier_books(
    spark: SparkSession, options: Options, tmp_path: Path
) -> None:
    for name in ("output", "unmounted"):
        (tmp_path / name).mkdir()
    earlier, file = tmp_path / "output" / "summary.json", tmp_path / "file"
    earlier.write_text("{}")
    file.touch()
    no_files = str(tmp_path / "unmounted")
    for reason, wrong in (
        ("CONTROL_UNREADABLE", replace(options, cluster="nobody")),
        ("LEDGER_UNREADABLE", replace(options, ledger="/nowhere/at/all")),
        ("LEDGER_UNREADABLE", replace(options, ledger=str(file))),
        ("LEDGER_UNREADABLE.*no file of a ledger", replace(options, ledger=no_files)),
        ("OUTPUT_UNWRITABLE", replace(options, output="/proc/nothing")),
    ):
        with pytest.raises(CouldNotRun, match=reason):
            run(spark, wrong)
    assert earlier.read_text() == "{}"
    assert not (tmp_path / "output" / ".writable").exists()


@at_night  # what a ledger has all of is a case of test_reconcile_cases.py
def test_a_ledger_whose_first_file_is_gone_proves_nothing_of_before(
    spark: SparkSession, options: Options, tmp_path: Path
) -> None:
    day_ms = 86_400_000
    began_ms = int(time.time() * 1000)
    before = replace(
        options.terms, by="accepted", from_ms=began_ms - 3 * day_ms, to_ms=began_ms - 2 * day_ms
    )
    summary = run(spark, replace(options, terms=before))
    assert summary.balanced, "each wheel's first seq was accepted later"
    assert set(summary.counts.values()) == {0}
    assert not any("not final" in note for note in summary.notes)

    min((tmp_path / "ledger [1]").rglob("n1.1-*.parquet"), key=lambda path: path.name).unlink()
    with pytest.raises(CouldNotRun, match="LEDGER_OUT_OF_RANGE"):
        run(spark, replace(options, terms=before))


def test_what_was_accepted_under_a_longer_span_is_in_the_books_but_nothing_of_another_cluster(
    spark: SparkSession, options: Options, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    kafka: KafkaBroker,
) -> None:  # fmt: skip
    assert options.cluster is not None
    cluster = f"{options.cluster}-far"
    monkeypatch.setattr("local.books.DELAY_MS", 3 * 3_600_000)
    ledger, topics = tmp_path / "far", (f"{cluster}-orders",)
    make(400, ledger, kafka.address, cluster=cluster, topics=topics)
    from_ms = int(time.time() * 1000) - 3_600_000
    forward_by("another", kafka.address, topics[0], from_ms + 1)
    terms = replace(options.terms, from_ms=from_ms, span_ms=60_000, topics=(*topics, "nothing"))
    far = replace(
        options,
        cluster=cluster,
        ledger=str(ledger),
        terms=terms,
        wants_page=False,
        wants_json=True,
    )
    confirm = MagicMock()
    monkeypatch.setattr(KafkaPlace, "confirm", confirm)
    summary = run(spark, far)
    confirm.assert_called_once_with()
    assert summary.balanced
    assert summary.findings == {}
    expected = {"accepted": 400, "acknowledged": 400, "forwarded": 396, "cancelled": 4}
    assert summary.counts == NONE | expected
    assert any("nothing is not there" in note for note in summary.notes)
