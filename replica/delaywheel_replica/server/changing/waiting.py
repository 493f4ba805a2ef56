"""Messages to be cancelled, until progress decides them: as columns, and one by one.

Nearly every message that is cancelled has one copy and no cancel, is due later, and is cancelled by
the next transaction. Those of a batch are a *cohort*: one object, whose cancels lie in one group.
So one comparison says whether progress has taken them, and one look decides them. Whatever is not
so with a message, it is *singled out*, and goes on as a `PendingCancel`:

| a message | is in |
|---|---|
| that is not looked up yet | the `AskedGroup` of the first call that named it |
| with one copy, that is to be written; and once it is | a `Cohort` |
| of which anything else is decided before writing, or that has several copies | a `PendingCancel` |
| whose cancel V has reached | the `Cohort`, until one look has decided most of it |
| whose due w has reached before, or that this look has not decided | a `PendingCancel` |
| that is in a cohort when w is set back | a `PendingCancel` |

Of these, `WaitingCancels` has the order in which progress can decide them.

A new progress costs what it decides, not what waits. A cancel is looked at

| once | because |
|---|---|
| V has reached one of its frames | it counts |
| w has reached its due | the message may be done |
| w was set back | what was done stays done, ahead of w |

and from then on with each progress, until it is decided. Without I/O and clocks: the simulation
uses this class too.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.frames.columns import ID_LENGTH_BYTES, Columns
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.server.changing.awaited import AwaitedCall, Waiters
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.lookup.scan import Found
from delaywheel_replica.server.node.refusals import Refusal

_STALE_AT_LEAST: Final = 1_024
_NEVER_MS: Final = 1 << 62


class Decided(NamedTuple):
    """A decision about a message.

    Attributes:
        moved_ms: The message's new due, if it was rescheduled; None also if its frame was lost
            before the message had a new due.
    """

    decision: CancelDecision
    moved_ms: int | None = None


Answered = Decided | Refusal
"""What became of one message."""

CancelCall = AwaitedCall[Answered]
Caller = Callable[[Answered], object]


@dataclass(frozen=True, slots=True)
class Waiter:
    """A `Caller` that waits for one message of its call."""

    call: CancelCall
    row: int

    def __call__(self, answered: Answered) -> None:
        """Tells it."""
        self.call.settle(self.row, answered)


def _has_left(caller: Caller) -> bool:
    """Whether a caller has given up."""
    return isinstance(caller, Waiter) and caller.call.is_over


@dataclass(slots=True, eq=False)
class Subject:
    """The message that a call is about.

    Attributes:
        reference: Which message, including its due: messages that enter its second later differ.
        named: The reference as the caller gave it.
        found: Where the message and its cancels lie.
    """

    reference: Reference
    named: Reference
    found: Found

    @property
    def key(self) -> MessageKey:
        """The message's id and due."""
        assert self.reference.due_ms is not None
        return self.reference.id, self.reference.due_ms


@dataclass(slots=True, eq=False)
class PendingCancel:
    """A message to be cancelled, for all callers who ask for it, until it is decided.

    Attributes:
        key: Its id and due.
        since_ms: When it was asked for, by its owner's monotonic clock.
        callers: Called once with the decision.
        names: What these callers call it.
        is_written: A cancel of it was written for these callers.
        written_ms: When that was; 0: not yet, or it was counted since.
    """

    key: MessageKey
    subject: Subject
    since_ms: int
    callers: Waiters[Caller] = field(default_factory=Waiters)
    names: list[Reference] = field(default_factory=list)
    is_written: bool = False
    written_ms: int = 0

    def key_of(self, _named: Reference) -> MessageKey:
        """Returns its id and due, whatever it is called."""
        return self.key

    def join(
        self,
        _key: MessageKey,
        callers: Iterable[Caller],
        name: Reference | None,
    ) -> None:
        """Adds callers, and what they call it, if that is another name."""
        self.callers.join(callers, _has_left)
        if name is not None:
            self.names.append(name)

    def settle(self, decided: Answered) -> None:
        """Tells all callers."""
        callers, self.callers = self.callers, Waiters()
        for call in callers:
            call(decided)


