"""A node that consists only of its peer network, and remembers what it received."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from delaywheel_replica.core.protocol.messages import PeerMessage
from delaywheel_replica.peers.handshake import PeerIdentity
from delaywheel_replica.peers.network import PeerNetwork
from delaywheel_replica.peers.states import Connection, PeerReason, PeerState
from local.loopback.kafka import free_ports

SETTINGS = {"members": "n1,n2", "min_insync": "2", "span_seconds": "7200"}


def free_members(count: int = 2) -> dict[str, str]:
    """So many nodes, by their ids, at addresses that are free."""
    return {f"n{n}": f"127.0.0.1:{port}" for n, port in enumerate(free_ports(count), start=1)}


def identity(node: str, **changes: Any) -> PeerIdentity:
    """The identity of a node whose storage is named after it."""
    reported = {
        "cluster_id": "test",
        "node": node,
        "storage": f"disk-{node}",
        "boot": "boot",
        "client_address": f"{node}.example:7420",
        "settings": SETTINGS,
    }
    return PeerIdentity(**(reported | changes))


class Site:
    """One such node.

    Attributes:
        came: (sender, message), in the order of coming.
        broken: peers that were reported as disconnected, in order.
        network: the real one.
        on_message: called with each message before it is remembered.
    """

    def __init__(self, me: PeerIdentity, members: Mapping[str, str], **options: Any) -> None:
        """Begins without listening; `options` are the network's."""
        self.node = me.node
        self.came: list[tuple[str, PeerMessage]] = []
        self.broken: list[str] = []
        self.on_message: Callable[[str, PeerMessage], None] = lambda *_: None
        self._members = members
        self._news = threading.Condition()
        self.network = PeerNetwork(
            me,
            members,
            on_message=self._took,
            on_disconnected=self._broke,
            **options,
        )

    def __enter__(self) -> Self:
        self.network.start(self._members[self.node])
        return self

    def __exit__(self, *_: object) -> None:
        stopping = threading.Thread(target=self.network.stop, daemon=True)
        stopping.start()
        stopping.join(60)
        assert not stopping.is_alive(), f"{self.node} does not stop: {self.network.states()}"

    def state(self, peer: str) -> PeerState:
        return self.network.states()[peer]

    def reason(self, peer: str) -> PeerReason | None:
        refusal = self.state(peer).refusal
        return None if refusal is None else refusal.reason

    def from_(self, peer: str) -> list[PeerMessage]:
        return [message for sender, message in self.came if sender == peer]

    def wait(self, what: str, ask: Callable[[], object], *, timeout_s: float = 60) -> None:
        """Waits until the answer is true; asked whenever a message came or a connection broke."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while not ask():
                left_s = deadline - time.monotonic()
                assert left_s > 0, f"not within {timeout_s} s: {what}: {self.network.states()}"
                # States change without a word to the server.
                self._news.wait(min(left_s, 0.01))

    def wait_connected(self, *peers: str) -> None:
        self.wait(
            f"connected to {peers}",
            lambda: all(self.state(peer).connection is Connection.CONNECTED for peer in peers),
        )

    def wait_refused(self, peer: str, reason: PeerReason) -> None:
        self.wait(f"{peer} refused: {reason}", lambda: self.reason(peer) is reason)

    def wait_for_messages(self, count: int) -> None:
        self.wait(f"{count} messages", lambda: len(self.came) == count)

    def _took(self, peer: str, message: PeerMessage) -> None:
        self.on_message(peer, message)
        with self._news:
            self.came.append((peer, message))
            self._news.notify_all()

    def _broke(self, peer: str) -> None:
        with self._news:
            self.broken.append(peer)
            self._news.notify_all()
