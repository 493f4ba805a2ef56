"""Frames that come while the store writes others of their wheel: they wait, within bounds."""

from delaywheel.identity import WheelId
from delaywheel_replica.core.node.events import Effect, Mirror, Mirrored, Received
from delaywheel_replica.core.protocol.messages import Frames
from support.core.member_world import FakeNode, frames_of, held_of, record_of
from support.wheels.copies import bundled, copy_of

B1 = WheelId("b", 1)
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
