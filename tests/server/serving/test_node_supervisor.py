"""The supervisor with children that do only what the test says."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from delaywheel_replica.node import NodeInUseError, Supervisor, main
from delaywheel_replica.process import memory_kills
from delaywheel_replica.process.inheritance import (
    RESOLVED_VARIABLE,
    SOURCES_VARIABLE,
    STDERR_FD_VARIABLE,
)
from delaywheel_replica.process.memory_kills import last_kill
from delaywheel_replica.process.plain_log import ChildOutput, PlainLog
from support.services.waiting import wait_until

# Each child notes its pid, lives as the file <name>.does says, and ends with the supervisor; that
# it was asked to end it notes in <name>.asked. It loads nothing that it can do without: some two
# hundred of them are started.
CHILD = """
import os, signal, sys, time
from pathlib import Path
from delaywheel_replica.process.inheritance import exit_with_supervisor, report_ready

name, folder = sys.argv[1], Path(sys.argv[2])
with (folder / f"{name}.lives").open("a") as lives:
    lives.write(f"{os.getpid()} {os.environ.get('DELAYWHEEL_ADDRESS')}\\n")
does = (folder / f"{name}.does").read_text()
if does != "outlive":
    exit_with_supervisor()
link = int(os.environ["DELAYWHEEL_LINK_FD"])
os.set_blocking(link, False)
if does.startswith("exit"):
    sys.exit(int(does.split()[1]))
asked = []
def ask(*_):
    asked.append(True)
    (folder / f"{name}.asked").touch()
signal.signal(signal.SIGTERM, ask)
if name == "server":
    report_ready(f"127.0.0.1:{1000 + len((folder / 'server.lives').read_text().splitlines())}")
else:
    report_ready()
while True:
    time.sleep(0.01)
    if does == "fail once ready":
        os.abort()
    if does != "obey":
        continue
    if name == "cleaner" and (folder / "drained").exists():
        sys.exit(0)
    if asked:
        (folder / "drained").touch()
        try:
            if not os.read(link, 1 << 16):
                sys.exit(0)  # its cleaner has ended, and so has all that it could receive
        except BlockingIOError:
            pass
"""
# The first processes cannot be started.
SHORT = """
import errno, os
from delaywheel_replica import node
start, left = node.subprocess.Popen, [None] * 3
def short(*arguments, **options):
    if left:
        left.pop()
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return start(*arguments, **options)
node.subprocess.Popen = short
"""
# On a busy machine a start may take longer than a short life, and a stop than a second node waits.
SUPERVISOR = """
import json, sys
from pathlib import Path
from delaywheel_replica import node
node._SHORT_LIFE_S = node._LOCK_WAIT_S = 600
sys.exit(node.Supervisor(Path(sys.argv[1]), json.loads(sys.argv[2])).run())
"""


class Node:
    """A supervisor in a separate process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes]
        for name in ("server", "cleaner"):
            self.report(name, "obey")

    def report(self, name: str, does: str) -> None:
        # Whole, whoever reads it meanwhile: a child that starts, of another node of this folder.
        beside = self.folder / f"{name}.next"
        beside.write_text(does)
        beside.replace(self.folder / f"{name}.does")

    def start(self, before: str = "") -> None:
        commands = {
            name: [sys.executable, "-c", CHILD, name, str(self.folder)]
            for name in ("server", "cleaner")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", before + SUPERVISOR, str(self.folder), json.dumps(commands)]
        )

    def run_file(self) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads((self.folder / "node.run").read_text())
        except FileNotFoundError:
            return {}
        return content

    def up(self) -> dict[str, Any]:
        def all_run() -> dict[str, Any] | None:
            content = self.run_file()
            lives = [self.lives("server")[-1:], self.lives("cleaner")[-1:]]
            named = [content.get("server_pid"), content.get("cleaner_pid")]
            runs = content.get("address") and [[pid] for pid in named] == lives
            return content if runs else None

        return wait_until("both children run", all_run)

    def lives(self, name: str) -> list[int]:
        try:
            lines = (self.folder / f"{name}.lives").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [int(line.split()[0]) for line in lines]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """`main` sets that of this process; here none is set before."""
    earlier = os.umask(0)
    yield
    os.umask(earlier)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.process.kill()
    node.process.wait()
    for pid in node.lives("server") + node.lives("cleaner"):
        with suppress(ProcessLookupError):  # only one that a failed test asked to outlive is there
            os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second, when it ends while it is read
        return False


