"""Fence, recover, close: how a wheel that nobody writes any more gets its end.

A wheel is to be closed when its node's newest beat knows its number and uses it neither as its
open wheel nor as its spare. Then its members promise to take no more of that node's wheels up to
X and answer with what they hold; of enough answers the greatest is T; when enough members hold
everything through T, the leader commits ``wheel/X closed at T``, and only what is committed
counts.

| answers of members | holders of all through T | result |
|---|---|---|
| fewer than R complete, not all N | any | `AnswersWanted` |
| R complete, or all N | fewer than W | `HoldersWanted(T)` |
| R complete, or all N | W, or all that were not replaced; or T = 0 | `Close(T)` |

A member that was replaced (it answers with another storage) holds nothing of the wheel: it counts
only towards "all N".
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from delaywheel.identity import WheelId
from delaywheel_replica.core.beat import Beat
from delaywheel_replica.core.control import ControlState, WheelRecord
from delaywheel_replica.core.quorum import held_by


@dataclass(frozen=True, order=True, slots=True)
class Fence:
    """A request to every member: promise to take no more of this node's wheels up to `upto`."""

    origin: str
    upto: int


@dataclass(frozen=True, slots=True)
class FenceAnswer:
    """A member's promise, saved before it was told, and what it holds.

    Attributes:
        node: the member.
        storage: uuid of its data folder.
        fence: what it promised.
        applied: wheel -> the seq up to which it holds it; a wheel not named: nothing.
        complete: it holds all that it ever acknowledged.
    """

    node: str
    storage: str
    fence: Fence
    applied: Mapping[WheelId, int] = field(default_factory=dict)
    complete: bool = True

    def covers(self, wheel: WheelId) -> bool:
        """Whether the promise is about this wheel."""
        return wheel.node == self.fence.origin and wheel.number <= self.fence.upto


@dataclass(frozen=True, slots=True)
class AnswersWanted:
    """Too few members have answered to know the end."""


@dataclass(frozen=True, slots=True)
class HoldersWanted:
    """The end is known, but too few members hold everything through it."""

    final_seq: int


@dataclass(frozen=True, slots=True)
class Close:
    """The wheel may be closed at this seq."""

    final_seq: int


def wheels_to_close(state: ControlState, beats: Mapping[str, Beat]) -> list[WheelId]:
    """The open wheels that their nodes use no more, in order.

    A wheel above one that its node still uses has to wait: promises are kept as one highest
    number per node, so fencing it would fence the wheel in use.

    Args:
        state: what is committed.
        beats: the newest beat of each node.
    """
    return sorted(
        wheel
        for wheel, record in state.wheels.items()
        if record.closed_at is None and _is_left(state, wheel, record, beats.get(wheel.node))
    )


def _is_left(state: ControlState, wheel: WheelId, record: WheelRecord, beat: Beat | None) -> bool:
    if beat is None or not is_registered(state, beat):
        return False
    if any(named.number <= wheel.number for named in beat.named):
        return False
    # A node with a new disk knows none of its old numbers and will never use them.
    replaced = record.members.get(wheel.node) != beat.storage
    return replaced or wheel.number <= beat.last_number


def is_registered(state: ControlState, beat: Beat) -> bool:
    """Whether the beat comes from the one storage that its node id stands for."""
    known = state.nodes.get(beat.node)
    return known is not None and known.storage == beat.storage


def fences_wanted(
    wheels: Collection[WheelId], answers: Collection[FenceAnswer], state: ControlState
) -> list[Fence]:
    """One fence for each node whose wheels cannot be closed for lack of answers."""
    upto: dict[str, int] = {}
    for wheel in wheels:
        if isinstance(closing(wheel, state.wheels[wheel], answers), AnswersWanted):
            upto[wheel.node] = max(wheel.number, upto.get(wheel.node, 0))
    return sorted(Fence(origin, number) for origin, number in upto.items())


def closing(
    wheel: WheelId, record: WheelRecord, answers: Collection[FenceAnswer]
) -> AnswersWanted | HoldersWanted | Close:
    """How far the closing of a wheel is, by the newest answers of its members.

    Args:
        wheel: to be closed.
        record: its registration, which pins its members.
        answers: at most one of each node for one origin; a newer one replaces the older.
    """
    answered = {
        answer.node: answer
        for answer in answers
        if answer.node in record.members and answer.covers(wheel)
    }
    same = [answer for node, answer in answered.items() if answer.storage == record.members[node]]
    complete = sum(answer.complete for answer in same)
    if complete < record.required_answers and len(answered) < len(record.members):
        return AnswersWanted()
    held = [answer.applied.get(wheel, 0) for answer in same]
    final_seq = max(held, default=0)
    replaced = len(answered) - len(same)
    holders_wanted = max(1, min(record.min_insync, len(record.members) - replaced))
    if held_by(held, holders_wanted) < final_seq:
        return HoldersWanted(final_seq)
    return Close(final_seq)
