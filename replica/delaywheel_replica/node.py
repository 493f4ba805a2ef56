"""The supervisor of one node: starts server and cleaner, and ends only as a whole.

It uses the standard library alone: importing gRPC or numpy here would cost a third of a CPU
second and memory for nothing, and a process with threads must not fork.

==========================  ================================================================
what happens                what follows
==========================  ================================================================
the cleaner ends            it is restarted, later with each short life
the server ends             the cleaner is killed, both are restarted, as above
five starts in a row fail   everything ends, exit code 1: a start has failed if the child ended
                            within ten seconds, and before it was ready. Whatever ends one that was
                            ready does not count, or whoever can do that could end the node
exit code 78 of a child     everything ends, exit code 78: a restart would fail in the same way
a child cannot be started   as if it had ended at once: the machine may be short of something
the kernel kills a child    it is noted in ``<data>/node.oom``, and `delaywheel status` says it:
for want of memory          process/memory_kills.py
the data folder cannot be   exit code 78 if the setting is wrong (no permission, not a folder,
used                        or read-only); exit code 1 for any other cause: a later start may
                            succeed
everybody may use it        exit code 78: pending messages are in it
SIGTERM, SIGINT             the server gets SIGTERM and drains, the cleaner ends, the server ends
a second such signal        everything is killed
SIGHUP                      the settings are reread (reload.py), and those that can be are adopted;
                            like SIGTERM if it means that the node's terminal is gone
no end within 30 s          everything is killed, exit code 1
the supervisor is killed    the children see their life pipe end, and exit
the operator's page ends    it alone is started again (web/child.py)
any of these                the service manager is told, if one listens (process/service_manager.py)
==========================  ================================================================

``<data>/node.lock`` is held by the supervisor and, inherited, by its children: as long as one of
them lives, no other supervisor can start on the same folder. ``<data>/node.run`` names the running
processes, and where the server accepts calls.
"""

import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from delaywheel_replica.process.inheritance import (
    ADDRESS_VARIABLE,
    ALLOCATOR,
    CLEANER_ALLOCATOR,
    EXIT_HOPELESS,
    GRPC_SAYS,
    LIFE_FD_VARIABLE,
    LINK_FD_VARIABLE,
    READY_FD_VARIABLE,
    RESOLVED_VARIABLE,
    ROW_FD_VARIABLE,
    SETTINGS_FD_VARIABLE,
    SOURCES_VARIABLE,
    STDERR_FD_VARIABLE,
)
from delaywheel_replica.process.memory_kills import MemoryKills
from delaywheel_replica.process.open_files import is_open, open_to_all
from delaywheel_replica.process.plain_log import ChildOutput, PlainLog
from delaywheel_replica.process.service_manager import ServiceManager
from delaywheel_replica.reload import Reload
from delaywheel_replica.web.child import PAGE_COMMAND, PageChild

_LOCK_WAIT_S: Final = 10.0
_STOP_WAIT_S: Final = 30.0
_SHORT_LIFE_S: Final = 10.0
_FAILED_STARTS: Final = 5
_FIRST_BACKOFF_S: Final = 0.1
_BACKOFF_AT_MOST_S: Final = 1.6
_UMASK: Final = 0o027
"""Of all processes of the node: messages lie in its files as they were sent."""

# The data folder is not what the settings require: no restart changes that.
_WRONG_FOLDER: Final = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EEXIST),
        *(errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS, errno.EINVAL),
    }
)

# Packages that the extra `server` installs beyond those of the command.
_NEEDED: Final = ("aiohttp", "grpc_health", "grpc_reflection", "prometheus_client", "pyarrow")

_STOPPING: Final = frozenset({signal.SIGTERM, signal.SIGINT})

COMMANDS: Final[Mapping[str, Sequence[str]]] = {
    name: (sys.executable, "-P", "-m", f"delaywheel_replica.{name}.main")
    for name in ("server", "cleaner")
}


class NodeInUseError(Exception):
    """Another node's processes run on this data folder."""


