"""Votes: when a node agrees that no leader is heard."""

from delaywheel_replica.core.member.prevote import Prevote
from delaywheel_replica.core.protocol.messages import PrevoteRequest, Vote

ASK = PrevoteRequest(1, 1_000)


def agrees(
    voting: Prevote, sender: str, now_ms: int, ask: PrevoteRequest = ASK, *, stands: bool = False
) -> bool:
    return voting.asked(sender, ask, now_ms, stands=stands) == Vote(ask.round)


def test_silence_is_counted_from_the_start_at_the_earliest() -> None:
    voting = Prevote("b", 10_000)
    assert voting.leader_heard_ms is None
    assert not agrees(voting, "a", 10_999)
    assert agrees(voting, "a", 11_000)


def test_a_leader_that_is_heard_keeps_its_term() -> None:
    voting = Prevote("b", 0)
    voting.leader_heard("c", 5_000)
    assert voting.leader_heard_ms == 5_000
    assert not agrees(voting, "a", 5_999)
    assert agrees(voting, "a", 6_000)


def test_a_leader_that_is_gone_counts_at_once() -> None:
    voting = Prevote("b", 0)
    voting.leader_heard("c", 5_000)
    assert not voting.gone("a")
    assert not agrees(voting, "a", 5_001)
    assert voting.gone("c")
    assert voting.leader_heard_ms is None
    assert agrees(voting, "a", 5_001)


def test_the_very_leader_that_asks_has_left_term() -> None:
    voting = Prevote("b", 0)
    voting.leader_heard("c", 5_000)
    assert agrees(voting, "c", 5_001)


def test_a_vote_counts_as_a_leader_heard_and_blocks_others() -> None:
    voting = Prevote("b", 0)
    assert agrees(voting, "a", 5_000)
    assert voting.leader_heard_ms == 5_000
    assert not agrees(voting, "c", 5_999)
    assert agrees(voting, "c", 6_000)


def test_the_same_round_is_answered_again_without_blocking_others_for_longer() -> None:
    voting = Prevote("b", 0)
    assert agrees(voting, "a", 5_000)
    assert agrees(voting, "a", 5_900)
    assert voting.leader_heard_ms == 5_000
    assert agrees(voting, "a", 5_950, PrevoteRequest(2, 1_000))
    assert voting.leader_heard_ms == 5_950


def test_who_stands_agrees_with_nobody() -> None:
    assert not agrees(Prevote("b", 0), "a", 5_000, stands=True)


def test_of_two_that_ask_at_once_the_later_in_order_gives_way() -> None:
    first, second = Prevote("a", 0), Prevote("b", 0)
    for voting in (first, second):
        assert voting.requested(PrevoteRequest(1, 1_000))
    assert second.voted("c", Vote(1))
    assert not agrees(first, "b", 5_000)
    assert agrees(second, "a", 5_000)
    assert second.votes == frozenset()
    assert second.ask() is None
    assert not second.voted("c", Vote(1))
    assert first.voted("b", Vote(1))
    assert first.votes == {"b"}
    assert second.requested(PrevoteRequest(2, 1_000))
    assert second.ask() == PrevoteRequest(2, 1_000)


def test_votes_of_another_round_do_not_count() -> None:
    voting = Prevote("a", 0)
    assert voting.round == 0
    assert not voting.voted("b", Vote(0))
    voting.requested(PrevoteRequest(3, 1_000))
    assert not voting.requested(PrevoteRequest(3, 1_000))
    assert not voting.voted("b", Vote(2))
    assert voting.voted("b", Vote(3))
    assert not voting.voted("b", Vote(3))
    voting.requested(None)
    assert voting.votes == frozenset()
    assert voting.ask() is None
