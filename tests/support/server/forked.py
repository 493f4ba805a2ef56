"""Servers and nodes forked from a process that has loaded all modules, and has done nothing else.

To load them is nearly all that a server computes to start, 0.72 of 0.75 CPU s, and 1.5 of 1.6 for
a whole node. What is different about a start by exec, the tests of scripts/demo and scripts/chaos
show.

A start is one message to that process: what to run, the environment, and descriptors for standard
output and error, for the exit code, and for all that the process inherits.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from delaywheel_replica.process.garbage import exit_at_once
from delaywheel_replica.process.inheritance import ALLOCATOR
from local.loopback.child import start_child

_TESTS = Path(__file__).parents[2]
_NODE = ("-m", "delaywheel_replica.cli.app", "serve")
_MOST_BYTES = 1 << 17
_MOST_DESCRIPTORS = 16
_OUTPUTS = 3
"""Standard output, standard error, and where the exit code goes."""


class Forked:
    """A process; for its user like one of `subprocess`.

    Attributes:
        pid: Its id.
        returncode: What it ended with, once `poll` or `wait` has seen that; minus a signal's
            number.
    """

    def __init__(self, pid: int, status: int) -> None:
        """Takes over the descriptor from which the exit code will be read."""
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end, and returns the exit code.

        Raises:
            TimeoutExpired: It runs on.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("server", timeout or 0)
            self.returncode = int(os.read(self._status, 16))
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # has ended; its exit code is under way
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it."""
        self.send_signal(signal.SIGKILL)


class _Parent:
    """The process that has loaded all; started by the first who needs it, ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.control: socket.socket | None = None

    def fork(
        self,
        environment: Mapping[str, str],
        inherited: Mapping[str, int],
        *,
        output: int | None = None,
        program: str = "server",
        arguments: Sequence[str] = (),
    ) -> Forked:
        read, write = os.pipe()
        asked = {
            "environment": dict(environment),
            "inherited": list(inherited),
            "program": program,
            "arguments": list(arguments),
        }
        outputs = (1, 2) if output is None else (output, output)
        with self._lock:
            if self.control is None:
                self.control = _started()
            descriptors = [*outputs, write, *inherited.values()]
            socket.send_fds(self.control, [json.dumps(asked).encode()], descriptors)
            pid = int(self.control.recv(16))
        os.close(write)
        return Forked(pid, read)


_parent = _Parent()


def fork_server(environment: Mapping[str, str], inherited: Mapping[str, int]) -> Forked:
    """Starts a server.

    Args:
        environment: All of its variables.
        inherited: Name of a variable -> the descriptor whose number it gets.
    """
    return _parent.fork(environment, inherited)


def fork_node(
    command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
) -> Forked | subprocess.Popen[bytes]:
    """Starts a node in place of `local.loopback.child.start_child`: its arguments are the same.

    It is killed with this process. What is no node is started as there.
    """
    if tuple(command[1:4]) != _NODE:
        return start_child(command, log=log, environment=environment)
    with log.open("ab") as out:
        return _parent.fork(
            {**os.environ, **(environment or {})},
            {},
            output=out.fileno(),
            program="node",
            arguments=command[3:],
        )


def fork_program(name: str, arguments: Sequence[str], *, log: Path) -> Forked:
    """Starts one of `forked_node.PROGRAMS`, which ends with this process."""
    with log.open("ab") as out:
        return _parent.fork(os.environ, {}, output=out.fileno(), program=name, arguments=arguments)


def ask_for_nodes_at(control: socket.socket) -> None:
    """Has nodes forked by the process at the other end, which runs `main`."""
    _parent.control = control


def _started() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = f"import sys; sys.path.append({str(_TESTS)!r});"
    program += f"from support.server.forked import main; main({theirs.fileno()})"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            env={**ALLOCATOR, **os.environ},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def main(descriptor: int) -> NoReturn:
    """Forks a process for each message, and reports their ends, until the tests have ended."""
    import delaywheel_replica.server.main  # noqa: F401, PLC0415 - the test needs none of it

    running: dict[int, int] = {}
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    while True:
        ready, _, _ = select.select([descriptor, woken], [], [])
        if woken in ready:
            os.read(woken, 512)
            _report(running)
        if descriptor not in ready:
            continue
        content, descriptors, _, _ = socket.recv_fds(control, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not content:
            exit_at_once(0)
        asked = json.loads(content)
        if asked["program"] != "server":
            import support.server.forked_node  # noqa: F401, PLC0415 - only nodes need it
        pid = os.fork()
        if not pid:
            for each in (descriptor, woken, waker, *running.values()):
                os.close(each)
            control.detach()
            _serve(asked, descriptors)
        for each in (*descriptors[: _OUTPUTS - 1], *descriptors[_OUTPUTS:]):
            os.close(each)
        running[pid] = descriptors[_OUTPUTS - 1]
        control.send(str(pid).encode())


def _report(running: dict[int, int]) -> None:
    """Tells the exit codes of those that have ended."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            reader = running.pop(pid)
            with suppress(BrokenPipeError):  # nobody asks any more
                os.write(reader, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(reader)


def _serve(asked: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    code = 1
    try:
        forget_signals()
        for number, given in enumerate(descriptors[: _OUTPUTS - 1], start=1):
            os.dup2(given, number)
        for given in descriptors[:_OUTPUTS]:
            os.close(given)
        numbers = map(str, descriptors[_OUTPUTS:])
        set_environment(asked["environment"] | dict(zip(asked["inherited"], numbers, strict=True)))
        code = _program(asked["program"], asked["arguments"])()
    except BaseException:  # noqa: BLE001 - this process is the server's: nothing is above it
        traceback.print_exc()
    exit_at_once(code)


def _program(name: str, arguments: Sequence[str]) -> Callable[[], int]:
    """What to run, which is loaded."""
    if name == "server":
        from delaywheel_replica.server.main import main as serve  # noqa: PLC0415 - tests need it not

        return serve
    from support.server.forked_node import PROGRAMS  # noqa: PLC0415 - servers need none of it

    return partial(PROGRAMS[name], arguments)


def forget_signals() -> None:
    """Handles signals as a program does that has just begun."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def set_environment(environment: Mapping[str, str]) -> None:
    """Replaces all variables."""
    os.environ.clear()
    os.environ.update(environment)
