"""The command line, and how a reconciliation that cannot run says so; without Spark, 2 s."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from pyspark.errors import PySparkException

from delaywheel.identity import WheelId
from delaywheel_audit import job
from delaywheel_audit.arguments import interval_ms
from delaywheel_audit.kafka.control import ControlMissingError, Done
from delaywheel_audit.kafka.errors import KafkaSourceError, Reason
from delaywheel_audit.matching.summary import Summary
from delaywheel_audit.matching.terms import Terms
from delaywheel_audit.options import Options
from delaywheel_audit.session import CouldNotRun
from delaywheel_audit.settings import Setting, SettingsUnreadableError
from delaywheel_audit.sources.ledger_files import END_MS
from delaywheel_replica.cli.app import main
from delaywheel_replica.core.protocol.control import ControlState, NodeRecord
from delaywheel_replica.core.protocol.progress import Position, Progress

NEEDED = ["--kafka", "k:9092", "--cluster", "c", "--ledger", "/ledger"]


def test_a_bucket_has_some_length() -> None:
    assert interval_ms("1h30m") == 5_400_000
    with pytest.raises(ArgumentTypeError):
        interval_ms("0s")


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["--cluster", "c", "--ledger", "/l"], "--kafka ADDRESS, or --settings FILE"),
        (["--kafka", "k:1"], "without --settings, say --cluster and --ledger"),
        ([*NEEDED, "--from", "2000000000000", "--to", "2000000000000"], "the range is empty"),
        ([*NEEDED, "--by", "luck"], "invalid choice"),
        ([*NEEDED, "--interval", "1"], "not numbers with d, h, m, s or ms"),
        ([*NEEDED, "--kafka-setting", "x"], "NAME=VALUE"),
        ([*NEEDED, "--from", "2026-05-01 10:00"], "does not say its zone"),
    ],
)
def test_a_wrong_call_ends_with_2_and_says_why(
    arguments: list[str], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job.main(arguments) == job.COULD_NOT_RUN
    assert reported in capsys.readouterr().err


def test_the_command_of_the_tool_reads_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["reconcile", "--topic", "orders", "--from", "soon"])
    assert ended.value.code == job.COULD_NOT_RUN
    assert "'soon'" in capsys.readouterr().err


def test_options_win_over_the_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        'cluster_id = "shop"\nnode_id = "n1"\ndata_dir = "/data"\nspan_seconds = 60\n'
        'late_window_seconds = 30\n[kafka]\n"bootstrap.servers" = "k1:9092"\n'
    )
    plain = Setting.of(Options.parse(["--settings", str(file)]))
    assert (plain.cluster, plain.ledger) == ("shop", "/data/ledger/published")
    assert plain.client == {"bootstrap.servers": "k1:9092"}
    assert (plain.terms.span_ms, plain.terms.late_window_ms) == (60_000, 30_000)
    reported = Setting.of(Options.parse(["--settings", str(file), *NEEDED, "--span", "2m"]))
    assert (reported.cluster, reported.ledger, reported.terms.span_ms) == ("c", "/ledger", 120_000)
    assert reported.client == {"bootstrap.servers": "k:9092"}


def test_settings_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsUnreadableError, match="no such file"):
        Setting.of(Options.parse(["--settings", str(tmp_path / "none.toml")]))
    with pytest.raises(SettingsUnreadableError, match="cluster"):
        Setting.of(Options.parse([*NEEDED, "--cluster", "Not A Name"]))


def test_a_range_of_dues_looks_at_acceptances_from_its_span_before() -> None:
    terms = Terms(from_ms=10_000_000, to_ms=20_000_000, span_ms=2_000_000, late_window_ms=5_000)
    assert terms.accepted_range() == (7_999_000, 20_006_000)
    assert Terms(from_ms=10, to_ms=20).accepted_range()[0] == 0
    assert Terms(by="accepted", from_ms=10, to_ms=20, span_ms=5).accepted_range() == (10, 20)


def test_a_range_of_dues_reaches_what_was_accepted_under_other_settings() -> None:
    terms = Terms(from_ms=10_000_000, to_ms=20_000_000, span_ms=2_000_000, late_window_ms=5_000)
    assert terms.reaching_all().accepted_range() == (0, END_MS)
    assert (terms.reaching_all().from_ms, terms.reaching_all().to_ms) == (10_000_000, 20_000_000)


def test_what_is_done_follows_the_progress_record() -> None:
    one, two, ten = WheelId("n1", 1), WheelId("n1", 2), WheelId("n1", 10)
    progress = Progress(500, Position(two, 7, 3), {one: 4, two: 9, ten: 6}, 0)
    done = Done.of(ControlState(progress=progress, nodes={"n1": NodeRecord("disk", 10)}))
    # Messages of one frame may be on both sides of the position.
    assert done.split_seqs == {"n1.1": 4, "n1.2": 6, "n1.10": 0}
    with pytest.raises(ControlMissingError, match="no node ever led"):
        Done.of(ControlState())


def test_a_summary_comes_back_as_it_went() -> None:
    summary = Summary(
        "c", 1, None, "due", 60_000, 1_000, ["t"], 5, 4, {"t": {0: 9}}, {"accepted": 1},
        {"p50": None}, {"lost": 2}, [{"wheel": "n1.1"}], balanced=False, seconds=0.5,
        command="x", notes=["y"],
    )  # fmt: skip
    assert Summary.from_json(summary.to_json()) == summary


def test_a_failure_of_spark_is_named_by_what_kafka_has_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = Options.parse(NEEDED)

    def fail(_: object) -> Summary:
        raise PySparkException("in a task")

    monkeypatch.setattr("delaywheel_audit.job._Run.run", fail)
    with pytest.raises(CouldNotRun, match="SPARK_FAILED: in a task"):
        job.run(MagicMock(), options)
    gone = KafkaSourceError(Reason.OFFSETS_GONE, "t [0]")
    monkeypatch.setattr("delaywheel_audit.job._Run.why", lambda *_: gone)
    with pytest.raises(CouldNotRun, match=r"OFFSETS_GONE: t \[0\]"):
        job.run(MagicMock(), options)
