"""The unreadable frames of a copy, for the threads that write and sync it."""

import threading

from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import ROWS_PER_SEGMENT


class MissingFrames:
    """A set of seqs; any thread may read or change it.

    Attributes:
        seqs: The missing frames; replaced as a whole.
    """

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
