"""One partition of an ingress topic under one leader: which records are settled or under way.

For each partition, the control topic holds the next offset, below which everything is settled, and
the announced offsets. Only announced records are handed to a server, so only they may be in a
wheel: docs/PROTOCOL.md, "Ingress", has the states of a record, and the rules.

A record is settled in the transaction that moves next past it:

| record | the transaction carries |
|---|---|
| held by W members | nothing for it |
| a commit of a half whose hold is over | nothing: the half's group is asked, which is no error |
| a half whose hold is over, and surely on no server | the letter that asks its group |
| what a group has answered about a half | the outcome that says so |
| unfit | a dead letter |
| due, and surely on no server | the message itself; one with an id of its sender's only once its |
|   | second is sealed, or the server accepts nothing: the second may know it from before |
| perhaps on a server, and below the floor | a dead letter, WHEEL_LOST |

The last case can no longer be decided. It does not arise while every leader keeps the invariants.

Invariants:

- Offset after acceptance: next passes a record only in a transaction that settles it.
- Announced before handed over: a record's announcement is known to be committed when the record is
  handed over.
- A record that was handed to a server is delivered through a wheel only, unless the server has
  answered that it did not take the record.
- An announcement is withdrawn only if surely no server has the record: this term announced it, no
  hand-over of it is unanswered, and every answer said that the server did not take it.
- The floor waits (`bound`): it does not pass the slot of an announced record that is not settled,
  and does not move while an announced record is unread; nor do the seals of the leader's own wheel.
- If a partition ends before what was read or announced of it, nothing is read from that end on:
  later records there reuse offsets. Announced records that can no longer be read are reported, and
  no longer waited for; the control record keeps the end.
- Id and due follow from the record and from the levels at its announcement, which the control
  record keeps. After a change of levels nothing is announced until all of these records are
  settled.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final, TypeAlias

from delaywheel.record_headers import LONGEST_HOLD_MS
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel_replica.core.ingress.moment import (
    Moment,
    RequestKind,
    TransactionRoom,
    request_kind,
)
from delaywheel_replica.core.ingress.reading import (
    CommittedRecord,
    Delayed,
    HalfAnswered,
    HalfCommit,
    IngressRules,
    Unfit,
    UnfitReason,
    Withdrawn,
    read,
)
from delaywheel_replica.core.ingress.underway import (
    Deleted,
    DeletedRecords,
    Forwarded,
    GroupAnswered,
    IntakeStep,
    RecordAnswer,
    RecordUnderWay,
    Rejected,
    SettledRecord,
    Stage,
)
from delaywheel_replica.core.protocol.control import IngressRecord
from delaywheel_replica.core.protocol.seal import FROZEN

SPANS_MOST: Final = 200
"""Spans of announced offsets in one control record; a record that would add one more waits."""

CLOCKS_DIFFER_MS: Final = 1_000
"""A producer's clock may be so much ahead when it says how long a half is to be held."""

_Request: TypeAlias = Delayed | Withdrawn | HalfCommit | Unfit

_NEVER: Final = 2**63


@dataclass(slots=True)
class _Draft:
    passed: int = 0
    next_offset: int = 0
    settled: list[SettledRecord] = field(default_factory=list)
    length_bytes: int = 0

    def take(self, settled: SettledRecord, room: TransactionRoom) -> bool:
        length_bytes = 0 if settled.taken.record is None else settled.taken.record.length_bytes
        if len(self.settled) >= room.messages:
            return False
        if self.settled and self.length_bytes + length_bytes > room.length_bytes:
            return False
        self.settled.append(settled)
        self.length_bytes += length_bytes
        return True


