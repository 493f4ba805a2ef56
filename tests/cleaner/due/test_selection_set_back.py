"""w is set back: what was done ahead of it stays done, and all else is delivered at its due."""

from dataclasses import replace

from delaywheel.identity import WheelId
from delaywheel.storage.folder import layout
from delaywheel_replica.core.protocol.progress import Progress
from support.core.violations import violations
from support.due.leader import SECOND, START_MS, Leader, message, numbers
from support.due.wheels import Wheels

A1, B1, B2 = WheelId("a", 1), WheelId("b", 1), WheelId("b", 2)
DAY_MS = 86_400_000
DUE_MS = START_MS + 3_600_000


def set_back(leader: Leader, now_ms: int = START_MS) -> Leader:
    """Another leader, once the clock was corrected and w set back."""
    after = leader.progress.set_back(now_ms)
    assert isinstance(after, Progress)
    assert violations(leader.progress, after) == []
    return Leader(leader.wheels, after)


def test_seconds_that_the_floor_has_passed_are_not_looked_for(wheels: Wheels) -> None:
    """Their files are gone, and the index still names them."""
    frames = wheels.write(A1, [message(DUE_MS, 1)])
    with Leader(wheels) as ahead:
        ahead.forward(START_MS + DAY_MS)
    floor = DUE_MS // 1000 + 1
    layout.slot_path(layout.wheel_folder(wheels.data, A1), frames[0].slot).unlink()
    wheels.write(B1, [message(floor * 1000, 2)])
    ahead.progress = replace(ahead.progress, floor=floor)
    with set_back(ahead) as leader:
        leader.look(floor * 1000)
        assert leader.reader.unreadable == frozenset()
        leader.forward(floor * 1000)
    assert numbers(leader.messages) == [2]
    assert floor > SECOND
