"""What a member does with frames of a wheel that it does not write.

| the wheel is | frames | then |
|---|---|---|
| the one in hand | any | nothing: it has one writer |
| without this storage among its members | any | nothing |
| closed at T | beyond T | dropped; if they were pushed, the origin is refused |
| promised away | beyond the leader's fill | dropped; if they were pushed, the origin is refused |
| any of these or other | all else | may be taken |

Of those that may be taken, the ones that follow on what is held are mirrored, in their order; those
that are held are passed over; and what comes behind a gap is dropped, to be fetched. Those that are
lacking below are put in their places, which a promise does not forbid: its answer tells of the
greatest seq that has a row here, and no end is found below it.

Before all that, frames are left out (`believable`) that no holder can have: without content, though
their second is not finished; and for a second that lies further ahead than anything is accepted.
"""

from dataclasses import dataclass, replace
from typing import Final

from delaywheel.framecopy import FrameCopy
from delaywheel.identity import WheelId
from delaywheel_replica.core.member_events import Held
from delaywheel_replica.core.peers import Frames


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do with frames that came.

    Attributes:
        mirror: to be written behind what is held.
        repair: to be put in the places of lacking ones.
        refused: they were pushed, and no more of their wheel is taken.
        answer: they were pushed, and nothing is written: the origin is to know what is held.
    """

    mirror: tuple[FrameCopy, ...] = ()
    repair: tuple[FrameCopy, ...] = ()
    refused: bool = False
    answer: bool = False


AHEAD_SECONDS: Final = 86_400
"""Clocks may differ by so much, beyond a wheel's span, before its frames are taken for damaged."""


def believable(frames: Frames, *, finished_below: int, now_slot: int) -> Frames:
    """The message without frames that cannot be so.

    Args:
        frames: as they came.
        finished_below: the slot below which frames may be without content.
        now_slot: of the own clock.
    """
    last_slot = now_slot + frames.card.span_seconds + AHEAD_SECONDS
    kept = tuple(
        copy
        for copy, (slot, length) in ((copy, copy.place()) for copy in frames.frames)
        if not length or (slot <= last_slot and (copy.content or slot < finished_below))
    )
    return frames if len(kept) == len(frames.frames) else replace(frames, frames=kept)


def judge(
    frames: Frames,
    held: Held | None,
    *,
    storage: str,
    node: str,
    own_open: WheelId | None,
    fenced_upto: int,
    fill: int | None,
    closed_at: int | None,
) -> Verdict:
    """What to do with these frames.

    Args:
        frames: as they came, ascending.
        held: what is held of their wheel; None: nothing.
        storage: of this node's data folder.
        node: this node.
        own_open: the wheel that it has in hand.
        fenced_upto: the number up to which it promised the wheel's node to take no more; 0: none.
        fill: up to where a leader has it fetch the wheel all the same; None: not at all.
        closed_at: the committed end; None: the wheel is not closed.
    """
    card = frames.card
    if card.wheel == own_open or card.members.get(node) != storage:
        return Verdict()
    limit = closed_at
    if closed_at is None and card.wheel.number <= fenced_upto:
        limit = fill or 0
    lacking = set(held.lacking) if held is not None else set()
    next_seq = (held.applied if held is not None else 0) + 1
    mirror, repair = [], []
    for frame in frames.frames:
        if frame.seq in lacking and (closed_at is None or frame.seq <= closed_at):
            repair.append(frame)
        elif frame.seq == next_seq and (limit is None or frame.seq <= limit):
            mirror.append(frame)
            next_seq += 1
    is_pushed = frames.request == 0
    refused = is_pushed and limit is not None and any(f.seq > limit for f in frames.frames)
    return Verdict(
        mirror=tuple(mirror),
        repair=tuple(repair),
        refused=refused,
        answer=is_pushed and not (mirror or repair or refused),
    )
