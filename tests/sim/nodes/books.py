"""The ledger's publication at a simulated server, as far as the floor waits for it.

As `delaywheel_replica.server.ledger.publisher` does it, without files: each node publishes to a
place of its own. What is in place there, and what any node reported as published, lies on the
node's disk, and is lost with it; everything else is forgotten with the process. A frame that is to
be published must be readable, unless it is known to need no publishing.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from delaywheel.identity import WheelId
from delaywheel_replica.server.ledger.assignment import Publishable, publishable, published_seqs
from delaywheel_replica.server.ledger.source import LedgerSource, UnreadableFrame

if TYPE_CHECKING:
    from sim.nodes.server import SimServer


class SimBooks:
    """The publication by one life of a server."""

    def __init__(self, server: SimServer) -> None:
        self._server = server
        self._node = server.node
        self._began_ms = server.now_ms()
        self._reported: dict[WheelId, int] = {}

    def publish(self, *, leads: bool) -> None:
        """Publishes what can be, and reports it; notes what any node reported."""
        server, row = self._server, self._server.row
        if row is None:
            return
        if not server.world.ledger_away:
            heard_for_ms = server.now_ms() - self._began_ms
            found = publishable(row, server.cleaner_row, leads=leads, heard_for_ms=heard_for_ms)
            for wheel, each in found.items():
                with suppress(OSError):  # the next look tries again
                    self._publish(wheel, each, is_open=wheel == row.heartbeat.open)
        reported = published_seqs(row)
        for wheel, seq in self.noted().items():
            if seq > reported.get(wheel, seq):
                server.driver.published(wheel, seq)
        self._remember(reported)

    def noted(self) -> dict[WheelId, int]:
        """Up to where any node reported each wheel as published, as this node has noted it."""
        return self._node.reported_published

    def _remember(self, reported: dict[WheelId, int]) -> None:
        noted, own = self.noted(), self._reported
        self._node.reported_published = {
            wheel: max(seq, own.get(wheel, 0), noted.get(wheel, 0))
            for wheel, seq in reported.items()
        }
        for known in (self._node.published, own):
            for wheel in known.keys() - reported.keys():
                del known[wheel]

    def _publish(self, wheel: WheelId, found: Publishable, *, is_open: bool) -> None:
        placed = self._node.published
        if wheel not in placed:
            placed[wheel] = self._needless(wheel, 1, found)
        if found.last_seq > placed[wheel]:
            # Of what this process has accepted there are rows.
            placed[wheel] = found.last_seq if is_open else self._read(wheel, found)
        if placed[wheel] > self._reported.get(wheel, 0):
            self._reported[wheel] = placed[wheel]
            self._server.driver.published(wheel, placed[wheel])

    def _read(self, wheel: WheelId, found: Publishable) -> int:
        """Returns up to where a wheel's frames are published, once those behind are read."""
        seq = gone_to = self._node.published[wheel]
        source = LedgerSource(self._node.disk, self._node.data, wheel, [])
        for piece in source.blocks(seq + 1, found.last_seq):
            if isinstance(piece, UnreadableFrame) and (wheel, piece.seq) not in found.lost:
                if piece.seq > gone_to:
                    gone_to = self._needless(wheel, piece.seq, found)
                if piece.seq > gone_to:
                    self._server.driver.unreadable(wheel, piece.seq)
                    return seq
            seq = piece.seq if isinstance(piece, UnreadableFrame) else piece.last_seq
        return seq

    def _needless(self, wheel: WheelId, first_seq: int, found: Publishable) -> int:
        """Returns up to where nothing needs to be published here, as far as that is known."""
        source = LedgerSource(self._node.disk, self._node.data, wheel, [])
        finished = source.finished_to(first_seq, found.floor, found.lost.seqs(wheel))
        reported = max(found.reported_seq, self.noted().get(wheel, 0))
        return min(found.last_seq, max(reported, finished))
