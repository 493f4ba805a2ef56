"""The demo as a newcomer runs it, on a real broker, with the kill.

It takes about 40 s on an idle machine, half of it for Spark. What a signal leaves behind, the chaos
test and test_cluster.py show: the nodes, the broker and the folder are of one class.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from delaywheel_audit.matching.summary import Summary
from local.reconciling import TIMEOUT_S
from support.process.script_run import start_script
from support.process.spark import cheap_start

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]


def test_everything_arrives_once_across_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The books confirm it, too."""
    for name, value in cheap_start().items():
        monkeypatch.setenv(name, value)
    output = tmp_path / "books"
    demo = start_script(
        *("demo", "--plain", "--messages", "2000", "--seconds", "8", "--output", str(output))
    )
    reported, _ = demo.communicate(timeout=1.5 * TIMEOUT_S)
    assert demo.returncode == 0, reported
    assert "kill -9 of the leader, n" in reported
    assert "exactly once" in reported
    by_consumer, by_books = reported.split("exactly once")
    _, retried, half = by_books.split("$ delaywheel trace ")
    assert _steps(retried) == ["sent", *["forwarded", "processed"] * 4]
    assert retried.count(" late, demo-retried") == 4
    assert re.search(r"processed +done after .*attempt 4", retried)
    told = [step for step in _steps(half) if step != "forwarded"]  # nobody traces who reads it
    assert told == ["sent", "asked", "processed", "answered"]
    assert re.search(r"processed +committed after .*attempt 1", half)
    assert re.search(r"dead letter, EXPIRED +1\nreplayed +1\n", by_consumer)
    assert re.search(r"again +0\narrived in its topic +1\n", by_consumer)
    waits = re.findall(r"retried after ([\d,]+) ms, came after +([\d,]+) ms\n", by_consumer)
    assert [due_ms for due_ms, _ in waits] == ["500", "1,000", "2,000"]
    assert re.search(r"done at the last attempt +1\n", by_consumer)
    halves = re.findall(r"half, ([a-z ]+), arrived +([0-9])\n", by_consumer)
    assert halves == [("committed", "1"), ("rolled back", "0"), ("check says commit", "1")]
    assert re.search(r"accepted +2,000\ndelivered +2,000\n", by_consumer)
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
