"""The page as a node's third child: started, restarted, ended with the node, and of no weight."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from delaywheel_replica.config import Config
from delaywheel_replica.config_faults import faults
from delaywheel_replica.process.inheritance import RESOLVED_VARIABLE, SOURCES_VARIABLE
from delaywheel_replica.web.child import words
from support.clients.scripted_node import ScriptedNode
from support.services.waiting import wait_until

CHILD = """
import sys, time
from delaywheel_replica.process.inheritance import exit_with_supervisor, report_ready
exit_with_supervisor()
report_ready(sys.argv[1])
time.sleep(600)
"""
SUPERVISOR = """
import json, sys
from pathlib import Path
from delaywheel_replica import node
from delaywheel_replica.web.child import PAGE_COMMAND
sys.exit(node.Supervisor(Path(sys.argv[1]), json.loads(sys.argv[2]), page=PAGE_COMMAND).run())
"""


def config(**changes: Any) -> Config:
    return Config(
        cluster_id="c",
        node_id="n1",
        data_dir=Path("n1"),
        members={"n1": "127.0.0.1:7421"},
        kafka={"bootstrap.servers": "k:9092"},
        **{"web_listen": "127.0.0.1:0", **changes},
    )


def settings(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config(**changes).resolved())
    return found


@pytest.fixture
def supervisor(node: ScriptedNode, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    commands = {
        name: [sys.executable, "-c", CHILD, node.address if name == "server" else ""]
        for name in ("server", "cleaner")
    }
    environment = {
        **os.environ,
        RESOLVED_VARIABLE: json.dumps(settings()),
        SOURCES_VARIABLE: json.dumps({"file": None}),
    }
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path), json.dumps(commands)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def _pages_of(supervisor: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text()
    found = [int(pid) for pid in children.split()]
    return [pid for pid in found if "web.child" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_it_is_the_nodes_and_never_counts(supervisor: subprocess.Popen[str]) -> None:
    assert supervisor.stdout is not None
    link = supervisor.stdout.readline().strip()
    (page,) = _pages_of(supervisor)
    assert os.getpriority(os.PRIO_PROCESS, page) == min(19, os.getpriority(0, 0) + 10)
    with urlopen(link.partition("#")[0], timeout=20) as answered:
        assert b"page.js" in answered.read()
    os.kill(page, signal.SIGKILL)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#secret=.+\n", supervisor.stdout.readline())
    (again,) = _pages_of(supervisor)
    assert again != page
    assert supervisor.poll() is None
    supervisor.kill()
    supervisor.wait()
    wait_until("the page is gone", lambda: not Path(f"/proc/{again}/fd").exists())


def test_its_command_line_is_of_the_nodes_settings() -> None:
    plain = words(settings(), None, "127.0.0.1:7420")
    assert plain == [
        *("web", "--listen=127.0.0.1:0", "--host=127.0.0.1", "--server=127.0.0.1:7420")
    ]
    secure = {
        **settings(web_listen="0.0.0.0:7423", advertised="n1.shop:7420", insecure=True),
        "tls_cert": "c.pem",
        "tls_key": "k.pem",
        "tls_client_ca": "ca.pem",
        "token_listen": "0.0.0.0:7430",
    }
    assert words(secure, "/etc/n.toml", "0.0.0.0:7420") == [
        *("web", "--listen=0.0.0.0:7423", "--host=n1.shop", "--server=n1.shop:7430"),
        *("--config=/etc/n.toml", "--tls", "--tls-ca=ca.pem"),
        *("--page-cert=c.pem", "--page-key=k.pem", "--insecure"),
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"web_listen": "0.0.0.0:7423"}, "other machines reach it"),
        ({"web_listen": "0.0.0.0:7423", "insecure": True}, None),
        ({"tls_client_ca": Path("ca")}, "token_listen"),
        ({"web_listen": "127.0.0.1:7420"}, "listen already listens there"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], said: str | None) -> None:
    found = [fault.text for fault in faults(config(**changes))]
    assert [said in text for text in found if said] == ([True] if said else []), found
    assert bool(found) == bool(said)
