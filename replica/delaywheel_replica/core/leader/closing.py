"""Fence, recover, close: how a wheel that is no longer written gets its end.

docs/PROTOCOL.md, "Closing", says when a wheel is to be closed. Then its members promise to refuse
that node's wheels up to X, and answer with what they hold. The greatest of enough answers is T, or
V, or the committed limit, if one of those is greater. When enough members hold everything through
T, the leader commits ``wheel/X closed at T``, and only what is committed counts. Until then it
commits T as the wheel's limit, and then reports it: up to there, members that have fenced the wheel
may accept it after all. Since no end is found below a committed limit, earlier answers stay good,
however old, though what was accepted in this way may be acknowledged.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from delaywheel.identity import WheelId
from delaywheel_replica.core.leader.holders import member_prefixes
from delaywheel_replica.core.protocol.control import ControlState, WheelRecord
from delaywheel_replica.core.protocol.heartbeat import Fence, Heartbeat, Promise


@dataclass(frozen=True, slots=True)
class AnswersWanted:
    """Too few members have answered to determine the end."""


@dataclass(frozen=True, slots=True)
class HoldersWanted:
    """The end is known, but too few members hold everything through it."""

    final_seq: int


@dataclass(frozen=True, slots=True)
class Close:
    """The wheel may be closed at this seq."""

    final_seq: int


Closing = AnswersWanted | HoldersWanted | Close


def wheels_to_close(
    state: ControlState, heartbeats: Mapping[str, Heartbeat], silent: Collection[str] = ()
) -> list[WheelId]:
    """Returns the open wheels that are to be closed, in order; of silent nodes, all.

    A wheel that was left waits while its node still uses one below it: promises are kept as one
    highest number per node, so fencing it would fence the wheel in use.
    """
    newest: dict[str, WheelId] = {}
    unclosed = sorted(wheel for wheel, record in state.wheels.items() if record.closed_at is None)
    for wheel in unclosed:
        newest[wheel.node] = wheel
    return [
        wheel
        for wheel in unclosed
        if wheel.node in silent
        or wheel.node not in state.remaining(state.wheels[wheel])
        or not _is_alike(state.wheels[wheel], state.wheels[newest[wheel.node]])
        or _is_left(state, wheel, heartbeats.get(wheel.node))
    ]


def _is_alike(record: WheelRecord, newest: WheelRecord) -> bool:
    return record.members == newest.members and record.min_insync == newest.min_insync


def _is_left(state: ControlState, wheel: WheelId, heartbeat: Heartbeat | None) -> bool:
    if heartbeat is None or not is_registered(state, heartbeat):
        return False
    if any(named.number <= wheel.number for named in heartbeat.named):
        return False
    return wheel.number <= heartbeat.last_number


def is_registered(state: ControlState, heartbeat: Heartbeat) -> bool:
    """Whether a heartbeat comes from the storage that is registered for its node id."""
    known = state.nodes.get(heartbeat.node)
    return known is not None and known.storage == heartbeat.storage


def closing(
    wheel: WheelId,
    state: ControlState,
    answers: Collection[Promise],
    heartbeats: Mapping[str, Heartbeat],
    *,
    taken: int,
) -> Closing:
    """Returns how far the closing of a wheel has come.

    Args:
        state: What is committed, with what the same transaction has changed already.
        answers: At most one for each node and origin; a newer one replaces the older.
        taken: V of the wheel as the same transaction leaves it.
    """
    record = state.wheels[wheel]
    remaining = state.remaining(record)
    counted = [
        answer
        for answer in answers
        if remaining.get(answer.node) == answer.storage and answer.covers(wheel)
    ]
    complete = sum(answer.is_complete(wheel) for answer in counted)
    if complete < record.required_answers and len(counted) < len(remaining):
        return AnswersWanted()
    final_seq = max([taken, record.limit, *(answer.applied.get(wheel, 0) for answer in counted)])
    prefixes = member_prefixes(state, wheel, record, heartbeats)
    holders = sum(prefix >= final_seq for prefix in prefixes)
    if final_seq > 0 and holders < min(record.min_insync, len(remaining)):
        return HoldersWanted(final_seq)
    return Close(final_seq)


def fences_wanted(results: Mapping[WheelId, Closing]) -> list[Fence]:
    """Returns one fence for each node whose wheels cannot be closed for lack of answers."""
    upto: dict[str, int] = {}
    for wheel, result in results.items():
        if isinstance(result, AnswersWanted):
            upto[wheel.node] = max(wheel.number, upto.get(wheel.node, 0))
    return sorted(Fence(origin, number) for origin, number in upto.items())


def limits_wanted(
    state: ControlState, results: Mapping[WheelId, Closing]
) -> dict[WheelId, WheelRecord]:
    """Returns the records to commit before members may learn how far to fetch."""
    return {
        wheel: replace(state.wheels[wheel], limit=result.final_seq)
        for wheel, result in results.items()
        if isinstance(result, HoldersWanted) and result.final_seq > state.wheels[wheel].limit
    }


def committed_limits(state: ControlState) -> dict[WheelId, int]:
    """Returns wheel -> how far members may fetch beyond their fences, as committed."""
    return {
        wheel: record.limit
        for wheel, record in state.wheels.items()
        if record.closed_at is None and record.limit > 0
    }
