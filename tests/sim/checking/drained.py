"""Check 10: once everything works again, everything completes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from delaywheel.identity import WheelId
from delaywheel.storage.folder import layout
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role
from sim.checking.book import Fate

if TYPE_CHECKING:
    from sim.nodes.node import SimNode
    from sim.nodes.world import World


def why_not_drained(world: World) -> list[str]:
    """Yields what is not done yet; nothing: everything is."""
    why = list(_messages_left(world)) or list(_leader_missing(world))
    if why:
        return why
    for node in world.living():
        row = node.server_row()
        if row is None:
            return [f"{node.name} is not up"]
        why += _node_left(world, node, row.heartbeat)
    return why or list(_control_left(world))


def _messages_left(world: World) -> Iterator[str]:
    if world.clients.busy or world.senders.busy:
        yield f"{world.clients.busy + world.senders.busy} callers are waiting"
    yield from world.ingress.left()
    yield from world.operator.left()
    yield from world.checker.left()
    checks = world.checks
    left = [
        entry
        for entry in world.book.entries.values()
        if entry.fate is Fate.ACKNOWLEDGED and not checks.is_finished(entry)
    ]
    if left:
        yield f"{len(left)} messages are pending, the first {left[0]}"


def _leader_missing(world: World) -> Iterator[str]:
    leaders = [node.name for node in world.living() if _leads(_cleaner_row(node))]
    if len(leaders) != 1:
        yield f"leaders are {leaders}"


def _node_left(world: World, node: SimNode, heartbeat: Heartbeat) -> Iterator[str]:
    """Yields what a node has still to do."""
    name = node.name
    if heartbeat.open is None or heartbeat.spare is None:
        yield f"{name} has open {heartbeat.open}, spare {heartbeat.spare}"
    if not heartbeat.complete:
        yield f"{name} is incomplete"
    missing = {str(wheel): each.missing for wheel, each in heartbeat.wheels.items() if each.missing}
    if missing:
        yield f"{name} lacks {missing}"
    foreign = sorted(
        str(wheel) for wheel in heartbeat.wheels if wheel not in world.checks.control.wheels
    )
    if foreign:
        yield f"{name} keeps {foreign}, which are not registered"
    slots = [
        file
        for file in node.disk.file_names()
        if (slot := layout.slot_of_name(file)) is not None and slot < world.checks.floor
    ]
    if slots:
        yield f"{name} keeps slots {slots} below floor {world.checks.floor}"


def _control_left(world: World) -> Iterator[str]:
    """Yields what the leader has still to do."""
    control = world.checks.control
    named: set[WheelId] = set()
    heartbeats = {node.name: row.heartbeat for node in world.living() if (row := node.server_row())}
    for heartbeat in heartbeats.values():
        named.update(heartbeat.named)
    # Where only a clock that was ahead put something, nothing is done before that time comes; and
    # a due that such a clock gave a message is withdrawn until then.
    last = world.checks.last_slot
    live = world.truth.live(world.checks.floor)
    waiting = {frame.wheel for frame in live if frame.slot > last}
    left = sorted(str(wheel) for wheel in control.wheels if wheel not in named | waiting)
    if left:
        yield f"wheels {left} are registered and not in use"
    standing = [
        key
        for key, record in control.reschedules.items()
        if not (record.is_written and any(due_ms // 1000 > last for due_ms in record.passed))
    ]
    if standing:
        yield f"rescheduled and not settled are {sorted(standing)}"
    if control.lost:
        yield f"lost frames are kept: {sorted(map(str, control.lost))}"
    for heartbeat in heartbeats.values():
        if heartbeat.open is None:
            continue
        applied = heartbeat.wheels[heartbeat.open].applied
        behind = [
            other.node
            for other in heartbeats.values()
            if applied
            and (
                heartbeat.open not in other.wheels or other.wheels[heartbeat.open].prefix < applied
            )
        ]
        if behind:
            yield f"{behind} do not hold {heartbeat.open} up to {applied}"
    last_slot = max((frame.slot for frame in live if frame.slot <= last), default=None)
    if last_slot is not None:
        yield f"floor {world.checks.floor} is not above slot {last_slot}"


def _cleaner_row(node: SimNode) -> CleanerStatus | None:
    return None if node.server is None else node.server.cleaner_row


def _leads(status: CleanerStatus | None) -> bool:
    return status is not None and status.role is Role.LEADING
