"""Wheels that were sealed by a clock that was ahead: they are given up once w was set back."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.control import WheelRecord
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role
from support.core.member_world import FakeNode, record_of

A1, A2, A3, A4 = (WheelId("a", number) for number in (1, 2, 3, 4))
DAY_MS = 86_400_000


def led(node: FakeNode, *wheels: WheelId, seal_slot: int = 0) -> CleanerStatus:
    """The status of its cleaner, which leads."""
    registered: dict[WheelId, WheelRecord] = {
        wheel: replace(record_of("a"), seal_slot=seal_slot) for wheel in wheels
    }
    return node.cleaner(registered, role=Role.LEADING)


def after_a_set_back(node: FakeNode, *wheels: WheelId, floor: int = 0) -> CleanerStatus:
    """The same, when w was set back from where the clock was."""
    progress = Progress(node.wall_ms + DAY_MS, None, {}, floor).set_back(node.wall_ms)
    assert isinstance(progress, Progress)
    return replace(led(node, *wheels, seal_slot=floor), progress=progress)


def live(node: FakeNode, reported: Callable[[], CleanerStatus]) -> None:
    """Lets more than a second pass, with an unchanged cleaner."""
    for _ in range(5):
        node.cleaner_reports(reported())
        node.tick(300)


@pytest.fixture
def node() -> FakeNode:
    """A lone node, with wheels that it has sealed while its clock was a day ahead."""
    node = FakeNode("a", "a")
    node.wall_ms += DAY_MS
    for wheels in ((A1,), (A1, A2)):
        live(node, partial(led, node, *wheels))
    assert node.status().heartbeat.named == (A1, A2)
    node.wall_ms -= DAY_MS
    return node


def seals(node: FakeNode) -> list[int]:
    heartbeat = node.status().heartbeat
    return [heartbeat.wheels[wheel].seal_slot for wheel in heartbeat.named]


def test_while_w_is_ahead_they_stay(node: FakeNode) -> None:
    ahead = Progress(node.wall_ms + DAY_MS, None)
    live(node, lambda: replace(led(node, A1, A2), progress=ahead))
    assert node.status().heartbeat.named == (A1, A2)
    assert min(seals(node)) > node.wall_ms // 1000


def test_the_spare_is_given_up_and_the_open_one_once_there_is_another(node: FakeNode) -> None:
    live(node, lambda: after_a_set_back(node, A1, A2))
    assert node.status().heartbeat.named == (A1,)
    assert node.machine.refusal(node.now_ms) is None
    live(node, lambda: after_a_set_back(node, A1, A2, A3))
    assert node.store.opened == [A1, A3]
    live(node, lambda: after_a_set_back(node, A1, A2, A3, A4))
    assert node.status().heartbeat.named == (A3, A4)
    assert max(seals(node)) <= node.wall_ms // 1000 - 120


def test_one_that_was_sealed_at_a_floor_beyond_the_clock_stays(node: FakeNode) -> None:
    """Another wheel would be sealed there as well."""
    floor = node.wall_ms // 1000 + DAY_MS // 2_000
    for wheels in ((A1, A2), (A1, A2, A3), (A3, A4), (A3, A4)):
        live(node, partial(after_a_set_back, node, *wheels, floor=floor))
    assert node.store.opened == [A1, A3]
    assert node.status().heartbeat.named == (A3, A4)
    assert seals(node) == [floor, floor]
