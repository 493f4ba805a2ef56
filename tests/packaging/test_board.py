"""packaging/board.json: every metric is on a panel, and every panel leads to the runbook.

test_compose.py asks a Prometheus all of its queries.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from delaywheel_replica.server.metrics.catalogue import METRICS
from local.monitoring import board
from local.monitoring.panels import ON_NONE, ROWS, panels

RUNBOOK = (Path(__file__).parents[2] / "docs" / "RUNBOOK.md").read_text(encoding="utf-8")


def test_the_file_is_what_the_table_makes() -> None:
    assert board.FILE.read_text(encoding="utf-8") == board.text()


def test_every_metric_is_on_a_panel_or_it_is_said_why_not() -> None:
    queries = " ".join(query for panel in panels() for query in panel.queries.values())
    shown = {re.sub("_bucket$", "", name) for name in re.findall(r"\bdelaywheel_\w+", queries)}
    assert not shown & ON_NONE.keys()
    assert shown | ON_NONE.keys() == {spec.name for spec in METRICS}


def test_every_panel_leads_to_a_section_of_the_runbook() -> None:
    headings = set(re.findall(r"^#+ (.+)$", RUNBOOK, re.MULTILINE))
    linked = set(re.findall(r"\(#([\w-]+)\)", RUNBOOK))
    for panel in panels():
        assert panel.section in headings
        assert board.anchor(panel.section) in linked


def test_a_legend_names_labels_that_the_series_have() -> None:
    labels = {spec.name: {*spec.labels} for spec in METRICS}
    for panel in panels():
        for legend, query in panel.queries.items():
            (metric, *_) = re.findall(r"delaywheel_\w+", query)
            kept = re.findall(r"\bby \((.*?)\)", query)
            of_series = {"instance", *labels[metric.removesuffix("_bucket")]}
            if kept:
                of_series &= {*", ".join(kept).split(", ")}
            assert {*re.findall(r"{{(\w+)}}", legend)} <= of_series, legend


def test_panels_lie_beside_one_another_and_rows_below() -> None:
    shown = json.loads(board.text())["panels"]
    assert [each["title"] for each in shown if each["type"] == "row"] == [*ROWS]
    for one, next_one in pairwise(each["gridPos"] for each in shown):
        is_beside = one["y"] == next_one["y"] and one["x"] + one["w"] == next_one["x"]
        assert is_beside or one["y"] + one["h"] == next_one["y"]


def test_a_board_that_is_out_of_date_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(board, "FILE", tmp_path / "board.json")
    assert board.main(["--check"]) == 1
    assert "run scripts/monitoring" in capsys.readouterr().err
    assert board.main([]) == 0
    assert board.main(["--check"]) == 0
