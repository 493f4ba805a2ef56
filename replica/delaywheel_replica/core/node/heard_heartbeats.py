"""What a node hears of others: newest heartbeats, reachability, and the leader's clock.

| a heartbeat | counts as newest when |
|---|---|
| of the storage that is known, direct | its (start, count) is greater |
| the same, but less than that of a relayed one | that one came `HEARD_MS` ago: the node itself |
|   | should have reached it by now, so it was not the node's |
| of the storage that is known, relayed | its (start, count) is greater, by no more than possible; |
|   | and no heartbeat came directly for `RELAYED_AFTER_MS` |
| of another storage, direct | always: the node itself reports it |
| of another storage, relayed | likewise, and the relaying node heard that boot later than this |
|   | node heard any |

A node relays to each other node what that node has not heard for `RELAYING_MS`, and now and then
everything: a node may be heard although its heartbeats do not arrive
(core/member/own_heartbeat.py). Relaying all each time would cost four times as much to encode and
read; without relays one broken link hides a node.

So a wrong number that is relayed is forgotten again: no relay can keep the node itself from being
heard. Only direct messages make a node *heard*; only a direct heartbeat proves its boot, its open
wheel's end for completeness, and that it leads. A heartbeat that first came by a relay is still
news when it comes directly.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from delaywheel_replica.core.node.events import MemberConfig
from delaywheel_replica.core.protocol.control import ROLLED_BACK
from delaywheel_replica.core.protocol.heartbeat import Heard, Heartbeat
from delaywheel_replica.core.protocol.messages import Gossip
from delaywheel_replica.core.protocol.status_files import KnownPeer

HEARD_MS = 1_000
"""A node that sent nothing directly for this long is not heard."""

RELAYED_AFTER_MS = 300
"""Relayed heartbeats count once three of the node's own are missing."""

RELAYING_MS = 200
"""Heartbeats are relayed to nodes that have not heard their node for this long: sooner than they
believe relays, and not needlessly while all hear one another."""

BEATS_AT_ONCE = 100_000
BEATS_A_MS = 10
"""No node sends more: ten a second, and one more for some of its groups."""

START_MS = 100
"""No start takes less."""

MOST_DELAY_MS = 60_000
"""How long a heartbeat may have been under way when it arrived."""


@dataclass(frozen=True, slots=True)
class HeartbeatNews:
    """A heartbeat with new information; a direct one came from its own node."""

    heartbeat: Heartbeat
    is_direct: bool


@dataclass(slots=True)
class _Peer:
    """What was heard of one node.

    Attributes:
        newest: The newest of its heartbeats, sent by itself or relayed.
        direct: The newest that it sent itself.
        heard_ms: When it last sent anything itself.
        storage: The last folder with which it came itself, other than as an older copy.
        saves: The most saves of that folder.
    """

    newest: Heartbeat
    newest_at_ms: int
    direct: Heartbeat | None = None
    direct_ms: int = 0
    heard_ms: int | None = None
    is_connected: bool = True
    storage: str = ""
    saves: int = 0

    def is_heard(self, now_ms: int) -> bool:
        """Whether this node reaches it at present."""
        was_heard = self.heard_ms is not None and now_ms - self.heard_ms < HEARD_MS
        return was_heard and self.is_connected

    def note_saves(self, heartbeat: Heartbeat) -> None:
        """Notes how old the node's folder is, by what it says itself."""
        if heartbeat.storage == ROLLED_BACK:
            return
        known = self.saves if heartbeat.storage == self.storage else 0
        self.storage, self.saves = heartbeat.storage, max(heartbeat.saves, known)


