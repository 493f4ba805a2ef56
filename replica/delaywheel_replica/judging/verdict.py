"""Whether a cluster works: the first line of `delaywheel status`, and of the operator's page.

docs/STATUS.md says when it is which. A cause stands before what it brings about: the line has room
for two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.judging.causes import Cause, causes_of_down, troubles

_NAMED: Final = 2
"""So many causes stand in the first line, the others follow below the members."""


class ClusterState(StrEnum):
    """Whether the cluster works."""

    OK = "OK"
    DEGRADED = "DEGRADED"
    DOWN = "DOWN"


@dataclass(frozen=True, slots=True)
class ClusterVerdict:
    """The state of a cluster, what keeps it from its work, and what is wrong besides."""

    state: ClusterState
    down: tuple[Cause, ...] = ()
    troubles: tuple[Cause, ...] = ()

    @property
    def causes(self) -> tuple[Cause, ...]:
        """All causes."""
        return self.down + self.troubles

    @property
    def unnamed(self) -> tuple[Cause, ...]:
        """The causes for which the line has no room."""
        return self.causes[_NAMED:]

    @property
    def line(self) -> str:
        """The verdict as one line."""
        if not self.causes:
            return self.state
        more = len(self.unnamed)
        named = "; ".join(cause.text for cause in self.causes[:_NAMED])
        return f"{self.state}: {named}{f'; and {more} more' if more > 0 else ''}"


def verdict(answer: pb.DescribeClusterResponse) -> ClusterVerdict:
    """Derives the verdict from the description of a cluster by all its members."""
    down = tuple(causes_of_down(answer))
    found = tuple(troubles(answer))
    state = ClusterState.DOWN if down else ClusterState.DEGRADED if found else ClusterState.OK
    return ClusterVerdict(state, down, found)
