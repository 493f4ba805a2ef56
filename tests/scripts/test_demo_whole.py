"""The demo on a real broker, with the kill: at night as a newcomer runs it.

That takes about 40 s on an idle machine, most of what it computes is Spark's, and the two jobs have
tests of their own. So a push has all but these, and counts the ledger's rows.
What a signal leaves behind, test_cluster.py shows: nodes, broker and folder are of one class.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pyarrow.parquet as pq
import pytest

from delaywheel_audit.matching.summary import Summary
from local import demo
from local.reconciling import TIMEOUT_S
from local.showing.ways import Tracing
from local.stage.stage import Stage
from support.process.night import at_night
from support.process.script_run import start_script
from support.process.spark import cheap_start

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]


def test_everything_arrives_once_across_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("local.showing.ways.IndexJob", MagicMock())
    monkeypatch.setattr(Tracing, "way", lambda *_: "")
    monkeypatch.setattr(demo, "keep_books", count_rows)
    monkeypatch.setattr(demo, "books_text", lambda *_: "")
    given = ["--plain", "--messages", "400", "--seconds", "5", "--output", str(tmp_path / "books")]
    assert demo.run(demo.argument_parser().parse_args(given))
    check_consumer(capsys.readouterr().out, accepted="400")


def count_rows(stage: Stage, folder: Path) -> SimpleNamespace:
    """In the place of the books: a retry that two nodes took is two rows."""
    stage.cluster.stop_published()
    files = list((folder / demo.LEDGER).rglob("*.parquet"))
    rows = [
        row for file in files for row in pq.read_table(file, columns=["topic", "id"]).to_pylist()
    ]
    ids = {row["id"] for row in rows if row["topic"] == "demo"}
    return SimpleNamespace(is_clean=lambda verdict: len(ids) == verdict.accepted)


def check_consumer(reported: str, *, accepted: str) -> None:
    """What the demo says before it has books."""
    assert "kill -9 of the leader, n" in reported
    assert "exactly once" in reported
    assert re.search(r"dead letter, EXPIRED +1\nreplayed +1\n", reported)
    assert re.search(r"again +0\narrived in its topic +1\n", reported)
    waits = re.findall(r"retried after ([\d,]+) ms, came after +([\d,]+) ms\n", reported)
    assert [due_ms for due_ms, _ in waits] == ["500", "1,000", "2,000"]
    assert re.search(r"done at the last attempt +1\n", reported)
    halves = re.findall(r"half, ([a-z ]+), arrived +([0-9])\n", reported)
    assert halves == [("committed", "1"), ("rolled back", "0"), ("check says commit", "1")]
    assert re.search(f"accepted +{accepted}\ndelivered +{accepted}\n", reported)


@at_night
def test_the_books_confirm_it_and_the_index_has_the_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cheap_start().items():
        monkeypatch.setenv(name, value)
    output = tmp_path / "books"
    process = start_script(
        *("demo", "--plain", "--messages", "2000", "--seconds", "8", "--output", str(output))
    )
    reported, _ = process.communicate(timeout=1.5 * TIMEOUT_S)
    assert process.returncode == 0, reported
    check_consumer(reported, accepted="2,000")
    _, by_books = reported.split("exactly once")
    _, retried, half = by_books.split("$ delaywheel trace ")
    assert _steps(retried) == ["sent", *["forwarded", "processed"] * 4]
    assert retried.count(" late, demo-retried") == 4
    assert re.search(r"processed +done after .*attempt 4", retried)
    told = [step for step in _steps(half) if step != "forwarded"]  # nobody traces who reads it
    assert told == ["sent", "asked", "processed", "answered"]
    assert re.search(r"processed +committed after .*attempt 1", half)
    assert re.search(r"accepted +2,000 +2,000\ndelivered +2,000 +2,000\n", by_books)
    page = output / "page.html"
    assert f"The page: {page}" in by_books
    assert "demo" in page.read_text()
    summary = Summary.from_json((output / "summary.json").read_text())
    assert summary.balanced
    # A retry that two nodes took is two rows, and forwarded once.
    rows = summary.counts["forwarded"] + summary.counts["duplicates_dropped"]
    assert summary.counts["accepted"] == rows >= 2_000


def _steps(way: str) -> list[str]:
    """What lines of a way say has happened; what nodes have deleted by now may be missing."""
    found = re.findall(r"^(?:[0-9:.]+Z| +)  ([a-z]+) ", way, re.MULTILINE)
    return [step for step in found if step != "accepted"]
