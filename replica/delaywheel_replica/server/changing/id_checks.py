"""Looks for earlier messages with the ids of new ones, before these are accepted (`check_id`).

Messages with the same topic, id and due are one, and what an earlier one leaves of a new one is
decided at the due, when no sender listens any more. So a sender that may have used an id before
asks for a look, and is told what is certain. docs/PROTOCOL.md has the answers. A cancel is
decided as it is for who cancels (core/leader/cancel.py), by a scan that begins when the node holds
every frame up to V.

So these hold:

- A refusal is true whatever the node lacks: it rests on what was found. Who repeats an attempt that
  was accepted but not answered has the same contents, and is never told ID_TAKEN for it;
  ID_CANCELLED only if somebody has cancelled the message since.
- What is refused was not written. So it cannot be delivered in place of what was there before.
- Checked covers what was acknowledged before, as far as the heartbeats of the other nodes tell.
  What is under way at the same time, or was acknowledged by another node since its last heartbeat,
  is not seen, and is decided at the due.

Sharers have looks of their own, each with what the sharer asked for meanwhile, and share the room
for what waits. The thread of lookups gets a few seconds and ids at a time, in turns by sharer: so
others' ids, and cancels, wait for no more than these. A message waits for `WAIT_S` at most; a
second that took longer to read is in memory for those who ask next. A message that does not ask
costs nothing.

A cancel is answered by the leader's node some 100 ms before the others know what was committed. So
a message with a cancel that is not decided is looked at again, for up to `CANCEL_WAIT_S`.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import numpy as np

from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import Columns
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.core.protocol.progress import Position
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.access.shared_room import SharedRoom
from delaywheel_replica.server.changing.finder import DECIDED_AT_ONCE
from delaywheel_replica.server.changing.pending import DecisionBasis
from delaywheel_replica.server.intake.validate import RequestBatch
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.lookup.scan import ComparedCopy, Found
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.naming import key_of
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError

_log = get_logger(__name__)

WAIT_S: Final = 0.25
"""How long a message waits for its look."""
CANCEL_WAIT_S: Final = 1.0
"""How long in all, if there is a cancel of which this node does not know yet whether it counts."""
WAITING_AT_MOST: Final = 30_000
"""So many ids wait to be looked up, a request's of each of two sharers; others are not checked."""

_IDS_AT_ONCE: Final = 1_000
_SECONDS_AT_ONCE: Final = 8
"""What the thread of lookups is given at once: cancels wait for no more."""
AGAIN_S: Final = 0.05
"""How long after a look what it left undecided is looked for again."""
_READ_AT_ONCE: Final = 256
_PREPARED_AT_ONCE: Final = 500
"""Messages of a request between which the event loop serves others: a millisecond of them."""

_TAKEN: Final = Refusal(Reason.ID_TAKEN)
_CANCELLED: Final = Refusal(Reason.ID_CANCELLED)
_DECIDED: Final = frozenset({CancelDecision.RESCHEDULED, CancelDecision.ALREADY_DELIVERED})


class IdVerdict(Enum):
    """What a look says of a message."""

    CHECKED = auto()
    UNKNOWN = auto()
    TAKEN = auto()
    CANCELLED = auto()
    UNDECIDED = auto()
    """Not yet: a later progress will show whether a cancel counts."""


@dataclass(slots=True, eq=False)
class _Checking:
    """The messages of one request that wait, and what is known of them by now.

    Attributes:
        columns: The messages of the request; None once nobody waits any more: a disk that hangs
            must not keep them in memory.
    """

    columns: Columns | None
    done: "asyncio.Future[None]"
    left: int
    is_undecided: bool = False
    verdicts: dict[int, IdVerdict] = field(default_factory=dict)

    async def wait(self) -> None:
        """Waits until all are settled, or the time for that is over."""
        try:
            await asyncio.wait([self.done], timeout=WAIT_S)
            if self.is_undecided:
                await asyncio.wait([self.done], timeout=CANCEL_WAIT_S - WAIT_S)
        finally:
            self.columns = None

    def settle(self, row: int, verdict: IdVerdict) -> None:
        self.verdicts[row] = verdict
        self.left -= 1
        if not self.left and not self.done.done():
            self.done.set_result(None)


