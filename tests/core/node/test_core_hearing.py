"""What a node hears: latest heartbeats, reachability, the leader's clock."""

from dataclasses import replace

import pytest

from delaywheel_replica.core.node.events import MemberConfig
from delaywheel_replica.core.node.heard_heartbeats import HeardHeartbeats, HeartbeatNews
from delaywheel_replica.core.protocol.heartbeat import Heard, Heartbeat, LeaderTerm
from delaywheel_replica.core.protocol.messages import Gossip
from delaywheel_replica.core.protocol.progress import Reached
from support.core.values import heartbeat


def hearing() -> HeardHeartbeats:
    return HeardHeartbeats(MemberConfig("a", ("a", "b", "c"), 2, 120))


def reported(node: str, count: int, *, start: int = 1, **values: object) -> Heartbeat:
    return replace(heartbeat(node), start=start, count=count, **values)  # type: ignore[arg-type]


def hear(
    ears: HeardHeartbeats, sender: str, newest: Heartbeat, now_ms: int, *others: Heartbeat
) -> list[HeartbeatNews]:
    news = ears.gossip(sender, Gossip(newest, others), now_ms)
    ears.message(sender, now_ms)
    return news


def test_only_a_later_beat_is_news() -> None:
    ears = hearing()
    newer = reported("b", 5)
    assert hear(ears, "b", newer, 0) == [HeartbeatNews(newer, is_direct=True)]
    assert hear(ears, "b", newer, 1) == []
    assert hear(ears, "b", reported("b", 4), 2) == []
    assert ears.heartbeats() == {"b": newer}
    later_life = reported("b", 1, start=2)
    assert hear(ears, "b", later_life, 3) == [HeartbeatNews(later_life, is_direct=True)]


def test_a_beat_that_was_relayed_first_is_news_again_when_it_comes_directly() -> None:
    ears = hearing()
    mine = reported("b", 5)
    assert hear(ears, "c", reported("c", 1), 0, mine)[1:] == [HeartbeatNews(mine, is_direct=False)]
    assert ears.direct("b") is None
    assert ears.known_peers()["b"].heard_ms is None
    assert hear(ears, "b", mine, 1) == [HeartbeatNews(mine, is_direct=True)]
    assert ears.direct("b") is mine


def test_an_older_direct_beat_does_not_replace_a_newer_relayed_one() -> None:
    ears = hearing()
    newer, older = reported("b", 5), reported("b", 4)
    hear(ears, "c", reported("c", 1), 0, newer)
    assert hear(ears, "b", older, 1) == [HeartbeatNews(older, is_direct=True)]
    assert ears.heartbeats()["b"] is newer
    assert ears.direct("b") is older


def test_another_storage_replaces_the_known_one_when_it_is_heard_directly() -> None:
    ears = hearing()
    hear(ears, "b", reported("b", 5, start=9), 0)
    wiped = reported("b", 1, storage="new")
    assert hear(ears, "b", wiped, 1) == [HeartbeatNews(wiped, is_direct=True)]
    assert ears.heartbeats()["b"] is wiped


@pytest.mark.parametrize(
    ("boot", "ago_ms", "is_taken"), [("new", 10, True), ("new", 900, False), ("old", 10, False)]
)
def test_another_storage_is_believed_of_a_relay_only_if_that_heard_it_later(
    boot: str, ago_ms: int, is_taken: bool
) -> None:
    ears = hearing()
    old = reported("b", 5)
    hear(ears, "b", old, 0)
    wiped = reported("b", 1, storage="new", boot="new")
    relay = reported("c", 1, heard={"b": Heard(boot, ago_ms)})
    hear(ears, "c", relay, 500, wiped)
    assert (ears.heartbeats()["b"] is wiped) is is_taken
    hear(ears, "c", reported("c", 2, heard={"b": Heard("new", 20)}), 1_500, old)
    assert (ears.heartbeats()["b"] is old) is not is_taken


def test_beats_of_itself_and_of_strangers_are_ignored() -> None:
    ears = hearing()
    assert hear(ears, "b", reported("b", 1), 0, reported("a", 9), reported("z", 9))[1:] == []
    assert hear(ears, "z", reported("z", 1), 0) == []
    assert hear(ears, "b", reported("c", 1), 0) == []
    assert list(ears.heartbeats()) == ["b"]


def test_who_is_silent_for_a_second_or_disconnected_is_not_reachable() -> None:
    ears = hearing()
    hear(ears, "c", reported("c", 1), 0, reported("b", 1))
    assert ears.reachable(999) == ["c"]
    assert ears.reachable(1_000) == []
    ears.message("c", 1_500)
    assert ears.reachable(2_000) == ["c"]
    ears.disconnected("c")
    assert ears.reachable(2_000) == []
    ears.message("c", 2_001)
    assert ears.reachable(2_001) == ["c"]
    assert ears.heard_directly(2_101) == {"c": Heard("boot", 100, "disk-c")}