@dataclass(slots=True, eq=False)
class AskedGroup:
    """What one call named first, and is not looked up yet.

    Attributes:
        since_ms: When it came, by its owner's monotonic clock.
        rows: Their numbers in the call.
        others: Who named some of them in other calls.
        is_taken: They are being looked up.
    """

    call: CancelCall
    since_ms: int
    named: list[Reference] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    others: dict[Reference, Waiters[Waiter]] = field(default_factory=dict)
    is_taken: bool = False

    def __len__(self) -> int:
        """The number of messages."""
        return len(self.named)

    @property
    def is_awaited(self) -> bool:
        """Whether anybody waits for any of them."""
        if not self.call.is_over:
            return True
        return any(not each.call.is_over for each in chain.from_iterable(self.others.values()))

    def join(self, named: Reference, call: CancelCall, row: int) -> None:
        """Adds a call that names one of them."""
        self.others.setdefault(named, Waiters()).join([Waiter(call, row)], _has_left)

    def callers(self, at: int) -> Waiters[Caller]:
        """Returns who waits for one of them."""
        joined = self.others.get(self.named[at], ()) if self.others else ()
        return Waiters([Waiter(self.call, self.rows[at]), *joined])

    def settle(self, at: int, answered: Answered) -> None:
        """Tells all who wait for one of them."""
        for caller in self.callers(at):
            caller(answered)


