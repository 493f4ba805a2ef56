"""The driver's environment in a real process: see `outside.Outside`.

It also logs what happens to the node's wheels, which operators follow.
"""

import asyncio
import os

from delaywheel.identity import WheelId
from delaywheel.storage.folder.node_state import NodeState
from delaywheel.storage.frames.bundle import WrittenGroup
from delaywheel.storage.frames.columns import Columns
from delaywheel_replica.core.node.events import (
    Acknowledge,
    Broken,
    Closed,
    Event,
    Failed,
    Mirrored,
    Opened,
    Saved,
    Verified,
    WheelDeleted,
)
from delaywheel_replica.core.protocol.messages import PeerMessage
from delaywheel_replica.peers.network import PeerNetwork
from delaywheel_replica.peers.states import PeerState
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.commit.committer import Answers
from delaywheel_replica.server.commit.outside import Job
from delaywheel_replica.server.commit.threads import HeartbeatThread, StoreThread
from delaywheel_replica.server.commit.writing import settle
from delaywheel_replica.server.ledger.rows import CountedLedger
from delaywheel_replica.server.node.node_view import monotonic_ms, wall_ms

_log = get_logger(__name__)


class Surroundings:
    """Clocks, threads, network, callers and books.

    Attributes:
        pid: The process's id.
        network: The network to the other nodes; None: there are none, or not yet.
        left: Set while node.json names no wheel as open. For the event loop.
    """

    def __init__(
        self,
        *,
        store_thread: StoreThread,
        heartbeat_thread: HeartbeatThread,
        ledger: CountedLedger,
        loop: asyncio.AbstractEventLoop,
        has_left: bool,
    ) -> None:
        self.pid = os.getpid()
        self.network: PeerNetwork | None = None
        self.left = asyncio.Event()
        if has_left:
            self.left.set()
        self._store_thread = store_thread
        self._heartbeat_thread = heartbeat_thread
        self._ledger = ledger
        self._loop = loop
        self._spare: WheelId | None = None

    def peers(self) -> dict[str, PeerState]:
        """The state of the connection to each other node."""
        return {} if self.network is None else self.network.states()

    def now_ms(self) -> int:
        """The monotonic clock."""
        return monotonic_ms()

    def wall_ms(self) -> int:
        """The wall clock."""
        return wall_ms()

    def enqueue(self, job: Job) -> None:
        """Appends a job to the queue."""
        self._store_thread.put(job)

    def do_jobs(self, *, here: bool) -> None:
        """Carries out the jobs, on the store's thread unless the caller does it."""
        self._store_thread.do_jobs(here=here)

    def send(self, peer: str, message: PeerMessage) -> None:
        """Sends a message to another node."""
        if self.network is not None:
            self.network.send(peer, message)

    def write_status(self) -> None:
        """Has the status written."""
        self._heartbeat_thread.write_status()

    def acknowledged(self, effect: Acknowledge, answers: Answers) -> None:
        """Answers callers."""
        del effect
        self.answer(answers)

    def answer(self, answers: Answers) -> None:
        """Answers callers, on the event loop."""
        if answers:
            self._loop.call_soon_threadsafe(settle, answers)

    def enter(
        self,
        wheel: WheelId,
        columns: Columns | None,
        group: WrittenGroup,
        accepted_at_ms: int,
    ) -> None:
        """Enters frames into the ledger."""
        self._ledger.enter(wheel, columns, group, accepted_at_ms)

    def happened(self, event: Event) -> None:
        """Logs events of wheels, and refusals of the disk."""
        match event:
            case Opened():
                _log.info("wheel opened", wheel=str(event.wheel))
            case Broken():
                _log.error("wheel broken", wheel=str(event.wheel), cause=event.cause)
            case Closed():
                card, final_seq = event.held.card, event.held.final_seq
                _log.info("wheel closed", wheel=str(card.wheel), final_seq=final_seq)
            case WheelDeleted():
                _log.info("wheel deleted", wheel=str(event.wheel))
            case Failed():
                step = type(event.effect).__name__
                _log.warning("disk refuses", step=step, error=event.cause)
            case Saved():
                self._saved(event.state)
            case Mirrored():
                card = event.held.card
                _log.debug("wheel held", wheel=str(card.wheel), seq=event.held.applied)
            case Verified():
                card = event.held.card
                _log.info("wheel verified", wheel=str(card.wheel), seq=event.held.applied)
            case _:
                pass

    def _saved(self, state: NodeState) -> None:
        spare = None if state.spare is None else state.spare.wheel
        if spare is not None and spare != self._spare:
            _log.info("wheel given", wheel=str(spare))
        self._spare = spare
        self._loop.call_soon_threadsafe(self.left.clear if state.open else self.left.set)
