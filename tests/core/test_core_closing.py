from itertools import combinations, product

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core.beat import Beat
from delaywheel_replica.core.closing import (
    AnswersWanted,
    Close,
    Fence,
    FenceAnswer,
    HoldersWanted,
    closing,
    fences_wanted,
    wheels_to_close,
)
from delaywheel_replica.core.control import ControlState, NodeRecord, node_record, wheel_record
from delaywheel_replica.core.quorum import held_by
from support.core_values import beat, wheel_record_of

A1, A2, A3, A4 = (WheelId("a", number) for number in range(1, 5))
FENCE = Fence("a", 1)


def answer(
    node: str, applied: int, *, complete: bool = True, replaced: bool = False, fence: Fence = FENCE
) -> FenceAnswer:
    storage = "disk-new" if replaced else f"disk-{node}"
    return FenceAnswer(node, storage, fence, {A1: applied} if applied else {}, complete)


@pytest.mark.parametrize(
    ("members", "min_insync"), [(n, w) for n in range(1, 5) for w in range(1, n + 1)]
)
def test_the_end_is_never_before_what_was_acknowledged(members: int, min_insync: int) -> None:
    """Every holding of every member, every set of answers, against counting."""
    nodes = "abcd"[:members]
    record = wheel_record_of(*nodes, min_insync=min_insync)
    for held in product(range(3), repeat=members):
        acknowledged = held_by(held, min_insync)
        for size in range(members + 1):
            for asked in combinations(range(members), size):
                answers = [answer(nodes[index], held[index]) for index in asked]
                result = closing(A1, record, answers)
                if size < members - min_insync + 1:
                    assert result == AnswersWanted()
                    continue
                assert not isinstance(result, AnswersWanted)
                assert result.final_seq == max(held[index] for index in asked)
                assert result.final_seq >= acknowledged
                holders = sum(held[index] >= result.final_seq for index in asked)
                enough = holders >= min_insync or result.final_seq == 0
                assert isinstance(result, Close) == enough


THREE = wheel_record_of("a", "b", "c", min_insync=2)


@pytest.mark.parametrize(
    ("answers", "result"),
    [
        ([], AnswersWanted()),
        ([answer("a", 7)], AnswersWanted()),
        ([answer("a", 7), answer("b", 7)], Close(7)),
        ([answer("a", 7), answer("b", 5)], HoldersWanted(7)),
        # An incomplete member's word counts towards the greatest, not towards R.
        ([answer("a", 7), answer("b", 9, complete=False)], AnswersWanted()),
        ([answer("a", 7), answer("b", 9, complete=False), answer("c", 9)], Close(9)),
        ([answer(node, 4, complete=False) for node in "abc"], Close(4)),
        # A replaced one holds nothing, whatever it says, and counts towards all N.
        ([answer("a", 7), answer("b", 9, replaced=True)], AnswersWanted()),
        ([answer("a", 7, complete=False), *(answer(n, 9, replaced=True) for n in "bc")], Close(7)),
        ([answer(node, 9, replaced=True) for node in "abc"], Close(0)),
        # No member of this wheel, or a promise about others.
        ([answer("a", 7), answer("d", 9), answer("e", 9)], AnswersWanted()),
        ([answer("a", 7), answer("b", 7, fence=Fence("b", 1))], AnswersWanted()),
    ],
)
def test_whose_answers_count(answers: list[FenceAnswer], result: object) -> None:
    assert closing(A1, THREE, answers) == result


@pytest.mark.parametrize("complete", [True, False])
def test_a_node_alone_is_all_members(complete: bool) -> None:
    answers = [answer("a", 7, complete=complete)]
    assert closing(A1, wheel_record_of(), answers) == Close(7)
    assert closing(A2, wheel_record_of(), answers) == AnswersWanted()


def state_of(*wheels: WheelId, storage: str = "disk-a") -> ControlState:
    records = [wheel_record(wheel, wheel_record_of()) for wheel in wheels]
    return ControlState().apply_all([node_record("a", NodeRecord(storage, 9)), *records])


@pytest.mark.parametrize(
    ("told", "left"),
    [
        (beat(open_=A1, spare=A2), []),
        (beat(open_=A2, spare=A3), [A1]),
        (beat(open_=A3), [A1, A2]),
        # Just registered: its node does not know it yet.
        (beat(open_=A2, last_number=2), [A1]),
        # Above one in use: a promise up to 2 would fence 1 as well.
        (beat(open_=A1, spare=A3), []),
        (beat(open_=A3, spare=A4), [A1, A2]),
        # Stopped cleanly, the spare is kept.
        (beat(spare=A3, draining=True), [A1, A2]),
        (beat(last_number=3), [A1, A2, A3]),
        (beat(last_number=0), []),
        # Another disk under this name takes no part.
        (beat(last_number=3, storage="disk-new"), []),
    ],
)
def test_what_a_node_uses_no_more_is_closed(told: Beat, left: list[WheelId]) -> None:
    assert wheels_to_close(state_of(A1, A2, A3), {"a": told}) == left


def test_a_replaced_nodes_wheels_are_closed_though_it_knows_no_number() -> None:
    state = state_of(A1, A2, storage="disk-new")
    assert wheels_to_close(state, {"a": beat(last_number=0, storage="disk-new")}) == [A1, A2]


def test_without_a_beat_nothing_is_closed() -> None:
    assert wheels_to_close(state_of(A1), {}) == []
    unknown = ControlState(wheels={A1: wheel_record_of()})
    assert wheels_to_close(unknown, {"a": beat(last_number=1)}) == []


def test_a_closed_wheel_is_not_closed_again() -> None:
    state = state_of(A1).apply_all([wheel_record(A1, wheel_record_of(closed_at=3))])
    assert wheels_to_close(state, {"a": beat(last_number=1)}) == []


def test_one_fence_for_all_that_a_node_left_and_none_once_answered() -> None:
    state = state_of(A1, A2, A3)
    assert fences_wanted([A1, A2], [], state) == [Fence("a", 2)]
    assert fences_wanted([A1, A2], [answer("a", 1, fence=Fence("a", 1))], state) == [Fence("a", 2)]
    assert fences_wanted([A1, A2], [answer("a", 1, fence=Fence("a", 2))], state) == []
