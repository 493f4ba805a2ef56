"""The values that a scrape of this node's metrics reads.

The two status files are read as other processes read them, so that the metrics show what those act
on, and the files' ages show whether they are still written. Everything else is asked of the objects
that know it.
"""

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.folder.status_file import RowReader
from delaywheel.storage.writing.dial import DialView, Pending
from delaywheel_replica.config import Config
from delaywheel_replica.core.protocol.codec import MalformedError, from_json
from delaywheel_replica.core.protocol.heartbeat import WheelHeartbeat
from delaywheel_replica.core.protocol.status_files import ServerStatus
from delaywheel_replica.handover.row_places import server_row_path
from delaywheel_replica.peers.states import PeerState
from delaywheel_replica.process.topic_counts import TOPICS_AT_MOST
from delaywheel_replica.server.access.callers import Access
from delaywheel_replica.server.certificates import NodeCertificates
from delaywheel_replica.server.ledger.publisher import BooksState
from delaywheel_replica.server.metrics.processes import Process, look_at
from delaywheel_replica.server.node.alone import alone_messages
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.node_view import NodeView, done_slot, monotonic_ms, wall_ms
from delaywheel_replica.server.node.pulse import Pulse
from delaywheel_replica.server.node.refusals import Refusal
from delaywheel_replica.server.node.same_access import SameAccess

SERVER: Final = "server"
CLEANER: Final = "cleaner"


@dataclass(kw_only=True)
class Sources:
    """The objects that provide the values. They are asked on other threads; none may block."""

    config: Config
    refusal: Callable[[], Refusal | None]
    """Returns why the node accepts no messages now; None: it does."""
    view: NodeView
    in_flight_bytes: Callable[[], int]
    """Returns the bytes of requests not answered yet."""
    handles: HandleCache
    counts: NodeCounts
    """Read while counting continues."""
    books: Callable[[], BooksState]
    """Returns how the ledger's publication goes."""
    pulse: Pulse
    """Checks the event loop and the in-sync set."""
    undeletable: Undeletable
    max_caller_connections: int
    access: Access
    same_access: SameAccess
    certificates: NodeCertificates | None = None
    """What callers are shown; None: nothing."""

    def __post_init__(self) -> None:
        data = self.config.data_dir
        self.started_s = time.time()
        self.disk = PosixDisk()
        self.dial = DialView(self.disk, data)
        self._row = RowReader(server_row_path(data), partial(from_json, ServerStatus))

    def own_row(self) -> ServerStatus | None:
        """Reads this process's own status; None before its first."""
        try:
            status = self._row.read()
        except MalformedError:  # of an earlier release: the first heartbeat replaces it
            return None
        return status if status is not None and status.pid == os.getpid() else None


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The file system of the data folder; no messages are accepted with less free than reserved.

    Attributes:
        free_bytes: The space that we may still use.
        free_inodes: How many files can still be created; None: there is no such limit.
    """

    size_bytes: int
    free_bytes: int
    free_inodes: int | None
    reserve_bytes: int


class Scrape:
    """One scrape. Values that several metrics need are read once.

    Attributes:
        monotonic_ms: Now, by the clock of the status files' timestamps.
        cleaner: The cleaner's last status; None: none was written in this boot of the machine.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.wall_ms = wall_ms()
        self.monotonic_ms = monotonic_ms()
        self.cleaner = sources.view.cleaner.status

    @cached_property
    def server(self) -> ServerStatus | None:
        """This process's own status; None before its first."""
        return self.sources.own_row()

    @property
    def own_open(self) -> WheelHeartbeat | None:
        """The open wheel of this node."""
        heartbeat = None if self.server is None else self.server.heartbeat
        return (
            None
            if heartbeat is None or heartbeat.open is None
            else heartbeat.wheels.get(heartbeat.open)
        )

    @cached_property
    def refusal(self) -> Refusal | None:
        """Why the node accepts no messages now; None: it does."""
        return self.sources.refusal()

    @cached_property
    def peers(self) -> Mapping[str, PeerState]:
        """The state of the connection to each peer."""
        return self.sources.view.peers()

    @cached_property
    def books(self) -> BooksState:
        """The state of the ledger's publication."""
        return self.sources.books()

    @cached_property
    def pending(self) -> tuple[Pending, ...]:
        """Pending messages, by how far ahead they are due: some milliseconds for a long span."""
        return self.sources.dial.pending(self.wall_ms // 1000, self._done_slot)

    @cached_property
    def alone_messages(self) -> int | None:
        """Pending messages that no other node has; None before the first status."""
        if self.server is None:
            return None
        data = self.sources.config.data_dir
        return alone_messages(self.sources.disk, data, self.cleaner, self.server)

    @cached_property
    def pending_by_topic(self) -> Mapping[str, int]:
        """Pending messages that this node accepted, by topic."""
        pending = self.sources.counts.pending
        return {} if pending is None else pending.read(self._done_slot, most=TOPICS_AT_MOST)

    @property
    def _done_slot(self) -> int:
        progress = None if self.cleaner is None else self.cleaner.progress
        return done_slot(progress, self.wall_ms)

    @cached_property
    def disk(self) -> DiskSpace:
        """The file system's space."""
        disk, config = self.sources.disk, self.sources.config
        return DiskSpace(
            size_bytes=shutil.disk_usage(config.data_dir).total,
            free_bytes=disk.free_bytes(config.data_dir),
            free_inodes=disk.free_inodes(config.data_dir),
            reserve_bytes=config.disk_reserve_bytes,
        )

    @cached_property
    def processes(self) -> Mapping[str, Process]:
        """Those that run; a silent cleaner may be dead, and its pid another one's."""
        pids = {SERVER: os.getpid()}
        if self.cleaner is not None and self.cleaner.is_fresh(self.monotonic_ms):
            pids[CLEANER] = self.cleaner.pid
        found = {name: look_at(pid) for name, pid in pids.items()}
        return {name: process for name, process in found.items() if process is not None}
