"""What has to happen before another node, or its disk, may be touched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.printing import shapes
from delaywheel_replica.quantities import about, counted

_NAMED: Final = 3


def unsafe(answer: pb.DescribeClusterResponse, node: str = "") -> Iterator[str]:
    """Yields why it is not safe yet to touch a node, one cause a line.

    Safe is: each node answers, some node leads, no message is on one node only, every copy is
    complete, and enough nodes take messages. The copies of the node to be stopped do not count;
    without one, all have to be complete.
    """
    if not answer.HasField("leader"):
        yield "no node leads"
    others = [member for member in answer.members if member.node != node]
    for member in others:
        if member.silent:
            yield f"{member.node} is silent: {member.silent}"
        elif member.report.verifying_wheels:
            yield f"{member.node} verifies {counted(member.report.verifying_wheels, 'wheel')}"
    for member in answer.members:
        if alone := member.report.alone_messages:
            yield f"{counted(alone, 'message')} on 1 node only, {member.node}"
    for wheel in answer.wheels:
        yield from _incomplete(wheel, node)
    taking = sum(member.accepting for member in others)
    wanted = len(others) if not node else answer.min_insync if others else 0
    if taking < wanted:
        besides = f" besides {node}" if node else ""
        yield f"messages are taken by {taking} of {counted(wanted, 'node')}{besides}"


def _incomplete(wheel: pb.WheelStatus, node: str) -> Iterator[str]:
    """Yields the copies of a wheel that are not complete.

    A wheel that still counts on a disk that is gone will be closed; of a closed one such a copy is
    that of a node that was removed.
    """
    if wheel.state == pb.WHEEL_STATE_SPARE:
        return
    for copy in wheel.replicas:
        if copy.node == node or copy.state == pb.REPLICA_STATE_IN_SYNC:
            continue
        if copy.state != pb.REPLICA_STATE_GONE:
            frames = f" by {counted(copy.lag_frames, 'frame')}" if copy.lag_frames else ""
            yield f"{wheel.wheel} on {copy.node} is {shapes.replica_state(copy)}{frames}"
        elif wheel.state != pb.WHEEL_STATE_CLOSED:
            yield f"{wheel.wheel} is not closed"


def in_short(causes: Sequence[str], waited_s: float) -> str:
    """Returns the first causes as one line."""
    more = len(causes) - _NAMED
    named = "; ".join(causes[:_NAMED])
    return f"after {about(round(waited_s * 1000))}: {named}{f'; and {more} more' * (more > 0)}"
