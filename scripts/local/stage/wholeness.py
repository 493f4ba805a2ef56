"""Whether a cluster is complete: all nodes accept messages, agree on a leader, hold everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from local.loopback.cluster import described
from local.loopback.node import Node

if TYPE_CHECKING:
    from delaywheel_proto.v1.delaywheel_pb2 import DescribeClusterResponse


class Look(NamedTuple):
    """What all nodes report.

    Attributes:
        leader: The leading node, by the greatest epoch reported; empty: none leads.
        epoch: Of its leadership; -1: none is known.
        missing: What keeps the cluster from being whole, in words.
    """

    leader: str
    epoch: int
    missing: tuple[str, ...]


def look(nodes: Sequence[Node]) -> Look:
    """Asks every node."""
    answers = {node.id: described(node.address) if node.is_up else None for node in nodes}
    leaders = {
        (answer.leader.epoch, answer.leader.node)
        for answer in answers.values()
        if answer is not None and answer.HasField("leader")
    }
    missing = [line for node, answer in answers.items() for line in _missing(node, answer)]
    if len(leaders) != 1:
        missing.append(f"leaders: {sorted(leaders)}")
    epoch, leader = max(leaders, default=(-1, ""))
    return Look(leader, epoch, tuple(missing))


def _missing(node: str, answer: DescribeClusterResponse | None) -> list[str]:
    """Returns what a node is missing."""
    from delaywheel_proto.v1 import delaywheel_pb2 as pb  # noqa: PLC0415 - not for `--help`

    if answer is None:
        return [f"{node} does not answer"]
    everybody = {member.node for member in answer.members}
    missing = [
        f"{node} sees {member.node} away, draining or incomplete"
        for member in answer.members
        if not (member.reachable and member.accepting and member.complete)
    ]
    if not answer.HasField("leader"):
        missing.append(f"{node} knows no leader")
    in_sync = {
        name
        for row in answer.wheels
        if row.node == node and row.state == pb.WHEEL_STATE_OPEN
        for name in row.in_sync
    }
    if in_sync != everybody:
        behind = ", ".join(sorted(everybody - in_sync))
        missing.append(f"not in sync with {node}'s wheel: {behind}")
    return missing
