"""A node whose folder is an older copy of itself: how it finds out, and what it does then."""

from dataclasses import replace

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core.member.member import MemberRefusal
from delaywheel_replica.core.node.events import Save
from delaywheel_replica.core.protocol.control import ROLLED_BACK, NodeRecord
from delaywheel_replica.core.protocol.heartbeat import Fence, Heard, LeaderTerm, Promise
from delaywheel_replica.core.protocol.messages import Applied, Gossip
from support.core.member_talk import heartbeat_of, messages, spare_of, wheel_heartbeat
from support.core.member_world import FakeNode, FakeStore, disk_of, record_of, state_of

A1, A2, B1 = WheelId("a", 1), WheelId("a", 2), WheelId("b", 1)
SAVES = 7


def node_with(saves: int = SAVES) -> FakeNode:
    """A node that has opened its spare, with mirrors that are heard."""
    store = FakeStore(state_of("a", saves=saves, last_number=1, spare=spare_of(A1)))
    node = FakeNode("a", store=store)
    for peer in "bc":
        node.receive(peer, Gossip(heartbeat_of(peer)))
    node.tick()
    assert node.status().heartbeat.open == A1
    return node


def heard(saves: int, storage: str = disk_of("a")) -> dict[str, Heard]:
    return {"a": Heard("boot-a", 0, storage, saves)}


def test_a_spare_is_not_opened_before_its_members_are_heard() -> None:
    store = FakeStore(state_of("a", last_number=1, spare=spare_of(A1), saves=SAVES))
    node = FakeNode("a", store=store)
    node.tick()
    assert node.store.opened == []
    assert node.machine.refusal(node.now_ms) is MemberRefusal.NOT_ENOUGH_REPLICAS
    node.receive("b", Gossip(heartbeat_of("b", heard=heard(SAVES + 1))))
    stands_aside(node)
    assert node.store.opened == []


def test_each_save_is_counted_and_reported() -> None:
    node = node_with()
    saved = [effect.state.saves for effect in node.done if isinstance(effect, Save)]
    assert saved == list(range(SAVES + 1, SAVES + 1 + len(saved)))
    assert node.status().heartbeat.saves == saved[-1]


@pytest.mark.parametrize(("saves", "storage"), [(0, disk_of("a")), (99, "disk-before")])
def test_an_older_report_or_one_of_another_folder_says_nothing(saves: int, storage: str) -> None:
    node = node_with()
    node.receive("b", Gossip(heartbeat_of("b", count=2, heard=heard(saves, storage))))
    assert node.status().heartbeat.open == A1


def test_the_control_topic_knows_of_a_later_state() -> None:
    node = node_with()
    status = node.cleaner({A1: record_of()})
    known = NodeRecord(disk_of("a"), 1, saves=node.store.state.saves)
    node.cleaner_reports(replace(status, nodes={"a": known}))
    assert node.status().heartbeat.open == A1
    node.cleaner_reports(replace(status, nodes={"a": replace(known, saves=known.saves + 1)}))
    stands_aside(node)


def test_a_mirror_has_frames_that_were_not_written() -> None:
    node = node_with()
    node.write(2)
    node.receive("b", Gossip(heartbeat_of("b", count=2, wheels={A1: wheel_heartbeat(3)})))
    stands_aside(node)
    node = node_with()
    node.write(2)
    node.receive("b", Applied(A1, disk_of("b"), "boot-b", 3))
    stands_aside(node)
    node = node_with()
    node.receive("b", Gossip(heartbeat_of("b", count=2, verifying=frozenset({A1}))))
    stands_aside(node)


def test_a_mirror_that_was_heard_before_the_wheel_was_opened_has_frames_of_it() -> None:
    store = FakeStore(state_of("a", last_number=1, spare=spare_of(A1)))
    node = FakeNode("a", store=store)
    node.receive("b", Gossip(heartbeat_of("b", wheels={A1: wheel_heartbeat(3)})))
    node.tick()
    stands_aside(node)


def test_peers_remember_the_most_saves_of_a_folder_until_it_is_another() -> None:
    node = FakeNode("b")

    def remembered() -> tuple[str, int]:
        there = node.status().heartbeat.heard["a"]
        return there.storage, there.saves

    for count, (storage, saves) in enumerate(
        [(disk_of("a"), 9), (disk_of("a"), 3), (ROLLED_BACK, 12)]
    ):
        reported = heartbeat_of("a", count=count, storage=storage, saves=saves)
        node.receive("a", Gossip(reported))
        assert remembered() == (disk_of("a"), 9)
    node.receive("a", Gossip(heartbeat_of("a", storage="disk-new", saves=1)))
    assert remembered() == ("disk-new", 1)


def stands_aside(node: FakeNode) -> None:
    """It uses no wheel, answers no leader, saves nothing, and is nobody's member."""
    node.tick()
    node.take_sent()
    before = node.store.state
    leading = heartbeat_of("c", count=9, term=LeaderTerm(5, (Fence("b", 1),)))
    node.receive("c", Gossip(leading))
    node.tick(2_000)
    heartbeat = node.status().heartbeat
    assert (heartbeat.storage, heartbeat.open) == (ROLLED_BACK, None)
    assert node.write() == 0
    assert messages(node, Promise) == []
    assert node.store.state == before
