"""Compares the files of grants and tokens that the nodes of a cluster have in force.

A call is judged by the node that it comes to. So where nodes have other files, callers may do at
one what they may not do at another. Files are replaced node by node: a difference counts once it
lasts.
"""

import time
from collections.abc import Callable, Mapping
from typing import Final

from delaywheel_replica.peers.states import PeerState
from delaywheel_replica.process.logs import get_logger

LASTS_S: Final = 10.0
_log: Final = get_logger(__name__)


class SameAccess:
    """Says which nodes have other files. `look` is for one thread, `differing` for any."""

    def __init__(
        self, own: Callable[[], str], peers: Callable[[], Mapping[str, PeerState]]
    ) -> None:
        """Begins without a difference; `own` returns a digest of this node's files."""
        self._own: Final = own
        self._peers: Final = peers
        self._since_s: dict[str, float] = {}
        self.differing: tuple[str, ...] = ()
        """The nodes that have had other files for some seconds, in order."""

    def look(self, now_s: float | None = None) -> str:
        """Compares; returns the digest of this node's files."""
        now_s = time.monotonic() if now_s is None else now_s
        own = self._own()
        others = {node: state.access for node, state in self._peers().items() if state.access}
        self._since_s = {
            node: self._since_s.get(node, now_s) for node, access in others.items() if access != own
        }
        lasting = sorted(
            node for node, since_s in self._since_s.items() if now_s - since_s >= LASTS_S
        )
        if tuple(lasting) != self.differing:
            self.differing = tuple(lasting)
            if lasting:
                _log.warning("grants or tokens differ", peers=lasting)
            else:
                _log.info("grants and tokens agree")
        return own
