"""Another due for a pending message: never both, never none.

One control record, `reschedule/<id>/<due>`, decides. It is committed in a leader's transaction, so
the message cannot be taken at its old due in between, and it states the other due. Until frames
express the same, the record stands, and binds every leader:

| state | (id, due) | (id, to) | next |
|---|---|---|---|
| pending | will be forwarded | is not there | decided; done; cancelled |
| decided | is withdrawn by the record | is to be written by the leader | written; put off; lost |
| put off | the same | has a later `to`; the one that passed is withdrawn | written; put off; lost |
| lost | the same; reported as lost | is withdrawn as one that passed | settled |
| written | is cancelled by a frame <= V, or by this | will be forwarded: a frame <= V | settled |
| settled | the same; the record is gone | a message like any other | - |

| it is | by a transaction |
|---|---|
| decided | that leaves w before both dues, while a copy of (id, due) is <= V, and no cancel |
| put off | that takes w past `to` while no copy of (id, to) is <= V |
| written | with a copy of (id, to), and a cancel of (id, due) with its mark unless sealed, <= V |
| lost | with the frame of (id, due) reported as lost, before it is written |
| written, too | that takes w past `to`, a copy of (id, to) being <= V: that is forwarded |
| settled | with the floor above every due that passed, or was sealed |

Never both: from the record on, (id, due) is withdrawn, first by the record and then by a cancel <=
V; if several dues were given, all but the last are withdrawn, until no frame can arrive for them.
Never none: until a copy of (id, to) is <= V, no due passes without it, and the floor stays below
the old second, from which the copy is made, and the new one.

Never by a leader that does not know the record: such a release would ignore it, and forward the
message at its old due too. The first record is accompanied by a mark at which such a release stops
reading, so it never leads again (core/protocol/control.py). So that the mark surprises no node, it
is written only when every node is known to have a release that knows it; after that nothing has to
be checked.

Cancelled messages are not rescheduled, because the leader looks for cancels up to what it admits;
rescheduled ones are not reported as cancelled, because the record stands or its mark is <= V
(core/leader/cancel.py). Repeating a request changes nothing: the record, or the mark, shows where
the message is.
"""

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.control import (
    REMOVED,
    ControlRecord,
    ControlState,
    needs_record,
    reschedule_record,
)
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.reschedules import (
    MessageKey,
    Reschedule,
    RescheduleWish,
    RescheduleWritten,
)

MOST: Final = 256
"""How many records stand at once, each for about a second. Further requests wait for their turn."""

KNOWN_SINCE: Final = 2
"""The version of control records that knows of reschedules."""

PUT_OFF_MS: Final = 1_000
"""By how much a due that has passed is put off, doubled each time."""

_DOUBLINGS: Final = 6


@dataclass(frozen=True, slots=True)
class Rescheduling:
    """What a leader knows about reschedules besides the control topic.

    Attributes:
        wishes: Requests of which no cancel is admitted, and whose seconds could be read.
        written: What frames express already.
        absent: Decided messages whose due this transaction passes without a copy <= V.
    """

    wishes: Collection[RescheduleWish] = ()
    written: Collection[RescheduleWritten] = ()
    absent: frozenset[MessageKey] = frozenset()


def reschedule_records(
    state: ControlState,
    after: Progress,
    situation: Rescheduling,
    heartbeats: Mapping[str, Heartbeat],
    now_ms: int,
) -> list[ControlRecord]:
    """Returns the records by which a transaction decides, puts off and settles.

    Args:
        state: What is committed.
        after: The progress after the transaction, with the committed floor.
        situation: What else is known.
        heartbeats: The newest of each node.
        now_ms: The leader's clock.
    """
    records = []
    written = {each.key: each for each in situation.written}
    for key, stands in sorted(state.reschedules.items()):
        then = _next(key, stands, written.get(key), state, after)
        if not then.is_written and key in situation.absent:
            then = _put_off(stands, after, now_ms)
        elif not then.is_written and stands.to_ms <= after.due_ms:  # so its copy was forwarded
            then = _withdrawing(stands, key[1])
        if then.is_written and not _still_passed(then, after):
            records.append(reschedule_record(key, None))
        elif then != stands:
            records.append(reschedule_record(key, then))
    if situation.wishes and not nodes_behind(state, heartbeats):
        records += _deciding(state.apply_all(records), situation.wishes, after)
    return records


def _deciding(
    state: ControlState, wishes: Collection[RescheduleWish], after: Progress
) -> list[ControlRecord]:
    """Returns records that decide as many requests as there is room for."""
    records: list[ControlRecord] = []
    room, touched = MOST - len(state.reschedules), _touched(state)
    for wish in wishes:
        if room > 0 and _may_be_decided(state, wish, after, touched):
            records.append(reschedule_record(wish.key, Reschedule(wish.to_ms, wish.place)))
            touched |= _dues_of(wish)
            room -= 1
    if records and state.needs < KNOWN_SINCE:
        records.insert(0, needs_record(KNOWN_SINCE))
    return records


