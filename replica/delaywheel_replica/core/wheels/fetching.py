"""Decides which frames a member fetches, and from which nodes.

One mechanism for slow mirrors, for nodes that return or were wiped, for repair, closing and the
leader. For each wheel one request is under way at a time, for one run of wanted frames: the first
that some node can be asked for. So a hole that no node can fill delays neither other holes nor what
follows.

| a node | is asked |
|---|---|
| a member that reports holding the first frame of the run | first |
| a member that does not report it | when none of these can be asked |
| a member that said that it is missing that frame, and reports nothing newer | no |
| a member that did not answer, or that did not help with this frame | after a round |
| one that is not heard, or has another disk than the wheel was registered with | no |

A node that helped is asked again; otherwise they take turns. That a node is missing a frame counts
while it is heard and its heartbeats report nothing newer: it may have received it since.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel_replica.core.node.events import MemberConfig
from delaywheel_replica.core.protocol.heartbeat import MAX_SOUGHT, WheelHeartbeat
from delaywheel_replica.core.protocol.messages import Fetch, Lacks

_EVERY = 0
"""No frame has this seq."""

LATE_ANSWERS: Final = 64
"""Answers to this many requests of a wheel are taken, however late: a slow node answers late to all
of them."""


@dataclass(frozen=True, slots=True)
class Want:
    """The wanted frames of one wheel.

    Attributes:
        applied: The greatest seq that is held.
        missing: Single seqs that are wanted; some may be above `applied`.
        limit: All seqs above `applied` up to here are wanted; less than `applied`: none.
        heartbeats: Node -> what its newest heartbeat reports of the wheel, if anything.
        members: Node -> storage, as registered.
        storages: Node -> storage, as heard of each other node.
    """

    applied: int
    missing: SeqSet
    limit: int
    heartbeats: Mapping[str, WheelHeartbeat]
    members: Mapping[str, str]
    storages: Mapping[str, str]

    def runs(self) -> Iterator[tuple[int, int]]:
        """Returns the ranges to request next, as (first seq, last seq).

        Any part of a hole may be filled; behind `applied` only what follows on it.
        """
        yield from self.missing.head(MAX_SOUGHT).spans
        if self.limit > self.applied:
            yield self.applied + 1, self.limit

    def may_begin_at(self, seq: int) -> bool:
        """Whether a request may begin at this frame."""
        return seq in self.missing or seq == self.applied + 1

    def has(self, seq: int) -> bool:
        """Whether a frame is wanted."""
        return seq in self.missing or self.applied < seq <= self.limit

    def is_member(self, node: str) -> bool:
        """Whether another node is a member, with the storage that the wheel was registered with."""
        return node in self.storages and self.storages[node] == self.members.get(node)

    def shown(self, node: str) -> SeqSet:
        """Returns the frames that a node's newest heartbeat reports."""
        reported = self.heartbeats.get(node)
        return NO_SEQS if reported is None else reported.shown

    def shows(self, node: str, seq: int) -> bool:
        """Whether a node's newest heartbeat reports a frame."""
        reported = self.heartbeats.get(node)
        return reported is not None and reported.shows(seq)


@dataclass(slots=True)
class _SentRequest:
    """The last request that was sent for a wheel.

    Attributes:
        storage: The peer's, as registered.
        until_ms: When it counts as lost.
        under_way: It is not answered yet.
        judged: Whether it helped was checked.
    """

    peer: str
    storage: str
    fetch: Fetch
    until_ms: int
    under_way: bool = True
    judged: bool = False


@dataclass(slots=True)
class _FetchedWheel:
    """What is known of one wheel that is being fetched.

    Attributes:
        asked: The last request; None: none yet.
        passed_over: (seq, node) -> when a node that did not help with a frame may be asked for it
            again; with `_EVERY`, one that did not answer, for any frame.
        lacks: Node -> the frames that it said it does not have; of many spans only the first.
        requests: The newest requests, with the nodes that were asked.
    """

    asked: _SentRequest | None = None
    passed_over: dict[tuple[int, str], int] = field(default_factory=dict)
    lacks: dict[str, SeqSet] = field(default_factory=dict)
    requests: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=LATE_ANSWERS))

    def is_waiting(self, now_ms: int) -> bool:
        return self.asked is not None and self.asked.under_way and now_ms < self.asked.until_ms

    def is_over(self, since_ms: int) -> bool:
        """Whether nothing has been requested since, and no node is known to be missing anything."""
        return not self.lacks and (self.asked is None or self.asked.until_ms < since_ms)

    def doubt(self, want: Want | None, reachable: Collection[str]) -> None:
        """Forgets that a node was missing a frame: it may have received it since."""
        for node, seqs in list(self.lacks.items()):
            shown = NO_SEQS if want is None else want.shown(node)
            for seq, of in list(self.passed_over):
                if of == node and seq in seqs and seq in shown:
                    del self.passed_over[seq, of]
            self.keep(node, seqs - shown if node in reachable else NO_SEQS)

    def keep(self, node: str, seqs: SeqSet) -> None:
        """Notes which frames a node is missing, as far as they matter."""
        if seqs:
            self.lacks[node] = seqs.head(MAX_SOUGHT)
        else:
            self.lacks.pop(node, None)

    def judge(self, want: Want, now_ms: int, round_ms: int) -> None:
        """Skips for one round a node that was asked last without success."""
        self.passed_over = {key: ms for key, ms in self.passed_over.items() if ms > now_ms}
        asked = self.asked
        if asked is None or asked.judged:
            return
        asked.judged = True
        if asked.under_way:
            self.passed_over[_EVERY, asked.peer] = asked.until_ms + round_ms
        elif want.has(asked.fetch.first_seq):
            self.passed_over[asked.fetch.first_seq, asked.peer] = asked.until_ms + round_ms

    def whom(self, want: Want, seq: int, askable: list[str]) -> str | None:
        """Returns the nodes to ask: those reporting the frame first, then the others in turn."""
        candidates = [node for node in askable if self.next_asked(node, seq) == seq]
        begin = "" if self.asked is None else self.asked.peer
        candidates.sort(key=lambda node: (not want.shows(node, seq), node < begin, node))
        return candidates[0] if candidates else None

    def next_asked(self, node: str, seq: int) -> int:
        """Returns the first frame from this one on that some node can be asked for."""
        lacks = self.lacks.get(node, NO_SEQS)
        while True:
            seq = lacks.end_from(seq - 1) + 1
            if (seq, node) not in self.passed_over:
                return seq
            seq += 1


