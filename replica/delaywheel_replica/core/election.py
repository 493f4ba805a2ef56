"""Leadership: one machine, driven by events, answering with effects.

Safety is Kafka's fencing and nothing else. A candidate inits **all** transactional ids, then
commits, one after another, a mark with each (its token is new for every candidacy), and reads
the control topic to its end: only if its own token stands newest with every id does it lead.
Whatever is unknown on the way (a time-out, a retry) ends the candidacy; any re-init is a whole
new one. Liveness is the silence asked for: how long nobody is heard to lead before one stands,
and how old a leader's last commit may be.

Phases (transitions in `TRANSITIONS`):

    STANDBY -> INITIALISING -> MARKING -> READING -> RESTING -> LEADING
       ^            |             |          |          |          |
       +------------+-------------+----------+----------+----------+      STOPPED: for good

RESTING is a leader that forwards nothing yet: it makes idle commits until it holds every frame
that the progress record counts as taken and its clock has passed w, for until then it could
deliver twice.

Invariants:
- RESTING and LEADING only after every mark of this candidacy was reported committed and read
  back as the newest.
- Producers exist in no phase but INITIALISING to LEADING; leaving those always destroys them.
- Events that name another candidacy's token change nothing.
- The silence asked for stays within its bounds, doubles with every failed candidacy and every
  leadership that ends unasked, and falls only under a leader that has lasted.
"""

from dataclasses import dataclass
from typing import assert_never

from delaywheel_replica.core.election_events import (
    ENDINGS,
    IN_OFFICE,
    TRANSITIONS,
    BecomeLeader,
    CommitMark,
    ControlRead,
    DestroyProducers,
    Effect,
    Event,
    IdleCommit,
    InitFailed,
    InitProducers,
    InitsDone,
    MarkReport,
    Phase,
    ReadControl,
    ReadFailed,
    Reason,
    StartForwarding,
    Stop,
    Tick,
    TransactionReport,
)
from delaywheel_replica.core.progress import Progress
from delaywheel_replica.core.reports import ACTIONS, Action, Verdict

MIN_SILENCE_MS = 1_000
MAX_SILENCE_MS = 64_000
IDLE_COMMIT_MS = 300
LASTING_MS = 10_000
RECENT_COMMITS = 16


@dataclass(frozen=True, slots=True)
class ElectionConfig:
    """What a node's machine is made with.

    Attributes:
        run: a text that no other run of any cleaner process has; tokens are made from it.
        ids: how many transactional ids the cluster has; never changes.
        alone: the cluster has no other node, so nobody else can lead.
        max_clock_skew_ms: how far the wall clock may part from the monotonic one within one
            candidacy and leadership.
        stagger_ms: how much longer than asked for this node waits, so that not all stand at
            once.
    """

    run: str
    ids: int = 2
    alone: bool = True
    max_clock_skew_ms: int = 500
    stagger_ms: int = 0


