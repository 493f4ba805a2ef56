"""A server's view of a node, without the node."""

from collections.abc import Callable, Mapping

from delaywheel_replica.core.protocol.status_files import ServerStatus
from delaywheel_replica.peers.states import PeerState
from delaywheel_replica.server.node.node_view import CleanerView, NodeView


def node_view(
    status: Callable[[], ServerStatus],
    *,
    in_sync: frozenset[str] = frozenset(),
    peers: Callable[[], Mapping[str, PeerState]] = dict,
    cleaner: CleanerView | None = None,
) -> NodeView:
    """A view of a node with this status."""
    return NodeView(status, lambda: in_sync, peers, cleaner or CleanerView())
