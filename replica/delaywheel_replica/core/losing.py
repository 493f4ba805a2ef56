"""Frames that nobody can read any more.

Nothing is given up because it cannot be found: a frame is lost only when every member of its wheel
has said that it lacks it. A member that was replaced lacks everything; with one member, its own
word is enough. Then a record ``lost/<wheel>/<seq>`` says so: the frame is skipped, whoever leads,
and holds back neither V nor an end nor the floor.

| a frame | is |
|---|---|
| that a member's newest beat shows as held | not lost, whatever was said before |
| of a wheel that a member is verifying | not lost: what it said before may be true no more |
| that was never written, as far as anyone knows | not lost: it may still come |
| that all members lack otherwise | lost |

What was taken account of, or belongs below an end, but that no member shows, has to be asked for:
nobody would fetch it by itself, so nobody would say that it is lacking.
"""

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice

from delaywheel.identity import WheelId
from delaywheel_replica.core.beat import MAX_SOUGHT, Beat, FenceAnswer, WheelBeat
from delaywheel_replica.core.control import ControlState
from delaywheel_replica.core.frames import FrameName, FrameRange, FrameSet
from delaywheel_replica.core.holding import member_beats


@dataclass(frozen=True, slots=True)
class Sought:
    """What is known of frames that were looked for.

    Attributes:
        own: the leader's own node; its beat and what it lacks were told together.
        beats: the newest beat of each node.
        answers: to fences: they tell what was written.
        lacks: frame -> the members that said they lack it.
    """

    own: str
    beats: Mapping[str, Beat]
    answers: Collection[FenceAnswer]
    lacks: Mapping[FrameName, AbstractSet[str]]


def frames_lost(
    state: ControlState, ends: Mapping[WheelId, int], sought: Sought
) -> list[FrameName]:
    """The frames that are lost and not recorded as such, in order.

    Args:
        state: what is committed.
        ends: of each registered wheel V, or T where that is known.
        sought: what is known of frames that were looked for.
    """
    return sorted(
        frame
        for frame, nodes in sought.lacks.items()
        if frame not in state.lost
        and frame[0] in state.wheels
        and _was_written(state, frame, ends, sought)
        and _all_lack(state, frame, nodes, sought)
    )


def _was_written(
    state: ControlState, frame: FrameName, ends: Mapping[WheelId, int], sought: Sought
) -> bool:
    """A committed fill says it, too: an earlier leader heard of a member that held them."""
    wheel, seq = frame
    return (
        seq <= max(ends.get(wheel, 0), state.wheels[wheel].fill)
        or any(wheel in b.wheels and seq <= b.wheels[wheel].applied for b in sought.beats.values())
        or any(seq <= answer.applied.get(wheel, 0) for answer in sought.answers)
    )


def _all_lack(
    state: ControlState, frame: FrameName, nodes: AbstractSet[str], sought: Sought
) -> bool:
    wheel, seq = frame
    record = state.wheels[wheel]
    if not nodes >= state.remaining(record).keys():
        return False
    return not any(
        wheel in beat.verifying or _shows(beat.wheels.get(wheel), seq)
        for node, beat in member_beats(state, record, sought.beats).items()
        if node != sought.own
    )


def _shows(told: WheelBeat | None, seq: int) -> bool:
    return told is not None and told.shows(seq)


def frames_missing(
    state: ControlState, ends: Mapping[WheelId, int], beats: Mapping[str, Beat]
) -> frozenset[FrameName]:
    """The first frames of each wheel that must be there, and that no member shows.

    Args:
        state: what is committed.
        ends: of each registered wheel V, or T where that is known.
        beats: the newest beat of each node.
    """
    missing: set[FrameName] = set()
    for wheel, record in state.wheels.items():
        members = member_beats(state, record, beats).values()
        shown = max((b.wheels[wheel].applied for b in members if wheel in b.wheels), default=0)
        wanted = FrameSet([FrameRange(wheel, shown + 1, ends.get(wheel, 0))])
        missing.update(islice(wanted - state.lost.of_wheel(wheel), MAX_SOUGHT))
    return frozenset(missing)
