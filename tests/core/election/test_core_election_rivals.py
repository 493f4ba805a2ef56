"""Rivals: several election machines over a model of Kafka's fencing, in any interleaving.

The model keeps the last candidate to init each transactional id; a transaction is committed only
for that candidate. Requests are carried out at any time, even after their node has given up;
replies come late or get lost; nodes restart. In every case a progress record is committed only by
the candidate that last read the control topic with its own marks newest, and no other node comes to
lead.

Walks are random and seeded: five steps in a row make a leader, and hypothesis, which draws its
rules evenly, hardly ever gets there twice.
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest

from delaywheel_replica.core.election.events import (
    IN_TERM,
    BecomeLeader,
    CommitMark,
    ControlRead,
    DestroyProducers,
    Effect,
    ElectionTick,
    Event,
    IdleCommit,
    InitFailed,
    InitProducers,
    InitsDone,
    MarkReport,
    ReadControl,
    ReadFailed,
    TransactionReport,
)
from delaywheel_replica.core.election.machine import (
    MAX_SILENCE_MS,
    MIN_SILENCE_MS,
    Election,
    ElectionConfig,
)
from delaywheel_replica.core.protocol.control import ControlState, leader_record, progress_record
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState

IDS = 2
NODES = 2


@dataclass
class Request:
    """A node's request to Kafka that is not answered yet."""

    node: int
    run: int
    effect: InitProducers | CommitMark | ReadControl | IdleCommit
    uninited: set[int] = field(default_factory=lambda: set(range(IDS)))


@dataclass
class Reply:
    """Kafka's answer, under way to the run of the node that asked."""

    node: int
    run: int
    event: Event


