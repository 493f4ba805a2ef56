"""Whether a node should lead, though it could.

| a node | is |
|---|---|
| lacks what was V or an HW `LAG_MS` ago, and another that is heard holds it | HANDED_OVER |
| has a clock off the median of three or more by `max_clock_skew_ms` | CLOCK_OFF |
| was taken out by the operator | TAKEN_OUT |

The other would be on time; and what is due is due by the leader's clock. One that was taken out
follows settings of before: where R is 1 it would ask nobody, and disturb the others for ever.

What the node could not take whatever it did is not held against it: a wheel that it has promised
to take no more of is wanted up to the committed fill, a closed one up to its end. V is wanted in
any case: without it a leader forwards nothing at all.

A clock is compared as a beat told it, counted on by the time since it came: it is behind by the
time that the beat was on its way.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median_low

from delaywheel.identity import WheelId
from delaywheel_replica.core.beat import Beat, FenceAnswer
from delaywheel_replica.core.control import REMOVED, ControlState, WheelRecord
from delaywheel_replica.core.election_events import Reason
from delaywheel_replica.core.holding import held_prefix
from delaywheel_replica.core.status import ServerStatus

HEARD_MS = 1_000
"""A node that sent nothing for so long is not heard."""

LAG_MS = 1_000
CLOCKS = 3


def heard_beats(server: ServerStatus, now_ms: int) -> dict[str, Beat]:
    """The newest beats of the other nodes that are heard directly."""
    return {
        node: sight.beat
        for node, sight in sorted(server.peers.items())
        if sight.heard_ms is not None and now_ms - sight.heard_ms < HEARD_MS
    }


@dataclass(frozen=True, slots=True)
class _Missing:
    """What a node has to catch up with: everything up to a seq, wanted since then.

    It was late already if it took too long to come up with what was wanted before.
    """

    seq: int
    since_ms: int
    was_late: bool = False

    def is_late(self, now_ms: int) -> bool:
        return now_ms - self.since_ms >= LAG_MS


class Fitness:
    """Looks at one node; remembers what it has to catch up with."""

    def __init__(self, max_clock_skew_ms: int) -> None:
        """Finds no fault yet."""
        self._max_clock_skew_ms = max_clock_skew_ms
        self._missing: Mapping[WheelId, _Missing] = {}

    def look(
        self, state: ControlState, server: ServerStatus, now_ms: int, wall_ms: int
    ) -> Reason | None:
        """Why this node should not lead; None: it may.

        Args:
            state: what is committed, as far as it is known here.
            server: the newest row of this node's server.
            now_ms: the monotonic clock.
            wall_ms: the wall clock.
        """
        known = state.nodes.get(server.beat.node)
        if known is not None and known.storage == REMOVED:
            return Reason.TAKEN_OUT
        heard = heard_beats(server, now_ms)
        self._missing = self._still_missing(state, server, heard, now_ms)
        if abs(_clock_offset_ms(server, heard, now_ms, wall_ms)) > self._max_clock_skew_ms:
            return Reason.CLOCK_OFF
        lags = any(
            (missing.was_late or missing.is_late(now_ms))
            and any(held_prefix(state, wheel, beat) >= missing.seq for beat in heard.values())
            for wheel, missing in self._missing.items()
        )
        return Reason.HANDED_OVER if lags else None

    def _still_missing(
        self, state: ControlState, server: ServerStatus, heard: Mapping[str, Beat], now_ms: int
    ) -> dict[WheelId, _Missing]:
        """An end is kept until it is reached, then the newest one counts: under load it moves."""
        missing: dict[WheelId, _Missing] = {}
        everyone = [server.beat, *heard.values()]
        own = server.beat.node
        answers = [answer for answer in server.answers if answer.node == own]
        for wheel, record in state.wheels.items():
            held = held_prefix(state, wheel, server.beat)
            before = self._missing.get(wheel)
            taken = 0 if state.progress is None else state.progress.seq(wheel)
            wanted = max(taken, _wanted(wheel, record, answers, everyone))
            if before is not None and held < before.seq <= wanted:
                missing[wheel] = before
            elif held < wanted:
                was_late = before is not None and before.is_late(now_ms)
                missing[wheel] = _Missing(wanted, now_ms, was_late)
        return missing


def _wanted(
    wheel: WheelId,
    record: WheelRecord,
    answers: Collection[FenceAnswer],
    beats: Collection[Beat],
) -> int:
    """Up to where a node should hold a wheel, so that it is on time; `answers` are its own."""
    if record.closed_at is not None:
        return record.closed_at
    if answers and any(answer.covers(wheel) for answer in answers):
        return record.fill
    told = [beat.wheels[wheel].high_watermark for beat in beats if wheel in beat.wheels]
    return max(told, default=0)


def _clock_offset_ms(
    server: ServerStatus, heard: Mapping[str, Beat], now_ms: int, wall_ms: int
) -> int:
    """How far the own clock is from the median of those that are heard; 0 for too few."""
    clocks = [wall_ms]
    for node, beat in heard.items():
        heard_ms = server.peers[node].heard_ms
        assert heard_ms is not None  # or it would not be heard
        clocks.append(beat.wall_ms + now_ms - heard_ms)
    return wall_ms - median_low(clocks) if len(clocks) >= CLOCKS else 0
