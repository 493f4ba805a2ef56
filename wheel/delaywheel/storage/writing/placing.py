"""Whether frames may be put in their places in a copy: intact, and nothing else lies there."""

from collections.abc import Sequence

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.storage.frames.bundle import FrameBundle, FrameCopy
from delaywheel.storage.frames.checking import damage_of, good_frames
from delaywheel.storage.frames.format import DamageReason, Frame, FrameDamaged
from delaywheel.storage.reading.reader import WheelReader


def checked_frame(wheel: WheelId, frame: FrameBundle) -> FrameBundle:
    """Returns the only frame of a bundle, if it is intact.

    Raises:
        FrameDamaged: Its bytes are damaged, or do not match seq and row.
    """
    if not good_frames(wheel, frame).frames:
        raise damage_of(wheel, frame)
    return frame


def lies_there(seq: int) -> FrameDamaged:
    """Returns the fault of a frame whose place is occupied by another one."""
    return FrameDamaged(DamageReason.MISPLACED, f"seq {seq}: another frame lies there")


def not_finished(seq: int) -> FrameDamaged:
    """Returns the fault of a frame that came without content although it is not finished here."""
    return FrameDamaged(DamageReason.GONE, f"seq {seq}: without content, and not finished here")


class Occupied:
    """Finds the frames that lie in given places, according to a wheel's index."""

    def __init__(self, reader: WheelReader) -> None:
        self._reader = reader

    def taken(self, copies: Sequence[FrameCopy]) -> set[int]:
        """Returns the seqs whose places overlap with another, possibly intact frame."""
        return {copy.seq for copy in copies if copy.content and self._is_taken(copy)}

    def _is_taken(self, copy: FrameCopy) -> bool:
        seqs, rows = self._reader.slot_places(copy.slot)
        begins = rows["offset"].astype(np.int64)
        meets = begins + rows["length"] > copy.offset
        meets &= begins < copy.offset + len(copy.content)
        return any(seq != copy.seq and self._may_be_good(seq) for seq in seqs[meets].tolist())

    def _may_be_good(self, seq: int) -> bool:
        found = self._reader.frame(seq)
        return isinstance(found, Frame) or found.reason is DamageReason.UNREADABLE
