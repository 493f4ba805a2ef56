"""The broker of scripts and tests leaves no process behind.

That it comes back where it was, with its data, tests/e2e/test_outages.py shows.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from support.services import service

pytestmark = pytest.mark.kafka

PROGRAM = [
    sys.executable,
    str(Path(__file__).parents[2] / "scripts" / "local" / "loopback" / "kafka.py"),
]


# A JVM starts.
wait_until = partial(service.wait_until, timeout_s=100)


def lives(pid: int) -> bool:
    """Whether a process runs; one that ended and was not reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_the_program_that_started_it(tmp_path: Path, how: signal.Signals) -> None:
    ready = tmp_path / "ready.json"
    options = ["--data", str(tmp_path / "data"), "--heap", "512m", "--ready-file", str(ready)]
    with subprocess.Popen([*PROGRAM, *options], stdout=subprocess.DEVNULL) as program:
        wait_until("the broker is ready", ready.exists)
        reported = json.loads(ready.read_text())
        assert lives(reported["pid"])
        os.kill(program.pid, how)
        code = program.wait(60)
    assert code == (0 if how is signal.SIGTERM else -signal.SIGKILL)
    wait_until("the JVM is gone", lambda: not lives(reported["pid"]))
