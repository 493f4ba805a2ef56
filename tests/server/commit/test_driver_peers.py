"""One node's driver with other nodes, and on a disk without room or one that hangs."""

from __future__ import annotations

import pytest

from delaywheel.storage.frames.checking import good_frames
from delaywheel_replica.core.member.member import MemberRefusal
from delaywheel_replica.core.protocol.heartbeat import Fence, Heartbeat
from delaywheel_replica.core.protocol.messages import (
    Applied,
    Fetch,
    Frames,
    Gossip,
    Lacks,
)
from delaywheel_replica.server.store.store import StoreLimits
from sim.machine.disk import SimulatedDisk
from support.server.driven import LATE_WINDOW_S, NOW_MS, ONE, TWO, Driven, slot_files
from support.wheels.messages import BASE_SLOT, Message, message


@pytest.fixture
def pair(disk: SimulatedDisk) -> Driven:
    """One of two, with a wheel that both are to hold."""
    node = Driven(disk, nodes=("n1", "n2"), min_insync=2, message_bytes=3_000)
    node.hear(members={"n2": "s2"}, w1=None)
    node.driver.received("n2", Gossip(peer_heartbeat()))
    node.work()
    node.tick()
    return node


def peer_heartbeat(count: int = 1) -> Heartbeat:
    return Heartbeat(
        "n2", "s2", "b2", NOW_MS, None, None, 0, draining=False, complete=True, count=count
    )


def test_a_message_is_acknowledged_when_the_mirror_says_so(pair: Driven) -> None:
    pair.driver.received("n2", Applied(ONE, "s2", "b2", 0))
    asked = pair.produce(message(1))
    assert asked.said == "nothing yet"
    (pushed,) = [reported for _, reported in pair.sent if isinstance(reported, Frames)]
    assert pushed.frames.seqs.tolist() == [1]
    pair.driver.received("n2", Applied(ONE, "s2", "b2", 1))
    assert asked.said == "n1.1"


def nine_seconds() -> list[Message]:
    return [message(number, slot=BASE_SLOT + number, value=bytes(800)) for number in range(9)]


def test_what_is_pushed_is_sent_as_a_whole_in_messages_of_bounded_size(pair: Driven) -> None:
    """Pushed frames count as under way: a part that is not sent would be waited for forever."""
    pair.produce(*nine_seconds())
    pushed = [reported for _, reported in pair.sent if isinstance(reported, Frames)]
    assert [seq for reported in pushed for seq in reported.frames.seqs.tolist()] == list(
        range(1, 10)
    )
    assert [reported.request for reported in pushed] == [0] * len(pushed)
    assert len(pushed) == 3


def test_a_fetch_is_answered_with_one_message(pair: Driven) -> None:
    pair.produce(*nine_seconds())
    pair.sent.clear()
    pair.driver.received("n2", Fetch(5, ONE, 2, 9))
    pair.driver.received("n2", Fetch(6, ONE, 10, 12))
    pair.work()
    (answer,) = [reported for _, reported in pair.sent if isinstance(reported, Frames)]
    assert (answer.request, answer.frames.first_seq) == (5, 2)
    assert 1 < len(answer.frames) < 8
    assert [reported for _, reported in pair.sent if isinstance(reported, Lacks)] == [
        Lacks(6, ONE, pair.state.storage, 10, 12)
    ]


def test_a_damaged_frame_is_reported_to_the_caller_and_to_the_machine(pair: Driven) -> None:
    pair.produce(message(1))
    (path,) = slot_files(pair, ONE)
    pair.disk.flip_bit(path, 900)
    pair.sent.clear()
    pair.driver.received("n2", Fetch(5, ONE, 1, 1))
    pair.work()
    assert [reported for _, reported in pair.sent if isinstance(reported, Lacks)] == [
        Lacks(5, ONE, pair.state.storage, 1, 1)
    ]
    # An origin that cannot serve a frame of its own leaves its wheel.
    assert pair.row.heartbeat.open is None


# --- a disk without room, a disk that hangs


def is_out(node: Driven) -> bool:
    """Whether other nodes know that the disk takes no frames."""
    return node.row.heartbeat.disk_out


def refusal(node: Driven) -> MemberRefusal | None:
    """Why the node takes no messages."""
    return node.driver.refusal


def test_a_full_disk_still_saves_promises_and_seals(ready: Driven) -> None:
    ready.look()
    ready.disk.capacity_bytes = ready.disk.used_bytes
    ready.want(Fence("n9", 1))
    assert ready.state.fenced == {}, "the ballast goes only now"
    ready.tick()
    assert ready.state.fenced == {"n9": 1}
    assert is_out(ready)
    for _ in range(50):
        ready.tick(1_000)
    assert ready.state.spare is not None
    assert ready.state.spare.seal_slot == ready.clock_wall_ms // 1000 - LATE_WINDOW_S
    assert ready.produce(message(1)).said == "DISK_FULL"
    ready.disk.capacity_bytes = None
    ready.tick(10_000)
    ready.look()
    assert not is_out(ready)
    assert ready.produce(message(1)).said == "n1.1"


