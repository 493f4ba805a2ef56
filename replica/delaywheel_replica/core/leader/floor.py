"""The floor: everything below it is done, and all its slot files may be deleted.

docs/PROTOCOL.md, "The floor", says which slots it passes, and why one seal of each wheel is kept
until its q has passed the gates (`FRAME_GATES`).

Invariants:
- The floor never goes back.
- It never passes the newest counted seal of a registered wheel that is not wholly past the
  gates, spares included: a frame that such a wheel may still take lies at or above the floor.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from delaywheel.identity import WheelId
from delaywheel_replica.core.leader.holders import held_prefix, member_prefixes
from delaywheel_replica.core.protocol.control import ControlState, WheelRecord
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.protocol.progress import Progress, time_floor
from delaywheel_replica.core.protocol.seal import Seal
from delaywheel_replica.core.protocol.status_files import FloorWait


@dataclass(frozen=True, slots=True)
class FloorView:
    """The inputs of the conditions for the floor.

    Attributes:
        progress: As the transaction will leave it, except for the floor.
        wheels: The registered ones.
        reported: The newest seal reported for each.
        published: The seq up to which the ledger of each is published.
        lost: Frames that no node can read.
        ingress_slot: The least slot of announced records that the transaction does not settle;
            None: there are none.
    """

    progress: Progress
    wheels: Mapping[WheelId, WheelRecord]
    reported: Mapping[WheelId, Seal]
    published: Mapping[WheelId, int]
    lost: FrameSet = NO_FRAMES
    ingress_slot: int | None = None


_NAMED: Final = 3

FrameGate = Callable[[FloorView, WheelId], int]
"""Up to which seq a wheel's frames have passed."""


def _taken(view: FloorView, wheel: WheelId) -> int:
    return view.progress.seq(wheel)


def _published(view: FloorView, wheel: WheelId) -> int:
    """Whether a frame is published; a lost one counts as published, as a gap."""
    return view.lost.seqs(wheel).end_from(view.published.get(wheel, 0))


FRAME_GATES: dict[str, FrameGate] = {"taken": _taken, "published": _published}


def passed_seq(view: FloorView, wheel: WheelId) -> int:
    """Returns the seq up to which a wheel's frames meet every condition."""
    return min(gate(view, wheel) for gate in FRAME_GATES.values())


@dataclass(frozen=True, slots=True)
class FloorWatch:
    """What a leader has seen of seals; a new leader begins with an empty watch.

    Attributes:
        sealed: Wheel -> the slot below which every frame has passed the gates.
        held: The seal whose seq has not passed yet.
    """

    sealed: Mapping[WheelId, int] = field(default_factory=dict)
    held: Mapping[WheelId, Seal] = field(default_factory=dict)

    def sealed_slot(self, wheel: WheelId, record: WheelRecord) -> int:
        """Returns the sealed slot; registration is the first seal, (its slot, 0)."""
        return self.sealed.get(wheel, record.seal_slot)


def watch_seals(watch: FloorWatch, view: FloorView) -> FloorWatch:
    """Returns the watch updated with new seals; unregistered wheels are dropped."""
    sealed: dict[WheelId, int] = {}
    held: dict[WheelId, Seal] = {}
    for wheel, record in view.wheels.items():
        slot = watch.sealed_slot(wheel, record)
        for seal in (watch.held.get(wheel), view.reported.get(wheel)):
            if seal is None or seal.slot <= slot:
                continue
            if passed_seq(view, wheel) >= seal.seq:
                slot = seal.slot
            else:
                held.setdefault(wheel, seal)
        sealed[wheel] = slot
    return FloorWatch(sealed, held)


def floor_after(view: FloorView, watch: FloorWatch, *, late_window_s: int) -> int:
    """Returns the floor that may be committed with `view.progress`."""
    limits = [time_floor(view.progress.due_ms, late_window_s), *_wheel_limits(view, watch).values()]
    if view.ingress_slot is not None:
        limits.append(view.ingress_slot)
    return max(view.progress.floor, min(limits))


