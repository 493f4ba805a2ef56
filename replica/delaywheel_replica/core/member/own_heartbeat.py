"""Builds this node's heartbeat from the state of its parts.

It reports only what is durable and, for the open wheel, what is written: readers may act on it even
if this node has crashed meanwhile.
"""

from typing import Final

from delaywheel.identity import WheelId
from delaywheel_replica.core.node.events import Effect, Send
from delaywheel_replica.core.node.heard_heartbeats import HeardHeartbeats
from delaywheel_replica.core.node.shared_state import Known
from delaywheel_replica.core.protocol.control import CONTROL_VERSION
from delaywheel_replica.core.protocol.heartbeat import (
    LONGEST_OBJECTION,
    Heartbeat,
    LeaderTerm,
    WheelHeartbeat,
)
from delaywheel_replica.core.protocol.messages import Gossip
from delaywheel_replica.core.wheels.inventory import Inventory
from delaywheel_replica.core.wheels.node_file import NodeFile
from delaywheel_replica.core.wheels.open_wheel import CurrentWheel
from delaywheel_replica.core.wheels.verifying import Verifying

ALL_EVERY: Final = 5
"""One in this many heartbeats carries everything that is known of the others."""


class OwnHeartbeat:
    """Builds the heartbeats of one node."""

    def __init__(
        self,
        known: Known,
        hearing: HeardHeartbeats,
        node_file: NodeFile,
        inventory: Inventory,
        current: CurrentWheel,
        verifying: Verifying,
    ) -> None:
        self._known = known
        self._hearing = hearing
        self._node_file = node_file
        self._inventory = inventory
        self._current = current
        self._verifying = verifying
        self._count = 0
        self._since_all = 0

    def heartbeat(self) -> Heartbeat:
        """Builds the node's current heartbeat, with the next order number."""
        known, state = self._known, self._known.state
        self._count += 1
        return Heartbeat(
            node=state.node,
            storage=known.storage,
            boot=state.boot_id,
            wall_ms=known.wall_ms,
            open=self._current.reported_open,
            spare=None if state.spare is None else state.spare.wheel,
            last_number=state.last_number,
            draining=self._node_file.is_draining,
            complete=known.is_complete and not self._verifying.wheels,
            wheels=self._wheels(),
            start=state.starts,
            count=self._count,
            saves=state.saves,
            floor=known.floor,
            reached=known.reached,
            stands=known.stands,
            term=self._term(),
            heard=self._hearing.heard_directly(known.now_ms),
            disk_out=known.disk.is_out,
            verifying=self._verifying.wheels,
            control_version=CONTROL_VERSION,
        )

    def gossip(self) -> list[Effect]:
        """Sends the own heartbeat to every other node at once."""
        if not self._hearing.others:
            return []
        gossip = Gossip(self.heartbeat())
        return [Send(peer, gossip) for peer in self._hearing.others]

    def tick(self) -> list[Effect]:
        """Sends it with heartbeats of others that a receiver may not have heard."""
        hearing, now_ms = self._hearing, self._known.now_ms
        if not hearing.others:
            return []
        carries_all = self._since_all == 0
        self._since_all = (self._since_all + 1) % ALL_EVERY
        heartbeat = self.heartbeat()
        whole = Gossip(heartbeat, tuple(hearing.heartbeats().values()) if carries_all else ())
        sent: list[Effect] = []
        for peer in hearing.others:
            unheard = () if carries_all else hearing.unheard_by(peer, now_ms)
            sent.append(Send(peer, Gossip(heartbeat, unheard) if unheard else whole))
        return sent

    def _wheels(self) -> dict[WheelId, WheelHeartbeat]:
        heartbeats = dict(self._inventory.heartbeats())
        spare, wheel = self._known.state.spare, self._current.wheel
        if wheel is not None:
            heartbeats[wheel] = self._current.heartbeat()
        if spare is not None:
            heartbeats[spare.wheel] = WheelHeartbeat.empty(spare.seal_slot)
        return heartbeats

    def _term(self) -> LeaderTerm | None:
        term = self._known.term
        if term is None or term.epoch is None:
            return None
        objection = term.halves_objection
        return LeaderTerm(
            term.epoch,
            term.fences,
            term.limits,
            None if objection is None else objection[:LONGEST_OBJECTION],
        )
