"""The clocks of a node, as a port: a simulation has its own."""

import time
from typing import Protocol


class Clock(Protocol):
    """Wall clock and monotonic clock."""

    def wall_ms(self) -> int:
        """Unix milliseconds."""

    def monotonic_ms(self) -> int:
        """CLOCK_MONOTONIC in milliseconds: the same clock in all processes of one machine."""

    def monotonic(self) -> float:
        """The same in seconds."""


class SystemClock:
    """The machine's."""

    def wall_ms(self) -> int:
        """Unix milliseconds."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """CLOCK_MONOTONIC in milliseconds."""
        return time.monotonic_ns() // 1_000_000

    def monotonic(self) -> float:
        """CLOCK_MONOTONIC in seconds."""
        return time.monotonic()
