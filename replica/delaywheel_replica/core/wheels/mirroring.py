"""How a member judges frames of a wheel that it does not write.

| the wheel is | frames | then |
|---|---|---|
| this node's current one | any | nothing: it has one writer |
| this node's, and not opened yet | any | nothing: it has none |
| any | not requested from their sender, and not pushed by their origin | nothing |
| without this storage among its members (once it is closed: its holders) | any | nothing |
| closed at T | beyond T | dropped; if they were pushed, the origin is refused |
| promised away | beyond the leader's fill | dropped; if they were pushed, the origin is refused |
| any of these or other | all else | may be accepted |

Of those that may be accepted, the ones that follow on what is held are mirrored, in order; those
already held are skipped; those behind a gap are dropped, to be fetched. Missing ones below are put
in their places, which a promise does not forbid: its answer reports the greatest seq that has a row
here, and no end is found below it.

Before that, frames that no holder can have are left out (`believable`): those without content
although their second is not finished, and those for a second that lies further ahead than any
message is accepted for.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.frames.bundle import NO_BUNDLE, FrameBundle
from delaywheel_replica.core.node.events import HeldWheel
from delaywheel_replica.core.protocol.messages import Frames


@dataclass(frozen=True, slots=True)
class MirrorVerdict:
    """What to do with received frames.

    Attributes:
        mirror: Frames to write behind what is held.
        repair: Frames to put in the places of missing ones.
        refused: They were pushed, and their wheel accepts nothing more.
        answer: They were pushed, and nothing is written: the origin must learn what is held.
    """

    mirror: FrameBundle = NO_BUNDLE
    repair: FrameBundle = NO_BUNDLE
    refused: bool = False
    answer: bool = False


AHEAD_SECONDS: Final = 86_400
"""How far clocks may differ, beyond a wheel's span, before frames are considered damaged.

An origin writes nothing beyond half of that, by the clock on which it agrees with the others.
"""


def believable(frames: Frames, *, floor: int, now_slot: int) -> Frames:
    """Returns the message without frames that are not plausible.

    Args:
        frames: The frames received.
        floor: The committed floor that the own cleaner has read: only frames of slots below may be
            without content.
        now_slot: The own clock's slot.
    """
    last_slot = now_slot + frames.card.span_seconds + AHEAD_SECONDS
    bundle = frames.frames
    if bundle.is_whole and max(bundle.rows["slot"].tolist(), default=0) <= last_slot:
        return frames
    slots = bundle.rows["slot"].astype(np.int64)
    is_finished = slots < floor
    believed = (slots <= last_slot) & (bundle.has_content | is_finished)
    believed |= bundle.rows["length"] == 0
    return frames if believed.all() else replace(frames, frames=bundle.chosen(believed))


def judge(
    frames: Frames,
    held: HeldWheel | None,
    *,
    is_holder: bool,
    own_open: WheelId | None,
    fenced_upto: int,
    fill: int | None,
    closed_at: int | None,
) -> MirrorVerdict:
    """Decides what to do with these frames.

    Args:
        frames: The frames received, ascending.
        held: What is held of their wheel; None: nothing.
        is_holder: This node is a member of it, or copies it since it is closed.
        own_open: Its current own wheel.
        fenced_upto: The highest number of the wheel's node that it promised to refuse; 0: none.
        fill: How far a leader has the wheel fetched all the same; None: not at all.
        closed_at: The committed end; None: the wheel is not closed.
    """
    card = frames.card
    if card.wheel == own_open or not is_holder:
        return MirrorVerdict()
    limit = closed_at
    if closed_at is None and card.wheel.number <= fenced_upto:
        limit = fill or 0
    bundle = frames.frames
    mirror, repair = NO_BUNDLE, NO_BUNDLE
    if len(bundle):
        mirror = bundle.following(1 if held is None else held.applied + 1, limit)
        repair = _missing(bundle, NO_SEQS if held is None else held.missing, closed_at)
    is_pushed = frames.request == 0
    refused = is_pushed and limit is not None and len(bundle) > 0 and bundle.last_seq > limit
    return MirrorVerdict(
        mirror=mirror,
        repair=repair,
        refused=refused,
        answer=is_pushed and not (len(mirror) or len(repair) or refused),
    )


def _missing(bundle: FrameBundle, missing: SeqSet, closed_at: int | None) -> FrameBundle:
    """Returns the missing frames, up to the end."""
    last_seq = bundle.last_seq if closed_at is None else min(bundle.last_seq, closed_at)
    missing = missing.within(bundle.first_seq, last_seq)
    if not missing:
        return NO_BUNDLE
    wanted = np.zeros(len(bundle), np.bool_)
    for first, last in missing.spans:
        begin, end = bundle.seqs.searchsorted([first, last + 1])
        wanted[begin:end] = True
    return bundle.chosen(wanted)
