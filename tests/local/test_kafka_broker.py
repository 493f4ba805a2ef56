"""The broker of scripts and tests leaves no process behind; a program stands for its JVM.

That a real one comes back where it was, with its data, tests/e2e/test_outages.py shows.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from local.loopback import kafka
from support.services.waiting import wait_until

PROGRAM = """
import sys, time
from local.loopback.kafka import KafkaBroker, main

def wait_until_ready(broker):
    while not broker.log_path.read_text():
        time.sleep(0.01)

KafkaBroker.wait_until_ready = wait_until_ready
KafkaBroker._format = lambda *_: None
KafkaBroker._archive_in_use = lambda _: []
JVM = "import time; print('up', flush=True); time.sleep(600)"
KafkaBroker._java = lambda *_: [sys.executable, "-c", JVM]
sys.exit(main(sys.argv[1:]))
"""


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
    options = ["--data", str(tmp_path / "data"), "--ready-file", str(ready)]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *options],
        env={**os.environ, "PYTHONPATH": str(Path(kafka.__file__).parents[2])},
        stdout=subprocess.DEVNULL,
    ) as program:
        wait_until("the broker is ready", ready.exists)
        reported = json.loads(ready.read_text())
        assert lives(reported["pid"])
        os.kill(program.pid, how)
        code = program.wait(60)
    assert code == (0 if how is signal.SIGTERM else -signal.SIGKILL)
    wait_until("the JVM is gone", lambda: not lives(reported["pid"]))
