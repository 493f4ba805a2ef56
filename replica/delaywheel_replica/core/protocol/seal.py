"""Seals: an origin's promises to write nothing more for slots below.

A seal (s, q) says: no frame of mine beyond seq q is for a slot below s. Since q is the last seq
written when it is given, whoever has taken the wheel up to q has all there will ever be of it
below s. That is what lets the floor pass, and a slot file be deleted while its wheel is open.

Invariants:
- s never goes back, whatever the clocks do, restarts included (a spare's seal is saved before
  it is told).
- A seal changes only when s moves: of two seals with the same s the earlier has the smaller q
  and promises more.
- A frame's slot is checked against the seal when the frame gets its seq, not when its request
  came in.
"""

from dataclasses import dataclass

REST = 0
"""A slot below every floor and every seal: where they must not pass it, they do not move."""


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
    """Returns the seal that an origin may give now.

    The lesser of the two clocks counts: an origin whose clock runs ahead would otherwise seal
    seconds that the leader has still to come to.

    Args:
        seal: the one given before; at first (slot of the registration, 0).
        own_clock_ms: this node's wall clock.
        leader_clock_ms: the leader's, None while no leader is heard: then the seal rests.
        last_seq: the last seq this origin has written.
        late_window_s: how long after its due a slot still takes frames.
    """
    if leader_clock_ms is None:
        return seal
    slot = min(own_clock_ms, leader_clock_ms) // 1000 - late_window_s
    return Seal(slot, last_seq) if slot > seal.slot else seal
