"""Writes the cleaner's status, and keeps it fresh while the main thread waits for Kafka.

| what changed since it was written | it is written |
|---|---|
| anything but progress, ingress and lateness | at the next turn |
| progress, and within `HASTE_S` somebody asked for a commit | at the next turn |
| progress, or ingress | after `ROW_S`: a row costs both processes as much as a transaction's
|   | messages |
| nothing, or the lateness | after `QUIET_ROW_S` |

| the main thread | the row is written | by |
|---|---|---|
| turns | as above | itself |
| waits for a transaction | every `STAMP_S`, the same with new times and `call_since_ms` | `stamp` |
| reads what is due | every `STAMP_S`, the same with new times | `stamp` |
| waits so long that the last commit is too old, or reads for `READING_MS` | no more | nobody |
| waits for anything else | no more | nobody |

So a leader on slow brokers, or a slow disk, is heard, and one that hangs is not: of a transaction,
the election machine would end its term at that very moment, if it could turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from delaywheel_replica.cleaner.outside.clocks import Clock
from delaywheel_replica.cleaner.view import View
from delaywheel_replica.core.protocol.status_files import CleanerStatus

ROW_S = 0.1
"""Progress is told at least so often."""

QUIET_ROW_S = 0.25
"""The row is written at least so often: four times before it would count as a dead process's."""

HASTE_S = 1.0
"""For so long whoever asked for a commit is told each one at once."""

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


class News:
    """Decides when there is something to report. For the main thread."""

    def __init__(self) -> None:
        """Begins with nothing reported."""
        self._told: View | None = None
        self._told_s = 0.0
        self._is_new = False
        self._asked_s = -HASTE_S

    def ask(self, now_s: float) -> None:
        """Notes that a commit is waited for."""
        self._asked_s = now_s

    def rest_s(self, now_s: float) -> float:
        """Returns how long there will be nothing to report unless something changes."""
        after_s = ROW_S if self._is_new else QUIET_ROW_S
        return max(0.0, self._told_s + after_s - now_s)

    def look(self, view: View, now_s: float) -> tuple[bool, bool]:
        """Returns whether to write the status now, and whether more than the lateness is new.

        Args:
            view: what others may know.
            now_s: the monotonic clock.
        """
        told = replace(view, lateness_ms=0)
        is_new = told != self._told
        age_s = now_s - self._told_s
        in_haste = now_s - self._asked_s < HASTE_S
        is_time = age_s >= QUIET_ROW_S or (
            is_new and (age_s >= ROW_S or in_haste or self._is_urgent(told))
        )
        self._is_new = is_new and not is_time
        if is_time:
            self._told, self._told_s = told, now_s
        return is_time, is_new

    def _is_urgent(self, view: View) -> bool:
        told = self._told
        return told is None or _without_haste(view) != _without_haste(told)


def _without_haste(view: View) -> View:
    """Returns what is told at once: without what most transactions change.

    Nor is there haste with the slot that seals wait for: where they must not pass it, they rest
    from the moment at which this node begins to lead.
    """
    state = replace(view.state, progress=None, ingress={})
    return replace(view, state=state, ingress_slot=None)


class RowKeeper:
    """Writes the status. `tell` is for the main thread, `stamp` for another one."""

    def __init__(
        self,
        put: Callable[[CleanerStatus], None],
        waiting: Callable[[], Waiting | None],
        clock: Clock,
    ) -> None:
        """Begins with nothing written.

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
        """Writes the main thread's status."""
        with self._lock:
            self._put(status)
            self._last = status

    def stamp(self) -> None:
        """Refreshes the last status if the main thread cannot; called every `STAMP_S`."""
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
