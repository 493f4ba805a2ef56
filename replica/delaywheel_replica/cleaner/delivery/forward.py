"""Forwards due messages transaction by transaction, together with the progress.

begin -> opening -> messages, dead letters, outcomes -> control records -> flush -> progress, last
-> commit (the opening is a record that no state depends on)

Ingress records that are forwarded directly join the due messages of the wheels: at most half of a
transaction, so that neither waits for the other. Both are planned together; only if an ingress
record has to wait for a topic, the rest is forwarded without it.

Transactional ids take turns, so that a transaction need not wait for the markers of the one
before; each commit is awaited before the next transaction begins. core/leader/pacing.py decides how
far apart transactions begin, core/election/id_turns.py which id is next.

The committed state is known without reading it back: while this node leads, no other can commit.
After anything but a known end, the state here is no longer used
(core/protocol/transaction_outcomes.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from time import monotonic as monotonic_clock

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.transactional import is_aftermath
from delaywheel_replica.cleaner.delivery import halves, outcomes
from delaywheel_replica.cleaner.delivery.dead_letters import (
    Condemned,
    DeadLetters,
    Hold,
    Plan,
    condemn,
)
from delaywheel_replica.cleaner.delivery.proposals import ProposalSearch
from delaywheel_replica.cleaner.due.given_up import LostFrames, joined
from delaywheel_replica.cleaner.due.reader import DueReader
from delaywheel_replica.cleaner.due.rows import DueRows, HalfState, MessageOutcome
from delaywheel_replica.cleaner.due.steps import Step
from delaywheel_replica.cleaner.ingress.direct import joined_with
from delaywheel_replica.cleaner.ingress.taken import NOTHING, Taken
from delaywheel_replica.cleaner.ingress.term import Ingress
from delaywheel_replica.cleaner.outside.ports import (
    IDS,
    UNTAKEN,
    KafkaCallEnd,
    ProducersPort,
    Record,
)
from delaywheel_replica.core.election.id_turns import IdTurns
from delaywheel_replica.core.ingress.moment import TransactionRoom
from delaywheel_replica.core.leader.duties import Cluster, Duties, Situation, duties
from delaywheel_replica.core.leader.floor import FloorWatch
from delaywheel_replica.core.leader.pacing import CapLimits, Load, Pace, first_pace
from delaywheel_replica.core.leader.rescheduling import (
    Rescheduling,
    open_proposals,
    passing,
    uncopied,
    withdrawn,
)
from delaywheel_replica.core.protocol.control import (
    OPENING,
    ControlRecord,
    ControlState,
    left_out_record,
)
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.protocol.producer_quota import (
    MESSAGE_BYTES,
    THROTTLED,
    ProducerQuota,
    wire_bytes,
)
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from delaywheel_replica.kafka_settings import FORWARD_ROOM_BYTES, KafkaNames

WARM_MS = 1_000

_NO_ROOM = TransactionRoom(0)


@dataclass(frozen=True, slots=True)
class Planned:
    """What is forwarded next, and how, with direct messages.

    Attributes:
        step: What is taken from the wheels; None: nothing can be forwarded now.
        rows: All messages that are sent, or become dead letters.
    """

    step: Step | None = None
    plan: Plan = field(default_factory=lambda: Plan(NOTHING.rows))
    taken: Taken = NOTHING
    rows: DueRows = NOTHING.rows

    def __bool__(self) -> bool:
        """Whether a transaction should begin without waiting for anything else."""
        return bool(self.step) or self.taken.is_urgent


@dataclass(frozen=True, slots=True)
class Transacted:
    """One transaction and its outcome."""

    verdict: TransactionState
    cause: str | None
    commit_ms: int
    duties: Duties
    behind: bool
    """More is due already."""
    forwarded: Sequence[DueRows] = ()
    """The messages that went to their topics, if it was committed."""
    dead: Sequence[Condemned] = ()
    """Those that went to the dead letters, if it was committed."""
    unfit: Counter[str] = field(default_factory=Counter)
    """Why ingress records went there, if it was committed."""


class Forwarder:
    """Forwards during one term; each term has its own.

    Attributes:
        ids: Which transactional ids may be used; changed between transactions.
        forwards: Messages are forwarded, not only idle commits made.
    """

    def __init__(  # noqa: PLR0913 - what a term consists of
        self,
        state: ControlState,
        producers: ProducersPort,
        reader: DueReader,
        dead_letters: DeadLetters,
        ingress: Ingress,
        *,
        names: KafkaNames,
        cluster: Cluster,
        caps: CapLimits,
        monotonic: Callable[[], float] = monotonic_clock,
    ) -> None:
        self.state = state
        self.ids = IdTurns.begun(IDS)
        self.ingress = ingress
        self.forwards = False
        self.counters: Counter[str] = Counter()
        self.held: str | None = None
        self._producers = producers
        self._reader = reader
        self._proposals = ProposalSearch(reader.look_for_cancels)
        self._dead_letters = dead_letters
        self._names = names
        self._cluster = cluster
        self._own_batch_bytes = caps.own_batch_bytes
        self._pace: Pace = first_pace(caps)
        self._monotonic = monotonic
        self._watch = FloorWatch()
        self._missing = NO_FRAMES
        self._reading = False
        # Up to which due all is done, where what follows cannot be taken though its time has come.
        self._stuck_ms: int | None = None
        # When it began to wait for frames that cannot be read.
        self._unread_ms: int | None = None
        self._next_begin = 0.0
        self._quota = ProducerQuota()
        self._sent_bytes = 0
        # The messages of the running transaction.
        self._written = NOTHING.rows
        # The messages of each id's last transaction.
        self._last: dict[int, DueRows] = {}
        producers.is_untaken = lambda: self._dead_letters.are_untaken(self._written)
        dead_letters.unread = lambda: ingress.unread

    @property
    def unreadable(self) -> FrameSet:
        """Frames that cannot be read here and are requested from other members."""
        return self._missing | self._reader.unreadable if self._reading else self._missing

    @property
    def pause_s(self) -> float:
        """Returns how long the next transaction has to wait."""
        throttled_s = (self._producers.throttled_until_ms or 0) / 1000
        return max(0.0, max(self._next_begin, throttled_s) - self._monotonic())

    @property
    def quota_bytes_per_s(self) -> int | None:
        """What Kafka takes a second from this leader, as measured; None: it does not throttle."""
        known = self._quota.bytes_per_s
        return None if known is None else round(known)

    def next_due_ms(self) -> int | None:
        """Returns the earliest unfinished due among loaded messages."""
        return self._reader.next_due_ms() if self._reading else None

    def oldest_waiting_ms(self) -> int | None:
        """Returns the earliest due that may be unfinished; None: none waits, or is loaded."""
        known = (self.next_due_ms(), self._stuck_ms, self._unread_ms)
        return min((due_ms for due_ms in known if due_ms is not None), default=None)

    def take_in(
        self, node: str, heartbeats: Mapping[str, Heartbeat], halves_objection: str | None
    ) -> None:
        """Takes the ingress records that have arrived, given the newest heartbeat of each node.

        Without an objection, groups can be asked about half messages.
        """
        if self.forwards:
            self.ingress.poll(self.state, node, heartbeats, halves_objection)

    def next_step(self, now_ms: int, limits: Mapping[WheelId, int]) -> Planned:
        """Returns what to do next; if something cannot be forwarded, `held` has the reason.

        Nothing due later than `now_ms` is forwarded; each wheel is taken up to its limit.
        """
        self.held = None
        if not self.forwards or self.state.progress is None:
            return Planned()
        if not self._reading:
            self._reader.start(self.state.progress)
            self._reading = True
        self._reader.update(limits, self.state.lost, withdrawn(self.state))
        pace = self._pace.within(self._quota.most_bytes)
        room = TransactionRoom(-(-pace.cap_messages // 2), -(-pace.cap_bytes // 2))
        taken = self.ingress.plan(now_ms, room)
        step = self._reader.next_step(
            now_ms,
            pace.cap_messages - len(taken.step.settled),
            pace.cap_bytes - taken.step.length_bytes,
        )
        self._note_waiting(step, now_ms)
        return self._planned(step, taken, now_ms, room)

    def _note_waiting(self, step: Step, now_ms: int) -> None:
        """Notes what cannot be taken though it may be due: no loaded message shows that."""
        is_stuck = not step and step.after.due_ms < now_ms
        self._stuck_ms = step.after.due_ms if is_stuck else None
        if not self._reader.unreadable:
            self._unread_ms = None
        elif self._unread_ms is None:
            self._unread_ms = now_ms

    def _planned(self, step: Step, taken: Taken, now_ms: int, room: TransactionRoom) -> Planned:
        """Decides what is forwarded; direct messages delay nothing else."""
        messages = halves.messages_of(step, now_ms, self._names)
        plan, rows = self._judge(messages, taken)
        if isinstance(plan, Hold) and plan.topics and len(taken.rows):
            taken = self.ingress.plan(now_ms, room, plan.topics)
            plan, rows = self._judge(messages, taken)
            if isinstance(plan, Hold) and len(taken.rows):
                taken = self.ingress.plan(now_ms, _NO_ROOM)
                plan, rows = self._judge(messages, taken)
        if isinstance(plan, Hold):
            self.held = plan.why
            return Planned(taken=self.ingress.plan(now_ms, _NO_ROOM))
        return Planned(step, plan, taken, rows)

    def _judge(self, messages: DueRows, taken: Taken) -> tuple[Plan | Hold, DueRows]:
        """Returns what becomes of messages and direct ones, and all of these together."""
        rows = joined_with(messages, taken.rows)
        self._dead_letters.is_careful = self.ids.is_scarce
        return self._dead_letters.plan(rows, self._reader.topics_ahead), rows

    def transact(self, planned: Planned, situation: Situation, timeout_ms: int) -> Transacted:
        """Runs one transaction: what was planned with all duties, or the duties alone."""
        step, taken = planned.step, planned.taken
        progress = self.state.progress if step is None else step.after
        situation = replace(
            situation,
            rescheduling=self._rescheduling(step, situation),
            ingress=taken.step.records,
            hears_answers=self.ingress.hears_answers,
            ingress_slot=self.ingress.bound(self.state, taken),
        )
        todo, lost = self._duties(progress, situation)
        began = self._monotonic()
        number = self.ids.usable_at_risk if planned.plan.is_at_risk else self.ids.usable
        assert number is not None  # whoever begins a transaction has looked
        self._sent_bytes, self._written = 0, planned.plan.rows
        self._last[number] = self._written
        if planned.plan.look_up:
            self._producers.warm(planned.plan.look_up, WARM_MS)
        self._producers.begin(number)
        counted: Counter[str] = Counter(transactions=1)
        forwarded, dead = list[DueRows](), list[Condemned]()
        own = _OwnRecords(self._producers, number, self._own_batch_bytes, timeout_ms)
        if planned:
            own.write([self._control(OPENING)])
        if step is not None:
            forwarded, dead, written = self._write(number, step, planned.plan, situation, own)
            counted += written
        unasked = self._ask(taken.letters, situation, own)
        counted["halves_asked"] += len(taken.letters) - len(unasked)
        counted["dead_lettered"] += len(unasked)
        dead += unasked
        own.write(self.ingress.written(taken))
        own.write(outcomes.lost(self._names, lost))
        counted["lost_frames"] += sum(run.frames for run in lost)
        control = [self._control(record) for record in todo.all_records]
        own.write(control[:-1])
        ended = self._producers.commit(number, control[-1], timeout_ms)
        self._written = NOTHING.rows
        self.ids = self.ids.ended(number, ended.verdict)
        commit_ms = round((self._monotonic() - began) * 1000)
        self._note_throttling(began)
        behind = bool(taken.step.settled) or (step is not None and step.behind)
        unfit = Counter[str]()
        if ended.verdict.is_committed:
            self._committed(step, todo)
            is_full = taken.is_full or (step is not None and self._is_full(step))
            late_ms = situation.now_ms - step.before.due_ms if step else 0
            load = _load(planned.plan) if is_full else None
            self._pace = self._pace.after_commit(commit_ms, load, late_ms=late_ms)
            self.counters += counted
            self.counters += self.ingress.committed(taken, self.state)
            unfit = taken.unfit
        else:
            self._failed(planned, ended.cause)
        self._next_begin = began + self._pace.pause_ms / 1000
        return Transacted(
            ended.verdict, ended.cause, commit_ms, todo, behind, forwarded, dead, unfit
        )

    def _failed(self, planned: Planned, cause: str | None) -> None:
        """Has looked for what Kafka refused, if that is why a transaction failed."""
        self.counters["failed_transactions"] += 1
        self.ingress.failed()
        is_known = cause is not None and cause.startswith((THROTTLED, UNTAKEN))
        if planned.step is not None and not (is_known or is_aftermath(cause)):
            self._dead_letters.failed(planned.rows)

    def leave_kept_ids(self) -> None:
        """Takes out ids whose last transactions Kafka cannot end before a broker is back."""
        for number, rows in list(self._last.items()):
            if self._dead_letters.would_stick(rows):
                self.ids = self.ids.kept(number)
                del self._last[number]

    def _note_throttling(self, began: float) -> None:
        """Learns from the transaction that has just ended what Kafka takes."""
        began_ms = round(began * 1000)
        throttled_ms = max(0, (self._producers.throttled_until_ms or 0) - began_ms)
        self.counters["throttled_ms"] += throttled_ms
        self._quota = self._quota.after(
            self._sent_bytes,
            began_ms=began_ms,
            throttled_ms=throttled_ms,
            most_bytes=self._pace.limits.max_bytes,
        )

    def vouch(self, number: int, timeout_ms: int) -> KafkaCallEnd:
        """Commits one record with an id that may have no more than one.

        It says which ids are left out, or nothing.
        """
        said = self._left_out()
        self._producers.begin(number)
        (record,) = said or [OPENING]
        ended = self._producers.commit(number, self._control(record), timeout_ms)
        self.ids = self.ids.ended(number, ended.verdict)
        if ended.verdict.is_committed:
            self.state = self.state.apply_all(said)
        return ended

    def _left_out(self) -> list[ControlRecord]:
        """Says which ids are left out, if that is not committed already."""
        left_out = self.ids.left_out
        return [] if left_out == self.state.left_out else [left_out_record(left_out)]

    def _is_full(self, step: Step) -> bool:
        """Whether a step is near the cap; what did not fit any more may be large."""
        messages = len(step.messages) + len(step.dropped)
        return self._pace.is_filled_by(messages, step.messages.length_bytes)

    def _rescheduling(self, step: Step | None, situation: Situation) -> Rescheduling:
        """Adds what only the reader of due messages knows about reschedules."""
        if step is None:
            return Rescheduling()
        known = situation.rescheduling
        return replace(
            known,
            proposals=self._proposals.uncancelled(
                open_proposals(self.state, known.proposals, step.after)
            ),
            absent=frozenset(
                key
                for key in passing(self.state, step.after)
                if not self._reader.has_copy(step, key.at(self.state.reschedules[key].to_ms))
            ),
        )

    def _duties(
        self, progress: Progress | None, situation: Situation
    ) -> tuple[Duties, list[LostFrames]]:
        """Returns the duties, and outcomes for the frames that they give up.

        A frame that turns out to be readable here was repaired meanwhile: it is not given up. Nor
        is one that only cannot be read for now, until a minute after its second.
        """
        todo = self._what_to_do(progress, situation)
        if not todo.lost:
            return todo, []
        floor = 0 if self.state.progress is None else self.state.progress.floor
        looked = self._reader.look_at_lost(todo.lost, situation.now_ms, floor=floor)
        if looked.kept:
            situation = replace(situation, looked_for=todo.lost - looked.kept)
            todo = self._what_to_do(progress, situation)
        needed = uncopied(self.state, todo.progress, situation.rescheduling)
        lost = (
            each
            for each in looked.lost
            if not _was_done(each, self.state.progress) or (each.wheel, each.seq) in needed
        )
        return todo, list(joined(lost))

    def _what_to_do(self, progress: Progress | None, situation: Situation) -> Duties:
        todo = duties(self.state, progress, self._watch, self._cluster, situation)
        return replace(todo, records=[*self._left_out(), *todo.records])

    def _committed(self, step: Step | None, todo: Duties) -> None:
        """Takes what a transaction has committed for the state that the next one begins with."""
        before = self.state.progress
        is_set_back = before is not None and todo.progress.set_backs != before.set_backs
        self.state = replace(self.state.apply_all(todo.records), progress=todo.progress)
        self._watch = todo.watch
        self._missing = todo.missing
        if step is not None:
            self._dead_letters.committed()
            self._reader.done(step, todo.progress)
        elif todo.unregistered or is_set_back:
            self._reading = False  # its progress is elsewhere: start over

    def _write(
        self, number: int, step: Step, plan: Plan, situation: Situation, own: _OwnRecords
    ) -> tuple[list[DueRows], list[Condemned], Counter[str]]:
        """Writes everything of a step; what the client itself refuses becomes a dead letter too.

        Returns what goes to its topic, what becomes a dead letter, and the counts of what was done.
        """
        dead = list(plan.dead)
        names = self._names
        forwarded = list[DueRows]()
        portions = self._quota.portions(round(self._monotonic() * 1000))
        for rows in own.by_batch(_portions(_batches(plan.rows, plan.batch_limits), portions)):
            records = outcomes.forwarded(names, rows, situation.now_ms)
            refused = self._producers.write(number, records)
            written = rows
            if refused:
                numbers = np.array([record.number for record in refused])
                written = rows.take(np.delete(np.arange(len(rows)), numbers))
                chosen = rows.take(numbers)
                dead += [condemn(m, r.reason) for m, r in zip(chosen, refused, strict=True)]
            forwarded.append(written)
            self._sent_bytes += wire_bytes(len(rows), rows.length_bytes)
        self._write_dead(dead, own)
        if names.ingress in plan.batch_limits and len(plan.deferred):
            own.flush()  # or they would be in one batch with halves that went there
        for rows in own.by_batch(_batches(plan.deferred, plan.batch_limits)):
            own.write(outcomes.forwarded(names, rows, situation.now_ms))
        own.write(outcomes.deferred(names, plan.deferred))
        unasked = self._ask(halves.letters_of(step, names), situation, own)
        dead += unasked
        own.write(outcomes.dropped(names, step.dropped.others if unasked else step.dropped))
        passed_on = 0
        for rows in forwarded:
            later = rows.take(rows.records["half"] == HalfState.PASSED_ON)
            passed_on += len(later)
            own.write(outcomes.committed(names, later))
        counts = np.bincount(step.dropped.outcomes, minlength=len(MessageOutcome) + 1).tolist()
        counted = Counter(
            forwarded=sum(map(len, forwarded)) - passed_on,
            dead_lettered=len(dead),
            deferred=len(plan.deferred),
            cancelled=counts[MessageOutcome.CANCELLED],
            duplicates=counts[MessageOutcome.DUPLICATE],
            halves_passed_on=passed_on,
            halves_asked=counts[MessageOutcome.ASKED] - len(unasked),
        )
        return forwarded, dead, counted

    def _ask(self, letters: DueRows, situation: Situation, own: _OwnRecords) -> list[Condemned]:
        """Asks groups with these letters; returns those that became dead letters instead."""
        if situation.halves_objection is None:
            own.write(outcomes.forwarded(self._names, letters, situation.now_ms))
            return []
        unasked = halves.unasked(letters, situation.halves_objection)
        self._write_dead(unasked, own)
        return unasked

    def _write_dead(self, dead: Iterable[Condemned], own: _OwnRecords) -> None:
        letters = (
            outcomes.dead_letter(self._names, each.message, each.reason, each.detail)
            for each in dead
        )
        own.write(chain.from_iterable(letters))

    def _control(self, record: ControlRecord) -> Record:
        key, value = record
        return Record(self._names.control, key.encode(), value, [], partition=0)


class _OwnRecords:
    """Writes one transaction's records to our topics, in batches: clients split no refused one."""

    def __init__(
        self, producers: ProducersPort, number: int, most_bytes: int, timeout_ms: int
    ) -> None:
        self._producers = producers
        self._number = number
        self._most_bytes = most_bytes
        self._timeout_ms = timeout_ms
        self._together: Counter[str] = Counter()

    def write(self, records: Iterable[Record]) -> None:
        """Writes records without which the transaction must not be committed."""
        fitting: list[Record] = []
        for record in records:
            length_bytes = record.batch_bytes
            together_bytes = self._together[record.topic]
            if together_bytes and together_bytes + length_bytes > self._most_bytes:
                self._producers.write_own(self._number, fitting)
                self.flush()
                fitting = []
            self._together[record.topic] += length_bytes
            fitting.append(record)
        if fitting:
            self._producers.write_own(self._number, fitting)

    def by_batch(self, batches: Iterable[tuple[DueRows, bool]]) -> Iterator[DueRows]:
        """Returns what to write next, after the brokers have the batches before it.

        Nothing more comes once the transaction has failed.
        """
        for rows, ends_batch in batches:
            yield rows
            if ends_batch and not self.flush():
                return

    def flush(self) -> bool:
        """Waits until the brokers have everything written so far; False: the transaction failed."""
        self._together.clear()
        return self._producers.flush(self._number, self._timeout_ms)


