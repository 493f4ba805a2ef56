"""Models some nodes that all want to lead, and slow brokers: does one of them succeed?

Real election machines and real votes, in lockstep. Nothing is lost and no node dies; what differs
from run to run is when each node starts and how long Kafka takes.

A leader's main thread stands still while it commits. All hear the leader as long as its row is
fresh: it is stamped meanwhile, until the machine says that the leader no longer counts.
"""

from dataclasses import dataclass, field

from delaywheel.transactional import MAX_CALL_MS
from delaywheel_replica.cleaner.candidacy import MARK_MS
from delaywheel_replica.cleaner.leadership import MIN_CALL_MS
from delaywheel_replica.core.election.events import (
    CANDIDATE,
    IN_TERM,
    CommitMark,
    ControlRead,
    DestroyProducers,
    Effect,
    ElectionTick,
    Event,
    IdleCommit,
    InitProducers,
    InitsDone,
    MarkReport,
    ReadControl,
    TransactionReport,
)
from delaywheel_replica.core.election.machine import Election, ElectionConfig
from delaywheel_replica.core.member.prevote import Prevote
from delaywheel_replica.core.protocol.control import ControlState, LeaderRecord
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import CLEANER_FRESH_MS
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState

STEP_MS = 50
IDS = 2


@dataclass
class Candidate:
    """One node: `busy` is its request to Kafka, with the time when that is done."""

    name: str
    starts_ms: int
    election: Election
    voting: Prevote
    busy: list[tuple[int, Effect]] = field(default_factory=list)
    inited: int = 0
    term_ms: int | None = None
    candidacies: int = 0
    row_ms: int = 0
    given_ms: int = 0
    stood_ms: int = 0


