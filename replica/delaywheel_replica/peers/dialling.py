"""Keeps a stream to a peer open: dials again for as long as the node lives.

Its thread sleeps while all goes well: the sender of a message writes it to the socket itself
(outbox.py). The thread wakes when the kernel has room again for waiting messages, when nothing was
sent for a second, and when the stream ends.
"""

import os
import select
import ssl
import threading
import time
from collections.abc import Callable
from typing import Final

from delaywheel_replica.core.protocol.codec import MalformedError
from delaywheel_replica.peers import sockets
from delaywheel_replica.peers.encryption import PeerSecurity
from delaywheel_replica.peers.framing import PREFACE, IncomingStream, head_of
from delaywheel_replica.peers.handshake import decode_answer
from delaywheel_replica.peers.outbox import Outbox
from delaywheel_replica.peers.peer import Peer
from delaywheel_replica.peers.sockets import Channel
from delaywheel_replica.peers.states import PeerReason, PeerRefusal, PeerRefusedError, Stream, Way

_PAUSE_S: Final = 0.1
"""The pause before a broken stream is reopened."""

_NOBODY_PAUSE_S: Final = 0.2
"""The pause before an unreachable peer is dialled again."""

_REFUSED_PAUSE_S: Final = 1.0
"""The pause after a refusal: an operator has to correct something first."""

_ANSWER_S: Final = 5.0
_ANSWER_BYTES: Final = 256 << 10
"""The longest reply: an identity or a refusal, which repeats what the Hello said."""

_JOIN_S: Final = 5.0

_HTTP: Final = b"\x04\0\0\0\0"
"""HTTP/2 servers begin with their settings frame: this comes after three bytes of length."""


class Dialler:
    """One stream to one peer, with its own thread."""

    def __init__(
        self,
        peer: Peer,
        stream: Stream,
        *,
        hello: bytes,
        max_bytes: int,
        security: PeerSecurity,
    ) -> None:
        """Does nothing yet; so many bytes may wait to be sent."""
        self._peer = peer
        self._security = security
        self._stream = stream
        self._greeting = b"".join((PREFACE, head_of([hello]), hello))
        self._max_bytes = max_bytes
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        # Closes the connection that another is to replace, since it has its greatest age.
        self._close_earlier: Callable[[], None] = _nothing
        self._thread = threading.Thread(
            target=self._run, name=f"peer-to-{peer.node}-{stream.lower()}", daemon=True
        )

    def start(self) -> None:
        """Dials until `end`."""
        self._thread.start()

    def end(self) -> None:
        """Ends the stream without waiting."""
        with self._lock:
            self._ended.set()
            if self._channel is not None:
                self._channel.end()

    def join(self) -> None:
        """Waits some seconds for the end; a thread that resolves a name cannot be interrupted."""
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                pause_s = 0.0 if self._converse() else _PAUSE_S
            except PeerRefusedError as error:
                self._peer.refused(Way.OUT, self._stream, error.refusal)
                pause_s = _REFUSED_PAUSE_S
            except OSError:
                pause_s = _NOBODY_PAUSE_S
            if pause_s:
                self._replaced()
                self._ended.wait(pause_s)
        self._replaced()

    def _replaced(self) -> None:
        """Closes the earlier connection, whether another has come in its place or not."""
        close, self._close_earlier = self._close_earlier, _nothing
        close()

    def _converse(self) -> bool:
        """Opens the stream and serves it until it ends; raises OSError if it could not be opened.

        Returns:
            Whether it has its greatest age: it stays until another is open in its place.

        Raises:
            PeerRefusedError: One of the two refused it.
        """
        address = self._peer.address
        channel = self._security.dialled(lambda: sockets.dial(address), address)
        room = os.eventfd(0, os.EFD_NONBLOCK)
        tally = self._peer.tallies[Way.OUT, self._stream]
        outbox = Outbox(channel, self._max_bytes, tally, wake=lambda: os.eventfd_write(room, 1))

        def close() -> None:
            outbox.close()
            self._peer.left(self._stream, outbox)
            channel.close()
            os.close(room)

        is_old = False
        try:
            with self._lock:
                if self._ended.is_set():
                    return False
                self._channel = channel
            self._greet(channel, outbox)
            self._replaced()
            is_old = _stay(channel, outbox, room, self._security.ends_s(channel, is_dialled=False))
        finally:
            if is_old:
                self._close_earlier = close
            else:
                with self._lock:
                    self._channel = None
                close()
        return is_old

    def _greet(self, channel: Channel, outbox: Outbox) -> None:
        if self._stream is Stream.CONTROL:
            channel.keep_short_queues()
        channel.send_all(self._greeting)
        incoming = IncomingStream(channel.until(time.monotonic() + _ANSWER_S), _ANSWER_BYTES)
        try:
            began = incoming.take(len(PREFACE))
        except ssl.SSLError as error:  # with TLS 1.3 the dialled side refuses only now
            text = f"{self._peer.address}: {error.reason or error}"
            raise PeerRefusedError(PeerRefusal(PeerReason.TLS_REFUSED, text)) from error
        if began is not None and began != PREFACE:
            raise PeerRefusedError(_no_peer(self._peer, began))
        try:
            data = incoming.message()
            if data is None:
                raise ConnectionError("it ended without an answer")
            answer = decode_answer(data)
        except MalformedError as error:
            raise PeerRefusedError(PeerRefusal(PeerReason.MALFORMED, str(error))) from error
        if isinstance(answer, PeerRefusal):
            if answer.reason is PeerReason.NODE_ID_TAKEN:
                self._peer.found_twin()
            raise PeerRefusedError(answer)
        # From now on any thread may send on it, and none may block.
        channel.socket.settimeout(0)
        refusal = self._peer.welcomed(self._stream, answer, outbox)
        if refusal is not None:
            raise PeerRefusedError(refusal)


def _stay(channel: Channel, outbox: Outbox, room: int, until_s: float) -> bool:
    """Sends waiting messages as soon as possible; returns whether the stream ends by its age."""
    poll, number = select.poll(), channel.socket.fileno()
    poll.register(room, select.POLLIN)
    ping_s = sockets.PING_S
    while True:
        wanted = select.POLLIN | (select.POLLOUT if outbox.waits else 0)
        poll.register(number, wanted)
        left_s = until_s - time.monotonic()
        events = dict(poll.poll((min(ping_s, left_s) if left_s > 0 else ping_s) * 1_000))
        if events.get(number, 0) & ~select.POLLOUT:
            return False
        if room in events:
            os.eventfd_read(room)
        outbox.flush()
        ping_s = outbox.ping(sockets.PING_S)
        if time.monotonic() >= until_s and not outbox.waits:
            return True


def _no_peer(peer: Peer, began: bytes) -> PeerRefusal:
    speaks = "HTTP/2" if began[3:].startswith(_HTTP) else f"something else ({began!r})"
    text = (
        f"{peer.address} speaks {speaks}, and is no peer's: perhaps {peer.node} takes callers there"
    )
    return PeerRefusal(PeerReason.WRONG_PORT, text)


def _nothing() -> None:
    """Closes nothing: there is no earlier connection."""
