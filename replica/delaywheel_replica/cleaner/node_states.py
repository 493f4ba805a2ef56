"""What a leader knows of the nodes, including its own."""

from __future__ import annotations

from delaywheel_replica.core.protocol.control import ControlState
from delaywheel_replica.core.protocol.status_files import ServerStatus


def uses_of(server: ServerStatus) -> list[tuple[object, ...]]:
    """Returns the inputs of a leader's duties."""
    return [
        (
            heartbeat.open,
            heartbeat.spare,
            heartbeat.draining,
            heartbeat.last_number,
            heartbeat.storage,
        )
        for _, heartbeat in sorted(server.heartbeats.items())
    ]


def is_older(state: ControlState, than: ControlState) -> bool:
    """Whether a state was read before another was committed."""
    if than.progress is None:
        return False
    if state.progress is None:
        return True
    return state.progress.order < than.progress.order
