"""A server's view of a node, without the node."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from delaywheel_replica.core.protocol.status_files import ServerStatus
from delaywheel_replica.peers.states import PeerState
from delaywheel_replica.server.node.node_view import CleanerView, NodeView


@dataclass
class FakeMember:
    """Its status is the result of a function."""

    status: Callable[[], ServerStatus]
    in_sync: frozenset[str] = frozenset()


class FakeNetwork:
    """Connections whose states a function returns."""

    def __init__(self, peers: Callable[[], Mapping[str, PeerState]]) -> None:
        self.peers = peers


def node_view(
    status: Callable[[], ServerStatus],
    *,
    in_sync: frozenset[str] = frozenset(),
    peers: Callable[[], Mapping[str, PeerState]] = dict,
    cleaner: CleanerView | None = None,
) -> NodeView:
    """A view of a node with this status."""
    return NodeView(FakeMember(status, in_sync), FakeNetwork(peers), cleaner)
