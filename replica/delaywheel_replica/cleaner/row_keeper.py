"""Writes the cleaner's status, and keeps it fresh while the main thread waits for Kafka.

| changed since the last write | written |
|---|---|
| anything but progress, ingress and lateness | at the next iteration |
| progress, and a commit was requested within `PROMPT_S` | at the next iteration |
| progress, or ingress | after `ROW_S`: a row costs both processes as much as the messages of a
|   | transaction |
| nothing, or only the lateness | after `QUIET_ROW_S` |

| the main thread | the row is written | by |
|---|---|---|
| runs | as above | the main thread |
| waits for a transaction | every `STAMP_S`, the same with new times | `stamp` |
| reads what is due | likewise | `stamp` |
| waits too long for its last commit to count, or reads for `READING_MS` | not any more | - |
| waits for anything else | not any more | - |

So a leader on slow brokers, or a slow disk, stays heard, and one that hangs does not: at that
moment the election machine would end its term, if it could run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.outside.clocks import Clock
from delaywheel_replica.core.protocol.control import ControlState, Leader
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.heartbeat import Fence
from delaywheel_replica.core.protocol.messages import PrevoteRequest
from delaywheel_replica.core.protocol.status_files import (
    CleanerStatus,
    FloorWait,
    Role,
    Standstill,
)

ROW_S = 0.1
"""The longest time between a leader's reports of progress."""

QUIET_ROW_S = 0.25
"""The longest time between rows: a quarter of the age at which a process counts as dead."""

PROMPT_S = 1.0
"""After a request for a commit, each commit is reported at once for this long."""

STAMP_S = 0.2
"""A healthy transaction ends long before this: then only the main thread writes."""

READING_MS = 10_000
"""After a long outage, the backlog is read from a disk that may be slow."""


@dataclass(frozen=True, slots=True)
class View:
    """What a cleaner's status says of its term; one that differs only in lateness is no news.

    Fields other than `state` have the names of those in `CleanerStatus`.
    """

    role: Role
    epoch: int | None
    leader: Leader | None
    state: ControlState
    control_offset: int
    lateness_ms: int = field(compare=False)
    kafka_error: str | None
    kafka_warnings: tuple[str, ...] = ()
    unreadable: FrameSet = NO_FRAMES
    fences: tuple[Fence, ...] = ()
    limits: Mapping[WheelId, int] = field(default_factory=dict)
    prevote_request: PrevoteRequest | None = None
    stands: bool = False
    ingress_slot: int | None = None
    floor_wait: FloorWait | None = None
    standstill: Standstill | None = None
    throttled: str | None = None
    halves_objection: str | None = None

    def status(self, **own: Any) -> CleanerStatus:
        """Returns a cleaner's status: what it says of its term, and the process's own fields."""
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        state: ControlState = said.pop("state")
        return CleanerStatus(
            **own,
            **said,
            progress=state.progress,
            wheels=state.wheels,
            nodes=state.nodes,
            lost=state.lost,
            reschedules=state.reschedules,
            needs=state.needs,
        )


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a leader's main thread waits for.

    Attributes:
        since_ms: When its transaction began, by the monotonic clock; None: it reads what is due.
        until_ms: Until when the leader counts, whether it has ended or not.
    """

    since_ms: int | None
    until_ms: int


class RowNews:
    """Decides when there is something to report. For the main thread."""

    def __init__(self) -> None:
        self._reported: View | None = None
        self._urgent: View | None = None  # what of it is reported at once
        self._reported_s = 0.0
        self._is_new = False

    def wait_s(self, now_s: float) -> float:
        """Returns how long there will be nothing to report unless something changes."""
        after_s = ROW_S if self._is_new else QUIET_ROW_S
        return max(0.0, self._reported_s + after_s - now_s)

    def look(self, view: View, now_s: float, *, asked_s: float) -> tuple[bool, bool]:
        """Returns whether to write the status now, and whether anything besides lateness is new.

        A commit was last asked for at `asked_s`, by the monotonic clock.
        """
        is_new = view != self._reported
        age_s = now_s - self._reported_s
        is_prompt = now_s - asked_s < PROMPT_S
        is_time = age_s >= QUIET_ROW_S or (
            is_new and (age_s >= ROW_S or is_prompt or _urgent_part(view) != self._urgent)
        )
        self._is_new = is_new and not is_time
        if is_time:
            self._reported, self._reported_s = view, now_s
            self._urgent = _urgent_part(view)
        return is_time, is_new


def _urgent_part(view: View) -> View:
    """Returns the values whose changes are reported at once: not those of most transactions.

    The slot that seals must not pass is not urgent either: seals are frozen from when this
    node begins to lead.
    """
    state = replace(view.state, progress=None, ingress={})
    return replace(view, state=state, ingress_slot=None, floor_wait=None)


class RowKeeper:
    """Writes the status. `report` is for the main thread, `stamp` for another one."""

    def __init__(
        self,
        put: Callable[[CleanerStatus], None],
        waiting: Callable[[], Waiting | None],
        clock: Clock,
    ) -> None:
        """Begins with nothing written; `put` is called by one thread at a time."""
        self._put = put
        self._waiting = waiting
        self._clock = clock
        self._lock = threading.Lock()
        self._last: CleanerStatus | None = None

    def report(self, status: CleanerStatus) -> None:
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
            self._put(replace(last, monotonic_ms=now_ms, wall_ms=self._clock.wall_ms()))
