"""Frames that come while the store writes others of their wheel wait, within bounds.

And closed wheels are copied to a disk that was exchanged.
"""

from dataclasses import replace

import pytest

from delaywheel.identity import WheelId
from delaywheel.storage.frames.bundle import FrameCopy
from delaywheel.storage.frames.rows import GONE_ROW
from delaywheel_replica.core.node.events import Effect, Mirror, Mirrored, Received, Repair, Saved
from delaywheel_replica.core.protocol.control import NodeRecord
from delaywheel_replica.core.protocol.messages import Fetch, Frames, Gossip
from delaywheel_replica.core.wheels.mirrors import (
    COPIED_FRAMES_S,
    COPIED_ROWS_S,
    CREDIT_MS,
    UNWRITABLE_MS,
)
from support.core.member_talk import heartbeat_of, meet, messages
from support.core.member_world import FakeNode, disk_of, frames_of, held_of, record_of
from support.core.values import heartbeat, wheel_heartbeat
from support.wheels.copies import bundled, copy_of

B1, B2 = WheelId("b", 1), WheelId("b", 2)
MIB = 1 << 20


class Mirroring:
    """Node a, whose store is done when the test says so."""

    def __init__(self) -> None:
        self.node = FakeNode("a")
        self.node.cleaner_reports(self.node.cleaner({B1: record_of()}))
        self.writes: list[Mirror] = []

    def receive(self, seq: int, mib: int) -> None:
        """The origin pushes a frame."""
        frame = copy_of(seq, bytes(mib * MIB))
        pushed = Frames(held_of(B1, 0).card, bundled([frame]))
        self.step(Received("b", pushed, self.node.now_ms, self.node.wall_ms))

    def step(self, event: Received | Mirrored) -> None:
        """Requests to the store are noted, and not carried out."""
        effects: list[Effect] = self.node.machine.step(event)
        self.writes += [effect for effect in effects if isinstance(effect, Mirror)]

    def write(self) -> None:
        """The store is done with one job."""
        held = self.node.store.mirror(self.writes.pop(0))
        self.step(Mirrored(held, self.node.now_ms))

    def written(self) -> list[int]:
        """Everything that it holds when no job is left."""
        while self.writes:
            self.write()
        return sorted(self.node.store.frames[B1])


def test_no_more_waits_than_its_bytes() -> None:
    mirroring = Mirroring()
    for seq in range(1, 6):
        mirroring.receive(seq, mib=12)
    # One is being written, two wait; the rest is fetched later.
    assert mirroring.written() == [1, 2, 3]


def test_what_was_taken_makes_room() -> None:
    mirroring = Mirroring()
    for seq in (1, 2, 3):
        mirroring.receive(seq, mib=16)
    for seq in (4, 5, 6):
        mirroring.write()
        mirroring.receive(seq, mib=16)
    assert mirroring.written() == [1, 2, 3, 4, 5, 6]


def test_a_message_that_is_more_waits_alone() -> None:
    mirroring = Mirroring()
    mirroring.receive(1, mib=0)
    mirroring.receive(2, mib=33)
    mirroring.receive(3, mib=1)
    assert mirroring.written() == [1, 2]


def test_no_more_waits_than_its_frames() -> None:
    mirroring = Mirroring()
    mirroring.receive(1, mib=0)
    for first in (2, 4_002, 8_002):
        pushed = frames_of(B1, first, first + 3_999)
        mirroring.step(Received("b", pushed, mirroring.node.now_ms, mirroring.node.wall_ms))
    assert mirroring.written() == list(range(1, 8_002))


