"""The parts of a member machine, made together because they refer to one another."""

from dataclasses import dataclass
from typing import Self

from delaywheel_replica.core.member.own_heartbeat import OwnHeartbeat
from delaywheel_replica.core.member.prevote import Prevote
from delaywheel_replica.core.node.events import (
    MemberConfig,
    Started,
)
from delaywheel_replica.core.node.heard_heartbeats import HeardHeartbeats
from delaywheel_replica.core.node.shared_state import Known, PendingEffects
from delaywheel_replica.core.wheels.completeness import Completeness
from delaywheel_replica.core.wheels.fencing import Fencing
from delaywheel_replica.core.wheels.inventory import Inventory
from delaywheel_replica.core.wheels.mirrors import Mirrors
from delaywheel_replica.core.wheels.node_file import NodeFile
from delaywheel_replica.core.wheels.open_wheel import CurrentWheel
from delaywheel_replica.core.wheels.verifying import Verifying


@dataclass(frozen=True, slots=True)
class Parts:
    """See the table in member.py."""

    known: Known
    pending: PendingEffects
    hearing: HeardHeartbeats
    prevote: Prevote
    fencing: Fencing
    completeness: Completeness
    inventory: Inventory
    verifying: Verifying
    current: CurrentWheel
    node_file: NodeFile
    mirrors: Mirrors
    own_heartbeat: OwnHeartbeat

    @classmethod
    def of(cls, config: MemberConfig, started: Started) -> Self:
        """Makes the parts of a node that has just started."""
        known = Known(config, started.state, started.now_ms)
        pending = PendingEffects()
        hearing = HeardHeartbeats(config)
        fencing = Fencing()
        completeness = Completeness(config.node, started.state.boot_id)
        inventory = Inventory(started.held)
        verifying = Verifying(started.unverified, pending)
        current = CurrentWheel(known, hearing)
        node_file = NodeFile(known, fencing, completeness, inventory, current, pending)
        return cls(
            known=known,
            pending=pending,
            hearing=hearing,
            prevote=Prevote(config.node, started.now_ms),
            fencing=fencing,
            completeness=completeness,
            inventory=inventory,
            verifying=verifying,
            current=current,
            node_file=node_file,
            mirrors=Mirrors(known, hearing, fencing, inventory, current, pending, verifying),
            own_heartbeat=OwnHeartbeat(known, hearing, node_file, inventory, current, verifying),
        )
