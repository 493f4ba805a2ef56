"""How much goes into one transaction.

A slow Kafka must not be made slower: a new leader begins with one frame a transaction and
doubles while its transactions are full and quick. The cap is halved only when a commit takes
300 ms more than twice the shortest recent one, and never goes below one frame.
"""

from dataclasses import dataclass

RECENT_COMMITS = 16
SLOW_COMMIT_MARGIN_MS = 300


@dataclass(frozen=True, slots=True)
class CapLimits:
    """The least and the most that a transaction may hold.

    Attributes:
        frame_messages: the most messages that a frame may have; no cap is below.
        frame_bytes: the most bytes that a frame may have; no cap is below.
        max_messages: configured.
        max_bytes: configured.
    """

    frame_messages: int
    frame_bytes: int
    max_messages: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Pace:
    """The cap of the next transaction.

    Attributes:
        limits: within which the cap moves.
        cap_messages: the most messages of the next transaction.
        cap_bytes: the most bytes of the next transaction.
        recent_ms: how long the last commits took.
    """

    limits: CapLimits
    cap_messages: int
    cap_bytes: int
    recent_ms: tuple[int, ...] = ()

    def after_commit(self, duration_ms: int, *, full: bool) -> "Pace":
        """The cap after one more committed transaction.

        Args:
            duration_ms: of the commit.
            full: the transaction was as large as the cap let it be.
        """
        recent_ms = (*self.recent_ms, duration_ms)[-RECENT_COMMITS:]
        messages, length_bytes = self.cap_messages, self.cap_bytes
        if duration_ms > 2 * min(recent_ms) + SLOW_COMMIT_MARGIN_MS:
            messages, length_bytes = messages // 2, length_bytes // 2
        elif full:
            messages, length_bytes = messages * 2, length_bytes * 2
        limits = self.limits
        return Pace(
            limits,
            max(limits.frame_messages, min(messages, limits.max_messages)),
            max(limits.frame_bytes, min(length_bytes, limits.max_bytes)),
            recent_ms,
        )


def first_pace(limits: CapLimits) -> Pace:
    """The cap of a new leader: one frame."""
    return Pace(limits, limits.frame_messages, limits.frame_bytes)
