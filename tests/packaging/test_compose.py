"""packaging/compose/compose.yaml: its nodes run, with its arguments and environment.

What containers add is not there: nodes run as processes here. Ports are others, since those of the
file may be in use, and /data is a folder of the test. Its Prometheus is run by test_board.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from local.loopback.child import end_child, start_child
from local.loopback.kafka import free_ports
from support.services.waiting import wait_until

PACKAGING = Path(__file__).parents[2] / "packaging"
PROGRAM = str(Path(sys.executable).with_name("delaywheel"))
CONTAINERFILE = (PACKAGING / "Containerfile").read_text(encoding="utf-8")
IMAGE = dict(re.findall(r"(DELAYWHEEL_\w+)=(\S+)", CONTAINERFILE))
(HEALTH,) = re.findall(r"^HEALTHCHECK .*\n  CMD (.*)$", CONTAINERFILE, re.MULTILINE)

pytestmark = pytest.mark.kafka


class Services:
    """The nodes of the file, each with its variables, on free ports and a broker of the tests."""

    def __init__(self, kafka: str, folder: Path) -> None:
        yaml: Any = pytest.importorskip("yaml")
        text = (PACKAGING / "compose" / "compose.yaml").read_text(encoding="utf-8")
        text = text.replace("127.0.0.1:9092", kafka).replace("ID: shop", "ID: compose-test")
        ports = sorted({*re.findall(r"127\.0\.0\.1:(7\d\d\d)\b", text)})
        for port, free in zip(ports, free_ports(len(ports)), strict=True):
            text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free}")
        self._folder = folder
        self._nodes = {
            name: service
            for name, service in yaml.safe_load(text)["services"].items()
            if name.startswith("delay")
        }
        self._page = yaml.safe_load(text)["services"]["web"]["command"]
        assert all(f"{name}:/data" in node["volumes"] for name, node in self._nodes.items())

    def variables(self) -> Mapping[str, dict[str, str]]:
        """What each container has: the image's, and its own."""
        return {
            name: {**IMAGE, **node["environment"], "DELAYWHEEL_DATA_DIR": str(self._folder / name)}
            for name, node in self._nodes.items()
        }

    def start(self) -> list[subprocess.Popen[bytes]]:
        return [
            start_child(
                [PROGRAM, *self._nodes[name]["command"]],
                log=self._folder / f"{name}.log",
                environment=variables,
            )
            for name, variables in self.variables().items()
        ]

    def page(self) -> tuple[subprocess.Popen[bytes], Path]:
        """Starts the operators' page; returns also where it prints its link."""
        log = self._folder / "web.log"
        return start_child([PROGRAM, *self._page], log=log, environment=IMAGE), log


@pytest.fixture
def services(kafka: Any, tmp_path: Path) -> Iterator[Services]:
    services = Services(kafka.address, tmp_path)
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


def test_its_nodes_are_a_cluster_and_show_the_images_check_that_they_live(
    services: Services,
) -> None:
    variables = services.variables()
    servers = {"DELAYWHEEL_SERVER": ",".join(v["DELAYWHEEL_LISTEN"] for v in variables.values())}
    told(PROGRAM, "status", "--wait", "ok", "--timeout", "2m", **servers)
    status = json.loads(told(PROGRAM, "status", "--json", **servers))
    assert {node["node"] for node in status["members"]} == {*variables}
    assert told(PROGRAM, "produce", "compose-orders", "hello", "--delay", "1s", **servers)
    page, log = services.page()
    wait_until("it prints its link", lambda: re.search(r"http\S+", log.read_text()))
    with urlopen(log.read_text().partition("#")[0], timeout=20) as answered:
        assert b"page.js" in answered.read()
    end_child(page, patience_s=20)
    for each in variables.values():
        told(*json.loads(HEALTH), **each)
    dead = {"DELAYWHEEL_METRICS_LISTEN": "0.0.0.0:1"}
    with pytest.raises(subprocess.CalledProcessError):
        told(*json.loads(HEALTH), **dead)
