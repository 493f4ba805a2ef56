"""Cancels in groups, on the leader's node: whoever asks, and however many.

| a message to be cancelled is | until | then |
|---|---|---|
| read ahead | its second is in the index of ids | queued; dropped, if its caller has left |
| queued | the batch before it was looked up | taken; dropped, if no caller waits for it any more |
| taken | it is looked up, with all of its batch | answered; to be written; waits |
| to be written | W members hold the cancels of its group | waits; refused |
| waiting | committed progress decides it, or a look by that, or `WAIT_S` have passed | answered |
| done, and progress does not show in which order | what became of it is found in Kafka | answered |

A plain message is looked up once, before its cancel is written; then progress decides (pending.py).

What arrives while a batch is looked up forms the next one, and batches begin `BATCHES_APART_S`
apart, or as soon as `_WORTH_A_BATCH` wait: a single cancel waits for nothing, the cost of a batch
is shared by what is in it (188 us of CPU a cancel in batches of 10, 77 of 50), and their groups
stand less often before those of messages. Cancels are written as one group while the next batch is
looked up. What another node has gathered waits for nothing here, unless its second is read first,
and takes along what waits: so a message waits once, whichever node is asked. A message is in this
table once: who asks again joins its first attempt, even if its caller gave up, and nothing is read
or written for that. Only "not found" is told to none but who asked before the look began
(`LaterCall`).

A defect midway leaves nothing here for ever: what a call has named is queued whatever happens next,
and what was asked for more than `LEFT_BEHIND_S` ago is in nobody's hands and is answered.

So that load is refused instead of piling up, at most `KEPT_AT_MOST` messages are queued or not
decided, and nothing is queued behind what waits for `QUEUED_S` already. Sharers have turns in the
queue, a call each, and share that room, and that of what is found out elsewhere. What a batch looks
up is in the index of ids: each sharer's seconds are read before, in turns of its own. So whoever
names many messages, or invents them, takes none of others'.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat, takewhile
from typing import Final

from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.core.protocol.progress import Position
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.link import CommitSoon
from delaywheel_replica.process.round_robin import RoundRobin
from delaywheel_replica.quantities import counted
from delaywheel_replica.server.access.shared_room import SharedRoom
from delaywheel_replica.server.changing.awaited import PASSED_ON_S, AwaitedCall
from delaywheel_replica.server.changing.finder import DECIDED_AT_ONCE, MessageFinder
from delaywheel_replica.server.changing.pending import (
    NOT_FOUND,
    Answered,
    Decided,
    DecisionBasis,
    PendingCancel,
    Subject,
    WaitingCancels,
)
from delaywheel_replica.server.commit.committer import Committed
from delaywheel_replica.server.commit.writing import Writing
from delaywheel_replica.server.lookup.places import ASKED_AT_MOST
from delaywheel_replica.server.lookup.queries import UNREAD_AT_ONCE
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.node.calls_to_nodes import WAIT_S
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.naming import rows_naming
from delaywheel_replica.server.node.node_view import monotonic_ms, wall_ms
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError, refusal_of
from delaywheel_replica.server.node.turns import start

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
_ASKED_ABOUT: Final = 128
"""Messages that are looked for on other nodes at once, before it is said that none has them."""
_RETRY_MS: Final = (50, 2_000)
LEFT_BEHIND_S: Final = 2 * WAIT_S
_NOBODY: Final = repeat("")
_UNKNOWN: Final = Decided(CancelDecision.UNKNOWN)


class CancelGroups:
    """Cancels messages; NO_LEADER unless this node's cleaner leads. For the event loop's thread."""

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
        self._queue = RoundRobin[tuple[PendingCancel, ...]]()  # what each call has named
        self._queued = 0
        self._is_gathered = False  # some of it was, by another node
        self._room = SharedRoom(KEPT_AT_MOST)
        self._named: dict[Reference, PendingCancel] = {}  # by what callers call it
        self._pending: dict[MessageKey, PendingCancel] = {}  # that were looked up
        self._moved = set[MessageKey]()  # had a record of another due since the look began
        self._waiting = WaitingCancels()
        self._arrived = asyncio.Event()
        self._news = asyncio.Event()
        self._on_other_nodes = SharedRoom(_ASKED_ABOUT)
        self._in_kafka = SharedRoom(ASKED_AT_MOST)
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
        references: Sequence[Reference],
        within_s: float,
        sharers: Iterable[Hashable] = _NOBODY,
        *,
        partly: bool = False,
        are_gathered: bool = False,
    ) -> list[Answered | None]:
        """Cancels messages; returns what became of each, in order.

        Args:
            within_s: How long to wait at most.
            sharers: Who has named each.
            partly: Return soon after some are decided; None: others, which go on. So a message
                whose decision takes long delays no other that is asked for in the same call.
            are_gathered: Another node has gathered them, and asks again for what is not decided.
        """
        call = AwaitedCall[Answered].of(len(references))
        asked: list[PendingCancel | None] = [None] * len(references)
        rows_of = dict[Hashable, list[int]]()
        for row, sharer in zip(range(len(references)), sharers, strict=False):
            rows_of.setdefault(sharer, []).append(row)
        for sharer, rows in rows_of.items():
            some = {row: references[row] for row in rows}
            if unread := self._finder.unread(some.values()):
                start(self._read_ahead(unread, some, call, sharer, asked), self._tasks)
            else:
                self._ask_for(some, call, sharer, asked, are_gathered=are_gathered)

        def are_taken() -> bool:
            # What is queued would be dropped with its caller.
            return all(each is None or each.is_taken for each in asked)

        first_s = PASSED_ON_S if are_gathered else WAIT_S
        if await call.wait(within_s, are_taken if partly else None, first_s=first_s):
            return list(call.results)
        return [
            _over(each) if result is None else result
            for result, each in zip(call.results, asked, strict=True)
        ]

    @property
    def kept(self) -> int:
        """How many messages are queued or not decided."""
        return self._room.taken

    def waits_ms(self) -> int:
        """How long the first of the queued messages has waited."""
        return _waits_ms(self._queue.firsts())

    def age_ms(self) -> int:
        """How long the first of the messages that are not decided is being cancelled."""
        pending = [*self._pending.values()]  # scrapes read it on other threads
        return monotonic_ms() - pending[0].since_ms if pending else self.waits_ms()

    # --- callers

    async def _read_ahead(
        self,
        unread: Sequence[Reference],
        some: Mapping[int, Reference],
        call: AwaitedCall[Answered],
        sharer: Hashable,
        asked: list[PendingCancel | None],
    ) -> None:
        """Asks for messages of a sharer once their seconds were read, while its caller waits."""
        try:
            for begin in range(0, len(unread), UNREAD_AT_ONCE):
                if call.is_over:
                    return
                await self._finder.read_ahead(unread[begin : begin + UNREAD_AT_ONCE], sharer)
            self._ask_for(some, call, sharer, asked)
        except Exception as error:  # noqa: BLE001 - a defect is named to its callers alone
            refusal = refusal_of(error)
            for row in some:
                call.settle(row, refusal)

    def _ask_for(
        self,
        some: Mapping[int, Reference],
        call: AwaitedCall[Answered],
        sharer: Hashable,
        asked: list[PendingCancel | None],
        *,
        are_gathered: bool = False,
    ) -> None:
        """Queues messages of a sharer, or joins earlier attempts; `asked` has none of refused."""
        queued, room, now_ms = list[PendingCancel](), self._left(sharer), monotonic_ms()
        try:
            for row, reference in some.items():
                pending = self._named.get(reference)
                if pending is not None:
                    pending.join(call, row)
                elif len(queued) < room:
                    pending = PendingCancel(reference, now_ms, call, row, sharer)
                    queued.append(pending)
                    self._named[reference] = pending
                else:
                    call.settle(row, self._too_many(sharer))
                asked[row] = pending
        except BaseException:
            call.is_over = True  # nobody waits for what it has queued
            raise
        finally:  # who names one of them later waits for it
            if queued:
                self._queue.add(sharer, tuple(queued))
                self._room.take(sharer, len(queued))
                self._queued += len(queued)
                self._is_gathered |= are_gathered
                self._arrived.set()

    def _left(self, sharer: Hashable) -> int:
        """How many more messages of a sharer are taken now."""
        return 0 if self._waits_ms_of(sharer) >= QUEUED_S * 1000 else self._room.left(sharer)

    def _waits_ms_of(self, sharer: Hashable) -> int:
        first = self._queue.first(sharer)
        return 0 if first is None else _waits_ms([first])

    def _too_many(self, sharer: Hashable) -> Refusal:
        self._counts.calls.add("cancel", Reason.BACKPRESSURE.value, 0)
        least_ms, most_ms = _RETRY_MS
        return Refusal(
            Reason.BACKPRESSURE,
            f"{counted(self.kept, 'message')} being cancelled",
            after_ms=max(least_ms, min(self._waits_ms_of(sharer), most_ms)),
        )

    def _settle(self, pending: PendingCancel, answered: Answered) -> None:
        if isinstance(answered, Decided) and answered.decision is CancelDecision.UNKNOWN:
            answered = Refusal(_why_unknown(pending))
        if self._remove(pending):
            took_us = (monotonic_ms() - pending.since_ms) * 1_000
            self._counts.calls.add("cancel", _outcome_of(answered), took_us)
            pending.settle(answered)

    async def _settle_all(self, settled: Sequence[PendingCancel], answered: Answered) -> None:
        """Settles many alike; between some of them the event loop serves others."""
        since_ms: Counter[int] = Counter()
        for number, pending in enumerate(settled, 1):
            if self._remove(pending):
                since_ms[pending.since_ms] += 1
                pending.settle(answered)
            if number % _SETTLED_AT_ONCE == 0:
                await asyncio.sleep(0)
        outcome, now_ms = _outcome_of(answered), monotonic_ms()
        for since, messages in since_ms.items():
            self._counts.calls.add("cancel", outcome, (now_ms - since) * 1_000, messages)

    def _remove(self, pending: PendingCancel) -> bool:
        """Removes a message; False if it is settled already."""
        if self._pending.get(pending.key) is not pending:
            return False
        del self._pending[pending.key]
        self._forget(pending)
        for name in pending.other_names:
            self._named.pop(name, None)
        return True

    def _forget(self, pending: PendingCancel) -> None:
        """Gives the room back of what a call has named."""
        self._named.pop(pending.named, None)
        self._room.give_back(pending.sharer)

    def _look_in_kafka(self, pending: PendingCancel) -> None:
        """Looks in Kafka for what became of a message, if it has a cancel, unless for many already.

        It is no longer among those that wait for progress, which decides nothing of it any more.
        """
        subject, pending.waits = pending.found_as, False
        if not subject.found.cancels or not self._in_kafka.left(pending.sharer):
            self._settle(pending, _UNKNOWN)
        else:
            look = partial(self._finder.look_in_kafka, subject, pending.sharer)
            self._find_out(pending, self._in_kafka, look)

    def _find_out(
        self,
        pending: PendingCancel,
        room: SharedRoom,
        look: Callable[[], Awaitable[Answered]],
    ) -> None:
        """Looks elsewhere for a message, whose sharer has room for that."""

        async def settle() -> None:
            try:
                self._settle(pending, await look())
            finally:
                room.give_back(pending.sharer)
                self._settle(pending, _UNKNOWN)

        room.take(pending.sharer)
        start(settle(), self._tasks)

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
                    refusal = refusal_of(error)
                    for pending in batch:
                        self._refuse(pending, refusal)
                await self._until_worth_a_batch(begun_s + BATCHES_APART_S)

    async def _until_worth_a_batch(self, until_s: float) -> None:
        try:
            async with asyncio.timeout(until_s - time.monotonic()):
                while self._queued < _WORTH_A_BATCH and not self._is_gathered:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            pass

    def _take(self) -> list[PendingCancel]:
        batch, self._is_gathered = list[PendingCancel](), False
        while self._queue and len(batch) < _BATCH:
            queued = self._queue.take()
            self._queued -= len(queued)
            for pending in queued:
                if pending.is_awaited:
                    pending.is_taken = True
                    batch.append(pending)
                else:
                    self._forget(pending)
        return batch

    async def _look_up(self, batch: list[PendingCancel]) -> None:
        """Looks for messages, and has cancels written."""
        taken_ms = monotonic_ms()
        self._counts.cancel_stages["queued"] += sum(taken_ms - each.since_ms for each in batch)
        self._moved.clear()
        basis = self._finder.basis_of_look()
        subjects = await self._finder.find_many([each.named for each in batch])
        self._spent("looked_up", len(batch), taken_ms)
        to_write: list[PendingCancel] = []
        for number, (pending, subject) in enumerate(zip(batch, subjects, strict=True)):
            if number % DECIDED_AT_ONCE == 0:
                await asyncio.sleep(0)
                basis = basis._replace(now_ms=wall_ms())
            if isinstance(subject, RequestRefusedError):
                self._refuse(pending, subject.refusal)
            elif self._enter(pending, subject) and self._begin(pending, subject, basis):
                to_write.append(pending)
        if to_write:
            start(self._write(to_write), self._tasks)

    def _enter(self, pending: PendingCancel, subject: Subject) -> bool:
        """Enters a message by what it is; False: it is there already, by another name."""
        known = self._pending.setdefault(subject.key, pending)
        if known is not pending:
            known.absorb(pending)
            self._forget(pending)
            self._named[pending.named] = known
            return False
        pending.subject = subject
        return True

    def _begin(self, pending: PendingCancel, subject: Subject, basis: DecisionBasis) -> bool:
        """Decides about one message; returns whether its cancel is to be written."""
        if not subject.found.copies:  # perhaps deleted since the look began, as the floor says
            basis = self._finder.basis()
        decided = basis.before_writing(pending.key, subject.found)
        decision = decided.decision
        if decision is CancelDecision.WRITE:
            if subject.key not in self._moved:
                pending.plain_in = basis.plain_in(subject)
            return True
        if decision is CancelDecision.WAIT:
            self._waiting.add(pending)
            self._ask_for_progress()
        elif decision is CancelDecision.NOT_FOUND:
            self._ask_others(pending, subject)
        elif decision is CancelDecision.NO_LEADER:
            self._settle(pending, Refusal(Reason.NO_LEADER))
        elif decision is CancelDecision.UNKNOWN:
            self._look_in_kafka(pending)
        else:
            self._settle(pending, decided)
        return False

    def _refuse(self, pending: PendingCancel, refusal: Refusal) -> None:
        """Answers for a message that could not be looked up."""
        if self._named.get(pending.named) is pending and pending.subject is None:
            self._forget(pending)
            pending.settle(refusal)

    def _ask_others(self, pending: PendingCancel, subject: Subject) -> None:
        """Asks other nodes for a message that is not here, unless many are asked about."""
        if not self._on_other_nodes.left(pending.sharer):
            refusal = Refusal(Reason.BACKPRESSURE, "Other nodes are asked about many messages")
            self._settle(pending, refusal)
            return

        async def ask() -> Answered:
            is_none = await self._finder.nobody_has(subject.named, pending.sharer)
            return NOT_FOUND if is_none else _UNKNOWN

        self._find_out(pending, self._on_other_nodes, ask)

    async def _write(self, group: list[PendingCancel]) -> None:
        """Writes cancels of messages as one group."""
        for pending in group:
            pending.is_written = True
        written = await self._written(rows_naming([pending.key for pending in group]))
        if isinstance(written, Refusal):
            await self._settle_all(group, written)
            return
        for row, refusal in written.failed.items():
            is_late = refusal.reason is Reason.DUE_TOO_OLD
            late = Decided(CancelDecision.TOO_LATE)
            self._settle(group[row], late if is_late else refusal)
        group = [each for each in group if self._pending.get(each.key) is each]
        self._waiting.add_group(group, Position(written.wheel, written.seq, 0), monotonic_ms())
        self._ask_for_progress()

    async def _written(self, columns: Columns) -> Committed | Refusal:
        """Writes cancels as one group."""
        begun_ms = monotonic_ms()
        try:
            written = await self._writing.submit(columns, Kind.CANCELS)
        except Exception as error:  # noqa: BLE001 - a defect is named to its callers alone
            return refusal_of(error)
        self._spent("written", len(columns), begun_ms)
        return written

    def _spent(self, stage: str, messages: int, since_ms: int) -> None:
        self._counts.cancel_stages[stage] += messages * (monotonic_ms() - since_ms)

    def _ask_for_progress(self) -> None:
        """Asks for a transaction soon, and has what waits looked at by now."""
        self._ask(CommitSoon())
        self._news.set()

    # --- committed progress

    async def _watch(self) -> None:
        while True:
            await self._next_change()
            self._note_moved()
            self._news.set()

    def _note_moved(self) -> None:
        """Notes the records of other dues: they stand until this process has had marks written.

        What waits, or is being looked up, and has had one is not plain any more.
        """
        status = self._finder.basis().status
        if status is not None and status.reschedules:
            self._moved |= status.reschedules.keys()
            for key in status.reschedules.keys() & self._pending.keys():
                self._pending[key].plain_in = None

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
                refusal_of(error)
            self._settle_old()

    def _settle_old(self) -> None:
        """Answers for what progress has not decided in time; and for what a defect has left."""
        now_ms = monotonic_ms()
        before_ms, left_ms = (now_ms - round(s * 1000) for s in (WAIT_S, LEFT_BEHIND_S))
        # Those behind the first that is not old came later.
        for pending in [*takewhile(lambda each: each.since_ms < before_ms, self._pending.values())]:
            if pending.waits or pending.since_ms < left_ms:
                self._settle(pending, _UNKNOWN)

    async def _decide(self) -> None:
        """Decides what the present progress covers."""
        basis = self._finder.basis_of_look()
        if basis.progress is None:
            return
        covered = self._waiting.covered(basis.progress)
        now_ms = monotonic_ms()
        for pending in covered:
            if pending.written_ms:
                self._counts.cancel_stages["taken"] += now_ms - pending.written_ms
                pending.written_ms = 0
        cancelled = [each for each in covered if basis.is_cancelled(each)]
        await self._settle_all(cancelled, Decided(CancelDecision.CANCELLED))
        # Plain ones wait together for a look that can decide them.
        left = [each for each in covered if each.waits and (basis.current or each.plain_in is None)]
        for begin in range(0, len(left), _BATCH):
            await self._look_again(left[begin : begin + _BATCH])

    async def _look_again(self, left: Sequence[PendingCancel]) -> None:
        """Looks for messages again, and decides about them."""
        begun_ms = monotonic_ms()
        all_decided = await self._finder.decide_many([each.found_as for each in left])
        self._spent("confirmed", len(left), begun_ms)
        for number, (pending, decided) in enumerate(zip(left, all_decided, strict=True), 1):
            if decided.decision is CancelDecision.UNKNOWN:
                self._look_in_kafka(pending)
            elif decided.decision is not CancelDecision.WAIT:
                self._settle(pending, decided)
            if number % DECIDED_AT_ONCE == 0:
                await asyncio.sleep(0)


def _waits_ms(firsts: Sequence[tuple[PendingCancel, ...]]) -> int:
    """How long the first of what calls have named has waited."""
    now_ms = monotonic_ms()
    return max((now_ms - first[0].since_ms for first in firsts), default=0)


def _outcome_of(answered: Answered) -> str:
    """Returns the outcome that is counted for a call."""
    return answered.decision.name if isinstance(answered, Decided) else answered.reason.value


def _over(asked: PendingCancel | None) -> Answered:
    """The answer for a message whose caller's time is over."""
    if asked is None or not asked.is_taken:
        return Refusal(Reason.BACKPRESSURE, "Its turn did not come in time")
    return Refusal(Reason.CANCEL_UNKNOWN)


def _why_unknown(pending: PendingCancel) -> Reason:
    """Why it is not known what became of a message."""
    subject = pending.subject
    was_cancelled = pending.is_written or (subject is not None and subject.found.cancels)
    return Reason.CANCEL_UNKNOWN if was_cancelled else Reason.NOT_UP_TO_DATE
