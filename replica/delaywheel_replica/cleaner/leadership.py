"""Runs the cleaner: the election machine decides, the leader forwards.

Only the machine (core/election/machine.py) decides what this node is; its effects are carried out
here, and its inputs are gathered here:

| effect | carried out by |
|---|---|
| InitProducers, CommitMark, ReadControl | `Candidacy`, on a thread of its own |
| BecomeLeader | a new `Forwarder` on the committed state |
| StartForwarding | the forwarder reads what is due |
| IdleCommit | the next transaction, with or without messages |
| DestroyProducers | forwarder and producers are closed; the control topic is followed again |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from delaywheel.identity import WheelId
from delaywheel.transactional import MAX_CALL_MS
from delaywheel_replica.cleaner.candidacy import Candidacy
from delaywheel_replica.cleaner.delivery.forward import Forwarder, Planned, Transacted
from delaywheel_replica.cleaner.delivery.outcomes import topic_asked_for
from delaywheel_replica.cleaner.ingress.term import Ingress
from delaywheel_replica.cleaner.kafka.follower import ControlFollower
from delaywheel_replica.cleaner.outside.clocks import Clock
from delaywheel_replica.cleaner.outside.ports import ANSWER_MS, IDS, ProducersPort
from delaywheel_replica.cleaner.row_keeper import QUIET_ROW_S, READING_MS, View, Waiting
from delaywheel_replica.cleaner.tallies import Tallies
from delaywheel_replica.cleaner.term_log import TermLog
from delaywheel_replica.core.election.eligibility import Eligibility, heard_heartbeats
from delaywheel_replica.core.election.events import (
    CANDIDATE,
    IN_TERM,
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
    InitProducers,
    ReadControl,
    StartForwarding,
    Stop,
    TransactionReport,
)
from delaywheel_replica.core.election.id_turns import IdTurns
from delaywheel_replica.core.election.machine import IDLE_COMMIT_MS, Election, ElectionConfig
from delaywheel_replica.core.election.witnesses import contradiction
from delaywheel_replica.core.leader.closing import wheels_to_close
from delaywheel_replica.core.leader.duties import Situation
from delaywheel_replica.core.leader.failure_detector import silent_nodes
from delaywheel_replica.core.leader.holders import holds_progress, takeable
from delaywheel_replica.core.leader.rescheduling import MOST as MOST_RESCHEDULES
from delaywheel_replica.core.leader.rescheduling import Rescheduling
from delaywheel_replica.core.protocol.control import ControlState
from delaywheel_replica.core.protocol.frames import NO_FRAMES
from delaywheel_replica.core.protocol.heartbeat import Fence, Heartbeat
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.reschedules import (
    MessageKey,
    RescheduleProposal,
    RescheduleWritten,
)
from delaywheel_replica.core.protocol.status_files import (
    CLEANER_FRESH_MS,
    FloorWait,
    Role,
    ServerStatus,
    Standstill,
)
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from delaywheel_replica.link import DeadLetter
from delaywheel_replica.process.logs import get_logger

TICK_S = 0.1
"""The longest wait between two iterations."""

LED_TICK_S = QUIET_ROW_S
"""The same while another node leads: its silence counts only after four of these."""

INIT_TICK_S = 0.01
"""The same while no id can be used, until one is inited again."""

MIN_CALL_MS = 2_000
THROTTLED_LATELY_MS = 30_000
"""For so long after it was last throttled a leader says so."""

STANDSTILL_S = 10.0
"""A progress that has not moved for so long stands still: topics in trouble are found by then."""

STOP_S = 5.0
"""How long a leader that stops tries to close its node's wheel."""

log = get_logger(__name__)

MakeForwarder = Callable[[ControlState, ProducersPort], Forwarder]


