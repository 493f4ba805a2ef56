"""Which nodes hold how much of each wheel, and therefore what a leader may take.

Only frames that the leader's node holds and knows to be held by W members, or that lie within a
committed end T, may enter V. A leader forwards nothing until it holds everything up to V: it could
not distinguish what it is missing from a retry.

"Held up to a seq" means every frame up to there; those that are committed as lost, or whose slots
are finished, are not missing.
"""

from collections.abc import Iterable, Mapping

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.control import ControlState, WheelRecord
from delaywheel_replica.core.protocol.heartbeat import Heartbeat, WheelHeartbeat

_NOTHING = WheelHeartbeat.empty()


def held_prefix(state: ControlState, wheel: WheelId, heartbeat: Heartbeat) -> int:
    """Returns the seq up to which a node holds every frame of a wheel, except lost ones."""
    reported, lost = heartbeat.wheels.get(wheel, _NOTHING), state.lost.seqs(wheel)
    if reported.missing and (missing := reported.missing - lost):
        return missing.first - 1
    return lost.end_from(reported.applied)


def member_heartbeats(
    state: ControlState, record: WheelRecord, heartbeats: Mapping[str, Heartbeat]
) -> dict[str, Heartbeat]:
    """Returns the heartbeats of a wheel's holders, from the storages that count."""
    return {
        node: heartbeats[node]
        for node, storage in state.holders(record).items()
        if node in heartbeats and heartbeats[node].storage == storage
    }


def member_prefixes(
    state: ControlState, wheel: WheelId, record: WheelRecord, heartbeats: Mapping[str, Heartbeat]
) -> list[int]:
    """Returns the seq up to which each member holds a wheel; unheard members are left out."""
    members = member_heartbeats(state, record, heartbeats)
    return [held_prefix(state, wheel, heartbeat) for heartbeat in members.values()]


def takeable(
    state: ControlState, own: Heartbeat, heartbeats: Mapping[str, Heartbeat]
) -> dict[WheelId, int]:
    """Returns the seq up to which each registered wheel may be taken."""
    everyone = {**heartbeats, own.node: own}
    return {
        wheel: min(held_prefix(state, wheel, own), _limit(state, wheel, record, everyone))
        for wheel, record in state.wheels.items()
    }


def holds_progress(state: ControlState, own: Heartbeat) -> bool:
    """Whether the leader's node holds every frame that the committed progress accounts for."""
    if state.progress is None:
        return True
    return all(
        wheel in state.wheels and held_prefix(state, wheel, own) >= seq
        for wheel, seq in state.progress.seqs.items()
    )


def knows_all(state: ControlState, own: Heartbeat, heard: Mapping[str, Heartbeat]) -> bool:
    """Whether a node holds all that had been acknowledged when these heartbeats were sent.

    docs/PROTOCOL.md, "Cancel", has in a table what that takes. Who knows of no wheel has yet to
    read of the first one, or what an earlier life has read.
    """
    everyone = {**heard, own.node: own}
    has_read = bool(state.wheels) and not any(_is_behind(state, each) for each in everyone.values())
    return has_read and all(
        _knows(state, wheel, record, own, everyone)
        for wheel, record in state.wheels.items()
        if wheel != own.open
    )


def held_alone(
    state: ControlState, heartbeats: Mapping[str, Heartbeat], *, without: str | None = None
) -> dict[WheelId, tuple[str, int, int]]:
    """Returns closed wheels of which one node alone holds some frames: it, the first and the last.

    Wheels that are not closed are left out: their nodes wait for W members with each frame. Silent
    nodes' heartbeats are asked for too, as their disks still count; `without` is a node that does
    not.
    """
    alone: dict[WheelId, tuple[str, int, int]] = {}
    for wheel, record in state.wheels.items():
        if record.closed_at is None or len(record.members) == 1:
            continue
        prefixes = sorted(
            (min(held_prefix(state, wheel, heartbeat), record.closed_at), node)
            for node, heartbeat in member_heartbeats(state, record, heartbeats).items()
            if node != without
        )
        if not prefixes:
            continue
        others = prefixes[-2][0] if len(prefixes) > 1 else 0
        last, node = prefixes[-1]
        if last > others:
            alone[wheel] = node, others + 1, last
    return alone


def _is_behind(state: ControlState, heartbeat: Heartbeat) -> bool:
    """Whether a node has frames of a wheel that was registered after this state."""
    return any(
        reported.applied
        and wheel not in state.wheels
        and ((node := state.nodes.get(wheel.node)) is None or wheel.number > node.last_number)
        for wheel, reported in heartbeat.wheels.items()
    )


def _knows(
    state: ControlState,
    wheel: WheelId,
    record: WheelRecord,
    own: Heartbeat,
    everyone: Mapping[str, Heartbeat],
) -> bool:
    held = held_prefix(state, wheel, own)
    if record.closed_at is not None:
        return held >= record.closed_at
    members = member_heartbeats(state, record, everyone)
    complete = [heartbeat for heartbeat in members.values() if heartbeat.complete]
    applied = [heartbeat.wheels.get(wheel, _NOTHING).applied for heartbeat in complete]
    return len(complete) >= record.required_answers and held >= max(applied)


def _limit(
    state: ControlState, wheel: WheelId, record: WheelRecord, heartbeats: Mapping[str, Heartbeat]
) -> int:
    if record.closed_at is not None:
        return record.closed_at
    # What was taken stays so, although fewer may be known to hold it by now: no end is below V.
    taken = 0 if state.progress is None else state.progress.seq(wheel)
    reported = [
        wheel_heartbeat.high_watermark
        for heartbeat in heartbeats.values()
        if (wheel_heartbeat := heartbeat.wheels.get(wheel)) is not None
    ]
    held = held_by(member_prefixes(state, wheel, record, heartbeats), record.min_insync)
    return max([taken, held, *reported])


def held_by(applied: Iterable[int], holders: int) -> int:
    """Returns the greatest seq that at least this many of the members hold, or 0."""
    greatest_first = sorted(applied, reverse=True)
    return greatest_first[holders - 1] if len(greatest_first) >= holders else 0
