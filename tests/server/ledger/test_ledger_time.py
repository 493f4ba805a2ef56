"""Acceptance never goes back within a wheel, with any clock: files are in order of hours."""

from __future__ import annotations

from delaywheel.identity import WheelId
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.reading.reader import WheelReader
from delaywheel_replica.core.protocol.heartbeat import Fence
from sim.machine.disk import SimulatedDisk
from support.server.driven import DATA, NOW_MS, Driven
from support.wheels.messages import message

ONE, TWO = WheelId("n1", 1), WheelId("n1", 2)


def accepted(node: Driven, wheel: WheelId) -> list[int]:
    """The time of each frame, by its own header."""
    reader = WheelReader(node.disk, DATA, wheel)
    frames = [reader.frame(seq) for seq in range(1, reader.last_seq() + 1)]
    return [frame.accepted_at_ms - NOW_MS for frame in frames if isinstance(frame, Frame)]


def test_within_a_wheel_a_clock_that_is_set_back_stands_still() -> None:
    node = Driven(SimulatedDisk())
    node.hear(w1=None)
    node.hear(w1=None, w2=None)
    begun_ms = node.clock_wall_ms - NOW_MS
    steps_ms = (0, 5_000, -3_600_000, 100, 3_700_000)
    for number, step_ms in enumerate(steps_ms):
        node.clock_wall_ms += step_ms
        assert node.produce(message(number, slot=NOW_MS // 1000 + 3_600)).said == "n1.1"
    expected = [0, 5_000, 5_000, 5_000, 105_100]
    assert accepted(node, ONE) == [begun_ms + ms for ms in expected]
    # Another wheel begins with the clock as it is.
    node.clock_wall_ms -= 3_600_000
    node.want(Fence("n1", 1))
    assert node.produce(message(9, slot=NOW_MS // 1000 + 3_600)).said == "n1.2"
    assert accepted(node, TWO) == [node.clock_wall_ms - NOW_MS]
