"""The member machine among others: replication, fetching, fences, completeness."""

from dataclasses import replace

import pytest

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel_replica.core.node.events import (
    CloseWheel,
    DiskReported,
    DiskState,
    LeaveWheel,
    Mirror,
    Mirrored,
    Received,
    Repair,
    Save,
    Serve,
    Unreadable,
    WriteStatus,
)
from delaywheel_replica.core.protocol.frames import FrameSet
from delaywheel_replica.core.protocol.heartbeat import Fence, Heard, LeaderTerm, Promise
from delaywheel_replica.core.protocol.messages import (
    Applied,
    Fetch,
    Gossip,
    Lacks,
    PeerMessage,
    Refused,
)
from delaywheel_replica.core.protocol.status_files import Role
from support.core.member_talk import heartbeat_of, meet, messages, spare_of, wheel_heartbeat
from support.core.member_world import (
    FakeCluster,
    FakeNode,
    FakeStore,
    disk_of,
    frames_of,
    held_of,
    record_of,
    state_of,
)
from support.core.values import missing_members

A1, A2, A3 = (WheelId("a", number) for number in (1, 2, 3))
B1, B2, B3 = (WheelId("b", number) for number in (1, 2, 3))
FIRST = {WheelId(node, number): record_of() for node in "abc" for number in (1, 2)}


def cluster() -> FakeCluster:
    """Three nodes that hear one another, each with an open wheel and a spare."""
    world = FakeCluster()
    world.run(200)
    world.register(FIRST)
    world.run(200)
    assert all(
        node.status().heartbeat.open == WheelId(name, 1) for name, node in world.nodes.items()
    )
    return world


# --- replication


def test_the_high_watermark_is_reported_at_once() -> None:
    world = cluster()
    world["a"].write(3)
    world.settle()
    for name in "bc":
        assert world[name].status().peers["a"].heartbeat.wheels[A1].high_watermark == 3
        assert world[name].status().heartbeat.wheels[A1].high_watermark == 3


def test_a_leader_writes_its_row_when_it_hears_of_a_high_watermark() -> None:
    node = _mirror_of_b(held=3)
    reported = heartbeat_of("b", open=B1, wheels={B1: wheel_heartbeat(3, high_watermark=2)})
    assert WriteStatus() not in node.receive("b", Gossip(reported))
    node.cleaner_reports(node.cleaner({B1: record_of()}, role=Role.LEADING))
    reported = replace(reported, count=2, wheels={B1: wheel_heartbeat(3, high_watermark=3)})
    assert WriteStatus() in node.receive("b", Gossip(reported))


def test_frames_that_come_while_others_are_written_follow_on() -> None:
    node = _mirror_of_b(held=0)
    first = node.machine.step(_received(node, "b", frames_of(B1, 1, 2)))
    assert [type(effect) for effect in first] == [Mirror]
    assert node.machine.step(_received(node, "b", frames_of(B1, 3, 4))) == []
    mirror = first[0]
    assert isinstance(mirror, Mirror)
    node.store.mirror(mirror)
    second = node.machine.step(_mirrored(node, B1))
    assert [f.seq for e in second if isinstance(e, Mirror) for f in e.frames.copies()] == [3, 4]


def test_a_mirror_answers_with_its_storage_and_boot() -> None:
    node = _mirror_of_b(held=0)
    node.receive("b", frames_of(B1, 1, 2))
    answers = messages(node, Applied)
    assert answers == [("b", Applied(B1, "disk-a", "boot-a", 2))]
    node.receive("b", frames_of(B1, 1, 2))
    assert messages(node, Applied) == answers


def test_strangers_are_not_listened_to() -> None:
    node = _mirror_of_b(held=0)
    assert node.receive("z", frames_of(B1, 1, 2)) == []
    assert node.receive("z", Fetch(1, B1, 1, 2)) == []


# --- fetching


def test_what_a_beat_shows_is_fetched_from_the_next_tick_on() -> None:
    node = _mirror_of_b(held=2)
    heartbeat = heartbeat_of("b", open=B1, wheels={B1: wheel_heartbeat(5)})
    node.receive("b", Gossip(heartbeat))
    node.tick()
    assert messages(node, Fetch) == []
    node.tick()
    ((peer, fetch),) = messages(node, Fetch)
    assert (peer, fetch) == ("b", Fetch(1, B1, 3, 5))
    node.receive("b", frames_of(B1, 3, 5, request=1))
    assert node.status().heartbeat.wheels[B1].applied == 5


