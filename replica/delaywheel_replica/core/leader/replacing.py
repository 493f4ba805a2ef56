"""What is at stake when a node's storage is replaced, or a node is removed.

The wheels that count on its storage are closed without it: it no longer holds anything of them, and
never will. What no other member is known to hold is then given up and reported as lost
(core/leader/lost_frames.py).

| of a wheel that counts on it | at risk |
|---|---|
| frames up to V, the limit, or what any node reports; to T | those beyond what one other holds |
| frames that are committed as lost | none: they are lost already |
| frames that were never reported | unknown: they vanish |

A frame at risk may have been forwarded before: its number alone does not show it.
"""

from collections.abc import Mapping
from dataclasses import replace

from delaywheel.identity import WheelId
from delaywheel_replica.core.leader.holders import member_prefixes
from delaywheel_replica.core.protocol.control import REMOVED, ControlState, WheelRecord
from delaywheel_replica.core.protocol.heartbeat import Heartbeat


def frames_at_risk(
    state: ControlState, node: str, heartbeats: Mapping[str, Heartbeat]
) -> dict[WheelId, int]:
    """Returns how many frames of each wheel only that node may hold, on the storage it has."""
    after = _with_removed(state, node)
    return {
        wheel: _at_risk(after, wheel, record, heartbeats)
        for wheel, record in sorted(state.wheels.items())
        if node in state.holders(record)
    }


def _with_removed(state: ControlState, node: str) -> ControlState:
    known = state.nodes.get(node)
    if known is None:
        return state
    return replace(state, nodes={**state.nodes, node: replace(known, storage=REMOVED)})


def _at_risk(
    after: ControlState, wheel: WheelId, record: WheelRecord, heartbeats: Mapping[str, Heartbeat]
) -> int:
    taken = 0 if after.progress is None else after.progress.seq(wheel)
    reported = [
        max(heartbeat.wheels[wheel].applied, heartbeat.wheels[wheel].high_watermark)
        for heartbeat in heartbeats.values()
        if wheel in heartbeat.wheels
    ]
    end = max([taken, record.limit, *reported])
    if record.closed_at is not None:
        end = record.closed_at  # nothing beyond it counts
    held = max(member_prefixes(after, wheel, record, heartbeats), default=0)
    return max(0, end - held - len(after.lost.seqs(wheel).within(held + 1, end)))
