"""The clocks of one node, which need not show true time.

True time runs in the scheduler. A node's oscillator may run fast or slow (`drift`), which both its
clocks follow; an operator or NTP may set its wall clock (`step`), which the monotonic one does not
notice; a reboot restarts the monotonic one.
"""

from __future__ import annotations

from sim.machine.scheduler import US_PER_MS, US_PER_S, Scheduler

EPOCH_MS = 1_763_700_000_000
"""Unix time at which every run begins."""

MILLION = 1_000_000


def true_wall_ms(scheduler: Scheduler) -> int:
    """What a perfect clock shows: for checks, never for nodes."""
    return EPOCH_MS + scheduler.now_us // US_PER_MS


class SimClock:
    """Wall and monotonic clock of one node.

    Attributes:
        drift_ppm: How much faster than true time it runs; negative: slower. Set by `drift`.
    """

    __slots__ = ("_local_us", "_monotonic_us", "_scheduler", "_since_us", "_wall_us", "drift_ppm")

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        offset_ms: int = 0,
        uptime_ms: int = 60_000,
        drift_ppm: int = 0,
    ) -> None:
        """Starts.

        Args:
            scheduler: The source of true time.
            offset_ms: How far the wall clock is ahead of true time.
            uptime_ms: What the monotonic clock shows.
            drift_ppm: How much faster than true time it runs.
        """
        self._scheduler = scheduler
        self._since_us = scheduler.now_us
        self._local_us = 0  # what the oscillator had counted at `_since_us`
        self._wall_us = (EPOCH_MS + offset_ms) * US_PER_MS + scheduler.now_us
        self._monotonic_us = uptime_ms * US_PER_MS
        self.drift_ppm = drift_ppm

    def wall_ms(self) -> int:
        """Unix milliseconds, as this node believes."""
        return (self._wall_us + self._counted_us()) // US_PER_MS

    def monotonic_ms(self) -> int:
        """Milliseconds since an arbitrary moment; never goes back while the machine is up."""
        return (self._monotonic_us + self._counted_us()) // US_PER_MS

    def monotonic(self) -> float:
        """The same in seconds, to the microsecond."""
        return (self._monotonic_us + self._counted_us()) / US_PER_S

    def step(self, ms: int) -> None:
        """Sets the wall clock forward, or back."""
        self._wall_us += ms * US_PER_MS

    def drift(self, ppm: int) -> None:
        """Runs this much faster than true time from now on."""
        self._local_us = self._counted_us()
        self._since_us = self._scheduler.now_us
        self.drift_ppm = ppm

    def reboot(self) -> None:
        """Restarts the monotonic clock at zero, as a reboot does."""
        self._monotonic_us = -self._counted_us()

    def true_us(self, local_us: int) -> int:
        """Returns the true time until this node's clocks have advanced by this much."""
        return -(-local_us * MILLION // (MILLION + self.drift_ppm))

    def _counted_us(self) -> int:
        true_us = self._scheduler.now_us - self._since_us
        return self._local_us + true_us + true_us * self.drift_ppm // MILLION
