"""Accepts streams from peers: checks which node connects, and reads each stream to its end."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from delaywheel_replica.core.protocol.codec import MalformedError
from delaywheel_replica.core.protocol.messages import PeerMessage
from delaywheel_replica.peers import sockets
from delaywheel_replica.peers.encoding import AccessDigest, decode
from delaywheel_replica.peers.encryption import PeerSecurity
from delaywheel_replica.peers.framing import PREFACE, IncomingStream, head_of
from delaywheel_replica.peers.handshake import (
    Hello,
    PeerIdentity,
    decode_hello,
    encode_answer,
    judge,
    wrong_node,
)
from delaywheel_replica.peers.peer import Peer
from delaywheel_replica.peers.sockets import CONTROL_BYTES, Channel
from delaywheel_replica.peers.states import PeerReason, PeerRefusal, PeerRefusedError, Stream, Way
from delaywheel_replica.process.logs import get_logger, stranger_refused

HELLO_S: Final = 5.0
"""A connection without a Hello is ended after this long: each occupies a thread."""

HELLO_BYTES: Final = 64 << 10

_TEXT: Final = 300
"""How many characters of a malformed message's error are kept."""

_HTTP: Final = b"PRI * HTTP/2.0"[: len(PREFACE)]
"""Every HTTP/2 client begins with this."""

_TLS: Final = b"\x16\x03"
"""Every TLS client begins with this."""

_log = get_logger(__name__)


class Acceptor:
    """Serves the streams of all peers, each on its own thread."""

    def __init__(
        self,
        me: PeerIdentity,
        peers: Mapping[str, Peer],
        on_message: Callable[[str, PeerMessage], None],
        *,
        data_bytes: int,
        security: PeerSecurity,
    ) -> None:
        """Begins without connections.

        Args:
            on_message: Called with the sender and the message, in the order of each stream; raises
                MalformedError for an impossible one. `serve` raises any other exception of it.
            data_bytes: The longest message on a data stream.
        """
        self._me = me
        self._security = security
        self._peers = peers
        self._on_message = on_message
        self._most_bytes = {Stream.CONTROL: CONTROL_BYTES, Stream.DATA: data_bytes}

    def serve(self, channel: Channel, greeted: Callable[[], None]) -> None:
        """Serves one connection from its first byte to its end; the caller closes it.

        `greeted` is called when it turns out to be a member's, and welcome.
        """
        try:
            self._security.accepted(channel)
        except PeerRefusedError as error:
            _note_stranger(error.refusal)
            return
        except OSError:  # gone, or silent for too long
            return
        incoming = IncomingStream(channel.until(time.monotonic() + HELLO_S), HELLO_BYTES)
        try:
            hello = self._hello(channel, incoming)
        except MalformedError as error:
            _answer(channel, PeerRefusal(PeerReason.MALFORMED, str(error)[:_TEXT]))
            return
        if hello is None:
            return
        node = hello.identity.node
        # A node of another version may send something unknown here: it is refused then.
        stream = hello.stream or Stream.CONTROL
        # Whose certificate does not suit is told nothing of this node, and quoted nowhere.
        known = self._peers.get(node)
        refusal = self._security.judge(channel, None if known is None else known.address)
        refusal = refusal or self._judge(hello)
        if refusal is None:
            refusal = self._peers[node].came(stream, hello.identity, channel)
        if refusal is not None:
            self._note(node, stream, refusal)
            _answer(channel, refusal)
            return
        peer = self._peers[node]
        greeted()
        threading.current_thread().name = f"peer-from-{node}-{stream.lower()}"
        try:
            _answer(channel, self._me)
            if stream is Stream.CONTROL:
                channel.keep_short_queues()
            incoming.receive_by(channel.unless_silent(), self._most_bytes[stream])
            self._read(peer, stream, incoming, self._security.ends_s(channel, is_dialled=True))
        except MalformedError as error:
            peer.tallies[Way.IN, stream].malformed += 1
            peer.refused(Way.IN, stream, PeerRefusal(PeerReason.MALFORMED, str(error)[:_TEXT]))
        finally:
            peer.went(stream, channel)

    def _hello(self, channel: Channel, incoming: IncomingStream) -> Hello | None:
        """Reads the first message; None if it does not come, or not from a node."""
        try:
            began = incoming.take(len(PREFACE))
            data = incoming.message() if began == PREFACE else None
        except OSError:  # gone, or silent for too long
            return None
        if began is not None and began != PREFACE:
            _note_stranger(_no_node(channel, began))
        return None if data is None else decode_hello(data)

    def _judge(self, hello: Hello) -> PeerRefusal | None:
        refusal = judge(self._me, hello.identity, {self._me.node, *self._peers})
        if refusal is None and hello.to != self._me.node:
            return wrong_node(self._me.node, hello.to)
        if refusal is None and hello.stream is None:
            return PeerRefusal(PeerReason.MALFORMED, "a hello that names no stream")
        return refusal

    def _note(self, node: str, stream: Stream, refusal: PeerRefusal) -> None:
        peer = self._peers.get(node)
        if peer is not None:
            peer.refused(Way.IN, stream, refusal)
        else:
            _note_stranger(refusal)

    def _read(self, peer: Peer, stream: Stream, incoming: IncomingStream, until_s: float) -> None:
        tally = peer.tallies[Way.IN, stream]
        while (data := _next(peer, incoming)) is not None and time.monotonic() < until_s:
            if not data:  # a ping
                continue
            message = decode(data)
            tally.received += 1
            tally.received_bytes += len(data)
            if isinstance(message, AccessDigest):
                peer.told_access(message.digest)
                continue
            # Before, so that a break meanwhile is reported; after, so that a later one is too.
            peer.heard()
            self._on_message(peer.node, message)
            peer.heard()


def _next(peer: Peer, incoming: IncomingStream) -> bytes | None:
    """Reads the next message; None if the stream has ended or the peer hangs."""
    try:
        return incoming.message()
    except BlockingIOError:
        _log.warning("peer silent", peer=peer.node, for_s=sockets.SILENCE_S)
        peer.end()
    except OSError:  # broken
        pass
    return None


def _answer(channel: Channel, answer: PeerIdentity | PeerRefusal) -> None:
    """Sends the only answer on the connection; if that fails, the peer sees the end."""
    data = encode_answer(answer)
    with contextlib.suppress(OSError):
        channel.send_all(b"".join((PREFACE, head_of([data]), data)))


def _note_stranger(refusal: PeerRefusal) -> None:
    stranger_refused("peer_listen", refusal.reason.value, refusal.text)


def _no_node(channel: Channel, began: bytes) -> PeerRefusal:
    if began.startswith(_TLS):
        text = f"{channel.remote} speaks TLS: peer_tls is off here"
        return PeerRefusal(PeerReason.TLS_REFUSED, text)
    text = f"{channel.remote} is not a node: it begins with {began!r}"
    if began == _HTTP:
        text = f"{channel.remote} speaks HTTP/2, as callers do: their port is another"
    return PeerRefusal(PeerReason.MALFORMED, text)
