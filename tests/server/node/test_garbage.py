"""Collections skip the objects of modules, and nothing is freed by itself at the end."""

from __future__ import annotations

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


def test_the_end_frees_nothing_and_loses_no_line() -> None:
    program = """if True:
        import atexit
        from delaywheel_replica.process.garbage import exit_at_once
        atexit.register(print, "the interpreter has ended")
        print("the last line")
        exit_at_once(3)
    """
    ended = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (3, "the last line\n")
