"""Reads CPU time and context switches of processes from /proc."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SWITCHES = ("voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")


@dataclass(frozen=True, slots=True)
class Look:
    """What a process had used at one moment.

    Attributes:
        cpu_s: User and system time of all threads, including ended ones.
        switches: Voluntary and involuntary context switches, by living thread.
    """

    cpu_s: float
    switches: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process used during a period.

    Attributes:
        cpu_s: CPU time.
        switches: Context switches, without those of threads that began and ended meanwhile.
    """

    cpu_s: float
    switches: int

    @classmethod
    def between(cls, before: Look, after: Look) -> Usage:
        """Returns the difference of two readings of the same process."""
        switches = sum(
            count - before.switches.get(thread, 0) for thread, count in after.switches.items()
        )
        return cls(after.cpu_s - before.cpu_s, switches)


def cpu_s_of(stat: str) -> float:
    """Parses CPU seconds from the text of /proc/<pid>/stat.

    Example:
        >>> cpu_s_of("7 (a) b) S 1 7 7 0 -1 0 0 0 0 0 200 50 9 9 20 0 1") * _TICKS_PER_S
        250.0
    """
    # A program's name is in parentheses, and may contain parentheses itself.
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def switches_of(status: str) -> int:
    """Parses both kinds of context switches from the text of a thread's /proc status."""
    lines = (line.split() for line in status.splitlines() if line.startswith(_SWITCHES))
    return sum(int(number) for _, number in lines)


def look(pid: int) -> Look | None:
    """Reads a process's usage; None if it does not exist."""
    folder = Path(f"/proc/{pid}")
    try:
        cpu_s = cpu_s_of((folder / "stat").read_text())
        threads = [int(entry.name) for entry in (folder / "task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return None
    switches = {}
    for thread in threads:
        try:
            switches[thread] = switches_of((folder / f"task/{thread}/status").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended
    return Look(cpu_s, switches)


class Watch:
    """Measures some processes' usage from its creation on.

    Example:
        >>> watch = Watch({"this one": os.getpid()})
        >>> list(watch.read())
        ['this one']
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._before = self._look()

    def read(self) -> dict[str, Usage]:
        """Returns the usage since creation, without processes that have ended."""
        return {
            name: Usage.between(self._before[name], after)
            for name, after in self._look().items()
            if name in self._before
        }

    def _look(self) -> dict[str, Look]:
        looks = {name: look(pid) for name, pid in self._pids.items()}
        return {name: one for name, one in looks.items() if one is not None}


class Sampler:
    """Samples CPU time by process each second, on its own thread; for a `with` block.

    Attributes:
        samples: Unix second in which a second of work ended, and CPU seconds by process.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self.samples: list[tuple[float, dict[str, float]]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        watch = Watch(self._pids)
        while not self._end.wait(1.0):
            used = {name: usage.cpu_s for name, usage in watch.read().items()}
            watch = Watch(self._pids)
            self.samples.append((time.time(), used))