class Fetching:
    """The fetches of one node."""

    def __init__(self, config: MemberConfig) -> None:
        self._config = config
        self._last_request = 0
        self._wheels: dict[WheelId, _FetchedWheel] = {}
        # Long enough that, even if all but one node do not answer, time is left to ask that one.
        self._round_ms = config.fetch_timeout_ms * max(1, len(config.nodes) - 2)

    def plan(
        self, now_ms: int, wants: Mapping[WheelId, Want], reachable: Collection[str]
    ) -> list[tuple[str, Fetch]]:
        """Returns the requests to send now, by the monotonic clock.

        Wheels being written are left out of the wants; reachable nodes are those that are heard.
        """
        for wheel, state in list(self._wheels.items()):
            state.doubt(wants.get(wheel), reachable)
            if wheel not in wants and state.is_over(now_ms - self._round_ms):
                del self._wheels[wheel]
        planned = []
        for wheel, want in sorted(wants.items(), key=itemgetter(0)):
            state = self._wheels.setdefault(wheel, _FetchedWheel())
            if state.is_waiting(now_ms):
                continue
            state.judge(want, now_ms, self._round_ms)
            planned += self._ask(wheel, want, reachable, now_ms)
        return planned

    def answered(self, request: int) -> None:
        """Notes the answer to a request, so that the next may be sent."""
        for state in self._wheels.values():
            if state.asked is not None and state.asked.fetch.request == request:
                state.asked.under_way = False

    def has_asked(self, peer: str, wheel: WheelId, request: int) -> bool:
        """Whether a node was asked for frames of a wheel with this number, even if long ago."""
        state = self._wheels.get(wheel)
        return state is not None and (peer, request) in state.requests

    def lacks(self, sender: str, message: Lacks) -> None:
        """Notes that another member has none of these frames.

        Reports from another storage than its own say nothing of the member.
        """
        state = self._wheels.get(message.wheel)
        asked = None if state is None else state.asked
        if state is None or asked is None:
            return
        if (message.request, sender) != (asked.fetch.request, asked.peer):
            return
        asked.under_way = False
        if message.storage != asked.storage:
            return
        reported = message.seqs.within(asked.fetch.first_seq, asked.fetch.last_seq)
        state.keep(sender, state.lacks.get(sender, NO_SEQS) | reported)

    def reported_lacks(self) -> dict[WheelId, dict[str, SeqSet]]:
        """Returns what the other members reported as missing, by wheel."""
        return {wheel: dict(state.lacks) for wheel, state in self._wheels.items() if state.lacks}

    def look_only_for(self, wheel: WheelId, seqs: SeqSet) -> None:
        """Limits the search in a wheel to these frames."""
        state = self._wheels.get(wheel)
        if state is not None:
            for node, lacks in list(state.lacks.items()):
                state.keep(node, lacks & seqs)

    def forget(self, wheel: WheelId) -> None:
        """Drops a wheel."""
        self._wheels.pop(wheel, None)

    def _ask(
        self, wheel: WheelId, want: Want, reachable: Collection[str], now_ms: int
    ) -> list[tuple[str, Fetch]]:
        """Requests the first range that some node can be asked for, if there is one."""
        state, config = self._wheels[wheel], self._config
        askable = [
            node
            for node in sorted(want.members)
            if node in reachable
            and want.is_member(node)
            and (_EVERY, node) not in state.passed_over
        ]
        for first, last in want.runs():
            seq = min((state.next_asked(node, first) for node in askable), default=last + 1)
            if seq > last or not want.may_begin_at(seq):
                continue
            peer = state.whom(want, seq, askable)
            assert peer is not None
            self._last_request += 1
            fetch = Fetch(self._last_request, wheel, seq, last)
            until_ms = now_ms + config.fetch_timeout_ms
            state.asked = _SentRequest(peer, want.members[peer], fetch, until_ms)
            state.requests.append((peer, fetch.request))
            return [(peer, fetch)]
        return []
