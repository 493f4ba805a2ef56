"""Prevote: whether the other nodes hear no leader either, before a node stands.

A node agrees when all of these hold:

| | |
|---|---|
| it hears no leader | but the asker, for the requested silence, from its start at the earliest |
| it neither leads nor stands itself | standing is a vote for itself |
| it has voted for no other node | for that silence |
| it does not ask itself | or the other comes before it in order: then it gives up its own round |

Agreeing counts as having heard a leader, for this node and so for any node that asks it next; the
same round of the same node is answered again without a new count, as the answer may be lost. A
leader that asks has ended its term, and nothing is disturbed if it stands again. If two ask at once
one gives way, and a node that asks without success blocks the others no longer than once per round.
"""

from dataclasses import dataclass

from delaywheel_replica.core.protocol.messages import PrevoteRequest, Vote


@dataclass(frozen=True, slots=True)
class _Given:
    node: str
    round: int
    at_ms: int


class Prevote:
    """A node's knowledge of leaders, and the votes it has received."""

    def __init__(self, node: str, now_ms: int) -> None:
        self._node = node
        # None: the leader is gone, which counts as any length of silence.
        self._quiet_since_ms: int | None = now_ms
        self._leader: str | None = None
        self._leader_ms: int | None = None
        self._given: _Given | None = None
        self._request: PrevoteRequest | None = None
        self._gave_way = False
        self.votes: frozenset[str] = frozenset()

    @property
    def leader_heard_ms(self) -> int | None:
        """When a leader was last heard, or a vote last given."""
        times = [self._leader_ms, None if self._given is None else self._given.at_ms]
        return max((at_ms for at_ms in times if at_ms is not None), default=None)

    @property
    def round(self) -> int:
        """The round of voting that `votes` belong to; 0: none."""
        return 0 if self._request is None else self._request.round

    def leader_heard(self, node: str, now_ms: int) -> None:
        """Notes that a node itself claims to lead."""
        self._leader = node
        self._leader_ms = self._quiet_since_ms = now_ms

    def gone(self, peer: str) -> bool:
        """Notes that a node is gone, or leads no more; returns whether it was the leader."""
        if peer != self._leader:
            return False
        self._leader = self._leader_ms = self._quiet_since_ms = None
        return True

    def requested(self, request: PrevoteRequest | None) -> bool:
        """Notes the cleaner's request for votes; returns whether a new round begins."""
        if request == self._request:
            return False
        self._request = request
        self._gave_way = False
        self.votes = frozenset()
        return request is not None

    def ask(self) -> PrevoteRequest | None:
        """Returns what to ask the other nodes now."""
        return None if self._gave_way else self._request

    def voted(self, sender: str, vote: Vote) -> bool:
        """Counts another node's vote; returns whether it is new."""
        if self.ask() is None or vote.round != self.round or sender in self.votes:
            return False
        self.votes |= {sender}
        return True

    def asked(
        self, sender: str, request: PrevoteRequest, now_ms: int, *, stands: bool
    ) -> Vote | None:
        """Returns the answer to another node's request for a vote, if this node agrees.

        `stands` says whether this node's cleaner leads, or is about to.
        """
        if stands or (self.ask() is not None and self._node < sender):
            return None
        if sender != self._leader and not self._is_quiet(request.silence_ms, now_ms):
            return None
        given = self._given
        if given is not None and now_ms - given.at_ms < request.silence_ms:
            if given.node != sender:
                return None
            if given.round == request.round:
                return Vote(request.round)
        self._given = _Given(sender, request.round, now_ms)
        if self._request is not None:
            self._gave_way = True
            self.votes = frozenset()
        return Vote(request.round)

    def _is_quiet(self, silence_ms: int, now_ms: int) -> bool:
        since_ms = self._quiet_since_ms
        return since_ms is None or now_ms - since_ms >= silence_ms