class Rivals:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_ms = 0
        self.owners: dict[int, str] = {}
        self.control = ControlState()
        self.offset = 0
        self.requests: list[Request] = []
        self.replies: list[Reply] = []
        self.runs = [0] * NODES
        self.elections = [self._new(node) for node in range(NODES)]
        self.has_producers = [False] * NODES
        self.last_elected = ""
        self.next_id = 0
        self.happened: Counter[str] = Counter()

    def _new(self, node: int) -> Election:
        self.runs[node] += 1
        # Alone, wrongly: so that all of them stand as early and as often as can be.
        return Election(ElectionConfig(run=f"{node}-{self.runs[node]}", ids=IDS))

    def walk(self, steps: int) -> None:
        rules = {self.tick: 20, self.carry_out: 60, self.deliver: 60, self.restart: 1}
        for rule in self.random.choices(list(rules), list(rules.values()), k=steps):
            rule()
            self.check()

    def tick(self) -> None:
        self.now_ms += self.random.choice([0, 10, 310, 2_000])
        tick = ElectionTick(self.now_ms, self.now_ms, server_fresh=True, holds_progress=True)
        self._step(self.random.randrange(NODES), tick)

    def restart(self) -> None:
        node = self.random.randrange(NODES)
        self.elections[node] = self._new(node)
        self.has_producers[node] = False

    def carry_out(self) -> None:
        if not self.requests:
            return
        request = self.random.choice(self.requests)
        fate = self.random.choices(["done", "reply lost", "request lost"], [18, 1, 1])[0]
        if isinstance(request.effect, InitProducers):
            self._init(request, self.random.choice([[0, 1], [0], [1]]), fate)
        else:
            self._transact(request, fate)

    def _transact(self, request: Request, fate: str) -> None:
        assert not isinstance(request.effect, InitProducers)
        self.requests.remove(request)
        done = fate != "request lost" and self._carry_out(request.effect)
        answered = fate == "done"
        self._answer(request, self._event(request.effect, done=done, answered=answered))

    def _init(self, request: Request, inits: list[int], fate: str) -> None:
        """Carries inits out in any order and in parts, so that candidates init crosswise."""
        token = request.effect.token
        if fate == "request lost":
            self.requests.remove(request)
            self._answer(request, InitFailed(self.now_ms, token, TransactionState.UNKNOWN))
            return
        self.owners |= dict.fromkeys(inits, token)
        request.uninited -= set(inits)
        if not request.uninited:
            self.requests.remove(request)
            self._answer(request, InitsDone(self.now_ms, token))

    def _carry_out(self, effect: CommitMark | ReadControl | IdleCommit) -> bool:
        """Whether Kafka accepts it; a transaction only from the id's owner."""
        if isinstance(effect, ReadControl):
            marks = self.control.leaders.values()
            if [mark.token for mark in marks] == [effect.token] * IDS:
                self.last_elected = effect.token
            else:
                self.happened["read another's mark"] += 1
            return True
        index = effect.index if isinstance(effect, CommitMark) else self.next_id
        self.next_id = (self.next_id + 1) % IDS
        if self.owners.get(index) != effect.token:
            self.happened["fenced while leading"] += isinstance(effect, IdleCommit)
            return False
        if isinstance(effect, CommitMark):
            record = leader_record(index, "node", effect.token)
        else:
            assert effect.token == self.last_elected, "two leaders"
            self.happened["committed"] += 1
            record = progress_record(Progress(0, None))
        self.offset += 1
        self.control = self.control.apply(*record, self.offset)
        return True

    def _event(
        self, effect: CommitMark | ReadControl | IdleCommit, *, done: bool, answered: bool
    ) -> Event:
        token = effect.token
        if isinstance(effect, ReadControl):
            if answered:
                return ControlRead(self.now_ms, token, self.control)
            return ReadFailed(self.now_ms, token)
        known = TransactionState.COMMITTED if done else TransactionState.FENCED
        verdict = known if answered else TransactionState.UNKNOWN
        if isinstance(effect, CommitMark):
            return MarkReport(self.now_ms, token, effect.index, verdict)
        return TransactionReport(self.now_ms, token, verdict, commit_ms=5)

    def _answer(self, request: Request, event: Event) -> None:
        self.replies.append(Reply(request.node, request.run, event))

    def deliver(self) -> None:
        if not self.replies:
            return
        reply = self.replies.pop(self.random.randrange(len(self.replies)))
        if reply.run == self.runs[reply.node]:
            self._step(reply.node, reply.event)

    def _step(self, node: int, event: Event) -> None:
        for effect in self.elections[node].step(event):
            self._take(node, effect)

    def _take(self, node: int, effect: Effect) -> None:
        match effect:
            case InitProducers():
                assert not self.has_producers[node]
                self.has_producers[node] = True
            case DestroyProducers():
                assert self.has_producers[node]
                self.has_producers[node] = False
            case BecomeLeader():
                self.happened["came to lead"] += 1
                marks = effect.state.leaders.values()
                assert [mark.token for mark in marks] == [self.elections[node].token] * IDS
                assert effect.epoch == max(mark.offset for mark in marks)
        if isinstance(effect, InitProducers | CommitMark | ReadControl | IdleCommit):
            self.requests.append(Request(node, self.runs[node], effect))

    def check(self) -> None:
        for election, has_producers in zip(self.elections, self.has_producers, strict=True):
            assert MIN_SILENCE_MS <= election.silence_ms <= MAX_SILENCE_MS
            in_term = election.phase in IN_TERM
            assert (election.epoch is not None) == in_term
            assert has_producers or not in_term


@pytest.mark.parametrize("seeds", [range(first, first + 50) for first in range(0, 200, 50)])
def test_only_the_last_elected_commits(seeds: range) -> None:
    happened: Counter[str] = Counter()
    for seed in seeds:
        rivals = Rivals(seed)
        rivals.walk(600)
        happened += rivals.happened
    assert happened["came to lead"] > 50
    assert happened["committed"] > 50
    assert happened["fenced while leading"] > 10
    assert happened["read another's mark"] > 0
