"""Every check of the project, one named step after another, each with its time.

All steps run even when one fails: a run tells everything that is wrong. The table of steps comes
last, and below it pytest's own summary line: nobody has to search for the result.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from local.child import interrupt_on_signals

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Step:
    """One check: a name and the command that must end with 0."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """How a step went."""

    name: str
    seconds: float
    code: int
    last_line: str


def steps(*, fast: bool, scratch: Path) -> list[Step]:
    """What is checked, in order; the tests come last and take the longest."""
    python = sys.executable
    packages = ("proto", "wheel", "replica", "scripts", "tests")
    not_slow = ("-m", "not slow") if fast else ()
    return [
        Step("ruff check", ("ruff", "check", ".")),
        Step("ruff format", ("ruff", "format", "--check", ".")),
        Step("mypy", ("mypy", *packages)),
        Step("import-linter", ("lint-imports",)),
        Step("generated code", (python, "-m", "local.proto", "--check")),
        Step("build", (python, "-m", "build", "--no-isolation", "--outdir", str(scratch))),
        Step("pytest", (python, "-m", "pytest", *not_slow)),
    ]


def run(step: Step) -> Done:
    """Runs a step, showing what it prints; it ends with us, however we end."""
    print(f"\n=== {step.name}: {' '.join(step.command)}", flush=True)
    started = time.monotonic()
    last_line = ""
    with subprocess.Popen(
        step.command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                last_line = line.rstrip() or last_line
            code = process.wait()
        except BaseException:
            _end(process)
            raise
    return Done(step.name, time.monotonic() - started, code, last_line)


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupts the step as Ctrl-C would, so that pytest's fixtures stop what they started."""
    for how, patience_s in ((signal.SIGINT, 30), (signal.SIGKILL, 5)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, how)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue


def table(done: Sequence[Done]) -> str:
    """The steps with their times."""
    rows = [f"{d.name:<16} {'ok' if d.code == 0 else 'FAILED':<7} {d.seconds:7.1f} s" for d in done]
    return "\n".join(["", "=== steps", *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all steps; 1 if any failed."""
    parser = argparse.ArgumentParser(prog="scripts/test", description="Run all checks and tests.")
    parser.add_argument("--fast", action="store_true", help="leave out what needs minutes")
    parser.add_argument("--environment-seconds", type=float, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    interrupt_on_signals()
    done = [Done("environment", options.environment_seconds, 0, "")]
    try:
        with tempfile.TemporaryDirectory() as scratch:
            done += [run(step) for step in steps(fast=options.fast, scratch=Path(scratch))]
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(table(done))
    print(done[-1].last_line)
    return 1 if any(step.code for step in done) else 0


if __name__ == "__main__":
    sys.exit(main())
