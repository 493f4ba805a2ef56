"""The state of this node when its metrics are scraped, collected once for each scrape.

The two status files are read as other processes read them, so that the metrics show what those act
on, and the files' ages show whether they are still written. Everything else comes through
`Sources`.
"""

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.folder.status_file import RowReader
from delaywheel.storage.writing.dial import DialView, Pending
from delaywheel_replica.config import Config
from delaywheel_replica.core.protocol.codec import MalformedError, from_json
from delaywheel_replica.core.protocol.heartbeat import WheelHeartbeat
from delaywheel_replica.core.protocol.histogram import Histogram
from delaywheel_replica.core.protocol.status_files import CleanerStatus, ServerStatus
from delaywheel_replica.peers.states import PeerState
from delaywheel_replica.row_places import server_row_path
from delaywheel_replica.server.ledger.publisher import BooksState, Publishing
from delaywheel_replica.server.metrics.processes import Process, look_at
from delaywheel_replica.server.node.counts import Counts
from delaywheel_replica.server.node.node_view import NodeView, done_slot, monotonic_ms, wall_ms
from delaywheel_replica.server.node.pulse import Pulse
from delaywheel_replica.server.node.refusals import Refusal

SERVER: Final = "server"
CLEANER: Final = "cleaner"


class Refusing(Protocol):
    """Knows whether the node accepts messages."""

    def refusal(self) -> Refusal | None:
        """Why the node accepts no messages now; None: it does."""


class InFlight(Protocol):
    """Counts requests."""

    in_flight_bytes: int


@dataclass(frozen=True, slots=True)
class Sources:
    """The objects that know the facts. All are asked on a separate thread and must not block.

    Attributes:
        service: Accepts messages, or refuses them.
        view: What is known of the node, its cleaner and its peers.
        admission: Counts the bytes of requests not answered yet.
        handles: The open slot files.
        counts: What the server counted.
        books: Publishes the ledger.
        max_caller_connections: How many callers may be connected.
    """

    service: Refusing
    view: NodeView
    admission: InFlight
    handles: HandleCache
    counts: Counts
    books: Publishing
    max_caller_connections: int


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The file system of the data folder.

    Attributes:
        size_bytes: Its size.
        free_bytes: The space that we may still use.
        free_inodes: How many files can still be created; None: there is no such limit.
        reserve_bytes: With less free space, no messages are accepted.
    """

    size_bytes: int
    free_bytes: int
    free_inodes: int | None
    reserve_bytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """The state of the node at one moment.

    Attributes:
        node: Its id.
        cluster: Its cluster's id.
        members: The number of nodes of the cluster.
        min_insync: W.
        started_s: When the server process started, Unix seconds.
        wall_ms: Now, by the wall clock.
        monotonic_ms: Now, by the clock of the status files' timestamps.
        server: This process's own status; None before its first.
        cleaner: The cleaner's last status; None: none was written in this boot of the machine.
        refusal: Why the node accepts no messages now; None: it does.
        in_sync: Members in sync with the open wheel; empty: none is open.
        in_sync_changes: How often that set changed since the server started.
        in_flight_bytes: The bytes of requests not answered yet.
        counts: See `Sources`; read while counting continues.
        loop_lags: How late the event loop's timer came.
        greatest_lag_us: The greatest lag of the last minute.
        pending: Pending messages, by how far ahead they are due.
        pending_by_topic: Pending messages that this node accepted, by topic.
        disk: The file system's space.
        open_slot_files: Files kept open for writing.
        max_slot_files: How many may be kept open.
        max_caller_connections: See `Sources`.
        processes: The running ones: server and cleaner.
        peers: The state of the connection to each peer.
        books: The state of the ledger's publication.
    """

    node: str
    cluster: str
    members: int
    min_insync: int
    started_s: float
    wall_ms: int
    monotonic_ms: int
    server: ServerStatus | None
    cleaner: CleanerStatus | None
    refusal: Refusal | None
    in_sync: frozenset[str]
    in_sync_changes: int
    in_flight_bytes: int
    counts: Counts
    loop_lags: Histogram
    greatest_lag_us: int
    pending: tuple[Pending, ...]
    pending_by_topic: Mapping[str, int]
    disk: DiskSpace
    open_slot_files: int
    max_slot_files: int
    max_caller_connections: int
    processes: Mapping[str, Process]
    peers: Mapping[str, PeerState]
    books: BooksState

    @property
    def own_open(self) -> WheelHeartbeat | None:
        """The open wheel of this node."""
        heartbeat = None if self.server is None else self.server.heartbeat
        return (
            None
            if heartbeat is None or heartbeat.open is None
            else heartbeat.wheels.get(heartbeat.open)
        )


class Gatherer:
    """Collects the facts. For any thread; one at a time."""

    def __init__(self, config: Config, sources: Sources, pulse: Pulse) -> None:
        self._config = config
        self._sources = sources
        self._pulse = pulse
        self._disk = PosixDisk()
        self._dial = DialView(self._disk, config.data_dir)
        self._row = RowReader(server_row_path(config.data_dir), partial(from_json, ServerStatus))
        self._started_s = time.time()

    def gather(self) -> Facts:
        """Collects everything in some milliseconds, most of them for the dial of a long span."""
        config, sources, pulse = self._config, self._sources, self._pulse
        server, cleaner = self._own_row(), sources.view.cleaner.status
        now_ms = wall_ms()
        done = done_slot(None if cleaner is None else cleaner.progress)
        by_topic = sources.counts.pending
        return Facts(
            node=config.node_id,
            cluster=config.cluster_id,
            members=len(config.members),
            min_insync=config.min_insync_members,
            started_s=self._started_s,
            wall_ms=now_ms,
            monotonic_ms=monotonic_ms(),
            server=server,
            cleaner=cleaner,
            refusal=sources.service.refusal(),
            in_sync=sources.view.in_sync(),
            in_sync_changes=pulse.in_sync_changes,
            in_flight_bytes=sources.admission.in_flight_bytes,
            counts=sources.counts,
            loop_lags=pulse.lags.read(),
            greatest_lag_us=pulse.greatest_lag_us,
            pending=self._dial.pending(now_ms // 1000, done),
            pending_by_topic={} if by_topic is None else by_topic.read(done),
            disk=_space(self._disk, config),
            open_slot_files=len(sources.handles),
            max_slot_files=sources.handles.capacity,
            max_caller_connections=sources.max_caller_connections,
            processes=_processes(cleaner),
            peers=sources.view.peers(),
            books=sources.books.state(),
        )

    def _own_row(self) -> ServerStatus | None:
        try:
            status = self._row.read()
        except MalformedError:  # of an earlier release: the first heartbeat replaces it
            return None
        return status if status is not None and status.pid == os.getpid() else None


def _space(disk: PosixDisk, config: Config) -> DiskSpace:
    data: Path = config.data_dir
    return DiskSpace(
        size_bytes=shutil.disk_usage(data).total,
        free_bytes=disk.free_bytes(data),
        free_inodes=disk.free_inodes(data),
        reserve_bytes=config.disk_reserve_bytes,
    )


def _processes(cleaner: CleanerStatus | None) -> dict[str, Process]:
    """Reads the processes; a silent cleaner may be dead and its pid reused."""
    pids = {SERVER: os.getpid()}
    if cleaner is not None and cleaner.is_fresh(monotonic_ms()):
        pids[CLEANER] = cleaner.pid
    found = {name: look_at(pid) for name, pid in pids.items()}
    return {name: process for name, process in found.items() if process is not None}
