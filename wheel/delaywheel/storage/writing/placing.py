"""What a copy is missing, and whether frames may be put in their places.

They may if they are intact, and nothing else lies there.
"""

import threading

import numpy as np

from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import ROWS_PER_SEGMENT
from delaywheel.storage.frames.bundle import FrameCopy
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


def lies_there(seq: int) -> FrameDamaged:
    """Returns the fault of a frame whose place is occupied by another one."""
    return FrameDamaged(DamageReason.MISPLACED, f"seq {seq}: another frame lies there")


def not_finished(seq: int) -> FrameDamaged:
    """Returns the fault of a frame that came without content although it is not finished here."""
    return FrameDamaged(DamageReason.GONE, f"seq {seq}: without content, and not finished here")


def is_taken(reader: WheelReader, copy: FrameCopy) -> bool:
    """Whether the place of a frame overlaps with that of another, possibly intact one."""
    if not copy.content:
        return False
    seqs, rows = reader.slot_places(copy.slot)
    begins = rows["offset"].astype(np.int64)
    meets = begins + rows["length"] > copy.offset
    meets &= begins < copy.offset + len(copy.content)
    return any(seq != copy.seq and _may_be_good(reader, seq) for seq in seqs[meets].tolist())


def _may_be_good(reader: WheelReader, seq: int) -> bool:
    found = reader.frame(seq)
    return isinstance(found, Frame) or found.reason is DamageReason.UNREADABLE
