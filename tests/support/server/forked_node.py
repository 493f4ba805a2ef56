"""Whole nodes by fork: supervisor, server and cleaner, of a process that has loaded all of them.

`delaywheel serve` runs as always, up to where it becomes the supervisor by exec; and the supervisor
runs as always, but for how it starts its two children. Each is a process with its own memory,
signals, descriptors and exit code, as it would be by exec.

`scripts/cluster` runs as always, too, but for how it starts nodes. Since it calls them, it has
gRPC's threads, and must not fork: another process does so for it, which ends with it.

Consumers that are killed each second are forked from the same process.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import delaywheel_replica.cleaner.main
import delaywheel_replica.cli.doing.serve
import delaywheel_replica.server.main  # noqa: F401 - the cleaner's and the server's modules
from delaywheel_replica import node
from delaywheel_replica.cli.app import main
from delaywheel_replica.process.garbage import exit_at_once
from local.loopback import cluster
from support.consumer.plan import Plan
from support.server import forked

_PARENT_DEATH_SIGNAL = 1
_libc = ctypes.CDLL(None)
gc.collect()
gc.freeze()  # all is shared with the processes that are forked: a collection would write to it


def run_node(arguments: Sequence[str]) -> int:
    """Runs `delaywheel` with these arguments, in a session of its own; returns the exit code."""
    os.setsid()
    _end_with_parent()
    with patch.object(os, "execve", _become_supervisor):
        try:
            main(arguments)
        except SystemExit as ended:
            if isinstance(ended.code, int):
                return ended.code
            print(ended.code, file=sys.stderr)  # noqa: T201 - as Python does
    return 1


def run_cluster(arguments: Sequence[str]) -> int:
    """Runs `scripts/cluster` with these arguments; returns the exit code."""
    _end_with_parent()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        forked.main(theirs.detach())
    theirs.close()
    forked.ask_for_nodes_at(ours)
    with patch("local.loopback.node.start_child", forked.fork_node):
        return cluster.main(arguments)


def run_consumer(arguments: Sequence[str]) -> int:
    """Consumes by a plan until it is asked to stop."""
    _end_with_parent()
    plan, instance = arguments
    Plan(**json.loads(plan)).consume(instance)
    return 0


PROGRAMS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "node": run_node,
    "cluster": run_cluster,
    "consumer": run_consumer,
}


def _end_with_parent() -> None:
    _libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _become_supervisor(_file: str, _command: Sequence[str], environment: Mapping[str, str]) -> None:
    forked.set_environment(environment)
    starting = SimpleNamespace(Popen=_Child, DEVNULL=None)
    with patch.object(node, "subprocess", starting):
        code = node.main()
    exit_at_once(code)


class _Child:
    """A child of the supervisor, for which it is one of `subprocess`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stderr: int,
        pass_fds: Sequence[int],
        **_always_so: Any,
    ) -> None:
        # Until the child has handlers of its own, those are the supervisor's, which would be told.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        self.pid = os.fork()
        if not self.pid:
            _become(command[-1], env, stderr, pass_fds)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def wait(self) -> int:
        """Waits for the end, and returns the exit code; called once."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def send_signal(self, number: int) -> None:
        """Sends a signal; the process may have ended, but nobody has waited for it yet."""
        os.kill(self.pid, number)

    def terminate(self) -> None:
        """Asks it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it."""
        self.send_signal(signal.SIGKILL)


def _become(
    module: str, environment: Mapping[str, str], stderr: int, kept: Sequence[int]
) -> NoReturn:
    """Runs a module's `main` as the program of this process, which is the supervisor's copy."""
    code = 1
    try:
        os.setpgid(0, 0)
        forked.forget_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stderr, 2)
        _close_all_but(kept)
        forked.set_environment(environment)
        code = importlib.import_module(module).main()
    except BaseException:  # noqa: BLE001 - nothing is above it
        traceback.print_exc()
    exit_at_once(code)


def _close_all_but(kept: Sequence[int]) -> None:
    """Closes descriptors above 2, whose objects live on in frames that are never left."""
    begin = 3
    for number in sorted(kept):
        os.closerange(begin, number)
        begin = number + 1
    os.closerange(begin, os.sysconf("SC_OPEN_MAX"))
