"""Another due for a pending message: never both, never none.

One control record, `reschedule/<id>/<due>/<topic>`, decides. It is committed in a leader's
transaction, so the message cannot be taken at its old due in between, and it states the other due.
Until frames express the same, the record stands, and binds every leader. docs/PROTOCOL.md, "Another
due", has the states of a message, the transactions that lead from one to the next, and why it is
never both and never none.

Cancelled messages are not rescheduled, because the leader looks for cancels up to what it admits;
rescheduled ones are not reported as cancelled, because the record stands or its mark is <= V
(core/leader/cancel.py). Repeating a request changes nothing: the record, or the mark, shows where
the message is.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.control import (
    ControlRecord,
    ControlState,
    reschedule_record,
)
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.reschedules import (
    MessageKey,
    Reschedule,
    RescheduleProposal,
    RescheduleWritten,
)

MOST: Final = 256
"""How many records stand at once, each for about a second. Further requests wait for their turn."""

PUT_OFF_MS: Final = 1_000
"""By how much a due that has passed is put off, doubled each time."""

_DOUBLINGS: Final = 6


@dataclass(frozen=True, slots=True)
class Rescheduling:
    """What a leader knows about reschedules besides the control topic.

    Attributes:
        proposals: Requests of which no cancel is admitted, and whose seconds could be read.
        written: What frames express already.
        absent: Decided messages whose due this transaction passes without a copy <= V.
    """

    proposals: Collection[RescheduleProposal] = ()
    written: Collection[RescheduleWritten] = ()
    absent: frozenset[MessageKey] = frozenset()


def reschedule_records(
    state: ControlState,
    after: Progress,
    situation: Rescheduling,
    now_ms: int,
) -> list[ControlRecord]:
    """Returns the records by which a transaction decides, puts off and settles.

    `after` is the progress after the transaction, with the committed floor; `now_ms` the leader's
    wall clock.
    """
    records = []
    written = {each.key: each for each in situation.written}
    for key, record in sorted(state.reschedules.items()):
        then = _next(key, record, written.get(key), state, after)
        if not then.is_written and key in situation.absent:
            then = _put_off(record, after, now_ms)
        elif not then.is_written and record.to_ms <= after.due_ms:  # so its copy was forwarded
            then = _withdrawing(record, key.due_ms)
        if then.is_written and not _still_passed(then, after):
            records.append(reschedule_record(key, None))
        elif then != record:
            records.append(reschedule_record(key, then))
    if situation.proposals:
        decided = open_proposals(state.apply_all(records), situation.proposals, after)
        records += [
            reschedule_record(each.key, Reschedule(each.to_ms, each.place)) for each in decided
        ]
    return records


def open_proposals(
    state: ControlState, proposals: Collection[RescheduleProposal], after: Progress
) -> list[RescheduleProposal]:
    """Returns the requests that a transaction to that progress may decide, within its room.

    So no cancels of others are looked for. What this transaction settles makes room in the next
    one.
    """
    room, touched = MOST - len(state.reschedules), _touched(state)
    may_be = []
    for proposal in proposals:
        if room > 0 and _may_be_decided(state, proposal, after):
            dues = {proposal.key, proposal.key.at(proposal.to_ms)}
            if touched.isdisjoint(dues):
                may_be.append(proposal)
                touched |= dues
                room -= 1
    return may_be


def _may_be_decided(state: ControlState, proposal: RescheduleProposal, after: Progress) -> bool:
    due_ms, to_ms = proposal.key.due_ms, proposal.to_ms
    if state.progress is None or to_ms == due_ms or after.ahead:
        return False
    if min(due_ms, to_ms) <= after.due_ms + 1:  # of w + 1 a part may be done
        return False
    return proposal.place.seq <= state.progress.seq(proposal.place.wheel)


def _touched(state: ControlState) -> set[MessageKey]:
    """Returns all that records say of: the old due, the new one, and those that passed."""
    return {
        key.at(due_ms)
        for key, record in state.reschedules.items()
        for due_ms in (key.due_ms, *record.passed, *(() if record.is_written else (record.to_ms,)))
    }


def withdrawn(state: ControlState) -> frozenset[MessageKey]:
    """Returns the messages that no transaction forwards, even without a cancel."""
    keys = set(state.reschedules)
    for key, record in state.reschedules.items():
        keys.update(map(key.at, record.passed))
    return frozenset(keys)


def passing(state: ControlState, after: Progress) -> list[MessageKey]:
    """Returns decided messages whose new due a transaction to that progress passes."""
    if state.progress is None:
        return []
    return [
        key
        for key, record in state.reschedules.items()
        if state.progress.due_ms < record.to_ms <= after.due_ms and not record.is_written
    ]


def uncopied(
    state: ControlState, after: Progress, situation: Rescheduling
) -> set[tuple[WheelId, int]]:
    """Returns frames with messages that have no copy yet: who gives one up, loses these.

    All else in such a frame may be done.
    """
    written = {each.key: each for each in situation.written}
    return {
        (record.place.wheel, record.place.seq)
        for key, record in state.reschedules.items()
        if (record.to_ms > after.due_ms or key in situation.absent)
        and not _next(key, record, written.get(key), state, after).is_written
    }


def floor_below(state: ControlState, floor: int) -> int:
    """Returns the floor, at most the least slot that a reschedule reads from or writes to."""
    dues_ms = [
        min(key.due_ms, record.to_ms)
        for key, record in state.reschedules.items()
        if not record.is_written
    ]
    return min([floor, *(due_ms // 1000 for due_ms in dues_ms)])


def _next(
    key: MessageKey,
    record: Reschedule,
    written: RescheduleWritten | None,
    state: ControlState,
    after: Progress,
) -> Reschedule:
    """Returns a record's next state, once frames express it, or never will.

    If the second of the old due is sealed, no cancel can express it: the record does, until nothing
    can arrive for that due. And a message that was reported as lost with its frame comes at no due:
    a copy may be under way.
    """
    if record.is_written:
        return record
    if written is not None and written.to_ms == record.to_ms and _is_in_v(written.copy, after):
        if written.cancel is None:
            return _withdrawing(record, key.due_ms)
        if _is_in_v(written.cancel, after):
            return replace(record, is_written=True)
    if (record.place.wheel, record.place.seq) in state.lost:
        return _withdrawing(record, record.to_ms)
    return record


def _withdrawing(record: Reschedule, due_ms: int) -> Reschedule:
    """Returns the record as withdrawing this due alone, without further frames."""
    return replace(record, is_written=True, passed=(*record.passed, due_ms))


def _put_off(record: Reschedule, after: Progress, now_ms: int) -> Reschedule:
    """Returns the record with a later due, not below the floor."""
    passed = (*_still_passed(record, after), record.to_ms)
    by_ms = PUT_OFF_MS << min(len(passed) - 1, _DOUBLINGS)
    to_ms = max(max(now_ms, after.due_ms) + by_ms, after.floor * 1000)
    return replace(record, passed=passed, to_ms=to_ms)


def _still_passed(record: Reschedule, after: Progress) -> tuple[int, ...]:
    """Returns passed dues that still matter: nothing arrives below the floor."""
    return tuple(due_ms for due_ms in record.passed if due_ms // 1000 >= after.floor)


def _is_in_v(frame: tuple[WheelId, int], after: Progress) -> bool:
    wheel, seq = frame
    return seq <= after.seq(wheel)