def test_a_node_starts_on_a_full_disk(disk: SimulatedDisk, ready: Driven) -> None:
    ready.look()
    disk.capacity_bytes = disk.used_bytes
    starts = ready.state.starts
    disk.restart()
    assert Driven(disk).state.starts == starts + 1


def test_of_a_full_disk_no_wheel_is_wasted(ready: Driven) -> None:
    ready.look()
    ready.disk.capacity_bytes = ready.disk.used_bytes + 100
    assert ready.produce(message(1), message(2, slot=BASE_SLOT + 1)).said == "WHEEL_LOST"
    ready.hear(w1=None, w2=None, w3=None)
    ready.tick()
    assert (ready.state.open, ready.row.heartbeat.spare) == (None, TWO)
    assert ready.produce(message(1)).said == "DISK_FULL"
    ready.disk.capacity_bytes = None
    ready.tick(10_000)
    ready.look()
    ready.tick()
    assert ready.produce(message(1)).said == "n1.2"


def test_a_disk_that_hangs_is_refused_by_name_and_said_to_the_others(ready: Driven) -> None:
    assert ready.produce(message(1)).said == "n1.1"
    ready.driver.begins()
    ready.driver.tick()
    assert refusal(ready) is None
    ready.clock_ms += 1_500
    ready.driver.tick()
    assert refusal(ready) is MemberRefusal.DISK_STALLED
    assert is_out(ready)
    ready.driver.ends()
    ready.driver.tick()
    assert refusal(ready) is None
    assert not is_out(ready)


def test_a_caller_that_waits_for_a_disk_that_hangs_hears_what_is_known(ready: Driven) -> None:
    written = ready.ask(message(1))
    ready.jobs.clear()
    group = ready.driver.begin_group()
    assert group is not None
    waits = ready.ask(message(2))
    ready.clock_ms += 2_000
    ready.driver.tick()
    assert (written.said, waits.said) == ("nothing yet", "nothing yet")
    ready.clock_ms += 1
    ready.driver.tick()
    assert (written.said, waits.said) == ("WHEEL_LOST", "DISK_STALLED")
    # What was being written is there in the end; no caller is answered twice.
    ready.driver.finish_group(group)
    ready.work()
    assert ready.stored(ONE) == [message(1)]
    assert ready.produce(message(3)).said == "n1.1"


@pytest.mark.parametrize(("ahead_hours", "said"), [(11, "nothing yet"), (13, "CLOCK_AHEAD")])
def test_what_no_mirror_would_believe_is_not_written(
    pair: Driven, ahead_hours: int, said: str
) -> None:
    """It would keep the wheel from being acknowledged until the others' clocks are that far."""
    span_s = StoreLimits().span_seconds
    pair.clock_wall_ms += ahead_hours * 3_600_000
    pair.clock_ms += 100
    pair.driver.received("n2", Gossip(peer_heartbeat(2)))
    far = pair.ask(message(1, slot=pair.clock_wall_ms // 1000 + span_s))
    soon = pair.ask(message(2, slot=BASE_SLOT + span_s))
    pair.work()
    assert (far.said, soon.said) == (said, "nothing yet")
    pair.driver.received("n2", Applied(ONE, "s2", "b2", pair.store.last_seq))
    assert soon.said == "n1.1"


def test_a_bit_that_flips_in_memory_costs_one_more_push(disk: SimulatedDisk) -> None:
    node = Driven(disk, nodes=("n1", "n2"), min_insync=2, recent_bytes=8 << 20)
    node.hear(members={"n2": "s2"}, w1=None)
    node.driver.received("n2", Gossip(peer_heartbeat()))
    node.work()
    node.tick()
    node.driver.received("n2", Applied(ONE, "s2", "b2", 0))
    node.ask(message(1))
    node.driver.do(node.jobs.popleft())  # it is written, and not pushed yet
    content = node.store.outgoing.recent.frames(1, 1, floor=0, max_bytes=1 << 20).content
    assert isinstance(content.obj, bytearray)
    content.obj[100] ^= 1
    node.work()
    for count in range(2, 32):
        node.driver.received("n2", Gossip(peer_heartbeat(count)))
        node.driver.received("n2", Applied(ONE, "s2", "b2", 0))  # it has refused the frame
        node.tick()
    pushed = [said.frames for _, said in node.sent if isinstance(said, Frames)]
    assert len(pushed) > 1
    assert [good_frames(ONE, bundle).frames for bundle in pushed] == [0] + [1] * (len(pushed) - 1)
