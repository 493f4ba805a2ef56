"""What a reconciliation writes and prints holds no secret; without Spark, under two seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from delaywheel_audit import job
from delaywheel_audit.matching.summary import COUNTS, Summary
from delaywheel_audit.options import Options
from delaywheel_audit.output import Output, OutputUnwritableError
from delaywheel_audit.sources.hiding import shown_command
from delaywheel_audit.sources.ledger_files import LedgerFolder, LedgerUnreadableError
from delaywheel_audit.terminal import print_summary

SECRET = "h1dd3n"
LEDGER = f"s3://key:{SECRET}@bucket/books?region=x&secret_key={SECRET}"
OUTPUT = f"s3a://key:{SECRET}@results/run"


def test_a_command_is_shown_without_secrets() -> None:
    shown = shown_command(
        [
            *("--kafka", "k:9093", "--cluster", "c"),
            *("--kafka-setting", f"sasl.password={SECRET}"),
            f"--kafka-setting=ssl.key.password=={SECRET}=",
            f"--kafka-setting=SASL.JAAS.config={SECRET}",
            *("--kafka-setting", "sasl.username=me", "--kafka-setting=client.id=a"),
            *("--ledger", LEDGER, f"--output={OUTPUT}"),
        ]
    )
    assert shown == (
        "reconcile --kafka k:9093 --cluster c --kafka-setting 'sasl.password=********' "
        "'--kafka-setting=ssl.key.password=********' '--kafka-setting=SASL.JAAS.config=********' "
        "--kafka-setting sasl.username=me --kafka-setting=client.id=a "
        "--ledger s3://bucket/books --output=s3a://results/run"
    )


def test_a_command_without_secrets_is_shown_as_it_is() -> None:
    given = ["--kafka", "k:9092", "--cluster", "c", "--ledger", "/a b", "--output", "x", "--json"]
    assert shown_command(given) == (
        "reconcile --kafka k:9092 --cluster c --ledger '/a b' --output x --json"
    )


def test_the_run_gets_the_command_as_it_may_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[str] = []

    def run(_: object, options: Options, *, command: str, say: object) -> Any:
        del say
        assert options.kafka["sasl.password"] == SECRET
        commands.append(command)
        return MagicMock(balanced=True)

    monkeypatch.setattr(job, "_session", MagicMock())
    monkeypatch.setattr(job, "run", run)
    given = ["--kafka", "k:9093", "--cluster", "c", "--ledger", LEDGER, "--output", OUTPUT]
    assert job.main([*given, "--kafka-setting", f"sasl.password={SECRET}"]) == 0
    assert "bucket" in commands[0]
    assert SECRET not in commands[0]


def test_neither_page_nor_summary_nor_terminal_shows_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_text(_: Output, name: str, text: str) -> None:
        (tmp_path / name).write_text(text)

    monkeypatch.setattr(Output, "write_text", write_text)
    monkeypatch.setattr(Output, "_some_buckets", lambda *_: ([], 60_000))
    monkeypatch.setattr(Output, "some_findings", lambda *_: [])
    command = shown_command(["--kafka-setting", f"sasl.password={SECRET}", "--ledger", LEDGER])
    summary = Summary(
        cluster="c", from_ms=None, to_ms=None, by="due", interval_ms=60_000,
        late_tolerance_ms=1_000, topics=[], made_at_ms=0, progress_ms=0, kafka_ends={},
        counts=dict.fromkeys((*COUNTS, "unpublished", "unbooked"), 0), lateness={},
        findings={}, ledger_gaps=[], balanced=True, seconds=1.0, command=command, notes=[],
    )  # fmt: skip
    output = Output(MagicMock(), OUTPUT)
    print_summary(summary, output, output.write_page(summary, LEDGER), as_json=False)
    page = (tmp_path / "page.html").read_text()
    assert "s3://bucket/books" in page
    assert "s3a://results/run" in page
    for text in (page, summary.to_json(), *capsys.readouterr()):
        assert SECRET not in text


@pytest.mark.parametrize(
    "uri", [f"gopher://key:{SECRET}@x/y", f"s3://key:{SECRET}@bucket/a b", LEDGER + "&wrong=1"]
)
def test_why_a_ledger_is_unreadable_is_reported_without_its_secrets(uri: str) -> None:
    with pytest.raises(LedgerUnreadableError, match="://") as refused:
        LedgerFolder(uri)
    assert SECRET not in str(refused.value)


def test_why_an_output_is_unwritable_is_reported_without_its_secrets() -> None:
    spark = MagicMock()
    spark.sparkContext._jvm.org.apache.hadoop.fs.Path.side_effect = OSError(f"bad: {OUTPUT}/x")
    with pytest.raises(OutputUnwritableError, match="bad: s3a://results/run/x") as refused:
        Output(spark, OUTPUT).check()
    assert SECRET not in str(refused.value)
