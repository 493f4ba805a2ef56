"""Notices clocks that do not show the time: no deadline would come then, or each would at once.

Libraries for tests set the clocks of a process: freezegun stops both, time-machine moves the wall
clock, from which gRPC counts its deadlines. What they cannot set shows it: a wait, and the time
that the kernel writes down for a new pipe.
"""

from __future__ import annotations

import os
from math import inf
from threading import Lock
from time import monotonic, time
from typing import Final

APART_S: Final = 60.0
"""How far the wall clock may be from the kernel's."""

_FAKE: Final = (
    "the clocks of this process {how}, so no deadline of gRPC's would come in time: a test library"
    " has set them (freezegun, time-machine). Leave delaywheel the real time: freezegun's"
    ' freeze_time(…, ignore=["delaywheel", "grpc", "asyncio"]); with time-machine make such calls'
    " outside of it. A MemoryService has a clock of its own for tests: start=…, advance(…)"
)
_STEP_S: Final = 0.001
_STEPS: Final = 50  # some systems' clocks have ticks of 16 ms


class RealTime:
    """Looks at the clocks whenever they have moved against each other."""

    def __init__(self) -> None:
        self._between_s = inf

    def now_s(self) -> float:
        """Returns the monotonic clock's time; if the clocks do not show it, raises what to do."""
        now_s = monotonic()
        between_s = time() - now_s
        if not abs(between_s - self._between_s) < 1:
            _check()
            self._between_s = between_s
        return now_s


def _check() -> None:
    if _stands_still():
        raise RuntimeError(_FAKE.format(how="stand still"))
    if abs(time() - _kernel_s()) > APART_S:
        raise RuntimeError(_FAKE.format(how="are not the machine's"))


def _stands_still() -> bool:
    begin_s, never = monotonic(), Lock()
    never.acquire()
    return all(monotonic() == begin_s and not never.acquire(timeout=_STEP_S) for _ in range(_STEPS))


def _kernel_s() -> float:
    """Returns the kernel's wall clock; the process's own where it does not say."""
    ends = os.pipe()
    try:
        return os.fstat(ends[0]).st_mtime or time()
    finally:
        for end in ends:
            os.close(end)
