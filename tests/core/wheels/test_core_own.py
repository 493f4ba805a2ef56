"""What node.json should say next."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel.storage.folder.node_state import NodeState, Spare
from delaywheel_replica.core.node.shared_state import Registry
from delaywheel_replica.core.wheels.own_wheels import NodeFileInputs, next_state
from support.core.member_world import record_of, state_of
from support.core.values import NODES

A1, A2, A3 = (WheelId("a", number) for number in (1, 2, 3))


def spare_of(wheel: WheelId, seal_slot: int = 0) -> Spare:
    record = record_of()
    return Spare(wheel, seal_slot, record.members, record.min_insync)


def registry_of(*wheels: WheelId) -> Registry:
    return Registry({wheel: record_of() for wheel in wheels}, None)


def test_nothing_to_do_is_the_same_state() -> None:
    state = state_of("a", last_number=2, open=A1, spare=spare_of(A2))
    assert next_state(state, NodeFileInputs(in_hand=A1, registry=registry_of(A1, A2))) == state


def test_a_spare_is_opened_only_when_it_was_saved_and_none_is_in_hand() -> None:
    state = state_of("a", last_number=1, spare=spare_of(A1))
    opened = next_state(state, NodeFileInputs())
    assert (opened.open, opened.spare) == (A1, None)
    assert next_state(state, NodeFileInputs(may_open=False)) == state
    assert next_state(state, NodeFileInputs(draining=True)) == state
    in_hand = replace(state, open=WheelId("a", 9))
    assert next_state(in_hand, NodeFileInputs(in_hand=WheelId("a", 9))) == in_hand
    adopted = next_state(state_of("a"), NodeFileInputs(registry=registry_of(A1)))
    assert (adopted.open, adopted.spare) == (None, spare_of(A1))


def test_a_promise_about_own_wheels_waits_for_the_one_in_hand() -> None:
    state = state_of("a", last_number=2, open=A1, spare=spare_of(A2))
    inputs = NodeFileInputs(fences={"a": 2, "b": 3}, in_hand=A1)
    held_back = next_state(state, inputs)
    assert held_back.fenced == {"b": 3}
    assert held_back.spare is not None
    free = next_state(held_back, replace(inputs, in_hand=None))
    assert free.fenced == {"a": 2, "b": 3}
    assert (free.open, free.spare) == (None, None)


def test_a_promise_above_all_own_numbers_uses_them_up() -> None:
    state = next_state(state_of("a", last_number=1), NodeFileInputs(fences={"a": 5}))
    assert state.last_number == 5
    assert next_state(state, NodeFileInputs(registry=registry_of(A2))) == state


def test_a_spares_seal_never_goes_back() -> None:
    state = state_of("a", last_number=2, open=A1, spare=spare_of(A2, 50))
    assert next_state(state, NodeFileInputs(in_hand=A1, spare_slot=49)) == state
    moved = next_state(state, NodeFileInputs(in_hand=A1, spare_slot=51))
    assert moved.spare == spare_of(A2, 51)


numbers = st.integers(1, 4)
own_wheels = st.builds(WheelId, st.just("a"), numbers)
inputs = st.builds(
    NodeFileInputs,
    fences=st.dictionaries(st.sampled_from(NODES[:2]), numbers),
    registry=st.none() | st.lists(own_wheels).map(lambda wheels: registry_of(*wheels)),
    draining=st.booleans(),
    may_open=st.booleans(),
    spare_slot=st.none() | st.integers(0, 9),
)


@given(st.lists(inputs, min_size=1, max_size=12), st.data())
def test_a_number_is_opened_once_promises_stand_and_seals_rise(
    all_inputs: list[NodeFileInputs], data: st.DataObject
) -> None:
    state: NodeState = state_of("a")
    opened: list[int] = []
    in_hand: WheelId | None = None
    for each in all_inputs:
        before, state = state, next_state(state, replace(each, in_hand=in_hand))
        if state.open is not None and state.open != before.open:
            opened.append(state.open.number)
            in_hand = state.open
            assert before.spare is not None
            assert before.spare.wheel == in_hand
        assert opened == sorted(set(opened))
        assert all(state.fenced[node] >= upto for node, upto in before.fenced.items())
        assert state.last_number >= before.last_number
        if state.spare is not None:
            assert state.spare.wheel.number > state.fenced.get("a", 0)
            assert state.spare.wheel.number not in opened
            if before.spare is not None and before.spare.wheel == state.spare.wheel:
                assert state.spare.seal_slot >= before.spare.seal_slot
        if in_hand is not None:
            assert state.open == in_hand
            assert in_hand.number > state.fenced.get("a", 0)
            in_hand = data.draw(st.sampled_from([in_hand, None]))