def test_a_disk_that_refuses_the_run_file_does_not_end_the_node(node: Node) -> None:
    node.start()
    first = node.up()
    (node.folder / "node.tmp").mkdir()  # where the file is written before it takes its place
    os.kill(first["cleaner_pid"], signal.SIGKILL)
    wait_until("its next life", lambda: len(node.lives("cleaner")) == 2)
    assert node.process.poll() is None
    (node.folder / "node.tmp").rmdir()
    assert node.end() == 0


def test_it_names_the_processes_and_their_address(node: Node) -> None:
    node.start()
    run = node.up()
    assert run["pid"] == node.process.pid
    assert run["address"] == "127.0.0.1:1001"
    assert is_alive(run["server_pid"])
    assert is_alive(run["cleaner_pid"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly(node: Node, number: signal.Signals) -> None:
    node.start()
    run = node.up()
    assert node.end(number) == 0
    assert (node.folder / "drained").exists()
    assert not is_alive(run["server_pid"])
    assert not is_alive(run["cleaner_pid"])
    assert not (node.folder / "node.run").exists()


def test_a_hangup_ends_nobody(node: Node) -> None:
    node.start()
    before = node.up()
    for _ in range(3):
        node.process.send_signal(signal.SIGHUP)
    os.kill(before["cleaner_pid"], signal.SIGKILL)
    wait_until("a new cleaner", lambda: len(node.lives("cleaner")) == 2)
    assert node.up()["server_pid"] == before["server_pid"]
    assert node.end() == 0


def test_a_node_whose_terminal_is_gone_ends(node: Node) -> None:
    node.start(
        "from delaywheel_replica import node\n"
        "there = [True]\n"
        "node._has_terminal = lambda: bool(there and there.pop())\n"
    )
    node.up()
    assert node.end(signal.SIGHUP) == 0
    assert (node.folder / "drained").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGRTMIN + 1])
def test_a_dead_cleaner_is_started_again_alone(node: Node, number: int) -> None:
    """Whatever ended it: most real-time signals have no name."""
    node.start()
    before = node.up()
    os.kill(before["cleaner_pid"], number)
    wait_until("a new cleaner", lambda: len(node.lives("cleaner")) == 2)
    after = node.up()
    assert after["server_pid"] == before["server_pid"]
    assert after["cleaner_pid"] != before["cleaner_pid"]


