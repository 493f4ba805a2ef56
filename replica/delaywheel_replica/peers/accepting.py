"""Streams from peers: judged, and read until they end."""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import grpc

from delaywheel_replica.core.fields import MalformedError
from delaywheel_replica.core.peers import PeerMessage
from delaywheel_replica.logs import get_logger
from delaywheel_replica.peers.encoding import decode
from delaywheel_replica.peers.handshake import (
    PeerIdentity,
    decode_hello,
    encode_answer,
    judge,
    wrong_node,
)
from delaywheel_replica.peers.peer import Peer, Stream, Way
from delaywheel_replica.peers.states import PeerReason, PeerRefusal

HELLO_S: Final = 5.0
"""A stream that has not said Hello for so long is ended: each keeps a thread."""

CONTROL_BYTES: Final = 8 << 20
"""Of one message on a control stream: a beat tells some hundred bytes of each wheel."""

STRANGERS_LOGGED: Final = 100
"""Refusals of nodes that are no members are logged once each, at most so many."""

_TEXT: Final = 300
"""So many characters are kept of what is wrong with a message."""

_log = get_logger(__name__)

Context = grpc.ServicerContext


class Acceptor:
    """Serves both streams of all peers, each on a thread of the server."""

    def __init__(
        self,
        me: PeerIdentity,
        peers: Mapping[str, Peer],
        on_message: Callable[[str, PeerMessage], None],
    ) -> None:
        """Nobody came yet.

        Args:
            me: this node.
            peers: the other members.
            on_message: called with the sender and the message, in the order of each stream; raises
                MalformedError for one that cannot be so.
        """
        self._me = me
        self._peers = peers
        self._on_message = on_message
        self._strangers: set[PeerRefusal] = set()

    def serve(self, stream: Stream, requests: Iterator[bytes], context: Context) -> Iterator[bytes]:
        """One stream, from its Hello to its end."""
        try:
            theirs, wanted = _hello(requests, context)
        except MalformedError as error:
            yield encode_answer(PeerRefusal(PeerReason.MALFORMED, str(error)))
            return
        except (grpc.RpcError, StopIteration):  # gone before it said anything
            return
        # One object, by which the stream is known: each access to a method makes another.
        cancel = context.cancel
        refusal = self._judge(theirs, wanted)
        if refusal is None:
            refusal = self._peers[theirs.node].came(stream, theirs, cancel)
        if refusal is not None:
            self._note(theirs.node, stream, refusal)
            yield encode_answer(refusal)
            return
        peer = self._peers[theirs.node]
        try:
            yield encode_answer(self._me)
            self._read(peer, stream, requests)
        except MalformedError as error:
            peer.tallies[Way.IN, stream].malformed += 1
            peer.refused(Way.IN, stream, PeerRefusal(PeerReason.MALFORMED, str(error)[:_TEXT]))
        except grpc.RpcError:  # broken
            pass
        finally:
            peer.went(stream, cancel)

    def _judge(self, theirs: PeerIdentity, wanted: str) -> PeerRefusal | None:
        refusal = judge(self._me, theirs, {self._me.node, *self._peers})
        if refusal is None and wanted != self._me.node:
            return wrong_node(self._me.node, wanted)
        return refusal

    def _note(self, node: str, stream: Stream, refusal: PeerRefusal) -> None:
        peer = self._peers.get(node)
        if peer is not None:
            peer.refused(Way.IN, stream, refusal)
        elif refusal not in self._strangers and len(self._strangers) < STRANGERS_LOGGED:
            self._strangers.add(refusal)
            _log.warning(
                "stranger refused", node=node, reason=refusal.reason.value, text=refusal.text
            )

    def _read(self, peer: Peer, stream: Stream, requests: Iterator[bytes]) -> None:
        tally = peer.tallies[Way.IN, stream]
        for data in requests:
            if stream is Stream.CONTROL and len(data) > CONTROL_BYTES:
                raise MalformedError(f"a message of {len(data)} bytes on the control stream")
            message = decode(data)
            tally.received += 1
            tally.received_bytes += len(data)
            # Before, so that a break meanwhile is told; after, so that one later is, too.
            peer.heard()
            self._on_message(peer.node, message)
            peer.heard()


def _hello(requests: Iterator[bytes], context: Context) -> tuple[PeerIdentity, str]:
    timer = threading.Timer(HELLO_S, context.cancel)
    timer.daemon = True
    timer.start()
    try:
        return decode_hello(next(requests))
    finally:
        timer.cancel()