class Intake:
    """One partition during one term. Each term creates its own from the committed record.

    Attributes:
        position: the next offset to read.
        held_bytes: approximate memory of the records under way.
        cut_off: where the partition was found to end too early; None: it is complete.
    """

    def __init__(
        self, record: IngressRecord, rules: IngressRules, *, only_announced: bool = False
    ) -> None:
        """Begins with nothing read; `only_announced` takes only what was announced before."""
        self.record = record
        self.position = record.next_offset
        self.held_bytes = 0
        self.cut_off = record.cut_off
        # Nothing is taken from this offset on.
        self._end = self.least_end if only_announced else _NEVER
        self._inherited: SeqSet = record.announced
        self._rules = rules
        # Announced records were judged before, and may be held, whatever has changed since.
        self._inherited_rules = IngressRules(record.levels_ms, 2**63, frozenset(), halves=True)
        self._taken: deque[RecordUnderWay] = deque()
        # Announced records by slot; None: not counted yet.
        self._slots: Counter[int] | None = None
        self._give_up()

    def __len__(self) -> int:
        return len(self._taken)

    @property
    def least_end(self) -> int:
        """Returns the offset below which the partition cannot end unless it was cut off."""
        if self.cut_off is not None:
            return self.cut_off
        announced = self.record.announced
        return max(self.record.next_offset, announced.last + 1 if announced else 0)

    @property
    def is_done(self) -> bool:
        """Whether this term has read everything that it may read of the partition."""
        return self.position >= self._last_end

    def ends(self, end: int) -> None:
        """Notes that the partition ends here, before what was read or announced of it."""
        if self.cut_off is None:
            self.cut_off = end
            self._give_up()

    def read(self, records: Iterable[CommittedRecord], position: int) -> None:
        """Adds committed records in order, and goes on at `position`, behind markers and gaps."""
        for record in records:
            offset = record.place.offset
            if not self.position <= offset < self._last_end:
                continue
            is_inherited = offset in self._inherited
            rules = self._inherited_rules if is_inherited else self._rules
            stage = Stage.ANNOUNCED if is_inherited else Stage.READ
            taken = RecordUnderWay(
                offset, read(record, rules), record, stage, perhaps_held=is_inherited
            )
            self._taken.append(taken)
            self.held_bytes += taken.held_bytes
            if is_inherited:
                self._slots = None
            self.position = offset + 1
        self.position = max(self.position, min(position, self._last_end))
        self._give_up()

    def deleted(self, first_kept: int) -> None:
        """Notes that Kafka no longer has anything before this offset, read or unread."""
        self._skip(min(first_kept, self._last_end), is_cut_off=False)
        self._give_up()

    @property
    def _last_end(self) -> int:
        return self._end if self.cut_off is None else min(self._end, self.cut_off)

    def _give_up(self) -> None:
        """Stops waiting for records announced after the end, once all before it are read."""
        announced = self.record.announced
        if self.cut_off is not None and announced and self.position >= self.cut_off:
            self._skip(announced.last + 1, is_cut_off=True)

    def _skip(self, position: int, *, is_cut_off: bool) -> None:
        if position > self.position:
            gap = DeletedRecords(self.position, position - 1, is_cut_off)
            self._taken.append(RecordUnderWay(gap.last_offset, gap, None))
            self.position = position

    def plan(self, moment: Moment, *, room: TransactionRoom) -> IntakeStep:
        """Returns what the next transaction can carry; nothing changes until it is committed."""
        draft = self._settle(moment, room)
        before = self.record.announced
        before = before.within(draft.next_offset, before.last) if before else before
        is_inheriting = bool(self._inherited) and self._inherited.last >= draft.next_offset
        most = dict(moment.most)
        taken_back, spans = self._take_back(most, draft, before)
        announced: list[RecordUnderWay] = []
        if not is_inheriting or self.record.levels_ms == self._rules.levels_ms:
            announced, spans = self._announce(moment, draft.passed, spans, most)
        record = replace(
            self.record,
            next_offset=draft.next_offset,
            announced=spans,
            levels_ms=self.record.levels_ms if is_inheriting else self._rules.levels_ms,
            cut_off=self.cut_off,
        )
        return IntakeStep(
            record,
            tuple(draft.settled),
            draft.passed,
            tuple(announced),
            draft.length_bytes,
            tuple(taken_back),
            most,
        )

    def committed(self, step: IntakeStep) -> None:
        """Notes that the transaction with the latest step is committed."""
        self._slots = self._slots_after(step)
        for _ in range(step.passed):
            self.held_bytes -= self._taken.popleft().held_bytes
        for taken in step.announced:
            taken.stage = Stage.ANNOUNCED
        for taken in step.taken_back:
            taken.stage, taken.answer = Stage.READ, None
        self.record = step.record

    def first(self, count: int) -> Iterator[RecordUnderWay]:
        """Returns the first `count` records under way, in order."""
        return islice(self._taken, count)

    @property
    def comes_to_a_half(self) -> bool:
        """Whether the next record to be settled is a half, or a commit of one."""
        left = (taken for taken in self._taken if taken.stage is not Stage.HELD)
        following = next(left, None)
        return following is not None and _is_about_half(following.request)

    def to_hand(self, room: TransactionRoom) -> list[RecordUnderWay]:
        """Returns as many records for the server as there is room for; each expects an answer."""
        messages, left_bytes = room
        handed: list[RecordUnderWay] = []
        for taken in islice(self._to_be_handed(), messages):
            assert taken.record is not None
            left_bytes -= taken.record.length_bytes
            if left_bytes < 0:
                break
            taken.stage = Stage.HANDED
            handed.append(taken)
        return handed

    @property
    def waits_to_be_handed(self) -> bool:
        """Whether a record waits for the server, room or not."""
        return any(True for _ in self._to_be_handed())

    def _to_be_handed(self) -> Iterator[RecordUnderWay]:
        for taken in self._taken:
            if taken.stage is Stage.ANNOUNCED and taken.slot is not None:
                yield taken

    def answered(self, taken: RecordUnderWay, answer: RecordAnswer) -> None:
        """Takes in the server's answer to a record."""
        taken.answer = answer
        match answer:
            case RecordAnswer.HELD:
                taken.stage = Stage.HELD
            case RecordAnswer.SEALED | RecordAnswer.FULL if not taken.perhaps_held:
                taken.stage = Stage.REFUSED
            case _:  # another wheel may accept it
                taken.stage = Stage.ANNOUNCED
                taken.perhaps_held |= answer is RecordAnswer.UNKNOWN

    def bound(self, step: IntakeStep | None = None) -> int | None:
        """Returns the slot that floor and own seals must not pass, after a step; None: no limit."""
        record = self.record if step is None else step.record
        if not record.announced:
            return None
        if record.announced.last >= self.position:
            return FROZEN
        return min(
            self._announced_slots() if step is None else self._slots_after(step), default=None
        )

    def _announced_slots(self) -> Counter[int]:
        """Counts announced records by slot; cached, since most stay for many transactions."""
        if self._slots is None:
            self._slots = _slots_of(self._taken)
        return self._slots

    def _slots_after(self, step: IntakeStep) -> Counter[int]:
        """Returns the counts after a transaction; empty slots are left out."""
        after = self._announced_slots() - _slots_of(self.first(step.passed))
        after -= _slots_of(step.taken_back)
        after.update(each.slot for each in step.announced if each.slot is not None)
        return after

    def _settle(self, moment: Moment, room: TransactionRoom) -> _Draft:
        draft = _Draft(next_offset=self.record.next_offset)
        for taken in self._taken:
            if taken.stage is not Stage.HELD and not _is_void(taken, moment):
                settled = self._settled(taken, moment)
                if settled is None or not draft.take(settled, room):
                    return draft
            draft.passed += 1
            draft.next_offset = taken.offset + 1
        draft.next_offset = self.position
        return draft

    def _settled(self, taken: RecordUnderWay, moment: Moment) -> SettledRecord | None:
        """Returns how a record that is not held can be settled now; None if it cannot."""
        request = taken.request
        match request:
            case DeletedRecords():
                return Deleted(taken, request)
            case HalfAnswered():
                return GroupAnswered(taken, request)
        return None if taken.stage is Stage.HANDED else self._decided(taken, request, moment)

    def _decided(
        self, taken: RecordUnderWay, request: _Request, moment: Moment
    ) -> SettledRecord | None:
        """Returns how a record can be settled that no server is asked about now."""
        unfit = _unfit(taken, request, moment)
        if unfit is not None:
            return Rejected(taken, unfit)
        if _is_for_the_wheel(taken, moment) or _waits_for_halves(taken, moment):
            return None
        if taken.perhaps_held or not isinstance(request, Delayed) or request.due_ms > moment.now_ms:
            return None
        return None if request.topic in moment.blocked else Forwarded(taken, request)

    def _take_back(
        self, most: dict[RequestKind, int], draft: _Draft, spans: SeqSet
    ) -> tuple[list[RecordUnderWay], SeqSet]:
        """Returns records whose announcement is withdrawn, and what remains announced.

        The gap before such a record goes with it. If more spans would remain than a control record
        may have, nothing is withdrawn.

        Args:
            most: for each kind that the server does not accept: how many records may stay
                announced to probe it; reduced by those that stay.
            draft: what is settled.
            spans: the offsets announced after that.
        """
        found: list[RecordUnderWay] = []
        gone: list[tuple[int, int]] = []
        begin = draft.next_offset
        for taken in islice(self._taken, draft.passed, None) if most else ():
            first, begin = begin, taken.offset + 1
            kind = request_kind(taken.request)
            if kind not in most or taken.stage is not Stage.ANNOUNCED:
                continue
            if most[kind]:
                most[kind] -= 1
            elif not taken.perhaps_held:
                found.append(taken)
                gone.append((first, taken.offset))
        left = spans - SeqSet(gone) if gone else spans
        return (found, left) if len(left.spans) <= SPANS_MOST else ([], spans)

    def _announce(
        self, moment: Moment, passed: int, spans: SeqSet, most: dict[RequestKind, int]
    ) -> tuple[list[RecordUnderWay], SeqSet]:
        """Returns records to announce, and all offsets announced with them.

        A gap between two consecutive records holds no record: it is announced with them.
        """
        found: list[RecordUnderWay] = []
        before: RecordUnderWay | None = None
        run: tuple[int, int] | None = None  # of found ones, not among the spans yet
        for taken in islice(self._taken, passed, None):
            if taken.stage is not Stage.READ:
                before = taken
                continue
            if not _can_be_handed(taken, moment) or most.get(request_kind(taken.request)) == 0:
                before = None
                continue
            first = taken.offset
            if before is not None and (before.stage is Stage.READ or before.offset in spans):
                first = before.offset + 1
            if run is not None and first == run[1] + 1:
                run = run[0], taken.offset
            else:
                spans = spans if run is None else spans.with_span(*run)
                run = first, taken.offset
                if len(spans.with_span(*run).spans) > SPANS_MOST:
                    return found, spans
            before = taken
            found.append(taken)
            if (kind := request_kind(taken.request)) in most:
                most[kind] -= 1
        return found, spans if run is None else spans.with_span(*run)


