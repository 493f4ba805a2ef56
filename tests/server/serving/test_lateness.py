"""A loop held up by its own process is distinguished from one that waits for a CPU."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

import pytest

from support.process.lateness import Late, Spent, own_s, watch

BLOCK_S = 0.4


@pytest.mark.parametrize(
    ("lag_s", "loop", "others", "own"),
    [
        pytest.param(0.4, Spent(0.4, 0.0), Spent(0.0, 0.0), 0.4, id="it worked"),
        pytest.param(0.4, Spent(0.1, 0.3), Spent(0.3, 0.0), 0.1, id="it waited for a processor"),
        pytest.param(0.4, Spent(0.0, 0.0), Spent(0.0, 0.0), 0.4, id="it slept"),
        pytest.param(0.4, Spent(0.0, 0.1), Spent(0.0, 0.0), 0.3, id="it slept, and waited"),
        pytest.param(0.4, Spent(0.0, 0.0), Spent(0.4, 0.0), 0.4, id="another had the interpreter"),
        pytest.param(0.4, Spent(0.0, 0.0), Spent(0.1, 0.3), 0.1, id="another had it, and waited"),
        pytest.param(0.4, Spent(0.0, 0.0), Spent(0.0, 0.3), 0.1, id="in part it slept"),
        pytest.param(0.4, Spent(0.3, 0.4), Spent(0.0, 0.0), 0.3, id="in the pause before, too"),
        pytest.param(0.0, Spent(0.02, 0.0), Spent(0.5, 0.0), 0.0, id="it was not late"),
    ],
)
def test_what_is_its_own(lag_s: float, loop: Spent, others: Spent, own: float) -> None:
    assert own_s(lag_s, loop, others) == pytest.approx(own)


def _work() -> None:
    ends_s = time.thread_time() + BLOCK_S
    while time.thread_time() < ends_s:
        pass


def _sleep() -> None:
    time.sleep(BLOCK_S)  # what blocks it is what is tested


def _hold_the_interpreter() -> None:
    """In one call, which lets no other thread run."""
    began_s = time.thread_time()
    sum(range(1_000_000))
    times = BLOCK_S / (time.thread_time() - began_s)
    sum(range(int(1_000_000 * times)))


def _work_on_another_thread() -> None:
    threading.Thread(target=_hold_the_interpreter).start()


@pytest.mark.parametrize("block", [_work, _sleep, _work_on_another_thread])
async def test_a_loop_that_is_held_up_is_seen(block: Callable[[], None]) -> None:
    is_watched, is_seen = asyncio.Event(), asyncio.Event()

    def report(late: Late) -> None:
        is_watched.set()
        if late.own_s > BLOCK_S / 2:
            is_seen.set()

    watching = asyncio.create_task(watch(report))
    await is_watched.wait()
    while not is_seen.is_set():
        # One on which the machine took the processor away in between counts for less.
        block()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(is_seen.wait(), 5)
    watching.cancel()