@pytest.mark.parametrize("saves", [True, False])
def test_a_wheel_is_promised_away_that_cannot_be_written_while_the_medium_takes_other_writes(
    *, saves: bool
) -> None:
    node = FakeNode("a")
    node.cleaner_reports(node.cleaner(dict.fromkeys((B1, B2), record_of())))
    node.store.refuses.add(Mirror)
    for wheel in (B1, B2):
        for number in range(2 * UNWRITABLE_MS // 500):
            named = heartbeat_of("b", open=wheel, count=100 * wheel.number + number)
            node.receive("b", Gossip(named))
            node.receive("b", Frames(held_of(wheel, 0).card, bundled([copy_of(1, b"x")])))
            if saves:
                node.step(Saved(node.store.state))
            node.tick(500)
    # Not both: the next one follows after a minute at the earliest.
    assert node.store.state.fenced.get("b", 0) == int(saves)


A1, A2, A3 = (WheelId("a", number) for number in (1, 2, 3))


@pytest.mark.parametrize(
    ("sender", "wheel", "request_number"),
    [
        ("b", B1, 999),  # a request that was never sent
        ("c", B1, 0),  # pushed by another node than the origin
        ("b", A2, 0),  # of the spare, which would exist before it is opened
        ("a", A2, 0),
        ("b", A2, 999),
        ("b", A3, 0),  # of a wheel that this node does not know of
    ],
)
def test_frames_that_nobody_asked_for_are_dropped(
    sender: str, wheel: WheelId, request_number: int
) -> None:
    node = FakeNode("a")
    node.cleaner_reports(node.cleaner(dict.fromkeys((A1, A2, B1), record_of())))
    meet(node)
    for _ in range(3):
        node.tick()
    assert node.store.state.spare is not None
    assert (node.store.state.open, node.store.state.spare.wheel) == (A1, A2)
    unasked = replace(frames_of(wheel, 1, 2), request=request_number)
    effects = node.machine.step(Received(sender, unasked, node.now_ms, node.wall_ms))
    assert not [effect for effect in effects if isinstance(effect, Mirror | Repair)]


def test_a_late_answer_is_taken_also_when_another_node_was_asked_since() -> None:
    node = FakeNode("a")
    node.cleaner_reports(node.cleaner({B1: replace(record_of(), closed_at=2)}))
    for peer in "bc":
        node.receive(peer, Gossip(heartbeat_of(peer)))
    node.tick()
    [(peer, fetch)] = messages(node, Fetch)
    assert isinstance(fetch, Fetch)
    node.tick(2_000)
    answer = replace(frames_of(B1, 1, 2), request=fetch.request)
    node.receive(peer, answer)
    assert sorted(node.store.frames[B1]) == [1, 2]


# --- closed wheels, copied to a node whose disk was replaced


B2 = WheelId("b", 2)


def a_replaced_node(*, closed_at: int | None) -> FakeNode:
    """Node a on a new disk; node b has two wheels whose members are the old ones."""
    node = FakeNode("a")
    record = replace(record_of(closed_at=closed_at), members={**record_of().members, "a": "before"})
    nodes = {each: NodeRecord(disk_of(each), 1) for each in "abc"}
    status = replace(node.cleaner({B1: record, B2: record}), nodes=nodes)
    node.cleaner_reports(status)
    held = {wheel: wheel_heartbeat(5_000) for wheel in (B1, B2)}
    node.receive("b", Gossip(heartbeat("b", wheels=held)))
    node.take_sent()
    return node


def fetches(node: FakeNode) -> list[Fetch]:
    return [message for _, message in node.take_sent() if isinstance(message, Fetch)]


def frames_of_the_old(wheel: WheelId, first: int, last: int, request: int) -> Frames:
    pushed = frames_of(wheel, first, last, request=request)
    return replace(
        pushed, card=replace(pushed.card, members={**record_of().members, "a": "before"})
    )


def test_a_wheel_that_is_not_closed_is_not_copied() -> None:
    node = a_replaced_node(closed_at=None)
    node.tick()
    node.tick()
    assert fetches(node) == []


def test_closed_wheels_are_copied_one_after_the_other_and_not_too_fast() -> None:
    node = a_replaced_node(closed_at=4_000)
    node.tick()
    assert fetches(node) == [Fetch(1, B1, 1, 4_000)]
    node.receive("b", frames_of_the_old(B1, 1, 1_000, request=1))
    heard = heartbeat("b", wheels={wheel: wheel_heartbeat(5_000) for wheel in (B1, B2)})
    rested_ms = 0
    while not (found := fetches(node)):
        node.receive("b", Gossip(replace(heard, count=rested_ms + 2)))
        node.tick()
        rested_ms += 100
    assert rested_ms >= 1000 * 1_000 / COPIED_FRAMES_S - CREDIT_MS
    assert found == [Fetch(2, B1, 1_001, 4_000)]
    node.receive("b", frames_of_the_old(B1, 1_001, 4_000, request=2))
    for count in range(20):
        node.receive("b", Gossip(replace(heard, count=rested_ms + 3 + count)))
        node.tick()
    assert fetches(node)[0].wheel == B2
    assert node.status().heartbeat.wheels[B1].applied == 4_000


def test_rows_of_what_is_deleted_are_copied_faster_and_not_too_fast() -> None:
    """A wheel of a week has hundreds of millions of them, before what is pending."""
    node, rows = a_replaced_node(closed_at=40_000), 500
    heard = heartbeat("b", wheels={wheel: wheel_heartbeat(40_000) for wheel in (B1, B2)})
    node.receive("b", Gossip(replace(heard, count=2)))
    node.tick()
    copied = 0
    while found := fetches(node):
        (fetch,) = found
        assert (fetch.wheel, fetch.first_seq) == (B1, copied + 1)
        gone = bundled([FrameCopy(copied + 1 + n, GONE_ROW, b"") for n in range(rows)])
        card = frames_of_the_old(B1, 1, 1, request=0).card
        node.receive("b", Frames(card, gone, fetch.request))
        copied += rows
    at_once = CREDIT_MS * COPIED_ROWS_S / 1_000
    assert at_once <= copied <= at_once + 2 * rows
    assert node.status().heartbeat.wheels[B1].applied == copied
