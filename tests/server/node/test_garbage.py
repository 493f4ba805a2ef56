"""Collections skip the objects of modules. Two processes, some seconds together."""

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
