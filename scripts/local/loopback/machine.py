"""How busy the machine is, whoever keeps it busy."""

from __future__ import annotations

import os
from pathlib import Path


class CpuTime:
    """The machine's CPU time from now on."""

    def __init__(self) -> None:
        self._busy_before, self._all_before = _ticks()

    def busy_share(self) -> float:
        """How much of it was used: 0 to 1 over all CPUs; 0 before the first tick."""
        busy, everything = _ticks()
        passed = everything - self._all_before
        return (busy - self._busy_before) / passed if passed else 0.0


def load_1min() -> float:
    """Processes that run or want to, over the last minute."""
    return os.getloadavg()[0]


def _ticks() -> tuple[int, int]:
    """Clock ticks since the machine started: busy, and all."""
    first_line = Path("/proc/stat").read_text().partition("\n")[0]
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, first_line.split()[1:9])
    busy = user + nice + system + irq + softirq + steal
    return busy, busy + idle + iowait
