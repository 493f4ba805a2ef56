"""How late an event loop is because of its own process, and not of the machine.

A timer that comes late says only that its loop did not turn. On a machine with more to do than it
has processors most of that is waiting for one, and a process beside it that only sleeps does not
show it: a sleeping thread is let in at once, a working one is not. So the kernel is asked what the
threads did meanwhile (``/proc/self/task/*/schedstat``: time on a processor, time waiting for one):

==========================  ==================================================================
while its timer was late    counts as
==========================  ==================================================================
the loop's thread ran       own
it waited for a processor   the machine's
it did neither              own, as far as other threads of Python ran (one of them had the
                            interpreter), or did not wait for a processor either (a lock, a
                            disk, a sleep); the rest is the machine's
==========================  ==================================================================

What the threads did within the pause before is counted with it: the figure is rather too great.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

PAUSE_S: Final = 0.02


class Late(NamedTuple):
    """One timer that came late, in seconds.

    Attributes:
        own_s: by the process's own doing.
        lag_s: altogether.
        threads: name of each thread, and how long it ran.
    """

    own_s: float
    lag_s: float
    threads: dict[str, float]


class Spent(NamedTuple):
    """How a thread spent some time, in seconds: running, and waiting for a CPU."""

    ran_s: float
    waited_s: float


def own_s(lag_s: float, loop: Spent, others: Spent) -> float:
    """How much of a timer's lateness its own process caused; see the module."""
    idle_s = max(0.0, lag_s - loop.ran_s - loop.waited_s)
    return min(lag_s, loop.ran_s + min(idle_s, max(others.ran_s, idle_s - others.waited_s)))


async def watch(report: Callable[[Late], None]) -> None:
    """Reports each timer of the running loop, until cancelled."""
    loop_thread = threading.get_native_id()
    threads = _Threads()
    before = threads.look()
    while True:
        began_s = time.monotonic()
        await asyncio.sleep(PAUSE_S)
        lag_s = max(0.0, time.monotonic() - began_s - PAUSE_S)
        after = threads.look()
        spent = {
            (number, name): Spent(now.ran_s - was.ran_s, now.waited_s - was.waited_s)
            for (number, name), now in after.items()
            if (was := before.get((number, name), now))
        }
        before = after
        loop = next(each for (number, _), each in spent.items() if number == loop_thread)
        rest = [each for (number, _), each in spent.items() if number != loop_thread]
        others = Spent(sum(each.ran_s for each in rest), sum(each.waited_s for each in rest))
        ran = {name: each.ran_s for (_, name), each in spent.items()}
        report(Late(own_s(lag_s, loop, others), lag_s, ran))


class _Threads:
    """The threads of this process that run Python, with their usage so far."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def look(self) -> dict[tuple[int, str], Spent]:
        spent = {}
        there = {
            thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id
        }
        for number in self._files.keys() - there.keys():
            os.close(self._files.pop(number))
        for number, name in there.items():
            try:
                if number not in self._files:
                    path = f"/proc/self/task/{number}/schedstat"
                    self._files[number] = os.open(path, os.O_RDONLY)
                ran_ns, waited_ns, _ = os.pread(self._files[number], 100, 0).split()
            except (OSError, ValueError):  # it ended just now
                continue
            spent[number, name] = Spent(int(ran_ns) / 1e9, int(waited_ns) / 1e9)
        return spent
