"""The demo as a newcomer runs it, on a real broker, with the kill; and its end by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(300)]


def start_demo(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "local.demo", "--plain", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def processes_below(folder: str) -> list[str]:
    """Command lines of what runs on a cluster's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        if folder in line:
            found.append(line)
    return found


def test_everything_arrives_once_across_a_kill() -> None:
    demo = start_demo("--messages", "2000", "--seconds", "8")
    told, _ = demo.communicate(timeout=240)
    assert demo.returncode == 0, told
    assert "kill -9 of the leader, n1" in told
    assert "2,000" in told
    assert "exactly once" in told


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_a_signal(how: signal.Signals) -> None:
    before = set((ROOT / ".run").glob("cluster-*"))
    demo = start_demo("--seconds", "60")
    assert demo.stdout is not None
    told = ""
    while "accepted" not in told:
        line = demo.stdout.readline()
        assert line, told
        told += line
    [folder] = set((ROOT / ".run").glob("cluster-*")) - before
    assert processes_below(str(folder))
    demo.send_signal(how)
    demo.communicate(timeout=60)
    assert demo.returncode == 130
    deadline = time.monotonic() + 10
    while processes_below(str(folder)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not folder.exists()
