"""Wheels of a leader that may have to accept ingress records again."""

from dataclasses import replace

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.seal import FROZEN
from delaywheel_replica.core.protocol.status_files import Role
from support.core.member_world import FakeNode, record_of

A1, A2, A3, A4 = (WheelId("a", number) for number in (1, 2, 3, 4))
LATE_S = 120


def live(node: FakeNode, *wheels: WheelId, slot: int | None, role: Role = Role.LEADING) -> None:
    """Lets more than a second pass; the floor stays at the first wheel's seal."""
    for _ in range(5):
        floor = 0 if slot is None else slot
        registered = {wheel: replace(record_of("a"), seal_slot=floor) for wheel in wheels}
        row = node.cleaner(registered, role=role)
        progress = Progress(node.wall_ms, None, {}, floor)
        node.cleaner_reports(replace(row, progress=progress, ingress_slot=slot))
        node.tick(300)


def seals(node: FakeNode) -> list[int]:
    heartbeat = node.status().heartbeat
    return [heartbeat.wheels[wheel].seal_slot for wheel in heartbeat.named]


@pytest.fixture
def node() -> FakeNode:
    """A lone node, with an open wheel and a spare that are sealed by its clock."""
    node = FakeNode("a", "a")
    live(node, A1, slot=None)
    live(node, A1, A2, slot=None)
    assert node.status().heartbeat.named == (A1, A2)
    return node


def sealed_by_now(node: FakeNode) -> int:
    return node.wall_ms // 1000 - LATE_S


def test_seals_rest_while_what_was_announced_is_not_read(node: FakeNode) -> None:
    before = seals(node)
    live(node, A1, A2, slot=FROZEN)
    assert seals(node) == before
    assert node.status().heartbeat.named == (A1, A2)


def test_seals_wait_for_a_record(node: FakeNode) -> None:
    slot = max(seals(node)) + 1
    for _ in range(3):
        live(node, A1, A2, slot=slot)
    assert sealed_by_now(node) > slot
    assert seals(node) == [slot, slot]
    assert node.status().heartbeat.named == (A1, A2)


def test_wheels_that_are_sealed_beyond_a_record_give_way(node: FakeNode) -> None:
    slot = min(seals(node)) - 5
    live(node, A1, A2, slot=slot)
    assert node.status().heartbeat.named == (A1,)
    live(node, A1, A2, A3, slot=slot)
    assert node.store.opened == [A1, A3]
    live(node, A1, A2, A3, A4, slot=slot)
    assert (node.status().heartbeat.named, seals(node)) == ((A3, A4), [slot, slot])


def test_an_open_wheel_gives_way_although_the_node_leads_no_longer_once_its_spare_did(
    node: FakeNode,
) -> None:
    """Before, the wheel between the two could not be closed, and the floor would rest for ever."""
    live(node, A1, A2, slot=min(seals(node)) - 5)
    assert node.status().heartbeat.named == (A1,)
    live(node, A1, A2, A3, slot=None, role=Role.STANDBY)
    live(node, A1, A2, A3, slot=None, role=Role.STANDBY)
    assert node.store.opened == [A1, A3]


def test_only_a_leader_waits(node: FakeNode) -> None:
    slot = min(seals(node)) - 5
    live(node, A1, A2, slot=slot, role=Role.STANDBY)
    assert node.status().heartbeat.named == (A1, A2)
