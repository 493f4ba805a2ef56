"""One node's driver on a disk that fails on request: the life of its own wheels, step by step."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from delaywheel.identity import WheelId
from delaywheel.storage.files.wheel_folder import list_wheels, load_meta
from delaywheel.storage.frames.bundle import NO_BUNDLE
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.node.events import (
    Acknowledge,
    CloseWheel,
    Effect,
    Event,
    Failed,
    ForgetLost,
    HeldWheel,
    LeaveWheel,
    Mirror,
    Send,
    Sweep,
    Tick,
    WriteStatus,
)
from delaywheel_replica.core.protocol.frames import FrameSet
from delaywheel_replica.core.protocol.heartbeat import Fence
from delaywheel_replica.core.protocol.messages import (
    Refused,
    WheelCard,
)
from delaywheel_replica.core.wheels.verifying import AGAIN_MS
from delaywheel_replica.server.commit.committer import Request
from delaywheel_replica.server.commit.near_cancels import AHEAD_S
from delaywheel_replica.server.commit.outside import GroupJob
from sim.machine.disk import Fault, SimulatedDisk
from support.server.driven import DATA, ONE, TWO, Driven
from support.wheels.messages import BASE_SLOT, columns_of, message

# --- opening and leaving


def test_the_first_wheel_is_opened_and_the_next_one_is_the_spare(node: Driven) -> None:
    node.tick()
    assert (node.state.open, node.state.spare) == (None, None)
    node.hear(w1=None)
    assert (node.state.open, node.state.spare, node.state.last_number) == (ONE, None, 1)
    node.hear(w1=None)
    assert node.state.last_number == 1
    node.hear(w1=None, w2=None)
    assert node.state.spare is not None
    assert (node.state.open, node.state.spare.wheel, node.state.last_number) == (ONE, TWO, 2)
    assert node.produce(message()).said == "n1.1"
    heartbeat = node.row.heartbeat
    assert (heartbeat.open, heartbeat.spare, heartbeat.last_number) == (ONE, TWO, 2)
    assert (heartbeat.wheels[ONE].applied, heartbeat.wheels[TWO].applied) == (1, 0)


def test_a_broken_wheel_is_left_and_the_spare_opened(ready: Driven) -> None:
    assert ready.produce(message(1)).said == "n1.1"
    ready.disk.faults.append(Fault("write", path_part=".slot"))
    assert ready.produce(message(2)).said == "WHEEL_LOST"
    assert ready.produce(message(2)).said == "n1.2"
    assert (ready.state.open, ready.state.spare) == (TWO, None)
    reported = ready.row.heartbeat.wheels[ONE]
    assert (reported.applied, reported.high_watermark, reported.top_slot) == (1, 1, BASE_SLOT)


def test_a_spare_is_opened_though_the_medium_refuses_all_of_the_wheel_before(
    ready: Driven,
) -> None:
    assert ready.produce(message(1)).said == "n1.1"
    ready.disk.faults.append(Fault("write", path_part=".slot"))
    ready.disk.faults += [
        Fault(operation, path_part=f"/{ONE}") for operation in ("open", "read") for _ in range(99)
    ]
    assert ready.produce(message(2)).said == "WHEEL_LOST"
    assert ready.produce(message(2)).said == "n1.2"
    heartbeat = ready.row.heartbeat
    assert (heartbeat.open, heartbeat.verifying, heartbeat.complete) == (
        TWO,
        frozenset({ONE}),
        False,
    )
    assert ONE not in heartbeat.wheels
    ready.tick(AGAIN_MS)
    assert ready.row.heartbeat.verifying == frozenset({ONE})
    ready.disk.faults.clear()
    ready.tick(AGAIN_MS)
    heartbeat = ready.row.heartbeat
    assert (heartbeat.verifying, heartbeat.complete) == (frozenset(), True)
    assert (heartbeat.wheels[ONE].applied, heartbeat.wheels[ONE].high_watermark) == (1, 1)


def test_a_checkpoint_that_the_medium_refuses_breaks_the_wheel(ready: Driven) -> None:
    ready.produce(message(1))
    ready.disk.faults.append(Fault("sync"))
    ready.driver.checkpoint()
    ready.work()
    assert ready.produce(message(2)).said == "n1.2"


def test_a_wheel_that_could_not_be_made_is_left(node: Driven) -> None:
    node.disk.faults.append(Fault("write", path_part="meta.json"))
    node.hear(w1=None)
    assert node.produce(message()).said == "NO_WHEEL"
    node.hear(w1=None, w2=None)
    node.tick(1_000)
    assert (node.state.open, node.state.spare) == (TWO, None)
    assert node.produce(message()).said == "n1.2"


def test_the_wheel_of_a_life_before_is_never_written_again(
    disk: SimulatedDisk, ready: Driven
) -> None:
    ready.produce(message())
    disk.restart()
    second = Driven(disk)
    assert second.row.heartbeat.wheels[ONE].applied == 1
    second.tick()
    second.tick()
    assert (second.state.open, second.state.spare) == (TWO, None)
    assert second.produce(message()).said == "n1.2"
    assert second.row.heartbeat.named == (TWO,)
    assert second.stored(ONE) == [message()]


def test_a_node_that_stops_leaves_its_wheel_and_wants_none(ready: Driven) -> None:
    waits = ready.ask(message(1))
    ready.work()
    ready.driver.drain()
    ready.work()
    assert waits.said == "n1.1"
    assert ready.row.heartbeat.draining
    assert (ready.state.open, ready.row.heartbeat.named) == (None, (TWO,))
    assert ready.row.heartbeat.wheels[ONE].high_watermark == 1
    ready.hear(w1=None, w2=None, w3=None)
    assert (ready.state.open, ready.state.last_number) == (None, 2)


# --- promises, closing, deleting


def test_a_closed_wheel_is_noted_and_deleted_once_it_is_registered_no_more(ready: Driven) -> None:
    ready.produce(message())
    ready.want(Fence("n1", 1))
    ready.hear(w1=1, w2=None)
    assert load_meta(ready.disk, DATA, ONE).final_seq == 1
    ready.hear(w1=1, w2=None, floor=BASE_SLOT + 1)
    assert ONE in list_wheels(ready.disk, DATA)
    ready.hear(w2=None, floor=BASE_SLOT + 1)
    assert list_wheels(ready.disk, DATA) == [TWO]
    assert set(ready.row.heartbeat.wheels) == {TWO}


# --- how effects are carried out


class Script:
    """A machine with the test's answers; all else is as in the real one."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.reported: list[Event] = []

    def step(self, event: Event) -> list[Effect]:
        if not isinstance(event, Tick):
            self.reported.append(event)
        effects, self.effects = self.effects, []
        return effects