def test_a_long_way_is_caught_up_without_waiting_for_ticks() -> None:
    node = _mirror_of_b(held=0)
    node.receive("b", Gossip(heartbeat_of("b", open=B1, wheels={B1: wheel_heartbeat(4)})))
    node.tick()
    node.tick()
    assert messages(node, Fetch) == [("b", Fetch(1, B1, 1, 4))]
    node.receive("b", frames_of(B1, 1, 3, request=1))
    assert messages(node, Fetch) == [("b", Fetch(2, B1, 4, 4))]


def test_missing_frames_are_fetched_and_repaired() -> None:
    node = _mirror_of_b(held=3)
    node.store.damaged.add((B1, 2))
    node.step(Unreadable(B1, SeqSet.of([2])))
    node.receive("c", Gossip(heartbeat_of("c", wheels={B1: wheel_heartbeat(3)})))
    node.tick()
    assert messages(node, Fetch) == [("c", Fetch(1, B1, 2, 2))]
    effects = node.receive("c", frames_of(B1, 2, 2, request=1))
    assert [type(effect) for effect in effects if isinstance(effect, Repair)] == [Repair]
    assert node.status().heartbeat.wheels[B1].missing == NO_SEQS


def test_a_mirror_whose_disk_accepts_no_frames_takes_and_fetches_none() -> None:
    node = _mirror_of_b(held=1)
    node.receive("b", Gossip(heartbeat_of("b", open=B1, wheels={B1: wheel_heartbeat(3)})))
    node.step(DiskReported(DiskState.DISK_OUT))
    node.receive("b", frames_of(B1, 2, 2))
    for _ in range(3):
        node.tick()
    assert messages(node, Fetch) == []
    assert node.store.frames[B1].keys() == {1}
    node.step(DiskReported(DiskState.ROOM))
    node.tick()
    assert messages(node, Fetch) == [("b", Fetch(1, B1, 2, 3))]
    node.receive("b", frames_of(B1, 2, 2))
    assert node.store.frames[B1].keys() == {1, 2}


def test_frames_that_nobody_shows_are_looked_for_when_the_cleaner_asks() -> None:
    node = _mirror_of_b(held=1)
    for peer in "bc":
        node.receive(peer, Gossip(heartbeat_of(peer)))
    reported = node.cleaner({B1: record_of()}, role=Role.LEADING, unreadable=FrameSet.of({(B1, 2)}))
    node.cleaner_reports(reported)
    node.tick()
    ((peer, fetch),) = messages(node, Fetch)
    assert fetch == Fetch(1, B1, 2, 2)
    node.receive(peer, Lacks(1, B1, disk_of(peer), 2, 2))
    assert missing_members(node.status()) == {(B1, 2): "a" + peer}


def test_a_disk_put_in_the_place_of_a_members_says_nothing_of_what_that_one_held() -> None:
    node = _mirror_of_b(held=0)
    record = record_of()
    members = {**record.members, "a": "disk-of-before"}
    other = replace(record, members=members)
    sought = FrameSet.of({(B1, 1)})
    node.cleaner_reports(node.cleaner({B1: other}, role=Role.LEADING, unreadable=sought))
    node.tick()
    assert missing_members(node.status()) == {(B1, 1): ""}


def test_what_is_held_is_served_and_the_rest_is_said_to_lack() -> None:
    node = _mirror_of_b(held=3)
    assert node.receive("c", Fetch(5, B1, 2, 9)) == [Serve("c", B1, 2, 3, 5)]
    node.take_sent()
    node.receive("c", Fetch(6, B1, 4, 5))
    node.receive("c", Fetch(7, B2, 1, 1))
    assert node.take_sent() == [
        ("c", Lacks(6, B1, "disk-a", 4, 5)),
        ("c", Lacks(7, B2, "disk-a", 1, 1)),
    ]


def test_an_origin_serves_only_what_it_reported_as_written() -> None:
    world = cluster()
    node = world["a"]
    node.write(2)
    node.store.append(1)
    effects = node.receive("b", Fetch(5, A1, 1, 3))
    assert Serve("b", A1, 1, 2, 5) in effects


# --- fences


def test_fences_of_two_leaders_in_one_message_lead_to_one_save() -> None:
    node = FakeNode("a", store=FakeStore(state_of("a", last_number=1, spare=spare_of(A1))))
    meet(node)
    node.tick(1_000)
    others = (heartbeat_of("b", last_number=2, term=LeaderTerm(4, (Fence("a", 1),))),)
    heartbeat = heartbeat_of("c", term=LeaderTerm(5, (Fence("b", 2), Fence("a", 1))))
    effects = node.machine.step(_received(node, "c", Gossip(heartbeat, others)))
    awaited = [effect for effect in effects if isinstance(effect, Save | LeaveWheel)]
    assert [type(effect) for effect in awaited] == [LeaveWheel, Save]


