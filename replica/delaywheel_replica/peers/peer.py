"""One peer: two streams to it, two from it, and its state.

| event | reported to the server |
|---|---|
| any stream ends over which, or beside which, the peer was heard | disconnected |
| a stream from the peer takes the place of one that still seems open | disconnected |
| further streams end without a message in between | nothing |
| a stream ends that was replaced | nothing more |

If no stream from a peer is left, the streams to it are ended too: it has died or has found this
node silent, and the network between them may not report that.

So a process's last message is always followed by a report that it is gone, even while messages that
it sent earlier are still being read.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Final

from delaywheel_replica.peers.framing import Part
from delaywheel_replica.peers.handshake import PeerIdentity, id_taken, rolling, wrong_node
from delaywheel_replica.peers.outbox import Outbox
from delaywheel_replica.peers.sockets import Channel
from delaywheel_replica.peers.states import (
    Connection,
    Counters,
    PeerRefusal,
    PeerState,
    Stream,
    Way,
)
from delaywheel_replica.process.logs import get_logger

REFUSAL_FRESH_S: Final = 5.0
"""Refused streams are retried again and again: a refusal not repeated for this long is over."""

MOST_LOGGED: Final = 100
"""How many different refusals are logged, once each, until the peer is connected."""

_log = get_logger(__name__)


class Peer:
    """One of the other members. For any thread.

    `tallies` counts outgoing and incoming messages by stream.
    """

    def __init__(
        self,
        me: PeerIdentity,
        node: str,
        address: str,
        on_disconnected: Callable[[str], None],
    ) -> None:
        """Begins unconnected; `on_disconnected` is called without any lock."""
        self.node = node
        self.address = address
        self._me = me
        self.tallies = {(way, stream): Counters() for way in Way for stream in Stream}
        self._on_disconnected = on_disconnected
        self._lock = threading.Lock()
        self._out: dict[Stream, Outbox] = {}
        self._in: dict[Stream, Channel] = {}
        self._identity: PeerIdentity | None = None
        self._rolling: str | None = None
        self._refusals: dict[tuple[Way, Stream], tuple[PeerRefusal, float]] = {}
        self._logged: set[PeerRefusal] = set()
        self._access = ""
        self._is_heard = False
        self._is_left = False
        self._twin_s: float | None = None
        self._breaks = 0
        self._shown = Connection.CONNECTING
        self._since_ms = _wall_ms()

    # --- messages

    def takes(self, stream: Stream) -> bool:
        """Whether a message sent now may arrive; others are counted as dropped."""
        if stream in self._out:
            return True
        self.tallies[Way.OUT, stream].dropped += 1
        return False

    def send(self, stream: Stream, parts: Sequence[Part], *, is_heartbeat: bool) -> None:
        """Sends or drops a message."""
        outbox = self._out.get(stream)
        if outbox is not None:
            outbox.put(parts, is_heartbeat=is_heartbeat)

    def heard(self) -> None:
        """Notes a message, after which a break is worth reporting."""
        self._is_heard = True

    def told_access(self, digest: str) -> None:
        """Notes which files of grants and tokens the peer has."""
        self._access = digest

    # --- streams that this node opens

    def welcomed(self, stream: Stream, theirs: PeerIdentity, outbox: Outbox) -> PeerRefusal | None:
        """Checks a peer that accepted a stream; returns why this node refuses it."""
        if theirs.node != self.node:
            return wrong_node(theirs.node, self.node)
        with self._lock:
            refusal = self._other_process(theirs)
            if refusal is not None:
                return refusal
            self._out[stream] = outbox
            self._opened(Way.OUT, stream, theirs)
        return None

    def left(self, stream: Stream, outbox: Outbox) -> None:
        """Notes that a stream to the peer ended, or was never accepted."""
        with self._lock:
            if self._out.get(stream) is not outbox:
                return
            del self._out[stream]
            is_break = self._broke()
        self._report_break(is_break)

    # --- streams that the peer opens

    def came(self, stream: Stream, theirs: PeerIdentity, connection: Channel) -> PeerRefusal | None:
        """Checks a peer that opens a stream; returns why this node refuses it.

        Its connection is ended when the peer opens another instead.
        """
        with self._lock:
            refusal = self._other_process(theirs)
            if refusal is not None:
                return refusal
            replaced = self._in.get(stream)
            is_break = replaced is not None and self._broke()
            self._in[stream] = connection
            self._opened(Way.IN, stream, theirs)
        if replaced is not None:
            replaced.end()
        self._report_break(is_break)
        return None

    def went(self, stream: Stream, connection: Channel) -> None:
        """Notes that a stream from the peer ended."""
        with self._lock:
            if self._in.get(stream) is not connection:
                return
            del self._in[stream]
            is_break = self._broke()
            ends = [] if self._in else [outbox.end for outbox in self._out.values()]
        for end in ends:
            end()
        self._report_break(is_break)

    def end(self) -> None:
        """Ends all streams: a peer that is silent on one hangs on all."""
        with self._lock:
            connections: list[Channel | Outbox] = [*self._in.values(), *self._out.values()]
        for connection in connections:
            connection.end()

    def leave(self) -> None:
        """Notes that this node stops: the peer is not lost when its streams end."""
        self._is_left = True

    # --- states

    def found_twin(self) -> None:
        """Notes that the peer refused this process for another one with its id."""
        self._twin_s = time.monotonic()

    def has_twin(self) -> bool:
        """Whether the peer does so now."""
        after = time.monotonic() - REFUSAL_FRESH_S
        return self._twin_s is not None and self._twin_s > after

    def refused(self, way: Way, stream: Stream, refusal: PeerRefusal) -> None:
        """Notes that one side refused the other; logs it when it is new."""
        with self._lock:
            self._refusals[way, stream] = refusal, time.monotonic()
            self._changed()
            is_news = refusal not in self._logged and len(self._logged) < MOST_LOGGED
            if is_news:
                self._logged.add(refusal)
        if is_news:
            by = "it" if way is Way.OUT else "this node"
            _log.warning(
                "peer refused", peer=self.node, by=by, reason=refusal.reason, text=refusal.text
            )

    def state(self) -> PeerState:
        """Returns the state of the connection."""
        with self._lock:
            self._changed()
            identity = self._identity
            return PeerState(
                connection=self._shown,
                since_ms=self._since_ms,
                address=self.address,
                refusal=self._fresh_refusal(),
                rolling=self._rolling if self._out or self._in else None,
                client_address=None if identity is None else identity.client_address,
                client_tls=identity is not None and identity.client_tls,
                token_address="" if identity is None else identity.token_address,
                call_secret=b"" if identity is None else identity.call_secret,
                access=self._access,
                storage=None if identity is None else identity.storage,
                counters=self._counters(),
            )

    def _counters(self) -> Counters:
        names = [each.name for each in fields(Counters)]
        of_streams = self.tallies.values()
        total = Counters(*(sum(getattr(each, name) for each in of_streams) for name in names))
        return replace(total, breaks=self._breaks)

    # --- with the lock held

    def _other_process(self, theirs: PeerIdentity) -> PeerRefusal | None:
        """Refuses a second process with the same id: two would replace each other forever.

        Where a process ends, the kernel says so; a node that was started again is not refused. A
        machine that died and was rebooted waits until its old connection is found to be dead, see
        sockets.py: three seconds, which a boot takes as well.
        """
        connections: list[Channel | Outbox] = [*self._in.values(), *self._out.values()]
        if self._identity is None or all(each.is_gone() for each in connections):
            return None
        return id_taken(self._identity, theirs)

    def _opened(self, way: Way, stream: Stream, theirs: PeerIdentity) -> None:
        self._identity = theirs
        self._access = self._access or theirs.access
        self._compare(theirs)
        self.tallies[way, stream].connects += 1
        self._refusals.pop((way, stream), None)
        self._is_heard = True
        self._changed()

    def _compare(self, theirs: PeerIdentity) -> None:
        """Compares settings, so that the log shows when a rolling change is complete."""
        was, self._rolling = self._rolling, rolling(self._me, theirs)
        if self._rolling == was:
            return
        if self._rolling is None:
            _log.info("peer settings agree", peer=self.node)
        else:
            _log.warning("peer settings differ", peer=self.node, text=self._rolling)

    def _broke(self) -> bool:
        """Notes a break; returns whether to report it to the server."""
        is_break, self._is_heard = self._is_heard, False
        self._breaks += is_break
        self._changed()
        return is_break

    def _changed(self) -> None:
        if len(self._out) == len(self._in) == len(Stream):
            now = Connection.CONNECTED
        elif self._fresh_refusal() is not None:
            now = Connection.REFUSED
        else:
            now = Connection.CONNECTING
        if now is self._shown:
            return
        if now is Connection.CONNECTED:
            _log.info("peer connected", peer=self.node, was=self._shown.value)
            self._logged.clear()
        elif self._shown is Connection.CONNECTED and not self._is_left:
            _log.warning("peer lost", peer=self.node, now=now.value)
        self._shown, self._since_ms = now, _wall_ms()

    def _fresh_refusal(self) -> PeerRefusal | None:
        """Returns one refusal of several, always the same one, whatever their order.

        The peer's words come before ours: it knows what it has against this node.
        """
        after = time.monotonic() - REFUSAL_FRESH_S
        fresh = {key: found for key, (found, at) in self._refusals.items() if at > after}
        ordered = ((way, stream) for way in (Way.OUT, Way.IN) for stream in Stream)
        return next((fresh[key] for key in ordered if key in fresh), None)

    # --- without

    def _report_break(self, is_break: bool) -> None:
        if is_break:
            self._on_disconnected(self.node)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
