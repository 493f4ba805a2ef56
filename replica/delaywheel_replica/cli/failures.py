"""How a command fails: a named reason on stderr and an exit code, never a traceback.

docs/CLI.md says what the exit codes mean; 78 is of `serve` alone: settings or data folder are
wrong, and no restart helps.
"""

from __future__ import annotations

import os
import sys
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes, which are stable: scripts depend on them."""

    DONE = 0
    REFUSED = 1
    USAGE = 2
    UNAVAILABLE = 3
    UNKNOWN_OUTCOME = 4
    DEFECT = 70
    WRONG_SETTINGS = 78


class CommandFailure(Exception):
    """Raised to end a command; the reason is stable, UPPER_SNAKE_CASE."""

    def __init__(self, reason: str, message: str, exit_code: ExitCode = ExitCode.REFUSED) -> None:
        super().__init__(f"{reason}: {message}" if message else reason)
        self.reason = reason
        self.exit_code = exit_code


def discard_output() -> None:
    """Discards what is still printed, at exit too: the reader has closed standard output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
