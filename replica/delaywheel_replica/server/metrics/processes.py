"""Reads what the kernel reports about a process of this node.

Its start time is not read here: the kernel counts that from the boot, whose time moves with each
step of the wall clock.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
# Fields of /proc/<pid>/stat, counted behind the name, which may contain anything.
_USER_TICKS, _SYSTEM_TICKS, _RESIDENT_PAGES = 11, 12, 21


@dataclass(frozen=True, slots=True)
class Process:
    """One process; its descriptors are files and sockets. None: no limit."""

    cpu_s: float
    resident_bytes: int
    open_fds: int
    open_sockets: int
    max_fds: int | None


def look_at(pid: int) -> Process | None:
    """Reads a process of this user; None if it is gone, or belongs to another user."""
    folder = Path("/proc") / str(pid)
    try:
        open_fds, open_sockets = _descriptors(folder / "fd")
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        return Process(
            cpu_s=(int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / _TICKS_A_SECOND,
            resident_bytes=int(fields[_RESIDENT_PAGES]) * _PAGE_BYTES,
            open_fds=open_fds,
            open_sockets=open_sockets,
            max_fds=_limit((folder / "limits").read_text()),
        )
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def _descriptors(folder: Path) -> tuple[int, int]:
    """Returns the number of descriptors, and of sockets among them; one system call for each."""
    every = sockets = 0
    for entry in folder.iterdir():
        every += 1
        with suppress(FileNotFoundError):  # closed since
            sockets += entry.readlink().name.startswith("socket:")
    return every, sockets


def _limit(limits: str) -> int | None:
    (line,) = (line for line in limits.splitlines() if line.startswith("Max open files"))
    soft = line.split()[3]
    return None if soft == "unlimited" else int(soft)
