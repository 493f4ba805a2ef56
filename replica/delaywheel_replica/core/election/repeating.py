"""How soon the Kafka client sends a request again, and which ends may have been sent twice.

The client has one backoff for all requests. A short one lets a leader's move pass within a
transaction; but an end that took longer than that may have been sent twice, and its id is inited
again (core/election/id_turns.py). So the backoff is as short as the brokers' ends allow.
"""

from __future__ import annotations

from statistics import median_low

LEAST_BACKOFF_MS = 100
MOST_BACKOFF_MS = 30_000
"""Longer than any call: then nothing is sent twice."""

BACKOFF_IN_ENDS = 4
"""So many times as long as the median of the recent ends."""

ALONE_BACKOFF_MS = 2_000
"""The least of an id beside which no other can be used: none could vouch for it."""

RECENT_ENDS = 16

JITTER = 0.2
"""The client sends again so much sooner than its backoff, at most."""


class EndTimes:
    """How long the ends of transactions took lately, of all producers. For any thread."""

    def __init__(self) -> None:
        self._recent_ms: tuple[int, ...] = ()

    def add(self, end_ms: int) -> None:
        """Notes one more; only the main thread has any."""
        self._recent_ms = (*self._recent_ms, end_ms)[-RECENT_ENDS:]

    @property
    def backoff_ms(self) -> int:
        """The backoff of the next producer."""
        usual_ms = median_low(self._recent_ms) if self._recent_ms else 0
        return max(LEAST_BACKOFF_MS, min(BACKOFF_IN_ENDS * usual_ms, MOST_BACKOFF_MS))


def may_be_repeated(took_ms: float, backoff_ms: int) -> bool:
    """Whether a request may have been sent twice if its call took so long.

    Example:
        >>> may_be_repeated(79, 100), may_be_repeated(80, 100)
        (False, True)
    """
    return took_ms >= (1 - JITTER) * backoff_ms
