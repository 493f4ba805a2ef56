"""What the parts of the server know of the node, and of the cleaner's status."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Final

from delaywheel.storage.folder.status_file import RowReader
from delaywheel_replica.core.election.eligibility import heard_heartbeats
from delaywheel_replica.core.protocol.codec import MalformedError, Unchanged, from_json
from delaywheel_replica.core.protocol.control import Leader
from delaywheel_replica.core.protocol.heartbeat import Heartbeat, LeaderTerm
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role, ServerStatus
from delaywheel_replica.peers.states import PeerState

BEAT_S: Final = 0.1


def wall_ms() -> int:
    """The wall clock in Unix milliseconds."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """The monotonic clock in milliseconds; the same in all processes of this machine."""
    return time.monotonic_ns() // 1_000_000


def storage_is_replaced(cleaner: CleanerStatus | None, node: str, storage: str) -> bool:
    """Whether a node runs on a data folder other than the registered one."""
    known = None if cleaner is None else cleaner.nodes.get(node)
    return known is not None and known.storage != storage


@dataclass(slots=True)
class CleanerView:
    """The last status read of the cleaner.

    Attributes:
        before: What was committed directly before its progress; None: unknown.
        has_died: The process that wrote it was seen to end.
    """

    status: CleanerStatus | None = None
    before: Progress | None = None
    has_died: bool = False

    @property
    def progress(self) -> Progress | None:
        """The last progress that it reported; None: none was read yet."""
        return None if self.status is None else self.status.progress

    def fresh(self) -> CleanerStatus | None:
        """The status if the cleaner is alive; its committed state stays true in any case."""
        status = self.status
        if status is None or self.has_died or not status.is_fresh(monotonic_ms()):
            return None
        return status

    def leading(self) -> CleanerStatus | None:
        """The status if the cleaner is alive and leads."""
        status = self.fresh()
        return status if status is not None and status.role is Role.LEADING else None


@dataclass(slots=True)
class NodeView:
    """What the parts of the server know of the node; `status` makes a new one.

    Attributes:
        in_sync: Returns the members that the open wheel waits for; empty: none is open.
        cleaner: Read by the event loop.
    """

    status: Callable[[], ServerStatus]
    in_sync: Callable[[], frozenset[str]]
    peers: Callable[[], Mapping[str, PeerState]]
    cleaner: CleanerView = field(default_factory=CleanerView)


def heartbeats_heard(status: ServerStatus) -> dict[str, Heartbeat]:
    """The newest heartbeats: this node's own, and those of nodes heard directly."""
    return {
        status.heartbeat.node: status.heartbeat,
        **heard_heartbeats(status, status.monotonic_ms),
    }


def leader_heard(status: ServerStatus) -> Leader | None:
    """The leader heard now, the later of two; possibly this node."""
    terms = _terms_heard(status)
    if not terms:
        return None
    node, term = max(terms, key=lambda heard: (heard[1].epoch, heard[0]))
    return Leader(node, term.epoch)


def halves_objection_heard(status: ServerStatus) -> str | None:
    """Why the leader heard now cannot ask about half messages; None: it can, or none is heard."""
    newest = max((term for _, term in _terms_heard(status)), key=attrgetter("epoch"), default=None)
    return None if newest is None else newest.halves_objection


def _terms_heard(status: ServerStatus) -> list[tuple[str, LeaderTerm]]:
    return [
        (node, heartbeat.term)
        for node, heartbeat in heartbeats_heard(status).items()
        if heartbeat.term is not None
    ]


def ledger_lag_frames(heartbeat: Heartbeat) -> int:
    """How many frames of a node's own wheels are not published in the ledger yet."""
    own = (reported for wheel, reported in heartbeat.wheels.items() if wheel.node == heartbeat.node)
    return sum(max(0, reported.applied - reported.ledger_seq) for reported in own)


def missing_frames(heartbeat: Heartbeat) -> int:
    """How many frames a node should have and cannot read; of many gaps, also what lies between."""
    return sum(len(reported.missing) for reported in heartbeat.wheels.values())


def done_slot(progress: Progress | None, now_ms: int) -> int:
    """The first slot that may hold unfinished messages, other than those of frames beyond V.

    While w lies in the future, forwarding rests, and what was accepted since is not done, whatever
    its due: then it is the present slot.
    """
    return 0 if progress is None else min(progress.due_ms + 1, now_ms) // 1000


class CleanerRow:
    """Reads ``cleaner.row``."""

    def __init__(self, path: Path, boot_id: str) -> None:
        self._row = RowReader(path, partial(from_json, CleanerStatus, known=Unchanged()))
        self._boot_id = boot_id

    def read(self) -> CleanerStatus | None:
        """Returns the newest status of this boot; None if absent or not understood."""
        status = self.read_any()
        return status if status is not None and status.boot == self._boot_id else None

    def read_any(self) -> CleanerStatus | None:
        """Returns the last status ever written here, possibly of an earlier boot."""
        try:
            return self._row.read()
        except MalformedError:
            return None
