"""Detects silent nodes, whose wheels are to be closed, open or not.

A node is silent when no node heard it for `SILENT_MS`, or so few that, including itself, they are
fewer than R: it could not acknowledge anything to the others, and nothing would be lost with it.
The nodes' heartbeats say which nodes they heard, and are relayed. So each heartbeat has an age,
found along the shortest path to it:

| the newest report of | has the age |
|---|---|
| this node | 0 |
| a node that this one heard | since then |
| a node that another one heard | of the other's report, plus the age that it gives |

A relayed heartbeat names its relay, because the relaying node states when it heard the author.
"""

from collections.abc import Iterable
from heapq import heappop, heappush

from delaywheel_replica.core.protocol.status_files import ServerStatus

SILENT_MS = 10_000


def ages_ms(server: ServerStatus, now_ms: int) -> dict[str, int]:
    """Returns the age of each node's newest heartbeat here; unheard nodes are left out."""
    ages: dict[str, int] = {}
    found = [(0, server.heartbeat.node)]
    while found:
        age_ms, node = heappop(found)
        if node in ages:
            continue
        ages[node] = age_ms
        for heard, ago_ms in _heard_by(server, node, now_ms).items():
            heappush(found, (age_ms + ago_ms, heard))
    return ages


def silent_nodes(
    server: ServerStatus, nodes: Iterable[str], *, required: int, now_ms: int
) -> frozenset[str]:
    """Returns which of these nodes are silent, by the monotonic clock; the local node never is.

    A server that has just started has heard no node: what depends on silence must wait until it
    could have.
    """
    ages = ages_ms(server, now_ms)
    hearers = dict.fromkeys(nodes, 0)
    for hearer, age_ms in ages.items():
        for heard, ago_ms in _heard_by(server, hearer, now_ms).items():
            if heard in hearers and age_ms + ago_ms < SILENT_MS:
                hearers[heard] += 1
    return frozenset(
        node
        for node, count in hearers.items()
        if node != server.heartbeat.node and (count == 0 or count + 1 < required)
    )


def _heard_by(server: ServerStatus, node: str, now_ms: int) -> dict[str, int]:
    """Returns the nodes that a node heard directly, with how long before its newest heartbeat."""
    if node == server.heartbeat.node:
        return {
            peer: max(0, now_ms - known.heard_ms)
            for peer, known in server.peers.items()
            if known.heard_ms is not None
        }
    known = server.peers.get(node)
    return {} if known is None else {peer: h.ago_ms for peer, h in known.heartbeat.heard.items()}
