"""One turn of the cleaner: time passes, the election machine decides, the leader forwards.

The machine (core/election.py) is the only one that decides who this node is; here its effects are
carried out, and what it wants to know is told:

| effect | carried out by |
|---|---|
| InitProducers, CommitMark, ReadControl | `Candidacy`, on a thread of its own |
| BecomeLeader | a new `Forwarder` on the committed state |
| StartForwarding | the forwarder reads what is due |
| IdleCommit | the next transaction, with or without messages |
| DestroyProducers | forwarder and producers go; the control topic is followed again |
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from delaywheel_replica.cleaner.candidacy import Candidacy, monotonic_ms
from delaywheel_replica.cleaner.follower import ControlFollower
from delaywheel_replica.cleaner.forward import Forwarder, Planned, Transacted
from delaywheel_replica.cleaner.ports import ProducersPort
from delaywheel_replica.cleaner.settings import MAX_CALL_MS
from delaywheel_replica.core.beat import Beat, Role, ServerStatus
from delaywheel_replica.core.closing import Fence, FenceAnswer, wheels_to_close
from delaywheel_replica.core.control import ControlState, Leader
from delaywheel_replica.core.duties import ControlIncompleteError, Situation
from delaywheel_replica.core.election import Election, ElectionConfig
from delaywheel_replica.core.election_events import (
    IN_OFFICE,
    BecomeLeader,
    CommitMark,
    DestroyProducers,
    Effect,
    Event,
    IdleCommit,
    InitProducers,
    Phase,
    ReadControl,
    StartForwarding,
    Stop,
    Tick,
    TransactionReport,
)
from delaywheel_replica.core.holding import holds_progress, takeable
from delaywheel_replica.core.reports import Verdict

TICK_S = 0.1
MIN_CALL_MS = 2_000
STOP_S = 5.0
"""How long a leader that stops tries to close its node's wheel."""

log = structlog.get_logger(__name__)

MakeForwarder = Callable[[ControlState, ProducersPort], Forwarder]


def wall_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class View:
    """What others may know of this cleaner."""

    role: Role
    epoch: int | None
    leader: Leader | None
    state: ControlState
    control_offset: int
    lateness_ms: int
    error: str | None


