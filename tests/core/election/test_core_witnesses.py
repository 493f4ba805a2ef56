"""No node leads on a control topic that lacks what nodes have read there."""

from dataclasses import replace

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core.election.witnesses import contradiction
from delaywheel_replica.core.protocol.control import (
    ControlState,
    NodeRecord,
    node_record,
    progress_record,
)
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.protocol.progress import Position, Progress, Reached
from support.core.values import heartbeat, wheel_record_of

A1, A2 = WheelId("a", 1), WheelId("a", 2)
AT = Position(A1, 5, 2)
W = 1_000_000


def known(*, node: NodeRecord | None = None, **changes: object) -> ControlState:
    """What a topic says."""
    progress = replace(Progress(W, AT, {A1: 7}, 880, set_backs=1), **changes)  # type: ignore[arg-type]
    records = [progress_record(progress)]
    if node is not None:
        records.append(node_record("a", node))
    return ControlState().apply_all(records)


def reported(node: str = "b", **changes: object) -> dict[str, Heartbeat]:
    """The report of one node."""
    return {node: replace(heartbeat(node), **changes)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "reached",
    [
        None,
        Reached(1, W, AT),
        Reached(1, W, None),
        Reached(1, W, Position(A1, 5, 1)),
        Reached(1, W - 1, Position(A1, 9, 9)),
        Reached(0, W + 1, None),
    ],
)
def test_who_has_read_no_more_says_nothing(reached: Reached | None) -> None:
    assert contradiction(known(), reported(floor=880, reached=reached)) is None


@pytest.mark.parametrize(
    "reached",
    [
        Reached(1, W + 1, None),
        Reached(1, W, Position(A1, 5, 3)),
        Reached(1, W, Position(WheelId("b", 1), 1, 1)),
        Reached(2, 0, None),
    ],
)
def test_a_topic_that_lost_what_was_done_last_is_found(reached: Reached) -> None:
    """Also if w was set back, and within one millisecond."""
    found = contradiction(known(), reported(reached=reached))
    assert found is not None
    assert found.startswith(
        f"node b has read of progress {reached}, and the control topic knows of"
    )
    assert "lost its end" in found


@pytest.mark.parametrize(("floor", "is_lost"), [(879, False), (880, False), (881, True)])
def test_a_floor_says_the_same(floor: int, is_lost: bool) -> None:
    found = contradiction(known(), reported(floor=floor))
    assert (found is not None) == is_lost
    assert found is None or "node b has read of floor 881" in found


@pytest.mark.parametrize("what", [reported(floor=1), reported(reached=Reached(0, 1, None))])
def test_a_topic_without_progress_is_found_by_who_has_read_of_some(
    what: dict[str, Heartbeat],
) -> None:
    found = contradiction(ControlState(), what)
    assert found is not None
    assert "knows of None" in found


def test_wheels_without_progress_are_found() -> None:
    state = ControlState(wheels={A1: wheel_record_of("a")})
    assert "1 wheels and no progress" in str(contradiction(state, {}))


@pytest.mark.parametrize("state", [ControlState(), known(), known(node=NodeRecord("disk-a", 1))])
def test_a_topic_that_forgot_a_wheel_given_is_found(state: ControlState) -> None:
    found = contradiction(state, {"a": heartbeat(open_=A1, spare=A2)})
    assert found is not None
    assert "a.2" in found


def test_another_disk_says_nothing_of_the_number() -> None:
    state = known(node=NodeRecord("disk-of-before", 1))
    assert contradiction(state, {"a": heartbeat(open_=A1, spare=A2)}) is None
