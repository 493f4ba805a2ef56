"""How a node among several comes to stand: silence, its turn, the others' votes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from delaywheel_replica.core.election.events import (
    ControlRead,
    DestroyProducers,
    ElectionPhase,
    ElectionTick,
    EndReason,
    InitFailed,
    InitProducers,
    InitsDone,
    MarkReport,
    TransactionReport,
)
from delaywheel_replica.core.election.machine import (
    ASKING_MS,
    LASTING_MS,
    MIN_SILENCE_MS,
    RANK_MS,
    YIELDING,
    Election,
    ElectionConfig,
)
from delaywheel_replica.core.protocol.control import ControlState, leader_record
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState

STEP_MS = 10
STAGGER_MS = 2 * RANK_MS
"""More than the first node in rank ever waits beyond the silence."""


def config(run: str = "r", *, rank: int = 0, required: int = 2, nodes: int = 3) -> ElectionConfig:
    return ElectionConfig(run=run, nodes=nodes, required=required, rank=rank)


def tick(now_ms: int, **more: object) -> ElectionTick:
    fields = {"server_fresh": True, "holds_progress": True, **more}
    return ElectionTick(now_ms=now_ms, wall_ms=now_ms, **fields)  # type: ignore[arg-type]


def run_until(
    election: Election,
    holds: Callable[[Election], bool],
    *,
    from_ms: int = 0,
    within_ms: int = 10_000,
    **more: Any,
) -> int:
    """Ticks until it holds; returns when that was."""
    for now_ms in range(from_ms, from_ms + within_ms, STEP_MS):
        election.step(tick(now_ms, **more))
        if holds(election):
            return now_ms
    pytest.fail(f"{election.phase} after {within_ms} ms")


def asks(election: Election) -> bool:
    return election.prevote_request is not None


def votes_for(election: Election, names: str) -> dict[str, Any]:
    """Lets these nodes agree to the present question."""
    request = election.prevote_request
    assert request is not None
    return {"votes": frozenset(names), "vote_round": request.round}


def stands(election: Election) -> bool:
    return election.phase is ElectionPhase.INITIALISING


def asking(*, nodes: int = 3, required: int = 2) -> tuple[Election, int]:
    """A node that asks, and since when."""
    election = Election(config(nodes=nodes, required=required))
    return election, run_until(election, asks)


def leading(now_ms: int, **more: Any) -> Election:
    """A node of three that leads."""
    election = Election(config())
    at_ms = run_until(election, asks, **more)
    election.step(tick(at_ms, **votes_for(election, "b"), **more))
    token = election.token
    election.step(InitsDone(now_ms, token))
    state = ControlState(progress=Progress(0, None))
    for index in (0, 1):
        election.step(MarkReport(now_ms, token, index, TransactionState.COMMITTED))
        state = state.apply(*leader_record(index, "a", token), index)
    election.step(ControlRead(now_ms, token, state))
    election.step(tick(now_ms, **more))
    assert election.phase is ElectionPhase.LEADING
    return election


def keep_leading(election: Election, from_ms: int, to_ms: int, **more: Any) -> None:
    """It commits its records, and stays the leader."""
    for now_ms in range(from_ms, to_ms, 100):
        election.step(tick(now_ms, **more))
        election.step(TransactionReport(now_ms, election.token, TransactionState.COMMITTED, 20))
        assert election.phase is ElectionPhase.LEADING


# --- votes


def test_who_hears_nobody_asks_after_the_silence_and_stands_with_enough_votes() -> None:
    election, at_ms = asking()
    assert MIN_SILENCE_MS <= at_ms <= MIN_SILENCE_MS + STAGGER_MS
    request = election.prevote_request
    assert request is not None
    assert request.silence_ms == MIN_SILENCE_MS
    assert election.step(tick(at_ms + 100)) == []
    voted = tick(at_ms + 200, votes=frozenset({"c"}), vote_round=request.round)
    assert election.step(voted) == [InitProducers("r-1")]
    assert election.prevote_request is None


@pytest.mark.parametrize(("votes", "enough"), [("", False), ("b", False), ("bc", True)])
def test_r_nodes_have_to_hear_none_the_asker_counted(votes: str, enough: bool) -> None:
    election, at_ms = asking(nodes=5, required=3)
    election.step(tick(at_ms + 100, **votes_for(election, votes)))
    assert stands(election) == enough


def test_votes_of_an_earlier_round_do_not_count() -> None:
    election, at_ms = asking()
    old = votes_for(election, "bc")
    now_ms = run_until(election, lambda e: e.phase is ElectionPhase.STANDBY, from_ms=at_ms)
    assert now_ms - at_ms == ASKING_MS
    run_until(election, asks, from_ms=now_ms, within_ms=STAGGER_MS, **old)
    election.step(tick(now_ms + STAGGER_MS, **old))
    assert asks(election)
    election.step(tick(now_ms + STAGGER_MS, **votes_for(election, "b")))
    assert stands(election)


def test_votes_for_an_earlier_life_do_not_count() -> None:
    before, at_ms = asking()
    old = votes_for(before, "bc")
    election = Election(config("another"))
    run_until(election, asks, from_ms=at_ms, **old)
    election.step(tick(at_ms + 3_000, **old))
    assert not stands(election)


@pytest.mark.parametrize(
    "ends",
    [
        {"server_fresh": False},
        {"hears_enough": False},
        {"unfit": EndReason.CLOCK_OFF},
        {"unfit": EndReason.TAKEN_OUT},
    ],
)
def test_asking_ends_when_it_could_not_stand(ends: dict[str, object]) -> None:
    election, at_ms = asking()
    election.step(tick(at_ms + 100, **votes_for(election, "bc"), **ends))
    assert election.phase is ElectionPhase.STANDBY


def test_asking_ends_when_a_leader_is_heard_or_a_vote_was_given() -> None:
    """Both count as having heard a leader, perhaps late. Old ones end nothing."""
    election, at_ms = asking()
    election.step(tick(at_ms + 100, heard_ms=at_ms + 100 - MIN_SILENCE_MS))
    assert asks(election)
    reported_late, _ = asking()
    reported_late.step(tick(at_ms + 100, heard_ms=at_ms - 5))
    assert reported_late.phase is ElectionPhase.STANDBY
    election.step(tick(at_ms + 200, heard_ms=at_ms + 150, **votes_for(election, "bc")))
    assert election.phase is ElectionPhase.STANDBY
    again_ms = run_until(election, asks, from_ms=at_ms + 200, heard_ms=at_ms + 150)
    assert again_ms >= at_ms + 150 + MIN_SILENCE_MS


def test_where_one_is_enough_nobody_is_asked_but_the_control_topic_has_to_be_quiet() -> None:
    election = Election(config(required=1))
    late = MIN_SILENCE_MS + STAGGER_MS
    loud = {"control_quiet_ms": MIN_SILENCE_MS - 1}
    run_until(election, asks, within_ms=late, **loud)
    assert not stands(election)
    election.step(tick(late, control_quiet_ms=MIN_SILENCE_MS))
    assert stands(election)


def test_a_majority_needs_no_quiet_control_topic() -> None:
    election, at_ms = asking()
    election.step(tick(at_ms + 100, **votes_for(election, "b"), control_quiet_ms=0))
    assert stands(election)


# --- turns


def test_nodes_come_in_turns_by_rank_and_never_at_the_same_moment_twice() -> None:
    waits: dict[int, set[int]] = {
        rank: {run_until(Election(config(f"r{run}", rank=rank)), asks) for run in range(20)}
        for rank in range(3)
    }
    for rank, found in waits.items():
        assert len(found) > 5, "no chance in it"
        assert min(found) >= MIN_SILENCE_MS + rank * RANK_MS
        assert max(found) < MIN_SILENCE_MS + (rank + 1) * RANK_MS + STEP_MS


def test_who_asked_in_vain_lets_the_others_go_first_again() -> None:
    election = Election(config(rank=2))
    run_until(election, asks)
    now_ms = run_until(election, lambda e: e.phase is ElectionPhase.STANDBY, from_ms=1_000)
    assert run_until(election, asks, from_ms=now_ms) >= now_ms + 2 * RANK_MS


def test_the_same_run_waits_the_same_time() -> None:
    assert asking()[1] == asking()[1]


# --- leaders that are heard, and leaders that go


def test_a_leader_that_is_heard_puts_the_asking_off() -> None:
    election = Election(config())
    for now_ms in range(0, 5_000, 100):
        assert election.step(tick(now_ms, heard_ms=now_ms - 50)) == []
        assert not asks(election)
    at_ms = run_until(election, asks, from_ms=5_000, heard_ms=4_850)
    assert 4_850 + MIN_SILENCE_MS <= at_ms <= 4_850 + MIN_SILENCE_MS + STAGGER_MS


def test_a_broken_connection_to_the_leader_is_as_good_as_the_silence() -> None:
    election = Election(config(rank=1))
    election.step(tick(0, heard_ms=-10))
    election.step(tick(100, heard_ms=90))
    at_ms = run_until(election, asks, from_ms=200, heard_ms=None)
    assert 200 + RANK_MS <= at_ms <= 200 + 2 * RANK_MS


def test_having_stood_counts_as_having_heard_a_leader() -> None:
    election, at_ms = asking()
    election.step(tick(at_ms, **votes_for(election, "b")))
    election.step(InitFailed(at_ms, election.token, TransactionState.UNKNOWN))
    again_ms = run_until(election, asks, from_ms=at_ms)
    assert 2 * MIN_SILENCE_MS <= again_ms - at_ms <= 2 * MIN_SILENCE_MS + STAGGER_MS
    request = election.prevote_request
    assert request is not None
    assert request.silence_ms == 2 * MIN_SILENCE_MS


def test_a_leader_that_is_heard_ends_the_wait_after_a_failure() -> None:
    """From then on that one's silence is awaited, no longer the node's own."""
    election, at_ms = asking()
    election.step(tick(at_ms, **votes_for(election, "b")))
    election.step(InitFailed(at_ms, election.token, TransactionState.FENCED))
    election.step(tick(at_ms + 500, heard_ms=at_ms + 500))
    again_ms = run_until(election, asks, from_ms=at_ms + 600, heard_ms=None)
    assert again_ms <= at_ms + 600 + STAGGER_MS


def test_a_broken_connection_does_not_shorten_the_wait_after_an_own_failure() -> None:
    election, at_ms = asking()
    election.step(tick(at_ms, heard_ms=at_ms - 1_000, **votes_for(election, "b")))
    election.step(InitFailed(at_ms, election.token, TransactionState.UNKNOWN))
    again_ms = run_until(election, asks, from_ms=at_ms, heard_ms=None)
    assert again_ms >= at_ms + 2 * MIN_SILENCE_MS


# --- nodes that should not lead


@pytest.mark.parametrize("unfit", [EndReason.CLOCK_OFF, EndReason.HANDED_OVER, EndReason.TAKEN_OUT])
def test_a_leader_that_should_not_lead_hands_over_and_waits_longer(unfit: EndReason) -> None:
    now_ms = 5_000
    election = leading(now_ms)
    assert election.step(tick(now_ms + 10, unfit=unfit)) == [DestroyProducers(unfit)]
    assert election.silence_ms == MIN_SILENCE_MS, "nothing failed: no reason to go slower"
    again_ms = run_until(election, asks, from_ms=now_ms + 20)
    assert again_ms - now_ms >= YIELDING * MIN_SILENCE_MS


def test_a_leader_whose_clock_was_set_waits_longer_too() -> None:
    now_ms = 5_000
    election = leading(now_ms)
    election.step(replace(tick(now_ms + 10), wall_ms=now_ms + 3_600_000))
    assert election.phase is ElectionPhase.STANDBY
    again_ms = run_until(election, asks, from_ms=now_ms + 20)
    assert again_ms - now_ms >= YIELDING * election.silence_ms


def test_others_come_first_whatever_their_rank() -> None:
    """The one that yields is first in rank; even the last of the others has asked before it."""
    now_ms = 5_000
    first = leading(now_ms)
    last = Election(config("last", rank=2))
    last.step(tick(now_ms, heard_ms=now_ms))
    first.step(tick(now_ms, unfit=EndReason.HANDED_OVER))
    last_ms = run_until(last, asks, from_ms=now_ms, heard_ms=now_ms)
    assert run_until(first, asks, from_ms=now_ms) > last_ms + ASKING_MS


def test_a_node_that_lags_stands_if_nobody_else_does() -> None:
    election = Election(config())
    at_ms = run_until(election, asks, unfit=EndReason.HANDED_OVER)
    assert at_ms >= (1 + YIELDING) * MIN_SILENCE_MS


def test_who_stood_lagging_gets_the_time_to_catch_up() -> None:
    now_ms = 5_000
    election = leading(now_ms, unfit=EndReason.HANDED_OVER)
    end_ms = now_ms + LASTING_MS
    keep_leading(election, now_ms, end_ms, unfit=EndReason.HANDED_OVER)
    effects = election.step(tick(end_ms, unfit=EndReason.HANDED_OVER))
    assert effects == [DestroyProducers(EndReason.HANDED_OVER)]


def test_a_node_with_a_clock_that_is_off_does_not_ask() -> None:
    election = Election(config())
    for now_ms in range(0, 10_000, 100):
        election.step(tick(now_ms, unfit=EndReason.CLOCK_OFF))
        assert not asks(election)
    run_until(election, asks, from_ms=10_000, within_ms=STAGGER_MS)
