"""The member machine and leaders: reachability, clocks, the own cleaner's term, votes."""

from dataclasses import replace

from delaywheel.identity import WheelId
from delaywheel_replica.core.node.events import WriteStatus
from delaywheel_replica.core.protocol.heartbeat import Heard, LeaderTerm
from delaywheel_replica.core.protocol.messages import Gossip, PrevoteRequest, Vote
from delaywheel_replica.core.protocol.progress import Reached
from delaywheel_replica.core.protocol.status_files import Role
from support.core.member_talk import heartbeat_of, messages, spare_of
from support.core.member_world import FakeNode, FakeStore, state_of

A1 = WheelId("a", 1)


def test_a_leader_is_heard_directly_and_forgotten_when_its_connection_breaks() -> None:
    node = FakeNode("a")
    leading = heartbeat_of("b", term=LeaderTerm(5))
    node.receive("c", Gossip(heartbeat_of("c"), (leading,)))
    assert node.status().leader_heard_ms is None
    node.receive("b", Gossip(leading))
    assert node.status().leader_heard_ms == node.now_ms
    node.disconnect("c")
    assert node.status().leader_heard_ms == node.now_ms
    node.disconnect("b")
    assert node.status().leader_heard_ms is None


def test_a_leader_that_says_it_leads_no_more_is_gone_at_once() -> None:
    node = FakeNode("a")
    node.tick(5_000)
    node.receive("b", Gossip(heartbeat_of("b", count=1, term=LeaderTerm(5))))
    ended = heartbeat_of("b", count=2)
    node.receive("c", Gossip(heartbeat_of("c"), (ended,)))
    assert node.status().leader_heard_ms == node.now_ms, "only its own word counts"
    effects = node.receive("b", Gossip(ended))
    assert node.status().leader_heard_ms is None
    assert WriteStatus() in effects, "the cleaner waits for it"
    node.receive("c", PrevoteRequest(1, 1_000))
    assert messages(node, Vote) == [("c", Vote(1))]


def test_a_candidate_is_waited_for_like_a_leader_until_it_says_that_it_failed() -> None:
    node = FakeNode("a")
    node.tick(5_000)
    node.receive("b", Gossip(heartbeat_of("b", count=1, stands=True)))
    assert node.status().leader_heard_ms == node.now_ms
    node.receive("c", PrevoteRequest(1, 1_000))
    assert messages(node, Vote) == []
    assert WriteStatus() in node.receive("b", Gossip(heartbeat_of("b", count=2)))
    assert node.status().leader_heard_ms is None


def test_the_others_hear_at_once_that_kafka_has_answered_the_own_candidate() -> None:
    node = FakeNode("a")
    node.cleaner_reports(node.cleaner(role=Role.CANDIDATE))
    assert [message.heartbeat.stands for message in gossip_of(node)] == []
    node.cleaner_reports(replace(node.cleaner(role=Role.CANDIDATE), stands=True))
    assert [message.heartbeat.stands for message in gossip_of(node)] == [True] * 2
    node.cleaner_reports(node.cleaner())
    assert [message.heartbeat.stands for message in gossip_of(node)] == [False] * 2


def test_a_beat_without_term_of_who_did_not_lead_says_nothing() -> None:
    node = FakeNode("a")
    node.receive("b", Gossip(heartbeat_of("b", term=LeaderTerm(5))))
    assert WriteStatus() not in node.receive("c", Gossip(heartbeat_of("c")))
    assert node.status().leader_heard_ms == node.now_ms


def test_the_others_hear_at_once_that_the_own_term_begins_and_ends() -> None:
    node = FakeNode("a")
    node.cleaner_reports(node.cleaner(role=Role.LEADING))
    assert [message.heartbeat.term for message in gossip_of(node)] == [LeaderTerm(7)] * 2
    node.cleaner_reports(node.cleaner(role=Role.LEADING))
    assert gossip_of(node) == []
    node.cleaner_reports(None)  # it died
    assert [message.heartbeat.term for message in gossip_of(node)] == [None] * 2
    node.cleaner_reports(None)
    assert gossip_of(node) == []


def test_seals_follow_the_newest_leaders_clock_also_when_it_is_relayed() -> None:
    store = FakeStore(state_of("a", last_number=1, spare=spare_of(A1)))
    node = FakeNode("a", store=store)
    node.tick()
    assert node.status().heartbeat.wheels[A1].seal_slot == 0
    wall_ms = node.wall_ms - 50_000
    done = Reached(set_backs=0, due_ms=wall_ms + 500, position=None)
    leading = heartbeat_of("b", wall_ms=wall_ms, term=LeaderTerm(5), reached=done)
    stale = heartbeat_of("c", wall_ms=wall_ms - 90_000, term=LeaderTerm(4), reached=done)
    node.receive("c", Gossip(stale, (leading,)))
    node.tick()
    assert node.status().heartbeat.wheels[A1].seal_slot == (wall_ms + 100) // 1000 - 120


def test_votes_are_asked_for_while_requested_and_counted_for_the_round() -> None:
    node = FakeNode("a")
    node.cleaner_reports(node.cleaner(prevote_request=PrevoteRequest(1, 1_000)))
    assert messages(node, PrevoteRequest) == [
        ("b", PrevoteRequest(1, 1_000)),
        ("c", PrevoteRequest(1, 1_000)),
    ]
    node.tick()
    assert len(messages(node, PrevoteRequest)) == 2
    node.receive("b", Vote(1))
    node.receive("c", Vote(2))
    status = node.status()
    assert (status.votes, status.vote_round) == (frozenset({"b"}), 1)
    node.cleaner_reports(node.cleaner(prevote_request=PrevoteRequest(2, 1_000)))
    status = node.status()
    assert (status.votes, status.vote_round) == (frozenset(), 2)
    node.cleaner_reports(node.cleaner())
    node.take_sent()
    node.tick()
    assert messages(node, PrevoteRequest) == []
    assert node.status().vote_round == 0


def test_a_node_in_term_or_on_its_way_gives_no_vote() -> None:
    for role in (Role.LEADING, Role.RESTING, Role.CANDIDATE):
        node = FakeNode("a")
        node.tick(5_000)
        node.cleaner_reports(node.cleaner(role=role))
        node.receive("b", PrevoteRequest(1, 1_000))
        assert messages(node, Vote) == []


def test_a_vote_given_counts_as_a_leader_heard() -> None:
    node = FakeNode("a")
    node.tick(5_000)
    node.receive("b", PrevoteRequest(1, 1_000))
    assert messages(node, Vote) == [("b", Vote(1))]
    assert node.status().leader_heard_ms == node.now_ms


def gossip_of(node: FakeNode) -> list[Gossip]:
    """The messages sent to the others since the last call."""
    return [message for _, message in node.take_sent() if isinstance(message, Gossip)]


def test_a_node_gets_heartbeats_that_it_does_not_hear_and_all_of_them_now_and_then() -> None:
    node = FakeNode("a")
    reported = []
    for count in range(1, 11):
        heard = {"c": Heard("boot", 0)}
        node.receive("b", Gossip(heartbeat_of("b", count=count, heard=heard)))
        node.receive("c", Gossip(heartbeat_of("c", count=count)))
        node.tick()
        sent = node.take_sent()
        reported.append({peer: len(m.others) for peer, m in sent if isinstance(m, Gossip)})
    whole = {"b": 2, "c": 2}
    assert reported == [whole, *[{"b": 0, "c": 1}] * 4] * 2, "c does not say that it hears b"
