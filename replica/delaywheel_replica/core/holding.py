"""What a leader may take, and whether it holds what counts as taken.

Only frames that the leader holds and knows to be held by W members, or that lie within a committed
end T, may enter V. A leader forwards nothing until it holds everything up to V: what it lacks it
could not tell from a retry.

| wheel | may be taken up to |
|---|---|
| not held here | nothing |
| not closed | what is held here, and by W members |
| closed at T, held here in part | what is held here |
| closed at T, held here whole | T, or V where V is greater |

V greater than T: a crash of the operating system took frames that had been taken account of, and
the wheel was closed at what was left. There is nothing between T and V any more, so nothing is
waited for; that those frames are gone was settled when T was committed.
"""

from delaywheel.identity import WheelId
from delaywheel_replica.core.beat import Beat, WheelBeat
from delaywheel_replica.core.control import ControlState, WheelRecord


def takeable(state: ControlState, beat: Beat) -> dict[WheelId, int]:
    """Up to which seq each registered wheel may be taken.

    Args:
        state: what is committed.
        beat: of the leader's own node.
    """
    taken = {} if state.progress is None else state.progress.seqs
    return {
        wheel: _limit(record, beat.wheels.get(wheel), taken.get(wheel, 0))
        for wheel, record in state.wheels.items()
    }


def holds_progress(state: ControlState, beat: Beat) -> bool:
    """Whether the leader's node holds every frame that the committed progress takes account of.

    Args:
        state: what is committed.
        beat: of the leader's own node.
    """
    if state.progress is None:
        return True
    limits = takeable(state, beat)
    return all(limits.get(wheel, 0) >= seq for wheel, seq in state.progress.seqs.items())


def _limit(record: WheelRecord, held: WheelBeat | None, taken: int) -> int:
    if held is None:
        return 0
    if record.closed_at is None:
        return min(held.applied, held.high_watermark)
    if held.applied < record.closed_at:
        return held.applied
    return max(record.closed_at, taken)
