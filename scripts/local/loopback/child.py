"""Starts processes that end with the script that started them, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

# Becomes the command by exec. The signal of the parent's death is asked for here and not in a
# preexec_fn: that would run Python between fork and exec of a parent that may have threads.
_LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""

_interrupted: list[int] = []


def interrupt_on_signals() -> None:
    """Treats SIGTERM as Ctrl-C, which also works where a shell ignored it (`script &`)."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def end_if_interrupted() -> None:
    """Raises KeyboardInterrupt again if one was lost: Python swallows those inside of callbacks."""
    if _interrupted:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    _interrupted.append(number)
    signal.default_int_handler(number, frame)


def start_child(
    command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a process in its own session, so that Ctrl-C does not reach it.

    It is killed with the *thread* that started it (the kernel's parent-death signal), so start it
    from one that lives as long as the process should.

    Args:
        command: Program and arguments.
        log: Where its output is appended.
        environment: On top of our own.
    """
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )


def end_child(process: subprocess.Popen[bytes], *, patience_s: float) -> None:
    """Asks a child to end, and kills its whole session if that takes too long."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    await_end(process, patience_s=patience_s)


def await_end(process: subprocess.Popen[bytes], *, patience_s: float) -> None:
    """Waits for a child that was asked to end, and kills its session if that takes too long."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
