"""Which address to send to next, and how long to wait before: spreading, health, backoff.

Pure: time comes in as a value (monotonic seconds). Of each address it knows two moments:

- `rest_until`: before it, others are preferred. After a failure that is at least as long as the
  failed attempt took, so that an address that hangs for 5 s does not take part in every second
  call; and while one call is trying a failed address, the others keep off it.
- `retry_at`: before it, it is not tried at all. It grows from `BACKOFF_FIRST_S` to
  `BACKOFF_MOST_S` with the failures in a row, with jitter, and is what the service asks for
  in RetryInfo where that is longer.

Requests go round the addresses that do not rest. If all rest, the one with the least `retry_at`
is next, and the caller waits until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from threading import Lock
from typing import Final, NamedTuple

BACKOFF_FIRST_S: Final = 0.02
BACKOFF_MOST_S: Final = 1.0
RETRY_DELAY_MOST_S: Final = 10.0
"""A service may ask for a longer wait than our own backoff, but not for any wait."""


@dataclass(slots=True)
class _Health:
    failures: int = 0
    failed_at_s: float = float("-inf")
    rest_until_s: float = float("-inf")
    retry_at_s: float = float("-inf")


class Turn(NamedTuple):
    """Send to address number `number`, but wait first."""

    number: int
    wait_s: float


class Report(NamedTuple):
    """How an attempt went, from the address's point of view."""

    healthy: bool
    retry_delay_s: float | None = None


class Endpoints:
    """The addresses of one client; thread-safe."""

    def __init__(self, count: int, random: Random) -> None:
        self._healths: Final[Sequence[_Health]] = [_Health() for _ in range(count)]
        self._random: Final = random
        # Clients start at different addresses, or the first one would get all single calls.
        self._next = random.randrange(count)
        self._lock: Final = Lock()

    def __len__(self) -> int:
        return len(self._healths)

    def turn(self, now_s: float, attempt_timeout_s: float) -> Turn:
        """The address to try next."""
        with self._lock:
            order = [(self._next + step) % len(self) for step in range(len(self))]
            number = next((i for i in order if self._healths[i].rest_until_s <= now_s), None)
            if number is None:
                number = min(order, key=lambda i: self._healths[i].retry_at_s)
            self._next = (number + 1) % len(self)
            health = self._healths[number]
            wait_s = max(0.0, health.retry_at_s - now_s)
            if health.failures:
                health.rest_until_s = now_s + wait_s + attempt_timeout_s
            return Turn(number, wait_s)

    def report(self, number: int, *, started_s: float, now_s: float, report: Report) -> None:
        """Takes note of how an attempt went."""
        with self._lock:
            health = self._healths[number]
            if report.healthy:
                health.failures = 0
                health.rest_until_s = health.retry_at_s = now_s
            elif started_s >= health.failed_at_s:
                # Calls that were under way together fail together, and count as one.
                self._failed(health, now_s, now_s - started_s, report.retry_delay_s)

    def _failed(
        self, health: _Health, now_s: float, took_s: float, retry_delay_s: float | None
    ) -> None:
        backoff_s = min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2 ** min(health.failures, 16))
        backoff_s *= self._random.uniform(0.5, 1.0)
        wait_s = max(backoff_s, min(retry_delay_s or 0.0, RETRY_DELAY_MOST_S))
        health.failures += 1
        health.failed_at_s = now_s
        health.retry_at_s = now_s + wait_s
        health.rest_until_s = now_s + max(wait_s, took_s)
