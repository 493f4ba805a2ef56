"""Messages between nodes: delayed, lost, doubled, out of order, or never delivered.

Each direction between two nodes is a separate `Link`. Messages are handed over uncopied, so
they must be immutable.

Modelled after connections:

| what happens | messages under way | notified |
|---|---|---|
| the receiver's process dies | lost | its peers (`on_disconnect`), unless the machine died |
| the sender's process dies | still arrive | as above |
| a type of message is muted | lost, as any may be | none |
| a direction is blocked, the connection breaks | lost, as all while it is blocked | both ends |
| a direction is blocked, it does not break | kept, and arrive late, when the block ends | none |
| the latter for `PATIENCE_US` | lost | both ends |
| the receiver is paused | arrive when it is resumed | none |

A broken connection is restored by the next message that gets through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from sim.machine.scheduler import US_PER_MS, US_PER_S, Process, Scheduler

PATIENCE_US = 10 * US_PER_S
"""How long a blocked connection keeps messages before it breaks."""

HELD = 512
"""How many messages a blocked connection keeps; the rest are lost."""

BREAK_NOTICED_US = 2 * US_PER_MS

STRAY_US = 20 * US_PER_MS
"""How much longer an out-of-order message may take."""

OnMessage = Callable[[str, Any], None]
OnDisconnect = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Quality:
    """How good a link is."""

    delay_us: int = 150
    """The minimum delay of a message."""
    jitter_us: int = 100
    """The mean of the additional delay, which is exponentially distributed."""
    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    """How likely a message may overtake others, or be overtaken."""
    break_chance: float = 0.5
    """How likely the connection breaks when a block begins."""


HEALTHY = Quality()


class Link:
    """One direction between two nodes.

    Attributes:
        quality: Its quality; replace it at any time.
        blocks: How many reasons keep it blocked.
        blocked_times: How often it became blocked.
        holds: While it is blocked: messages are kept.
        held: The messages kept.
        connection: The number of its connection; messages sent on an earlier one never arrive.
        last_us: When the last message arrives.
    """

    __slots__ = (
        "blocked_times",
        "blocks",
        "connection",
        "dst",
        "held",
        "holds",
        "last_us",
        "quality",
        "src",
    )

    def __init__(self, src: str, dst: str, quality: Quality) -> None:
        self.src = src
        self.dst = dst
        self.quality = quality
        self.blocks = 0
        self.blocked_times = 0
        self.holds = False
        self.held: list[Any] = []
        self.connection = 0
        self.last_us = 0


class _End:
    """One life of a node, as the network knows it."""

    __slots__ = ("on_disconnect", "on_message", "owner")

    def __init__(self, owner: Process, on_message: OnMessage, on_disconnect: OnDisconnect) -> None:
        self.owner = owner
        self.on_message = on_message
        self.on_disconnect = on_disconnect


class Network:
    """All links between all nodes.

    Attributes:
        sent: The number of messages sent.
        delivered: The number of messages that arrived, doubles included.
    """

    def __init__(self, scheduler: Scheduler, *, quality: Quality = HEALTHY) -> None:
        """Begins without nodes.

        Args:
            scheduler: The source of true time.
            quality: The quality of links not used before.
        """
        self.sent = 0
        self.delivered = 0
        self._scheduler = scheduler
        self._random = scheduler.stream("network")
        self._quality = quality
        self._ends: dict[str, _End] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._muted: Counter[tuple[str, str, str]] = Counter()
        self._healed = 0

    def attach(
        self, node: str, owner: Process, on_message: OnMessage, on_disconnect: OnDisconnect
    ) -> None:
        """Registers a process of this node as listening.

        Args:
            node: Its name.
            owner: The process; when it is dead nothing arrives, when it is paused later.
            on_message: Called with the sender and the message, in the hub.
            on_disconnect: Called with the peer to whom the connection broke, in the hub.
        """
        self._ends[node] = _End(owner, on_message, on_disconnect)

    def detach(self, node: str, *, silently: bool = False) -> None:
        """Notes that the node's process died.

        Args:
            node: The node.
            silently: Its whole machine died, so that its peers are not notified.
        """
        self._ends.pop(node, None)
        if silently:
            return
        for peer in self._ends:
            if not self.is_blocked(node, peer):
                self._tell_broken(peer, node)

    def send(self, src: str, dst: str, message: Any) -> None:
        """Sends one message, which may be lost."""
        self.sent += 1
        if self._muted and self._muted[src, dst, type(message).__name__] > 0:
            return
        link = self.link(src, dst)
        if link.blocks:
            if link.holds and len(link.held) < HELD:
                link.held.append(message)
            return
        quality = link.quality
        if quality.loss and self._random.random() < quality.loss:
            return
        self._forward(link, message)
        if quality.duplication and self._random.random() < quality.duplication:
            self._forward(link, message)

    def link(self, src: str, dst: str) -> Link:
        """One direction between two nodes."""
        link = self._links.get((src, dst))
        if link is None:
            link = self._links[src, dst] = Link(src, dst, self._quality)
        return link

    def is_blocked(self, src: str, dst: str) -> bool:
        """Whether nothing gets through in this direction."""
        return self.link(src, dst).blocks > 0

    def block(self, src: str, dst: str) -> None:
        """Blocks this direction until `unblock` was called as often."""
        link = self.link(src, dst)
        link.blocks += 1
        if link.blocks > 1:
            return
        link.blocked_times += 1
        link.holds = self._random.random() >= link.quality.break_chance
        if link.holds:
            self._scheduler.call_later(PATIENCE_US, self._give_up, link, link.blocked_times)
        else:
            self._break(link)

    def unblock(self, src: str, dst: str) -> None:
        """Takes back one `block`."""
        link = self.link(src, dst)
        if link.blocks == 0:
            return
        link.blocks -= 1
        if link.blocks == 0:
            held, link.held = link.held, []
            for message in held:
                self._forward(link, message)

    def mute(self, src: str, dst: str, kind: str) -> None:
        """Loses all messages of one type in this direction until `unmute` was called as often."""
        self._muted[src, dst, kind] += 1

    def unmute(self, src: str, dst: str, kind: str) -> None:
        """Takes back one `mute`."""
        self._muted[src, dst, kind] -= 1

    def cut(self, one: str, other: str) -> None:
        """Blocks both directions."""
        self.block(one, other)
        self.block(other, one)

    def mend(self, one: str, other: str) -> None:
        """Takes back one `cut`."""
        self.unblock(one, other)
        self.unblock(other, one)

    def partition(self, side: Collection[str], rest: Iterable[str]) -> None:
        """Cuts every node of one side off from all others."""
        for one in sorted(side):
            for other in sorted(set(rest) - set(side)):
                self.cut(one, other)

    def flap(self, src: str, dst: str, *, period_us: int, until_us: int) -> None:
        """Blocks and unblocks a direction in turns, each for up to twice the period."""
        self._turn(self.link(src, dst), period_us, until_us, self._healed)

    def heal(self) -> None:
        """Ends all blocks and flapping, and restores the initial quality of all links."""
        self._healed += 1
        self._muted.clear()
        for link in self._links.values():
            link.quality = self._quality
            link.blocks = min(link.blocks, 1)
            self.unblock(link.src, link.dst)

    def _turn(self, link: Link, period_us: int, until_us: int, healed: int) -> None:
        """Blocks a flapping link, and schedules the end of the block."""
        now_us = self._scheduler.now_us
        if healed != self._healed or now_us >= until_us:
            return
        self.block(link.src, link.dst)
        up_us = now_us + self._random.randrange(1, 2 * period_us)
        down_us = up_us + self._random.randrange(1, 2 * period_us)
        self._scheduler.call_at(up_us, self._end_turn, link, healed)
        self._scheduler.call_at(down_us, self._turn, link, period_us, until_us, healed)

    def _end_turn(self, link: Link, healed: int) -> None:
        if healed == self._healed:
            self.unblock(link.src, link.dst)

    def _give_up(self, link: Link, blocked_times: int) -> None:
        """Breaks a connection that has kept its messages for too long."""
        if link.blocks and link.blocked_times == blocked_times:
            self._break(link)

    def _break(self, link: Link) -> None:
        """Breaks the connection between two nodes: both directions lose what is under way."""
        for src, dst in ((link.src, link.dst), (link.dst, link.src)):
            broken = self.link(src, dst)
            broken.holds = False
            broken.connection += 1
            broken.held.clear()
            if src in self._ends:
                self._tell_broken(src, dst)

    def _tell_broken(self, node: str, peer: str) -> None:
        end = self._ends[node]
        self._scheduler.call_later(BREAK_NOTICED_US, end.on_disconnect, peer, owner=end.owner)

    def _forward(self, link: Link, message: Any) -> None:
        """Sends one copy on its way."""
        end = self._ends.get(link.dst)
        if end is None:
            return
        quality, random = link.quality, self._random
        at_us = self._scheduler.now_us + quality.delay_us
        if quality.jitter_us:
            at_us += int(random.expovariate(1.0) * quality.jitter_us)
        if quality.reordering and random.random() < quality.reordering:
            at_us += int(random.random() * STRAY_US)
        else:
            link.last_us = at_us = max(at_us, link.last_us)
        self._scheduler.call_at(
            at_us, self._deliver, link, link.connection, end, message, owner=end.owner
        )

    def _deliver(self, link: Link, connection: int, end: _End, message: Any) -> None:
        if connection == link.connection and self._ends.get(link.dst) is end:
            self.delivered += 1
            end.on_message(link.src, message)