def _slots_of(taken: Iterable[RecordUnderWay]) -> Counter[int]:
    slots = (each.slot for each in taken if each.stage is not Stage.READ)
    return Counter(slot for slot in slots if slot is not None)


def begun(record: IngressRecord | None, topic_id: str, rules: IngressRules) -> IngressRecord:
    """Returns where a new term begins in a partition: a recreated topic, from the beginning."""
    if record is None or record.topic_id != topic_id:
        return IngressRecord(topic_id, 0, NO_SEQS, rules.levels_ms)
    return record


def unread_bound(records: Iterable[IngressRecord]) -> int | None:
    """Returns the `Intake.bound` of all partitions together while no leader reads them."""
    return FROZEN if any(record.announced for record in records) else None


def _unfit(taken: RecordUnderWay, request: _Request, moment: Moment) -> Unfit | None:
    """Returns why a record that is not held becomes a dead letter; None if it does not."""
    if taken.perhaps_held:
        is_known = not isinstance(request, Unfit) and request.due_ms // 1000 >= moment.floor
        return None if is_known else Unfit(UnfitReason.WHEEL_LOST, "It may have been accepted")
    is_refused = taken.stage is Stage.REFUSED
    if isinstance(request, Unfit):
        return request
    if isinstance(request, Withdrawn) and (is_refused or _is_late(taken, moment)):
        return Unfit(UnfitReason.DUE_TOO_OLD, "The message to cancel is gone by now")
    if taken.stage is Stage.READ and (unfit := _not_taken(request, moment)) is not None:
        return unfit
    if is_refused and taken.answer is RecordAnswer.FULL:
        return Unfit(UnfitReason.SLOT_FULL, f"Second {request.due_ms // 1000}")
    return None


