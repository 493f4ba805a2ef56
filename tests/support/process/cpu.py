"""What each test computes, with all processes that live meanwhile, in a file.

`DELAYWHEEL_CPU=FILE` in the environment of a `pytest` that runs alone in a cgroup of its own (v1,
`cpuacct`) asks for it:

    mkdir -p $G; echo $$ > $G/cgroup.procs; DELAYWHEEL_CPU=FILE DELAYWHEEL_CPU_GROUP=$G pytest …

The kernel counts there what /proc forgets: processes that end by themselves, and those that outlive
their parents, as brokers and nodes do. Each line: CPU seconds, of which to set up, seconds, test.
A fixture of several tests counts for the first, and so does a broker's or a Spark's warming up.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path

import pytest


class CpuTimes:
    """Writes a line for each test."""

    def __init__(self, group: Path, file: Path) -> None:
        self._usage = group / "cpuacct.usage"
        self._file = file
        self._setup_s = 0.0

    def _used_s(self) -> float:
        return int(self._usage.read_text()) / 1e9

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None]:
        """Counts fixtures by themselves."""
        before_s = self._used_s()
        yield
        self._setup_s = self._used_s() - before_s

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Counts all of it."""
        before_s, began_s = self._used_s(), time.monotonic()
        done = yield
        used_s, took_s = self._used_s() - before_s, time.monotonic() - began_s
        with self._file.open("a") as file:
            file.write(f"{used_s:8.2f} {self._setup_s:8.2f} {took_s:8.2f} {item.nodeid}\n")
        return done
