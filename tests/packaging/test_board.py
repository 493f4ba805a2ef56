"""packaging/board.json: every metric is on a panel, and every panel leads to the runbook.

The Prometheus of compose.yaml, with its alerts, is asked every query. It scrapes a node of which
everything is known, as of no running one: all metrics are there, and have labels.
"""

from __future__ import annotations

import json
import re
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest

from delaywheel.reasons import Reason
from delaywheel_replica.core.protocol.control import ROLLED_BACK
from delaywheel_replica.server.metrics.catalogue import METRICS, Collected
from delaywheel_replica.server.node.refusals import Refusal
from local.loopback.child import end_child, start_child
from local.loopback.kafka import free_ports
from local.monitoring import board
from local.monitoring.panels import ON_NONE, ROWS, panels
from support.process.passed import skip_what_has_passed
from support.process.prometheus import find_program
from support.server.well import on_folder, scrape
from support.services.waiting import wait_until

ROOT = Path(__file__).parents[2]
RUNBOOK = (ROOT / "docs" / "RUNBOOK.md").read_text(encoding="utf-8")
COMPOSE = ROOT / "packaging" / "compose" / "compose.yaml"
CHOSEN = {"$job": "shop", "$instance": ".*", "$__rate_interval": "1m"}
"""By who looks at the board."""


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


class Told(BaseHTTPRequestHandler):
    """A node of which everything is known."""

    def do_GET(self) -> None:
        refusal = Refusal(Reason.DRAINING)
        known = scrape(refusal=refusal, server=on_folder(ROLLED_BACK))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(generate_latest(Collected(known)))

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def node() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Told) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextmanager
def prometheus(folder: Path, node: str) -> Iterator[str]:
    """Runs that of compose.yaml, scraping this node alone and more often; gives its address."""
    yaml: Any = pytest.importorskip("yaml")
    whole = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
    settings = yaml.safe_load(whole["configs"]["prometheus"]["content"])
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = settings["scrape_configs"]
    job["static_configs"][0]["targets"] = [node]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    shutil.copy(ROOT / "docs" / "alerts.yaml", folder)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    arguments = [
        each.replace("/etc/prometheus", str(folder)).replace("127.0.0.1:9090", address)
        for each in whole["services"]["prometheus"]["command"]
    ]
    arguments.append(f"--storage.tsdb.path={folder / 'series'}")
    program = find_program("prometheus")
    running = start_child([program, *arguments], log=folder / "log", environment={})
    try:
        yield address
    finally:
        end_child(running, patience_s=30)


def told(address: str, path: str, **parameters: str) -> Any:
    """What Prometheus answers."""
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)["data"]


def is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=20):
            return True
    except OSError:  # it does not listen, or reads its files
        return False


def test_prometheus_answers_all_that_the_board_asks_and_takes_the_alerts(
    node: str, tmp_path: Path
) -> None:
    alerts = (ROOT / "docs" / "alerts.yaml").read_text(encoding="utf-8")
    metrics = str([(spec.name, spec.kind, spec.labels) for spec in METRICS])
    compose = COMPOSE.read_text(encoding="utf-8")
    passed = skip_what_has_passed("prometheus-board", board.text(), alerts, metrics, compose)
    left = {query for panel in panels() for query in panel.queries.values()}
    with prometheus(tmp_path, node) as address:

        def all_are_answered() -> bool:
            for query in sorted(left):
                asked = query
                for name, value in CHOSEN.items():
                    asked = asked.replace(name, value)
                if not told(address, "query", query=asked)["result"]:
                    return False
                left.remove(query)
            return True

        wait_until("it is ready", lambda: is_ready(address))
        wait_until("a series for each query", all_are_answered)
        (group,) = told(address, "rules")["groups"]
        assert group["rules"]
        assert "err" not in {rule["health"] for rule in group["rules"]}
    passed.touch()
