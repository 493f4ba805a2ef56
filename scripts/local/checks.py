"""Every check of the project, one named step after another, each with its time and CPU time.

Steps are in two queues. Tests on real processes, nodes and brokers mostly wait: four run at once.
All others compute: two run at once, with a lower priority, and use what the first leave of two
cores. Processes that wait cost as long as they run, so nothing that can be done later holds them
up, and more at once take longer. A free lane takes the next step of its queue, the longest first,
and of the other queue when its own is empty. So that no step is alone at the end, several of those
that wait are left when all others are done, and none takes much longer than the rest. The checks of
the text come before all tests, because they take seconds. All steps run even if one fails: a run
reports everything that is wrong. Steps' output appears as it is printed, each line with its step's
name, and names each failed test at once. What failed steps said stands once more at the end,
because of a long output the end is what is kept: of pytest the lines of errors, of others the last
lines. Then come the table of steps and the numbers of passed and failed tests. All tests of a
broker share one, so that another process costs no other broker; tests that stop theirs, or set it
up otherwise, start their own.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from local.loopback.child import interrupt_on_signals
from local.loopback.kafka import JVM_VARIABLE
from local.loopback.kafka_jars import VERSION_VARIABLE, cache_folder
from local.loopback.shared import BROKER_VARIABLE, TEST_JVM, SharedBroker

ROOT = Path(__file__).parents[2]
NODES = "tests/e2e"
"""Where the tests of real nodes are."""
ONE_NODE = f"{NODES}/one_node"
"""Half of them: these share one."""
SCRIPTS = ("tests/scripts/test_chaos_whole.py", "tests/scripts/test_demo_whole.py")
"""These start brokers of their own."""
BROKERS = "tests/brokers"
"""These stop brokers of three that they share."""
EACH_AWAY = f"{BROKERS}/test_each_away.py"
"""At night alone: it starts brokers five times, and all kinds of clients wait for them."""
OTHER_KAFKAS = ("3.6.2", "4.4.0")
"""The oldest and the newest release that docs/KAFKA.md names."""
AT_NIGHT = {
    "DELAYWHEEL_HYPOTHESIS": "long",
    "DELAYWHEEL_FUZZ_MINUTES": "10",
    "PYTEST_ADDOPTS": "-o timeout=7200",
}
"""What tests look at, and how long one may take that tries thousands of examples."""
INDEX = "tests/trace/index"
SPARK = ("tests/audit", INDEX)
"""Many of these need Spark: it is started once, for these."""
SIMULATION = "tests/sim"
DRILLS = f"{SIMULATION}/tests/test_sim_drills.py"
MUTANTS = f"{SIMULATION}/tests/test_sim_mutants_short.py"
SERVING = "tests/server/serving"
SECURED = ("tests/peers", "tests/security")
"""Nearly all of these and of the former start processes."""
SERVER = "tests/server"
CORE = ("tests/core", "tests/consumer", "tests/wheel")
"""What computes longest of all that needs neither a broker nor the simulation."""

CONSUMERS = ("tests/consumer", "tests/client/table", "tests/client/testing")
"""Consumers on a broker; groups have the same names in both."""
CLEANER = "tests/cleaner"
KAFKA = (
    "tests/cli/asking/test_cli_connect.py",
    "tests/cli/clusters/test_cli_dev_certs.py",
    "tests/cli/kafka",
    "tests/cli/test_cli_whole.py",
    "tests/packaging",
    "tests/trace/test_trace_topic.py",
    "tests/trace/test_wrappers.py",
    "tests/wheel/deadletters",
)
"""Where other tests of a broker are: to collect all would take seconds."""
SHARING = 6
"""How many steps share the broker."""

# The last line of pytest; a library's words about an ended broker may follow it.
_SUMMARY = re.compile(r"=+ .+ in \d[\d.]*s")
_REAPER = (sys.executable, "-S", str(Path(__file__).parent / "loopback" / "reaper.py"))
"""Counts the CPU time of processes that end after those which started them, as JVMs do."""
_PYTEST = (sys.executable, "-m", "pytest")
_NEITHER = "not kafka and not spark"
_COUNT = re.compile(r"(\d+) (passed|failed|error|skipped|xfailed)")
_OF_AN_ERROR = re.compile(r"(E  |>  |(FAILED|ERROR)[ :]|_+ .+ _+$|\S+:\d+: )")
"""How pytest begins lines on a failed test: error, statement, summary, its name, place."""
KEPT_LINES = 60
"""Of each failed step, for the end."""


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
        start_s: When it started, from the start of the first.
        seconds: From its start to its end.
        cpu_s: What it computed, with all processes that it started.
        code: What it exited with.
        summary: What pytest ended with.
        errors: Its last lines, of pytest those on failed tests if it came to its end.
    """

    name: str
    start_s: float
    seconds: float
    cpu_s: float
    code: int
    summary: str
    errors: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Queue:
    """Steps in their order.

    Attributes:
        at_once: How many of them run concurrently, and more once another queue is empty.
        steps: All of them.
    """

    at_once: int
    steps: tuple[Step, ...]


