"""What the job stands on: its lock, its checkpoint, what it says of itself."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from pyspark.sql import Row

from delaywheel.ingress import trace_topic
from delaywheel_audit.kafka.plan import Range
from delaywheel_audit.session import CouldNotRun
from delaywheel_replica.cli.failures import CommandFailure
from delaywheel_replica.cli.parsing import Parser
from delaywheel_trace.index.folder import IndexFolder
from delaywheel_trace.job import health as health_module
from delaywheel_trace.job.batches import _Made
from delaywheel_trace.job.checkpoint import Checkpoint
from delaywheel_trace.job.command import COMMAND, IndexOptions
from delaywheel_trace.job.health import IndexHealth, serving
from delaywheel_trace.job.lock import only_job
from local.loopback.kafka import free_ports

DOCUMENT = (Path(__file__).parents[3] / "docs" / "TRACE.md").read_text(encoding="utf-8")
EXAMPLE = DOCUMENT.partition("```json\n")[2].partition("```")[0]


@pytest.mark.parametrize("is_local", [True, False])
def test_a_second_job_is_told_who_is_the_first(tmp_path: Path, is_local: bool) -> None:
    folder = IndexFolder(str(tmp_path / "index"))
    folder.is_local = is_local  # False: as on an object store
    who = r"INDEX_TAKEN: .*index: process \d+ on .+, since 20"
    with only_job(folder), pytest.raises(CouldNotRun, match=who), only_job(folder):
        pass
    with only_job(folder):
        pass


def test_a_lock_that_nobody_tells_of_is_lost(tmp_path: Path) -> None:
    folder = IndexFolder(str(tmp_path))
    folder.is_local = False
    for content in ("", "{}", json.dumps({"told_ms": 1})):
        (tmp_path / "lock").write_text(content)
        with only_job(folder):
            pass


@pytest.mark.parametrize("kind", ["accepted", "outcome", "forwarded", "now"])
def test_a_program_cannot_tell_what_the_service_does(kind: str) -> None:
    said = json.loads(EXAMPLE)
    for told in (said | {"kind": kind}, said):
        record = {"topic": trace_topic("shop"), "value": json.dumps(told).encode()}
        made = _Made("shop", {})
        batches = list(made.events([Row(**record, partition=0, offset=1, time_ms=2)]))
        assert (made.bad_count, len(batches)) == ((1, 0) if told is not said else (0, 1))


def test_a_checkpoint_says_what_will_be_read_first(tmp_path: Path) -> None:
    checkpoint = Checkpoint(IndexFolder(str(tmp_path)))
    assert checkpoint.query() is None
    query = checkpoint.begin({"t": "an id"})
    assert checkpoint.query() == query
    assert checkpoint.topic_ids(query, {"t": "of now"}) == {"t": "an id"}
    assert checkpoint.left({}).topics == ()
    for name in ("offsets", "commits"):
        (tmp_path / "checkpoint" / name).mkdir()

    def planned(batch: int, end: int) -> None:
        said = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 1_000 + batch})
        lines = ["v1", said, json.dumps({"t": {"0": end, "1": 7}}), "-"]
        (tmp_path / "checkpoint" / "offsets" / str(batch)).write_text("\n".join(lines))

    planned(9, 20)
    planned(10, 30)
    (tmp_path / "checkpoint" / "commits" / "9").write_text("v1\n{}")
    assert checkpoint.planned(10).time_ms == 1_010
    (topic,) = checkpoint.left({"t": "an id"}).topics
    assert (topic.topic_id, topic.ranges) == ("an id", (Range(0, 20, 30), Range(1, 7, 7)))
    (tmp_path / "checkpoint" / "commits" / "10").write_text("v1\n{}")
    assert checkpoint.left({}).topics[0].ranges == (Range(0, 30, 30), Range(1, 7, 7))


def test_a_checkpoint_of_another_query_knows_no_ids(tmp_path: Path) -> None:
    checkpoint = Checkpoint(IndexFolder(str(tmp_path)))
    checkpoint.begin({"t": "an id"})
    assert checkpoint.topic_ids("0" * 12, {"t": "of now"}) == {"t": "of now"}
    assert checkpoint.topic_ids("0" * 12, {"t": "later"}) == {"t": "of now"}


@pytest.mark.parametrize("content", ["", "v2\n{}", "v1\n{}", "v1\nx", "v1\n[]"])
def test_a_checkpoint_that_is_no_more_one_says_what_to_do(tmp_path: Path, content: str) -> None:
    checkpoint = Checkpoint(IndexFolder(str(tmp_path)))
    checkpoint.begin({})
    (tmp_path / "checkpoint" / "offsets").mkdir()
    (tmp_path / "checkpoint" / "offsets" / "3").write_text(content)
    with pytest.raises(
        CouldNotRun, match=r"CHECKPOINT_UNREADABLE: .*offsets/3: .*delete the folder"
    ):
        checkpoint.planned(3)


def asked(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_health_and_metrics_are_served(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    health = IndexHealth()
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    with serving(health, ("127.0.0.1", port)):
        assert asked(address, "/healthz") == (200, "ok\n")
        health.waits("the disk is full")
        health.waits("the disk is full")
        assert asked(address, "/healthz") == (503, "the disk is full\n")
        health.goes_on()
        health.wrote(5, 1)
        assert asked(address, "/healthz") == (200, "ok\n")
        metrics = asked(address, "/metrics")[1].splitlines()
        assert {
            "delaywheel_trace_index_events_total 5.0",
            "delaywheel_trace_index_bad_records_total 1.0",
            "delaywheel_trace_index_waiting 0.0",
        } <= set(metrics)
        assert asked(address, "/")[0] == 404
        monkeypatch.setattr(health_module, "_LATE_S", -1.0)
        assert asked(address, "/healthz") == (503, "0 s behind\n")
        with (
            pytest.raises(CouldNotRun, match="LISTEN_FAILED"),
            serving(health, ("127.0.0.1", port)),
        ):
            pass
    assert capfd.readouterr().err.splitlines() == ["waiting: the disk is full", "going on"]


def test_its_command_line() -> None:
    def read(*arguments: str) -> IndexOptions:
        given = ["--settings", "node.toml", "--index", "x", *arguments]
        return IndexOptions(**Parser("trace-index", COMMAND).read(given))

    assert read("--keep", "36h").keep_ms == 36 * 3_600_000
    assert read("--metrics-listen", "[::1]:80").metrics_listen == ("::1", 80)
    for wrong in (("--keep", "5m"), ("--metrics-listen", "80"), ("--metrics-listen", "h:99999")):
        with pytest.raises(CommandFailure, match="USAGE"):
            read(*wrong)
