"""The losses that an operator is shown before a node is replaced or removed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core.leader.replacing import frames_at_risk
from delaywheel_replica.core.protocol.control import REMOVED, ControlState, NodeRecord, WheelRecord
from delaywheel_replica.core.protocol.frames import FrameSet
from delaywheel_replica.core.protocol.progress import Progress
from support.core.values import heartbeat, wheel_heartbeat

A1, B1 = WheelId("a", 1), WheelId("b", 1)
THREE = {node: f"disk-{node}" for node in "abc"}
NODES = {node: NodeRecord(storage, 1) for node, storage in THREE.items()}


def state_of(
    record: WheelRecord, *, taken: int = 0, lost: frozenset[int] = frozenset()
) -> ControlState:
    return ControlState(
        progress=Progress(0, None, {A1: taken}, 0),
        nodes=NODES,
        wheels={A1: record},
        lost=FrameSet.of((A1, seq) for seq in lost),
    )


RECORD = WheelRecord(THREE, 2, 0)


@pytest.mark.parametrize(
    ("state", "others", "at_risk"),
    [
        (state_of(RECORD, taken=7), {}, 7),
        (state_of(RECORD, taken=7), {"b": wheel_heartbeat(7)}, 0),
        (state_of(RECORD, taken=7), {"b": wheel_heartbeat(5)}, 2),
        (state_of(RECORD, taken=7), {"b": wheel_heartbeat(5), "c": wheel_heartbeat(6)}, 1),
        (state_of(RECORD, taken=7), {"b": wheel_heartbeat(7, missing=(5,))}, 3),
        (
            state_of(RECORD, taken=7, lost=frozenset({5})),
            {"b": wheel_heartbeat(7, missing=(5,))},
            0,
        ),
        (state_of(RECORD, taken=7, lost=frozenset({1, 7})), {}, 5),
        (state_of(replace(RECORD, limit=9)), {"b": wheel_heartbeat(5)}, 4),
        (state_of(replace(RECORD, closed_at=6)), {"b": wheel_heartbeat(5)}, 1),
        (state_of(RECORD), {"b": replace(wheel_heartbeat(5), high_watermark=8)}, 3),
    ],
)
def test_frames_that_no_other_member_holds(
    state: ControlState, others: dict[str, object], at_risk: int
) -> None:
    heartbeats = {node: heartbeat(node, wheels={A1: reported}) for node, reported in others.items()}  # type: ignore[dict-item]
    assert frames_at_risk(state, "a", heartbeats) == {A1: at_risk}


def test_what_the_node_itself_reported_before_is_an_end_and_no_holder() -> None:
    heartbeats = {
        "a": heartbeat("a", wheels={A1: wheel_heartbeat(9)}),
        "b": heartbeat("b", wheels={A1: wheel_heartbeat(5)}),
    }
    assert frames_at_risk(state_of(RECORD), "a", heartbeats) == {A1: 4}
    assert frames_at_risk(state_of(RECORD), "b", heartbeats) == {A1: 0}


def test_wheels_that_do_not_count_on_it_are_not_named() -> None:
    wheels = {
        A1: WheelRecord({**THREE, "c": "an older disk"}, 2, 0),
        B1: WheelRecord({"a": "disk-a", "b": "disk-b"}, 2, 0),
    }
    state = ControlState(nodes=NODES, wheels=wheels)
    assert frames_at_risk(state, "c", {}) == {}
    assert frames_at_risk(state, "b", {}) == {A1: 0, B1: 0}
    out = replace(state, nodes={**NODES, "b": NodeRecord(REMOVED, 1)})
    assert frames_at_risk(out, "b", {}) == {}