class Leadership:
    """Leads, or waits to. One thread calls it."""

    def __init__(
        self,
        config: ElectionConfig,
        candidacy: Candidacy,
        follower: ControlFollower,
        make_forwarder: MakeForwarder,
    ) -> None:
        """Stands by.

        Args:
            config: Of the election machine.
            candidacy: Carries out its slow effects.
            follower: Of the control topic.
            make_forwarder: Makes what forwards, for one leadership.
        """
        self._config = config
        self._election = Election(config)
        self._candidacy = candidacy
        self._follower = follower
        self._make_forwarder = make_forwarder
        self._forwarder: Forwarder | None = None
        self._server: ServerStatus | None = None
        self._answers: dict[tuple[str, str], FenceAnswer] = {}
        self._fences: list[Fence] = []
        self._commit_wanted = False
        self._stop_by: float | None = None
        self._error: str | None = None
        self._counters: Counter[str] = Counter()
        self._shown = ControlState()

    @property
    def phase(self) -> Phase:
        """Where this node stands."""
        return self._election.phase

    @property
    def counters(self) -> Mapping[str, int]:
        """Since the process started."""
        forwarder = self._forwarder
        return self._counters if forwarder is None else self._counters + forwarder.counters

    @property
    def fences(self) -> list[Fence]:
        """What the members have to be asked for, so that wheels can be closed."""
        return self._fences

    def commit_soon(self) -> None:
        """Something waits for a commit."""
        self._commit_wanted = True

    def answer(self, answer: FenceAnswer) -> None:
        """A member has fenced."""
        self._answers[answer.node, answer.fence.origin] = answer
        self._commit_wanted = True

    def stop(self) -> None:
        """The node stops: close its wheel if this one leads, then end."""
        if self._stop_by is None:
            self._stop_by = time.monotonic() + STOP_S

    def turn(self, server: ServerStatus | None) -> float:
        """Does what there is to do; how many seconds it may rest then, unless woken.

        Args:
            server: The newest row of this node's server.
        """
        self._take_server(server)
        for event in self._candidacy.events():
            self._step(event)
        self._step(self._tick())
        if self._stop_by is not None and self._may_stop(self._stop_by):
            self._step(Stop(monotonic_ms()))
        if self._election.phase in IN_OFFICE:
            return self._lead()
        if self._election.phase is Phase.STANDBY:
            self._follower.poll()
        return TICK_S

    def view(self) -> View:
        """What others may know."""
        forwarder = self._forwarder
        if forwarder is not None:
            self._shown = forwarder.state
        elif not _is_older(self._follower.state, self._shown):
            self._shown = self._follower.state
        return View(
            role=self._election.phase.role,
            epoch=self._election.epoch,
            leader=self._shown.leader(self._config.ids),
            state=self._shown,
            control_offset=self._follower.offset,
            lateness_ms=self._lateness_ms(),
            error=self._candidacy.error or self._error
            if forwarder is None
            else self._error or forwarder.held,
        )

    def _lateness_ms(self) -> int:
        """How late the oldest due is that is not done; while nothing goes out, how late it may be.

        Without a forwarder nobody looks into the wheels: then everything since w counts.
        """
        forwarder, progress = self._forwarder, self._shown.progress
        if forwarder is not None and forwarder.forwarding:
            due_ms = forwarder.next_due_ms()
        else:
            due_ms = None if progress is None else progress.due_ms
        return 0 if due_ms is None else max(0, wall_ms() - due_ms)

    def close(self) -> None:
        """Lets go of everything."""
        self._step(Stop(monotonic_ms()))
        self._candidacy.close()
        self._follower.close()

    def _take_server(self, server: ServerStatus | None) -> None:
        before, self._server = self._server, server
        if server is not None and (before is None or _uses(before.beat) != _uses(server.beat)):
            self._commit_wanted = True  # it wants a wheel, or one can be closed

    def _tick(self) -> Tick:
        now_ms, server = monotonic_ms(), self._server
        state = None if self._forwarder is None else self._forwarder.state
        return Tick(
            now_ms=now_ms,
            wall_ms=wall_ms(),
            server_fresh=server is not None and server.is_fresh(now_ms),
            holds_progress=server is not None
            and state is not None
            and holds_progress(state, server.beat),
        )

    def _step(self, event: Event) -> None:
        before = self._election.phase
        effects = self._election.step(event)
        for effect in effects:
            self._carry_out(effect)
        if self._election.phase is not before:
            log.info(
                "phase",
                phase=self._election.phase.value,
                before=before.value,
                epoch=self._election.epoch,
                error=self._candidacy.error or self._error,
            )

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case InitProducers():
                has_wheels = self._server is not None and bool(self._server.beat.wheels)
                self._candidacy.init(effect.token, has_wheels=has_wheels)
            case CommitMark():
                self._candidacy.mark(effect.token, effect.index)
            case ReadControl():
                self._candidacy.read(effect.token)
            case BecomeLeader():
                self._take_office(effect.state)
            case StartForwarding():
                assert self._forwarder is not None
                self._forwarder.start_forwarding()
            case IdleCommit():
                self._commit_wanted = True
            case DestroyProducers():
                self._leave_office()

    def _take_office(self, state: ControlState) -> None:
        assert self._candidacy.producers is not None
        self._follower.pause()
        self._forwarder = self._make_forwarder(state, self._candidacy.producers)
        self._counters["elections"] += 1
        self._answers.clear()
        self._commit_wanted = True

    def _leave_office(self) -> None:
        if self._forwarder is not None:
            self._shown = self._forwarder.state
            self._counters += self._forwarder.counters
            self._forwarder = None
            self._follower.resume()
        self._candidacy.destroy()
        self._fences = []

    def _lead(self) -> float:
        forwarder, server = self._forwarder, self._server
        assert forwarder is not None
        assert server is not None  # without one, the machine has left office
        if forwarder.pause_s > 0:
            return forwarder.pause_s
        now_ms = wall_ms()
        limits = takeable(forwarder.state, server.beat)
        planned = forwarder.next_step(now_ms, limits)
        if not (self._commit_wanted or (planned is not None and planned.step)):
            return self._rest(forwarder, now_ms)
        done = self._transact(forwarder, planned, server.beat, now_ms)
        if done is None or self._election.phase not in IN_OFFICE:
            return TICK_S
        return forwarder.pause_s if done.behind else self._rest(forwarder, wall_ms())

    def _rest(self, forwarder: Forwarder, now_ms: int) -> float:
        """Until the next due, and no longer than a tick."""
        due_ms = None if forwarder.held else forwarder.next_due_ms()
        rest_s = TICK_S if due_ms is None else (due_ms - now_ms) / 1000
        return max(forwarder.pause_s, 0.001, min(rest_s, TICK_S))

    def _transact(
        self, forwarder: Forwarder, planned: Planned | None, beat: Beat, now_ms: int
    ) -> Transacted | None:
        lost = () if planned is None else planned.step.lost
        situation = Situation(
            now_ms=now_ms,
            beats={beat.node: beat},
            answers=list(self._answers.values()),
            lost=[(frame.wheel, frame.seq) for frame in lost],
        )
        timeout_ms = min(max(MIN_CALL_MS, self._election.silence_ms), MAX_CALL_MS)
        try:
            done = forwarder.transact(planned, situation, timeout_ms)
        except ControlIncompleteError as error:
            self._error = str(error)
            return None
        self._commit_wanted = False
        self._fences = done.duties.fences
        self._error = None if done.verdict is Verdict.COMMITTED else done.cause
        if done.verdict is not Verdict.COMMITTED:
            log.warning("transaction", verdict=done.verdict.value, cause=done.cause)
        for node, refusal in done.duties.refused.items():
            self._error = f"node {node} gets no wheel: {refusal}"
        report = TransactionReport(
            monotonic_ms(), self._election.token, done.verdict, done.commit_ms
        )
        self._step(report)
        return done

    def _may_stop(self, stop_by: float) -> bool:
        """Whether a stopping node has nothing left to do."""
        forwarder, server = self._forwarder, self._server
        if forwarder is None or server is None or time.monotonic() >= stop_by:
            return True
        beat = server.beat
        return beat.open is None and not wheels_to_close(forwarder.state, {beat.node: beat})


def _uses(beat: Beat) -> tuple[object, ...]:
    return beat.open, beat.spare, beat.draining, beat.last_number, beat.storage


def _is_older(state: ControlState, than: ControlState) -> bool:
    """Whether a state was read before another was committed."""
    if than.progress is None:
        return False
    if state.progress is None:
        return True
    return (state.progress.due_ms, state.progress.floor) < (
        than.progress.due_ms,
        than.progress.floor,
    )
