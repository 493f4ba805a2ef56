from itertools import combinations, product

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core.leader.closing import (
    AnswersWanted,
    Close,
    HoldersWanted,
    closing,
    committed_limits,
    fences_wanted,
    limits_wanted,
    wheels_to_close,
)
from delaywheel_replica.core.leader.holders import held_by
from delaywheel_replica.core.protocol.control import (
    ControlState,
    NodeRecord,
    WheelRecord,
    node_record,
    wheel_record,
)
from delaywheel_replica.core.protocol.heartbeat import Fence, Heartbeat, Promise
from support.core.values import heartbeat, wheel_heartbeat, wheel_record_of

A1, A2, A3, A4 = (WheelId("a", number) for number in range(1, 5))
FENCE = Fence("a", 1)


def answer(
    node: str,
    applied: int,
    *,
    complete: bool = True,
    storage: str | None = None,
    fence: Fence = FENCE,
) -> Promise:
    return Promise(
        node,
        f"disk-{node}" if storage is None else storage,
        fence,
        {A1: applied} if applied else {},
        incomplete=frozenset() if complete else frozenset([A1]),
    )


def registered(record: WheelRecord, *, replaced: str = "") -> ControlState:
    """A state in which these nodes have another storage by now."""
    nodes = {
        node: NodeRecord("disk-new" if node in replaced else f"disk-{node}", 9) for node in "abcde"
    }
    return ControlState(nodes=nodes, wheels={A1: record})


def holding(**prefixes: int) -> dict[str, Heartbeat]:
    return {n: heartbeat(n, wheels={A1: wheel_heartbeat(prefix)}) for n, prefix in prefixes.items()}


@pytest.mark.parametrize(
    ("members", "min_insync"), [(n, w) for n in range(1, 5) for w in range(1, n + 1)]
)
def test_the_end_is_never_before_what_was_acknowledged(members: int, min_insync: int) -> None:
    """Every combination of held frames and answers, checked by counting."""
    nodes = "abcd"[:members]
    state = registered(wheel_record_of(*nodes, min_insync=min_insync))
    for held in product(range(3), repeat=members):
        acknowledged = held_by(held, min_insync)
        heartbeats = holding(**dict(zip(nodes, held, strict=True)))
        for size in range(members + 1):
            for asked in combinations(range(members), size):
                answers = [answer(nodes[index], held[index]) for index in asked]
                result = closing(A1, state, answers, heartbeats, taken=0)
                if size < members - min_insync + 1:
                    assert result == AnswersWanted()
                    continue
                assert not isinstance(result, AnswersWanted)
                assert result.final_seq == max(held[index] for index in asked)
                assert result.final_seq >= acknowledged
                holders = sum(seq >= result.final_seq for seq in held)
                enough = holders >= min_insync or result.final_seq == 0
                assert isinstance(result, Close) == enough


THREE = registered(wheel_record_of("a", "b", "c", min_insync=2))
ALL_HOLD = holding(a=9, b=9, c=9)


@pytest.mark.parametrize(
    ("answers", "result"),
    [
        ([answer("a", 7), answer("b", 9, complete=False), answer("c", 8)], Close(9)),
        # No member of this wheel, or a promise about others.
        ([answer("a", 7), answer("d", 9), answer("e", 9)], AnswersWanted()),
        ([answer("a", 7), answer("b", 7, fence=Fence("b", 1))], AnswersWanted()),
    ],
)  # fmt: skip
def test_whose_answers_count(answers: list[Promise], result: object) -> None:
    """Beside the table of members in docs/PROTOCOL.md (test_core_protocol_doc.py)."""
    assert closing(A1, THREE, answers, ALL_HOLD, taken=0) == result


def test_incomplete_is_said_of_each_wheel() -> None:
    other = Promise("b", "disk-b", FENCE, {A1: 7}, incomplete=frozenset([A2]))
    everything = Promise("b", "disk-b", FENCE, {A1: 7}, all_incomplete=True)
    assert closing(A1, THREE, [answer("a", 7), other], ALL_HOLD, taken=0) == Close(7)
    result = closing(A1, THREE, [answer("a", 7), everything], ALL_HOLD, taken=0)
    assert result == AnswersWanted()


BOTH = [answer("a", 7), answer("b", 5)]


def test_an_old_answer_does_not_end_a_wheel_below_what_was_filled_since() -> None:
    """c took seq 1 within the limit after its answer, and the frame was acknowledged with that."""
    state = registered(wheel_record_of("a", "b", "c", min_insync=3))
    found = closing(A1, state, [answer("b", 1)], holding(a=1, b=1, c=0), taken=0)
    assert found == HoldersWanted(1)
    assert committed_limits(state) == {}  # not before it is committed
    (record,) = limits_wanted(state, {A1: found}).values()
    state = state.apply_all([wheel_record(A1, record)])
    assert committed_limits(state) == {A1: 1}
    assert limits_wanted(state, {A1: found}) == {}
    assert closing(A1, state, [answer("c", 0)], holding(a=1, b=1, c=1), taken=0) == Close(1)