@dataclass(slots=True, eq=False)
class _Waiting:
    """One message that waits for a look."""

    checking: _Checking
    row: int
    reference: Reference


class IdChecks:
    """Checks the ids of messages that ask for it. For the event loop's thread."""

    def __init__(
        self,
        queries: Queries,
        basis_of_look: Callable[[], DecisionBasis],
        counts: NodeCounts,
    ) -> None:
        """Begins with nothing to look for.

        Args:
            basis_of_look: Returns what decisions by a look that begins now are based on.
        """
        self._queries = queries
        self._basis_of_look = basis_of_look
        self._counts = counts
        self._room = SharedRoom(WAITING_AT_MOST)
        self._waiting = defaultdict[Hashable, list[_Waiting]](list)  # by sharer
        self._looking: dict[Hashable, asyncio.Task[None]] = {}

    async def check(self, batch: RequestBatch, sharer: Hashable) -> None:
        """Refuses messages of a sharer's batch, and notes those that were checked."""
        rows = [row for row in batch.to_check.tolist() if row not in batch.refusals]
        if not rows:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        checking = _Checking(batch.columns, done, len(rows))
        waiting = await _prepared(batch, rows, checking)
        del waiting[self._room.left(sharer) :]
        if waiting:
            checking.left = len(waiting)
            self._room.take(sharer, len(waiting))
            self._waiting[sharer] += waiting
            if sharer not in self._looking:
                self._looking[sharer] = asyncio.create_task(self._look(sharer))
            await checking.wait()
        for row, verdict in checking.verdicts.items():
            match verdict:
                case IdVerdict.TAKEN:
                    batch.refuse([row], _TAKEN)
                case IdVerdict.CANCELLED:
                    batch.refuse([row], _CANCELLED)
                case IdVerdict.CHECKED if row not in batch.refusals:
                    batch.checked.append(row)
        refused = sum(row in batch.refusals for row in rows)
        self._counts.unchecked_ids += len(rows) - refused - len(batch.checked)

    async def _look(self, sharer: Hashable) -> None:
        undecided = list[_Waiting]()
        try:
            while self._waiting[sharer] or undecided:
                if not self._waiting[sharer]:
                    await asyncio.sleep(AGAIN_S)
                waiting, undecided = self._waiting.pop(sharer, []) + undecided, []
                for part in _parts(waiting):
                    left = await self._look_for(part, sharer)
                    undecided += left
                    self._room.give_back(sharer, len(part) - len(left))
        finally:
            del self._looking[sharer]
            self._waiting.pop(sharer, None)

    async def _look_for(self, part: Sequence[_Waiting], sharer: Hashable) -> list[_Waiting]:
        """Settles messages that are still waited for; returns those that are not decided yet."""
        wanted = [each for each in part if each.checking.columns is not None]
        try:
            verdicts = await self._verdicts(wanted, sharer) if wanted else []
        except Exception as error:  # noqa: BLE001 - they are accepted, as without a look
            _log.warning("ids could not be looked up", ids=len(wanted), error=repr(error))
            verdicts = [IdVerdict.UNKNOWN] * len(wanted)
        undecided = list[_Waiting]()
        for each, verdict in zip(wanted, verdicts, strict=True):
            if verdict is IdVerdict.UNDECIDED:
                each.checking.is_undecided = True
                undecided.append(each)
            else:
                each.checking.settle(each.row, verdict)
        return undecided

    async def _verdicts(self, wanted: Sequence[_Waiting], sharer: Hashable) -> list[IdVerdict]:
        basis = self._basis_of_look()
        is_new = IdVerdict.CHECKED if self._queries.knows_all() else IdVerdict.UNKNOWN
        # Nearly always an id is new: those are found together, without an object for each.
        references = [each.reference for each in wanted]
        are_absent = await self._queries.are_absent(references, sharer)
        verdicts, to_read = [is_new] * len(wanted), dict[int, Found]()
        numbers = np.flatnonzero(~are_absent).tolist()
        found = await self._queries.find_many([references[number] for number in numbers], sharer)
        for count, (number, one) in enumerate(zip(numbers, found, strict=True)):
            if count % DECIDED_AT_ONCE == DECIDED_AT_ONCE - 1:
                await asyncio.sleep(0)
            if isinstance(one, RequestRefusedError):
                verdicts[number] = IdVerdict.UNKNOWN
                continue
            verdicts[number] = _verdict(basis, references[number], one)
            if one.copies and verdicts[number] is not IdVerdict.CANCELLED:
                to_read[number] = one
        for number, reference in enumerate(references):
            if self._queries.is_deleted(reference):
                verdicts[number] = IdVerdict.UNKNOWN
                to_read.pop(number, None)
        same = await self._compared(wanted, to_read, sharer)
        for number, is_same in same.items():
            if is_same is None and verdicts[number] is IdVerdict.CHECKED:
                verdicts[number] = IdVerdict.UNKNOWN
            elif is_same is False:
                verdicts[number] = IdVerdict.TAKEN
        return verdicts

    async def _compared(
        self, wanted: Sequence[_Waiting], found: dict[int, Found], sharer: Hashable
    ) -> dict[int, bool | None]:
        """Whether a copy of each message has its contents; None: not all copies were read."""
        same: dict[int, bool | None] = dict.fromkeys(found, False)
        places: list[tuple[int, Position, int]] = sorted(
            (wanted[number].reference.slot, place, number)
            for number, one in found.items()
            for place in one.copies
        )
        for begin in range(0, len(places), _READ_AT_ONCE):
            numbers, copies = list[int](), list[ComparedCopy]()
            for slot, place, number in places[begin : begin + _READ_AT_ONCE]:
                columns = wanted[number].checking.columns
                if columns is not None and not same[number]:
                    numbers.append(number)
                    copies.append(ComparedCopy(slot, place, columns, wanted[number].row))
            read = await self._queries.are_same(copies, sharer)
            for number, is_same in zip(numbers, read, strict=True):
                if is_same or (is_same is None and not same[number]):
                    same[number] = is_same
        return same