class HeardHeartbeats:
    """What one node hears of the other configured nodes."""

    def __init__(self, config: MemberConfig) -> None:
        """Begins without having heard any node.

        `implausible` counts relayed heartbeats that were not from their nodes.
        """
        self.others = tuple(sorted(set(config.nodes) - {config.node}))
        self._peers: dict[str, _Peer] = {}
        self.implausible = 0

    def message(self, sender: str, now_ms: int) -> None:
        """Notes that a message came directly from a node."""
        peer = self._peers.get(sender)
        if peer is not None:
            peer.heard_ms, peer.is_connected = now_ms, True

    def gossip(self, sender: str, gossip: Gossip, now_ms: int) -> list[HeartbeatNews]:
        """Takes heartbeats; returns the new ones, the sender's own first."""
        news: list[HeartbeatNews] = []
        if gossip.heartbeat.node == sender and self._take_direct(gossip.heartbeat, now_ms):
            news.append(HeartbeatNews(gossip.heartbeat, is_direct=True))
        news += [
            HeartbeatNews(heartbeat, is_direct=False)
            for heartbeat in gossip.others
            if heartbeat.node in self.others
            and heartbeat.node != sender
            and self._take_relayed(heartbeat, gossip.heartbeat.heard.get(heartbeat.node), now_ms)
        ]
        return news

    def disconnected(self, peer: str) -> None:
        """Notes a broken connection: this node reaches that one only once it is heard again."""
        if peer in self._peers:
            self._peers[peer].is_connected = False

    def reachable(self, now_ms: int) -> list[str]:
        """The nodes that are heard at present, in order."""
        return [node for node, peer in self._known() if peer.is_heard(now_ms)]

    def heartbeats(self) -> Mapping[str, Heartbeat]:
        """The newest heartbeat of each node, received directly or relayed, in order."""
        return {node: peer.newest for node, peer in self._known()}

    def unheard_by(self, peer: str, now_ms: int) -> tuple[Heartbeat, ...]:
        """Returns the newest heartbeats of nodes that another node has not heard lately."""
        known = self._peers.get(peer)
        heard: Mapping[str, Heard] = {}
        since_ms = 0
        if known is not None and known.direct is not None:
            heard, since_ms = known.direct.heard, now_ms - known.direct_ms
        return tuple(
            heartbeat
            for node, heartbeat in self.heartbeats().items()
            if node != peer and (node not in heard or heard[node].ago_ms + since_ms >= RELAYING_MS)
        )

    def direct(self, node: str) -> Heartbeat | None:
        """Returns the newest heartbeat that a node itself sent."""
        peer = self._peers.get(node)
        return None if peer is None else peer.direct

    def heard_directly(self, now_ms: int) -> dict[str, Heard]:
        """Returns which nodes this node hears directly, for its heartbeat."""
        return {
            node: Heard(peer.direct.boot, max(0, now_ms - peer.heard_ms), peer.storage, peer.saves)
            for node, peer in self._known()
            if peer.direct is not None and peer.heard_ms is not None
        }

    def known_peers(self) -> dict[str, KnownPeer]:
        """Returns what is known of each other node, for the status."""
        return {node: KnownPeer(peer.newest, peer.heard_ms) for node, peer in self._known()}

    def terms(self, now_ms: int) -> list[Heartbeat]:
        """Returns the newest heartbeats of nodes that lately claimed to lead."""
        return [
            peer.newest
            for _, peer in self._known()
            if peer.newest.term is not None and now_ms - peer.newest_at_ms < HEARD_MS
        ]

    def leader_clock_ms(self, now_ms: int) -> int | None:
        """Returns the clock by which the newest leader lets wheels be sealed; None: by none.

        It is w, which was checked before it was moved, unless the leader's clock is behind that:
        no leader can reach back behind w, but a clock that is ahead is corrected.
        """
        newest = max(self.terms(now_ms), key=_epoch, default=None)
        if newest is None or newest.reached is None:
            return None
        clock_ms = newest.wall_ms + now_ms - self._peers[newest.node].newest_at_ms
        return min(clock_ms, newest.reached.due_ms)

    def agreed_clock_ms(self, own_clock_ms: int, now_ms: int) -> int:
        """Returns the wall clock on which most nodes agree.

        It is the median of the own clock and lower bounds of those that are heard; of two the
        lesser one.
        """
        heard_ms = [
            peer.direct.wall_ms + now_ms - peer.direct_ms
            for _, peer in self._known()
            if peer.is_heard(now_ms) and peer.direct is not None
        ]
        return sorted([own_clock_ms, *heard_ms])[len(heard_ms) // 2]

    def _known(self) -> list[tuple[str, _Peer]]:
        """Returns the nodes that were heard of, in order."""
        return [(node, self._peers[node]) for node in self.others if node in self._peers]

    def _take_direct(self, heartbeat: Heartbeat, now_ms: int) -> bool:
        if heartbeat.node not in self.others:
            return False
        peer = self._peers.setdefault(heartbeat.node, _Peer(heartbeat, now_ms))
        if peer.direct is not None and not _replaces(heartbeat, peer.direct):
            return False
        peer.note_saves(heartbeat)
        peer.direct, peer.direct_ms = heartbeat, now_ms
        if _replaces(heartbeat, peer.newest):
            peer.newest, peer.newest_at_ms = heartbeat, now_ms
        elif now_ms - peer.newest_at_ms >= HEARD_MS:
            self.implausible += 1
            peer.newest, peer.newest_at_ms = heartbeat, now_ms
        return True

    def _take_relayed(self, heartbeat: Heartbeat, heard: Heard | None, now_ms: int) -> bool:
        """Takes a relayed heartbeat; `heard` says when the relaying node heard its origin."""
        peer = self._peers.get(heartbeat.node)
        if peer is None:
            self._peers[heartbeat.node] = _Peer(heartbeat, now_ms)
            return True
        is_silent = peer.direct is None or now_ms - peer.direct_ms >= RELAYED_AFTER_MS
        if peer.is_connected and not is_silent:
            return False
        if heartbeat.storage == peer.newest.storage:
            is_newer = heartbeat.order > peer.newest.order
            if is_newer and not _may_follow(peer.newest, heartbeat, now_ms - peer.newest_at_ms):
                self.implausible += 1
                return False
        elif heard is None or heard.boot != heartbeat.boot:
            is_newer = False
        else:
            is_newer = peer.heard_ms is None or heard.ago_ms < now_ms - peer.heard_ms
        if is_newer:
            peer.newest, peer.newest_at_ms = heartbeat, now_ms
        return is_newer


def _may_follow(known: Heartbeat, heartbeat: Heartbeat, elapsed_ms: int) -> bool:
    """Whether a node can have started and sent this often since an earlier heartbeat."""
    elapsed_ms += MOST_DELAY_MS
    count = heartbeat.count - (known.count if heartbeat.start == known.start else 0)
    starts = heartbeat.start - known.start
    return starts <= elapsed_ms // START_MS and count <= BEATS_AT_ONCE + elapsed_ms * BEATS_A_MS


def _replaces(heartbeat: Heartbeat, known: Heartbeat) -> bool:
    return heartbeat.storage != known.storage or heartbeat.order > known.order


def _epoch(heartbeat: Heartbeat) -> int:
    assert heartbeat.term is not None
    return heartbeat.term.epoch
