"""How a member judges frames of a wheel that it does not write.

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

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.frames.bundle import NO_BUNDLE, FrameBundle
from delaywheel_replica.core.node.events import Held
from delaywheel_replica.core.protocol.messages import Frames


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do with received frames.

    Attributes:
        mirror: to be written behind what is held.
        repair: to be put in the places of lacking ones.
        refused: they were pushed, and no more of their wheel is taken.
        answer: they were pushed, and nothing is written: the origin is to know what is held.
    """

    mirror: FrameBundle = NO_BUNDLE
    repair: FrameBundle = NO_BUNDLE
    refused: bool = False
    answer: bool = False


AHEAD_SECONDS: Final = 86_400
"""Clocks may differ by so much, beyond a wheel's span, before its frames are taken for damaged."""


def believable(frames: Frames, *, finished_below: int, now_slot: int) -> Frames:
    """Returns the message without frames that are not plausible.

    Args:
        frames: as they came.
        finished_below: the slot below which frames may be without content.
        now_slot: of the own clock.
    """
    last_slot = now_slot + frames.card.span_seconds + AHEAD_SECONDS
    bundle = frames.frames
    if bundle.is_whole and max(bundle.rows["slot"].tolist(), default=0) <= last_slot:
        return frames
    slots = bundle.rows["slot"].astype(np.int64)
    is_finished = slots < finished_below
    believed = (slots <= last_slot) & (bundle.has_content | is_finished)
    believed |= bundle.rows["length"] == 0
    return frames if believed.all() else replace(frames, frames=bundle.chosen(believed))


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
    """Decides what to do with these frames.

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
    bundle = frames.frames
    mirror, repair = NO_BUNDLE, NO_BUNDLE
    if len(bundle):
        mirror = bundle.following(1 if held is None else held.applied + 1, limit)
        repair = _lacking(bundle, NO_SEQS if held is None else held.lacking, closed_at)
    is_pushed = frames.request == 0
    refused = is_pushed and limit is not None and len(bundle) > 0 and bundle.last_seq > limit
    return Verdict(
        mirror=mirror,
        repair=repair,
        refused=refused,
        answer=is_pushed and not (len(mirror) or len(repair) or refused),
    )


def _lacking(bundle: FrameBundle, lacking: SeqSet, closed_at: int | None) -> FrameBundle:
    """Returns the missing frames, up to the end."""
    last_seq = bundle.last_seq if closed_at is None else min(bundle.last_seq, closed_at)
    lacking = lacking.within(bundle.first_seq, last_seq)
    if not lacking:
        return NO_BUNDLE
    wanted = np.zeros(len(bundle), np.bool_)
    for first, last in lacking.spans:
        begin, end = bundle.seqs.searchsorted([first, last + 1])
        wanted[begin:end] = True
    return bundle.chosen(wanted)
