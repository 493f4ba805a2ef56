"""scripts/test: all steps run, failures fail the whole, and the result is the last line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from local import checks
from local.checks import Step, main, steps


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def run_with(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *wanted: Step
) -> tuple[int, list[str]]:
    monkeypatch.setattr(checks, "steps", lambda **_: list(wanted))
    code = main(["--environment-seconds", "3"])
    return code, capfd.readouterr().out.splitlines()


def test_last_line_is_the_last_steps_summary(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, lines = run_with(
        monkeypatch,
        capfd,
        Step("one", python("print('fine')")),
        Step("pytest", python("print('..'); print('=== 2 passed in 0.1s ==='); print()")),
    )
    assert code == 0
    assert lines[-1] == "=== 2 passed in 0.1s ==="


def test_every_step_runs_and_is_named_with_its_time(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, lines = run_with(
        monkeypatch,
        capfd,
        Step("first", python("import sys; sys.exit(3)")),
        Step("second", python("print('still ran')")),
    )
    assert code == 1
    assert "still ran" in lines
    table = lines[lines.index("=== steps") + 1 : -1]
    assert [line.split()[:2] for line in table] == [
        ["environment", "ok"],
        ["first", "FAILED"],
        ["second", "ok"],
    ]
    assert table[0].split()[2:] == ["3.0", "s"]


def test_steps_of_the_project(tmp_path: Path) -> None:
    names = [step.name for step in steps(fast=False, scratch=tmp_path)]
    assert names == [
        "ruff check",
        "ruff format",
        "mypy",
        "import-linter",
        "generated code",
        "build",
        "pytest",
    ]


def test_fast_leaves_out_what_is_slow(tmp_path: Path) -> None:
    assert steps(fast=True, scratch=tmp_path)[-1].command[-2:] == ("-m", "not slow")
    assert steps(fast=False, scratch=tmp_path)[-1].command[-1] == "pytest"
