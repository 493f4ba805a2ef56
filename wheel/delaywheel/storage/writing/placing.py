"""What a copy is missing, and whether frames may be put in their places.

They may if they are intact, and nothing else lies there.
"""

import threading
from collections.abc import Sequence

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import ROWS_PER_SEGMENT
from delaywheel.storage.frames.bundle import FrameBundle, FrameCopy
from delaywheel.storage.frames.checking import damage_of, good_frames
from delaywheel.storage.frames.format import DamageReason, Frame, FrameDamaged
from delaywheel.storage.reading.reader import WheelReader


class MissingFrames:
    """A copy's unreadable frames, for the threads that write and sync it; replaced as a whole."""

    def __init__(self) -> None:
        self.seqs = NO_SEQS
        self._lock = threading.Lock()
        self._looked_to = 0  # the last one that `some` has returned

    def add(self, seqs: SeqSet) -> None:
        """Notes that these frames cannot be read."""
        with self._lock:
            self.seqs |= seqs

    def remove(self, seqs: SeqSet) -> None:
        """Notes that these frames can be read again, or are no longer needed."""
        with self._lock:
            self.seqs -= seqs

    def cut_behind(self, last_seq: int) -> None:
        """Keeps only seqs up to the last frame."""
        with self._lock:
            self.seqs = self.seqs.within(1, last_seq)

    def some(self) -> SeqSet:
        """Returns all, or a bounded part; repeated calls go through all parts in turn."""
        missing = self.seqs
        if len(missing) <= ROWS_PER_SEGMENT:
            return missing
        behind = missing.within(self._looked_to + 1, missing.last) or missing
        part = behind.least(ROWS_PER_SEGMENT)
        self._looked_to = part.last
        return part


def checked_frame(wheel: WheelId, frame: FrameBundle) -> FrameBundle:
    """Returns the only frame of a bundle; raises FrameDamaged unless it matches seq and row."""
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
