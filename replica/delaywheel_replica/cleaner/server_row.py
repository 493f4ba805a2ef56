"""Reads the server's status, ignoring what an earlier server process wrote.

The file outlives the processes and the machine's boot. A row of an earlier boot may even look fresh
for days, because the monotonic clock restarts. A server ends with its cleaner (the supervisor
ensures that), so rows stamped after this cleaner began are its own server's.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from delaywheel.storage.folder.status_file import RowReader
from delaywheel_replica.core.protocol.codec import MalformedError, Unchanged, from_json
from delaywheel_replica.core.protocol.status_files import ServerStatus
from delaywheel_replica.process.logs import get_logger

log = get_logger(__name__)


class ServerRow:
    """Reads ``server.row``. One thread calls it."""

    def __init__(self, path: Path, *, boot: str, since_ms: int) -> None:
        """Begins with nothing read; this process began at `since_ms` of the monotonic clock."""
        self._row = RowReader(path, partial(from_json, ServerStatus, known=Unchanged()))
        self._boot = boot
        self._since_ms = since_ms

    def read(self) -> ServerStatus | None:
        """Returns the newest status of this node's living server; None if there is none yet."""
        try:
            status = self._row.read()
        except MalformedError:
            log.exception("the server's row cannot be read")
            return None
        if status is None:
            return None
        is_ours = status.heartbeat.boot == self._boot and status.monotonic_ms >= self._since_ms
        return status if is_ours else None