def test_every_later_beat_of_a_leader_is_answered_again() -> None:
    node = _mirror_of_b(held=2)
    for count in (1, 2):
        term = heartbeat_of("c", count=count, term=LeaderTerm(5, (Fence("b", 1),)))
        node.receive("c", Gossip(term))
        ((peer, message),) = messages(node, Promise)
        assert isinstance(message, Promise)
        assert (peer, message.applied) == ("c", {B1: 2})


def test_a_committed_end_allows_what_a_promise_forbids() -> None:
    node = _mirror_of_b(held=2)
    node.receive("c", Gossip(heartbeat_of("c", term=LeaderTerm(5, (Fence("b", 1),)))))
    node.cleaner_reports(node.cleaner({B1: record_of(closed_at=3)}))
    assert CloseWheel(B1, 3) in node.tick()
    assert messages(node, Fetch) == [("c", Fetch(1, B1, 3, 3))]
    node.receive("c", frames_of(B1, 3, 5, request=1))
    assert node.store.frames[B1].keys() == {1, 2, 3}


def test_what_is_lost_at_an_end_is_not_fetched() -> None:
    node = _mirror_of_b(held=2)
    node.receive("c", Gossip(heartbeat_of("c")))
    lost = FrameSet.of({(B1, 3), (B1, 4)})
    node.cleaner_reports(node.cleaner({B1: record_of(closed_at=4)}, lost=lost))
    node.tick()
    assert messages(node, Fetch) == []
    node.cleaner_reports(node.cleaner({B1: record_of(closed_at=5)}, lost=lost))
    node.tick()
    assert messages(node, Fetch) != []


def test_a_committed_fill_in_the_registry_counts_as_one_that_was_reported() -> None:
    node = _mirror_of_b(held=2)
    node.receive("c", Gossip(heartbeat_of("c", term=LeaderTerm(5, (Fence("b", 1),)))))
    node.cleaner_reports(node.cleaner({B1: record_of(limit=3)}))
    node.tick()
    assert messages(node, Fetch) == [("c", Fetch(1, B1, 3, 3))]
    node.receive("c", frames_of(B1, 3, 5, request=1))
    assert node.store.frames[B1].keys() == {1, 2, 3}


def test_a_node_that_names_what_was_promised_away_is_refused_without_frames() -> None:
    node = _mirror_of_b(held=0)
    term = LeaderTerm(5, (Fence("b", 2),))
    node.receive("c", Gossip(heartbeat_of("c", term=term, wheels={B2: wheel_heartbeat(0)})))
    node.receive("b", Gossip(heartbeat_of("b", open=B3)))
    assert messages(node, Refused) == []
    node.receive("b", Gossip(heartbeat_of("b", count=2, open=B3, spare=B2)))
    assert messages(node, Refused) == [("b", Refused("b", 2))]


def test_answers_of_others_are_kept_for_the_row() -> None:
    node = FakeNode("a")
    later = Promise("b", "disk-b", Fence("c", 3), {})
    node.receive("b", later)
    node.receive("b", replace(later, fence=Fence("c", 2)))
    node.receive("c", replace(later, applied={B1: 9}))
    assert node.status().answers == (later,)


def test_after_a_crash_of_the_machine_everything_registered_is_doubted_until_it_is_back() -> None:
    world = cluster()
    for name in "abc":
        world[name].write(2)
    world.run(300)
    node = world["a"]
    del node.store.frames[B1][2]
    node.crash_machine("boot-2")
    assert not node.status().heartbeat.complete
    node.tick()
    node.take_sent()
    assert node.store.state.all_incomplete
    node.cleaner_reports(node.cleaner(FIRST))
    node.tick()
    # Its spare is opened by now; the spares of the others were not doubted before it was reported.
    assert _incomplete(node) == [A1, B1, B2, WheelId("c", 1), WheelId("c", 2)]
    world.run(1_000)
    assert _incomplete(node) == [A1]
    assert node.store.frames[B1].keys() == {1, 2}
    world.register({**FIRST, A1: record_of(closed_at=2)})
    world.run(300)
    assert node.status().heartbeat.complete


# --- completeness


