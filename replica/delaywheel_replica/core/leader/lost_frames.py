"""Decides which frames are lost: those that no member can read.

Nothing is given up because it cannot be found: a frame is lost only when every holder of its wheel
has reported it as missing. docs/PROTOCOL.md, "Lost frames", has the table. Then a record
``lost/<wheel>/<seq>`` states it: the frame is skipped, whichever node leads, and holds back neither
V nor an end nor the floor.

Frames that are taken, or lie below an end, but that no member reports, must be asked for: otherwise
no node would fetch them on its own, and none would report them as missing.

Everything works on ranges: a million frames in a row are given up as quickly as one.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel_replica.core.leader.holders import member_heartbeats
from delaywheel_replica.core.protocol.control import ControlState
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.heartbeat import MAX_SOUGHT, Heartbeat, Promise

MAX_LOST: Final = 1_000
"""Ranges that one transaction gives up."""


@dataclass(frozen=True, slots=True)
class Sought:
    """What is known of frames that were searched for.

    Attributes:
        own: The leader's own node; its heartbeat and what it is missing were reported together.
        answers: Answers to fences: they show what was written.
        lacks: Node -> those of them that it reported as missing.
    """

    own: str
    heartbeats: Mapping[str, Heartbeat]
    answers: Collection[Promise]
    frames: FrameSet
    lacks: Mapping[str, FrameSet]


def frames_lost(state: ControlState, ends: Mapping[WheelId, int], sought: Sought) -> FrameSet:
    """Returns lost frames that are not recorded yet, as many as can be recorded quickly.

    The end of each registered wheel is V, or T if that is known.
    """
    lost: dict[WheelId, SeqSet] = {}
    left = MAX_LOST
    for wheel, looked_for in sought.frames.items():
        if wheel not in state.wheels or not left:
            continue
        written = looked_for.within(1, _written_to(state, wheel, ends, sought))
        seqs = written - state.lost.seqs(wheel)
        lost[wheel] = (_lacked_by_all(state, wheel, seqs, sought) if seqs else seqs).head(left)
        left -= len(lost[wheel].spans)
    return FrameSet.of_wheels(lost)


def _written_to(
    state: ControlState, wheel: WheelId, ends: Mapping[WheelId, int], sought: Sought
) -> int:
    """Returns the seq up to which the wheel was written, as far as any node knows.

    A committed limit proves it too: an earlier leader heard of a member that held them. So does the
    node that writes the wheel, but no other node's heartbeat: one wrong number would give up all
    that is still to come. For a wheel that is no longer in use, answers to fences show what others
    hold.
    """
    origin = sought.heartbeats.get(wheel.node)
    record = state.wheels[wheel]
    is_origins = origin is not None and origin.storage == record.members.get(wheel.node)
    written = origin.wheels.get(wheel) if origin is not None and is_origins else None
    return max(
        ends.get(wheel, 0),
        record.limit,
        0 if written is None else written.applied,
        *(answer.applied.get(wheel, 0) for answer in sought.answers),
    )


def _lacked_by_all(state: ControlState, wheel: WheelId, seqs: SeqSet, sought: Sought) -> SeqSet:
    record = state.wheels[wheel]
    for node in state.holders(record):
        seqs &= sought.lacks.get(node, NO_FRAMES).seqs(wheel)
    for node, heartbeat in member_heartbeats(state, record, sought.heartbeats).items():
        if node == sought.own:
            continue
        if wheel in heartbeat.verifying:
            return NO_SEQS
        if wheel in heartbeat.wheels:
            seqs -= heartbeat.wheels[wheel].shown
    return seqs


def frames_missing(
    state: ControlState, ends: Mapping[WheelId, int], heartbeats: Mapping[str, Heartbeat]
) -> FrameSet:
    """Returns frames that must exist but that no member shows; the first ones if many.

    The end of each registered wheel is V, or T if that is known.
    """
    missing: dict[WheelId, SeqSet] = {}
    for wheel, record in state.wheels.items():
        members = member_heartbeats(state, record, heartbeats).values()
        shown = max((b.wheels[wheel].applied for b in members if wheel in b.wheels), default=0)
        wanted = NO_SEQS.with_span(shown + 1, ends.get(wheel, 0)) - state.lost.seqs(wheel)
        missing[wheel] = wanted.head(MAX_SOUGHT)
    return FrameSet.of_wheels(missing)
