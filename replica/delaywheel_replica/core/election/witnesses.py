"""Checks that the control topic still has all that nodes have read there.

If the topic was lost, or recreated, it would look like an empty cluster's: its wheels would never
be forwarded, and the floor would pass them. If it lost its end, in an unclean election or by a
restore, everything since then would be forwarded again. So it is compared with what heartbeats
report to be committed; docs/PROTOCOL.md, "A control topic that lost something", says which, and
when.

This rests on these invariants:

- What a heartbeat reports was committed before: a follower reads what is visible, and a leader
  reports a transaction once its commit is confirmed.
- A candidate's inits have ended every older transaction. So if no other candidate overtook it (its
  marks are the newest), what was committed before it began to read is in what it reads.
- Only a later leader can know more than a leader. Kafka decides that, not this check: the leader
  ends its term, and declares nothing lost before it has read the topic as a candidate again.

So a node that is merely behind, or was overtaken, never claims that something was lost.
"""

from collections.abc import Mapping

from delaywheel_replica.core.protocol.control import ControlState, NodeRecord
from delaywheel_replica.core.protocol.heartbeat import Heartbeat


def contradiction(state: ControlState, heartbeats: Mapping[str, Heartbeat]) -> str | None:
    """Describes what the control topic is missing although a heartbeat proves it was there.

    Heartbeats from a storage other than the known one say nothing of its number.
    """
    progress = state.progress
    if progress is None and state.wheels:
        return (
            f"the control topic has {len(state.wheels)} wheels and no progress: part of it is lost"
        )
    for node, heartbeat in heartbeats.items():
        known = state.nodes.get(node, NodeRecord(heartbeat.storage, 0))
        if known.storage == heartbeat.storage and known.last_number < heartbeat.last_number:
            return (
                f"node {node} was given wheel {node}.{heartbeat.last_number}, and the control topic"
                f" knows of none above {known.last_number}: it was lost, or is another cluster's"
            )
        reached = None if progress is None else progress.reached
        if heartbeat.reached is not None and (
            reached is None or reached.order < heartbeat.reached.order
        ):
            return _lost_its_end(node, "progress", heartbeat.reached, reached)
        floor = None if progress is None else progress.floor
        if heartbeat.floor is not None and (floor is None or floor < heartbeat.floor):
            return _lost_its_end(node, "floor", heartbeat.floor, floor)
    return None


def _lost_its_end(node: str, what: str, reported: object, known: object) -> str:
    return (
        f"node {node} has read of {what} {reported}, and the control topic knows of {known}:"
        " it lost its end, or is another cluster's"
    )
