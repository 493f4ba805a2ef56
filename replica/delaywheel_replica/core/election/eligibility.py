"""Whether a node that could lead should do so: docs/PROTOCOL.md, "Who should not lead".

A leader looks only between transactions; where these take longer than `LAG_MS`, what is missing at
one look counts as late if it is still missing at the next.

A node that was removed follows outdated settings: if R is 1 it would ask no other node, and disturb
the others forever.

Frames that the node could not accept whatever it did are not held against it: a wheel that it has
promised to refuse is required only up to the committed limit, a closed one up to its end. V is
required in any case: without it a leader forwards nothing at all.

A clock is compared as a heartbeat reported it, plus the time since it arrived: it appears behind by
the time that the heartbeat was under way.

If the clocks of fewer than three nodes are known, the brokers' clock, which a candidate reads with
its marks, is another one. Of three the median counts. Of two, either may be wrong, so no node
leads: a leader whose clock is a day ahead would forward that day's messages at once.

Only a candidacy reads the brokers' clock, and either clock may be corrected at any time:

| a node | clocks of three nodes are known | of fewer |
|---|---|---|
| stands by, or is a candidate | its clock counts against it | only for `ASK_AGAIN_MS` after it |
|   |   | read Kafka's for a term that ended for that |
| rests or leads | its clock counts against it | likewise, and Kafka's as read for this term |
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from statistics import median_low

from delaywheel.identity import WheelId
from delaywheel_replica.core.election.events import EndReason
from delaywheel_replica.core.leader.holders import held_prefix
from delaywheel_replica.core.protocol.control import REMOVED, ROLLED_BACK, ControlState, WheelRecord
from delaywheel_replica.core.protocol.heartbeat import Heartbeat, Promise
from delaywheel_replica.core.protocol.status_files import ServerStatus

HEARD_MS = 1_000
"""A node that sent nothing for this long is not heard."""

LAG_MS = 1_000
CLOCKS = 3

ASK_AGAIN_MS = 10_000
"""A node whose clock was off from Kafka's, or the only other one, asks Kafka again after this."""

BROKER_CLOCK_MS = 60_000
"""A node that does not lead reports for this long how far its clock was off from Kafka's."""


def heard_heartbeats(server: ServerStatus, now_ms: int) -> dict[str, Heartbeat]:
    """Returns the newest heartbeats of the other nodes that are heard directly."""
    return {
        node: known.heartbeat
        for node, known in sorted(server.peers.items())
        if known.heard_ms is not None and now_ms - known.heard_ms < HEARD_MS
    }


@dataclass(frozen=True, slots=True)
class BrokerClock:
    """The brokers' wall clock, as read during a candidacy.

    Attributes:
        least_ms: How far it is ahead of the own monotonic clock, at least.
        most_ms: And at most.
        found_ms: When, by the monotonic clock.
    """

    least_ms: int
    most_ms: int
    found_ms: int

    def nearest_ms(self, now_ms: int, wall_ms: int) -> int:
        """Returns the broker time closest to the local wall clock, within the measurement error."""
        return min(max(wall_ms, now_ms + self.least_ms), now_ms + self.most_ms)


@dataclass(frozen=True, slots=True)
class _Missing:
    """What a node has to catch up with: everything up to a seq, required since a given time.

    Attributes:
        missing_ms: When it was last seen to be missing. A leader looks between transactions, which
            may take seconds: what it holds at the next look may have come at once.
        was_late: It took too long to reach the previous target.
    """

    seq: int
    since_ms: int
    missing_ms: int
    was_late: bool = False

    @property
    def is_late(self) -> bool:
        return self.missing_ms - self.since_ms >= LAG_MS


