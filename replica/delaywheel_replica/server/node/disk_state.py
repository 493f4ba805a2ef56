"""The state of the data folder's disk: how much space is free, and whether it hangs.

Some space is reserved for the work that frees it.

| less is free than | the disk is | accepted |
|---|---|---|
| the reserve | DISK_FULL | no messages of callers; cancels, and frames of other nodes |
| half of it | DISK_OUT | neither: saves and deletions alone |
| or a write was refused for want of room, within `REFUSED_MS` | DISK_OUT | the same |

Promises, seals and checkpoints are small, but if one cannot be saved, the floor of the whole
cluster rests, and nothing is deleted anywhere. So `ballast`, a file in the data folder, is deleted
when a write was refused, and created again when there is room. A disk counts as having room again
only once a sixteenth of the reserve is free beyond it; otherwise it would switch back and forth.
The space that the ballast has freed does not count as free.

Space is measured once a second, and whenever half of what was left above the next threshold may
have been written since: a fast disk fills in less than a second.
"""

import contextlib
import errno
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from delaywheel.storage.folder.disk import Disk
from delaywheel_replica.core.node.events import DiskState
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.quantities import counted, size

REFUSED_MS: Final = 5_000
"""A disk that refused a write gets nothing but saves for this long, whatever it reports."""

BALLAST_BYTES: Final = 1 << 20
# A slot file is an inode; some are left for saves, which need few, and for the operator.
_INODE_RESERVE: Final = 1_000
_MARGIN: Final = 16
_STALLED_MS: Final = 1_500
"""A disk that takes this long for one job is considered hanging."""

_log = get_logger(__name__)


def is_no_room(error: BaseException | None) -> bool:
    """Whether a failure was caused by exhausted space."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return True
        error = error.__cause__
    return False


class FreeSpace:
    """Measures one data folder. For any thread.

    Attributes:
        state: As last measured; it never says that the disk hangs.
        detail: Why it accepts less than everything, for people.
    """

    def __init__(
        self,
        disk: Disk,
        data: Path,
        *,
        reserve_bytes: int,
        ballast_bytes: int = BALLAST_BYTES,
    ) -> None:
        """Measures nothing yet; accepts no more messages with less free than the reserve."""
        self._disk = disk
        self._data = data
        self._ballast = data / "ballast"
        self._ballast_bytes = ballast_bytes
        self._reserve_bytes = reserve_bytes
        self._refused_until_ms: int | None = None
        self._lock = threading.Lock()
        self._unlooked_bytes = 0  # how much may be written before the next measurement
        self.state = DiskState.ROOM
        self.detail = ""

    def look(self, now_ms: int) -> DiskState:
        """Measures the free space; creates the ballast when there is room."""
        with self._lock:
            until_ms = self._refused_until_ms
            has_ballast = self._disk.exists(self._ballast)
            state, detail = self._judged(has_ballast=has_ballast)
            if until_ms is not None and now_ms < until_ms:
                state, detail = DiskState.DISK_OUT, "A write was refused for lack of space"
            if state is not self.state:
                _log.warning("disk", state=state.value, detail=detail)
            self.state, self.detail = state, detail
            if state is DiskState.ROOM and not has_ballast:
                with contextlib.suppress(OSError):
                    self._disk.replace_file(self._ballast, bytes(self._ballast_bytes))
            return state

    def wrote(self, length_bytes: int, now_ms: int) -> None:
        """Counts written bytes; measures again if the state may have changed."""
        self._unlooked_bytes -= length_bytes
        if self._unlooked_bytes < 0:
            self.look(now_ms)

    def refused(self, now_ms: int) -> None:
        """Handles a write refused for lack of space: deletes the ballast, so that saves succeed."""
        self._refused_until_ms = now_ms + REFUSED_MS
        self.state, self.detail = DiskState.DISK_OUT, "A write was refused for lack of space"
        self._free_ballast()

    def before_start(self) -> None:
        """Makes room for the save at a start by deleting the ballast, if necessary."""
        if self._disk.free_bytes(self._data) < self._ballast_bytes:
            self._free_ballast()

    def _free_ballast(self) -> None:
        with contextlib.suppress(OSError):
            self._disk.delete(self._ballast)

    def _judged(self, *, has_ballast: bool) -> tuple[DiskState, str]:
        bytes_free = self._disk.free_bytes(self._data)
        if not has_ballast:
            bytes_free = max(0, bytes_free - self._ballast_bytes)
        lines = (self._reserve_bytes, self._reserve_bytes // 2)
        self._unlooked_bytes = (
            min((bytes_free - line for line in lines if line <= bytes_free), default=0) // 2
        )
        inodes_free = self._disk.free_inodes(self._data)
        for state, part in ((DiskState.DISK_OUT, 2), (DiskState.DISK_FULL, 1)):
            was_so = self.state is state or self.state is DiskState.DISK_OUT
            for free, reserve, shown in (
                (bytes_free, self._reserve_bytes, size),
                (inodes_free, _INODE_RESERVE, partial(counted, noun="inode")),
            ):
                margin = reserve // _MARGIN if was_so else 0
                if free is not None and free < reserve // part + margin:
                    return state, f"free: {shown(free)}; the reserve is {shown(reserve)}"
        return DiskState.ROOM, ""


class DiskWatch:
    """Reports the state of the disk whenever it changes. For any thread.

    Attributes:
        is_stalled: Whether the store's thread hangs, as of the last tick.
    """

    def __init__(
        self, room: FreeSpace, now_ms: Callable[[], int], report: Callable[[DiskState], None]
    ) -> None:
        self._room = room
        self._now_ms = now_ms
        self._report = report
        # Since when the store's thread has been at its job; None: it has none.
        self._busy_since_ms: int | None = None
        self.is_stalled = False
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
        self.is_stalled = since_ms is not None and self._now_ms() - since_ms >= _STALLED_MS
        self._report_if_new()

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
        if self._room.state is self._reported and not self.is_stalled:
            return
        with self._lock:
            state = DiskState.DISK_STALLED if self.is_stalled else self._room.state
            if state is self._reported:
                return
            self._reported = state
            self._report(state)