@pytest.mark.parametrize(
    ("heartbeats", "result"),
    [
        # A hole below is not held; nor is what another storage holds, or no member.
        ({**holding(a=7), "b": heartbeat("b", wheels={A1: wheel_heartbeat(7, missing=(3,))})},
         HoldersWanted(7)),
        ({**holding(a=7), "b": heartbeat("b", storage="x", wheels={A1: wheel_heartbeat(7)})},
         HoldersWanted(7)),
        (holding(a=7, d=7, e=7), HoldersWanted(7)),
    ],
)  # fmt: skip
def test_who_holds_all_through_the_end(heartbeats: dict[str, Heartbeat], result: object) -> None:
    assert closing(A1, THREE, BOTH, heartbeats, taken=0) == result


def test_of_an_empty_wheel_there_is_nothing_to_hold() -> None:
    assert closing(A1, THREE, [answer("a", 0), answer("b", 0)], {}, taken=0) == Close(0)


@pytest.mark.parametrize("complete", [True, False])
def test_a_node_alone_is_all_members(complete: bool) -> None:
    state = registered(wheel_record_of())
    answers = [answer("a", 7, complete=complete)]
    assert closing(A1, state, answers, holding(a=7), taken=0) == Close(7)
    assert closing(A1, state, [], holding(a=7), taken=0) == AnswersWanted()


def state_of(*wheels: WheelId, storage: str = "disk-a") -> ControlState:
    records = [wheel_record(wheel, wheel_record_of()) for wheel in wheels]
    return ControlState().apply_all([node_record("a", NodeRecord(storage, 9)), *records])


@pytest.mark.parametrize(
    ("reported", "left"),
    [
        (heartbeat(open_=A1, spare=A2), []),
        (heartbeat(open_=A2, spare=A3), [A1]),
        (heartbeat(open_=A3), [A1, A2]),
        # Just registered: its node does not know it yet.
        (heartbeat(open_=A2, last_number=2), [A1]),
        # Above one in use: a promise up to 2 would fence 1 as well.
        (heartbeat(open_=A1, spare=A3), []),
        (heartbeat(open_=A3, spare=A4), [A1, A2]),
        # Stopped cleanly, the spare is kept.
        (heartbeat(spare=A3, draining=True), [A1, A2]),
        (heartbeat(last_number=3), [A1, A2, A3]),
        (heartbeat(last_number=0), []),
        # Another disk under this name takes no part.
        (heartbeat(last_number=3, storage="disk-new"), []),
    ],
)
def test_what_a_node_uses_no_more_is_closed(reported: Heartbeat, left: list[WheelId]) -> None:
    assert wheels_to_close(state_of(A1, A2, A3), {"a": reported}) == left


@pytest.mark.parametrize(
    "heartbeats",
    [{}, {"a": heartbeat(last_number=0, storage="disk-new")}, {"a": heartbeat(open_=A1, spare=A2)}],
)
def test_a_replaced_nodes_wheels_are_closed_whatever_it_reports(
    heartbeats: dict[str, Heartbeat],
) -> None:
    state = state_of(A1, A2, storage="disk-new")
    assert wheels_to_close(state, heartbeats) == [A1, A2]


def test_all_wheels_of_a_silent_node_are_closed() -> None:
    state = state_of(A1, A2)
    assert wheels_to_close(state, {"a": heartbeat(open_=A1, spare=A2)}, {"a"}) == [A1, A2]
    assert wheels_to_close(state, {}, {"a"}) == [A1, A2]
    assert wheels_to_close(state, {}, {"b"}) == []


@pytest.mark.parametrize("later", [wheel_record_of("a", "b"), wheel_record_of("a", "b", "c")])
def test_wheels_with_other_members_than_a_later_ones_are_closed(later: WheelRecord) -> None:
    pair = wheel_record_of("a", "b", min_insync=2)
    state = state_of(A1).apply_all([wheel_record(A1, pair), wheel_record(A2, pair)])
    reported = {"a": heartbeat(open_=A1, spare=A2)}
    assert wheels_to_close(state, reported) == []
    state = state.apply_all([wheel_record(A3, later)])
    assert wheels_to_close(state, reported) == [A1, A2]
    ended = state.apply_all([wheel_record(A3, wheel_record_of("a", "b", closed_at=0))])
    assert wheels_to_close(ended, reported) == []


def test_without_a_beat_nothing_is_left() -> None:
    assert wheels_to_close(state_of(A1), {}) == []
    unknown = ControlState(wheels={A1: wheel_record_of()})
    assert wheels_to_close(unknown, {"a": heartbeat(last_number=1)}) == []


def test_a_closed_wheel_is_not_closed_again() -> None:
    state = state_of(A1).apply_all([wheel_record(A1, wheel_record_of(closed_at=3))])
    assert wheels_to_close(state, {"a": heartbeat(last_number=1)}, {"a"}) == []
    assert committed_limits(state.apply_all([wheel_record(A1, wheel_record_of(limit=3))])) == {}


def test_one_fence_for_all_that_a_node_left_and_none_once_answered() -> None:
    assert fences_wanted({A1: AnswersWanted(), A2: AnswersWanted()}) == [Fence("a", 2)]
    assert fences_wanted({A1: Close(3), A2: AnswersWanted()}) == [Fence("a", 2)]
    assert fences_wanted({A1: AnswersWanted(), A2: HoldersWanted(3)}) == [Fence("a", 1)]
    assert fences_wanted({A1: Close(3), A2: HoldersWanted(3)}) == []
