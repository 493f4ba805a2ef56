"""Seals: an origin's promises to write nothing more for slots below a given one.

docs/PROTOCOL.md, "Seals", says what a seal (s, q) promises, and what moves it. A node that has the
wheel up to q has everything that will ever be in it below s. That lets the floor pass, and lets
slot files be deleted while their wheel is open.
"""

from dataclasses import dataclass

FROZEN = 0
"""A slot below every floor and every seal: those that must not pass it do not move."""


@dataclass(frozen=True, slots=True)
class Seal:
    """A promise: no frame beyond `seq` is for a slot below `slot`."""

    slot: int
    seq: int


def next_seal(
    seal: Seal,
    *,
    own_clock_ms: int,
    leader_clock_ms: int | None,
    last_seq: int,
    late_window_s: int,
) -> Seal:
    """Returns the seal that an origin may give now; without a leader's clock it does not move.

    The lesser of the two clocks counts: otherwise an origin whose clock runs ahead would seal
    seconds that the leader has not reached yet. A slot accepts frames for the late window after its
    due.
    """
    if leader_clock_ms is None:
        return seal
    slot = min(own_clock_ms, leader_clock_ms) // 1000 - late_window_s
    return Seal(slot, last_seq) if slot > seal.slot else seal