@pytest.fixture
def script(ready: Driven, monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(ready.driver.machine, "step", script.step)
    return script


CARD = WheelCard(WheelId("n2", 1), {"n1": "s", "n2": "s2"}, 1, 7200)


def test_what_cannot_fail_is_done_while_jobs_wait(ready: Driven, script: Script) -> None:
    refused = Refused("n2", 1)
    script.effects = [WriteStatus(), Send("n2", refused), Mirror(CARD, NO_BUNDLE)]
    ready.sent.clear()
    ready.words = 0
    ready.driver.tick()
    assert (ready.sent, ready.words) == ([("n2", refused)], 1)
    assert list(ready.jobs) == [deque([Mirror(CARD, NO_BUNDLE)])]
    assert script.reported == []


def test_what_fails_takes_along_only_what_is_answered(
    ready: Driven, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = CloseWheel(ONE, 5)
    script.effects = [failing, CloseWheel(TWO, 5), ForgetLost(FrameSet()), Sweep(BASE_SLOT)]
    ready.driver.tick()
    monkeypatch.setattr(ready.store, "close_wheel", refuse)
    ready.work()
    assert script.reported == [Failed(failing, "no")]
    assert ready.driver.floor == BASE_SLOT


def refuse(*_: object, **__: object) -> HeldWheel:
    raise OSError("no")


def test_jobs_are_done_in_the_order_of_the_steps(ready: Driven, script: Script) -> None:
    script.effects = [Sweep(1)]
    ready.driver.tick()
    script.effects = [Mirror(CARD, NO_BUNDLE), Sweep(2)]
    ready.driver.tick()
    assert [effect for job in ready.jobs for effect in job] == [  # type: ignore[union-attr]
        Sweep(1),
        Mirror(CARD, NO_BUNDLE),
        Sweep(2),
    ]


@pytest.mark.parametrize(("kind", "words"), [(Kind.MESSAGES, 0), (Kind.CANCELS, 1)])
def test_callers_are_answered_before_the_row_is_written_but_not_who_cancels(
    ready: Driven, script: Script, kind: Kind, words: int
) -> None:
    """The next commit, which the canceller requests, must know of the cancel."""
    words_then = []
    columns = columns_of([message()])
    request = Request(columns, kind, lambda _: words_then.append(ready.words))
    ready.driver.submit(request)
    ready.jobs.clear()
    group = ready.driver.begin_group()
    assert group is not None
    script.effects = [Acknowledge(ONE, 1), WriteStatus()]
    ready.words = 0
    ready.driver.finish_group(group)
    assert (words_then, ready.words) == ([words], 1)


def test_callers_of_a_wheel_that_is_left_hear_that_the_outcome_is_unknown(
    ready: Driven, script: Script
) -> None:
    one, two = ready.produce(message(1)), ready.produce(message(2))
    script.effects = [Acknowledge(ONE, 1), WriteStatus(), LeaveWheel(ONE)]
    ready.driver.tick()
    assert (one.said, two.said) == ("n1.1", "nothing yet")
    ready.work()
    assert two.said == "WHEEL_LOST"


def test_what_is_held_up_goes_on_once_its_wheel_is_left(ready: Driven, script: Script) -> None:
    ready.produce(message(1), message(2))
    ready.produce(message(3))
    script.effects = [LeaveWheel(ONE)]
    ready.driver.tick()
    assert len(ready.jobs) == 1
    ready.driver.do(ready.jobs.popleft())
    assert list(ready.jobs) == [GroupJob()]


def test_an_acknowledgement_that_comes_late_is_of_its_own_wheel(
    ready: Driven, script: Script
) -> None:
    """Two threads step one after the other, and overtake each other afterwards."""
    waits = ready.produce(message(1))
    script.effects = [Acknowledge(TWO, 9), WriteStatus()]
    ready.driver.tick()
    assert waits.said == "nothing yet"
    script.effects = [Acknowledge(ONE, 9), WriteStatus()]
    ready.driver.tick()
    assert waits.said == "n1.1"


def test_seconds_of_cancels_are_noted(ready: Driven) -> None:
    """But for what was written before the process started: there each second may have one."""
    near = ready.driver.near_cancels
    soon_ms = ready.clock_wall_ms + AHEAD_S * 1000
    assert soon_ms in near
    ready.clock_wall_ms += 2_000
    first, late = (replace(message(n), due_ms=soon_ms + 1_000 * n) for n in (1, 9))
    assert first.due_ms not in near
    ready.produce(first)
    assert first.due_ms not in near
    ready.produce(first, late, kind=Kind.CANCELS)
    assert (first.due_ms in near, late.due_ms in near) == (True, False)
