"""Messages accepted before a start are counted by topic, from indexes or frames."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.server.metrics.census import Census
from delaywheel_replica.server.node.pending_topics import PendingTopics
from support.core.values import heartbeat
from support.services.waiting import wait_until

DATA = Path(__file__).parents[2] / "golden" / "node-3"
LEAST_SLOT = 1_763_700_000


@pytest.mark.parametrize(
    ("node", "open_", "expected"),
    [
        ("golden-1", None, {"orders": 1, "payments.eu": 2}),
        ("golden-2", None, {"orders": 1}),
        ("golden-1", WheelId("golden-1", 3), {}),
        ("another", None, {}),
    ],
    ids=["own", "own of another", "what is new", "mirrors"],
)
def test_wheels_that_no_heartbeat_reports_yet_are_counted(
    node: str, open_: WheelId | None, expected: dict[str, int]
) -> None:
    pending = PendingTopics(7 * 86_400, LEAST_SLOT)
    census = Census(PosixDisk(), DATA, pending, lambda: heartbeat(node, open_=open_, wheels={}))
    census.start()
    wait_until("it is counted", lambda: pending.read(LEAST_SLOT) == expected or None)
    census.stop()
    assert pending.read(LEAST_SLOT) == expected


def test_a_wheel_is_counted_once_it_is_verified() -> None:
    verifying = {WheelId("golden-1", 3)}
    looks: list[None] = []

    def seen() -> Heartbeat:
        looks.append(None)
        return replace(heartbeat("golden-1"), verifying=frozenset(verifying))

    pending = PendingTopics(7 * 86_400, LEAST_SLOT)
    census = Census(PosixDisk(), DATA, pending, seen)
    census.start()
    wait_until("it looks again", lambda: len(looks) > 2 or None)
    assert not pending.read(LEAST_SLOT)
    verifying.clear()
    wait_until("it is counted", lambda: pending.read(LEAST_SLOT) or None)
    census.stop()