def exec_node(resolved: str, file: Path | None, flags: Sequence[tuple[str, str]]) -> NoReturn:
    """Turns this process into the supervisor of a node, which rereads the file and the flags."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"error: NOT_INSTALLED: a node needs {', '.join(missing)}: install delaywheel[server]"
        )
    command = (sys.executable, "-P", "-m", "delaywheel_replica.node")
    sources = {"file": None if file is None else str(file.absolute()), "flags": list(flags)}
    variables = {RESOLVED_VARIABLE: resolved, SOURCES_VARIABLE: json.dumps(sources)}
    os.execve(sys.executable, command, {**os.environ, **variables})  # noqa: S606 - no shell is wanted


def main() -> int:
    """Runs a node until it is asked to stop; returns the process's exit code."""
    settings = _settings()
    log = PlainLog(settings)
    if not settings:
        log.say("cannot start", "error", error="start a node with `delaywheel serve`")
        return EXIT_HOPELESS
    data = Path(settings["data_dir"])
    try:
        os.umask(_UMASK)
        data.mkdir(mode=0o750, parents=True, exist_ok=True)
        if is_open(data):
            log.say("cannot start", "error", error=open_to_all(data), data_dir=data)
            return EXIT_HOPELESS
        page = None if settings.get("web_listen") is None else PAGE_COMMAND
        return Supervisor(data, page=page).run()
    except NodeInUseError as error:
        log.say("cannot start", "error", error=str(error), data_dir=data)
        return 1
    except OSError as error:
        no_folder = isinstance(error, FileExistsError | NotADirectoryError)
        why = "it is no folder" if no_folder else (error.strerror or str(error)).lower()
        path = error.filename if error.filename != str(data) else None
        is_wrong = error.errno in _WRONG_FOLDER
        advice = "correct data_dir, or let the node's user write there" if is_wrong else None
        log.say("cannot start", "error", error=why, path=path, data_dir=data, advice=advice)
        return EXIT_HOPELESS if is_wrong else 1


