"""scripts/test: all steps run, failures fail the whole, and the result is the last line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from delaywheel_replica.config_sources import load_config
from local import checks
from local.checks import Queue, Step, long_steps, main, queues
from local.loopback import child
from local.loopback.kafka import JVM_VARIABLE
from local.loopback.kafka_jars import VERSION_VARIABLE
from local.loopback.shared import BROKER_VARIABLE

LISTENERS = [f"listener {number}" for number in range(checks.SHARING)]


@pytest.fixture(autouse=True)
def no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step here needs one."""
    without = nullcontext(SimpleNamespace(listeners=LISTENERS))
    monkeypatch.setattr(checks, "SharedBroker", lambda _: without)


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def run_with(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *wanted: list[Step]
) -> tuple[int, list[str]]:
    monkeypatch.setattr(checks, "queues", lambda **_: [Queue(1, tuple(steps)) for steps in wanted])
    code = main(["--environment-seconds", "3"])
    return code, capfd.readouterr().out.splitlines()


def test_the_last_line_counts_the_tests_of_all_steps(
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
        [
            Step("other", python("print('7 passed')")),
            Step("pytest", python("print('=== 3 passed, 1 skipped, 9 deselected in 0.1s\\n')")),
        ],
    )
    assert code == 1
    assert lines[-1] == "5 passed, 2 failed, 1 skipped"


def test_what_failed_stands_once_more_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of pytest what it says of an error, whatever it prints beside: its real output is read."""
    (tmp_path / "test_it.py").write_text(
        "def test_the_sum():\n    print('noise')\n    assert 1 + 1 == 3, 'a reason'\n"
    )
    test = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-ra", str(tmp_path))
    _, lines = run_with(
        monkeypatch,
        capfd,
        [Step("pytest it", test)],
        [Step("ruff", python("for n in range(100): print('line', n)\nexit(1)"))],
        [Step("pytest dies", python("print('Fatal error', flush=True)\nimport os\nos.abort()"))],
        [Step("fine", python("print('nothing to say')"))],
    )
    end = lines[lines.index("=== pytest it failed") : lines.index("=== steps")]
    ruff = end.index("=== ruff failed")
    dies = end.index("=== pytest dies failed")
    assert end[ruff + 1 : dies - 1] == [f"line {n}" for n in range(40, 100)]
    assert end[dies + 1 : -1] == ["Fatal error"]
    assert ">       assert 1 + 1 == 3, 'a reason'" in end[:ruff]
    assert "E       AssertionError: a reason" in end[:ruff]
    assert any(line.startswith("FAILED") and "test_the_sum" in line for line in end[:ruff])
    assert "noise" not in end[:ruff]


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
        ["broker", "ok"],
        ["other", "ok"],
        ["first", "FAILED"],
        ["second", "ok"],
    ]
    assert table[0].split()[2:] == ["3.0", "s", "0.0", "CPU", "s", "from", "0.0", "s", "on"]
    assert float(table[1].split()[4]) < 0.1, "what the steps computed is theirs"
    assert float(table[3].split()[4]) >= 0.3
    ends_s = [float(line.split()[8]) + float(line.split()[2]) for line in table[2:4]]
    assert float(table[4].split()[8]) >= min(ends_s) - 0.1, "in a lane that was free by then"
    assert float(total.split()[1]) >= 0.3


COMPUTE = "import time\nwhile time.process_time() < 0.5: pass"


def test_what_outlives_the_process_that_started_it_is_counted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    leaves_it = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {COMPUTE!r}])"
    code, lines = run_with(monkeypatch, capfd, [Step("leaves", python(leaves_it))])
    assert code == 0
    (row,) = (line.split() for line in lines if line.startswith("leaves "))
    assert float(row[4]) >= 0.5


def test_what_never_ends_is_killed_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    leaves_it = (
        "import subprocess\nleft = subprocess.Popen(['sleep', '1000'])\n"
        "while not open(f'/proc/{left.pid}/cmdline').read(): pass\n"  # empty while exec goes on
        "print(left.pid)"
    )
    shorter = "from local.loopback import reaper; reaper.PATIENCE_S = 0.0; import sys;"
    run = f"{shorter} sys.exit(reaper.main([sys.executable, '-c', {leaves_it!r}]))"
    done = subprocess.run(python(run), cwd=checks.ROOT / "scripts", check=False)
    pid, named = capfd.readouterr()
    assert done.returncode == 0
    assert named.strip() == f"still runs, and is killed: {pid.strip()} sleep 1000"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_an_interrupt_reaches_the_steps_of_all_lanes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each reports its start, and the request to end; later steps never begin."""
    pipe = tmp_path / "there"
    os.mkfifo(pipe)
    # The signal is blocked until it is waited for: an interrupt between the two is not lost.
    there = (
        "import os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
        f"os.write(os.open({str(pipe)!r}, os.O_WRONLY), b'x')\n"
        "signal.sigwait([signal.SIGINT])\nprint('asked to end')\n"
    )
    steps = [Step("one", python(there)), Step("two", python(there)), Step("next", python(""))]
    monkeypatch.setattr(checks, "queues", lambda **_: [Queue(2, tuple(steps))])
    monkeypatch.setattr(child, "_interrupted", [])  # else later tests would end by this interrupt

    # Open for both, it never ends: a writer always has a reader.
    reported_there = os.open(pipe, os.O_RDWR)

    def interrupt() -> None:
        seen = 0
        while seen < 2:
            seen += len(os.read(reported_there, 2))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    code = main([])
    thread.join()
    os.close(reported_there)
    assert code == 130
    reported = capfd.readouterr().out
    assert "one | asked to end" in reported
    assert "two | asked to end" in reported
    assert "next" not in reported


