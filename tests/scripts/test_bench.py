"""The benchmark's own parts: the rate it keeps, what it reads of a process, the tables."""

from __future__ import annotations

import os
import time

import pytest

from local.bench import paced, print_report, process_figures


def test_pace_sends_all_and_not_too_early() -> None:
    started_at = time.monotonic()
    sent = 0
    for batch in paced(1_000, 0.2):
        sent += batch
        assert sent <= (time.monotonic() - started_at) * 1_000 + 1
    assert sent == 200


def test_figures_of_this_process() -> None:
    before = process_figures(os.getpid())
    assert before.anonymous_mib > 1
    with open(os.devnull) as one, open(os.devnull) as two:  # noqa: PTH123 - two descriptors
        assert one.fileno() != two.fileno()
        assert process_figures(os.getpid()).descriptors == before.descriptors + 2


def test_report_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    lateness = {"messages": 20_000, "p50_ms": 6.0, "p99_ms": 50.0, "max_ms": 100.0}
    process = {"anonymous_mib": 40.0, "descriptors": 30}
    figures = {"server": process, "cleaner": process}
    print_report(
        {
            "rate_per_s": 2_000,
            "value_bytes": 200,
            "lateness": dict.fromkeys(("kafka", "delayed", "short"), lateness),
            "ratio_p50": {"delayed": 3.0, "short": 3.5},
            "accepted_per_s": 40_000,
            "kafka_produced_per_s": 400_000,
            "processes": {"idle": figures, "loaded": figures | {"pending": 200_000}},
        }
    )
    told = capsys.readouterr().out
    for part in ("20,000", "3.5", "40,000", "0.10", "200,000 messages pending", "40.0 → 40.0"):
        assert part in told
