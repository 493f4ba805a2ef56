"""Cancels in groups, on the leader's node: whoever asks, and however many.

| a message to be cancelled is | until | then |
|---|---|---|
| queued | the batch before it was looked up | taken; dropped, if no caller waits for it any more |
| taken | it is looked up, with all of its batch | answered; to be written; waits |
| to be written | its batch's cancels are in the wheel | waits; refused |
| waiting | committed progress decides it (waiting.py), or `WAIT_S` have passed | answered |
| done, in unknown order | its record or its outcome is looked for in Kafka | answered |

What arrives while a batch is looked up forms the next one, and batches begin `BATCHES_APART_S`
apart, unless so many wait that the next one is full: a single cancel waits for nothing, the cost of
a batch is shared by what is in it, and their groups stand less often before those of messages.
Cancels are written as one group while the next
batch is looked up. A message is in this table once: whoever asks again joins its first attempt,
even if its caller gave up, and nothing is read or written for that.

So that load is refused instead of piling up, at most `QUEUED_AT_MOST` messages are queued and
`KEPT_AT_MOST` are in the table, and nothing is queued behind what waits for `QUEUED_S` already.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import ID_LENGTH_BYTES, Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.core.protocol.progress import Position
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.link import CommitSoon
from delaywheel_replica.quantities import counted
from delaywheel_replica.server.changing.awaited import WAIT_S, AwaitedCall
from delaywheel_replica.server.changing.sights import DECIDED_AT_ONCE, DecisionBasis, Sights
from delaywheel_replica.server.changing.waiting import (
    Decided,
    PendingCancel,
    Subject,
    WaitingCancels,
)
from delaywheel_replica.server.commit.writing import Writing
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.node.answering import defect
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.node_view import monotonic_ms
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError

QUEUED_AT_MOST: Final = 16_384
KEPT_AT_MOST: Final = 49_152
"""A message takes about 1 KiB."""
QUEUED_S: Final = 1.0
BATCHES_APART_S: Final = 0.05
_BATCH: Final = 2_048
_ASKED_ABOUT: Final = 64
"""Messages that are looked for on other nodes at once, before it is said that none has them."""
_RESOLVED_AT_ONCE: Final = 8
"""Messages that are looked for in Kafka at once; half of what `get` and cancels have together."""
_RETRY_MS: Final = (50, 2_000)

_UNDECIDED: Final = frozenset({CancelDecision.WAIT, CancelDecision.CONFIRM})
_TO_CONFIRM: Final = frozenset({CancelDecision.CONFIRM, CancelDecision.ALREADY_DELIVERED})

Answered = Decided | Refusal
"""What became of one message."""


_Call = AwaitedCall[Answered]


@dataclass(slots=True, eq=False)
class _AskedMessage:
    """A message that callers named, and that is not looked up yet."""

    reference: Reference
    since_ms: int
    callers: list[tuple[_Call, int]] = field(default_factory=list)
    is_taken: bool = False

    @property
    def is_awaited(self) -> bool:
        return any(not call.is_over for call, _ in self.callers)

    def settle(self, answered: Answered) -> None:
        for call, row in self.callers:
            call.settle(row, answered)


class CancelGroups:
    """Cancels messages while this node's cleaner leads. For the event loop's thread."""

    def __init__(
        self,
        sights: Sights,
        writing: Writing,
        *,
        ask: Callable[[CommitSoon], object],
        next_change: Callable[[], Awaitable[object]],
        counts: NodeCounts | None = None,
    ) -> None:
        """Prepares; `run` works.

        Args:
            sights: Examines messages.
            writing: Writes cancels.
            ask: Asks the cleaner to commit soon.
            next_change: Waits for a new progress or role in the cleaner's row.
            counts: Counts what became of each message.
        """
        self._counts = counts or NodeCounts()
        self._counts.cancel_load = lambda: (self.kept, self.age_ms(), self.waits_ms())
        self._sights = sights
        self._writing = writing
        self._ask = ask
        self._next_change = next_change
        self._queue: deque[_AskedMessage] = deque()
        # By what callers call it; only the first is not looked up yet.
        self._named: dict[Reference, _AskedMessage | PendingCancel] = {}
        self._pending: dict[MessageKey, PendingCancel] = {}
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
        self, references: Sequence[Reference | Refusal], within_s: float, *, partly: bool = False
    ) -> list[Answered | None]:
        """Cancels messages; returns what became of each, in order.

        Args:
            references: The messages; a refusal is returned as it is.
            within_s: How long to wait at most.
            partly: Return soon after some are decided; None: others, which go on. So a message
                whose decision takes long delays no other that is asked for in the same call.
        """
        call = _Call.of(len(references))
        asked = [self._begin_one(reference, call, row) for row, reference in enumerate(references)]

        def are_taken() -> bool:
            # What is queued would be dropped with its caller.
            return all(each is None or each.is_taken for each in asked)

        if await call.wait(within_s, are_taken if partly else None):
            return list(call.results)
        return [
            _over(each) if result is None else result
            for result, each in zip(call.results, asked, strict=True)
        ]

    async def known(self, references: Sequence[Reference]) -> list[Answered]:
        """Decides by what is known, without writing anything."""
        subjects = await self._sights.find_many(references)
        moment = self._sights.moment()
        results: list[Answered] = []
        doubtful: list[tuple[Subject, CancelDecision]] = []
        for subject in subjects:
            if isinstance(subject, RequestRefusedError):
                results.append(subject.refusal)
                continue
            decided = moment.before_writing(subject.key, subject.found)
            results.append(decided)
            if decided.decision in _TO_CONFIRM:
                doubtful.append((subject, decided.decision))
        if doubtful:
            confirmed = iter(await self._sights.confirm(doubtful))
            results = [
                next(confirmed)[1]
                if isinstance(each, Decided) and each.decision in _TO_CONFIRM
                else each
                for each in results
            ]
        return results

    @property
    def kept(self) -> int:
        """How many messages are queued or not decided."""
        return len(self._queue) + len(self._pending)

    def waits_ms(self) -> int:
        """How long the first of the queued messages has waited."""
        return monotonic_ms() - self._queue[0].since_ms if self._queue else 0

    def age_ms(self) -> int:
        """How long the first of the messages that are not decided is being cancelled."""
        pending = [*self._pending.values()]  # scrapes read it on other threads
        return monotonic_ms() - pending[0].since_ms if pending else self.waits_ms()

    # --- callers

    def _begin_one(
        self, reference: Reference | Refusal, call: _Call, row: int
    ) -> _AskedMessage | None:
        """Queues a message, or joins an earlier attempt; returns what waits for its turn."""
        if isinstance(reference, Refusal):
            call.settle(row, reference)
            return None
        known = self._named.get(reference)
        if isinstance(known, PendingCancel):
            known.callers.append(partial(call.settle, row))
            return None
        if known is None:
            refusal = self._too_many()
            if refusal is not None:
                call.settle(row, refusal)
                return None
            known = self._named[reference] = _AskedMessage(reference, monotonic_ms())
            self._queue.append(known)
            self._arrived.set()
        known.callers.append((call, row))
        return known

    def _too_many(self) -> Refusal | None:
        waits_ms = self.waits_ms()
        is_full = len(self._queue) >= QUEUED_AT_MOST or self.kept >= KEPT_AT_MOST
        if not is_full and waits_ms < QUEUED_S * 1000:
            return None
        self._counts.calls.add("cancel", Reason.BACKPRESSURE.value, 0)
        least_ms, most_ms = _RETRY_MS
        return Refusal(
            Reason.BACKPRESSURE,
            f"{counted(self.kept, 'message')} being cancelled",
            after_ms=max(least_ms, min(waits_ms, most_ms)),
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
        outcome = answered.decision.name if isinstance(answered, Decided) else answered.reason.value
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
                self._settle(pending, await self._sights.resolve(pending.subject))
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
                    for asked in batch:
                        self._refuse(asked, refusal)
                if len(self._queue) < _BATCH:
                    await asyncio.sleep(begun_s + BATCHES_APART_S - time.monotonic())

    def _take(self) -> list[_AskedMessage]:
        batch: list[_AskedMessage] = []
        while self._queue and len(batch) < _BATCH:
            asked = self._queue.popleft()
            if asked.is_awaited:
                asked.is_taken = True
                batch.append(asked)
            else:
                del self._named[asked.reference]
        return batch

    async def _look_up(self, batch: list[_AskedMessage]) -> None:
        taken_ms = monotonic_ms()
        self._counts.cancel_stages["queued"] += sum(taken_ms - each.since_ms for each in batch)
        subjects = await self._sights.find_many([asked.reference for asked in batch])
        self._spent("looked_up", len(batch), taken_ms)
        to_write: list[PendingCancel] = []
        for begin in range(0, len(batch), DECIDED_AT_ONCE):
            moment = self._sights.moment()
            for row in range(begin, min(begin + DECIDED_AT_ONCE, len(batch))):
                pending = self._begin(batch[row], subjects[row], moment)
                if pending is not None:
                    to_write.append(pending)
            await asyncio.sleep(0)
        if to_write:
            self._start(self._write(to_write))

    def _begin(
        self, asked: _AskedMessage, subject: Subject | RequestRefusedError, moment: DecisionBasis
    ) -> PendingCancel | None:
        """Decides what to do about a message that was looked up; returns it if it is written."""
        if isinstance(subject, RequestRefusedError):
            self._refuse(asked, subject.refusal)
            return None
        key = subject.key
        callers = [partial(call.settle, row) for call, row in asked.callers]
        pending = self._pending.get(key)
        if pending is not None:  # by another name
            pending.callers += callers
            pending.names.append(asked.reference)
            self._named[asked.reference] = pending
            return None
        pending = PendingCancel(key, subject, asked.since_ms, list(callers), [asked.reference])
        self._named[asked.reference] = self._pending[key] = pending
        decided = moment.before_writing(key, subject.found)
        decision = decided.decision
        if decision is CancelDecision.WRITE:
            return pending
        if decision in _UNDECIDED or decision is CancelDecision.ALREADY_DELIVERED:
            self._waiting.add(pending, look=True)
            self._ask(CommitSoon())
            self._news.set()
        elif decision is CancelDecision.NOT_FOUND:
            self._ask_others(pending)
        elif decision is CancelDecision.NO_LEADER:
            self._settle(pending, Refusal(Reason.NO_LEADER))
        elif decision is CancelDecision.UNKNOWN:
            self._unknown(pending)
        else:
            self._settle(pending, decided)
        return None

    def _refuse(self, asked: _AskedMessage, refusal: Refusal) -> None:
        if self._named.get(asked.reference) is asked:
            del self._named[asked.reference]
            asked.settle(refusal)

    def _ask_others(self, pending: PendingCancel) -> None:
        """Asks other nodes for a message that is not here, unless many are asked about."""
        if self._asked_about >= _ASKED_ABOUT:
            refusal = Refusal(Reason.BACKPRESSURE, "Other nodes are asked about many messages")
            self._settle(pending, refusal)
            return

        async def ask() -> None:
            try:
                is_none = await self._sights.nobody_has(pending.subject.named)
                decision = CancelDecision.NOT_FOUND if is_none else CancelDecision.UNKNOWN
                self._settle(pending, Decided(decision))
            finally:
                self._asked_about -= 1
                self._settle(pending, Decided(CancelDecision.UNKNOWN))

        self._asked_about += 1
        self._start(ask())

    async def _write(self, group: list[PendingCancel]) -> None:
        """Writes the cancels of a batch as one group."""
        begun_ms = monotonic_ms()
        try:
            columns = _cancels_of([pending.key for pending in group])
            written = await self._writing.submit(columns, Kind.CANCELS)
        except RequestRefusedError as error:
            for pending in group:
                self._settle(pending, error.refusal)
            return
        self._spent("written", len(group), begun_ms)
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
            elif refusal.reason is Reason.DUE_TOO_OLD:
                self._settle(pending, Decided(CancelDecision.TOO_LATE))
            else:
                self._settle(pending, refusal)
        self._ask(CommitSoon())
        self._news.set()

    def _spent(self, stage: str, messages: int, since_ms: int) -> None:
        self._counts.cancel_stages[stage] += messages * (monotonic_ms() - since_ms)

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
                async with asyncio.timeout(QUEUED_S if len(self._waiting) else None):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            try:
                await self._decide()
            except Exception as error:  # noqa: BLE001 - those that wait are looked at again
                defect(error)
            for pending in self._waiting.older(monotonic_ms() - round(WAIT_S * 1000)):
                self._settle(pending, Decided(CancelDecision.UNKNOWN))

    async def _decide(self) -> None:
        """Decides what the present progress covers; confirmations are one look for all."""
        moment = self._sights.moment()
        if moment.progress is None:
            return
        doubtful: list[tuple[PendingCancel, CancelDecision]] = []
        for number, pending in enumerate(self._waiting.covered(moment.progress), 1):
            decided = moment.after_writing(pending.key, pending.subject.found)
            if decided.decision in _TO_CONFIRM:
                doubtful.append((pending, decided.decision))
            elif decided.decision is CancelDecision.UNKNOWN:
                self._unknown(pending)
            elif decided.decision is not CancelDecision.WAIT:
                self._settle(pending, decided)
            if number % DECIDED_AT_ONCE == 0:
                await asyncio.sleep(0)
        for begin in range(0, len(doubtful), _BATCH):
            await self._confirm(doubtful[begin : begin + _BATCH])

    async def _confirm(self, doubtful: Sequence[tuple[PendingCancel, CancelDecision]]) -> None:
        begun_ms = monotonic_ms()
        for pending, _ in doubtful:
            if pending.written_ms:
                self._counts.cancel_stages["taken"] += begun_ms - pending.written_ms
                pending.written_ms = 0
        confirmed = await self._sights.confirm(
            [(pending.subject, decision) for pending, decision in doubtful]
        )
        self._spent("confirmed", len(doubtful), begun_ms)
        for number, ((pending, _), (_, decided)) in enumerate(
            zip(doubtful, confirmed, strict=True), 1
        ):
            if decided.decision is CancelDecision.UNKNOWN:
                self._unknown(pending)
            elif decided.decision is not CancelDecision.WAIT:
                self._settle(pending, decided)
            if number % DECIDED_AT_ONCE == 0:
                await asyncio.sleep(0)


def _over(asked: _AskedMessage | None) -> Answered:
    """The answer for a message whose caller's time is over."""
    if asked is not None and not asked.is_taken:
        return Refusal(Reason.BACKPRESSURE, "Its turn did not come in time")
    return Refusal(Reason.CANCEL_UNKNOWN)


def _why_unknown(pending: PendingCancel) -> Reason:
    """Why it is not known what became of a message."""
    was_cancelled = pending.is_written or pending.subject.found.cancels
    return Reason.CANCEL_UNKNOWN if was_cancelled else Reason.NOT_UP_TO_DATE


def _cancels_of(keys: Iterable[MessageKey]) -> Columns:
    ids, dues_ms = zip(*keys, strict=True)
    named = np.frombuffer(b"".join(ids), dtype=np.uint8).reshape(-1, ID_LENGTH_BYTES)
    return Columns.of_cancels(np.array(dues_ms, dtype=np.int64), named)
