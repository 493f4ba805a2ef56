"""Checks the event loop five times a second: its lag, and the in-sync set.

While the loop is busy with one thing, everything else waits, answers and health checks alike. How
long shows in how late a timer comes.

Whatever else the loop does at intervals, it does at the same moments (`next_pulse`): after a rest,
waking up costs a node more than the work itself.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from delaywheel_replica.core.protocol.histogram import Tally

EVERY_S: Final = 0.2
LAG_BOUNDS_US: Final = tuple(
    ms * 1_000 for ms in (1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000)
)
_LOOKS_A_MINUTE: Final = round(60 / EVERY_S)


class Pulse:
    """The pulse of the event loop; runs on it, may be read on any thread.

    Attributes:
        lags: How late its timer came.
        in_sync_changes: How often the set of in-sync members differed from that of the previous
            check; a change that lasts less than a fifth of a second may be missed.
    """

    def __init__(self, in_sync: Callable[[], frozenset[str]]) -> None:
        """Prepares; the in-sync set is empty while no wheel is open, which is not a change."""
        self._in_sync = in_sync
        self._seen: frozenset[str] = frozenset()
        self._latest_us: deque[int] = deque(maxlen=_LOOKS_A_MINUTE)
        self.lags = Tally(LAG_BOUNDS_US)
        self.in_sync_changes = 0

    @property
    def greatest_lag_us(self) -> int:
        """The greatest lag of the last minute, in microseconds."""
        return max(self._latest_us.copy(), default=0)

    async def run(self) -> None:
        """Checks until cancelled."""
        while True:
            self.look(await next_pulse())

    def look(self, lag_us: int) -> None:
        """Notes one tick that was late by this much."""
        self.lags.add(lag_us)
        self._latest_us.append(lag_us)
        in_sync = self._in_sync()
        if not in_sync:
            return
        if self._seen and in_sync != self._seen:
            self.in_sync_changes += 1
        self._seen = in_sync


def pulse_after(now_s: float) -> float:
    """Returns the next multiple of `EVERY_S`."""
    return (now_s // EVERY_S + 1) * EVERY_S


async def next_pulse() -> int:
    """Waits for the next pulse on the loop's clock; returns how many microseconds late it comes."""
    loop = asyncio.get_running_loop()
    now_s = loop.time()
    wanted_s = pulse_after(now_s)
    await asyncio.sleep(wanted_s - now_s)
    return round((loop.time() - wanted_s) * 1e6)
