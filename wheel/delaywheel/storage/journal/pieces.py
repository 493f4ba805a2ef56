"""Cuts columns into pieces: one for each of several frames, or sections, that are written together.

The bytes of each column are cut once, pieces of all columns are put in order and joined: no numpy
call is made for a frame.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from delaywheel.storage.folder.disk import Buffer
from delaywheel.storage.frames.encode import FrameTopics
from delaywheel.storage.frames.format import topic_entry

ZEROS: Final = [bytes(count) for count in range(8)]


class Pieces:
    """Parts of frames in the order in which they were added, each with a piece for each frame.

    Attributes:
        counts: Each frame's number of rows.
        lengths: How long each frame is so far.
    """

    def __init__(self, firsts: NDArray[np.int64], rows: int) -> None:
        """Begins with nothing.

        Args:
            firsts: The first row of each frame.
            rows: All rows.
        """
        self.firsts = firsts
        self._edges = [*firsts.tolist(), rows]
        self.counts = np.diff(np.array(self._edges))
        self.lengths = np.zeros(len(firsts), np.int64)
        self._parts: list[Sequence[Buffer]] = []

    def add(self, pieces: Sequence[Buffer], lengths: NDArray[np.int64] | None = None) -> None:
        """Adds a piece for each frame, of these lengths."""
        self._parts.append(pieces)
        self.lengths += np.fromiter(map(len, pieces), np.int64) if lengths is None else lengths

    def add_column(
        self, column: NDArray[Any], dtype: str, present: NDArray[np.bool_] | None = None
    ) -> None:
        """Adds the rows of a column; to those frames alone that have it."""
        if present is not None and not present.any():
            return
        values = column.astype(dtype, copy=False)
        row_bytes = values.nbytes // max(len(values), 1)
        raw = values.tobytes()
        pieces = [raw[b * row_bytes : e * row_bytes] for b, e in pairwise(self._edges)]
        lengths = self.counts * row_bytes
        if present is not None and not present.all():
            pieces = [p if has else b"" for p, has in zip(pieces, present.tolist(), strict=True)]
            lengths = lengths * present
        self.add(pieces, lengths)

    def pad(self) -> None:
        """Adds zeros up to a multiple of 8 bytes."""
        missing = -self.lengths % 8
        self.add([ZEROS[count] for count in missing.tolist()], missing)

    def have(self, given: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Marks frames of which a row is marked."""
        return np.logical_or.reduceat(given, self.firsts)

    def add_topics(self, topics: FrameTopics, names: Sequence[str]) -> NDArray[np.int64]:
        """Adds each frame's dictionary; returns their lengths."""
        entries = [topic_entry(topic) for topic in names]
        members, edges = topics.members.tolist(), topics.edges.tolist()
        before = self.lengths.copy()
        self.add([b"".join([entries[n] for n in members[b:e]]) for b, e in pairwise(edges)])
        return self.lengths - before

    def joined(self) -> bytearray:
        """Returns the bytes of all frames."""
        parts: list[Buffer] = [b""] * (len(self._parts) * len(self.firsts))
        for number, pieces in enumerate(self._parts):
            parts[number :: len(self._parts)] = pieces
        return bytearray().join(parts)

    def each(self) -> Iterable[bytearray]:
        """Returns the bytes of each frame."""
        return map(bytearray().join, zip(*self._parts, strict=True))
