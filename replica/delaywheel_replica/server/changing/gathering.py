"""Cancels in groups, on the leader's node: whoever asks, and however many.

| a message to be cancelled is | until | then |
|---|---|---|
| queued | the batch before it was looked up | taken; dropped, if no caller waits for it any more |
| taken | it is looked up, with all of its batch | answered; to be written; waits |
| to be written | its batch's cancels are in the wheel | waits; refused |
| waiting | committed progress decides it (waiting.py), or `WAIT_S` have passed | answered |
| done, in unknown order | its record or its outcome is looked for in Kafka | answered |

What arrives while a batch is looked up forms the next one, and batches begin `BATCHES_APART_S`
apart, or as soon as `_WORTH_A_BATCH` wait: a single cancel waits for nothing, the cost of a batch
is shared by what is in it, and their groups stand less often before those of messages. Cancels are
written as one group while the next batch is looked up. A message is in this table once: whoever
asks again joins its first attempt, even if its caller gave up, and nothing is read or written for
that.

A defect midway leaves nothing here for ever: what a call has named is queued whatever happens next,
and what was asked for more than `LEFT_BEHIND_S` ago is in nobody's hands and is answered.

So that load is refused instead of piling up, at most `QUEUED_AT_MOST` messages are queued and
`KEPT_AT_MOST` are in the table, and nothing is queued behind what waits for `QUEUED_S` already.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.ids import LoneIds
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.core.protocol.progress import Position
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.link import CommitSoon
from delaywheel_replica.quantities import counted
from delaywheel_replica.server.changing.finder import (
    DECIDED_AT_ONCE,
    DecisionBasis,
    MessageFinder,
)
from delaywheel_replica.server.changing.waiting import (
    Answered,
    AskedGroup,
    CancelCall,
    Cohort,
    Decided,
    PendingCancel,
    Subject,
    Waiter,
    WaitingCancels,
    cancels_of,
)
from delaywheel_replica.server.commit.committer import Committed
from delaywheel_replica.server.commit.writing import Writing
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.node.calls_to_nodes import WAIT_S
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.node_view import monotonic_ms, wall_ms
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError, defect

QUEUED_AT_MOST: Final = 16_384
KEPT_AT_MOST: Final = 49_152
"""A message takes about 1 KiB."""
QUEUED_S: Final = 1.0
BATCHES_APART_S: Final = 0.05
_BATCH: Final = 2_048
"""A batch takes calls until it has so many messages."""
_WORTH_A_BATCH: Final = 256
"""Of so many messages each pays more for itself than for the batch."""
_SETTLED_AT_ONCE: Final = 256
"""About as long as `DECIDED_AT_ONCE` take to be decided."""
_ASKED_ABOUT: Final = 64
"""Messages that are looked for on other nodes at once, before it is said that none has them."""
_RESOLVED_AT_ONCE: Final = 192
"""Messages that are looked for in Kafka at once; of what `get` and cancels have together most."""
_RETRY_MS: Final = (50, 2_000)
LEFT_BEHIND_S: Final = 2 * WAIT_S


class CancelGroups:
    """Cancels messages while this node's cleaner leads. For the event loop's thread."""

    def __init__(
        self,
        finder: MessageFinder,
        writing: Writing,
        *,
        ask: Callable[[CommitSoon], object],
        next_change: Callable[[], Awaitable[object]],
        counts: NodeCounts | None = None,
    ) -> None:
        """Prepares; `run` works.

        Args:
            next_change: Waits for a new progress or role in the cleaner's row.
        """
        self._counts = counts or NodeCounts()
        self._counts.cancel_load = lambda: (self.kept, self.age_ms(), self.waits_ms())
        self._finder = finder
        self._writing = writing
        self._ask = ask
        self._next_change = next_change
        self._queue: deque[AskedGroup] = deque()
        self._queued = 0  # messages
        # By what callers call it; only the first is not looked up yet.
        self._named: dict[Reference, AskedGroup | Cohort | PendingCancel] = {}
        self._pending: dict[MessageKey, Cohort | PendingCancel] = {}
        self._cohorts: list[Cohort] = []  # that are written, in order
        self._waiting = WaitingCancels()
        self._arrived = asyncio.Event()
        self._news = asyncio.Event()
        self._asked_about = 0
        self._resolving = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Works until the task is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._take_batches())
                tasks.create_task(self._follow())
                tasks.create_task(self._watch())
        finally:
            for task in self._tasks:
                task.cancel()

    async def cancel(
        self,
        references: Sequence[Reference | Refusal],
        within_s: float,
        *,
        partly: bool = False,
        first_s: float = WAIT_S,
    ) -> list[Answered | None]:
        """Cancels messages; returns what became of each, in order.

        Args:
            references: The messages; a refusal is returned as it is.
            within_s: How long to wait at most.
            partly: Return soon after some are decided; None: others, which go on. So a message
                whose decision takes long delays no other that is asked for in the same call.
            first_s: With `partly`, how long to wait for the first that is decided.
        """
        call = CancelCall.of(len(references))
        asked = self._ask_for(references, call)

        def are_taken() -> bool:
            # What is queued would be dropped with its caller.
            return all(each is None or each.is_taken for each in asked)

        if await call.wait(within_s, are_taken if partly else None, first_s=first_s):
            return list(call.results)
        return [
            _over(each) if result is None else result
            for result, each in zip(call.results, asked, strict=True)
        ]

    @property
    def kept(self) -> int:
        """How many messages are queued or not decided."""
        return self._queued + len(self._pending)

    def waits_ms(self) -> int:
        """How long the first of the queued messages has waited."""
        return monotonic_ms() - self._queue[0].since_ms if self._queue else 0

    def age_ms(self) -> int:
        """How long the first of the messages that are not decided is being cancelled."""
        pending = [*self._pending.values()]  # scrapes read it on other threads
        return monotonic_ms() - pending[0].since_ms if pending else self.waits_ms()

    # --- callers

    def _ask_for(
        self, references: Sequence[Reference | Refusal], call: CancelCall
    ) -> list[AskedGroup | None]:
        """Queues messages, or joins earlier attempts; returns with what each waits for its turn."""
        group, asked = AskedGroup(call, monotonic_ms()), list[AskedGroup | None]()
        room = self._room()
        try:
            for row, reference in enumerate(references):
                waits_with: AskedGroup | None = None
                if isinstance(reference, Refusal):
                    call.settle(row, reference)
                elif (known := self._named.get(reference)) is None:
                    if len(group) < room:
                        group.named.append(reference)
                        group.rows.append(row)
                        waits_with = self._named[reference] = group
                    else:
                        call.settle(row, self._too_many())
                elif isinstance(known, AskedGroup):
                    waits_with = known
                    known.join(reference, call, row)
                else:
                    known.join(known.key_of(reference), [Waiter(call, row)], None)
                asked.append(waits_with)
        except BaseException:
            call.is_over = True  # nobody waits for what it has queued
            raise
        finally:  # who names one of them later waits for this group
            if len(group):
                self._queue.append(group)
                self._queued += len(group)
                self._arrived.set()
        return asked

    def _room(self) -> int:
        """How many more messages are taken now."""
        if self.waits_ms() >= QUEUED_S * 1000:
            return 0
        return min(QUEUED_AT_MOST - self._queued, KEPT_AT_MOST - self.kept)

    def _too_many(self) -> Refusal:
        self._counts.calls.add("cancel", Reason.BACKPRESSURE.value, 0)
        least_ms, most_ms = _RETRY_MS
        return Refusal(
            Reason.BACKPRESSURE,
            f"{counted(self.kept, 'message')} being cancelled",
            after_ms=max(least_ms, min(self.waits_ms(), most_ms)),
        )

    def _settle(self, pending: PendingCancel, answered: Answered) -> None:
        if self._pending.get(pending.key) is not pending:
            return
        del self._pending[pending.key]
        self._waiting.discard(pending)
        for name in pending.names:
            self._named.pop(name, None)
        if isinstance(answered, Decided) and answered.decision is CancelDecision.UNKNOWN:
            answered = Refusal(_why_unknown(pending))
        outcome = _outcome_of(answered)
        self._counts.calls.add("cancel", outcome, (monotonic_ms() - pending.since_ms) * 1_000)
        pending.settle(answered)

    def _unknown(self, pending: PendingCancel) -> None:
        """Looks in Kafka for a message whose cancel was taken, unless for many already.

        It is no longer among those that wait for progress, which decides nothing of it any more.
        """
        self._waiting.discard(pending)
        if not pending.subject.found.cancels or self._resolving >= _RESOLVED_AT_ONCE:
            self._settle(pending, Decided(CancelDecision.UNKNOWN))
            return

        async def resolve() -> None:
            try:
                self._settle(pending, await self._finder.resolve(pending.subject))
            finally:
                self._resolving -= 1
                self._settle(pending, Decided(CancelDecision.UNKNOWN))

        self._resolving += 1
        self._start(resolve())

    # --- batches

    async def _take_batches(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while batch := self._take():
                begun_s = time.monotonic()
                try:
                    await self._look_up(batch)
                except Exception as error:  # noqa: BLE001 - a defect is named to its callers alone
                    refusal = defect(error)
                    for group in batch:
                        for at in range(len(group)):
                            self._refuse(group, at, refusal)
                await self._until_worth_a_batch(begun_s + BATCHES_APART_S)

    async def _until_worth_a_batch(self, until_s: float) -> None:
        try:
            async with asyncio.timeout(until_s - time.monotonic()):
                while self._queued < _WORTH_A_BATCH:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            pass

    def _take(self) -> list[AskedGroup]:
        batch, messages = list[AskedGroup](), 0
        while self._queue and messages < _BATCH:
            group = self._queue.popleft()
            self._queued -= len(group)
            if group.is_awaited:
                group.is_taken = True
                batch.append(group)
                messages += len(group)
            else:
                for named in group.named:
                    self._named.pop(named, None)
        return batch

    async def _look_up(self, batch: list[AskedGroup]) -> None:
        taken_ms = monotonic_ms()
        self._counts.cancel_stages["queued"] += sum(
            (taken_ms - group.since_ms) * len(group) for group in batch
        )
        asked = [(group, at) for group in batch for at in range(len(group))]
        named = [named for group in batch for named in group.named]
        lone, are_written = await self._finder.find_lone(named)
        others = np.flatnonzero(~are_written).tolist()
        cohort = self._cohort(asked, lone, np.flatnonzero(are_written))
        if cohort is not None:
            self._start(self._write_cohort(cohort))
        basis = self._finder.before_look()
        subjects = await self._finder.find_many([named[row] for row in others]) if others else []
        self._spent("looked_up", len(asked), taken_ms)
        to_write: list[PendingCancel] = []
        for begin in range(0, len(others), DECIDED_AT_ONCE):
            basis = basis._replace(now_ms=wall_ms())
            for number in range(begin, min(begin + DECIDED_AT_ONCE, len(others))):
                pending = self._begin(*asked[others[number]], subjects[number], basis)
                if pending is not None:
                    to_write.append(pending)
            await asyncio.sleep(0)
        if to_write:
            self._start(self._write(to_write))

    def _cohort(
        self,
        asked: Sequence[tuple[AskedGroup, int]],
        lone: LoneIds,
        rows: NDArray[np.int64],
    ) -> Cohort | None:
        """Makes a cohort of those that were asked for in these rows, but for what is there."""
        dues_ms = lone.due_ms[rows].tolist()
        kept: list[int] = []
        cohort = Cohort(monotonic_ms())
        for row, due_ms in zip(rows.tolist(), dues_ms, strict=True):
            group, at = asked[row]
            named = group.named[at]
            key = named.id, due_ms
            if (known := self._pending.get(key)) is not None:  # by another name
                known.join(key, group.callers(at), named)
                self._named[named] = known
                continue
            self._named[named] = self._pending[key] = cohort
            cohort.add(named, key, group, at)
            kept.append(row)
        if not kept:
            return None
        places = lone.wheels[kept].tolist(), lone.seqs[kept].tolist(), lone.rows[kept].tolist()
        cohort.close(lone.due_ms[kept], list(zip(*places, strict=True)))
        return cohort

    def _begin(
        self,
        asked: AskedGroup,
        at: int,
        subject: Subject | RequestRefusedError,
        basis: DecisionBasis,
    ) -> PendingCancel | None:
        """Decides what to do about a message that was looked up; returns it if it is written."""
        if isinstance(subject, RequestRefusedError):
            self._refuse(asked, at, subject.refusal)
            return None
        key, named = subject.key, asked.named[at]
        known = self._pending.get(key)
        if known is not None:  # by another name
            known.join(key, asked.callers(at), named)
            self._named[named] = known
            return None
        pending = PendingCancel(key, subject, asked.since_ms, asked.callers(at), [named])
        self._named[named] = self._pending[key] = pending
        decided = basis.before_writing(key, subject.found)
        decision = decided.decision
        if decision is CancelDecision.WRITE:
            return pending
        if decision is CancelDecision.WAIT:
            self._waiting.add(pending, look=True)
            self._ask_for_progress()
        elif decision is CancelDecision.NOT_FOUND:
            self._ask_others(pending)
        elif decision is CancelDecision.NO_LEADER:
            self._settle(pending, Refusal(Reason.NO_LEADER))
        elif decision is CancelDecision.UNKNOWN:
            self._unknown(pending)
        else:
            self._settle(pending, decided)
        return None

    def _refuse(self, asked: AskedGroup, at: int, refusal: Refusal) -> None:
        named = asked.named[at]
        if self._named.get(named) is asked:
            del self._named[named]
            asked.settle(at, refusal)

    def _ask_others(self, pending: PendingCancel) -> None:
        """Asks other nodes for a message that is not here, unless many are asked about."""
        if self._asked_about >= _ASKED_ABOUT:
            refusal = Refusal(Reason.BACKPRESSURE, "Other nodes are asked about many messages")
            self._settle(pending, refusal)
            return

        async def ask() -> None:
            try:
                is_none = await self._finder.nobody_has(pending.subject.named)
                decision = CancelDecision.NOT_FOUND if is_none else CancelDecision.UNKNOWN
                self._settle(pending, Decided(decision))
            finally:
                self._asked_about -= 1
                self._settle(pending, Decided(CancelDecision.UNKNOWN))

        self._asked_about += 1
        self._start(ask())

    async def _write(self, group: list[PendingCancel]) -> None:
        """Writes the cancels of messages that are in no cohort, as one group."""
        columns = cancels_of([pending.key for pending in group])
        written = await self._written(columns)
        if isinstance(written, Refusal):
            for pending in group:
                self._settle(pending, written)
            return
        now_ms = monotonic_ms()
        # Some frame up to this one has the cancel.
        place = Position(written.wheel, written.seq, 0)
        for row, pending in enumerate(group):
            refusal = written.failed.get(row)
            if refusal is None:
                pending.is_written = True
                pending.written_ms = now_ms
                pending.subject.found.cancels.append(place)
                self._waiting.add(pending)
            else:
                self._settle(pending, _not_written(refusal))
        self._ask_for_progress()

    async def _write_cohort(self, cohort: Cohort) -> None:
        written = await self._written(cancels_of(cohort.keys, cohort.due_ms))
        if isinstance(written, Refusal):
            await self._settle_of(cohort, np.flatnonzero(cohort.is_open), written)
            return
        for row, refusal in written.failed.items():
            await self._settle_of(cohort, np.array([row]), _not_written(refusal))
        progress = self._finder.moment().progress
        cohort.place = Position(written.wheel, written.seq, 0)
        cohort.written_ms = monotonic_ms()
        cohort.set_backs = 0 if progress is None else progress.set_backs
        self._cohorts.append(cohort)
        self._ask_for_progress()

    async def _written(self, columns: Columns) -> Committed | Refusal:
        """Writes cancels as one group."""
        begun_ms = monotonic_ms()
        try:
            written = await self._writing.submit(columns, Kind.CANCELS)
        except RequestRefusedError as error:
            return error.refusal
        except Exception as error:  # noqa: BLE001 - a defect is named to its callers alone
            return defect(error)
        self._spent("written", len(columns), begun_ms)
        return written

    async def _settle_of(self, cohort: Cohort, rows: NDArray[np.int64], answered: Answered) -> None:
        """Settles some of a cohort; between some of them the event loop serves others."""
        cohort.is_open[rows] = False
        since_ms: Counter[int] = Counter()
        for number, row in enumerate(rows.tolist(), 1):
            for name in cohort.names(row):
                del self._named[name]
            del self._pending[cohort.keys[row]]
            cohort.settle(row, answered)
            since_ms[cohort.asked[row][0].since_ms] += 1
            if number % _SETTLED_AT_ONCE == 0:
                await asyncio.sleep(0)
        outcome, now_ms = _outcome_of(answered), monotonic_ms()
        for since, messages in since_ms.items():
            self._counts.calls.add("cancel", outcome, (now_ms - since) * 1_000, messages)

    def _single_out(self, cohort: Cohort, rows: NDArray[np.bool_]) -> None:
        """Makes single ones of those that are open in these rows of a cohort."""
        rows = rows & cohort.is_open
        cohort.is_open &= ~rows
        for row in np.flatnonzero(rows).tolist():
            pending = cohort.single(row)
            self._pending[pending.key] = pending
            for name in pending.names:
                self._named[name] = pending
            self._waiting.add(pending, look=True)

    def _spent(self, stage: str, messages: int, since_ms: int) -> None:
        self._counts.cancel_stages[stage] += messages * (monotonic_ms() - since_ms)

    def _ask_for_progress(self) -> None:
        """Asks for a transaction soon, and has what waits looked at by now."""
        self._ask(CommitSoon())
        self._news.set()

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- committed progress

    async def _watch(self) -> None:
        while True:
            await self._next_change()
            self._news.set()

    async def _follow(self) -> None:
        while True:
            try:
                is_any = bool(self._pending)
                async with asyncio.timeout(QUEUED_S if is_any else None):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            try:
                await self._decide()
            except Exception as error:  # noqa: BLE001 - those that wait are looked at again
                defect(error)
            before_ms = monotonic_ms() - round(WAIT_S * 1000)
            for cohort in self._cohorts:
                if cohort.since_ms < before_ms:
                    self._single_out(cohort, cohort.is_open)
            for pending in self._waiting.older(before_ms):
                self._settle(pending, Decided(CancelDecision.UNKNOWN))
            self._settle_left_behind()

    def _settle_left_behind(self) -> None:
        """Answers for what only a defect can have left in the table for so long."""
        before_ms = monotonic_ms() - round(LEFT_BEHIND_S * 1000)
        for key, known in list(self._pending.items()):
            if known.since_ms >= before_ms:  # those behind it came later
                return
            if isinstance(known, PendingCancel):
                self._settle(known, Decided(CancelDecision.UNKNOWN))
                continue
            row = known.keys.index(key)
            known.is_open[row : row + 1] = False
            for name in known.names(row):
                self._named.pop(name, None)
            del self._pending[key]
            known.settle(row, Refusal(Reason.CANCEL_UNKNOWN))

    async def _decide(self) -> None:
        """Decides what the present progress covers, with one look for all."""
        await self._decide_cohorts()
        progress = self._finder.moment().progress
        if progress is None:
            return
        covered = self._waiting.covered(progress)
        for begin in range(0, len(covered), _BATCH):
            await self._decide_alone(covered[begin : begin + _BATCH])

    async def _decide_cohorts(self) -> None:
        """Decides what the present progress covers of cohorts, and singles out all else.

        Several small ones are one look.
        """
        progress = self._finder.moment().progress
        if progress is None:
            return
        taken: list[Cohort] = []
        for cohort in self._cohorts:
            assert cohort.place is not None
            if cohort.set_backs != progress.set_backs:
                self._single_out(cohort, cohort.is_open)
            elif cohort.place.seq <= progress.seq(cohort.place.wheel):
                taken.append(cohort)
            elif cohort.soonest_ms <= progress.last_due_ms:
                self._single_out(cohort, cohort.due_ms <= progress.last_due_ms)
        while taken:
            some: list[Cohort] = []
            while taken and sum(map(len, some)) < _BATCH:
                some.append(taken.pop(0))
            await self._decide_together(some)
        self._cohorts = [cohort for cohort in self._cohorts if cohort.is_open.any()]

    async def _decide_together(self, cohorts: Sequence[Cohort]) -> None:
        """Looks for cohorts whose cancels were taken; singles out what is not CANCELLED by that."""
        begun_ms = monotonic_ms()
        rows = [np.flatnonzero(cohort.is_open) for cohort in cohorts]
        pinned = [
            named
            for cohort, open_ in zip(cohorts, rows, strict=True)
            for named in cohort.pinned(open_.tolist())
        ]
        if not pinned:
            return
        for cohort, open_ in zip(cohorts, rows, strict=True):
            if cohort.written_ms:
                waited_ms = begun_ms - cohort.written_ms
                self._counts.cancel_stages["taken"] += waited_ms * len(open_)
                cohort.written_ms = 0
        are_cancelled = await self._finder.are_cancelled(pinned)
        self._spent("confirmed", len(pinned), begun_ms)
        begin = 0
        for cohort, open_ in zip(cohorts, rows, strict=True):
            is_cancelled = are_cancelled[begin : begin + len(open_)]
            begin += len(open_)
            await self._settle_of(cohort, open_[is_cancelled], Decided(CancelDecision.CANCELLED))
            self._single_out(cohort, cohort.is_open)

    async def _decide_alone(self, covered: Sequence[PendingCancel]) -> None:
        begun_ms = monotonic_ms()
        for pending in covered:
            if pending.written_ms:
                self._counts.cancel_stages["taken"] += begun_ms - pending.written_ms
                pending.written_ms = 0
        all_decided = await self._finder.decide_many([pending.subject for pending in covered])
        self._spent("confirmed", len(covered), begun_ms)
        for number, (pending, decided) in enumerate(zip(covered, all_decided, strict=True), 1):
            if decided.decision is CancelDecision.UNKNOWN:
                self._unknown(pending)
            elif decided.decision is not CancelDecision.WAIT:
                self._settle(pending, decided)
            if number % DECIDED_AT_ONCE == 0:
                await asyncio.sleep(0)


def _outcome_of(answered: Answered) -> str:
    """Returns the outcome that is counted for a call."""
    return answered.decision.name if isinstance(answered, Decided) else answered.reason.value


def _not_written(refusal: Refusal) -> Answered:
    """The answer for a message whose cancel was refused."""
    is_late = refusal.reason is Reason.DUE_TOO_OLD
    return Decided(CancelDecision.TOO_LATE) if is_late else refusal


def _over(asked: AskedGroup | None) -> Answered:
    """The answer for a message whose caller's time is over."""
    if asked is not None and not asked.is_taken:
        return Refusal(Reason.BACKPRESSURE, "Its turn did not come in time")
    return Refusal(Reason.CANCEL_UNKNOWN)


def _why_unknown(pending: PendingCancel) -> Reason:
    """Why it is not known what became of a message."""
    was_cancelled = pending.is_written or pending.subject.found.cancels
    return Reason.CANCEL_UNKNOWN if was_cancelled else Reason.NOT_UP_TO_DATE