GROUP = """
from pathlib import Path
from delaywheel_replica.process import memory_kills
memory_kills.GROUPS = Path({group!r})
memory_kills._OF_PROCESS = Path({group!r}) / "cgroup"
"""


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/node.service", "node.service/memory.events"),
        ("0::/outside/its/container", "memory.events"),
        ("4:memory:/docker/1\n0::/", "memory/docker/1/memory.oom_control"),
    ],
)
def test_a_kill_for_want_of_memory_is_counted_in_any_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, file: str
) -> None:
    monkeypatch.setattr(memory_kills, "GROUPS", tmp_path)
    monkeypatch.setattr(memory_kills, "_OF_PROCESS", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text(f"1:cpu:/a\n{line}\n")
    count = tmp_path / file
    count.parent.mkdir(parents=True, exist_ok=True)
    count.write_text("oom 4\noom_kill 3\n")
    kills = memory_kills.MemoryKills(tmp_path)
    assert not kills.note("server", -signal.SIGKILL, 1)
    count.write_text("oom 5\noom_kill 4\n")
    assert kills.note("server", -signal.SIGKILL, 2)
    count.write_text("oom 5\noom_kill 5\n")
    assert not kills.note("server", -signal.SIGTERM, 3)
    assert last_kill(tmp_path) == ("server", 2)


def test_who_is_killed_for_want_of_memory_is_told_from_others(
    node: Node, tmp_path_factory: pytest.TempPathFactory
) -> None:
    group = tmp_path_factory.mktemp("group")
    count = group / "memory.events"
    count.write_text("oom_kill 3\n")
    (group / "cgroup").write_text("0::/\n")
    node.start(GROUP.format(group=str(group)))
    before = node.up()
    os.kill(before["cleaner_pid"], signal.SIGKILL)
    wait_until("a new cleaner", lambda: len(node.lives("cleaner")) == 2)
    node.up()
    assert last_kill(node.folder) is None
    count.write_text("oom_kill 4\n")
    began_ms = int(time.time() * 1000)
    os.kill(before["server_pid"], signal.SIGKILL)
    wait_until("a new server", lambda: len(node.lives("server")) == 2)
    node.up()
    kill = last_kill(node.folder)
    assert kill is not None
    assert kill.process == "server"
    assert began_ms <= kill.at_ms <= time.time() * 1000


def test_with_a_dead_server_both_are_started_again(node: Node) -> None:
    node.start()
    before = node.up()
    os.kill(before["server_pid"], signal.SIGKILL)
    wait_until("a new server", lambda: len(node.lives("server")) == 2)
    after = node.up()
    assert not is_alive(before["cleaner_pid"])
    assert after["cleaner_pid"] != before["cleaner_pid"]
    assert after["address"] == "127.0.0.1:1002"
    # The new one knew where the old one had listened.
    assert (node.folder / "server.lives").read_text().splitlines()[1].endswith("127.0.0.1:1001")


@pytest.mark.parametrize("name", ["server", "cleaner"])
def test_what_does_not_live_ends_the_node(node: Node, name: str) -> None:
    node.report(name, "exit 3")
    node.start()
    assert node.process.wait(60) == 1
    assert len(node.lives(name)) == 5
    assert not any(is_alive(pid) for each in ("server", "cleaner") for pid in node.lives(each))


@pytest.mark.parametrize("name", ["server", "cleaner"])
def test_whatever_ends_a_process_that_was_ready_does_not_end_the_node(
    node: Node, name: str
) -> None:
    node.report(name, "fail once ready")
    node.start()
    wait_until("more lives than failed starts may be", lambda: len(node.lives(name)) > 5)
    assert node.process.poll() is None
    node.report(name, "obey")
    lives = len(node.lives(name))
    wait_until("one that obeys", lambda: len(node.lives(name)) > lives)
    node.up()
    assert node.end() == 0


def test_what_is_hopeless_is_not_tried_again(node: Node) -> None:
    node.report("server", "exit 78")
    node.start()
    assert node.process.wait(60) == 78
    assert len(node.lives("server")) == 1
    assert not any(is_alive(pid) for pid in node.lives("cleaner"))


def test_killing_the_supervisor_leaves_no_orphans(node: Node) -> None:
    node.start()
    run = node.up()
    assert node.end(signal.SIGKILL) == -signal.SIGKILL
    wait_until("the children ended", lambda: not is_alive(run["server_pid"]))
    wait_until("the children ended", lambda: not is_alive(run["cleaner_pid"]))


def test_what_outlives_its_supervisor_keeps_others_away(node: Node, tmp_path: Path) -> None:
    node.report("cleaner", "outlive")
    node.start()
    run = node.up()
    node.end(signal.SIGKILL)
    wait_until("the server ended", lambda: not is_alive(run["server_pid"]))
    rival = Node(tmp_path)  # its own cleaner obeys
    rival.start()
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            rival.process.wait(1)
        assert len(node.lives("server")) == 1
        os.kill(run["cleaner_pid"], signal.SIGKILL)
        wait_until("the second one's turn", lambda: len(node.lives("server")) == 2)
    finally:
        rival.process.kill()
        rival.process.wait()


def test_a_second_signal_kills(node: Node) -> None:
    node.report("server", "ignore")
    node.report("cleaner", "ignore")
    node.start()
    run = node.up()
    node.process.send_signal(signal.SIGTERM)
    wait_until("the first is heard", (node.folder / "server.asked").exists)  # two at once are one
    assert is_alive(run["server_pid"])
    assert node.end() == 1
    assert not is_alive(run["server_pid"])
    assert not is_alive(run["cleaner_pid"])


@pytest.fixture(params=["a path", "an abstract name"])
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    """The service manager's end of its socket."""
    name = str(tmp_path / "notify")
    if request.param == "an abstract name":
        name = f"@{name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(name.replace("@", "\0"))
        heard.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        yield heard


def heard_until(manager: socket.socket, last: str) -> list[str]:
    told: list[str] = []
    while not told or told[-1] != last:
        told += manager.recv(4096).decode().splitlines()
    return told


def test_the_service_manager_is_told(
    node: Node, manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SOURCES_VARIABLE, '{"file": "/not/there.toml", "flags": []}')
    node.start()
    told = heard_until(manager, "STATUS=takes calls at 127.0.0.1:1001")
    assert told[0] == "STATUS=the server starts: no calls are taken"
    assert "READY=1" in told
    # What is wrong with the settings is logged; the reload is over all the same.
    node.process.send_signal(signal.SIGHUP)
    reloading, since, ready = heard_until(manager, "READY=1")
    assert reloading == "RELOADING=1"
    assert since.startswith("MONOTONIC_USEC=")
    assert ready == "READY=1"
    os.kill(node.up()["cleaner_pid"], signal.SIGKILL)
    again = heard_until(manager, "STATUS=takes calls at 127.0.0.1:1001")
    assert "STATUS=takes calls at 127.0.0.1:1001; the cleaner starts" in again
    assert node.end() == 0
    assert heard_until(manager, "STATUS=is being stopped")[0] == "STOPPING=1"


@pytest.mark.parametrize("address", ["/not/there", "vsock:2:1234", "x" * 200, "@"])
def test_a_service_manager_that_does_not_hear_is_no_trouble(
    node: Node, address: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    node.start()
    node.up()
    assert node.end() == 0
    assert capfd.readouterr().err.count("service manager not told") == 1


def test_a_service_manager_that_was_busy_is_told_what_comes_later(
    node: Node, manager: socket.socket, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, suppress(BlockingIOError):
        while True:
            other.sendto(b"full", socket.MSG_DONTWAIT, manager.getsockname())
    node.start()
    node.up()
    manager.setblocking(False)  # noqa: FBT003 - the standard library's signature
    with suppress(BlockingIOError):
        while True:
            manager.recv(4096)
    manager.settimeout(60)
    assert node.end() == 0
    assert "STOPPING=1" in heard_until(manager, "STATUS=is being stopped")
    assert capfd.readouterr().err.count("service manager not told") == 1


def test_a_folder_has_one_node(node: Node, tmp_path: Path) -> None:
    node.start()
    first = node.up()
    rival = Node(tmp_path)
    rival.start()
    try:
        # As long as any process of the first node lives, the second one waits, and gives up.
        with pytest.raises(subprocess.TimeoutExpired):
            rival.process.wait(1)
        assert node.lives("server") == [first["server_pid"]]
        assert node.end() == 0
        (node.folder / "drained").unlink()  # or the second one's cleaner would not stay
        wait_until("the second one's turn", lambda: len(node.lives("server")) == 2)
        rival.up()
        assert rival.end() == 0
    finally:
        rival.process.kill()
        rival.process.wait()


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_the_supervisor_speaks_in_the_format_of_the_node(
    log_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"log_format": log_format, "node_id": "n1", "cluster_id": "shop"}
    log = PlainLog({**settings, "log_level": "warning"})
    log.say("settings reloaded", "info", taken=[])
    log.say("process ended", child="cleaner", signal=None, exit_code=1)
    line = capsys.readouterr().err
    if log_format == "json":
        reported = json.loads(line)
        assert reported.pop("timestamp").endswith("Z")
        assert reported == {
            "event": "process ended",
            "level": "warning",
            "process": "node",
            "node": "n1",
            "cluster": "shop",
            "child": "cleaner",
            "exit_code": 1,
        }
    else:
        _, _, said = line.partition(" ")
        assert said.split() == [
            *("[warning", "]", "process", "ended", "child=cleaner", "exit_code=1", "process=node"),
        ]


ABSEIL = "E0000 00:00:1795658418.460123   32518 chttp2_server.cc:1053] no such port\n"
TRACEBACK = "Traceback (most recent call last):\n  File x, line 1\nValueError: no\n"


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_what_libraries_write_to_standard_error_is_in_the_log(
    log_format: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"log_format": log_format, "node_id": "n1", "cluster_id": "shop"}
    output = ChildOutput("server", PlainLog(settings))
    written = [f"{ABSEIL}plain\n", f"{TRACEBACK}its la", "st words"]
    for text in written:
        os.write(output.write_fd, text.encode())
        output.pass_on()
    output.pass_on(ended=True)
    said = capfd.readouterr().err
    if log_format == "console":
        assert said == "".join(written) + "\n"
        return
    events = [json.loads(line) for line in said.splitlines()]
    assert {(e["event"], e["process"], e["node"]) for e in events} == {
        ("standard error", "server", "n1")
    }
    grpc = ("warning", "no such port", "chttp2_server.cc:1053")
    assert [(e["level"], e["text"], e.get("source")) for e in events] == [
        grpc,
        ("warning", "plain", None),
        ("error", TRACEBACK.rstrip(), None),
        ("warning", "its last words", None),
    ]


def test_a_line_of_a_childs_log_names_its_node_and_cluster() -> None:
    program = """
from delaywheel_replica.process.logs import get_logger, set_up_logging
set_up_logging("server", node="n1", cluster="shop", log_format="json", level="info")
get_logger("x").info("serving")
import logging; logging.getLogger("library").warning("said")
print("not in it", file=__import__("sys").stderr)
"""
    read_fd, write_fd = os.pipe()
    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, STDERR_FD_VARIABLE: str(write_fd)},
        pass_fds=[write_fd],
        stderr=subprocess.DEVNULL,
        check=True,
    )
    os.close(write_fd)
    with os.fdopen(read_fd) as lines:
        events = [json.loads(line) for line in lines]
    assert [e["event"] for e in events] == ["serving", "said"]
    assert {(e["process"], e["node"], e["cluster"]) for e in events} == {("server", "n1", "shop")}


def test_a_child_that_cannot_start_says_why_in_the_log(tmp_path: Path) -> None:
    settings = {"log_format": "json", "node_id": "n1", "cluster_id": "shop"}
    commands = {
        "server": [sys.executable, "-c", "import no_such_module"],
        "cleaner": [sys.executable, "-c", "import time; time.sleep(60)"],
    }
    ended = subprocess.run(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path), json.dumps(commands)],
        env={**os.environ, RESOLVED_VARIABLE: json.dumps(settings)},
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    events = [json.loads(line) for line in ended.stderr.splitlines()]
    assert ended.returncode == 1
    texts = [e["text"] for e in events if e["event"] == "standard error"]
    assert len(texts) == 5
    assert all("no_such_module" in text for text in texts)
    last = [e for e in events if e["event"] == "node ends"]
    assert [(e["level"], e["child"]) for e in last] == [("error", "server")]


