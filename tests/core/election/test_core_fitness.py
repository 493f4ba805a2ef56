"""Nodes that should not lead: one lags, or its clock is off."""

from dataclasses import replace
from typing import Any

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core.election.eligibility import (
    ASK_AGAIN_MS,
    BROKER_CLOCK_MS,
    HEARD_MS,
    LAG_MS,
    BrokerClock,
    Eligibility,
)
from delaywheel_replica.core.election.events import EndReason
from delaywheel_replica.core.protocol.control import REMOVED, ControlState, NodeRecord
from delaywheel_replica.core.protocol.frames import FrameSet
from delaywheel_replica.core.protocol.heartbeat import Fence, Heartbeat, Promise
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import KnownPeer, ServerStatus
from support.core.values import heartbeat, wheel_heartbeat, wheel_record_of

A1 = WheelId("a", 1)
WALL_MS = 1_000_000
SKEW_MS = 500
DISPUTE_MS = 10_000
RECORD = wheel_record_of("a", "b", "c", min_insync=2)
STATE = ControlState(wheels={A1: RECORD})


def reported(
    node: str, applied: int = 0, *, high_watermark: int = 0, wall_ms: int = WALL_MS
) -> Heartbeat:
    wheels = {A1: wheel_heartbeat(applied, high_watermark=high_watermark)}
    return replace(heartbeat(node, wheels=wheels), wall_ms=wall_ms)


def row(
    own: Heartbeat, *others: Heartbeat, now_ms: int, ago_ms: int = 0, **more: Any
) -> ServerStatus:
    peers = {other.node: KnownPeer(other, now_ms - ago_ms) for other in others}
    return ServerStatus(own, pid=1, monotonic_ms=now_ms, peers=peers, **more)


def look(
    fitness: Eligibility,
    *heartbeats: Heartbeat,
    now_ms: int,
    state: ControlState = STATE,
    **more: Any,
) -> EndReason | None:
    return fitness.look(state, row(*heartbeats, now_ms=now_ms, **more), now_ms, WALL_MS)


def lags(own: Heartbeat, *others: Heartbeat, state: ControlState = STATE, **more: Any) -> bool:
    """Whether a node that sees this, and nothing else for a second, lags."""
    fitness = Eligibility(SKEW_MS, DISPUTE_MS)
    assert look(fitness, own, *others, now_ms=0, state=state, **more) is None
    before = look(fitness, own, *others, now_ms=LAG_MS - 1, state=state, **more)
    after = look(fitness, own, *others, now_ms=LAG_MS, state=state, **more)
    assert before is None
    return after is EndReason.HANDED_OVER


def test_who_lacks_for_a_second_what_another_holds_lags() -> None:
    a = reported("a", 9, high_watermark=9)
    assert lags(reported("b", 7), a)
    assert not lags(reported("b", 9), a)
    assert not lags(reported("b", 7), reported("a", 9, high_watermark=7))


def test_nobody_lags_behind_what_nobody_holds_or_nobody_hears() -> None:
    assert not lags(reported("b", 7), reported("a", 8, high_watermark=9))
    assert not lags(reported("b", 7), reported("a", 9, high_watermark=9), ago_ms=HEARD_MS)
    assert lags(reported("b", 7), reported("a", 0, high_watermark=9), reported("c", 9))


def test_a_mirror_that_follows_under_load_does_not_lag() -> None:
    fitness = Eligibility(SKEW_MS, DISPUTE_MS)
    for now_ms in range(0, 10_000, 100):
        a = reported("a", now_ms, high_watermark=now_ms)
        own = reported("b", max(0, now_ms - 800))
        assert look(fitness, own, a, now_ms=now_ms) is None
    for now_ms in range(10_000, 20_000, 100):
        a = reported("a", now_ms, high_watermark=now_ms)
        found = look(fitness, reported("b", now_ms - 2_500), a, now_ms=now_ms)
        assert found is EndReason.HANDED_OVER or now_ms < 11_000
    for now_ms in range(20_000, 30_000, 100):
        a = reported("a", now_ms, high_watermark=now_ms)
        found = look(fitness, reported("b", now_ms - 500), a, now_ms=now_ms)
    assert found is None