class Standing:
    """One run."""

    def __init__(
        self, starts_ms: tuple[int, ...], *, init_ms: int, commit_ms: int, check_ms: int = 0
    ) -> None:
        """Begins before any node has stood.

        Args:
            starts_ms: the start of each node.
            init_ms: the duration of a candidacy's inits; the second id follows the first.
            commit_ms: the duration of a commit.
            check_ms: the time until Kafka first answers a candidate.
        """
        self.now_ms = 0
        self.lasted_ms = 0
        self._init_ms = init_ms
        self._check_ms = check_ms
        self.commit_ms = commit_ms
        self._owners = [""] * IDS
        self._marks = [""] * IDS
        nodes, required = len(starts_ms), len(starts_ms) // 2 + 1
        self.candidates = [
            Candidate(
                name,
                starts,
                Election(ElectionConfig(name, nodes=nodes, required=required, rank=rank)),
                Prevote(name, starts),
            )
            for rank, (name, starts) in enumerate(zip("abcde", starts_ms, strict=False))
        ]

    def run(self, seconds: int, *, lasting_ms: int) -> bool:
        """Whether one node has led for this long without a break."""
        while self.now_ms < seconds * 1000:
            self.now_ms += STEP_MS
            for candidate in self.candidates:
                if candidate.starts_ms <= self.now_ms:
                    self._go_on(candidate)
            led_ms = [self.now_ms - c.term_ms for c in self.candidates if c.term_ms is not None]
            self.lasted_ms = max(led_ms, default=0)
            if self.lasted_ms >= lasting_ms:
                return True
        return False

    def _go_on(self, candidate: Candidate) -> None:
        while candidate.busy and candidate.busy[0][0] <= self.now_ms:
            _, effect = candidate.busy.pop(0)
            self._carry_out(candidate, effect)
        self._vote(candidate)
        if candidate.election.phase in IN_TERM and candidate.busy:
            if self.now_ms <= candidate.election.waits_until_ms:
                candidate.row_ms = self.now_ms
            return
        candidate.row_ms = self.now_ms
        voting = candidate.voting
        tick = ElectionTick(
            self.now_ms,
            self.now_ms,
            server_fresh=True,
            holds_progress=True,
            heard_ms=voting.leader_heard_ms,
            votes=voting.votes,
            vote_round=voting.round,
        )
        self._notify(candidate, tick)

    def _vote(self, candidate: Candidate) -> None:
        voting = candidate.voting
        voting.requested(candidate.election.prevote_request)
        ask = voting.ask()
        for other in self.candidates:
            if other is candidate or other.starts_ms > self.now_ms:
                continue
            if self._is_heard_to_lead(candidate) or self._is_heard_to_stand(candidate):
                other.voting.leader_heard(candidate.name, self.now_ms)
            else:
                other.voting.gone(candidate.name)
            stands = other.election.phase in CANDIDATE or self._is_heard_to_lead(other)
            if ask is None:
                continue
            vote = other.voting.asked(candidate.name, ask, self.now_ms, stands=stands)
            if vote is not None:
                voting.voted(other.name, vote)

    def _is_heard_to_lead(self, candidate: Candidate) -> bool:
        is_fresh = self.now_ms - candidate.row_ms < CLEANER_FRESH_MS
        return candidate.election.phase in IN_TERM and is_fresh

    def _is_heard_to_stand(self, candidate: Candidate) -> bool:
        """Carries out a request at Kafka, which takes its time."""
        is_answered = self.now_ms - candidate.stood_ms >= self._check_ms
        return candidate.election.phase in CANDIDATE and is_answered

    def _carry_out(self, candidate: Candidate, effect: Effect) -> None:
        token = candidate.election.token
        match effect:
            case InitProducers():
                self._owners[candidate.inited] = token
                candidate.inited += 1
                if candidate.inited < IDS:
                    self._ask(candidate, effect, self._init_ms // IDS)
                else:
                    self._notify(candidate, InitsDone(self.now_ms, token))
            case CommitMark(index=index):
                verdict = self._committed(index, token, MARK_MS)
                if verdict is TransactionState.COMMITTED:
                    self._marks[index] = token
                self._notify(candidate, MarkReport(self.now_ms, token, index, verdict))
            case ReadControl():
                leaders = {i: LeaderRecord("", mark, 0) for i, mark in enumerate(self._marks)}
                state = ControlState(progress=Progress(-1, None), leaders=leaders)
                self._notify(candidate, ControlRead(self.now_ms, token, state))
            case IdleCommit():
                verdict = self._committed(0, token, candidate.given_ms)
                report = TransactionReport(self.now_ms, token, verdict, self.commit_ms)
                self._notify(candidate, report)

    def _given_ms(self, candidate: Candidate) -> int:
        """Returns the duration of a transaction that begins now."""
        heard_ms = candidate.election.waits_until_ms - self.now_ms + CLEANER_FRESH_MS
        return min(max(MIN_CALL_MS, heard_ms), MAX_CALL_MS)

    def _committed(self, index: int, token: str, given_ms: int) -> TransactionState:
        if self._owners[index] != token:
            return TransactionState.FENCED
        return TransactionState.COMMITTED if self.commit_ms < given_ms else TransactionState.UNKNOWN

    def _notify(self, candidate: Candidate, event: Event) -> None:
        for effect in candidate.election.step(event):
            match effect:
                case InitProducers():
                    candidate.candidacies += 1
                    candidate.inited = 0
                    candidate.stood_ms = self.now_ms
                    self._ask(candidate, effect, self._check_ms + self._init_ms // IDS)
                case CommitMark():
                    self._ask(candidate, effect, min(self.commit_ms, MARK_MS))
                case ReadControl():
                    self._ask(candidate, effect, STEP_MS)
                case IdleCommit():
                    if not candidate.busy:
                        candidate.given_ms = self._given_ms(candidate)
                        self._ask(candidate, effect, min(self.commit_ms, candidate.given_ms))
                case DestroyProducers():
                    candidate.busy.clear()
        if candidate.election.phase not in IN_TERM:
            candidate.term_ms = None
        elif candidate.term_ms is None:
            candidate.term_ms = self.now_ms

    def _ask(self, candidate: Candidate, effect: Effect, takes_ms: int) -> None:
        candidate.busy.append((self.now_ms + takes_ms, effect))