class Election:
    """The machine of one node's cleaner."""

    def __init__(self, config: ElectionConfig) -> None:
        self._config = config
        self._candidacies = 0
        self._phase = Phase.STANDBY
        self._token = ""
        self._silence_ms = MIN_SILENCE_MS
        # When a leader was last heard, or something happened that counts as that.
        self._heard_ms: int | None = None
        # How long after it this node may stand.
        self._wait_ms = 0 if config.alone else MIN_SILENCE_MS
        # The next mark to be reported.
        self._mark = 0
        # Wall clock minus monotonic clock when this candidacy began.
        self._clock_offset_ms = 0
        self._epoch: int | None = None
        self._progress: Progress | None = None
        self._in_office_since_ms = 0
        self._last_commit_ms = 0
        self._recent_ms: tuple[int, ...] = ()

    @property
    def phase(self) -> Phase:
        """Where this node stands."""
        return self._phase

    @property
    def token(self) -> str:
        """Of the current or last candidacy."""
        return self._token

    @property
    def epoch(self) -> int | None:
        """Of the current leadership."""
        return self._epoch

    @property
    def silence_ms(self) -> int:
        """The silence now asked for."""
        return self._silence_ms

    def step(self, event: Event) -> list[Effect]:
        """Takes one event; the effects are to be carried out in order.

        What an event may lead to is in `TRANSITIONS`; an event that is not for this phase, or
        that names another candidacy, changes nothing.
        """
        allowed = TRANSITIONS.get((self._phase, type(event)))
        if allowed is None or self._is_stale(event):
            return []
        effects = self._take(event)
        assert self._phase in allowed, (event, self._phase)
        return effects

    def _is_stale(self, event: Event) -> bool:
        if isinstance(event, Tick | Stop):
            return False
        if event.token != self._token:
            return True
        return isinstance(event, MarkReport) and event.index != self._mark

    def _take(self, event: Event) -> list[Effect]:  # noqa: PLR0911 - one for each event
        match event:
            case Tick():
                return self._tick(event)
            case InitsDone():
                self._phase = Phase.MARKING
                self._mark = 0
                return [CommitMark(self._token, 0)]
            case InitFailed():
                return self._end(_reason_of_init(event), event.now_ms)
            case MarkReport():
                return self._marked(event)
            case ControlRead():
                return self._read(event)
            case ReadFailed():
                return self._end(Reason.READ_FAILED, event.now_ms)
            case TransactionReport():
                return self._transacted(event)
            case Stop():
                return self._stop()
            case _:
                assert_never(event)

    def _tick(self, tick: Tick) -> list[Effect]:
        if self._phase is Phase.STANDBY:
            return self._stand(tick) if self._may_stand(tick) else []
        reason = self._why_not_in_office(tick)
        if reason is not None:
            return self._end(reason, tick.now_ms)
        effects: list[Effect] = []
        if self._phase is Phase.RESTING and self._may_forward(tick):
            self._phase = Phase.LEADING
            effects.append(StartForwarding())
        if tick.now_ms - self._last_commit_ms >= IDLE_COMMIT_MS:
            effects.append(IdleCommit(self._token))
        return effects

    def _may_stand(self, tick: Tick) -> bool:
        if self._heard_ms is None:
            self._heard_ms = tick.now_ms
        heard_ms = max(self._heard_ms, tick.heard_ms or self._heard_ms)
        wait_ms = self._wait_ms + self._config.stagger_ms
        return tick.server_fresh and tick.hears_enough and tick.now_ms - heard_ms >= wait_ms

    def _stand(self, tick: Tick) -> list[Effect]:
        """A candidacy begins. It counts as having heard a leader."""
        self._candidacies += 1
        self._token = f"{self._config.run}-{self._candidacies}"
        self._phase = Phase.INITIALISING
        self._heard_ms = tick.now_ms
        self._clock_offset_ms = tick.wall_ms - tick.now_ms
        return [InitProducers(self._token)]

    def _marked(self, report: MarkReport) -> list[Effect]:
        if report.verdict is Verdict.FENCED:
            return self._end(Reason.FENCED, report.now_ms)
        if report.verdict is not Verdict.COMMITTED:
            return self._end(Reason.MARK_FAILED, report.now_ms)
        self._mark += 1
        if self._mark < self._config.ids:
            return [CommitMark(self._token, self._mark)]
        self._phase = Phase.READING
        return [ReadControl(self._token)]

    def _read(self, read: ControlRead) -> list[Effect]:
        """Only own tokens, newest with every id, make a leader."""
        leader = read.state.leader(self._config.ids)
        if leader is None or read.state.leaders[0].token != self._token:
            return self._end(Reason.MARK_OVERWRITTEN, read.now_ms)
        self._phase = Phase.RESTING
        self._epoch = leader.epoch
        self._progress = read.state.progress
        self._in_office_since_ms = read.now_ms
        # What was just read proves as much as a commit would.
        self._last_commit_ms = read.now_ms
        self._recent_ms = ()
        return [BecomeLeader(leader.epoch, read.state)]

    def _why_not_in_office(self, tick: Tick) -> Reason | None:
        """What a leader looks at before each transaction."""
        drift_ms = tick.wall_ms - tick.now_ms - self._clock_offset_ms
        checks = (
            (tick.now_ms - self._last_commit_ms > self._silence_ms, Reason.COMMITS_TOO_OLD),
            (not tick.server_fresh, Reason.SERVER_STALE),
            (not tick.hears_enough, Reason.UNHEARD),
            (abs(drift_ms) > self._config.max_clock_skew_ms, Reason.CLOCK_JUMPED),
        )
        return next((reason for failed, reason in checks if failed), None)

    def _may_forward(self, tick: Tick) -> bool:
        if self._progress is None:
            return True
        return tick.holds_progress and tick.wall_ms > self._progress.due_ms

    def _transacted(self, report: TransactionReport) -> list[Effect]:
        match ACTIONS[report.verdict]:
            case Action.STAND_BY:
                return self._end(Reason.FENCED, report.now_ms)
            case Action.NEW_CANDIDACY:
                return self._end(Reason.UNKNOWN_OUTCOME, report.now_ms)
            case Action.GO_ON:
                if report.verdict is Verdict.COMMITTED:
                    self._committed(report)
                return []

    def _committed(self, report: TransactionReport) -> None:
        self._last_commit_ms = report.now_ms
        self._recent_ms = (*self._recent_ms, report.commit_ms)[-RECENT_COMMITS:]
        if self._has_lasted(report.now_ms):
            enough_ms = max(MIN_SILENCE_MS, 4 * max(self._recent_ms))
            self._silence_ms = min(self._silence_ms, enough_ms)

    def _has_lasted(self, now_ms: int) -> bool:
        return self._phase in IN_OFFICE and now_ms - self._in_office_since_ms >= LASTING_MS

    def _end(self, reason: Reason, now_ms: int) -> list[Effect]:
        ending = ENDINGS[reason]
        if ending.doubles:
            self._silence_ms = min(MAX_SILENCE_MS, 2 * self._silence_ms)
        if ending.stands_at_once and self._has_lasted(now_ms):
            self._wait_ms = 0
        elif self._config.alone and not ending.rivals:
            self._wait_ms = MIN_SILENCE_MS
        else:
            self._wait_ms = self._silence_ms
        self._heard_ms = now_ms
        self._phase = Phase.STANDBY
        self._epoch = None
        return [DestroyProducers(reason)]

    def _stop(self) -> list[Effect]:
        had_producers = self._phase is not Phase.STANDBY
        self._phase = Phase.STOPPED
        self._epoch = None
        return [DestroyProducers(Reason.STOPPED)] if had_producers else []


def _reason_of_init(failed: InitFailed) -> Reason:
    if not failed.touched:
        return Reason.KAFKA_AWAY
    return Reason.FENCED if failed.verdict is Verdict.FENCED else Reason.INIT_FAILED
