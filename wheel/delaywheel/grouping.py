"""How a sorted group is cut into frames, before any byte is made of it (see format.py)."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from delaywheel.columns import Columns


def frame_bounds(
    slots: NDArray[np.int64],
    lengths_bytes: NDArray[np.int64],
    *,
    max_messages: int,
    max_bytes: int,
) -> list[tuple[int, int]]:
    """First and last row (exclusive) of each frame: one a slot, cut where it gets too much.

    Args:
        slots: of each row, ascending; at least one.
        lengths_bytes: of each row in a frame.
        max_messages: in one frame.
        max_bytes: in one frame, unless a single row is longer.
    """
    rows = len(slots)
    changes = (np.flatnonzero(slots[1:] != slots[:-1]) + 1).tolist()
    whole = list(pairwise([0, *changes, rows]))
    ends = np.cumsum(lengths_bytes)
    if rows <= max_messages and int(ends[-1]) <= max_bytes:
        return whole
    bounds = []
    for first, last in whole:
        begin = first
        while begin < last:
            before = int(ends[begin - 1]) if begin else 0
            fitting = int(np.searchsorted(ends, before + max_bytes, side="right"))
            end = min(last, begin + max_messages, max(fitting, begin + 1))
            bounds.append((begin, end))
            begin = end
    return bounds


class FrameTopics:
    """Each frame's own dictionary of topics.

    ``numbers`` says for every row which entry of its frame's dictionary is its topic.
    """

    numbers: NDArray[np.uint32]

    def __init__(self, columns: Columns, bounds: list[tuple[int, int]]) -> None:
        topics = len(columns.topics)
        if topics == 1:
            self.numbers = np.zeros(len(columns), dtype=np.uint32)
            self._edges = list(range(len(bounds) + 1))
            self._members = [0] * len(bounds)
            return
        frames = np.repeat(np.arange(len(bounds)), [last - first for first, last in bounds])
        pairs, inverse = np.unique(frames * topics + columns.topic_numbers, return_inverse=True)
        edges = np.searchsorted(pairs, np.arange(len(bounds) + 1) * topics)
        self.numbers = (inverse - edges[frames]).astype(np.uint32)
        self._edges = edges.tolist()
        self._members = (pairs % topics).tolist()

    def of_frame(self, frame: int) -> list[int]:
        """The entries of a frame's dictionary, as numbers in the group's."""
        return self._members[self._edges[frame] : self._edges[frame + 1]]