class _Ready:
    """The pipe through which a child reports that it is ready, the server with its address."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self._text = b""

    def read(self) -> list[str]:
        """Returns what was reported since the last call; waits for nothing."""
        if not select.select([self.read_fd], [], [], 0)[0]:
            return []
        *lines, self._text = (self._text + os.read(self.read_fd, 4096)).split(b"\n")
        return [line.decode() for line in lines]


@dataclass(slots=True)
class _Child:
    """One of the two processes, over all its restarts."""

    name: str
    link: socket.socket
    ready: _Ready = field(default_factory=_Ready)
    is_ready: bool = False
    process: subprocess.Popen[bytes] | None = None
    pidfd: int = -1
    started_at: float = 0.0
    # When the next life begins, while there is no process.
    start_at: float = 0.0
    short_lives: int = 0
    failed_starts: int = 0

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None


@dataclass(slots=True)
class _Stop:
    """How the node is stopped, and until when."""

    deadline: float
    exit_code: int = 0
    # Instead of being asked to end.
    killed: bool = False


class Supervisor:
    """Runs the processes of one node in the foreground."""

    def __init__(
        self,
        data: Path,
        commands: Mapping[str, Sequence[str]] = COMMANDS,
        page: Sequence[str] | None = None,
    ) -> None:
        self._data = data
        self._commands = commands
        server_link, cleaner_link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server = _Child("server", server_link)
        self._cleaner = _Child("cleaner", cleaner_link)
        self._children = (self._server, self._cleaner)
        self._row_fd = os.memfd_create("server.row")
        # The write end is never given away: it closes when this process ends.
        self._life_read, self._life_write = os.pipe()
        self._signals, self._signals_write = socket.socketpair()
        self._log = PlainLog(_settings())
        self._manager = ServiceManager(self._log)
        self._memory_kills = MemoryKills(data)
        self._outputs = {child.name: ChildOutput(child.name, self._log) for child in self._children}
        self._page: PageChild | None = None
        if page is not None:
            output = self._outputs["page"] = ChildOutput("page", self._log)
            self._page = PageChild(page, self._life_read, output.write_fd)
        self._stderr_fd = os.dup(sys.stderr.fileno())
        self._reload = Reload()
        self._had_terminal = _has_terminal()
        self._stop: _Stop | None = None
        # Where the server listens or last listened: it tries to use the same address again.
        self._address: str | None = None
        self._lock_fd = -1

    def run(self) -> int:
        """Starts the node; returns its exit code when it has ended. May raise NodeInUseError."""
        self._lock_fd = _locked(self._data / "node.lock")
        self._take_signals()
        try:
            while not self._is_over():
                self._start_due()
                self._manager.status(self._in_words())
                self._wait()
        finally:
            self._kill_all()
            for output in self._outputs.values():
                output.pass_on(ended=True)
            self._reload.close()
            with contextlib.suppress(OSError):  # readers check whether its pids live
                self._run_file.unlink(missing_ok=True)
        return self._stop.exit_code if self._stop else 1

    @property
    def _run_file(self) -> Path:
        return self._data / "node.run"

    def _is_over(self) -> bool:
        return self._stop is not None and all(child.process is None for child in self._children)

    def _in_words(self) -> str:
        """Returns what the node does, for whoever looks at the service."""
        if self._stop is not None:
            return "is being stopped"
        if self._server.process is None or not self._server.is_ready:
            return "the server starts: no calls are taken"
        if self._cleaner.process is None or not self._cleaner.is_ready:
            return f"takes calls at {self._address}; the cleaner starts"
        return f"takes calls at {self._address}"

    # --- starting

    def _start_due(self) -> None:
        """Starts processes that should run but do not."""
        if self._stop is not None:
            return
        now = time.monotonic()
        for child in self._children:
            if self._stop is None and child.process is None and child.start_at <= now:
                self._try_to_start(child)
        if self._page is not None and self._server.is_ready and self._address is not None:
            self._page.start_if_due(self._address)

    def _try_to_start(self, child: _Child) -> None:
        child.started_at = time.monotonic()
        try:
            self._start(child)
        except OSError as error:
            # Too few processes, memory or descriptors: that passes, or five tries end the node.
            self._log.say("process not started", child=child.name, error=error.strerror or error)
            self._start_later(child)

    def _start(self, child: _Child) -> None:
        inherited = {
            LINK_FD_VARIABLE: child.link.fileno(),
            LIFE_FD_VARIABLE: self._life_read,
            ROW_FD_VARIABLE: self._row_fd,
            SETTINGS_FD_VARIABLE: self._reload.settings_fd,
            STDERR_FD_VARIABLE: self._stderr_fd,
            READY_FD_VARIABLE: child.ready.write_fd,
        }
        child.is_ready = False
        environment = {
            **ALLOCATOR,
            **GRPC_SAYS,
            **({} if child is self._server else CLEANER_ALLOCATOR),
            **os.environ,
            **{name: str(descriptor) for name, descriptor in inherited.items()},
        }
        if self._address is not None:
            environment[ADDRESS_VARIABLE] = self._address
        # SIGHUP would end a child that does not handle it yet: it is blocked until the child does.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            process = subprocess.Popen(
                self._commands[child.name],
                env=environment,
                stdin=subprocess.DEVNULL,
                stderr=self._outputs[child.name].write_fd,
                # The descriptor of the lock is only held open, never used.
                pass_fds=(*inherited.values(), self._lock_fd),
                # Ctrl-C is handled by the supervisor, which ends its children in order.
                process_group=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        try:
            child.pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise
        child.process = process
        self._write_run_file()

    # --- waiting

    def _wait(self) -> None:
        running = {child.pidfd: child for child in self._children if child.process}
        ready = self._readable(running)
        for output in self._outputs.values():
            output.pass_on()
        for child in self._children:
            self._read_ready(child)
        # In the order of the children: when the server ends, the cleaner is killed.
        for pidfd, child in running.items():
            if pidfd in ready and child.process is not None:
                self._ended(child)
        if self._page is not None and self._page.pidfd in ready:
            self._log.say("page ended", **_worded(self._page.ended()))
        if self._reload.pidfd in ready:
            self._take_over()
        if self._signals.fileno() in ready:
            self._signalled()
        if self._stop is not None and time.monotonic() >= self._stop.deadline:
            self._kill("it did not stop in time", exit_code=1)

    def _readable(self, pidfds: Iterable[int]) -> list[int]:
        """Waits until something has come, or until there is something to do."""
        poll = select.poll()
        outputs = (output.read_fd for output in self._outputs.values())
        reports = (child.ready.read_fd for child in self._children)
        for waited in (self._signals.fileno(), *reports, *pidfds, *outputs):
            poll.register(waited, select.POLLIN)
        for pidfd in (self._reload.pidfd, -1 if self._page is None else self._page.pidfd):
            if pidfd >= 0:
                poll.register(pidfd, select.POLLIN)
        return [descriptor for descriptor, _ in poll.poll(self._timeout_ms())]

    def _timeout_ms(self) -> int | None:
        times = [output.due_s for output in self._outputs.values() if output.due_s is not None]
        if self._stop is not None:
            times.append(self._stop.deadline)
        else:
            times += [child.start_at for child in self._children if child.process is None]
            if self._page is not None and self._page.start_at_s and self._server.is_ready:
                times.append(self._page.start_at_s)
        if not times:
            return None
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1)

    def _read_ready(self, child: _Child) -> None:
        reported = child.ready.read()
        if not reported:
            return
        child.is_ready, child.failed_starts = True, 0
        if child is self._server:
            self._address = reported[-1]
            self._write_run_file()
            self._manager.ready()

    # --- ends

    def _ended(self, child: _Child) -> None:
        assert child.process is not None
        code = self._reap(child)
        if self._stop is not None:
            # A child that had no handler yet dies of the signal, which is as good.
            if code not in {0, -signal.SIGTERM} and not self._stop.killed:
                self._stop.exit_code = 1
            return
        self._outputs[child.name].pass_on(ended=True)
        lived_s = round(time.monotonic() - child.started_at, 1)
        said = {**_worded(code), "cause": self._cause_of(child, code), "lived_s": lived_s}
        self._log.say("process ended", child=child.name, **said)
        if code == EXIT_HOPELESS:
            why = "a restart would fail in the same way"
            self._log.say("node ends", "error", child=child.name, reason=why)
            self._give_up(EXIT_HOPELESS)
            return
        if child is self._server and self._cleaner.process is not None:
            self._cleaner.process.kill()
            self._reap(self._cleaner)
            self._cleaner.ready.read()  # of that life
            self._cleaner.start_at = 0.0
        self._start_later(child)
        self._write_run_file()

    def _cause_of(self, child: _Child, code: int) -> str | None:
        try:
            if not self._memory_kills.note(child.name, code, int(time.time() * 1000)):
                return None
        except OSError as error:
            self._log.say("file not current", path=error.filename, error=error.strerror or error)
        return "out of memory: give the node more, see docs/SIZING.md"

    def _start_later(self, child: _Child) -> None:
        now = time.monotonic()
        is_short = now - child.started_at < _SHORT_LIFE_S
        child.short_lives = child.short_lives + 1 if is_short else 1
        if not child.is_ready:
            child.failed_starts = child.failed_starts + 1 if is_short else 1
        if child.failed_starts >= _FAILED_STARTS:
            why = f"{_FAILED_STARTS} starts in a row failed"
            self._log.say("node ends", "error", child=child.name, reason=why)
            self._give_up(1)
            return
        # The first restart is immediate: most deaths have nothing to do with the start.
        doubled_s = _FIRST_BACKOFF_S * 2 ** min(child.short_lives - 2, 10)
        backoff_s = min(doubled_s, _BACKOFF_AT_MOST_S)
        child.start_at = now + (backoff_s if child.short_lives > 1 else 0)

    def _give_up(self, exit_code: int) -> None:
        self._manager.stopping()
        self._stop = _Stop(time.monotonic() + _STOP_WAIT_S, exit_code)
        self._kill("nothing is left half alive", exit_code=exit_code)

    def _reap(self, child: _Child) -> int:
        assert child.process is not None
        code = child.process.wait()
        os.close(child.pidfd)
        child.process, child.pidfd = None, -1
        return code

    # --- stopping

    def _take_signals(self) -> None:
        for end in (self._signals, self._signals_write):
            end.setblocking(False)  # noqa: FBT003 - the standard library's signature
        signal.set_wakeup_fd(self._signals_write.fileno(), warn_on_full_buffer=False)
        for number in (*_STOPPING, signal.SIGHUP):
            signal.signal(number, lambda *_: None)

    def _signalled(self) -> None:
        numbers = set(self._signals.recv(64))
        is_hangup = signal.SIGHUP in numbers
        if not numbers & _STOPPING and not (is_hangup and self._lost_terminal()):
            if is_hangup and self._stop is None:
                self._begin_reload()
            return
        if self._stop is not None:
            self._kill("a second signal", exit_code=1)
            return
        self._manager.stopping()
        self._stop = _Stop(time.monotonic() + _STOP_WAIT_S)
        # With these ends closed, the server notices on the link when the cleaner ends.
        for child in self._children:
            child.link.close()
        if self._server.process is not None:
            self._server.process.terminate()
        else:
            self._kill("there is no server to drain", exit_code=0)

    def _lost_terminal(self) -> bool:
        """Whether the node's terminal is gone, so that the node cannot be stopped from there."""
        return self._had_terminal and not _has_terminal()

    def _begin_reload(self) -> None:
        why_not = self._reload.begin()
        if why_not is None:
            self._manager.reloading()
        else:
            self._log.say("settings not reloaded", error=why_not)

    def _take_over(self) -> None:
        """Applies reloaded settings, as far as a running node can."""
        read = self._reload.end()
        if read.fault is not None:
            self._log.say("settings not reloaded", error=read.fault)
        else:
            level = "warning" if read.kept else "info"
            self._log.say(
                "settings reloaded", level, taken=read.taken, needs_restart=read.kept or None
            )
        if read.taken:
            self._log.set_level(_settings().get("log_level", "info"))
            for child in self._children:
                if child.process is not None:
                    child.process.send_signal(signal.SIGHUP)
        self._manager.ready()
        if self._reload.wanted_again():
            self._begin_reload()

    def _kill(self, why: str, *, exit_code: int) -> None:
        """Kills processes that still run; their ends are awaited as usual."""
        assert self._stop is not None
        if any(child.process for child in self._children):
            self._log.say("killing processes", reason=why)
        self._stop = _Stop(time.monotonic() + _STOP_WAIT_S, exit_code, killed=True)
        for child in self._children:
            if child.process is not None:
                child.process.kill()

    def _kill_all(self) -> None:
        if self._page is not None:
            self._page.kill()
        for child in self._children:
            if child.process is not None:
                child.process.kill()
                self._reap(child)

    def _write_run_file(self) -> None:
        content = {
            "pid": os.getpid(),
            "server_pid": self._server.pid,
            "cleaner_pid": self._cleaner.pid,
            "address": self._address if self._server.process and self._server.is_ready else None,
        }
        temporary = self._run_file.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(content) + "\n")
            temporary.replace(self._run_file)
        except OSError as error:
            # A full disk must not end the node: forwarding frees it.
            self._log.say("file not current", path=self._run_file, error=error.strerror or error)


def _locked(path: Path) -> int:
    """Takes the lock; children of a killed supervisor may need a moment to end."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        if time.monotonic() >= deadline:
            os.close(descriptor)
            raise NodeInUseError(f"{path.parent}: another node runs on this data folder")
        time.sleep(0.02)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _worded(code: int) -> dict[str, Any]:
    if code >= 0:
        return {"exit_code": code}
    names = {one.value: one.name for one in signal.Signals}  # most real-time signals have none
    return {"signal": names.get(-code, -code)}


def _settings() -> dict[str, Any]:
    """Returns the settings as they are now; empty if there are none."""
    found: dict[str, Any] = json.loads(os.environ.get(RESOLVED_VARIABLE, "{}"))
    return found


if __name__ == "__main__":
    sys.exit(main())
