"""Collections skip the objects of modules, and nothing is freed by itself at the end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import gc, sys
from delaywheel_replica.{process} import main as program

def begin():
    sys.exit(f"{{len(gc.get_objects()) < 1_000}}")

program.exit_with_supervisor = begin
program.main()
"""


@pytest.mark.parametrize("process", ["server", "cleaner"])
def test_what_modules_made_is_not_looked_at_again(process: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(process=process)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stderr.strip() == "True"


ENDING = """if True:
    import atexit
    from delaywheel_replica.process.garbage import exit_at_once
    atexit.register(print, "the interpreter has ended")
    print("the last line")
    exit_at_once(3)
"""


def test_the_end_frees_nothing_and_loses_no_line() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDING], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (3, "the last line\n")


def test_the_code_is_told_though_nobody_reads_the_last_line() -> None:
    """Its supervisor would start again what cannot start."""
    reading, writing = os.pipe()
    os.close(reading)
    environment = os.environ | {"PYTHONUNBUFFERED": ""}
    ended = subprocess.run(
        [sys.executable, "-c", ENDING], stdout=writing, env=environment, timeout=60, check=False
    )
    os.close(writing)
    assert ended.returncode == 3