def queues(*, fast: bool, listeners: Sequence[str]) -> list[Queue]:
    """Returns all checks: those that only compute, and those that mostly wait.

    Args:
        fast: Leave out what needs minutes.
        listeners: Of the broker, for each step that uses it.
    """
    return [
        Queue(2, (*_text(), *_computing(" and not slow" if fast else ""))),
        Queue(4, _waiting(" and not slow" if fast else "", listeners, fast=fast)),
    ]


def long_steps() -> tuple[Step, ...]:
    """Returns what only a night has: a list of all commands that take long."""
    sim = ("nice", "-n", "5", sys.executable, "-m", "local.sim", "--jobs", "1")
    kafkas = (
        Step(f"pytest {release}", ("env", f"{VERSION_VARIABLE}={release}", *_PYTEST, BROKERS))
        for release in OTHER_KAFKAS
    )
    return (
        Step("pytest each away", (*_PYTEST, EACH_AWAY)),
        *kafkas,
        Step("upgrade", (sys.executable, "-m", "local.upgrading.run")),
        Step("models", (*sim, "--models")),
        Step("drills", (*sim, "--drills", "--seeds", "2..4")),
        Step("seeds", (*sim, "--seeds", "1..500")),
        Step("mutants", (*sim, "--mutants", "--minutes", "120")),
    )


def _waiting(and_not_slow: str, listeners: Sequence[str], *, fast: bool) -> tuple[Step, ...]:
    pytest = (*_PYTEST, "-m", "(kafka or spark)" + and_not_slow)
    without = (*_PYTEST, "-m", _NEITHER + and_not_slow)
    # All of these are slow, and pytest fails if it has nothing to do.
    slow = () if fast else (Step("pytest scripts", (*pytest, *SCRIPTS)),)
    nodes, consumers, one_node, kafka, spark, cleaner = (
        ("env", f"{BROKER_VARIABLE}={listener}", *pytest) for listener in listeners
    )
    return (
        # Its tests start processes, too: at the end, alone, they would leave a core idle.
        Step("pytest", (*without, *_ignored(SIMULATION, SERVER, *SECURED, *CORE))),
        Step("pytest consumers", (*consumers, *CONSUMERS)),
        # What computes a whole core is not to be alone at the end.
        Step("pytest spark", (*spark, *SPARK)),
        Step("pytest secured", (*without, *SECURED)),
        Step("pytest kafka", (*kafka, *KAFKA)),
        Step("pytest nodes", (*nodes, NODES, *_ignored(ONE_NODE))),
        Step("pytest cleaner", (*cleaner, CLEANER)),
        Step("pytest one node", (*one_node, ONE_NODE)),
        Step("pytest serving", (*without, SERVING)),
        Step("pytest brokers", (*pytest, BROKERS, *_ignored(EACH_AWAY))),
        *slow,
    )


