"""The clocks of a node as a port, since a simulation has its own."""

import time
from typing import Protocol


class Clock(Protocol):
    """Wall clock and monotonic clock."""

    def wall_ms(self) -> int:
        """Returns Unix milliseconds."""

    def monotonic_ms(self) -> int:
        """Returns CLOCK_MONOTONIC in milliseconds: the same clock in all processes of a machine."""

    def monotonic(self) -> float:
        """Returns CLOCK_MONOTONIC in seconds."""


class SystemClock:
    """The clocks of the machine."""

    def wall_ms(self) -> int:
        """Returns Unix milliseconds."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Returns CLOCK_MONOTONIC in milliseconds."""
        return time.monotonic_ns() // 1_000_000

    def monotonic(self) -> float:
        """Returns CLOCK_MONOTONIC in seconds."""
        return time.monotonic()