def test_a_leader_whose_transactions_take_seconds_does_not_lag_for_that() -> None:
    """It looks before each of them, and what came meanwhile may have come at once."""
    fitness = Eligibility(SKEW_MS, DISPUTE_MS)
    for now_ms in range(0, 30_000, 2_500):
        a = reported("a", now_ms + 9, high_watermark=now_ms + 9)
        own = reported("b", now_ms + 8)  # the newest is always under way
        assert look(fitness, own, a, now_ms=now_ms) is None
    behind = reported("b", now_ms + 8)
    for now_ms in (32_500, 35_000):
        a = reported("a", now_ms + 9, high_watermark=now_ms + 9)
        assert look(fitness, behind, a, now_ms=now_ms) is EndReason.HANDED_OVER


def test_what_is_promised_is_wanted_up_to_its_fill_and_what_is_closed_up_to_its_end() -> None:
    a, own = reported("a", 9, high_watermark=9), reported("b", 7)
    promise = Promise("b", own.storage, Fence("a", 1), {A1: 7})
    others = Promise("c", "disk-c", Fence("a", 1), {A1: 7})
    limited = ControlState(wheels={A1: replace(RECORD, limit=8)})
    closed = ControlState(wheels={A1: replace(RECORD, closed_at=8)})
    assert not lags(own, a, answers=(promise,))
    assert lags(own, a, answers=(others,))
    assert lags(own, a, answers=(promise,), state=limited)
    assert lags(own, a, answers=(promise,), state=closed)
    assert not lags(reported("b", 8), a, answers=(promise,), state=closed)


def test_what_is_taken_is_wanted_whatever_is_reported_or_promised() -> None:
    """A leader that cannot get it would rest for ever."""
    a, own = reported("a", 9), reported("b", 7)
    promise = Promise("b", own.storage, Fence("a", 1), {A1: 7})
    taken = replace(STATE, progress=Progress(0, None, {A1: 8}))
    assert not lags(own, a)
    assert lags(own, a, state=taken)
    assert lags(own, a, state=taken, answers=(promise,))


def test_lost_frames_are_not_caught_up_with() -> None:
    a, own = reported("a", 9, high_watermark=9), reported("b", 8)
    assert not lags(own, a, state=replace(STATE, lost=FrameSet.of({(A1, 9)})))


@pytest.mark.parametrize(
    ("clocks", "off"),
    [
        ((), False),
        ((9_000,), False),
        ((501, 600), True),
        ((-501, -600), True),
        ((500, 600), False),
        ((-9_000, 600), False),
        ((0, 9_000), False),
        ((-600, 600, 700), False),
        ((600, 600, 0, 0), False),
        ((600, 600, 600, 0), True),
    ],
)
def test_a_clock_is_compared_with_the_median_of_three_or_more(
    clocks: tuple[int, ...], off: bool
) -> None:
    others = [reported(n, wall_ms=WALL_MS + c) for n, c in zip("bcde", clocks, strict=False)]
    reason = look(Eligibility(SKEW_MS, DISPUTE_MS), reported("a", wall_ms=0), *others, now_ms=0)
    assert reason is (EndReason.CLOCK_OFF if off else None)


def test_a_clock_is_counted_on_since_it_was_heard() -> None:
    others = [reported(node, wall_ms=WALL_MS) for node in "bc"]
    fitness = Eligibility(SKEW_MS, DISPUTE_MS)
    assert look(fitness, reported("a"), *others, now_ms=5_000, ago_ms=500) is None
    assert look(fitness, reported("a"), *others, now_ms=5_000, ago_ms=501) is EndReason.CLOCK_OFF
    assert look(fitness, reported("a"), *others, now_ms=5_000, ago_ms=HEARD_MS) is None


@pytest.mark.parametrize(
    ("other", "kafka", "off"),
    [
        (None, None, False),
        (None, -10_000, False),
        (None, 10_001, True),
        (None, -10_001, True),
        (10_000, None, False),
        (-10_001, None, True),
        (10_001, 10_001, True),
        (86_400_000, 0, False),
        (0, 86_400_000, False),
        (-86_400_000, 86_400_000, False),
        (86_400_000, 43_200_000, True),
    ],
)
def test_of_fewer_clocks_kafkas_is_one_more(
    other: int | None, kafka: int | None, *, off: bool
) -> None:
    """The median of three counts; of two that differ the wrong one is unknown."""
    others = [] if other is None else [reported("b", wall_ms=WALL_MS + other)]
    ahead_ms = None if kafka is None else WALL_MS + kafka - 5_000
    broker = None if ahead_ms is None else BrokerClock(ahead_ms, ahead_ms, 5_000)
    fitness = Eligibility(SKEW_MS, DISPUTE_MS)
    status = row(reported("a"), *others, now_ms=5_000)
    found = fitness.look(STATE, status, 5_000, WALL_MS, broker, in_term=True)
    assert found is (EndReason.CLOCK_OFF if off else None)
    assert (fitness.clock_fault is not None) is off


