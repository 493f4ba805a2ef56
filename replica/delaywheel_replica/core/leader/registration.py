"""Registering wheels: a wheel exists once the leader has committed its record.

The leader gives the number, one above the last that was ever given to this node id, whatever
happened to the node's disk since, and above what the node says it has used: so no name is ever used
twice. An unclosed wheel above what the node says was registered for it before and the answer was
lost, so a repeated request gets the same answer and no wheel is left unused. docs/PROTOCOL.md,
"Registration", has the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.control import (
    ROLLED_BACK,
    ControlRecord,
    ControlState,
    NodeRecord,
    WheelRecord,
    node_record,
    wheel_record,
)

MAX_WHEELS = 900
"""The most wheels of a cluster; each node has an equal share. Status files name every wheel."""


class RegistrationRefusal(StrEnum):
    """Why a node gets no wheel."""

    STORAGE_REPLACED = "STORAGE_REPLACED"
    """Another disk answers under this node id: it takes no part until the operator replaces
    the node."""
    STORAGE_ROLLED_BACK = "STORAGE_ROLLED_BACK"
    """The node runs on an older copy of its data folder."""
    TOO_MANY_WHEELS = "TOO_MANY_WHEELS"
    """The node started or broke very often, and messages of each of its wheels are pending: it
    gets the next one when one of these is done with."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The answer to a registration: this wheel, once these records are committed."""

    wheel: WheelId
    records: list[ControlRecord]


def wheels_of_a_node(nodes: int) -> int:
    """Returns how many wheels a node may have in a cluster of this many nodes."""
    return max(2, MAX_WHEELS // max(nodes, 1))


def register(
    state: ControlState,
    node: str,
    storage: str,
    last_number: int,
    *,
    saves: int,
    members: Mapping[str, str],
    min_insync: int,
    floor: int,
) -> Registered | RegistrationRefusal:
    """Assigns a node its next wheel, or says why not.

    Args:
        state: What is committed, with what the same transaction has changed already.
        last_number: The last number of its own that the node knows, 0 for none.
        saves: How often its node.json was saved.
        members: Node -> storage uuid of the nodes that will hold the wheel.
        floor: The floor of the same transaction; the new wheel never accepts a frame below it.
    """
    known = state.nodes.get(node, NodeRecord(storage, 0))
    if storage == ROLLED_BACK:
        return RegistrationRefusal.STORAGE_ROLLED_BACK
    if known.storage != storage:
        return RegistrationRefusal.STORAGE_REPLACED
    waiting = [
        wheel
        for wheel, record in state.wheels.items()
        if wheel.node == node
        and wheel.number > last_number
        and record.closed_at is None
        and dict(record.members) == dict(members)
        and record.min_insync == min_insync
    ]
    if waiting:
        return Registered(max(waiting), [])
    if sum(wheel.node == node for wheel in state.wheels) >= wheels_of_a_node(len(members)):
        return RegistrationRefusal.TOO_MANY_WHEELS
    wheel = WheelId(node, max(known.last_number, last_number) + 1)
    given = NodeRecord(storage, wheel.number, max(known.saves, saves))
    record = WheelRecord(members=dict(members), min_insync=min_insync, seal_slot=floor)
    return Registered(
        wheel,
        [node_record(node, given), wheel_record(wheel, record)],
    )
