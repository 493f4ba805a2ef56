"""Runs a command, and ends only when everything that it started has ended: its CPU time is whole.

A process whose parent has ended becomes this one's child instead of init's (prctl's child
subreaper), so that whoever waits for this process sees what it computed. Spark's JVM is such a
process: it ends after the program that started it. What still runs long after the command is
killed and named; the result is the command's all the same: a busy machine may be late.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
PATIENCE_S = 60.0
"""A JVM on a busy machine takes seconds to end."""


def main(command: Sequence[str]) -> int:
    """Returns the command's exit code, once nothing is left."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Who interrupts sends this to the command too. It must not find the signal ignored.
    signal.signal(signal.SIGINT, lambda *_: None)
    code = _code_of(subprocess.Popen(command).pid)
    _end_what_is_left()
    return code


def _code_of(command: int) -> int:
    """Reaps whatever ends, at once: tests ask whether a process is gone."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == command:
            return os.waitstatus_to_exitcode(status)


def _end_what_is_left() -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if not _reap():
            return
        time.sleep(0.05)
    while left := _reap():
        for pid in left:
            print(f"still runs, and is killed: {pid} {_words(pid)}", file=sys.stderr, flush=True)
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _reap() -> list[int]:
    """Waits for those that have ended; returns all other children."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return []
    return [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]


def _words(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
