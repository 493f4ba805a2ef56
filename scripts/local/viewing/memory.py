"""What a process has in memory, read from /proc."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(pid: int) -> int:
    """Returns what a process has in memory."""
    return _memory(pid, "status", ("VmRSS:",))


def private_bytes(pid: int) -> int:
    """Returns what of that is no other process's, too."""
    return _memory(pid, "smaps_rollup", ("Private_Clean:", "Private_Dirty:"))


def _memory(pid: int, file: str, names: tuple[str, ...]) -> int:
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(names))
