"""Counts messages by topic, in batches, for a bounded number of topics.

Invariant: the counts of all topics, including `OTHERS`, add up to everything that was counted. The
first `TOPICS_AT_MOST` topics have a count of their own for as long as the process lives, so that no
count ever falls; all later ones share one.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

TOPICS_AT_MOST: Final = 100
OTHERS: Final = "(others)"
"""No topic can have this name."""


class TopicCounts:
    """Counts messages by topic. One thread counts; any may read."""

    def __init__(self, *, most: int = TOPICS_AT_MOST) -> None:
        self._most = most
        self._counts: dict[str, int] = {}

    def add(self, topics: Sequence[str], numbers: NDArray[np.integer[Any]]) -> None:
        """Counts a batch: for each message the number is the index of its topic."""
        if not len(numbers):
            return
        messages = np.bincount(numbers)
        for number in np.flatnonzero(messages).tolist():
            self.add_one(topics[number], int(messages[number]))

    def add_one(self, topic: str, messages: int = 1) -> None:
        """Counts messages of one topic."""
        counts = self._counts
        if topic not in counts and len(counts) - (OTHERS in counts) >= self._most:
            topic = OTHERS
        counts[topic] = counts.get(topic, 0) + messages

    def read(self) -> dict[str, int]:
        """Returns the counts so far, by topic."""
        return self._counts.copy()
