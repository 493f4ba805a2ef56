"""The network between this node and its peers: two streams to each, two from each.

Two connections per peer: a connection is read in order, so a heartbeat behind 30 MB of frames would
come late, and late heartbeats cause needless elections. Own threads: on the server's event loop,
decoding a request of 50,000 rows would delay heartbeats just as well.

| thread | per peer | does |
|---|---|---|
| any sender | | encodes a message, and gives it to the kernel |
| `peer-from-…` | two | reads one stream from the peer, and hands over its messages |
| `peer-to-…` | two | dials, then sleeps; sends what found no room, and pings |
| `peer-accept` | one for all | accepts connections |
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from delaywheel_replica.core.protocol.messages import ABOUT_FRAMES, Frames, Gossip, PeerMessage
from delaywheel_replica.peers.accepting import Acceptor
from delaywheel_replica.peers.dialling import Dialler
from delaywheel_replica.peers.encoding import AccessDigest, encode, encode_in_parts
from delaywheel_replica.peers.encryption import PLAIN, PeerSecurity
from delaywheel_replica.peers.framing import Part
from delaywheel_replica.peers.handshake import Hello, PeerIdentity, encode_hello
from delaywheel_replica.peers.listening import PeerListener
from delaywheel_replica.peers.peer import Peer
from delaywheel_replica.peers.sockets import data_bytes, why_not
from delaywheel_replica.peers.states import Connection, PeerState, Stream

DATA_QUEUE_BYTES: Final = 32 << 20
CONTROL_QUEUE_BYTES: Final = 1 << 20
"""Limit of the queue for one peer; more is dropped and, being level-triggered, sent again."""

# The setting that bounds frames; all connected nodes have the same.
_FRAME_BYTES: Final = "transaction_bytes"


class PeerListenError(Exception):
    """The address for peers cannot be used to listen."""


class PeerNetwork:
    """All streams between this node and its peers."""

    def __init__(
        self,
        me: PeerIdentity,
        members: Mapping[str, str],
        *,
        on_message: Callable[[str, PeerMessage], None],
        on_disconnected: Callable[[str], None],
        data_queue_bytes: int = DATA_QUEUE_BYTES,
        security: PeerSecurity = PLAIN,
    ) -> None:
        """Begins without listening or dialling.

        Args:
            members: Node id -> peer address, of all nodes; the own one is not dialled.
            on_message: Called on the peers' threads, in order for each stream. A slow call slows
                down only that stream of that sender; if one takes seconds while more arrives than
                the kernel buffers, the sender breaks the connection. MalformedError ends the
                stream; any other exception also ends its thread.
            on_disconnected: Called on the peers' threads after a connection broke on which the peer
                was heard; perhaps more than once for one death.
            data_queue_bytes: The most bytes of frames that wait for one peer.
        """
        self._on_disconnected = on_disconnected
        self._is_stopping = False
        self._peers = {
            node: Peer(me, node, address, self._broke)
            for node, address in members.items()
            if node != me.node
        }
        limits = {Stream.CONTROL: CONTROL_QUEUE_BYTES, Stream.DATA: data_queue_bytes}
        self._diallers = [
            Dialler(
                peer,
                stream,
                hello=encode_hello(Hello(me, peer.node, stream)),
                max_bytes=limits[stream],
                security=security,
            )
            for peer in self._peers.values()
            for stream in Stream
        ]
        acceptor = Acceptor(
            me,
            self._peers,
            on_message,
            data_bytes=data_bytes(int(me.settings.get(_FRAME_BYTES, 0))),
            security=security,
        )
        self._listener = PeerListener(acceptor.serve, peers=len(self._peers))
        # The last heartbeat and the last frames: they go to all peers.
        self._last: dict[type[PeerMessage], tuple[PeerMessage, Sequence[Part]]] = {}

    def start(self, listen: str) -> str:
        """Listens on host:port and dials all peers; returns the bound host:port.

        Raises PeerListenError if the address cannot be used to listen.
        """
        try:
            bound = self._listener.start(listen)
        except OSError as error:
            raise PeerListenError(f"peer_listen {listen}: {why_not(error)}") from error
        for dialler in self._diallers:
            dialler.start()
        return bound

    def send(self, peer: str, message: PeerMessage) -> None:
        """Sends or drops a message; for any thread, never blocks. The message must not change.

        Raises KeyError for what is no other member, and ValueError as `encode` does.
        """
        to = self._peers[peer]
        stream = Stream.DATA if isinstance(message, ABOUT_FRAMES) else Stream.CONTROL
        if to.takes(stream):
            to.send(stream, self._parts(message), is_heartbeat=isinstance(message, Gossip))

    def tell_access(self, digest: str) -> None:
        """Tells all peers which files of grants and tokens this node has; may be lost."""
        message = encode(AccessDigest(digest))
        for peer in self._peers.values():
            if peer.takes(Stream.CONTROL):
                peer.send(Stream.CONTROL, (message,), is_heartbeat=False)

    def states(self) -> dict[str, PeerState]:
        """Returns the connection state of every other member."""
        return {node: peer.state() for node, peer in self._peers.items()}

    def has_twin(self) -> bool:
        """Whether another process is connected in place of this one, as far as peers say.

        They do so of a node that was started again, too, until its old connections are gone. While
        any peer is connected, this is not the process that has to go.
        """
        peers = self._peers.values()
        is_connected = any(peer.state().connection is Connection.CONNECTED for peer in peers)
        return not is_connected and any(peer.has_twin() for peer in peers)

    def stop(self) -> None:
        """Ends all streams; no callback is called after this returns.

        It waits for running calls of `on_message`: do not hold a lock that they need, nor call it
        from one of them.
        """
        self._is_stopping = True
        for peer in self._peers.values():
            peer.leave()
        for dialler in self._diallers:
            dialler.end()
        self._listener.stop()
        for dialler in self._diallers:
            dialler.join()

    def _parts(self, message: PeerMessage) -> Sequence[Part]:
        """Encodes a message; what goes to all peers, for the first of them."""
        kind = type(message)
        before, parts = self._last.get(kind, (None, ()))
        # The same bundle belongs to the same wheel, with an equal card.
        is_same = before is message or (
            isinstance(message, Frames)
            and isinstance(before, Frames)
            and before.frames is message.frames
            and before.request == message.request
        )
        if not is_same:
            parts = encode_in_parts(message)
            if isinstance(message, Gossip | Frames):
                self._last[kind] = message, parts
        return parts

    def _broke(self, peer: str) -> None:
        if not self._is_stopping:
            self._on_disconnected(peer)
