"""Every check of the project, one named step after another, each with its time and CPU time.

Seven lanes run side by side, because the tests on real nodes mostly wait: one has those of a node
alone, one those of several, one the audit with Spark, one the others with a broker, one the scripts
and those that stop a broker of their own, one the simulation, which only computes and gives way to
all others, one all else. The simulation's drills come last in the shortest one: otherwise the
simulation alone would keep one core busy when all others have ended. All steps run even if one
fails: a run reports everything that is wrong. Steps' output appears as it is printed, each line
with its step's name. The table of steps comes last, and below it how many tests passed and failed:
the result needs no searching.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from local.loopback.child import interrupt_on_signals
from local.loopback.kafka_jars import cache_folder

ROOT = Path(__file__).parents[2]
NODES = "tests/e2e"
"""Where the tests of real nodes are."""
ALONE = f"{NODES}/one_node"
OUTAGES = f"{NODES}/test_outages.py"
SCRIPTS = "tests/scripts"
"""What runs here starts brokers of its own."""
AUDIT = "tests/audit"
"""All tests that need Spark: it is started once, for these."""
SIMULATION = "tests/sim"
DRILLS = f"{SIMULATION}/tests/test_sim_drills.py"

# What pytest ends with; a library's words about a broker that has ended may come behind it.
_SUMMARY = re.compile(r"=+ .+ in \d[\d.]*s")
_COUNT = re.compile(r"(\d+) (passed|failed|error|skipped|xfailed)")


@dataclass(frozen=True, slots=True)
class Step:
    """One check: a name and the command that must end with 0."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a step.

    Attributes:
        name: Of the step.
        seconds: From its start to its end.
        cpu_s: What it computed, with all processes that it started and waited for.
        code: What it exited with.
        summary: What pytest ended with.
    """

    name: str
    seconds: float
    cpu_s: float
    code: int
    summary: str


def lanes(*, fast: bool, scratch: Path) -> list[list[Step]]:
    """Returns all checks, in order, in seven lanes."""
    python = sys.executable
    # What mypy found out about a file is true wherever the same file lies.
    found = cache_folder() / "mypy"
    packages = ("proto", "wheel", "replica", "scripts", "tests")
    pytest = (python, "-m", "pytest", "-m")
    and_not_slow = " and not slow" if fast else ""
    outside = (*pytest, "(kafka or spark)" + and_not_slow)
    inside = (*pytest, "not kafka and not spark" + and_not_slow)
    drills = Step("pytest drills", ("nice", "-n", "5", *inside, DRILLS))
    # All of these are slow, and pytest fails if it has nothing to do.
    slow = [
        Step("pytest scripts", (*outside, SCRIPTS)),
        Step("pytest outages", (*outside, OUTAGES)),
    ]
    ignored = (f"--ignore={NODES}", f"--ignore={SCRIPTS}", f"--ignore={AUDIT}")
    return [
        [Step("pytest nodes", (*outside, NODES, f"--ignore={OUTAGES}", f"--ignore={ALONE}"))],
        [Step("pytest one node", (*outside, ALONE))],
        [*([] if fast else slow), drills],
        [Step("pytest spark", (*outside, AUDIT))],
        [Step("pytest kafka", (*outside, *ignored))],
        [Step("pytest simulation", ("nice", "-n", "5", *inside, SIMULATION, f"--ignore={DRILLS}"))],
        [
            Step("ruff check", ("ruff", "check", ".")),
            Step("ruff format", ("ruff", "format", "--check", ".")),
            Step("mypy", ("mypy", f"--cache-dir={found}", *packages)),
            Step("import-linter", ("lint-imports",)),
            Step("generated code", (python, "-m", "local.proto", "--check")),
            Step("build", (python, "-m", "build", "--no-isolation", "--outdir", str(scratch))),
            Step("pytest", (*inside, f"--ignore={SIMULATION}")),
        ],
    ]


class Lane:
    """Runs steps one after another on its own thread, until done or ended.

    Attributes:
        done: How the steps went.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.done: list[Done] = []
        self._steps = steps
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_ended = False
        # Not the thread: Python 3.11 takes one whose join was interrupted for ended.
        self._finished = threading.Event()
        threading.Thread(target=self._run).start()

    def wait(self) -> None:
        """Blocks until all steps are done; a signal interrupts it."""
        self._finished.wait()

    def end(self) -> None:
        """Interrupts the step as Ctrl-C would, so that pytest's fixtures stop what they started."""
        with self._lock:
            self._is_ended = True
        for how, patience_s in ((signal.SIGINT, 30), (signal.SIGKILL, 5)):
            with self._lock:
                if self._process is not None:
                    os.killpg(self._process.pid, how)
            self._finished.wait(patience_s)

    def _run(self) -> None:
        try:
            self._run_steps()
        finally:
            self._finished.set()

    def _run_steps(self) -> None:
        for step in self._steps:
            started = time.monotonic()
            if not self._start(step):
                return
            summary = self._follow(step)
            code, cpu_s = self._reap()
            self.done.append(Done(step.name, time.monotonic() - started, cpu_s, code, summary))

    def _start(self, step: Step) -> bool:
        with self._lock:
            if self._is_ended:
                return False
            self._process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                process_group=0,
            )
            return True

    def _follow(self, step: Step) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        summary = ""
        with self._process.stdout as output:
            for line in output:
                print(f"{step.name} | {line}", end="", flush=True)
                summary = line if _SUMMARY.match(line) else summary
        return summary

    def _reap(self) -> tuple[int, float]:
        """Returns exit code and CPU seconds; the pid is not reused before that."""
        process = self._process
        assert process is not None
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            self._process = None
        return process.returncode, usage.ru_utime + usage.ru_stime


def table(done: Sequence[Done]) -> str:
    """Formats the steps with their durations and CPU times."""
    rows = [
        f"{step.name:<17} {'ok' if step.code == 0 else 'FAILED':<7}"
        f" {step.seconds:7.1f} s {step.cpu_s:8.1f} CPU s"
        for step in done
    ]
    total = f"{'all':<33} {sum(step.cpu_s for step in done):9.1f} CPU s"
    return "\n".join(["", "=== steps", *rows, total])


def verdict(done: Sequence[Done]) -> str:
    """Returns how many tests passed and failed, from pytest's summaries."""
    counts: Counter[str] = Counter()
    for step in done:
        if step.name.startswith("pytest"):
            for number, what in _COUNT.findall(step.summary):
                counts["failed" if what == "error" else what] += int(number)
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    return f"{counts['passed']} passed, {counts['failed']} failed{skipped}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all steps; 1 if any failed."""
    parser = argparse.ArgumentParser(prog="scripts/test", description="Run all checks and tests.")
    parser.add_argument("--fast", action="store_true", help="leave out what needs minutes")
    parser.add_argument("--environment-seconds", type=float, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    interrupt_on_signals()
    with tempfile.TemporaryDirectory() as scratch:
        running = [Lane(steps) for steps in lanes(fast=options.fast, scratch=Path(scratch))]
        try:
            for lane in running:
                lane.wait()
        except KeyboardInterrupt:
            for lane in running:
                lane.end()
            print("interrupted", file=sys.stderr)
            return 130
    done = [Done("environment", options.environment_seconds, 0, 0, "")]
    done += [step for lane in reversed(running) for step in lane.done]
    print(table(done))
    print(verdict(done))
    return 1 if any(step.code for step in done) else 0


if __name__ == "__main__":
    sys.exit(main())
