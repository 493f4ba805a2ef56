"""scripts/test: all steps run, failures fail the whole, and the result is the last line."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from local import checks
from local.checks import Step, lanes, main


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def run_with(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *wanted: list[Step]
) -> tuple[int, list[str]]:
    monkeypatch.setattr(checks, "lanes", lambda **_: list(wanted))
    code = main(["--environment-seconds", "3"])
    return code, capfd.readouterr().out.splitlines()


def test_the_last_line_counts_the_tests_of_all_steps(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, lines = run_with(
        monkeypatch,
        capfd,
        [Step("pytest kafka", python("print('=== 2 passed in 9.1s ===')"))],
        [
            Step("other", python("print('7 passed')")),
            Step("pytest", python("print('=== 3 passed, 1 skipped, 9 deselected in 0.1s')")),
        ],
    )
    assert code == 0
    assert lines[-1] == "5 passed, 0 failed, 1 skipped"


def test_failed_tests_are_counted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failing = (
        "import sys; print('== 1 failed, 2 passed, 1 error in 9.1s ==');"
        "print('%3|FAIL|rdkafka#producer-509| ipv4#127.0.0.1:22271 failed'); sys.exit(1)"
    )
    code, lines = run_with(
        monkeypatch,
        capfd,
        [Step("pytest kafka", python(failing))],
        [Step("pytest", python("print('=== 3 passed in 0.1s'); print()"))],
    )
    assert code == 1
    assert lines[-1] == "5 passed, 2 failed"


def test_every_step_runs_and_is_named_with_its_time(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, lines = run_with(
        monkeypatch,
        capfd,
        [Step("other", python("print('beside')"))],
        [
            Step("first", python("import time\nwhile time.process_time() < 0.3: pass\nexit(3)")),
            Step("second", python("print('still ran')")),
        ],
    )
    assert code == 1
    assert {"second | still ran", "other | beside"} <= set(lines)
    *table, total = lines[lines.index("=== steps") + 1 : -1]
    assert [line.split()[:2] for line in table] == [
        ["environment", "ok"],
        ["first", "FAILED"],
        ["second", "ok"],
        ["other", "ok"],
    ]
    assert table[0].split()[2:] == ["3.0", "s", "0.0", "CPU", "s"]
    assert float(table[1].split()[4]) >= 0.3
    assert float(total.split()[1]) >= 0.3


def test_an_interrupt_reaches_the_steps_of_all_lanes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each says that it is there, and when it is told to end; what would follow never begins."""
    pipe = tmp_path / "there"
    os.mkfifo(pipe)
    # The signal is blocked until it is waited for: an interrupt between the two is not lost.
    there = (
        "import os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
        f"os.write(os.open({str(pipe)!r}, os.O_WRONLY), b'x')\n"
        "signal.sigwait([signal.SIGINT])\nprint('told to end')\n"
    )
    steps = [[Step(name, python(there)), Step("next", python(""))] for name in ("one", "two")]
    monkeypatch.setattr(checks, "lanes", lambda **_: steps)

    # Open for both, it never ends: who writes always has a reader.
    told_there = os.open(pipe, os.O_RDWR)

    def interrupt() -> None:
        seen = 0
        while seen < 2:
            seen += len(os.read(told_there, 2))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    code = main([])
    thread.join()
    os.close(told_there)
    assert code == 130
    told = capfd.readouterr().out
    assert "one | told to end" in told
    assert "two | told to end" in told
    assert "next" not in told


def test_steps_of_the_project(tmp_path: Path) -> None:
    *tests, others = lanes(fast=False, scratch=tmp_path)
    assert [[step.name for step in lane] for lane in tests] == [
        ["pytest nodes"],
        ["pytest one node"],
        ["pytest scripts", "pytest outages", "pytest drills"],
        ["pytest spark"],
        ["pytest kafka"],
        ["pytest simulation"],
    ]
    assert [step.name for step in others] == [
        "ruff check",
        "ruff format",
        "mypy",
        "import-linter",
        "generated code",
        "build",
        "pytest",
    ]


def test_every_test_is_in_one_step(tmp_path: Path) -> None:
    *first, (*_, without) = lanes(fast=False, scratch=tmp_path)
    (nodes,), (one_node,), (scripts, outages, drills), (spark,), (kafka,), (simulation,) = first
    inside = ("-m", "not kafka and not spark")
    assert without.command[3:] == (*inside, "--ignore=tests/sim")
    for step in (drills, simulation):
        assert step.command[:3] == ("nice", "-n", "5")
    alone = "tests/sim/tests/test_sim_drills.py"
    assert drills.command[6:] == (*inside, alone)
    assert simulation.command[6:] == (*inside, "tests/sim", f"--ignore={alone}")
    own = "tests/e2e/test_outages.py"
    asked = ("-m", "(kafka or spark)")
    single = "tests/e2e/one_node"
    assert nodes.command[3:] == (*asked, "tests/e2e", f"--ignore={own}", f"--ignore={single}")
    assert one_node.command[3:] == (*asked, single)
    assert outages.command[3:] == (*asked, own)
    assert scripts.command[3:] == (*asked, "tests/scripts")
    audit = "tests/audit"
    assert spark.command[3:] == (*asked, audit)
    elsewhere = [f"--ignore={folder}" for folder in ("tests/e2e", "tests/scripts", audit)]
    assert kafka.command[3:] == (*asked, *elsewhere)


def test_fast_leaves_out_what_is_slow(tmp_path: Path) -> None:
    steps = [step for lane in lanes(fast=True, scratch=tmp_path) for step in lane]
    for step in steps:
        if step.name.startswith("pytest"):
            marks = step.command[len(step.command) - step.command[::-1].index("-m")]
            assert marks.endswith(" and not slow")
