"""Watches the disk for the member machine: how much space is free, and whether it hangs."""

import threading
from collections.abc import Callable
from typing import Final

from delaywheel_replica.core.node.events import DiskState
from delaywheel_replica.server.node.disk_space import FreeSpace, is_no_room

_STALLED_MS: Final = 1_500
"""A disk that takes this long for one job is considered hanging."""


class DiskWatch:
    """Reports the state of the disk whenever it changes. For any thread."""

    def __init__(
        self, room: FreeSpace, now_ms: Callable[[], int], report: Callable[[DiskState], None]
    ) -> None:
        """Begins with a disk that has room."""
        self._room = room
        self._now_ms = now_ms
        self._report = report
        # Since when the store's thread has been at its job; None: it has none.
        self._busy_since_ms: int | None = None
        self._is_stalled = False
        self._lock = threading.Lock()
        self._reported = DiskState.ROOM

    def begins(self) -> None:
        """Notes that the store's thread begins a job, or the next piece of it."""
        self._busy_since_ms = self._now_ms()

    def ends(self) -> None:
        """Notes that the store's thread has finished its job."""
        self._busy_since_ms = None

    def tick(self) -> None:
        """Checks whether the store's thread hangs; never waits for the disk."""
        since_ms = self._busy_since_ms
        self._is_stalled = since_ms is not None and self._now_ms() - since_ms >= _STALLED_MS
        self._report_if_new()

    @property
    def is_stalled(self) -> bool:
        """Whether the store's thread hangs, as of the last tick."""
        return self._is_stalled

    def look(self) -> None:
        """Measures the free space; may wait for the disk."""
        self._room.look(self._now_ms())
        self._report_if_new()

    def wrote(self, length_bytes: int) -> None:
        """Counts written bytes."""
        self._room.wrote(length_bytes, self._now_ms())
        self._report_if_new()

    def failed(self, error: BaseException) -> None:
        """Notes a failure; if space is exhausted, makes room for the next save."""
        if is_no_room(error):
            self._room.refused(self._now_ms())
            self._report_if_new()

    def _report_if_new(self) -> None:
        if self._room.state is self._reported and not self._is_stalled:
            return
        with self._lock:
            state = DiskState.DISK_STALLED if self._is_stalled else self._room.state
            if state is self._reported:
                return
            self._reported = state
            self._report(state)
