"""Cancels that wait for committed progress, in the order in which progress can decide them.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Final, NamedTuple

from delaywheel.identity import WheelId
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.lookup.scan import Found
from delaywheel_replica.server.node.refusals import Refusal

_STALE_AT_LEAST: Final = 1_024


class Decided(NamedTuple):
    """A decision about a message.

    Attributes:
        decision: The decision.
        moved_ms: The message's new due, if it was rescheduled; None also if its frame was lost
            before the message had a new due.
    """

    decision: CancelDecision
    moved_ms: int | None = None


Answered = Decided | Refusal
"""What became of one message."""


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
        subject: The message.
        since_ms: When it was asked for, by its owner's monotonic clock.
        callers: Called once with the decision.
        names: What these callers call it.
        is_written: A cancel of it was written for these callers.
        written_ms: When that was; 0: not yet, or it was counted since.
    """

    key: MessageKey
    subject: Subject
    since_ms: int
    callers: list[Callable[[Answered], object]] = field(default_factory=list)
    names: list[Reference] = field(default_factory=list)
    is_written: bool = False
    written_ms: int = 0

    def key_of(self, _named: Reference) -> MessageKey:
        """Returns its id and due, whatever it is called."""
        return self.key

    def join(
        self,
        _key: MessageKey,
        callers: Iterable[Callable[[Answered], object]],
        name: Reference | None,
    ) -> None:
        """Adds callers, and what they call it, if that is another name."""
        self.callers += callers
        if name is not None:
            self.names.append(name)

    def settle(self, decided: Answered) -> None:
        """Tells all callers."""
        callers, self.callers = self.callers, []
        for call in callers:
            call(decided)


class WaitingCancels:
    """Cancels by what decides them. For one thread."""

    def __init__(self) -> None:
        """Begins with none."""
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
