"""Checks a journal's frames as they come from a peer or lie in a file: whole ones in a row.

Frames carry their lengths, so a row of them is walked: each head is believed once its checksum is
right, and says where the next frame begins.
"""

from typing import NamedTuple

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import Buffer
from delaywheel.storage.frames.format import DamageReason, FrameDamaged
from delaywheel.storage.journal.format import decode_head, has_body


class WholeFrames(NamedTuple):
    """Frames that follow on one another, all whole.

    Attributes:
        edges: Where each begins, and where the last one ends.
        accepted_at_ms: The latest time at which one was accepted; 0: there is none.
        damage: Why there are no more; None: the bytes end there.
    """

    edges: list[int]
    accepted_at_ms: int
    damage: FrameDamaged | None

    def __len__(self) -> int:
        """The number of frames."""
        return len(self.edges) - 1


def whole_frames(content: Buffer, *, wheel: WheelId, first_seq: int, begin: int = 0) -> WholeFrames:
    """Returns the frames from ``begin`` on, of which the first must have that seq."""
    edges, seq, accepted_at_ms = [begin], first_seq, 0
    while edges[-1] < len(content):
        at = edges[-1]
        try:
            head = decode_head(content, at, wheel=wheel)
        except FrameDamaged as damage:
            return WholeFrames(edges, accepted_at_ms, damage)
        if head.seq != seq:
            other = FrameDamaged(DamageReason.MISPLACED, f"seq {head.seq} in place of {seq}")
            return WholeFrames(edges, accepted_at_ms, other)
        if not has_body(head, content, at):
            is_short = at + head.length_bytes > len(content)
            reason = DamageReason.SHORT if is_short else DamageReason.CHECKSUM
            return WholeFrames(edges, accepted_at_ms, FrameDamaged(reason, "its body"))
        accepted_at_ms = max(accepted_at_ms, head.accepted_at_ms)
        edges.append(at + head.length_bytes)
        seq += 1
    return WholeFrames(edges, accepted_at_ms, None)