def _not_taken(request: Delayed | Withdrawn | HalfCommit, moment: Moment) -> Unfit | None:
    """Returns why a record is not accepted at this moment; None if it may be."""
    if _is_half_refused(request, moment):
        return Unfit(UnfitReason.HALVES_UNAVAILABLE, moment.halves_objection or "")
    due_ms = request.due_ms
    held_ms = due_ms - moment.now_ms
    if _is_about_half(request) and held_ms > LONGEST_HOLD_MS + CLOCKS_DIFFER_MS:
        return Unfit(UnfitReason.HALF_INVALID, f"No half is held for {held_ms:,} ms")
    if isinstance(request, Delayed):
        due_ms = max(due_ms, request.half_due_ms)
    if due_ms > moment.span_end_ms:
        return Unfit(UnfitReason.DUE_BEYOND_SPAN, f"A due of {due_ms} ms")
    return None


def _can_be_handed(taken: RecordUnderWay, moment: Moment) -> bool:
    """Whether a record in stage READ may be announced; a due message need not be."""
    slot = taken.slot
    if _waits_for_halves(taken, moment) or _is_half_refused(taken.request, moment):
        return False
    if isinstance(taken.request, Delayed) and taken.request.due_ms <= moment.now_ms:
        return _is_for_the_wheel(taken, moment)
    return (
        slot is not None
        and isinstance(taken.request, Delayed | Withdrawn | HalfCommit)
        and moment.least_slot is not None
        and slot >= moment.least_slot
        and taken.request.due_ms <= moment.span_end_ms
    )


