"""The parts of a member machine, made together because they refer to one another."""

from dataclasses import dataclass
from typing import Self

from delaywheel_replica.core.member.own_heartbeat import OwnHeartbeat
from delaywheel_replica.core.member.prevote import Prevote
from delaywheel_replica.core.node.awaiting import Awaiting
from delaywheel_replica.core.node.events import (
    MemberConfig,
    Started,
)
from delaywheel_replica.core.node.heard_heartbeats import HeardHeartbeats
from delaywheel_replica.core.node.known import Known
from delaywheel_replica.core.wheels.completeness import Completeness
from delaywheel_replica.core.wheels.fencing import Fencing
from delaywheel_replica.core.wheels.inventory import Inventory
from delaywheel_replica.core.wheels.mirrors import Mirrors
from delaywheel_replica.core.wheels.node_file import Keeping
from delaywheel_replica.core.wheels.open_wheel import Line
from delaywheel_replica.core.wheels.verifying import Verifying


@dataclass(frozen=True, slots=True)
class Parts:
    """See the table in member.py."""

    known: Known
    awaiting: Awaiting
    hearing: HeardHeartbeats
    prevote: Prevote
    fencing: Fencing
    completeness: Completeness
    inventory: Inventory
    verifying: Verifying
    line: Line
    keeping: Keeping
    mirrors: Mirrors
    telling: OwnHeartbeat

    @classmethod
    def of(cls, config: MemberConfig, started: Started) -> Self:
        """Makes the parts of a node that has just started."""
        known = Known(config, started.state, started.now_ms)
        awaiting = Awaiting()
        hearing = HeardHeartbeats(config)
        fencing = Fencing()
        completeness = Completeness(config.node, started.state.boot_id)
        inventory = Inventory(started.held)
        verifying = Verifying(started.unverified, awaiting)
        line = Line(known, hearing)
        keeping = Keeping(known, fencing, completeness, inventory, line, awaiting)
        return cls(
            known=known,
            awaiting=awaiting,
            hearing=hearing,
            prevote=Prevote(config.node, started.now_ms),
            fencing=fencing,
            completeness=completeness,
            inventory=inventory,
            verifying=verifying,
            line=line,
            keeping=keeping,
            mirrors=Mirrors(known, hearing, fencing, inventory, line, awaiting, verifying),
            telling=OwnHeartbeat(known, hearing, keeping, inventory, line, verifying),
        )
