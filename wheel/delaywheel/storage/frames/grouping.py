"""Divides a sorted group into frames, before any of them is encoded (see encode.py)."""

import numpy as np
from numpy.typing import NDArray


def frame_firsts(
    slots: NDArray[np.int64],
    lengths_bytes: NDArray[np.int64],
    *,
    max_messages: int,
    max_bytes: int,
) -> NDArray[np.int64]:
    """Returns the first row of each frame: one for each slot, split where it is too large.

    Args:
        slots: Each row's slot, ascending; at least one row.
        lengths_bytes: Each row's length in a frame.
        max_messages: The most rows in one frame.
        max_bytes: The most bytes in one frame, unless a single row is longer.
    """
    rows = len(slots)
    begins = np.empty(rows, bool)
    begins[0] = True
    np.not_equal(slots[1:], slots[:-1], out=begins[1:])
    firsts = begins.nonzero()[0]
    if rows <= max_messages and int(lengths_bytes.sum()) <= max_bytes:
        return firsts
    lasts = np.append(firsts[1:], rows)
    ends = np.cumsum(lengths_bytes)
    before = ends[firsts] - lengths_bytes[firsts]
    too_much = (lasts - firsts > max_messages) | (ends[lasts - 1] - before > max_bytes)
    if not too_much.any():
        return firsts
    added = [firsts]
    for slot in np.flatnonzero(too_much).tolist():
        begin, last = int(firsts[slot]), int(lasts[slot])
        while begin < last:
            added.append(np.array([begin]))
            until = int(ends[begin] - lengths_bytes[begin]) + max_bytes
            fitting = int(np.searchsorted(ends, until, side="right"))
            begin = min(begin + max_messages, max(fitting, begin + 1))
    return np.unique(np.concatenate(added))


class FrameTopics:
    """The dictionary of topics of each frame.

    Attributes:
        numbers: For each row, the entry of its frame's dictionary that is its topic.
        members: The entries of all dictionaries, concatenated, as topic numbers of the group.
        edges: Where each frame's entries begin in `members`, and where the last ones end.
    """

    numbers: NDArray[np.uint32]
    members: NDArray[np.int64]
    edges: NDArray[np.int64]

    def __init__(
        self, topics: int, topic_numbers: NDArray[np.uint32], counts: NDArray[np.int64]
    ) -> None:
        """Builds the dictionaries.

        Args:
            topics: How many topics the group has; 0: its frames have no dictionary.
            topic_numbers: Each row's topic, in the sorted group.
            counts: Each frame's number of rows.
        """
        frames = len(counts)
        if topics <= 1:
            self.numbers = np.zeros(len(topic_numbers), np.uint32)
            self.members = np.zeros(frames * topics, np.int64)
            self.edges = np.arange(frames + 1) * topics
            return
        of_rows = np.repeat(np.arange(frames), counts)
        pairs, inverse = np.unique(of_rows * topics + topic_numbers, return_inverse=True)
        self.edges = np.searchsorted(pairs, np.arange(frames + 1) * topics)
        self.numbers = (inverse - self.edges[of_rows]).astype(np.uint32)
        self.members = pairs % topics