@pytest.mark.parametrize(
    ("sender", "boot_heard", "applied", "is_back"),
    [
        ("b", "boot-a", 2, True),
        ("b", "boot-a", 3, False),
        ("b", "older", 2, False),
        ("b", None, 2, False),
        ("c", "boot-a", 2, False),
    ],
)
def test_a_wheel_is_back_only_by_what_its_origin_itself_reported_after_the_boot(
    sender: str, boot_heard: str | None, applied: int, is_back: bool
) -> None:
    node = _mirror_of_b(held=2, incomplete=(B1,))
    wheels = {B1: wheel_heartbeat(applied, high_watermark=2)}
    heartbeat = heartbeat_of("b", open=B1, wheels=wheels, boot_heard=boot_heard)
    gossip = Gossip(heartbeat) if sender == "b" else Gossip(heartbeat_of("c"), (heartbeat,))
    node.receive(sender, gossip)
    node.cleaner_reports(node.cleaner({B1: record_of()}))
    node.tick()
    assert (node.store.state.incomplete == ()) is is_back


def test_a_wheel_that_names_another_storage_is_not_doubted() -> None:
    node = FakeNode("a", store=FakeStore(state_of("a", all_incomplete=True)))
    other = replace(record_of(), members={"a": "another", "b": "disk-b", "c": "disk-c"})
    node.cleaner_reports(node.cleaner({B1: record_of(), B2: other}))
    node.tick()
    assert _incomplete(node) == [B1]


def test_what_a_mirror_said_before_it_crashed_does_not_count_once_its_boot_is_heard() -> None:
    world = cluster()
    node = world["a"]
    world.cut = {("a", "b"), ("a", "c")}
    node.write(2)
    world.run(100)
    node.receive("b", Gossip(heartbeat_of("b", boot="boot-2", start=2)))
    assert node.status().heartbeat.heard["b"].boot == "boot-2"
    node.receive("b", Applied(A1, "disk-b", "boot-b", 2))
    node.disconnect("c")
    world.run(1_500)
    assert node.acknowledged == {}
    node.receive("b", Applied(A1, "disk-b", "boot-2", 2))
    node.tick()
    assert node.acknowledged == {A1: 2}


def test_an_answer_says_which_wheels_may_be_incomplete() -> None:
    node = _mirror_of_b(held=2, incomplete=(B1, WheelId("c", 1)))
    node.receive("c", Gossip(heartbeat_of("c", term=LeaderTerm(5, (Fence("b", 1),)))))
    ((_, message),) = messages(node, Promise)
    assert isinstance(message, Promise)
    assert message.incomplete == {B1}


# --- gossip


def test_the_newest_beats_of_others_are_relayed() -> None:
    node = FakeNode("a")
    heartbeat = heartbeat_of("b", count=4, floor=17)
    node.receive("b", Gossip(heartbeat))
    node.tick()
    (gossip, _) = [m for _, m in node.take_sent() if isinstance(m, Gossip)]
    assert gossip.others == (heartbeat,)
    assert gossip.heartbeat.floor is None, "only what the own cleaner reports counts as the own"
    assert gossip.heartbeat.heard == {"b": Heard("boot-b", 100, disk_of("b"))}


def test_seals_and_ledgers_of_mirrored_wheels_are_relayed() -> None:
    node = _mirror_of_b(held=2)
    reported = wheel_heartbeat(2, high_watermark=1, seal_slot=7, seal_seq=1, ledger_seq=1)
    node.receive("b", Gossip(heartbeat_of("b", open=B1, wheels={B1: reported})))
    assert node.status().heartbeat.wheels[B1] == reported


def _mirror_of_b(*, held: int, incomplete: tuple[WheelId, ...] = ()) -> FakeNode:
    """Node a with some frames of b's wheel."""
    store = FakeStore(state_of("a", incomplete=incomplete))
    if held:
        store.frames[B1] = {frame.seq: frame for frame in frames_of(B1, 1, held).frames.copies()}
        store.cards[B1] = held_of(B1, 0).card
    node = FakeNode("a", store=store)
    node.cleaner_reports(node.cleaner({B1: record_of()}))
    return node


def _incomplete(node: FakeNode) -> list[WheelId]:
    return list(node.store.state.incomplete)


def _received(node: FakeNode, sender: str, message: PeerMessage) -> Received:
    return Received(sender, message, node.now_ms, node.wall_ms)


def _mirrored(node: FakeNode, wheel: WheelId) -> Mirrored:
    return Mirrored(node.store.held(wheel), node.now_ms)