def nodes_behind(state: ControlState, heartbeats: Mapping[str, Heartbeat]) -> list[str]:
    """Returns the nodes that may have a release which would ignore a record.

    Empty once the mark stands: such a release no longer leads, wherever it is started.
    """
    if state.needs >= KNOWN_SINCE:
        return []
    removed = {node for node, record in state.nodes.items() if record.storage == REMOVED}
    return sorted(
        node
        for node in (state.nodes.keys() | heartbeats.keys()) - removed
        if node not in heartbeats or heartbeats[node].control_version < KNOWN_SINCE
    )


def open_wishes(
    state: ControlState, wishes: Collection[RescheduleWish], after: Progress
) -> list[RescheduleWish]:
    """Returns the requests that a transaction to that progress may decide, within its room.

    So no cancels of other requests are looked for. What this transaction settles makes room in the
    next one.
    """
    room, touched = max(0, MOST - len(state.reschedules)), _touched(state)
    may_be = (wish for wish in wishes if _may_be_decided(state, wish, after, touched))
    return list(islice(may_be, room))


def _may_be_decided(
    state: ControlState, wish: RescheduleWish, after: Progress, touched: AbstractSet[MessageKey]
) -> bool:
    (_, due_ms), to_ms = wish.key, wish.to_ms
    if state.progress is None or after.ahead or to_ms == due_ms:
        return False
    if min(due_ms, to_ms) <= after.due_ms + 1:  # of w + 1 a part may be done
        return False
    if wish.place.seq > state.progress.seq(wish.place.wheel):
        return False
    return touched.isdisjoint(_dues_of(wish))


def _dues_of(wish: RescheduleWish) -> set[MessageKey]:
    return {wish.key, (wish.key[0], wish.to_ms)}


def _touched(state: ControlState) -> set[MessageKey]:
    """Returns all that records say of: the old due, the new one, and those that passed."""
    return {
        (key[0], due_ms)
        for key, stands in state.reschedules.items()
        for due_ms in (key[1], stands.to_ms, *stands.passed)
    }


def withdrawn(state: ControlState) -> frozenset[MessageKey]:
    """Returns the messages that no transaction forwards, even without a cancel."""
    keys = set(state.reschedules)
    for (id_, _), stands in state.reschedules.items():
        keys.update((id_, due_ms) for due_ms in stands.passed)
    return frozenset(keys)


def passing(state: ControlState, after: Progress) -> list[MessageKey]:
    """Returns decided messages whose new due a transaction to that progress passes."""
    if state.progress is None:
        return []
    return [
        key
        for key, stands in state.reschedules.items()
        if state.progress.due_ms < stands.to_ms <= after.due_ms and not stands.is_written
    ]


def overdue(state: ControlState) -> dict[Position, int]:
    """Returns sources of copies that were put off more than once, with their seconds.

    The leader's node may be unable to read such a frame. As everything else in the frame is done,
    nothing else waits for it: without the record it would be neither fetched from another member
    nor given up.
    """
    return {
        stands.place: due_ms // 1000
        for (_, due_ms), stands in state.reschedules.items()
        if not stands.is_written and len(stands.passed) > 1
    }


def floor_below(state: ControlState, floor: int) -> int:
    """Returns the floor, at most the least slot that a reschedule reads from or writes to."""
    dues_ms = [
        min(due_ms, stands.to_ms)
        for (_, due_ms), stands in state.reschedules.items()
        if not stands.is_written
    ]
    return min([floor, *(due_ms // 1000 for due_ms in dues_ms)])


def _next(
    key: MessageKey,
    stands: Reschedule,
    written: RescheduleWritten | None,
    state: ControlState,
    after: Progress,
) -> Reschedule:
    """Returns a record's next state, once frames express it, or never will.

    If the second of the old due is sealed, no cancel can express it: the record does, until nothing
    can arrive for that due. And a message that was reported as lost with its frame comes at no due:
    a copy may be under way.
    """
    if stands.is_written:
        return stands
    if written is not None and written.to_ms == stands.to_ms and _is_in_v(written.copy, after):
        if written.cancel is None:
            return _withdrawing(stands, key[1])
        if _is_in_v(written.cancel, after):
            return replace(stands, is_written=True)
    if (stands.place.wheel, stands.place.seq) in state.lost:
        return _withdrawing(stands, stands.to_ms)
    return stands


def _withdrawing(stands: Reschedule, due_ms: int) -> Reschedule:
    """Returns the record as withdrawing this due alone, without further frames."""
    return replace(stands, is_written=True, passed=(*stands.passed, due_ms))


def _put_off(stands: Reschedule, after: Progress, now_ms: int) -> Reschedule:
    passed = _still_passed(stands, after)
    by_ms = PUT_OFF_MS << min(len(passed), _DOUBLINGS)
    to_ms = max(now_ms, after.due_ms) + by_ms
    return replace(stands, to_ms=to_ms, passed=(*passed, stands.to_ms))


def _still_passed(stands: Reschedule, after: Progress) -> tuple[int, ...]:
    """Returns passed dues that still matter: nothing arrives below the floor."""
    return tuple(due_ms for due_ms in stands.passed if due_ms // 1000 >= after.floor)


def _is_in_v(frame: tuple[WheelId, int], after: Progress) -> bool:
    wheel, seq = frame
    return seq <= after.seq(wheel)