class Leadership:
    """Leads, or waits to lead. For one thread.

    Attributes:
        asked_s: When the server last asked for a commit, by the monotonic clock.
    """

    def __init__(
        self,
        config: ElectionConfig,
        candidacy: Candidacy,
        follower: ControlFollower,
        make_forwarder: MakeForwarder,
        *,
        clock: Clock,
        on_dead: Callable[[Iterable[DeadLetter]], object] = lambda _: None,
    ) -> None:
        """Begins as a standby; calls `on_dead` with messages committed as dead letters."""
        self._config = config
        self._on_dead = on_dead
        self._election = Election(config)
        self._candidacy = candidacy
        self._follower = follower
        self._make_forwarder = make_forwarder
        self._clock = clock
        self._log = TermLog(self._clock.monotonic)
        self._eligibility = Eligibility(config.max_clock_skew_ms, config.max_clock_dispute_ms)
        self._control_offset = -1
        self._control_moved_ms = self._clock.monotonic_ms()
        self._term_since_ms = 0
        self._forwarder: Forwarder | None = None
        self._server: ServerStatus | None = None
        self._duty_inputs: tuple[object, ...] | None = None
        self._proposals: dict[MessageKey, RescheduleProposal] = {}
        self._written_reschedules: dict[MessageKey, RescheduleWritten] = {}
        self._fences: tuple[Fence, ...] = ()
        self._limits: Mapping[WheelId, int] = {}
        self._floor_wait: FloorWait | None = None
        self._commit_wanted = False
        self.asked_s = float("-inf")
        self._replacements: dict[str, str] = {}
        self._set_back_from: int | None = None
        self._stop_by: float | None = None
        self._error: str | None = None
        # What nodes had reported when the control topic's reading began, and what it lacks of that.
        self._witnesses: Mapping[str, Heartbeat] = {}
        self._contradiction: str | None = None
        self._counters: Counter[str] = Counter()
        self.tallies = Tallies()
        self._shown = ControlState()  # what the status shows: also between two terms
        # The progress that was seen last, and when it was seen first: on both clocks, in seconds.
        self._seen: Progress | None = None
        self._seen_at = (self._clock.monotonic(), 0.0)
        # Read by another thread: set and cleared as a whole.
        self._waiting: Waiting | None = None

    @property
    def waiting(self) -> Waiting | None:
        """The transaction or read that the main thread waits for; for any thread.

        While brokers answer its records, a transaction lasts longer, and so does the leader.
        """
        waiting, producers = self._waiting, self._candidacy.producers
        if waiting is None or waiting.since_ms is None or producers is None:
            return waiting
        answered_ms = producers.answered_ms
        if answered_ms is None:
            return waiting
        return replace(waiting, until_ms=max(waiting.until_ms, answered_ms + ANSWER_MS))

    @property
    def phase(self) -> ElectionPhase:
        """The phase of the election."""
        return self._election.phase

    @property
    def pause_s(self) -> float:
        """How long no transaction may begin, as far as is worth waiting for; 0: it does not lead.

        What Kafka throttles waits for longer than the row may: it is looked at again meanwhile.
        """
        forwarder = self._forwarder
        return 0.0 if forwarder is None else min(forwarder.pause_s, TICK_S)

    @property
    def counters(self) -> Mapping[str, int]:
        """Counts since the process started."""
        forwarder = self._forwarder
        return self._counters if forwarder is None else self._counters + forwarder.counters

    def commit_soon(self) -> None:
        """Requests an early commit."""
        self.asked_s = self._clock.monotonic()
        self._commit_wanted = True

    def replace(self, node: str, storage: str) -> None:
        """Registers a node's new storage, as its operator wishes; `REMOVED`: it goes for good.

        Only a leader accepts it, and forgets it with its term: a later term could otherwise repeat
        it against the operator's newer request. Callers repeat it until it is committed.
        """
        if self._election.phase in IN_TERM and self._replacements.get(node) != storage:
            self._replacements[node] = storage
            self._commit_wanted = True

    def set_back(self, set_backs: int) -> None:
        """Sets w back to the clock, as an operator wishes, unless the count has changed.

        Only a leader that rests takes it up; see `replace`.
        """
        if self._election.phase is ElectionPhase.RESTING and self._set_back_from != set_backs:
            self._set_back_from = set_backs
            self._commit_wanted = True

    def reschedule(self, proposal: RescheduleProposal) -> None:
        """Notes a request for another due; callers repeat it until it is decided."""
        self.asked_s = self._clock.monotonic()
        if self._election.phase in IN_TERM and len(self._proposals) < MOST_RESCHEDULES:
            self._proposals[proposal.key] = proposal
            self._commit_wanted = True

    def rescheduled(self, written: RescheduleWritten) -> None:
        """Notes frames that express a decision; callers repeat it until the record is gone."""
        self.asked_s = self._clock.monotonic()
        if self._election.phase in IN_TERM and len(self._written_reschedules) < MOST_RESCHEDULES:
            self._written_reschedules[written.key] = written
            self._commit_wanted = True

    def stop(self) -> None:
        """Begins a clean stop: closes the own wheel if this node leads, then ends."""
        if self._stop_by is None:
            self._stop_by = self._clock.monotonic() + STOP_S

    def run_once(self, server: ServerStatus | None) -> float:
        """Does the pending work; returns how many seconds to wait, unless woken."""
        self._take_server(server)
        for event in self._candidacy.events():
            self._step(self._held_against_heartbeats(event))
        self._step(self._tick())
        if self._stop_by is not None and self._may_stop(self._stop_by):
            self._step(Stop(self._clock.monotonic_ms()))
        if self._election.phase in IN_TERM:
            self._candidacy.look_again(has_wheels=self._has_wheels)
            return self._lead()
        self._follow()
        return LED_TICK_S if self._election.hears_leader and not self._waits_for_wheel else TICK_S

    @property
    def _has_wheels(self) -> bool:
        return self._server is not None and bool(self._server.heartbeat.wheels)

    @property
    def _waits_for_wheel(self) -> bool:
        """Whether this node can take no messages before the leader has registered a wheel."""
        return self._server is not None and self._server.heartbeat.open is None

    def _follow(self) -> None:
        """Keeps a standby current with the control topic; a node alone reads it when it stands."""
        if (
            self._election.phase not in {ElectionPhase.STANDBY, ElectionPhase.ASKING}
            or self._candidacy.is_busy
        ):
            return
        if self._follower.offset >= 0:
            if self._follower.poll() and self._is_led_by_another():
                self._candidacy.led_by_another()
                self._error = None
                if self._server is not None:
                    # After a failed candidacy, until the topic again has all that nodes had read.
                    self._contradiction = self._contradiction and contradiction(
                        self._follower.state, self._server.heartbeats
                    )
        elif not self._config.alone:
            self._candidacy.follow()

    def _is_led_by_another(self) -> bool:
        leader, server = self._follower.state.leader(self._config.ids), self._server
        return leader is not None and server is not None and leader.node != server.heartbeat.node

    @property
    def role(self) -> Role:
        """What this cleaner does."""
        return self._election.phase.role

    def view(self) -> View:
        """Returns this cleaner's part of the status."""
        forwarder = self._forwarder
        if forwarder is not None:
            self._shown = forwarder.state
        elif not _is_older(self._follower.state, self._shown):
            self._shown = self._follower.state
        self._note_progress()
        error = self._why_not(forwarder)
        standstill = self._standstill(error)
        self._log.stands_still(standstill)
        unheard = None if self.ingress is None else self.ingress.answers_objection
        refused = () if unheard is None else (f"half messages are refused: {unheard}",)
        return View(
            role=self.role,
            epoch=self._election.epoch,
            leader=self._shown.leader(self._config.ids),
            state=self._shown,
            control_offset=self._follower.offset,
            lateness_ms=self._lateness_ms(),
            kafka_error=error,
            kafka_warnings=(*self._candidacy.warnings, *refused, *self._kept_ids()),
            throttled=self._throttled(),
            unreadable=NO_FRAMES if forwarder is None else forwarder.unreadable,
            fences=self._fences,
            limits=self._limits,
            prevote_request=self._election.prevote_request,
            stands=self._election.phase in CANDIDATE and self._candidacy.is_answered,
            ingress_slot=None if forwarder is None else forwarder.ingress.bound(forwarder.state),
            floor_wait=None if forwarder is None else self._floor_wait,
            standstill=standstill,
            halves_objection=None
            if forwarder is None
            else self._candidacy.halves_objection or unheard,
        )

    def _kept_ids(self) -> Iterator[str]:
        """Says which transactional ids Kafka keeps, before it keeps the last one."""
        kept = () if self._forwarder is None else sorted(self._shown.left_out.ids)
        if kept:
            ids = ", ".join(map(str, kept))
            yield (
                f"Kafka keeps {len(kept)} of {IDS} transactional ids ({ids}) until the broker is"
                " back that their transactions have written to: stop no other before"
            )

    def _throttled(self) -> str | None:
        """Says what Kafka takes from this leader, if it has throttled it of late."""
        forwarder = self._forwarder
        rate = None if forwarder is None else forwarder.quota_bytes_per_s
        late_ms = self._clock.monotonic_ms() - self._throttled_until_ms
        if not self._throttled_until_ms or late_ms > THROTTLED_LATELY_MS:
            return None
        if not rate:
            return "it throttles the leader"
        unit = 10 ** (len(str(rate)) - 1)  # one digit: the row is not written for each transaction
        return f"it throttles the leader to about {rate // unit * unit:,} bytes a second"

    def _why_not(self, forwarder: Forwarder | None) -> str | None:
        """Returns why this node does not lead or forward."""
        if forwarder is not None:
            return self._candidacy.objection or self._error or forwarder.held
        fault = self._eligibility.clock_fault
        return fault or self._candidacy.error or self._contradiction or self._error

    def _note_progress(self) -> None:
        """Notes when the progress last moved, in whichever term."""
        progress = self._shown.progress
        before, self._seen = self._seen, progress
        if progress is None or before is None or _place_of(before) != _place_of(progress):
            self._seen_at = self._clock.monotonic(), self._clock.wall_ms() / 1000

    def _standstill(self, error: str | None) -> Standstill | None:
        """Returns why the progress does not move, if this leader's clock has long passed it."""
        forwarder, progress = self._forwarder, self._shown.progress
        seen_s, wall_s = self._seen_at
        is_leading = self.role is Role.LEADING
        if forwarder is None or progress is None or not is_leading:
            return None
        behind_s = self._clock.wall_ms() / 1000 - progress.due_ms / 1000
        if min(self._clock.monotonic() - seen_s, behind_s) < STANDSTILL_S:
            return None
        return Standstill(round(wall_s * 1000), error or _waits_for(forwarder))

    @property
    def ingress(self) -> Ingress | None:
        """The part that reads the ingress topics while this node leads."""
        return None if self._forwarder is None else self._forwarder.ingress

    def _lateness_ms(self) -> int:
        """Returns how late the oldest unfinished due is; an upper bound where it is not known.

        Without a forwarder the wheels are not read: everything since w counts as due. So does
        everything since a second that cannot be read.
        """
        forwarder, progress = self._forwarder, self._shown.progress
        if forwarder is not None and forwarder.forwards:
            due_ms = forwarder.oldest_waiting_ms()
        else:
            due_ms = None if progress is None else progress.due_ms
        return 0 if due_ms is None else max(0, self._clock.wall_ms() - due_ms)

    def close(self) -> None:
        """Closes everything."""
        self._step(Stop(self._clock.monotonic_ms()))
        self._candidacy.close()
        self._follower.pause()

    def _take_server(self, server: ServerStatus | None) -> None:
        """Takes a new status of the server; what a leader has duties about is to be committed."""
        if server is self._server:
            return
        self._server = server
        before = self._duty_inputs
        self._duty_inputs = None if server is None else _duty_inputs_of(server)
        if server is not None and before != self._duty_inputs:
            self._commit_wanted = True  # a node wants a wheel, or one can be closed

    def _tick(self) -> ElectionTick:
        """Gathers all that the election machine judges by."""
        now_ms, wall_ms, server = self._clock.monotonic_ms(), self._clock.wall_ms(), self._server
        if self._follower.offset != self._control_offset:
            self._control_offset, self._control_moved_ms = self._follower.offset, now_ms
        if server is None:
            return ElectionTick(now_ms=now_ms, wall_ms=wall_ms, server_fresh=False)
        state = self._shown if self._forwarder is None else self._forwarder.state
        return ElectionTick(
            now_ms=now_ms,
            wall_ms=wall_ms,
            server_fresh=server.is_fresh(now_ms),
            holds_progress=self._forwarder is not None and holds_progress(state, server.heartbeat),
            due_ms=None if state.progress is None else state.progress.due_ms,
            heard_ms=server.leader_heard_ms,
            overtaken=self._forwarder is not None
            and contradiction(state, server.heartbeats) is not None,
            hears_enough=len(heard_heartbeats(server, now_ms)) + 1 >= self._config.required,
            unfit=self._eligibility.look(
                state,
                server,
                now_ms,
                wall_ms,
                self._candidacy.broker_clock,
                in_term=self._election.phase in IN_TERM,
            ),
            votes=server.votes,
            vote_round=server.vote_round,
            control_quiet_ms=now_ms - self._control_moved_ms,
            answered_ms=self._answered_ms,
        )

    @property
    def _throttled_until_ms(self) -> int:
        """Until when Kafka throttles this leader, by the monotonic clock."""
        producers = self._candidacy.producers
        return 0 if producers is None else producers.throttled_until_ms or 0

    @property
    def _answered_ms(self) -> int:
        """When Kafka last answered this leader, or will, as it throttles, likewise."""
        producers = self._candidacy.producers
        answered_ms = 0 if producers is None else producers.answered_ms or 0
        return max(answered_ms, self._throttled_until_ms)

    def _step(self, event: Event) -> None:
        before = self._election.phase
        effects = self._election.step(event)
        for effect in effects:
            self._carry_out(effect)
        if self._election.phase is not before:
            ends = [effect.reason for effect in effects if isinstance(effect, DestroyProducers)]
            self._log.moved(
                before,
                self._election.phase,
                epoch=self._election.epoch,
                reason=ends[0] if ends else None,
                error=self._candidacy.error or self._error,
            )

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case InitProducers():
                self._candidacy.init(effect.token, has_wheels=self._has_wheels)
            case CommitMark():
                self._candidacy.mark(effect.token, effect.index)
            case ReadControl():
                self._witnesses = {} if self._server is None else self._server.heartbeats
                self._candidacy.read(effect.token)
            case BecomeLeader():
                self._take_term(effect.state)
            case StartForwarding():
                assert self._forwarder is not None
                self._set_back_from = None
                self._forwarder.forwards = True
            case IdleCommit():
                self._commit_wanted = True
            case DestroyProducers():
                if effect.reason is EndReason.CONTROL_INCOMPLETE:
                    self._contradiction = contradiction(self._follower.state, self._witnesses)
                self._leave_term()

    def _held_against_heartbeats(self, event: Event) -> Event:
        """Checks that the topic still has everything that nodes have read in it."""
        if not isinstance(event, ControlRead):
            return event
        return replace(event, incomplete=contradiction(event.state, self._witnesses) is not None)

    def _take_term(self, state: ControlState) -> None:
        assert self._candidacy.producers is not None
        self._contradiction = None
        self._follower.pause()
        self._forwarder = self._make_forwarder(state, self._candidacy.producers)
        self._forwarder.ids = IdTurns.begun(
            IDS,
            self._candidacy.loose,
            without=self._candidacy.without,
            left_out=state.left_out.ids,
        )
        self._counters["elections"] += 1
        self._term_since_ms = self._clock.monotonic_ms()
        self._commit_wanted = True

    def _leave_term(self) -> None:
        if self._forwarder is not None:
            self._forwarder.ingress.close()
            self._shown = self._forwarder.state
            self._candidacy.last_marks = self._forwarder.ids.last_marks(self._shown.leaders)
            self._candidacy.last_left_out = self._shown.left_out.ids
            self._counters += self._forwarder.counters
            self._forwarder = None
            self._follower.restart()
        self._candidacy.destroy()
        self._fences, self._limits, self._floor_wait = (), {}, None
        self._replacements = {}
        self._set_back_from = None
        self._proposals, self._written_reschedules = {}, {}

    def _lead(self) -> float:
        """Plans, and commits if there is a reason; returns how many seconds to wait then."""
        forwarder, server = self._forwarder, self._server
        assert forwarder is not None
        assert server is not None  # without one, the machine has ended its term
        objection = self._candidacy.halves_objection
        forwarder.take_in(server.heartbeat.node, server.heartbeats, objection)
        if self.pause_s > 0:
            return self.pause_s
        if not self._has_id(forwarder):
            return INIT_TICK_S if self._election.phase in IN_TERM else TICK_S
        now_ms = self._clock.wall_ms()
        planned, was_long = self._plan(forwarder, server, now_ms)
        if not (self._commit_wanted or was_long or planned):
            return self._wait_s(forwarder, now_ms)
        first = forwarder.ids.vouches_first if planned.plan.is_at_risk else None
        if first is not None:
            self._vouch(forwarder, first)
            return 0.0
        done = self._transact(forwarder, planned, server, now_ms)
        if self._election.phase not in IN_TERM:
            return TICK_S
        return self.pause_s if done.behind else self._wait_s(forwarder, self._clock.wall_ms())

    def _has_id(self, forwarder: Forwarder) -> bool:
        """Inits ids again where that is due; returns whether a transaction may begin."""
        for number, end in self._candidacy.inited_again():
            forwarder.ids = forwarder.ids.renewed(number, end.verdict)
        forwarder.leave_kept_ids()
        if forwarder.ids.is_lost:
            is_replaced = forwarder.ids.is_replaced
            verdict = TransactionState.FENCED if is_replaced else TransactionState.UNKNOWN
            self._report(verdict, f"no transactional id is left to go on with ({forwarder.ids})")
            return False
        again = forwarder.ids.to_renew
        if again is not None:
            if again not in forwarder.ids.failed:  # else the same init goes on
                log.info("init again", number=again, was=forwarder.ids.states[again].value)
            forwarder.ids = forwarder.ids.renewing(again)
            self._candidacy.init_again(again, MIN_CALL_MS)
        if forwarder.ids.usable is not None:
            return True
        voucher = forwarder.ids.voucher
        if voucher is not None and (forwarder.ids.awaits_voucher or self._commit_wanted):
            self._commit_wanted = False
            self._vouch(forwarder, voucher)
        return False

    def _vouch(self, forwarder: Forwarder, number: int) -> None:
        """Commits one record, by which other ids can be used."""
        began_ms = self._clock.monotonic_ms()
        with self._waits_for_kafka() as timeout_ms:
            end = forwarder.vouch(number, timeout_ms)
        self._report(end.verdict, end.cause, self._clock.monotonic_ms() - began_ms)

    @contextmanager
    def _waits_for_kafka(self) -> Iterator[int]:
        """Has this leader heard while it waits; gives how long a call may take.

        That is until others no longer hear this leader, and one stands.
        """
        until_ms = self._election.waits_until_ms + CLEANER_FRESH_MS
        timeout_ms = min(max(MIN_CALL_MS, until_ms - self._clock.monotonic_ms()), MAX_CALL_MS)
        self._waiting = Waiting(self._clock.monotonic_ms(), self._election.waits_until_ms)
        try:
            yield timeout_ms
        finally:
            self._waiting = None

    def _report(self, verdict: TransactionState, cause: str | None, commit_ms: int = 0) -> None:
        """Has the election machine judge how a transaction ended."""
        if not verdict.is_committed:
            log.warning("transaction", verdict=verdict.value, cause=cause)
        self._step(
            TransactionReport(self._clock.monotonic_ms(), self._election.token, verdict, commit_ms)
        )

    def _plan(
        self, forwarder: Forwarder, server: ServerStatus, now_ms: int
    ) -> tuple[Planned, bool]:
        """Plans what to forward; returns also whether reading took so long that a commit is due.

        No commits are made while reading takes long: the leader's term must not end for that.
        """
        limits = takeable(forwarder.state, server.heartbeat, server.heartbeats)
        began_ms = self._clock.monotonic_ms()
        self._waiting = Waiting(None, began_ms + READING_MS)
        try:
            planned = forwarder.next_step(now_ms, limits)
        finally:
            self._waiting = None
        return planned, self._clock.monotonic_ms() - began_ms >= IDLE_COMMIT_MS

    def _wait_s(self, forwarder: Forwarder, now_ms: int) -> float:
        """Returns how long to wait: until the next due, one tick at most."""
        due_ms = None if forwarder.held else forwarder.next_due_ms()
        wait_s = TICK_S if due_ms is None else (due_ms - now_ms) / 1000
        return max(self.pause_s, 0.001, min(wait_s, TICK_S))

    def _transact(
        self, forwarder: Forwarder, planned: Planned, server: ServerStatus, now_ms: int
    ) -> Transacted:
        """Runs a transaction, and has the election machine judge how it ended."""
        situation = Situation(
            now_ms=now_ms,
            node=server.heartbeat.node,
            heartbeats=server.heartbeats,
            answers=server.answers,
            looked_for=server.looked_for,
            lacks=server.lacks,
            silent=silent_nodes(
                server,
                forwarder.state.nodes,
                required=self._config.required,
                # Heartbeats heard since the row was read do not count as silence.
                now_ms=server.monotonic_ms,
            ),
            in_term_ms=self._clock.monotonic_ms() - self._term_since_ms,
            replacements=self._replacements,
            set_back_from=self._set_back_from,
            rescheduling=Rescheduling(
                [*self._proposals.values()], [*self._written_reschedules.values()]
            ),
            halves_objection=self._candidacy.halves_objection,
        )
        # What this transaction does not decide or settle is announced again.
        self._proposals, self._written_reschedules = {}, {}
        with self._waits_for_kafka() as timeout_ms:
            done = forwarder.transact(planned, situation, timeout_ms)
        self._commit_wanted = False
        self._fences, self._limits = tuple(done.duties.fences), done.duties.limits
        self._floor_wait = done.duties.floor_wait
        self._error = None if done.verdict.is_committed else done.cause
        if done.verdict.is_committed:
            self.tallies.committed(
                done.forwarded,
                done.dead,
                done.unfit,
                commit_ms=done.commit_ms,
                visible_ms=self._clock.wall_ms(),
            )
            self._log.committed(len(done.dead) + done.unfit.total(), done.duties.lost)
            self._on_dead(
                DeadLetter(
                    *(each.message.id, each.message.due_ms, topic_asked_for(each.message)),
                    each.reason.value,
                )
                for each in done.dead
            )
        else:
            self._candidacy.look_soon()
        self._log.refused_wheels(done.duties.refused)
        self._report(done.verdict, done.cause, done.commit_ms)
        return done

    def _may_stop(self, stop_by: float) -> bool:
        """Whether a stopping node has nothing left to do."""
        forwarder, server = self._forwarder, self._server
        if forwarder is None or server is None or self._clock.monotonic() >= stop_by:
            return True
        heartbeat = server.heartbeat
        return heartbeat.open is None and not wheels_to_close(
            forwarder.state, {heartbeat.node: heartbeat}
        )