def _text() -> tuple[Step, ...]:
    # What mypy found out about a file is true wherever the same file lies.
    found = cache_folder() / "mypy"
    packages = ("proto", "wheel", "replica", "scripts", "tests")
    return (
        Step("ruff check", ("ruff", "check", ".")),
        Step("ruff format", ("ruff", "format", "--check", ".")),
        Step("mypy", ("mypy", f"--cache-dir={found}", *packages)),
        Step("import-linter", ("lint-imports",)),
        Step("size", (sys.executable, "-m", "local.size")),
        Step("generated code", (sys.executable, "-m", "local.proto", "--check")),
    )


def _computing(and_not_slow: str) -> tuple[Step, ...]:
    pytest = ("nice", "-n", "5", *_PYTEST, "-m", _NEITHER + and_not_slow)
    return (
        Step("pytest drills", (*pytest, DRILLS)),
        Step("pytest simulation", (*pytest, SIMULATION, *_ignored(DRILLS, MUTANTS))),
        Step("pytest core", (*pytest, *CORE)),
        Step("pytest server", (*pytest, SERVER, *_ignored(SERVING))),
        Step("pytest mutants", (*pytest, MUTANTS)),
    )


def _ignored(*paths: str) -> tuple[str, ...]:
    return tuple(f"--ignore={path}" for path in paths)


class Lane:
    """Takes steps from the front of queues on its own thread, until none is left or it is ended.

    Attributes:
        done: How its steps went.
    """

    def __init__(self, began_s: float, *waiting: deque[Step]) -> None:
        """Begins with the first queue; other lanes may take from the same ones.

        Args:
            began_s: The monotonic time from which starts of steps are counted.
            waiting: The queues.
        """
        self.done: list[Done] = []
        self._began_s = began_s
        self._waiting = waiting
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_ended = False
        # Not the thread: Python 3.11 takes one whose join was interrupted for ended.
        self._finished = threading.Event()
        threading.Thread(target=self._run).start()

    def wait(self) -> None:
        """Blocks until all steps are done; a signal interrupts it, within a second."""
        while not self._finished.wait(1):  # a signal may have reached another thread
            pass

    def end(self, how: signal.Signals) -> None:
        """Sends the step a signal; no other one begins."""
        with self._lock:
            self._is_ended = True
            if self._process is not None:
                os.killpg(self._process.pid, how)

    def has_ended(self, within_s: float) -> bool:
        """Whether nothing of it runs any more, after waiting up to this long."""
        return self._finished.wait(within_s)

    def _run(self) -> None:
        try:
            self._run_steps()
        finally:
            self._finished.set()

    def _run_steps(self) -> None:
        while (step := self._next()) is not None:
            started = time.monotonic()
            if not self._start(step):
                return
            summary, errors = self._follow(step)
            code, cpu_s = self._reap()
            seconds = time.monotonic() - started
            start_s = started - self._began_s
            self.done.append(Done(step.name, start_s, seconds, cpu_s, code, summary, errors))

    def _next(self) -> Step | None:
        for queue in self._waiting:
            with suppress(IndexError):  # it is empty, also if another lane was quicker
                return queue.popleft()
        return None

    def _start(self, step: Step) -> bool:
        with self._lock:
            if self._is_ended:
                return False
            self._process = subprocess.Popen(
                (*_REAPER, *step.command),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                process_group=0,
            )
            return True

    def _follow(self, step: Step) -> tuple[str, Sequence[str]]:
        assert self._process is not None
        assert self._process.stdout is not None
        summary, last, errors = "", deque[str](maxlen=KEPT_LINES), deque[str](maxlen=KEPT_LINES)
        with self._process.stdout as output:
            for line in output:
                print(f"{step.name} | {line}", end="", flush=True)
                summary = line if _SUMMARY.match(line) else summary
                last.append(line)
                if _OF_AN_ERROR.match(line):
                    errors.append(line)
        return summary, errors if summary else last

    def _reap(self) -> tuple[int, float]:
        """Returns exit code and CPU seconds; the pid is not reused before this call."""
        process = self._process
        assert process is not None
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            self._process = None
        return process.returncode, usage.ru_utime + usage.ru_stime


