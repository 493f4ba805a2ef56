"""The demo as a newcomer runs it, on a real broker, with the kill; and its end by a signal.

The first takes about 40 s on an idle machine, half of it for Spark.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from delaywheel_audit.matching.summary import Summary
from support.process.script_run import (
    END_S,
    ROOT,
    assert_nothing_is_left,
    cluster_folders,
    processes_below,
    read_until,
    start_script,
)

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]


def test_everything_arrives_once_across_a_kill(tmp_path: Path) -> None:
    """The books confirm it, too."""
    output = tmp_path / "books"
    demo = start_script(
        *("demo", "--plain", "--messages", "2000", "--seconds", "8", "--output", str(output))
    )
    reported, _ = demo.communicate(timeout=400)
    assert demo.returncode == 0, reported
    assert "kill -9 of the leader, n" in reported
    assert "exactly once" in reported
    by_consumer, by_books = reported.split("exactly once")
    assert re.search(r"dead letter, EXPIRED +1\nreplayed +1\n", by_consumer)
    assert re.search(r"again +0\narrived in its topic +1\n", by_consumer)
    waits = re.findall(r"retried after ([\d,]+) ms, came after +([\d,]+) ms\n", by_consumer)
    assert [due_ms for due_ms, _ in waits] == ["500", "1,000", "2,000"]
    assert re.search(r"done at the last attempt +1\n", by_consumer)
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


def test_nothing_is_left_after_a_signal() -> None:
    """SIGTERM here; the chaos test shows the same for Ctrl-C."""
    before, books_before = cluster_folders(), books_folders()
    demo = start_script("demo", "--plain", "--seconds", "60")
    read_until(demo, "accepted")
    [folder] = cluster_folders() - before
    assert processes_below(folder)
    demo.send_signal(signal.SIGTERM)
    demo.communicate(timeout=END_S)
    assert demo.returncode == 130
    assert_nothing_is_left(folder)
    assert books_folders() == books_before


def books_folders() -> set[Path]:
    """Folders that demos have left, or use now."""
    return set((ROOT / ".run").glob("demo-*"))
