"""The cleaner's row, kept fresh while its main thread waits for Kafka.

| the main thread | the row is written | by |
|---|---|---|
| turns | when something changed, and at least every `ROW_S` | itself |
| waits for a transaction | every `STAMP_S`, the same with new times and `call_since_ms` | `stamp` |
| reads what is due | every `STAMP_S`, the same with new times | `stamp` |
| waits so long that the last commit is too old, or reads for `READING_MS` | no more | nobody |
| waits for anything else | no more | nobody |

So a leader on slow brokers, or a slow disk, is heard, and one that hangs is not: of a transaction,
the election machine would end its office at that very moment, if it could turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from delaywheel_replica.cleaner.clocks import Clock
from delaywheel_replica.core.status import CleanerStatus

STAMP_S = 0.2
"""In health a transaction ends long before: then nobody but the main thread writes."""

READING_MS = 10_000
"""After a long outage what was missed is read from a disk that may be slow."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a leader's main thread waits for.

    Attributes:
        since_ms: when its transaction began, by the monotonic clock; None: it reads what is due.
        until_ms: until when the leader counts, whether it has ended or not.
    """

    since_ms: int | None
    until_ms: int


class Telling:
    """Writes the row. `tell` is for the main thread, `stamp` for another one."""

    def __init__(
        self,
        put: Callable[[CleanerStatus], None],
        waiting: Callable[[], Waiting | None],
        clock: Clock,
    ) -> None:
        """Nothing was told yet.

        Args:
            put: Writes it; one thread at a time calls it.
            waiting: For which transaction the main thread waits.
            clock: The clocks.
        """
        self._put = put
        self._waiting = waiting
        self._clock = clock
        self._lock = threading.Lock()
        self._last: CleanerStatus | None = None

    def tell(self, status: CleanerStatus) -> None:
        """Writes what the main thread has to say."""
        with self._lock:
            self._put(status)
            self._last = status

    def stamp(self) -> None:
        """Writes the last word again, if the main thread cannot; to be called every `STAMP_S`."""
        waiting = self._waiting()
        if waiting is None:
            return
        with self._lock:
            last, now_ms = self._last, self._clock.monotonic_ms()
            if last is None or now_ms - last.monotonic_ms < STAMP_S * 1000:
                return
            if now_ms > waiting.until_ms:
                return
            self._put(
                replace(
                    last,
                    monotonic_ms=now_ms,
                    wall_ms=self._clock.wall_ms(),
                    call_since_ms=waiting.since_ms,
                )
            )
