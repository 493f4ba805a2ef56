from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel_replica.core.leader.registration import (
    Registered,
    RegistrationRefusal,
    register,
    wheels_of_a_node,
)
from delaywheel_replica.core.protocol.control import (
    ROLLED_BACK,
    ControlState,
    NodeRecord,
    node_record,
    wheel_record,
)
from support.core.values import wheel_record_of

A = {"a": "disk-a"}
A1, A2 = WheelId("a", 1), WheelId("a", 2)


def ask(
    state: ControlState,
    last_number: int,
    *,
    storage: str = "disk-a",
    saves: int = 0,
    floor: int = 0,
) -> object:
    return register(
        state, "a", storage, last_number, saves=saves, members=A, min_insync=1, floor=floor
    )


def registered(answer: object, state: ControlState) -> tuple[WheelId, ControlState]:
    assert isinstance(answer, Registered)
    return answer.wheel, state.apply_all(answer.records)


def test_a_new_node_gets_its_first_wheel_sealed_at_the_floor() -> None:
    wheel, state = registered(ask(ControlState(), 0, floor=77), ControlState())
    assert wheel == A1
    assert state.nodes == {"a": NodeRecord("disk-a", 1)}
    assert state.wheels == {A1: wheel_record_of(seal_slot=77)}


def test_a_node_that_knows_its_wheel_gets_the_next() -> None:
    _, state = registered(ask(ControlState(), 0), ControlState())
    wheel, state = registered(ask(state, 1), state)
    assert wheel == A2
    assert state.nodes["a"].last_number == 2


def test_a_closed_wheel_is_not_given_again() -> None:
    state = ControlState().apply_all(
        [
            node_record("a", NodeRecord("disk-a", 1)),
            wheel_record(A1, wheel_record_of(closed_at=0)),
        ]
    )
    assert registered(ask(state, 0), state)[0] == A2


def test_a_wheel_with_other_members_or_another_w_is_not_given_again() -> None:
    for record in (wheel_record_of("a", "b"), wheel_record_of("a", "b", min_insync=2)):
        state = ControlState().apply_all(
            [node_record("a", NodeRecord("disk-a", 1)), wheel_record(A1, record)]
        )
        assert registered(ask(state, 0), state)[0] == A2


def test_an_older_copy_of_the_folder_takes_no_part() -> None:
    _, state = registered(ask(ControlState(), 0, saves=7), ControlState())
    assert state.nodes == {"a": NodeRecord("disk-a", 1, saves=7)}
    assert ask(state, 1, storage=ROLLED_BACK) is RegistrationRefusal.STORAGE_ROLLED_BACK
    _, state = registered(ask(state, 1, saves=6), state)  # an old heartbeat, which was relayed
    assert state.nodes == {"a": NodeRecord("disk-a", 2, saves=7)}


def test_one_node_that_starts_again_and_again_leaves_room_for_the_others() -> None:
    state = ControlState()
    share = wheels_of_a_node(3)
    give = partial(
        register,
        saves=0,
        members={node: f"disk-{node}" for node in "abc"},
        min_insync=2,
        floor=0,
    )
    for number in range(share):
        answer = give(state, "a", "disk-a", number)
        assert isinstance(answer, Registered)
        state = state.apply_all(answer.records)
    again = give(state, "a", "disk-a", share)
    assert again is RegistrationRefusal.TOO_MANY_WHEELS
    # What was assigned without an answer is assigned again all the same.
    reported = give(state, "a", "disk-a", share - 1)
    assert reported == Registered(WheelId("a", share), [])
    other = give(state, "b", "disk-b", 0)
    assert isinstance(other, Registered)
    gone = state.apply_all([(f"wheel/{A1}", None)])
    after = give(gone, "a", "disk-a", share)
    assert isinstance(after, Registered)
    assert after.wheel == WheelId("a", share + 1)


def test_numbers_go_on_from_what_the_node_has_used_should_its_record_be_gone() -> None:
    assert registered(ask(ControlState(), 6), ControlState())[0] == WheelId("a", 7)


@given(st.lists(st.sampled_from(["ask", "know", "forget", "close", "unregister", "lose"])))
def test_no_number_is_ever_given_to_two_wheels(history: list[str]) -> None:
    """Whatever the node forgets, and whatever happens to its wheels."""
    state, known, last = ControlState(), 0, None
    ever: set[WheelId] = set()
    for what in history:
        match what:
            case "ask" | "lose":
                answer = ask(state, known)
                assert isinstance(answer, Registered)
                if what == "lose":
                    continue  # the transaction is not committed
                if answer.records:
                    assert answer.wheel not in ever
                state = state.apply_all(answer.records)
                last = answer.wheel
                ever.add(last)
            case "know" if last is not None:
                known = max(known, last.number)
            case "forget":
                known = 0
            case "close":
                state = state.apply_all(
                    [wheel_record(w, wheel_record_of(closed_at=3)) for w in state.wheels]
                )
            case "unregister":
                closed = [w for w, r in state.wheels.items() if r.closed_at is not None]
                state = state.apply_all([(f"wheel/{w}", None) for w in closed])
    assert len({wheel.number for wheel in ever}) == len(ever)
