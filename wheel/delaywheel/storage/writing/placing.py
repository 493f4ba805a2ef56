"""Places of frames in a copy, whether another frame occupies them, and damaged frames."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.storage.frames.bundle import FrameBundle
from delaywheel.storage.frames.checking import damage_of, good_frames
from delaywheel.storage.frames.format import DamageReason, Frame, FrameDamaged
from delaywheel.storage.frames.rows import raw_rows
from delaywheel.storage.reading.reader import WheelReader


class FramePlace(NamedTuple):
    """A frame to be written, and where; a frame without content has only its row written."""

    seq: int
    row: bytes
    slot: int
    offset: int
    content: bytes


def place_of(frame: FrameBundle) -> FramePlace:
    """Returns where the only frame of a bundle goes."""
    (copy,) = frame.copies()
    slot, offset, _, _ = raw_rows(copy.row)[0].item()
    return FramePlace(copy.seq, copy.row, slot, offset, copy.content)


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

    def taken(self, places: Sequence[FramePlace]) -> set[int]:
        """Returns the seqs whose places overlap with another, possibly intact frame."""
        return {place.seq for place in places if place.content and self._is_taken(place)}

    def _is_taken(self, place: FramePlace) -> bool:
        seqs, rows = self._reader.slot_places(place.slot)
        begins = rows["offset"].astype(np.int64)
        meets = begins + rows["length"] > place.offset
        meets &= begins < place.offset + len(place.content)
        return any(seq != place.seq and self._may_be_good(seq) for seq in seqs[meets].tolist())

    def _may_be_good(self, seq: int) -> bool:
        found = self._reader.frame(seq)
        return isinstance(found, Frame) or found.reason is DamageReason.UNREADABLE