@dataclass(slots=True, eq=False)
class Cohort:
    """Messages whose cancels are written together, until each is decided or singled out.

    Attributes:
        since_ms: When the first of them was asked for.
        named: What callers call them.
        keys: Their ids and dues.
        asked: For each, the group that it came with, and its number there.
        copies: Where each lies.
        is_open: Which are neither decided nor singled out.
        place: Some frame up to this one has the cancel of each; None: they are not written.
        set_backs: How often w had been set back when they were written.
        written_ms: When that was; 0: not yet, or it was counted since.
    """

    since_ms: int
    named: list[Reference] = field(default_factory=list)
    keys: list[MessageKey] = field(default_factory=list)
    asked: list[tuple[AskedGroup, int]] = field(default_factory=list)
    due_ms: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    copies: list[tuple[WheelId, int, int]] = field(default_factory=list)
    is_open: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    place: Position | None = None
    set_backs: int = 0
    written_ms: int = 0
    _joined: dict[MessageKey, tuple[Waiters[Caller], list[Reference]]] = field(default_factory=dict)
    _first_names: dict[Reference, MessageKey] = field(default_factory=dict)
    _other_names: dict[Reference, MessageKey] = field(default_factory=dict)

    def __len__(self) -> int:
        """The number of messages."""
        return len(self.keys)

    @property
    def soonest_ms(self) -> int:
        """The first due of those that are open."""
        return int(self.due_ms[self.is_open].min(initial=_NEVER_MS))

    def add(self, named: Reference, key: MessageKey, group: AskedGroup, at: int) -> None:
        """Adds a message, until all are added."""
        self.since_ms = min(self.since_ms, group.since_ms)
        self.named.append(named)
        self.keys.append(key)
        self.asked.append((group, at))

    def close(self, due_ms: NDArray[np.int64], copies: list[tuple[WheelId, int, int]]) -> None:
        """Adds, once all are added, when each is due and where it lies."""
        self.due_ms, self.copies = due_ms, copies
        self.is_open = np.ones(len(due_ms), np.bool_)

    def key_of(self, named: Reference) -> MessageKey:
        """Returns the id and due of one of them, by any of its names, once all are added."""
        if (key := self._other_names.get(named)) is not None:
            return key
        if not self._first_names:  # a call that comes again names many
            self._first_names.update(zip(self.named, self.keys, strict=True))
        return self._first_names[named]

    def join(self, key: MessageKey, callers: Sequence[Caller], name: Reference | None) -> None:
        """Adds who waits for one of them too, and what they call it, if that is another name."""
        all_callers, names = self._joined.setdefault(key, (Waiters(), []))
        all_callers.join(callers, _has_left)
        if name is not None:
            names.append(name)
            self._other_names[name] = key

    def names(self, row: int) -> list[Reference]:
        """Returns all that callers call one of them."""
        return [self.named[row], *self._of(row)[1]]

    def settle(self, row: int, answered: Answered) -> None:
        """Tells all who wait for one of them."""
        group, at = self.asked[row]
        group.call.settle(group.rows[at], answered)
        if group.others or self._joined:
            for caller in (*group.callers(at)[1:], *self._of(row)[0]):
                caller(answered)

    def pinned(self, rows: Sequence[int]) -> list[Reference]:
        """Returns references to some of them, with their dues."""
        keys = [self.keys[row] for row in rows]
        return [Reference(due_ms // 1000, id_, due_ms) for id_, due_ms in keys]

    def single(self, row: int) -> PendingCancel:
        """Returns one of them by itself, as it was looked up and written."""
        assert self.place is not None
        key, named = self.keys[row], self.named[row]
        found = Found((key[1],), [Position(*self.copies[row])], [self.place])
        pinned = Reference(named.slot, named.id, key[1], named.wheel)
        group, at = self.asked[row]
        return PendingCancel(
            key,
            Subject(pinned, named, found),
            group.since_ms,
            Waiters([*group.callers(at), *self._of(row)[0]]),
            self.names(row),
            is_written=True,
            written_ms=self.written_ms,
        )

    def _of(self, row: int) -> tuple[Waiters[Caller], list[Reference]]:
        return self._joined.get(self.keys[row], (Waiters(), []))


class WaitingCancels:
    """Cancels by what decides them. For one thread."""

    def __init__(self) -> None:
        self._all: dict[MessageKey, PendingCancel] = {}  # in order of arrival
        self._by_seq: dict[WheelId, list[tuple[int, int, PendingCancel]]] = {}
        self._by_slot: dict[int, dict[MessageKey, PendingCancel]] = {}
        self._touched: dict[MessageKey, PendingCancel] = {}
        self._numbers = count()
        self._set_backs = 0

    def __len__(self) -> int:
        """The number of cancels."""
        return len(self._all)

    def get(self, key: MessageKey) -> PendingCancel | None:
        """Returns the cancel of a message, if it waits."""
        return self._all.get(key)

    def add(self, cancel: PendingCancel, *, look: bool = False) -> None:
        """Adds a cancel, unless one of that message waits.

        Args:
            cancel: The cancel; its frames are known.
            look: It is to be looked at with the present progress already.
        """
        key = cancel.key
        self._all[key] = cancel
        self._by_slot.setdefault(key[1] // 1000, {})[key] = cancel
        for place in cancel.subject.found.cancels:
            heap = self._by_seq.setdefault(place.wheel, [])
            heapq.heappush(heap, (place.seq, next(self._numbers), cancel))
        if look:
            self._touched[key] = cancel

    def discard(self, cancel: PendingCancel) -> None:
        """Removes a cancel, which is decided."""
        key = cancel.key
        if self._all.get(key) is not cancel:
            return
        del self._all[key]
        self._touched.pop(key, None)
        slot = key[1] // 1000
        of_slot = self._by_slot[slot]
        del of_slot[key]
        if not of_slot:
            del self._by_slot[slot]
        if sum(map(len, self._by_seq.values())) > 2 * len(self._all) + _STALE_AT_LEAST:
            self._drop_stale()

    def covered(self, progress: Progress) -> list[PendingCancel]:
        """Returns the cancels to look at with this progress; they stay until they are discarded."""
        if progress.set_backs != self._set_backs:
            self._set_backs = progress.set_backs
            self._touched = dict(self._all)
        for wheel, heap in self._by_seq.items():
            seq = progress.seq(wheel)
            while heap and heap[0][0] <= seq:
                self._touch(heapq.heappop(heap)[2])
        last_slot = progress.last_due_ms // 1000
        if self._by_slot and min(self._by_slot) <= last_slot:
            for slot in [slot for slot in self._by_slot if slot <= last_slot]:
                for key, cancel in self._by_slot[slot].items():
                    if key[1] <= progress.last_due_ms:
                        self._touched[key] = cancel
        return list(self._touched.values())

    def older(self, before_ms: int) -> Iterable[PendingCancel]:
        """Returns the cancels that were asked for before this moment."""
        found = []
        for cancel in self._all.values():
            if cancel.since_ms >= before_ms:
                break
            found.append(cancel)
        return found

    def _touch(self, cancel: PendingCancel) -> None:
        if self._all.get(cancel.key) is cancel:
            self._touched[cancel.key] = cancel

    def _drop_stale(self) -> None:
        for wheel, heap in list(self._by_seq.items()):
            kept = [each for each in heap if self._all.get(each[2].key) is each[2]]
            heapq.heapify(kept)
            if kept:
                self._by_seq[wheel] = kept
            else:
                del self._by_seq[wheel]


def cancels_of(keys: Sequence[MessageKey], due_ms: NDArray[np.int64] | None = None) -> Columns:
    """Returns the rows that cancel these messages; `due_ms` saves reading their dues one by one."""
    if due_ms is None:
        due_ms = np.array([due for _, due in keys], dtype=np.int64)
    ids = np.frombuffer(b"".join(id_ for id_, _ in keys), dtype=np.uint8)
    return Columns.of_cancels(due_ms, ids.reshape(-1, ID_LENGTH_BYTES))
