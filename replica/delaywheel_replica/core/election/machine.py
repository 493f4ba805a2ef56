"""Leadership: one machine, driven by events, answering with effects.

Safety rests on Kafka's fencing alone. A candidate inits **all** transactional ids, then commits,
one after another, a mark with each (its token is new for every candidacy), and reads the control
topic to its end: it leads only if its own token is the newest with every id, but for those that a
leader has left out, or that this process was the last to use (id_turns.py). Anything unknown on the
way (a timeout, a retry) ends the candidacy; any re-init is a whole new one. Liveness rests on the
required silence: how long no leader must be heard before a node stands, and how old a leader's last
commit may be.

Phases (transitions in `TRANSITIONS`):

    STANDBY -> ASKING -> INITIALISING -> MARKING -> READING -> RESTING -> LEADING
       ^         |            |             |          |          |          |
       +---------+------------+-------------+----------+----------+----------+   STOPPED: for good

ASKING is a pre-vote, as in Raft: a node that alone hears no leader must not disturb one that others
hear. A node that agrees counts as having heard a leader, and so does a candidate: so candidates do
not follow each other at once.

RESTING is a leader that forwards nothing yet, because it could deliver twice. docs/PROTOCOL.md,
"Transitions", says what each of them takes.

Invariants:
- RESTING and LEADING only after every mark of this candidacy was reported committed and read
  back as the newest.
- Producers exist in no phase but INITIALISING to LEADING; leaving those always destroys them.
- No node comes to lead on a control topic that is missing what nodes had read there before.
- Events that name another candidacy's token change nothing.
- The required silence stays within its bounds, doubles with every failed candidacy and every
  leadership that ends unasked, and falls only under a leader that lasts, its own or another's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import assert_never
from zlib import crc32

from delaywheel_replica.core.election.events import (
    ENDINGS,
    IN_TERM,
    TRANSITIONS,
    BecomeLeader,
    CommitMark,
    ControlRead,
    DestroyProducers,
    Effect,
    ElectionPhase,
    ElectionTick,
    EndReason,
    Event,
    IdleCommit,
    InitFailed,
    InitProducers,
    InitsDone,
    MarkReport,
    ReadControl,
    ReadFailed,
    StartForwarding,
    Stop,
    TransactionReport,
)
from delaywheel_replica.core.protocol.control import ControlState
from delaywheel_replica.core.protocol.messages import PrevoteRequest
from delaywheel_replica.core.protocol.transaction_outcomes import ACTIONS, Action, TransactionState

MIN_SILENCE_MS = 1_000
MAX_SILENCE_MS = 64_000
IDLE_COMMIT_MS = 300
LASTING_MS = 10_000
UNBROKEN_MS = 500
"""A leader that is heard at least this often is heard without a break."""

RECENT_COMMITS = 16
PATIENCE = 2
"""A leader may wait for a commit this many times as long as its longest recent one took."""

ASKING_MS = 1_000
"""A node that does not get enough votes within this time starts to wait again."""

RANK_MS = 150
"""Each node waits this much longer than the one before it, and up to this much by chance."""

YIELDING = 3
"""A node that should not lead lets this many silences pass, in which another one may stand."""


@dataclass(frozen=True, slots=True)
class ElectionConfig:
    """The settings of a node's election machine.

    Attributes:
        run: A text that no other run of any cleaner process has; tokens are made from it.
        ids: How many transactional ids the cluster has; never changes.
        nodes: How many nodes the cluster has.
        required: R: how many must hear no leader, including itself.
        rank: This node's position among them, from 0.
        max_clock_skew_ms: How far the wall clock may depart from the monotonic one within one
            candidacy and leadership.
        max_clock_dispute_ms: How far two clocks may differ if there is no third one.
    """

    run: str
    ids: int = 2
    nodes: int = 1
    required: int = 1
    rank: int = 0
    max_clock_skew_ms: int = 500
    max_clock_dispute_ms: int = 10_000

    @property
    def alone(self) -> bool:
        """Whether no other node can lead."""
        return self.nodes == 1


class Election:
    """The election machine of one node's cleaner."""

    def __init__(self, config: ElectionConfig) -> None:
        self._config = config
        self._candidacies = 0
        self._phase = ElectionPhase.STANDBY
        self._token = ""
        self._silence_ms = MIN_SILENCE_MS
        # When this node last did something that counts as having heard a leader.
        self._acted_ms: int | None = None
        # How long after that it may stand.
        self._wait_ms = 0 if config.alone else MIN_SILENCE_MS
        # Since when it waits for nothing but its turn; None: it waits for something else.
        self._ready_ms: int | None = None
        # Of the current asking: votes for another run's asking must not count.
        self._round = crc32(config.run.encode())
        self._asked_ms = 0
        # It stood though it lagged, because no other node did.
        self._stood_lagging = False
        # Since when a leader has been heard without a break.
        self._led_since_ms: int | None = None
        # The next mark to be reported, and the ids that are done without.
        self._mark = 0
        self._without: frozenset[int] = frozenset()
        self._last_marks: Mapping[int, str] = {}
        # Wall clock minus monotonic clock when this candidacy began.
        self._clock_offset_ms = 0
        self._epoch: int | None = None
        self._in_term_since_ms = 0
        self._last_commit_ms = 0
        self._answered_ms = 0
        self._recent_ms: tuple[int, ...] = ()

    @property
    def phase(self) -> ElectionPhase:
        """The phase in which this node is."""
        return self._phase

    @property
    def hears_leader(self) -> bool:
        """Whether this node stood by at the last tick, and had heard a leader shortly before."""
        return self._phase is ElectionPhase.STANDBY and self._led_since_ms is not None

    @property
    def token(self) -> str:
        """The token of the current or last candidacy."""
        return self._token

    @property
    def epoch(self) -> int | None:
        """The epoch of the current leadership."""
        return self._epoch

    @property
    def silence_ms(self) -> int:
        """How long a leader must have been silent before this node stands, in milliseconds."""
        return self._silence_ms

    @property
    def waits_until_ms(self) -> int:
        """Until when a leader that waits for Kafka counts; then its last commit is too old."""
        return self._quiet_since_ms + self._patience_ms

    @property
    def _quiet_since_ms(self) -> int:
        """Since when a leader has not committed anything though it could.

        While Kafka throttles, or moves partitions, it takes nothing from whoever leads.
        """
        return max(self._last_commit_ms, self._answered_ms)

    @property
    def _patience_ms(self) -> int:
        """How old a leader's last commit may be, in milliseconds.

        Its marks are commits as well: a new leader on slow brokers knows how slow they are.
        """
        longest_ms = max(self._recent_ms, default=0)
        return max(self._silence_ms, min(MAX_SILENCE_MS, PATIENCE * longest_ms))

    @property
    def prevote_request(self) -> PrevoteRequest | None:
        """The vote that this node wants from the others now."""
        if self._phase is not ElectionPhase.ASKING:
            return None
        return PrevoteRequest(self._round, self._silence_ms)

    def step(self, event: Event) -> list[Effect]:
        """Takes one event, as `TRANSITIONS` allows; returns the effects, to be done in order.

        An event that does not belong to this phase, or names another candidacy, changes nothing.
        """
        allowed = TRANSITIONS.get((self._phase, type(event)))
        if allowed is None or self._is_stale(event):
            return []
        effects = self._take(event)
        assert self._phase in allowed, (event, self._phase)
        return effects

    def _is_stale(self, event: Event) -> bool:
        if isinstance(event, ElectionTick | Stop):
            return False
        if event.token != self._token:
            return True
        return isinstance(event, MarkReport) and event.index != self._mark

    def _take(self, event: Event) -> list[Effect]:  # noqa: PLR0911 - one for each event
        match event:
            case ElectionTick():
                return self._tick(event)
            case InitsDone():
                self._phase = ElectionPhase.MARKING
                self._without, self._last_marks = event.without, event.last_marks
                self._last_commit_ms, self._recent_ms = event.now_ms, ()
                return self._mark_with(0)
            case InitFailed():
                return self._end(_reason_of_init(event), event.now_ms)
            case MarkReport():
                return self._marked(event)
            case ControlRead():
                return self._read(event)
            case ReadFailed():
                return self._end(EndReason.READ_FAILED, event.now_ms)
            case TransactionReport():
                return self._transacted(event)
            case Stop():
                return self._stop()
            case _:
                assert_never(event)

    def _tick(self, tick: ElectionTick) -> list[Effect]:
        self._answered_ms = tick.answered_ms
        if self._phase is ElectionPhase.STANDBY:
            self._follow(tick)
            return self._call(tick) if self._may_stand(tick) else []
        if self._phase is ElectionPhase.ASKING:
            return self._count_votes(tick)
        reason = self._why_not_in_term(tick)
        if reason is not None:
            return self._end(reason, tick.now_ms)
        effects: list[Effect] = []
        if self._phase is ElectionPhase.RESTING and self._may_forward(tick):
            self._phase = ElectionPhase.LEADING
            effects.append(StartForwarding())
        if tick.now_ms - self._last_commit_ms >= IDLE_COMMIT_MS:
            effects.append(IdleCommit(self._token))
        return effects

    def _follow(self, tick: ElectionTick) -> None:
        """Lowers the required silence again while a leader is heard without a break.

        Otherwise a node whose own candidacies failed would forever be slower than those that should
        not lead.
        """
        is_heard = tick.heard_ms is not None and tick.now_ms - tick.heard_ms < UNBROKEN_MS
        if not is_heard:
            self._led_since_ms = None
        elif self._led_since_ms is None:
            self._led_since_ms = tick.now_ms
        elif tick.now_ms - self._led_since_ms >= LASTING_MS // 2:
            self._silence_ms = MIN_SILENCE_MS

    def _may_stand(self, tick: ElectionTick) -> bool:
        """Whether all conditions have held for as long as this node must let others go first."""
        if not (self._has_waited(tick) and self._can_stand(tick)):
            self._ready_ms = None
            return False
        if self._ready_ms is None:
            self._ready_ms = tick.now_ms
        return tick.now_ms - self._ready_ms >= self._stagger_ms(tick)

    def _has_waited(self, tick: ElectionTick) -> bool:
        """Whether, as far as this node knows, no node leads."""
        if self._acted_ms is None:
            self._acted_ms = tick.now_ms
        if tick.heard_ms is None:
            return tick.now_ms - self._acted_ms >= self._wait_ms
        if tick.heard_ms > self._acted_ms:
            self._wait_ms = 0  # another one has stood: the wait is over
        is_silent = tick.now_ms - tick.heard_ms >= self._silence_ms
        return is_silent and tick.now_ms - self._acted_ms >= self._wait_ms

    def _can_stand(self, tick: ElectionTick) -> bool:
        is_fit = tick.unfit in {None, EndReason.HANDED_OVER}
        return tick.server_fresh and tick.hears_enough and is_fit

    def _stagger_ms(self, tick: ElectionTick) -> int:
        """Staggers candidates by rank and a hash unique to this run; lagging nodes come last."""
        if self._config.alone:
            return 0
        chance = crc32(f"{self._config.run}-{self._candidacies}-{self._round}".encode())
        lagging_ms = YIELDING * self._silence_ms if tick.unfit is EndReason.HANDED_OVER else 0
        return lagging_ms + self._config.rank * RANK_MS + chance % RANK_MS

    def _call(self, tick: ElectionTick) -> list[Effect]:
        self._round += 1
        self._asked_ms = tick.now_ms
        self._ready_ms = None
        self._stood_lagging = tick.unfit is EndReason.HANDED_OVER
        self._phase = ElectionPhase.ASKING
        return self._count_votes(tick)

    def _count_votes(self, tick: ElectionTick) -> list[Effect]:
        # A vote that was given just before the asking may be reported only now.
        heard = tick.heard_ms is not None and tick.now_ms - tick.heard_ms < self._silence_ms
        if heard or not self._can_stand(tick):
            return self._stand_by(tick)
        votes = tick.votes if tick.vote_round == self._round else frozenset()
        config = self._config
        is_majority = 2 * config.required > config.nodes
        is_quiet = is_majority or tick.control_quiet_ms >= self._silence_ms
        if len(votes) + 1 >= config.required and is_quiet:
            return self._stand(tick)
        return self._stand_by(tick) if tick.now_ms - self._asked_ms >= ASKING_MS else []

    def _stand_by(self, tick: ElectionTick) -> list[Effect]:
        self._phase = ElectionPhase.STANDBY
        self._acted_ms, self._wait_ms = tick.now_ms, 0
        return []

    def _stand(self, tick: ElectionTick) -> list[Effect]:
        self._candidacies += 1
        self._token = f"{self._config.run}-{self._candidacies}"
        self._phase = ElectionPhase.INITIALISING
        self._clock_offset_ms = tick.wall_ms - tick.now_ms
        return [InitProducers(self._token)]

    def _marked(self, report: MarkReport) -> list[Effect]:
        if report.verdict in {TransactionState.TAKEN, TransactionState.FENCED}:
            return self._end(EndReason.FENCED, report.now_ms)
        if not report.verdict.is_committed:
            return self._end(EndReason.MARK_FAILED, report.now_ms)
        self._recent_ms = (*self._recent_ms, report.now_ms - self._last_commit_ms)
        self._last_commit_ms = report.now_ms
        return self._mark_with(report.index + 1)

    def _mark_with(self, first: int) -> list[Effect]:
        """Goes on with the mark of the first id from here on that was inited."""
        left = (each for each in range(first, self._config.ids) if each not in self._without)
        mark = next(left, None)
        if mark is not None:
            self._mark = mark
            return [CommitMark(self._token, mark)]
        self._phase = ElectionPhase.READING
        return [ReadControl(self._token)]

    def _read(self, read: ControlRead) -> list[Effect]:
        """Makes this node the leader only if its own tokens are the newest with every id.

        It may lack one that the leader before it did without, and would have come to use again only
        after a commit with another id; or that this process was the last to mark, and to use.
        """
        if not all(map(partial(self._may_lack, read.state), self._without)):
            return self._end(EndReason.INIT_FAILED, read.now_ms)
        leader = read.state.leader(self._config.ids, without=self._without)
        if leader is None or not read.state.marked(self._token):
            return self._end(EndReason.MARK_OVERWRITTEN, read.now_ms)
        if read.incomplete:
            return self._end(EndReason.CONTROL_INCOMPLETE, read.now_ms)
        self._phase = ElectionPhase.RESTING
        self._epoch = leader.epoch
        self._in_term_since_ms = read.now_ms
        # What was just read proves as much as a commit would.
        self._last_commit_ms = read.now_ms
        return [BecomeLeader(leader.epoch, read.state)]

    def _may_lack(self, state: ControlState, number: int) -> bool:
        mark = state.leaders.get(number)
        is_ours = mark is not None and mark.token == self._last_marks.get(number)
        return number in state.left_out.ids or is_ours

    def _why_not_in_term(self, tick: ElectionTick) -> EndReason | None:
        """Returns why this leader must step down, or None; checked before each transaction."""
        drift_ms = tick.wall_ms - tick.now_ms - self._clock_offset_ms
        checks = (
            (tick.overtaken, EndReason.OVERTAKEN),
            (tick.now_ms - self._quiet_since_ms > self._patience_ms, EndReason.COMMITS_TOO_OLD),
            (not tick.server_fresh, EndReason.SERVER_STALE),
            (not tick.hears_enough, EndReason.UNHEARD),
            (abs(drift_ms) > self._config.max_clock_skew_ms, EndReason.CLOCK_JUMPED),
        )
        return next((reason for failed, reason in checks if failed), self._why_unfit(tick))

    def _why_unfit(self, tick: ElectionTick) -> EndReason | None:
        """Returns why this node is not eligible; one that stood alone gets time to catch up."""
        if self._stood_lagging and tick.unfit is EndReason.HANDED_OVER:
            return tick.unfit if self._has_lasted(tick.now_ms) else None
        return tick.unfit

    def _may_forward(self, tick: ElectionTick) -> bool:
        return tick.due_ms is None or (tick.holds_progress and tick.wall_ms > tick.due_ms)

    def _transacted(self, report: TransactionReport) -> list[Effect]:
        match ACTIONS[report.verdict]:
            case Action.STAND_BY:
                return self._end(EndReason.FENCED, report.now_ms)
            case Action.NEW_CANDIDACY:
                return self._end(EndReason.UNKNOWN_OUTCOME, report.now_ms)
            case Action.GO_ON | Action.INIT_ID_AGAIN | Action.INIT_ID_LATER:
                if report.verdict.is_committed:
                    self._committed(report)
                return []

    def _committed(self, report: TransactionReport) -> None:
        self._last_commit_ms = report.now_ms
        self._recent_ms = (*self._recent_ms, report.commit_ms)[-RECENT_COMMITS:]
        if self._has_lasted(report.now_ms):
            enough_ms = max(MIN_SILENCE_MS, 4 * max(self._recent_ms))
            self._silence_ms = min(self._silence_ms, enough_ms)

    def _has_lasted(self, now_ms: int) -> bool:
        return self._phase in IN_TERM and now_ms - self._in_term_since_ms >= LASTING_MS

    def _end(self, reason: EndReason, now_ms: int) -> list[Effect]:
        ending = ENDINGS[reason]
        if ending.doubles:
            self._silence_ms = min(MAX_SILENCE_MS, 2 * self._silence_ms)
        if ending.stands_at_once and self._has_lasted(now_ms):
            self._wait_ms = 0
        elif self._config.alone and not ending.rivals:
            self._wait_ms = MIN_SILENCE_MS
        else:
            self._wait_ms = self._silence_ms * (YIELDING if ending.yields else 1)
        self._acted_ms = now_ms
        self._phase = ElectionPhase.STANDBY
        self._epoch = None
        return [DestroyProducers(reason)]

    def _stop(self) -> list[Effect]:
        had_producers = self._phase not in {ElectionPhase.STANDBY, ElectionPhase.ASKING}
        self._phase = ElectionPhase.STOPPED
        self._epoch = None
        return [DestroyProducers(EndReason.STOPPED)] if had_producers else []


def _reason_of_init(failed: InitFailed) -> EndReason:
    if not failed.touched:
        return EndReason.KAFKA_AWAY
    return EndReason.FENCED if failed.verdict is TransactionState.FENCED else EndReason.INIT_FAILED
