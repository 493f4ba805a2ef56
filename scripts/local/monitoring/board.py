"""Writes the board as Grafana takes it: packaging/board.json.

What a panel needs of Grafana is ten lines of a dict: that wants neither grafanalib nor Jsonnet.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from local.monitoring.panels import ROWS, Panel

FILE = Path(__file__).parents[3] / "packaging" / "board.json"
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_A_LINE = 3
"""Panels beside one another."""
_WIDTH, _HEIGHT = 24 // _A_LINE, 8


def board() -> dict[str, Any]:
    """Returns the board: a row for each part, with the alerts that fire drawn in."""
    shown: list[dict[str, Any]] = []
    y = 0
    for title, panels in ROWS.items():
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        shown.append({"type": "row", "title": title, "collapsed": False, "gridPos": place})
        for number, panel in enumerate(panels):
            line, column = divmod(number, _A_LINE)
            place = {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": y + 1 + line * _HEIGHT}
            shown.append(_shown(panel, place))
        y = shown[-1]["gridPos"]["y"] + _HEIGHT
    return {
        "uid": "delaywheel",
        "title": "delaywheel",
        "schemaVersion": 39,
        "editable": True,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {"list": _variables()},
        "annotations": {"list": [_alerts()]},
        "panels": [{"id": number, **panel} for number, panel in enumerate(shown, start=1)],
    }


def anchor(heading: str) -> str:
    """Returns where a heading's section is, as documents link it."""
    return re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-")


def _shown(panel: Panel, place: Mapping[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "gridPos": place,
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "custom": {"fillOpacity": 5}},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list"}, "tooltip": {"mode": "multi"}},
        "links": [{"title": panel.section, "url": f"${{runbook}}#{anchor(panel.section)}"}],
        "targets": [
            {"refId": f"q{number}", "expr": query, "legendFormat": legend, "datasource": _SOURCE}
            for number, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _variables() -> list[dict[str, Any]]:
    of_nodes = {"type": "query", "datasource": _SOURCE, "refresh": 2, "sort": 1}
    nodes = 'label_values(delaywheel_build_info{job="$job"}, instance)'
    return [
        {"type": "datasource", "name": "source", "label": "Prometheus", "query": "prometheus"},
        {**of_nodes, "name": "job", "query": "label_values(delaywheel_build_info, job)"},
        {
            **of_nodes,
            "name": "instance",
            "label": "nodes",
            "query": nodes,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
        {
            "type": "textbox",
            "name": "runbook",
            "label": "address of RUNBOOK.md",
            "query": "RUNBOOK.md",
            "current": {"text": "RUNBOOK.md", "value": "RUNBOOK.md"},
        },
    ]


def _alerts() -> dict[str, Any]:
    fires = 'ALERTS{alertname=~"Delaywheel.*",alertstate="firing",job=~"$job|"}'
    return {
        "name": "alerts",
        "enable": True,
        "iconColor": "red",
        "datasource": _SOURCE,
        "expr": fires,
        "titleFormat": "{{alertname}}",
        "textFormat": "{{instance}}",
    }


def text() -> str:
    """Returns what the file has."""
    return json.dumps(board(), indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the file, or with `--check` compares; returns 1 if it is out of date."""
    parser = argparse.ArgumentParser(
        prog="scripts/monitoring", description="Write Grafana's board, packaging/board.json."
    )
    parser.add_argument("--check", action="store_true", help="change nothing, compare")
    if not parser.parse_args(arguments).check:
        FILE.write_text(text(), encoding="utf-8")
    elif not FILE.exists() or FILE.read_text(encoding="utf-8") != text():
        print(f"{FILE.name} is out of date: run scripts/monitoring", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