def test_where_three_nodes_clocks_are_known_kafkas_counts_for_nothing() -> None:
    others = [reported(node) for node in "bc"]
    broker = BrokerClock(0, 0, 5_000)
    status = row(reported("a"), *others, now_ms=5_000)
    assert Eligibility(SKEW_MS, DISPUTE_MS).look(STATE, status, 5_000, WALL_MS, broker) is None


@pytest.mark.parametrize(
    ("others", "broker"),
    [
        ((), BrokerClock(0, 0, 5_000)),
        ((reported("b", wall_ms=WALL_MS + 86_400_000),), None),
        (
            (reported("b", wall_ms=WALL_MS + 86_400_000),),
            BrokerClock(2 * WALL_MS, 2 * WALL_MS, 5_000),
        ),
    ],
)
def test_kafka_is_asked_again_by_who_could_not_lead_for_its_clock(
    others: tuple[Heartbeat, ...], broker: BrokerClock | None
) -> None:
    """Whichever clock was wrong may have been corrected since."""
    fitness = Eligibility(SKEW_MS, DISPUTE_MS)

    def found(now_ms: int, *, in_term: bool = False) -> EndReason | None:
        status = row(reported("a"), *others, now_ms=now_ms)
        return fitness.look(STATE, status, now_ms, WALL_MS, broker, in_term=in_term)

    assert found(5_000) is None
    assert found(5_000, in_term=True) is EndReason.CLOCK_OFF
    assert found(5_000 + ASK_AGAIN_MS - 1) is EndReason.CLOCK_OFF
    assert found(5_000 + ASK_AGAIN_MS) is None
    assert fitness.clock_fault is not None


def test_what_was_read_of_kafkas_clock_counts_for_the_whole_term_and_no_longer() -> None:
    fitness, broker = Eligibility(SKEW_MS, DISPUTE_MS), BrokerClock(0, 0, 5_000)
    now_ms = 5_000 + BROKER_CLOCK_MS
    status = row(reported("a"), now_ms=now_ms)
    assert fitness.look(STATE, status, now_ms, WALL_MS, broker) is None
    assert fitness.clock_fault is None
    found = fitness.look(STATE, status, now_ms, WALL_MS, broker, in_term=True)
    assert found is EndReason.CLOCK_OFF
    assert fitness.look(STATE, status, now_ms, WALL_MS, broker) is None


def test_the_time_that_a_mark_takes_counts_against_nobody() -> None:
    fitness, broker = Eligibility(SKEW_MS, DISPUTE_MS), BrokerClock(WALL_MS, WALL_MS + 20_000, 0)
    for wall_ms, off in ((-10_001, True), (-10_000, False), (30_000, False), (30_001, True)):
        found = fitness.look(
            STATE, row(reported("a"), now_ms=0), 0, WALL_MS + wall_ms, broker, in_term=True
        )
        assert (found is EndReason.CLOCK_OFF) is off, wall_ms


def test_a_clock_that_is_off_is_reported_with_how_far_and_whose() -> None:
    fitness = Eligibility(SKEW_MS, DISPUTE_MS)
    look(fitness, reported("a"), reported("b", wall_ms=WALL_MS - 86_400_000), now_ms=0)
    said = "the clock of node a is 86,400,000 ms ahead of that of b"
    assert str(fitness.clock_fault).startswith(said)
    look(fitness, reported("a"), reported("b"), now_ms=1)
    assert fitness.clock_fault is None


def test_who_was_taken_out_should_not_lead() -> None:
    for storage, reason in ((REMOVED, EndReason.TAKEN_OUT), ("disk-a", None), ("disk-new", None)):
        state = replace(STATE, nodes={"a": NodeRecord(storage, 1), "b": NodeRecord(REMOVED, 1)})
        assert (
            look(Eligibility(SKEW_MS, DISPUTE_MS), reported("a"), now_ms=0, state=state) is reason
        )