class Eligibility:
    """Judges whether one node should lead; remembers what it has to catch up with.

    `clock_fault` is what is wrong with its clock, for people; None: nothing.
    """

    def __init__(self, max_clock_skew_ms: int, max_clock_dispute_ms: int) -> None:
        self._max_clock_skew_ms = max_clock_skew_ms
        self._max_clock_dispute_ms = max_clock_dispute_ms
        self.clock_fault: str | None = None
        # Of the last term that ended for it: when Kafka's clock was read.
        self._objected_ms: int | None = None
        self._missing: Mapping[WheelId, _Missing] = {}

    def look(
        self,
        state: ControlState,
        server: ServerStatus,
        now_ms: int,
        wall_ms: int,
        broker: BrokerClock | None = None,
        *,
        in_term: bool = False,
    ) -> EndReason | None:
        """Returns why this node should not lead; None if it may.

        Args:
            state: What is committed, as far as known here.
            now_ms: The monotonic clock.
            broker: The brokers' clock, as last read.
            in_term: This node rests or leads, since that reading.
        """
        known = state.nodes.get(server.heartbeat.node)
        if known is not None and known.storage == REMOVED:
            return EndReason.TAKEN_OUT
        storage, saves = server.heartbeat.storage, server.heartbeat.saves
        if storage == ROLLED_BACK or (known is not None and known.is_ahead_of(storage, saves)):
            return EndReason.STORAGE_ROLLED_BACK
        heard = heard_heartbeats(server, now_ms)
        self._missing = self._still_missing(state, server, heard, now_ms)
        is_known = in_term or (broker is not None and now_ms - broker.found_ms < BROKER_CLOCK_MS)
        kafka = broker if is_known else None
        self.clock_fault = self._clock_fault(server, heard, now_ms, wall_ms, kafka)
        if in_term and self.clock_fault is not None:
            self._objected_ms = now_ms if broker is None else broker.found_ms
        if self.clock_fault is not None and (in_term or not self._may_ask_kafka(heard, now_ms)):
            return EndReason.CLOCK_OFF
        lags = any(
            (missing.was_late or missing.is_late)
            and any(
                held_prefix(state, wheel, heartbeat) >= missing.seq for heartbeat in heard.values()
            )
            for wheel, missing in self._missing.items()
        )
        return EndReason.HANDED_OVER if lags else None

    def _may_ask_kafka(self, heard: Mapping[str, Heartbeat], now_ms: int) -> bool:
        """Whether a clock that seems to be off may turn out to be right when Kafka is asked."""
        if len(heard) + 1 >= CLOCKS:
            return False
        return self._objected_ms is None or now_ms - self._objected_ms >= ASK_AGAIN_MS

    def _clock_fault(
        self,
        server: ServerStatus,
        heard: Mapping[str, Heartbeat],
        now_ms: int,
        wall_ms: int,
        broker: BrokerClock | None,
    ) -> str | None:
        """Returns how far the local clock is off from the known ones; None if tolerable."""
        clocks = _clocks_heard(server, heard, now_ms)
        most_ms = self._max_clock_skew_ms
        if len(clocks) + 1 < CLOCKS:
            most_ms = self._max_clock_dispute_ms
            if broker is not None:
                clocks["Kafka"] = broker.nearest_ms(now_ms, wall_ms)
        if not clocks:
            return None
        others = list(clocks.values())
        others_ms = median_low([wall_ms, *others]) if len(others) > 1 else others[0]
        off_ms = wall_ms - others_ms
        if abs(off_ms) <= most_ms:
            return None
        whose = " and ".join(sorted(clocks))
        way = "ahead of" if off_ms > 0 else "behind"
        return (
            f"the clock of node {server.heartbeat.node} is {abs(off_ms):,} ms {way}"
            f" that of {whose}: correct the one that is wrong"
        )

    def _still_missing(
        self, state: ControlState, server: ServerStatus, heard: Mapping[str, Heartbeat], now_ms: int
    ) -> dict[WheelId, _Missing]:
        """Keeps a target until it is reached, then uses the newest: under load targets move."""
        missing: dict[WheelId, _Missing] = {}
        everyone = [server.heartbeat, *heard.values()]
        own = server.heartbeat.node
        answers = [answer for answer in server.answers if answer.node == own]
        for wheel, record in state.wheels.items():
            held = held_prefix(state, wheel, server.heartbeat)
            before = self._missing.get(wheel)
            taken = 0 if state.progress is None else state.progress.seq(wheel)
            wanted = max(taken, _wanted(wheel, record, answers, everyone))
            if before is not None and held < before.seq <= wanted:
                missing[wheel] = replace(before, missing_ms=now_ms)
            elif held < wanted:
                was_late = before is not None and before.is_late
                missing[wheel] = _Missing(wanted, now_ms, now_ms, was_late)
        return missing


def _wanted(
    wheel: WheelId,
    record: WheelRecord,
    answers: Collection[Promise],
    heartbeats: Collection[Heartbeat],
) -> int:
    """Returns the seq up to which a node should hold a wheel; `answers` are the node's own."""
    if record.closed_at is not None:
        return record.closed_at
    if answers and any(answer.covers(wheel) for answer in answers):
        return record.limit
    reported = [
        heartbeat.wheels[wheel].high_watermark
        for heartbeat in heartbeats
        if wheel in heartbeat.wheels
    ]
    return max(reported, default=0)


def _clocks_heard(
    server: ServerStatus, heard: Mapping[str, Heartbeat], now_ms: int
) -> dict[str, int]:
    clocks = {}
    for node, heartbeat in heard.items():
        heard_ms = server.peers[node].heard_ms
        assert heard_ms is not None  # or it would not be heard
        clocks[node] = heartbeat.wall_ms + now_ms - heard_ms
    return clocks
