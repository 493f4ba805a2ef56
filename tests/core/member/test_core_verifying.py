"""How a node treats wheels that its start has found and not verified yet."""

from collections import deque

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core.node.events import (
    CloseWheel,
    DeleteWheel,
    Effect,
    Mirror,
    Saved,
    Sweep,
    Tick,
    Verified,
    VerifyWheel,
)
from delaywheel_replica.core.protocol.heartbeat import Fence, LeaderTerm, Promise
from delaywheel_replica.core.protocol.messages import Fetch, Gossip, Lacks
from delaywheel_replica.core.protocol.status_files import Role
from delaywheel_replica.core.wheels.verifying import AGAIN_MS
from support.core.member_talk import heartbeat_of, meet, messages, spare_of, wheel_heartbeat
from support.core.member_world import FakeNode, FakeStore, frames_of, held_of, record_of, state_of

A1, A2 = WheelId("a", 1), WheelId("a", 2)
B1, B2, C1 = WheelId("b", 1), WheelId("b", 2), WheelId("c", 1)


def asked_again(node: FakeNode) -> list[int]:
    """The fetches that it answered with missing frames."""
    return [
        reported.request for _, reported in messages(node, Lacks) if isinstance(reported, Lacks)
    ]


def answered(node: FakeNode) -> dict[str, dict[WheelId, int]]:
    """The nodes whose wheels it has reported as held."""
    sent = [promise for _, promise in messages(node, Promise) if isinstance(promise, Promise)]
    return {promise.fence.origin: dict(promise.applied) for promise in sent}


def looking(node: FakeNode) -> list[VerifyWheel]:
    """Its first step: the store is slow, and answers nothing about old wheels yet."""
    effects = node.machine.step(Tick(node.now_ms, node.wall_ms))
    wanted = [effect for effect in effects if isinstance(effect, VerifyWheel)]
    others: deque[Effect] = deque(effect for effect in effects if effect not in wanted)
    while others:
        answer = node._carry_out(others.popleft())
        if answer is not None:
            others += node.machine.step(answer)
    return wanted


@pytest.fixture
def node() -> FakeNode:
    """One of three nodes; it was killed while writing a.1, has two frames of b.1, and a spare."""
    store = FakeStore(state_of("a", last_number=2, open=A1, spare=spare_of(A2)))
    for wheel in (A1, B1):
        store.cards[wheel] = held_of(wheel, 0).card
        store.frames[wheel] = {frame.seq: frame for frame in frames_of(wheel, 1, 2).frames.copies()}
    node = FakeNode("a", store=store)
    node.restart(unverified=True)
    return node


def test_it_writes_before_it_knows(node: FakeNode) -> None:
    meet(node)
    assert looking(node) == [VerifyWheel(A1), VerifyWheel(B1)]
    assert node.store.open == A2
    assert node.machine.refusal(node.now_ms) is None
    heartbeat = node.status().heartbeat
    assert (heartbeat.open, heartbeat.complete) == (A2, False)
    assert heartbeat.verifying == frozenset({A1, B1})
    assert heartbeat.wheels.keys() == {A2}
    node.machine.step(Verified(node.store.held(A1)))
    node.machine.step(Verified(node.store.held(B1)))
    heartbeat = node.status().heartbeat
    assert heartbeat.complete
    assert heartbeat.verifying == frozenset()
    assert heartbeat.wheels[A1].applied == heartbeat.wheels[B1].applied == 2


def test_a_fence_is_answered_once_all_is_known_that_was_ever_taken(node: FakeNode) -> None:
    looking(node)
    term = heartbeat_of("c", term=LeaderTerm(5, (Fence("b", 2), Fence("c", 1))))
    node.receive(
        "c", Gossip(term, (heartbeat_of("b", last_number=2), heartbeat_of("c", last_number=1)))
    )
    assert node.store.state.fenced == {"b": 2, "c": 1}, "it binds all the same"
    assert answered(node) == {"c": {}}
    node.machine.step(Verified(node.store.held(B1)))
    node.receive("c", Gossip(heartbeat_of("c", count=2, term=term.term)))
    assert answered(node) == {"b": {B1: 2}, "c": {}}


def test_it_does_not_say_that_it_lacks_what_it_may_hold(node: FakeNode) -> None:
    looking(node)
    node.receive("c", Fetch(5, B1, 1, 9))
    node.receive("c", Fetch(6, B2, 1, 1))
    assert asked_again(node) == [6]
    node.cleaner_reports(node.cleaner({B1: record_of(closed_at=3)}, role=Role.LEADING))
    assert node.status().lacks == {}
    node.machine.step(Verified(node.store.held(B1)))
    node.receive("c", Fetch(7, B1, 3, 3))
    assert asked_again(node) == [7]


def test_it_takes_fetches_closes_and_deletes_nothing_of_them(node: FakeNode) -> None:
    looking(node)
    shown = heartbeat_of("b", open=B1, wheels={B1: wheel_heartbeat(3)})
    node.receive("b", Gossip(shown))
    done = node.receive("b", frames_of(B1, 3, 3))
    for wheels in ({B1: record_of(closed_at=1)}, {B2: record_of()}):
        done += node.cleaner_reports(node.cleaner(wheels, floor=7))
        done += node.machine.step(Tick(node.now_ms, node.wall_ms))
    assert not [e for e in done if isinstance(e, Mirror | CloseWheel | DeleteWheel)]
    assert messages(node, Fetch) == []
    node.machine.step(Verified(node.store.held(B1)))
    done = node.machine.step(Tick(node.now_ms + 100, node.wall_ms + 100))
    assert DeleteWheel(B1) in done
    assert Sweep(7) in done, "what was finished meanwhile"


def test_one_that_cannot_be_made_whole_is_tried_again_and_keeps_no_other(node: FakeNode) -> None:
    node.store.refuses = {VerifyWheel}
    node.tick()
    node.store.refuses = set()
    node.machine.step(Saved(node.store.state))
    node.tick(AGAIN_MS - 100)
    assert node.status().heartbeat.verifying == {A1, B1}
    node.tick(100)
    assert node.status().heartbeat.verifying == set()


def test_one_that_failed_is_verified_as_it_is_registered_or_deleted(node: FakeNode) -> None:
    """Its folder may have lost who its members are."""
    node.store.refuses = {VerifyWheel}
    node.tick()
    record = record_of(closed_at=3)
    node.cleaner_reports(node.cleaner({A1: record, B2: record_of()}))
    done = node.tick(AGAIN_MS)
    assert [e.record for e in done if isinstance(e, VerifyWheel) and e.wheel == A1] == [record]
    assert DeleteWheel(B1) in done, "a later one of its node is registered"
    assert node.status().heartbeat.verifying == {A1}


def test_what_only_lies_there_is_known_by_its_number(node: FakeNode) -> None:
    looking(node)
    node.receive("c", Gossip(heartbeat_of("c", term=LeaderTerm(5, (Fence("b", 1),)))))
    assert node.store.state.fenced == {"b": 1}
    assert C1 not in node.status().heartbeat.wheels