def _place_of(progress: Progress) -> tuple[int, int, Position | None]:
    return progress.set_backs, progress.due_ms, progress.position


def _waits_for(forwarder: Forwarder) -> str:
    """Says what a leader waits for that neither Kafka nor a topic holds up."""
    if forwarder.ids.usable is None:
        return f"it has no transactional id to use ({forwarder.ids})"
    unreadable = forwarder.unreadable
    if not unreadable:
        return "messages that are due are still being read"
    wheel, first, _ = next(iter(unreadable.ranges()))
    count = len(unreadable)
    more = f" and {count - 1} more" if count > 1 else ""
    return f"it cannot read frame {wheel}/{first}{more}"


def _duty_inputs_of(server: ServerStatus) -> tuple[object, ...]:
    """Returns the inputs of a leader's duties."""
    of_nodes = [
        (
            heartbeat.open,
            heartbeat.spare,
            heartbeat.draining,
            heartbeat.last_number,
            heartbeat.storage,
        )
        for _, heartbeat in sorted(server.heartbeats.items())
    ]
    return server.answers, of_nodes


def _is_older(state: ControlState, than: ControlState) -> bool:
    """Whether a state was read before another was committed."""
    if than.progress is None:
        return False
    if state.progress is None:
        return True
    return state.progress.order < than.progress.order
