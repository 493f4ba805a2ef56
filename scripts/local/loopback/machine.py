"""How busy the machine is, including other processes."""

from __future__ import annotations

import os
from pathlib import Path


class CpuTime:
    """The machine's CPU time since creation."""

    def __init__(self) -> None:
        self._busy_before, self._all_before = _ticks()

    def busy_share(self) -> float:
        """Returns the used share: 0 to 1 over all CPUs; 0 before the first tick."""
        busy, everything = _ticks()
        passed = everything - self._all_before
        return (busy - self._busy_before) / passed if passed else 0.0


def load_1min() -> float:
    """Returns the 1-minute load average."""
    return os.getloadavg()[0]


def _ticks() -> tuple[int, int]:
    """Returns clock ticks since the machine started: busy ones, and all."""
    first_line = Path("/proc/stat").read_text().partition("\n")[0]
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, first_line.split()[1:9])
    busy = user + nice + system + irq + softirq + steal
    return busy, busy + idle + iowait