def _verdict(basis: DecisionBasis, reference: Reference, found: Found) -> IdVerdict:
    """Returns what is known of a message before the contents of its copies are compared."""
    is_sure = found.complete
    if found.copies and found.cancels:
        decision = basis.after_writing(reference.key, found).decision
        if decision is CancelDecision.CANCELLED:
            return IdVerdict.CANCELLED
        if decision is CancelDecision.WAIT:
            return IdVerdict.UNDECIDED
        is_sure = is_sure and decision in _DECIDED
    return IdVerdict.CHECKED if is_sure else IdVerdict.UNKNOWN


async def _prepared(
    batch: RequestBatch, rows: Sequence[int], checking: _Checking
) -> list[_Waiting]:
    """Prepares rows for a look; refuses those that differ from an earlier copy among them."""
    columns, firsts, waiting = batch.columns, dict[MessageKey, int](), list[_Waiting]()
    for number, row in enumerate(rows, start=1):
        key = key_of(columns, row)
        first = firsts.setdefault(key, row)
        if first != row and not columns.is_same(row, columns, first):
            batch.refuse([row], _TAKEN)
        waiting.append(_Waiting(checking, row, Reference.of(key)))
        if number % _PREPARED_AT_ONCE == 0:
            await asyncio.sleep(0)
    return waiting


def _parts(waiting: list[_Waiting]) -> Iterator[list[_Waiting]]:
    """Yields what is looked for at once, ordered by second."""
    waiting.sort(key=lambda each: each.reference.slot)
    part, seconds = list[_Waiting](), set[int]()
    for each in waiting:
        seconds.add(each.reference.slot)
        if len(seconds) > _SECONDS_AT_ONCE or len(part) == _IDS_AT_ONCE:
            yield part
            part, seconds = [], {each.reference.slot}
        part.append(each)
    if part:
        yield part
