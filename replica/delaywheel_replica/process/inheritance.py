"""What a node's processes inherit from their supervisor.

File descriptors by number, and texts, in environment variables. The supervisor uses only the
standard library, so that it costs next to nothing and has little to fail: this module must not
import anything else either.
"""

import json
import os
import signal
import sys
import threading
from typing import Any, Final, TextIO

RESOLVED_VARIABLE: Final = "DELAYWHEEL_RESOLVED"
"""The node's checked configuration as JSON."""

SOURCES_VARIABLE: Final = "DELAYWHEEL_SOURCES"
"""The file and flags from which that configuration was read, as JSON, to read it again."""

SETTINGS_FD_VARIABLE: Final = "DELAYWHEEL_SETTINGS_FD"
"""A file in memory with the settings last reloaded, as JSON; SIGHUP announces a change."""

LINK_FD_VARIABLE: Final = "DELAYWHEEL_LINK_FD"
"""One end of the pair of sockets between server and cleaner."""

LIFE_FD_VARIABLE: Final = "DELAYWHEEL_LIFE_FD"
"""A pipe that is never written to: its end shows that the supervisor is gone."""

ROW_FD_VARIABLE: Final = "DELAYWHEEL_ROW_FD"
"""A file in memory with the server's status for the cleaner, readable even if the disk hangs."""

STDERR_FD_VARIABLE: Final = "DELAYWHEEL_STDERR_FD"
"""The node's standard error, for a child's log: its own is a pipe of the supervisor's."""

READY_FD_VARIABLE: Final = "DELAYWHEEL_READY_FD"
"""A pipe to the supervisor: a child writes a line there once it does its work."""

ADDRESS_VARIABLE: Final = "DELAYWHEEL_ADDRESS"
"""Where the server listened before its restart: it tries to use the same port again."""

ALLOCATOR: Final = {"MALLOC_ARENA_MAX": "2", "ARROW_DEFAULT_MEMORY_POOL": "system"}
"""Settings of glibc and Arrow, in the environment of the children.

glibc's arenas cause fragmentation: two are enough for processes with one busy thread. And what
Arrow frees goes to glibc, not into a reserve of its own: 11 to 15 MiB of a server's 85.
"""

GRPC_SAYS: Final = {"GRPC_VERBOSITY": "ERROR"}
"""Of the rest, some lines quote what the other side sent, line feeds and all."""

CLEANER_ALLOCATOR: Final = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""The same for the cleaner alone: the columns of seconds go back to the kernel when they are freed.

Otherwise glibc raises the threshold with each one that is freed, and the next ones leave holes in
its heap: 91 MiB after seven minutes, and growing, in place of 65.
"""

EXIT_HOPELESS: Final = 78
"""Exit code of a child that would fail in the same way if it were restarted (EX_CONFIG)."""

EXIT_ORPHANED: Final = 111
"""Exit code of a child whose supervisor is gone; only of use when tracing processes."""


def exit_with_supervisor() -> None:
    """Ends this process as soon as its supervisor ends, however that happens.

    A thread sleeps in the kernel: it works even while the main thread is stuck. What is written
    stays written, so there is nothing to clean up first.
    """
    descriptor = int(os.environ[LIFE_FD_VARIABLE])
    threading.Thread(target=_wait_and_exit, args=(descriptor,), name="life", daemon=True).start()


def report_ready(address: str = "") -> None:
    """Reports to the supervisor, if there is one, that this process does its work.

    The server says where it accepts calls; the cleaner has no address.
    """
    descriptor = os.environ.get(READY_FD_VARIABLE)
    if descriptor is not None:
        os.write(int(descriptor), f"{address}\n".encode())


def log_stream() -> TextIO:
    """Returns where this process logs to: the node's standard error."""
    descriptor = os.environ.get(STDERR_FD_VARIABLE)
    if descriptor is None:  # without a supervisor
        return sys.stderr
    return os.fdopen(int(descriptor), "w", encoding="utf-8", errors="backslashreplace")


def reloaded() -> dict[str, Any] | None:
    """Returns the settings reloaded last; None if there are none, or no supervisor."""
    descriptor = os.environ.get(SETTINGS_FD_VARIABLE)
    content = b"" if descriptor is None else os.pread(int(descriptor), 1 << 20, 0)
    try:
        return json.loads(content) if content else None
    except ValueError:  # it is being written: another signal follows
        return None


def take_hangups() -> None:
    """Enables SIGHUP, which the supervisor holds back until the process can handle it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def server_row_fd() -> int | None:
    """Returns the descriptor of the server's status; None without a supervisor: it is on disk."""
    descriptor = os.environ.get(ROW_FD_VARIABLE)
    return None if descriptor is None else int(descriptor)


def _wait_and_exit(descriptor: int) -> None:
    os.read(descriptor, 1)
    os._exit(EXIT_ORPHANED)