def test_the_newest_leaders_clock_runs_on_until_nothing_new_is_heard() -> None:
    ears = hearing()
    assert ears.leader_clock_ms(0) is None
    done = Reached(set_backs=0, due_ms=60_000, position=None)
    old = reported("b", 1, wall_ms=90_000, term=LeaderTerm(3), reached=done)
    hear(ears, "b", old, 0)
    new = reported("c", 1, wall_ms=50_000, term=LeaderTerm(4), reached=done)
    hear(ears, "b", reported("b", 2, wall_ms=90_100, term=LeaderTerm(3)), 100, new)
    assert ears.leader_clock_ms(300) == 50_200
    assert ears.leader_clock_ms(1_099) == 50_999
    hear(ears, "b", reported("b", 3), 1_050, new)
    assert ears.leader_clock_ms(1_100) is None


def test_a_leaders_clock_seals_nothing_beyond_what_is_done() -> None:
    ears = hearing()
    hear(ears, "b", reported("b", 1, wall_ms=90_000, term=LeaderTerm(3)), 0)
    assert ears.leader_clock_ms(10) is None
    done = Reached(set_backs=0, due_ms=60_000, position=None)
    hear(ears, "b", reported("b", 2, wall_ms=90_010, term=LeaderTerm(3), reached=done), 10)
    assert ears.leader_clock_ms(20) == 60_000


def test_most_nodes_agree_on_a_clock_and_of_two_the_lesser_counts() -> None:
    ears = hearing()
    assert ears.agreed_clock_ms(9_000, 0) == 9_000
    hear(ears, "b", reported("b", 1, wall_ms=50_000), 100)
    assert ears.agreed_clock_ms(9_000, 100) == 9_000
    assert ears.agreed_clock_ms(90_000, 103) == 50_003
    hear(ears, "c", reported("c", 1, wall_ms=20_000), 100)
    assert ears.agreed_clock_ms(9_000, 103) == 20_003


# --- relayed heartbeats that are none of their nodes'


def test_what_is_relayed_of_a_node_that_is_heard_does_not_count() -> None:
    ears = hearing()
    for tick in range(10):
        hear(ears, "b", reported("b", tick), 100 * tick)
        ahead = reported("b", tick + 9, start=1 + tick % 2)
        assert hear(ears, "c", reported("c", tick), 100 * tick + 50, ahead)[1:] == []
        assert ears.heartbeats()["b"].count == tick
    assert ears.implausible == 0
    # Three of its own heartbeats are missing, or it is known not to be connected.
    assert hear(ears, "c", reported("c", 50), 1_200, reported("b", 12))[1:]
    hear(ears, "b", reported("b", 13), 1_250)
    ears.disconnected("b")
    assert hear(ears, "c", reported("c", 51), 1_260, reported("b", 14))[1:]


@pytest.mark.parametrize(
    ("start", "count", "is_taken"),
    [
        (1, 1_000, True),
        (1, 10_000_000, False),
        (5, 3, True),
        (5, 10_000_000, False),
        (10_000, 3, False),
        (10**9, 10**9, False),
    ],
)
def test_a_relayed_beat_is_not_further_ahead_than_can_be(
    start: int, count: int, is_taken: bool
) -> None:
    ears = hearing()
    hear(ears, "b", reported("b", 5), 0)
    relayed = reported("b", count, start=start)
    assert bool(hear(ears, "c", reported("c", 1), 5_000, relayed)[1:]) is is_taken
    assert ears.implausible == (not is_taken)
    # A node may be away for long.
    assert hear(ears, "c", reported("c", 2), 10**9, reported("b", 10**6, start=10**4 - 1))[1:]


@pytest.mark.parametrize("start", [1, 2, 9, 10**9])
def test_a_relayed_beat_that_its_node_does_not_come_to_is_forgotten(start: int) -> None:
    """Otherwise no later report of that node would be believed, not even its own."""
    ears = hearing()
    wrong = reported("b", 90_000, start=start)
    hear(ears, "c", reported("c", 1), 0, wrong)
    assert ears.heartbeats()["b"] is wrong
    for tick in range(1, 30):
        now_ms = 100 * tick
        own = reported("b", 5 + tick)
        assert hear(ears, "b", own, now_ms) == [HeartbeatNews(own, is_direct=True)]
        hear(ears, "c", reported("c", 1 + tick), now_ms, wrong)
        assert (ears.heartbeats()["b"] is own) == (now_ms >= 1_000)
    assert ears.implausible == 1


# --- what is relayed


def test_relayed_is_what_a_node_has_not_heard_lately() -> None:
    ears = hearing()
    of_b, of_c = reported("b", 1), reported("c", 1)
    hear(ears, "b", of_b, 0)
    assert ears.unheard_by("b", 0) == ()
    hear(ears, "c", of_c, 0)
    assert ears.unheard_by("b", 0) == (of_c,), "it never heard of it"
    hear(ears, "b", reported("b", 2, heard={"c": Heard("boot", 150)}), 100)
    assert ears.unheard_by("b", 149) == ()
    assert ears.unheard_by("b", 150) == (of_c,)
    hear(ears, "b", reported("b", 3, heard={"c": Heard("boot", 10)}), 200)
    assert ears.unheard_by("b", 200) == ()


def test_everything_is_relayed_to_a_node_that_says_nothing_itself() -> None:
    ears = hearing()
    of_c = reported("c", 1)
    hear(ears, "c", of_c, 0)
    assert ears.unheard_by("b", 0) == (of_c,)
    hear(ears, "c", reported("c", 2), 100, reported("b", 1, heard={"c": Heard("boot", 0)}))
    assert len(ears.unheard_by("b", 100)) == 1, "what others relay of it is not its word"