def _load(plan: Plan) -> Load:
    """Returns what was written; our own records go to few partitions, however many they are."""
    rows, own = plan.rows, 1 + bool(plan.dead) + bool(len(plan.deferred))
    other_bytes = sum(len(each.message.value or b"") for each in plan.dead)
    other_bytes += plan.deferred.length_bytes
    touched = (own + count for count in rows.partitions_touched(plan.partitions))
    return Load(rows.length_bytes + other_bytes, *touched)


def _was_done(lost: LostFrames, progress: Progress | None) -> bool:
    """Whether no message is lost with these frames, since all of them were taken."""
    if progress is None or lost.slot == 0:
        return False
    return progress.covers_all(lost.wheel, lost.last_seq, lost.last_slot * 1000 + 999)


def _portions(
    batches: Iterable[tuple[DueRows, bool]], portions: Iterator[int]
) -> Iterator[tuple[DueRows, bool]]:
    """Divides batches so that each portion is answered before the next one is written.

    So it is seen whether Kafka throttles before more is under way than it takes.
    """
    room = next(portions)
    for rows, ends_batch in batches:
        ends = np.cumsum(rows.lengths_bytes + MESSAGE_BYTES)
        start, done = 0, 0
        while start < len(rows) and int(ends[-1]) - done > room:
            stop = max(start + 1, int(ends.searchsorted(done + room, side="right")))
            if stop >= len(rows):
                break
            yield rows.take(slice(start, stop)), True
            start, done = stop, int(ends[stop - 1])
            room = next(portions)
        yield (rows.take(slice(start, None)) if start else rows), ends_batch
        room = next(portions) if ends_batch else room - int(ends[-1]) + done


def _batches(rows: DueRows, limits: Mapping[str, int]) -> Iterator[tuple[DueRows, bool]]:
    """Divides rows so that no batch exceeds its topic's limit.

    librdkafka makes batches up to its `batch.size`, whatever the topic's limit, and never splits
    one. So for the few topics with a smaller limit, messages are flushed before more than the limit
    accumulates (counted over all partitions of the topic).
    """
    if not len(rows):
        return
    if not limits:
        yield rows, False
        return
    gathered: dict[int, int] = {}
    by_number = {n: limits[t] for n, t in enumerate(rows.topics) if t in limits}
    sizes = (rows.lengths_bytes + FORWARD_ROOM_BYTES).tolist()
    start = 0
    for at, (number, size) in enumerate(zip(rows.topic_numbers.tolist(), sizes, strict=True)):
        if number not in by_number:
            continue
        together = gathered.get(number, 0) + size
        if together > by_number[number] and at > start:
            yield rows.take(slice(start, at)), True
            start, gathered, together = at, {}, size
        gathered[number] = together
    yield rows.take(slice(start, None)), False
