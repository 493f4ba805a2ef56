"""How a member handles other nodes' messages, and what it answers.

Part of the member machine (member.py), which steps it: only `Member.step` handles messages.
"""

from collections.abc import Iterable

from delaywheel.identity import WheelId
from delaywheel_replica.core.member.parts import Parts
from delaywheel_replica.core.node.events import (
    Effect,
    Send,
    Serve,
    WriteStatus,
)
from delaywheel_replica.core.node.heard_heartbeats import HeartbeatNews
from delaywheel_replica.core.node.plausible import known_number, tempered
from delaywheel_replica.core.protocol.heartbeat import Fence, FenceAnswer, Heartbeat
from delaywheel_replica.core.protocol.messages import (
    Applied,
    Fetch,
    Frames,
    Gossip,
    Lacks,
    PeerMessage,
    PrevoteRequest,
    Promise,
    Refused,
    Vote,
)
from delaywheel_replica.core.protocol.status_files import Role
from delaywheel_replica.core.wheels.fencing import answer


class PeerMessages:
    """Takes messages of other nodes, and changes the parts of the machine accordingly."""

    def __init__(self, parts: Parts) -> None:
        self._known = parts.known
        self._hearing = parts.hearing
        self._prevote = parts.prevote
        self._fencing = parts.fencing
        self._completeness = parts.completeness
        self._inventory = parts.inventory
        self._verifying = parts.verifying
        self._current = parts.current
        self._node_file = parts.node_file
        self._mirrors = parts.mirrors

    def received(  # noqa: C901, PLR0911 - one for each message
        self, sender: str, message: PeerMessage
    ) -> list[Effect]:
        """Takes one message; one of an unknown node is ignored."""
        if sender not in self._hearing.others:
            return []
        self._hearing.message(sender, self._known.now_ms)
        match message:
            case Gossip():
                return self._gossiped(sender, message)
            case Frames():
                return self._mirrors.came(sender, message)
            case Applied():
                self._current.applied(sender, message)
                return self._current.pushes()
            case Refused():
                self._refused(message)
                return []
            case Fetch():
                return self._serve(sender, message)
            case Lacks():
                self._mirrors.note_lacks(sender, message)
                return self._mirrors.fetch()
            case Promise():
                return self._promised(sender, message.answer)
            case PrevoteRequest():
                return self._asked_vote(sender, message)
            case Vote():
                return [WriteStatus()] if self._prevote.voted(sender, message) else []

    def _refused(self, message: Refused) -> None:
        """Fences own wheels: one member that refuses them is enough to prevent acknowledgement."""
        node = self._known.node
        if message.origin == node:
            upto = min(message.upto, self._known_number(node))
            self._asked([Fence(node, upto)])

    def _known_number(self, origin: str) -> int:
        """Returns the highest plausible wheel number: promises beyond it would bind forever."""
        known = self._known
        registered = () if known.registry is None else known.registry.wheels
        held = {*self._inventory, *self._verifying.wheels}
        number = known_number(origin, registered, held, self._hearing.heartbeats())
        return max(number, known.state.last_number) if origin == known.node else number

    def _asked(self, fences: Iterable[Fence]) -> None:
        if self._fencing.asked(fences, self._known.state):
            self._node_file.changed()

    def promise_away(self, wheels: Iterable[WheelId]) -> None:
        """Fences wheels of other nodes that cannot be written here: their origins leave them."""
        self._asked([Fence(wheel.node, wheel.number) for wheel in wheels])

    def _gossiped(self, sender: str, gossip: Gossip) -> list[Effect]:
        known, now_ms = self._known, self._known.now_ms
        effects: list[Effect] = []
        most_slot = known.wall_ms // 1000 - known.config.late_window_s
        heartbeats = [
            tempered(heartbeat, most_slot) for heartbeat in (gossip.heartbeat, *gossip.others)
        ]
        news = self._hearing.gossip(sender, Gossip(heartbeats[0], tuple(heartbeats[1:])), now_ms)
        self._hearing.message(sender, now_ms)
        for each in news:
            effects += self._heard(each)
        if news and news[0].is_direct:
            effects += self._current.pushes()
        return effects

    def _heard(self, news: HeartbeatNews) -> list[Effect]:
        heartbeat, known = news.heartbeat, self._known
        effects = self.update_if_leading() if self._inventory.heard(heartbeat) else []
        if news.is_direct:
            self._completeness.heard(heartbeat)
            self._current.heard(heartbeat)
            effects += self._refuse_named(heartbeat)
        is_waited_for = heartbeat.stands or heartbeat.term is not None
        if news.is_direct and is_waited_for:
            self._prevote.leader_heard(heartbeat.node, known.now_ms)
        elif news.is_direct and self._prevote.gone(heartbeat.node):
            effects.append(WriteStatus())  # the cleaner may stand at once
        if heartbeat.term is None:
            return effects
        self._fencing.filled(heartbeat.term.fills)
        self._asked(f for f in heartbeat.term.fences if f.upto <= self._known_number(f.origin))
        return [*effects, *self.answer_leader(heartbeat)]

    def _refuse_named(self, heartbeat: Heartbeat) -> list[Effect]:
        """Warns an origin that uses fenced wheels, before any caller's frames are at stake."""
        upto = self._known.state.fenced.get(heartbeat.node, 0)
        if all(wheel.number > upto for wheel in heartbeat.named):
            return []
        return [Send(heartbeat.node, Refused(heartbeat.node, upto))]

    def answer_leader(self, heartbeat: Heartbeat) -> list[Effect]:
        """Sends a leader this node's durable answers to the fences it asks for."""
        fences = () if heartbeat.term is None else heartbeat.term.fences
        return [Send(heartbeat.node, Promise(found)) for found in self.answers(fences)]

    def answers(self, fences: Iterable[Fence]) -> list[FenceAnswer]:
        """Returns this node's durable answers, at most one for each origin."""
        state = self._known.state
        found = (answer(state, fence, self._inventory, self._verifying) for fence in sorted(fences))
        return [each for each in found if each is not None]

    def _promised(self, sender: str, given: FenceAnswer) -> list[Effect]:
        """Keeps another node's answer to a fence; answers about unknown origins are dropped."""
        origin = given.fence.origin
        is_configured = origin in {self._known.node, *self._hearing.others}
        if not is_configured and self._known_number(origin) == 0:
            return []
        return [WriteStatus()] if self._fencing.answered(sender, given) else []

    def update_if_leading(self) -> list[Effect]:
        """Updates the status at once if the own cleaner leads."""
        return [] if self._known.term is None else [WriteStatus()]

    def _serve(self, sender: str, fetch: Fetch) -> list[Effect]:
        """Serves frames, except those that were never written or not reported yet."""
        if fetch.wheel in self._verifying:
            return []  # the asking node will ask another, and again
        writing, held = self._current.writing, self._inventory.get(fetch.wheel)
        if writing is not None and writing.wheel == fetch.wheel:
            end = writing.last_seq
        elif fetch.wheel == self._current.wheel:
            return []
        else:
            end = 0 if held is None else held.applied
        if fetch.first_seq <= end:
            last_seq = min(fetch.last_seq, end)
            return [Serve(sender, fetch.wheel, fetch.first_seq, last_seq, fetch.request)]
        lacks = Lacks(
            fetch.request, fetch.wheel, self._known.storage, fetch.first_seq, fetch.last_seq
        )
        return [Send(sender, lacks)]

    def _asked_vote(self, sender: str, ask: PrevoteRequest) -> list[Effect]:
        known = self._known
        cleaner = known.living_cleaner
        stands = known.term is not None or (
            cleaner is not None
            and cleaner.role is Role.CANDIDATE
            and cleaner.prevote_request is None
        )
        vote = self._prevote.asked(sender, ask, known.now_ms, stands=stands)
        return [] if vote is None else [Send(sender, vote), WriteStatus()]

    def ask_votes(self) -> list[Effect]:
        """Asks all other nodes for votes, if the own cleaner wants any."""
        ask = self._prevote.ask()
        return [] if ask is None else [Send(peer, ask) for peer in self._hearing.others]