def end(running: Sequence[Lane]) -> None:
    """Interrupts all at once, as Ctrl-C would, so that pytest's fixtures stop what they started."""
    for how, patience_s in ((signal.SIGINT, 30), (signal.SIGKILL, 5)):
        for lane in running:
            lane.end(how)
        deadline = time.monotonic() + patience_s
        for lane in running:
            lane.has_ended(max(0.0, deadline - time.monotonic()))


def table(done: Sequence[Done]) -> str:
    """Formats the steps with their durations, CPU times and starts."""
    rows = [
        f"{step.name:<17} {'ok' if step.code == 0 else 'FAILED':<7}"
        f" {step.seconds:7.1f} s {step.cpu_s:8.1f} CPU s   from {step.start_s:6.1f} s on"
        for step in done
    ]
    total = f"{'all':<33} {sum(step.cpu_s for step in done):9.1f} CPU s"
    return "\n".join(["", "=== steps", *rows, total])


def failures(done: Sequence[Done]) -> str:
    """Returns what failed steps said; nothing without any."""
    return "".join(
        f"\n=== {step.name} failed\n{''.join(step.errors)}" for step in done if step.code
    )


def verdict(done: Sequence[Done]) -> str:
    """Returns how many tests passed and failed, from pytest's summaries."""
    counts: Counter[str] = Counter()
    for step in done:
        if step.name.startswith("pytest"):
            for number, what in _COUNT.findall(step.summary):
                counts["failed" if what == "error" else what] += int(number)
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    return f"{counts['passed']} passed, {counts['failed']} failed{skipped}"


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all steps; 1 if any failed."""
    parser = argparse.ArgumentParser(prog="scripts/test", description="Run all checks and tests.")
    parser.add_argument("--fast", action="store_true", help="leave out what needs minutes")
    parser.add_argument(
        "--night", action="store_true", help="all of it at its full length, and what else is long"
    )
    parser.add_argument(
        "--kafka", metavar="VERSION", help="the tests of three brokers alone, of this release"
    )
    parser.add_argument("--environment-seconds", type=float, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    interrupt_on_signals()
    os.environ.setdefault(JVM_VARIABLE, TEST_JVM)
    if options.kafka:
        release = {VERSION_VARIABLE: options.kafka}
        return subprocess.call((*_PYTEST, BROKERS), cwd=ROOT, env=os.environ | release)
    if options.night:
        os.environ.update(AT_NIGHT)
    children_cpu_s, began_s = _children_cpu_s(), time.monotonic()
    with SharedBroker(SHARING) as broker:
        wanted = queues(fast=options.fast, listeners=broker.listeners)
        wanted += [Queue(1, long_steps())] if options.night else []
        left = [deque(queue.steps) for queue in wanted]
        running = [
            Lane(began_s, own, *(other for other in left if other is not own))
            for queue, own in zip(wanted, left, strict=True)
            for _ in range(queue.at_once)
        ]
        try:
            for lane in running:
                lane.wait()
        except KeyboardInterrupt:
            end(running)
            print("interrupted", file=sys.stderr)
            return 130
    order = [step.name for queue in wanted for step in queue.steps]
    done = sorted(
        (step for lane in running for step in lane.done), key=lambda d: order.index(d.name)
    )
    broker_cpu_s = _children_cpu_s() - children_cpu_s - sum(step.cpu_s for step in done)
    done.insert(0, Done("broker", 0, time.monotonic() - began_s, broker_cpu_s, 0, ""))
    done.insert(0, Done("environment", 0, options.environment_seconds, 0, 0, ""))
    print(failures(done), table(done), sep="")
    print(verdict(done))
    return 1 if any(step.code for step in done) else 0


if __name__ == "__main__":
    sys.exit(main())