def _wheel_limits(view: FloorView, watch: FloorWatch) -> dict[WheelId, int]:
    """Returns the slot that the floor may not pass because of each wheel."""
    return {
        wheel: watch.sealed_slot(wheel, record)
        for wheel, record in view.wheels.items()
        if record.closed_at is None or passed_seq(view, wheel) < record.closed_at
    }


def floor_wait(
    view: FloorView, watch: FloorWatch, floor: int, *, late_window_s: int, patience_s: int
) -> FloorWait | None:
    """Returns what a floor waits for that is far below what w alone allows; None: it is not.

    Args:
        view: As for `floor_after`, like the watch.
        floor: The floor that is committed with `view.progress`.
        patience_s: How far behind it may be.
    """
    behind_s = time_floor(view.progress.due_ms, late_window_s) - floor
    if behind_s <= patience_s:
        return None
    limits = sorted((slot, wheel) for wheel, slot in _wheel_limits(view, watch).items())
    causes = [_cause(view, watch, wheel) for slot, wheel in limits if slot <= floor]
    if view.ingress_slot is not None and view.ingress_slot <= floor:
        causes.append("ingress records that are announced and not settled")
    more = len(causes) - _NAMED
    named = causes[:_NAMED] or ["messages that are to get another due"]
    return FloorWait(behind_s, (*named, *([f"{more} more wheels"] if more > 0 else [])))


def _cause(view: FloorView, watch: FloorWatch, wheel: WheelId) -> str:
    closed_at, seal = view.wheels[wheel].closed_at, watch.held.get(wheel)
    if closed_at is None and seal is None:
        return f"{wheel.node} to seal {wheel}, or {wheel} to be closed"
    end = seal.seq if closed_at is None and seal is not None else closed_at
    assert end is not None
    taken, published = _taken(view, wheel), _published(view, wheel)
    if taken < end:
        return f"frame {taken + 1:,} of {wheel} to be taken"
    return f"the ledger of {wheel}, which is published up to frame {published:,} of {end:,}"


def reported_seals(heartbeats: Iterable[Heartbeat]) -> dict[WheelId, Seal]:
    """Returns each wheel's strongest seal, whichever node reported it and whenever.

    Seals are never broken: one in an old heartbeat, or from another storage, is as true.
    """
    reported: dict[WheelId, Seal] = {}
    for heartbeat in heartbeats:
        for wheel, wheel_heartbeat in heartbeat.wheels.items():
            seal = wheel_heartbeat.seal
            known = reported.get(wheel)
            if known is None or (seal.slot, -seal.seq) > (known.slot, -known.seq):
                reported[wheel] = seal
    return reported


def published_seqs(heartbeats: Iterable[Heartbeat]) -> dict[WheelId, int]:
    """Returns each wheel's greatest published seq, whichever node reported it."""
    published: dict[WheelId, int] = {}
    for heartbeat in heartbeats:
        for wheel, wheel_heartbeat in heartbeat.wheels.items():
            published[wheel] = max(wheel_heartbeat.ledger_seq, published.get(wheel, 0))
    return published


def wholly_below(
    wheel: WheelId, state: ControlState, floor: int, heartbeats: Mapping[str, Heartbeat]
) -> bool:
    """Whether all of a closed wheel that is registered lies below the floor.

    It depends on one member that holds all of it, since only such a member knows the slot of every
    frame; and on every node that reports files of it, so that no node is left with files that the
    floor has not passed.
    """
    record = state.wheels[wheel]
    if record.closed_at is None:
        return False
    reported = [
        heartbeat.wheels[wheel].top_slot
        for heartbeat in heartbeats.values()
        if wheel in heartbeat.wheels
    ]
    if any(top_slot >= floor for top_slot in reported):
        return False
    if state.holders(record):
        prefixes = member_prefixes(state, wheel, record, heartbeats)
    else:
        # No member is left to wait for: what no node has counts once it is committed as lost.
        prefixes = [held_prefix(state, wheel, heartbeat) for heartbeat in heartbeats.values()]
    return record.closed_at == 0 or any(prefix >= record.closed_at for prefix in prefixes)