def test_a_machine_that_is_short_of_something_is_tried_again(node: Node) -> None:
    node.start(SHORT)
    node.up()
    assert node.end() == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "full"), 1),
        (OSError(errno.EMFILE, "too many"), 1),
        (OSError(errno.EIO, "error"), 1),
        (NodeInUseError("another node runs"), 1),
        (PermissionError(errno.EACCES, "not yours"), 78),
        (NotADirectoryError(errno.ENOTDIR, "a file"), 78),
    ],
)
def test_only_a_wrong_setting_is_not_worth_a_restart(
    error: Exception, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: Supervisor) -> int:
        raise error

    monkeypatch.setenv(RESOLVED_VARIABLE, json.dumps({"data_dir": str(tmp_path)}))
    monkeypatch.setattr(Supervisor, "run", run)
    assert main() == code


def test_a_file_in_place_of_the_folder_is_called_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for data in (tmp_path / "file", tmp_path / "file" / "below"):
        (tmp_path / "file").touch()
        monkeypatch.setenv(RESOLVED_VARIABLE, json.dumps({"data_dir": str(data)}))
        assert main() == 78
        assert "it is no folder" in capfd.readouterr().err


def test_a_folder_that_everybody_may_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Pending messages lie in it as they were sent."""
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o751)
    monkeypatch.setenv(RESOLVED_VARIABLE, json.dumps({"data_dir": str(data)}))
    assert main() == 78
    assert f"everybody may use it: chmod o= {data}" in capfd.readouterr().err


def test_nobody_else_may_use_what_a_node_writes(tmp_path: Path) -> None:
    """Its own folder, and what any of its processes makes, whatever the shell's umask is."""
    node = """
import subprocess, sys
from delaywheel_replica.node import Supervisor, main
made = "from pathlib import Path; Path('file').touch(); Path('folder').mkdir()"
Supervisor.run = lambda _: subprocess.run([sys.executable, "-c", made], cwd="data").returncode
sys.exit(main())
"""
    data = tmp_path / "data"
    variables = {**os.environ, RESOLVED_VARIABLE: json.dumps({"data_dir": "data"})}
    subprocess.run([sys.executable, "-c", node], cwd=tmp_path, env=variables, check=True)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (data, *data.iterdir())}
    assert modes == {"data": 0o750, "file": 0o640, "folder": 0o750}
