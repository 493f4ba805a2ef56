"""Messages to be cancelled: what a node knows of one, and what follows from that.

A message is one `PendingCancel` from the call that names it until progress decides, whoever asks
for it. There are thousands, so what is done with many is done by lists. Once its cancel is written
it waits among `WaitingCancels`, with all others of its group, so that a new progress costs what it
decides, not what waits. It is looked at

| once | because |
|---|---|
| V has reached the group's frames | its cancel counts |
| w has reached its due | it may be done |
| w was set back | what was done stays done, ahead of w |

and from then on with each progress, until it is decided. Nearly every message is *plain*: the look
before its cancel was written has shown that only this cancel can end it before its due. So progress
alone decides (`DecisionBasis.is_cancelled`); any other message is looked up again.

Without I/O and clocks: the simulation uses these classes too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, NamedTuple

from delaywheel_replica.core.leader.cancel import (
    CancelDecision,
    CancelView,
    after_writing,
    before_writing,
    is_cancelled,
)
from delaywheel_replica.core.leader.halves import may_be_half
from delaywheel_replica.core.leader.holders import holds_progress
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey, known_due_ms
from delaywheel_replica.core.protocol.status_files import CleanerStatus
from delaywheel_replica.server.changing.awaited import LaterCall, NamingCall, Waiters
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.lookup.scan import Found
from delaywheel_replica.server.node.refusals import Refusal


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
NOT_FOUND: Final = Decided(CancelDecision.NOT_FOUND)
"""True of who asked before the look began, and of nobody else (`LaterCall`)."""


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
        """The message."""
        return self.reference.key


class DecisionBasis(NamedTuple):
    """What decisions that are made together are based on.

    Attributes:
        now_ms: The wall clock.
        status: The cleaner's status; None: there is none yet.
        before: What was committed directly before its progress; None: unknown.
        leading: The cleaner leads, and its status is fresh.
        clock_skew_ms: By how much clocks may differ.
        current: A look that begins now finds every frame up to V of its progress.
    """

    now_ms: int
    status: CleanerStatus | None
    before: Progress | None
    leading: bool
    clock_skew_ms: int
    current: bool = False

    @property
    def progress(self) -> Progress | None:
        """The committed progress."""
        return None if self.status is None else self.status.progress

    def of_look(self, own: Heartbeat) -> DecisionBasis:
        """Returns the same for a look that begins now, on the node of a heartbeat."""
        is_current = self.status is not None and holds_progress(self.status.control, own)
        return self._replace(current=is_current)

    def view(self, key: MessageKey, found: Found) -> CancelView:
        """Returns what is known of a message."""
        status = self.status
        return CancelView(
            due_ms=key.due_ms,
            now_ms=self.now_ms,
            leading=self.leading,
            progress=None if status is None else status.progress,
            copies=found.copies,
            cancels=found.cancels,
            complete=found.complete,
            readable=found.readable,
            rescheduled=found.rescheduled_to is not None
            or (status is not None and key in status.reschedules),
            current=self.current,
            before=self.before,
            releases=found.releases,
            commits=found.commits,
        )

    def before_writing(self, key: MessageKey, found: Found) -> Decided:
        """Decides while no cancel has been written."""
        return self._with_due(before_writing(self.view(key, found)), key, found)

    def after_writing(self, key: MessageKey, found: Found) -> Decided:
        """Decides once a cancel has been written, or found."""
        return self._with_due(after_writing(self.view(key, found)), key, found)

    def plain_in(self, subject: Subject) -> int | None:
        """The leader's epoch, if a message that is to be written is plain by a look of this basis.

        Its second could be read, and had no other cancel, no commit and no mark: so what else could
        end it, or give it another due, comes in this epoch, and shows (`is_cancelled`).
        """
        is_plain = self.current and subject.found.readable
        return self.status.epoch if is_plain and self.status is not None else None

    def is_cancelled(self, pending: PendingCancel) -> bool:
        """Whether progress alone shows that a plain message is cancelled."""
        status, cancel, due_ms = self.status, pending.cancel, pending.key.due_ms
        if status is None or status.progress is None or cancel is None:
            return False
        if pending.plain_in is None or pending.plain_in != status.epoch:
            return False
        if pending.key in status.reschedules:
            return False
        return not self.may_be_half(due_ms) and is_cancelled(due_ms, cancel, status.progress)

    def may_be_half(self, due_ms: int) -> bool:
        """Whether a message with this due may be a half, which a commit may end before."""
        needs = 0 if self.status is None else self.status.needs
        return may_be_half(needs, due_ms - self.now_ms, self.clock_skew_ms)

    def _with_due(self, decision: CancelDecision, key: MessageKey, found: Found) -> Decided:
        if decision is not CancelDecision.RESCHEDULED:
            return Decided(decision)
        record = None if self.status is None else self.status.reschedules.get(key)
        return Decided(decision, known_due_ms(record, found.rescheduled_to))


@dataclass(slots=True, eq=False)
class PendingCancel:
    """A message to be cancelled, for all callers who ask for it, until it is decided.

    Attributes:
        named: What the call that named it first calls it.
        since_ms: When that came, by its owner's monotonic clock.
        call: That call.
        row: The message's number in it.
        sharer: Whose call that is.
        others: Who else waits for it, if anybody does.
        other_names: What some of these call it, where that is something else.
        is_taken: It is being looked up, or was.
        subject: What the last look of it found; None: it was not looked up yet.
        plain_in: The leader's epoch in which progress alone decides; None: it is looked up again.
        is_written: A cancel of it was written for these callers, or is being written.
        cancel: Some frame up to this one has that cancel; None: it is not written yet.
        written_ms: When it was written; 0: not yet, or it was counted since.
        waits: For progress: it is in nobody's hands.
    """

    named: Reference
    since_ms: int
    call: NamingCall[Answered]
    row: int
    sharer: Hashable = ""
    others: Waiters[Answered] | None = None
    other_names: tuple[Reference, ...] = ()
    is_taken: bool = False
    subject: Subject | None = None
    plain_in: int | None = None
    is_written: bool = False
    cancel: Position | None = None
    written_ms: int = 0
    waits: bool = False

    @property
    def found_as(self) -> Subject:
        """What the last look of it found, once it was looked up."""
        assert self.subject is not None
        return self.subject

    @property
    def key(self) -> MessageKey:
        """The message, once it was looked up."""
        return self.found_as.key

    @property
    def is_awaited(self) -> bool:
        """Whether anybody waits for it."""
        return not self.call.is_over or (self.others is not None and self.others.are_any)

    def join(self, call: NamingCall[Answered], row: int) -> None:
        """Adds a call that names it."""
        if self.is_taken:
            call = LaterCall(call, NOT_FOUND)
        if self.others is None:  # nearly always nobody joins: an object less for each message
            self.others = Waiters(call, row)
        else:
            self.others.join(call, row)

    def absorb(self, other: PendingCancel) -> None:
        """Adds those who call it something else, as was found when that was looked up."""
        for call, row in ((other.call, other.row), *(other.others or ())):
            self.join(call, row)
        self.other_names = (*self.other_names, other.named)

    def settle(self, answered: Answered) -> None:
        """Tells all callers."""
        self.waits = False
        self.call.settle(self.row, answered)
        if self.others is not None:
            self.others.settle(answered)


class _Group(NamedTuple):
    """Messages whose cancels are in some frame up to one.

    Attributes:
        soonest_ms: The first due of them.
    """

    cancels: list[PendingCancel]
    place: Position
    soonest_ms: int

    @classmethod
    def of(cls, cancels: list[PendingCancel], place: Position) -> _Group:
        return cls(cancels, place, min((each.key.due_ms for each in cancels), default=0))


class WaitingCancels:
    """Cancels by what decides them. For one thread."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._looked_at: list[PendingCancel] = []
        self._set_backs = 0

    def add_group(self, written: list[PendingCancel], place: Position, now_ms: int) -> None:
        """Adds messages whose cancels are in some frame up to this one, since now."""
        for each in written:
            each.cancel, each.written_ms, each.waits = place, now_ms, True
            each.found_as.found.cancels.append(place)
        self._groups.append(_Group.of(written, place))

    def add(self, cancel: PendingCancel) -> None:
        """Adds a message that the present progress may decide, or the next one."""
        cancel.waits = True
        self._looked_at.append(cancel)

    def covered(self, progress: Progress) -> list[PendingCancel]:
        """Returns the cancels to look at with this progress; they stay while they wait."""
        is_set_back = progress.set_backs != self._set_backs
        self._set_backs = progress.set_backs
        groups, self._groups = self._groups, []
        last_ms = progress.last_due_ms
        for group in groups:
            if is_set_back or group.place.seq <= progress.seq(group.place.wheel):
                self._looked_at += group.cancels
                continue
            left = group
            if group.soonest_ms <= last_ms:
                self._looked_at += [each for each in group.cancels if each.key.due_ms <= last_ms]
                later = [each for each in group.cancels if each.key.due_ms > last_ms]
                left = _Group.of(later, group.place)
            if any(each.waits for each in left.cancels):
                self._groups.append(left)
        self._looked_at = [each for each in self._looked_at if each.waits]
        return list(self._looked_at)
