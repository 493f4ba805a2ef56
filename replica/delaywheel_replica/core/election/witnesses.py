"""Checks that the control topic still has all that nodes have read there.

A beat tells what its node knows to be committed: the last number that the node was given, how far
progress has come, and the floor. A topic that was lost, or made anew, would be taken for an empty
cluster's: its wheels would never be forwarded, and the floor would pass them. One that lost its
end, in an unclean election or by being restored, would have everything since then forwarded again.

So a topic is held against heartbeats:

| by | when | which heartbeats | what contradicts them |
|---|---|---|---|
| a candidate | its own marks stand newest | those of before it began to read | has lost something |
| a leader | each tick | the newest | was overtaken, or has lost something: it stands by |

Invariants, which this hangs on:

- What a beat tells was committed before it was told: a follower reads what is visible, and a leader
  tells of a transaction when its commit is reported.
- A candidate's inits have ended every older transaction. So if nobody overtook it (its marks stand
  newest), what was committed before it began to read stands in what it reads.
- Only who led later can know more than a leader. That is decided by Kafka, not here: the leader
  leaves office, and names nothing lost before it has read the topic as a candidate again.

Whoever is merely behind, or was overtaken, therefore never says that something was lost.
"""

from collections.abc import Mapping

from delaywheel_replica.core.protocol.control import ControlState, NodeRecord
from delaywheel_replica.core.protocol.heartbeat import Heartbeat


def contradiction(state: ControlState, heartbeats: Mapping[str, Heartbeat]) -> str | None:
    """Describes what the control topic lacks although a heartbeat proves it was there.

    Args:
        state: what was read, or is committed since.
        heartbeats: of some nodes; those from a storage other than the known one say nothing
            of its number.
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


def _lost_its_end(node: str, what: str, told: object, known: object) -> str:
    return (
        f"node {node} has read of {what} {told}, and the control topic knows of {known}:"
        " it lost its end, or is another cluster's"
    )
