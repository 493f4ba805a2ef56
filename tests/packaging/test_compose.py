"""packaging/compose/compose.yaml: its nodes and its Prometheus run as the file says.

What containers add is not there: they are processes here. Ports are others, since those of the
file may be in use, and /data is a folder of the test. Grafana does not run: its Prometheus is asked
what the board asks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from local.loopback.child import end_child, start_child
from local.loopback.kafka import KafkaBroker, free_ports
from local.monitoring.panels import panels
from support.process.prometheus import find_program
from support.services.service import wait_until

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
ALERTS = ROOT / "docs" / "alerts.yaml"
PROGRAM = str(Path(sys.executable).with_name("delaywheel"))
CONTAINERFILE = (PACKAGING / "Containerfile").read_text(encoding="utf-8")
IMAGE = dict(re.findall(r"(DELAYWHEEL_\w+)=(\S+)", CONTAINERFILE))
(HEALTH,) = re.findall(r"^HEALTHCHECK .*\n  CMD (.*)$", CONTAINERFILE, re.MULTILINE)

pytestmark = pytest.mark.kafka


BOARD = {"$job": "shop", "$instance": ".*", "$__rate_interval": "1m"}
"""What a viewer chooses."""
ONLY_THEN = {
    "refusing",
    "folder_refused",
}
"""Metrics without a sample in a cluster that is well, and open to everybody."""


class Services:
    """The nodes of the file, each with its variables, on free ports and a broker of the tests."""

    def __init__(self, kafka: str, folder: Path) -> None:
        yaml: Any = pytest.importorskip("yaml")
        text = (PACKAGING / "compose" / "compose.yaml").read_text(encoding="utf-8")
        text = text.replace("127.0.0.1:9092", kafka).replace("ID: shop", "ID: compose-test")
        ports = sorted({*re.findall(r"127\.0\.0\.1:(7\d\d\d|9090)\b", text)})
        for port, free in zip(ports, free_ports(len(ports)), strict=True):
            text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free}")
        whole = yaml.safe_load(text)
        self._folder = folder
        self._nodes = {
            name: service for name, service in whole["services"].items() if name.startswith("delay")
        }
        assert all(f"{name}:/data" in node["volumes"] for name, node in self._nodes.items())
        self._arguments = whole["services"]["prometheus"]["command"]
        self._scraping = whole["configs"]["prometheus"]["content"].replace(
            "interval: 5s", "interval: 1s"
        )

    def variables(self) -> Mapping[str, dict[str, str]]:
        """What each container has: the image's, and its own."""
        return {
            name: {**IMAGE, **node["environment"], "DELAYWHEEL_DATA_DIR": str(self._folder / name)}
            for name, node in self._nodes.items()
        }

    def servers(self) -> dict[str, str]:
        """What the commands have to know."""
        listen = [each["DELAYWHEEL_LISTEN"] for each in self.variables().values()]
        return {"DELAYWHEEL_SERVER": ",".join(listen)}

    def start(self) -> list[subprocess.Popen[bytes]]:
        return [
            start_child(
                [PROGRAM, *self._nodes[name]["command"]],
                log=self._folder / f"{name}.log",
                environment=variables,
            )
            for name, variables in self.variables().items()
        ]

    @contextmanager
    def prometheus(self) -> Iterator[str]:
        """Runs Prometheus; gives its address."""
        (self._folder / "prometheus.yaml").write_text(self._scraping)
        shutil.copyfile(ALERTS, self._folder / "alerts.yaml")
        arguments = [each.replace("/etc/prometheus", str(self._folder)) for each in self._arguments]
        arguments.append(f"--storage.tsdb.path={self._folder / 'tsdb'}")
        log = self._folder / "prometheus.log"
        running = start_child([find_program("prometheus"), *arguments], log=log, environment={})
        try:
            yield arguments[1].partition("=")[2]
        finally:
            end_child(running, patience_s=30)


@pytest.fixture(scope="module")
def services(kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    services = Services(kafka.address, tmp_path_factory.mktemp("compose"))
    running = services.start()
    yield services
    for node in running:
        end_child(node, patience_s=60)
    assert [node.returncode for node in running] == [0, 0, 0]


def told(*command: str, **variables: str) -> str:
    return subprocess.run(
        command,
        env={**os.environ, **variables},
        check=True,
        capture_output=True,
        text=True,
        timeout=150,
    ).stdout


def answered(address: str, path: str, **parameters: str) -> Any:
    """What Prometheus answers; nothing, until it does."""
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)["data"]


def test_its_nodes_are_a_cluster_and_show_the_images_check_that_they_live(
    services: Services,
) -> None:
    servers = services.servers()
    told(PROGRAM, "status", "--wait", "ok", "--timeout", "2m", **servers)
    status = json.loads(told(PROGRAM, "status", "--json", **servers))
    variables = services.variables()
    assert {node["node"] for node in status["members"]} == {*variables}
    assert told(PROGRAM, "produce", "compose-orders", "hello", "--delay", "1s", **servers)
    for each in variables.values():
        told(*json.loads(HEALTH), **each)
    dead = {"DELAYWHEEL_METRICS_LISTEN": "0.0.0.0:1"}
    with pytest.raises(subprocess.CalledProcessError):
        told(*json.loads(HEALTH), **dead)


def test_its_prometheus_knows_the_alerts_and_answers_all_that_the_board_asks(
    services: Services,
) -> None:
    told(PROGRAM, "produce", "compose-orders", "hello", "--delay", "1s", **services.servers())
    with services.prometheus() as address:
        wait_until("it answers", lambda: _is_up(address))
        unanswered = {query for panel in panels() for query in panel.queries.values()}

        def are_answered() -> bool:
            for query in [*unanswered]:
                if answered(address, "query", query=_chosen(query))["result"]:
                    unanswered.remove(query)
            return {*map(_metric, unanswered)} <= ONLY_THEN

        wait_until("every query has a series", are_answered)
        assert {*map(_metric, unanswered)} == ONLY_THEN
        (group,) = answered(address, "rules")["groups"]
        assert {rule["health"] for rule in group["rules"]} == {"ok"}


def _is_up(address: str) -> bool:
    try:
        return bool(answered(address, "targets")["activeTargets"])
    except OSError:
        return False


def _metric(query: str) -> str:
    return str(re.findall(r"delaywheel_(\w+)", query)[0])


def _chosen(query: str) -> str:
    for variable, value in BOARD.items():
        query = query.replace(variable, value)
    return query