def test_who_has_ended_a_step_takes_the_next_of_its_queue(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The long step ends when the other lane has begun the last short one."""
    pipe = tmp_path / "last"
    os.mkfifo(pipe)
    steps = (
        Step("long", python(f"print(open({str(pipe)!r}).read())")),
        Step("short", python("")),
        Step("last", python(f"open({str(pipe)!r}, 'w').write('it is there')")),
    )
    monkeypatch.setattr(checks, "queues", lambda **_: [Queue(2, steps)])
    assert main([]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "long | it is there" in lines
    ended = [line.split()[0] for line in lines[lines.index("=== steps") + 3 : -2]]
    assert ended == ["long", "short", "last"], "the table keeps the order"


def test_who_finds_its_queue_empty_takes_from_the_other_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The long step ends when the next one has begun, and it has one lane."""
    pipe = tmp_path / "last"
    os.mkfifo(pipe)
    long = Step("long", python(f"print(open({str(pipe)!r}).read())"))
    last = Step("last", python(f"open({str(pipe)!r}, 'w').write('it is there')"))
    code, lines = run_with(monkeypatch, capfd, [Step("short", python(""))], [long, last])
    assert code == 0
    assert "long | it is there" in lines


def test_a_failed_test_is_reported_before_the_next_one_ends(tmp_path: Path) -> None:
    pipe = tmp_path / "go on"
    os.mkfifo(pipe)
    (tmp_path / "conftest.py").write_text("from support.process.failures import pytest_configure")
    (tmp_path / "test_two.py").write_text(
        "def test_wrong(): assert 1 == 2, 'not so'\n"
        f"def test_long(): assert open({str(pipe)!r}).read() == 'go on'\n"
    )
    with subprocess.Popen(
        (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_two.py"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(checks.ROOT / "tests")},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        reported = next(line for line in process.stdout if line.startswith("failed: "))
        pipe.write_text("go on")
        rest = process.stdout.read()
    assert reported.startswith("failed: test_two.py::test_wrong: ")
    assert "not so" in reported
    assert "1 failed, 1 passed" in rest


def test_another_release_of_kafka_is_tried_by_the_tests_of_three_brokers(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = "from local.loopback.kafka_jars import KAFKA_VERSION\ndef test(): print(KAFKA_VERSION)\n"
    (tmp_path / "test_release.py").write_text(told)
    monkeypatch.setattr(checks, "BROKERS", "-s", raising=True)
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(checks.__file__).parents[1]))
    assert main(["--kafka", "3.6.2"]) == 0
    assert "3.6.2" in capfd.readouterr().out


def test_a_night_has_all_steps_at_their_length_and_what_else_is_long(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    says = "import os; print(os.environ.get('DELAYWHEEL_HYPOTHESIS'))"
    monkeypatch.setattr(checks, "queues", lambda **_: [Queue(1, (Step("short", python(says)),))])
    monkeypatch.setattr(checks, "long_steps", lambda: (Step("more", python(says)),))
    for name in checks.AT_NIGHT:
        monkeypatch.setenv(name, "")  # as it was, afterwards
    assert main(["--night"]) == 0
    assert {"short | long", "more | long"} <= set(capfd.readouterr().out.splitlines())


def test_long_steps_name_what_there_is() -> None:
    """Their options are taken, and their tests are there: nobody looks at them by day."""
    for step in long_steps():
        words = step.command[step.command.index("-m") + 1 :]
        if words[0] == "pytest":
            assert files_below(words[-1])
            continue
        module = import_module(words[0])
        module.argument_parser().parse_args(words[1:])


def test_steps_that_share_the_broker_have_their_own_listeners() -> None:
    _, waiting = queues(fast=False, listeners=LISTENERS)
    used = [step.command[1].partition("=")[2] for step in waiting.steps if "env" in step.command]
    assert sorted(used) == LISTENERS


def files_of(step: Step) -> Counter[Path]:
    """The files whose tests a step runs, with the marks that it selects."""
    words = step.command[step.command.index("pytest") + 1 :]
    paths = [word for word in words if word.startswith("tests/")] or ["tests"]
    ignored = [word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
    return Counter[Path](files_below(*paths) - files_below(*ignored))


def files_below(*paths: str) -> set[Path]:
    found = {path: [checks.ROOT / path, *(checks.ROOT / path).rglob("*")] for path in paths}
    tests = {path: {one for one in found[path] if one.match("test_*.py")} for path in paths}
    assert all(tests.values()), tests
    return set[Path]().union(*tests.values())


@pytest.mark.parametrize("asked", ["(kafka or spark)", "not kafka and not spark"])
def test_every_test_is_in_one_step(asked: str) -> None:
    steps = [step for queue in queues(fast=False, listeners=LISTENERS) for step in queue.steps]
    times = sum((files_of(step) for step in steps if asked in step.command), Counter[Path]())
    assert set(times.values()) == {1}
    left_out = files_below("tests") - times.keys()
    if asked == "(kafka or spark)":
        left_out -= files_below(checks.EACH_AWAY)  # a night's
    if asked == "not kafka and not spark":
        assert not left_out
    marked = re.compile(r"mark\.(kafka|spark)")
    assert not [path for path in left_out if marked.search(path.read_text())]
    # A fixture marks the tests that use it.
    fixtures = (checks.ROOT / "tests").rglob("conftest.py")
    folders = [path.parent for path in fixtures if marked.search(path.read_text())]
    assert folders
    assert not [path for path in left_out if {*folders} & {*path.parents}]


def test_fast_leaves_out_what_is_slow() -> None:
    steps = [step for queue in queues(fast=True, listeners=LISTENERS) for step in queue.steps]
    for step in steps:
        if step.name.startswith("pytest"):
            marks = step.command[len(step.command) - step.command[::-1].index("-m")]
            assert marks.endswith(" and not slow")


def test_no_node_takes_a_variable_of_the_tests_for_a_setting(tmp_path: Path) -> None:
    """One that looks like a setting keeps a node from starting."""
    flags = {"cluster_id": "c", "node_id": "n1", "data_dir": str(tmp_path)}
    kafka = {"kafka.bootstrap.servers": "127.0.0.1:1"}
    with pytest.MonkeyPatch.context() as patch:
        for variable in (BROKER_VARIABLE, JVM_VARIABLE, VERSION_VARIABLE):
            patch.setenv(variable, "x")
        assert load_config(flags={**flags, **kafka}).node_id == "n1"
