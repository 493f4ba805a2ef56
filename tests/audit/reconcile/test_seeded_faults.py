"""Faults seeded into a real run, and the reconciliation that must find these and no others.

One run of three nodes for all tests, some 45 s; then Spark, once, over both topics. A push has each
fault as a case of its own (test_reconcile_cases.py), ledger files and records that are gone on a
real Kafka (test_reconcile_job.py), and the books of a real run with a kill (test_demo_whole.py).
"""

from __future__ import annotations

import re
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from delaywheel_audit import job
from delaywheel_audit.matching.findings import is_error
from delaywheel_audit.matching.summary import ANSWERS, COUNTS, Summary
from delaywheel_audit.options import Options
from local.loopback.kafka import KafkaBroker
from support.process.night import at_night
from support.seeded.books import INTERVAL_MS, Found
from support.seeded.run import HOUR_MS, LATE_TOLERANCE_MS, SeededRun

pytestmark = [at_night, pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]


class Result:
    """What a reconciliation returned and wrote."""

    def __init__(self, summary: Summary, output: Path) -> None:
        self.summary = summary
        self.findings: list[dict[str, Any]] = pq.read_table(output / "findings").to_pylist()
        self._buckets = pq.read_table(output / "buckets").to_pylist()

    def buckets(self, topic: str) -> dict[int, dict[str, int]]:
        """Counts by bucket, without those that are zero.

        Of some bucket all that was forwarded may be of a lost file, and counted nowhere.
        """
        return {
            row["bucket_ms"]: counts
            for row in self._buckets
            if row["topic"] == topic
            if (counts := {name: row[name] for name in COUNTS if row[name]})
        }

    def found(self, topic: str) -> Counter[Found]:
        """Findings about a topic's messages."""
        return Counter(
            Found(row["kind"], row["topic"], row["id"])
            for row in self.findings
            if row["kind"] != "ledger_gap" and row["topic"] == topic
        )

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Findings of a kind."""
        return [row for row in self.findings if row["kind"] == kind]


def reconciled(run: SeededRun, spark: SparkSession, output: Path) -> Result:
    """The report of the books about both topics."""
    arguments = [
        *("--cluster", run.names.cluster_id, "--ledger", str(run.ledger), "--kafka", run.kafka),
        *("--topic", run.topic, "--topic", run.clean_topic),
        *("--from", str(run.began_ms), "--to", str(run.began_ms + HOUR_MS)),
        *("--interval", f"{INTERVAL_MS}ms", "--late-tolerance", f"{LATE_TOLERANCE_MS}ms"),
        *("--output", str(output)),
    ]
    return Result(job.run(spark, Options.parse(arguments)), output)


@pytest.fixture(scope="module")
def run(kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory) -> SeededRun:
    folder = tmp_path_factory.mktemp("seeded") / "cluster"
    played = SeededRun(kafka.address, folder, f"t{uuid.uuid4().hex[:12]}")
    played.play()
    return played


@pytest.fixture(scope="module")
def found(run: SeededRun, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The report, once files were taken from the ledger."""
    run.delete_ledger_files()
    return reconciled(run, spark, tmp_path_factory.mktemp("found"))


def test_a_topic_without_faults_has_no_finding_that_is_an_error(
    run: SeededRun, found: Result
) -> None:
    assert found.buckets(run.clean_topic) == run.expected.of(run.clean_topic)
    differing = {each for each in run.expected.findings if each.topic == run.clean_topic}
    assert {each.kind for each in differing} == {"content_differs", "dead_letter"}
    assert not any(is_error(each.kind) for each in differing)
    (letter,) = (row for row in found.of("dead_letter") if row["topic"] == run.clean_topic)
    assert letter["detail"].startswith(
        f"TIMESTAMP_REFUSED; in {run.names.dead} [{letter['partition']}] at offset "
    )
    assert found.found(run.clean_topic) == Counter(differing)


def test_each_fault_is_found_and_nothing_else(run: SeededRun, found: Result) -> None:
    seeded = {each for each in run.expected.findings if each.topic == run.topic}
    kinds = {"lost", "missing", "duplicated", "early", "late", "changed", "unexpected"}
    assert {each.kind for each in seeded} == kinds | {"content_differs", "dead_letter"}
    assert found.found(run.topic) == Counter(seeded)
    assert {row["topic"] for row in found.findings} - {None} == {run.topic, run.clean_topic}
    assert not found.summary.balanced


def test_every_bucket_is_counted_right(run: SeededRun, found: Result) -> None:
    expected = run.expected.of(run.topic)
    assert found.buckets(run.topic) == expected
    both = (run.topic, run.clean_topic)
    totals = {name: sum(run.expected.total(topic, name) for topic in both) for name in COUNTS}
    assert {name: found.summary.counts[name] for name in COUNTS} == totals
    none = {name for name, count in totals.items() if not count}
    halves = {
        "asked",
        "committed",
        "deferred",
        *ANSWERS,
    }  # they have cases of their own, in test_reconcile_cases
    assert none == {"not_verifiable"} | halves, "there is something of everything else"


def test_what_was_cut_out_is_reported_with_its_place(run: SeededRun, found: Result) -> None:
    cut = {each.id for each in run.expected.findings if each.kind in {"lost", "missing"}}
    reported = [row for kind in ("lost", "missing") for row in found.of(kind)]
    places = {row["id"]: (row["wheel"], row["seq"], row["accepted_at_ms"]) for row in reported}
    assert places == {
        id_.hex(): (place.wheel, place.seq, place.accepted_at_ms)
        for id_, place in run.places.items()
        if id_.hex() in cut
    }
    assert {row["detail"] for row in found.of("lost")} == {"MAGIC", "SHORT", "GONE"}


def test_a_lost_file_of_the_ledger_is_a_gap_of_it_and_no_loss(
    run: SeededRun, found: Result
) -> None:
    form = re.compile(r"(.+)-(\d{19})-(\d{19})(?:-\d{10}-\d{10})?")
    names = [form.fullmatch(path.stem) for path in run.deleted]
    middle, last = ((m[1], int(m[2])) for m in names if m)
    gaps = found.of("ledger_gap")
    assert {row["wheel"] for row in gaps} == {middle[0], last[0]}
    assert middle[1] in {row["seq"] for row in gaps}
    assert len(gaps) == len(run.deleted)
    assert sum("3 forwarded messages" in row["detail"] for row in gaps) == 2