def _is_void(taken: RecordUnderWay, moment: Moment) -> bool:
    """Whether a commit that is not held means nothing any more.

    The group of its half is asked; or there is no half: none was ever accepted, and none is now.
    """
    request = taken.request
    if not isinstance(request, HalfCommit) or taken.stage is Stage.HANDED:
        return False
    has_no_half = not moment.takes_halves and moment.halves_objection is not None
    return has_no_half or taken.stage is Stage.REFUSED or request.due_ms <= moment.now_ms


def _waits_for_halves(taken: RecordUnderWay, moment: Moment) -> bool:
    """Whether a half, or a commit of one, has to wait until all leaders know what it is."""
    return not moment.takes_halves and _is_about_half(taken.request)


def _is_half_refused(request: object, moment: Moment) -> bool:
    """Whether a half is not begun, as no group could be asked about it."""
    is_half = isinstance(request, Delayed) and request.is_half
    return is_half and moment.halves_objection is not None


def _is_about_half(request: object) -> bool:
    return isinstance(request, HalfCommit) or (isinstance(request, Delayed) and request.is_half)


def _is_for_the_wheel(taken: RecordUnderWay, moment: Moment) -> bool:
    """Whether a record goes through the wheel even if it is due: one with its sender's own id.

    Its second may know the same message from before. The wheel compares the two as long as the
    second is open and the server accepts messages.
    """
    slot = taken.slot
    return (
        isinstance(taken.request, Delayed)
        and taken.request.has_own_id
        and taken.stage in (Stage.READ, Stage.ANNOUNCED)
        and Delayed not in moment.most
        and moment.least_slot is not None
        and slot is not None
        and slot >= moment.least_slot
    )


def _is_late(taken: RecordUnderWay, moment: Moment) -> bool:
    """Whether a record that was not handed over is too late for that."""
    slot = taken.slot
    return (
        taken.stage is Stage.READ
        and slot is not None
        and moment.least_slot is not None
        and slot < moment.least_slot
    )
