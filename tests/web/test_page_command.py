"""`delaywheel web` as it is started: what it prints, and when it does not start."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
import trustme

from delaywheel_replica.cli.app import run
from delaywheel_replica.cli.failures import CommandFailure, ExitCode
from delaywheel_replica.web.connections import OF_AN_ADDRESS_AT_MOST
from local.viewing.memory import resident_bytes
from support.clients.page_user import OF_THE_PAGE
from support.clients.scripted_node import ScriptedNode
from support.services.waiting import wait_until


@pytest.fixture
def started(node: ScriptedNode) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "delaywheel_replica.cli.app", "web"]
    command += ["--server", node.address, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_the_link_signs_in_and_sigterm_ends_it(started: subprocess.Popen[str]) -> None:
    assert started.stdout is not None
    address, _, secret = started.stdout.readline().strip().partition("#secret=")
    body = json.dumps({"token": secret}).encode()
    with urlopen(Request(f"{address}api/v1/session", body, OF_THE_PAGE), timeout=20) as answered:
        assert json.load(answered)["unlimited"] is True
    with urlopen(address, timeout=20) as answered:
        assert b"page.js" in answered.read()
    started.send_signal(signal.SIGTERM)
    assert started.wait(20) == 0
    assert started.stderr is not None
    assert started.stderr.read() == ""


def test_ten_thousand_connections_and_a_large_body_leave_its_memory_as_it_is(
    started: subprocess.Popen[str],
) -> None:
    assert started.stdout is not None
    address = started.stdout.readline().partition("#")[0]
    host, port = address.removeprefix("http://").rstrip("/").split(":")
    with urlopen(address, timeout=20):
        before = resident_bytes(started.pid)
    opened: deque[socket.socket] = deque()
    told: Counter[bytes] = Counter()
    for number in range(10_000):
        opened.append(socket.create_connection((host, int(port)), timeout=20))
        if len(opened) > 2 * OF_AN_ADDRESS_AT_MOST:
            opened.popleft().close()
            if number % 50 == 0:  # no faster than they are taken: TCP would wait a second
                opened[-1].sendall(b"GET / HTTP/1.1\r\nHost: another\r\n\r\n")
                told[opened[-1].recv(12)] += 1
    for each in opened:
        each.close()
    assert {*told} <= {b"HTTP/1.1 503", b"HTTP/1.1 421"}
    assert told[b"HTTP/1.1 503"]
    wait_until("others are let in again", lambda: _is_let_in(address))
    large = Request(f"{address}api/v1/session", b" " * (20 << 20), OF_THE_PAGE)
    with pytest.raises((HTTPError, URLError)):  # 413, or the connection ends while it is sent
        urlopen(large, timeout=20)
    assert resident_bytes(started.pid) - before < 8 << 20


def _is_let_in(address: str) -> bool:
    try:
        with urlopen(address, timeout=20):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--listen", "0.0.0.0:0"], "PAGE_INSECURE"),
        (["--listen", "10.9.8.7:0", "--insecure"], "PAGE_NOT_STARTED"),
        (["--listen", "127.0.0.1"], "ADDRESS_INVALID"),
        (["--page-cert", __file__], "USAGE"),
        (["--page-cert", __file__, "--page-key", __file__], "PAGE_NOT_STARTED"),
    ],
)
def test_it_does_not_start(node: ScriptedNode, options: list[str], reason: str) -> None:
    with pytest.raises(CommandFailure) as caught:
        run(["web", "--server", node.address, *options])
    is_usage = reason in {"USAGE", "ADDRESS_INVALID"}
    assert caught.value.reason == reason
    assert caught.value.exit_code == (ExitCode.USAGE if is_usage else ExitCode.WRONG_SETTINGS)


def test_beyond_loopback_nodes_need_grants(node: ScriptedNode, tmp_path: Path) -> None:
    issued = trustme.CA().issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    issued.private_key_pem.write_to_path(tmp_path / "key")
    options = ["--listen", "0.0.0.0:0", "--page-cert", str(tmp_path / "cert")]
    options += ["--page-key", str(tmp_path / "key")]
    with pytest.raises(CommandFailure, match="no grants") as caught:
        run(["web", "--server", node.address, *options])
    assert caught.value.exit_code == ExitCode.WRONG_SETTINGS
