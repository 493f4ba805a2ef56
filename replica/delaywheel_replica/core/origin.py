"""What an origin knows of its open wheel: who holds how much of it, and what it has sealed.

The high watermark is the greatest seq that every in-sync member holds, and at least W members:
only up to there are callers answered. It never goes back; while fewer than W members are in
sync it rests, and so do the answers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from delaywheel_replica.core.quorum import high_watermark
from delaywheel_replica.core.seal import Seal, next_seal


@dataclass(frozen=True, slots=True)
class Origin:
    """The state of one open wheel at its origin.

    Attributes:
        node: the origin.
        min_insync: W.
        applied: what each member holds; the origin's own entry is the last seq written.
        in_sync: the members whose answers are waited for.
        seal: the promise given last.
        high_watermark: the greatest seq that is acknowledged.
    """

    node: str
    min_insync: int
    applied: Mapping[str, int]
    in_sync: frozenset[str]
    seal: Seal
    high_watermark: int = 0

    @property
    def last_seq(self) -> int:
        """The last seq written."""
        return self.applied[self.node]

    def held(self, member: str, seq: int) -> "Origin":
        """A member, or the origin itself, holds everything up to this seq."""
        applied = {**self.applied, member: max(seq, self.applied.get(member, 0))}
        reached = high_watermark(applied, self.in_sync, self.min_insync) or 0
        return replace(self, applied=applied, high_watermark=max(self.high_watermark, reached))

    def sealed(
        self, *, own_clock_ms: int, leader_clock_ms: int | None, late_window_s: int
    ) -> "Origin":
        """With the seal that may be given now."""
        seal = next_seal(
            self.seal,
            own_clock_ms=own_clock_ms,
            leader_clock_ms=leader_clock_ms,
            last_seq=self.last_seq,
            late_window_s=late_window_s,
        )
        return self if seal is self.seal else replace(self, seal=seal)


def opened(
    node: str, *, members: Iterable[str], min_insync: int, in_sync: Iterable[str], seal_slot: int
) -> Origin:
    """A wheel that has just been opened; nothing is written yet.

    Args:
        node: the origin.
        members: who is to hold the wheel, the origin among them.
        min_insync: W.
        in_sync: the members that are heard.
        seal_slot: the seal that was told of it as a spare, or else of its registration.
    """
    return Origin(
        node=node,
        min_insync=min_insync,
        applied=dict.fromkeys(members, 0),
        in_sync=frozenset(in_sync) | {node},
        seal=Seal(seal_slot, 0),
    )
