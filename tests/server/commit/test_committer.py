"""Group commit on a simulated disk: which callers are acknowledged, and when."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any

import pytest

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.storage.files import slot_files
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.encode import encode_group
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.node.events import Broken, Written
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.protocol.messages import Applied, Gossip
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.server.commit.committer import Committed, Request, RequestOutcome
from delaywheel_replica.server.commit.outside import GroupJob
from delaywheel_replica.server.node.naming import rows_naming
from delaywheel_replica.server.node.refusals import Refusal
from sim.machine.disk import Fault, SimulatedDisk
from support.server.driven import NOW_MS, Driven
from support.wheels.messages import BASE_SLOT, columns_of, message
from support.wheels.wheels import delete_below

ONE = WheelId("n1", 1)


def opened(node: Driven) -> Driven:
    """A committer with a wheel, but no spare."""
    node.hear(w1=None)
    assert node.state.open == ONE
    node.words = 0
    return node


@pytest.fixture
def node() -> Driven:
    return opened(Driven(SimulatedDisk()))


def test_a_message_is_acknowledged_once_its_frame_can_be_read(node: Driven) -> None:
    asked = node.produce(message(1), message(2))
    assert (asked.committed.wheel, asked.committed.seq, asked.committed.failed) == (ONE, 1, {})
    assert node.stored(ONE) == [message(1), message(2)]
    assert node.row.heartbeat.wheels[ONE].high_watermark == 1
    assert node.words == 1
    assert node.entered == [(1, 1, 2)]


def test_nothing_is_acknowledged_before_it_is_written(node: Driven) -> None:
    first = node.ask(message(1))
    assert node.jobs.popleft() == GroupJob()
    group = node.driver.begin_group()
    assert group is not None
    # What arrives while a group is written is the next group, as a whole.
    others = [node.ask(message(number)) for number in (2, 3, 4)]
    assert list(node.jobs) == [GroupJob()]
    assert (first.said, node.stored(ONE)) == ("nothing yet", [])
    node.driver.finish_group(group)
    assert first.committed.seq == 1
    assert {other.said for other in others} == {"nothing yet"}
    node.work()
    assert {other.committed.seq for other in others} == {2}
    assert node.stored(ONE) == [message(number) for number in (1, 2, 3, 4)]


def test_a_group_steps_the_machine_once(node: Driven) -> None:
    node.events.clear()
    asked = [node.ask(message(number)) for number in range(50)]
    node.work()
    assert [type(event) for event in node.events] == [Written]
    assert {each.committed.seq for each in asked} == {1}


def test_a_group_has_its_bounds(node: Driven) -> None:
    asked = [node.ask(message(n, value=bytes(mib << 20))) for n, mib in enumerate((3, 3, 3, 9, 1))]
    node.work()
    # 8 MiB; a longer request is a group of its own.
    assert [each.committed.seq for each in asked] == [1, 1, 2, 3, 4]


def test_a_group_releases_no_more_than_it_may_hold(node: Driven) -> None:
    """A leader takes the halves that a frame releases in one transaction, however long."""
    said: list[RequestOutcome] = []
    named = rows_naming([MessageKey(bytes(16), BASE_SLOT * 1000, "orders")])
    for mib in (3, 3, 3, 9, 1):
        node.driver.submit(Request(named, Kind.RELEASES, said.append, ONE, mib << 20))
    node.work()
    outcomes = [outcome for outcome in said if isinstance(outcome, Committed)]
    assert [outcome.seq for outcome in outcomes] == [1, 1, 2, 3, 4]


def test_with_flush_group_only_what_the_medium_holds_is_acknowledged() -> None:
    node = opened(Driven(SimulatedDisk(), sync_groups=True))
    node.produce(message(1))
    node.disk.faults.append(Fault("sync"))
    asked = node.ask(message(2))
    node.driver.do(node.jobs.popleft())
    assert asked.said == "WHEEL_LOST"
    assert any(isinstance(event, Broken) for event in node.events)
    # It was left for that; no caller was answered that the frame is held.
    assert node.row.heartbeat.open is None
    assert node.row.heartbeat.wheels[ONE].high_watermark == 1


def test_without_a_wheel_nothing_is_accepted() -> None:
    node = Driven(SimulatedDisk())
    assert node.produce(message(1)).said == "NO_WHEEL"
    opened(node)
    assert node.produce(message(1)).said == "n1.1"
    node.driver.drain()
    assert node.produce(message(2)).said == "DRAINING"


def test_with_too_few_members_in_sync_nothing_is_written() -> None:
    node = Driven(SimulatedDisk(), nodes=("n1", "n2"), min_insync=2)
    node.hear(members={"n2": "s2"}, w1=None)
    assert node.state.spare is not None
    assert (node.state.spare.wheel, node.state.open) == (ONE, None), "until n2 is heard"
    assert node.produce(message(1)).said == "NOT_ENOUGH_REPLICAS"
    assert node.row.heartbeat.wheels[ONE].applied == 0


def test_a_sealed_second_takes_no_more(node: Driven) -> None:
    node.clock_wall_ms += 120_000
    node.tick()
    assert node.row.heartbeat.wheels[ONE].seal_slot == BASE_SLOT
    early, due = message(1, slot=BASE_SLOT - 1), message(2)
    asked = node.ask(early, due)
    only_early = node.ask(message(3, slot=BASE_SLOT - 1))
    node.work()
    assert {row: refusal.reason for row, refusal in asked.committed.failed.items()} == {
        0: Reason.DUE_TOO_OLD
    }
    assert only_early.said == "DUE_TOO_OLD"
    assert node.stored(ONE) == [due]


def test_who_has_nothing_in_a_group_waits_for_nobody(node: Driven) -> None:
    node.clock_wall_ms += 120_000
    node.tick()
    assert node.produce(message(3, slot=BASE_SLOT - 1)).said == "DUE_TOO_OLD"
    assert node.store.last_seq == 0
    # And the next group is let in as if there had been none.
    assert node.produce(message(4)).said == "n1.1"


def test_no_seal_is_given_while_a_group_that_it_would_refuse_is_written(node: Driven) -> None:
    """It is given after the group: otherwise it would rest under load, and the floor with it."""
    before = node.row.heartbeat.wheels[ONE]
    node.ask(message(1, slot=before.seal_slot))
    node.jobs.clear()
    group = node.driver.begin_group()
    assert group is not None
    node.tick(1_000)
    assert node.row.heartbeat.wheels[ONE] == before
    node.driver.finish_group(group)
    after = node.row.heartbeat.wheels[ONE]
    assert (after.seal_slot, after.seal_seq) == (before.seal_slot + 1, 1)


def test_messages_and_cancels_are_frames_of_their_own(node: Driven) -> None:
    cancel = node.ask(message(1), kind=Kind.CANCELS)
    first = node.ask(message(1))
    another = node.ask(message(3), kind=Kind.CANCELS)
    node.work()
    assert [each.committed.seq for each in (cancel, another, first)] == [1, 1, 2]
    assert node.stored(ONE) == [message(1)]
    assert node.entered == [(1, 1, 0), (2, 2, 1)]


def test_only_what_is_due_soon_is_reported_before_the_next_beat(node: Driven) -> None:
    far = message(1, slot=BASE_SLOT + 5)
    assert node.produce(far).said == "n1.1"
    assert node.words == 0
    node.produce(message(2, slot=BASE_SLOT + 1), far)
    assert node.words == 1
    # A cancel waits for the next commit: the cleaner must not find out by chance.
    node.produce(far, kind=Kind.CANCELS)
    assert node.words == 2


def test_when_the_medium_fails_only_what_is_known_to_count_is_acknowledged(node: Driven) -> None:
    node.disk.faults.append(Fault("write", errno.EIO, f"{BASE_SLOT + 1}.slot"))
    messages = [message(number, slot=BASE_SLOT + number % 3) for number in range(6)]
    asked, undone = node.ask(*messages), node.ask(message(7, slot=BASE_SLOT + 1))
    node.work()
    # The frame of the first second was written before the failure, and its row after it.
    assert set(asked.committed.failed) == {1, 2, 4, 5}
    assert {refusal.reason for refusal in asked.committed.failed.values()} == {Reason.WHEEL_LOST}
    assert undone.said == "WHEEL_LOST"
    assert node.stored(ONE) == [messages[0], messages[3]]
    assert node.row.heartbeat.wheels[ONE].high_watermark == 1
    assert node.produce(message(1)).said == "NO_WHEEL"


def test_a_full_second_refuses_its_messages_alone(
    node: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert node.store.wheel is not None
    monkeypatch.setattr(slot_files, "SLOT_FILE_LIMIT_BYTES", 4_000)
    big = [message(number, value=bytes(800)) for number in range(2)]
    for _ in range(2):
        node.produce(*big)
    other = message(9, slot=BASE_SLOT + 1)
    asked = node.produce(message(7, value=bytes(800)), other)
    assert {row: refusal.reason for row, refusal in asked.committed.failed.items()} == {
        0: Reason.SLOT_FULL
    }
    assert node.stored(ONE)[-1] == other


def test_finished_seconds_refuse_their_messages_alone(node: Driven) -> None:
    """More messages than a group's verdicts could number one by one."""
    assert node.store.wheel is not None
    delete_below(node.store.wheel, BASE_SLOT + 300)
    early = [message(number, slot=BASE_SLOT + number) for number in range(300)]
    due = message(1, slot=BASE_SLOT + 300)
    asked, only_early = node.ask(due, *early), node.ask(early[7])
    node.work()
    refusal = Refusal(Reason.DUE_TOO_OLD, "Its second is finished")
    assert asked.committed.failed == dict.fromkeys(range(1, 301), refusal)
    assert only_early.said == "DUE_TOO_OLD"
    assert node.stored(ONE) == [due]


def test_a_request_that_cannot_be_encoded_is_refused_alone(node: Driven) -> None:
    """Whatever let it through: it must not end the writing process."""
    poison = node.ask(replace(message(1), topic="x" * 70_000), message(2))
    sound = [node.ask(message(3)), node.ask(message(4), message(5))]
    node.work()
    assert {refusal.reason for refusal in poison.committed.failed.values()} == {Reason.INTERNAL}
    assert len(poison.committed.failed) == 2
    assert [each.committed.failed for each in sound] == [{}, {}]
    assert node.stored(ONE) == [message(3), message(4), message(5)]
    assert node.produce(message(6)).said == str(ONE)


def test_a_group_that_cannot_be_encoded_as_a_whole_is_refused(
    node: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode_few(columns: Columns, **options: Any) -> Any:
        if len(columns) > 1:
            raise MemoryError
        return encode_group(columns, **options)

    monkeypatch.setattr("delaywheel.storage.writing.wheel.encode_group", encode_few)
    asked = [node.ask(message(number)) for number in (1, 2)]
    node.work()
    assert {each.said for each in asked} == {"INTERNAL"}
    assert node.produce(message(3)).said == str(ONE)


# --- members that do not answer


@pytest.fixture
def pair() -> Driven:
    """One of two nodes, with a wheel that both must hold."""
    node = Driven(SimulatedDisk(), nodes=("n1", "n2"), min_insync=2)
    node.hear(members={"n2": "s2"}, w1=None)
    hear_other(node, held=0)
    node.tick()
    return node


def hear_other(node: Driven, *, held: int) -> None:
    heartbeat = Heartbeat("n2", "s2", "b2", NOW_MS, None, None, 0, draining=False, complete=True)
    node.driver.received("n2", Gossip(replace(heartbeat, count=node.clock_ms)))
    node.driver.received("n2", Applied(ONE, "s2", "b2", held))
    node.work()


@pytest.mark.parametrize("kind", Kind)
def test_a_caller_that_waits_too_long_for_members_hears_that_the_outcome_is_unknown(
    pair: Driven, kind: Kind
) -> None:
    first = pair.produce(message(1), kind=kind)
    pair.tick(500)
    second = pair.produce(message(2), kind=kind)
    pair.tick(1_500)
    assert (first.said, second.said) == ("nothing yet", "nothing yet")
    pair.tick(1)
    refusal = Refusal(Reason.WHEEL_LOST, "Not enough members answered within 2 s")
    assert (first.outcome, second.said) == (refusal, "nothing yet")
    # What was given up is held later all the same, and no caller is answered twice.
    hear_other(pair, held=2)
    assert second.said == "n1.1"
    assert pair.row.heartbeat.wheels[ONE].high_watermark == 2
    third = pair.produce(message(3), kind=kind)
    hear_other(pair, held=3)
    assert third.said == "n1.1"


def test_a_group_goes_once_it_has_as_many_messages_as_wait_for_mirrors(pair: Driven) -> None:
    asked = [pair.produce(message(n)) for n in range(1, 4)]
    assert pair.store.last_seq == 2  # the third one is less than the two before it
    asked.append(pair.produce(message(4)))
    assert pair.store.last_seq == 3
    asked += [pair.produce(message(n)) for n in (5, 6)]
    hear_other(pair, held=1)
    assert pair.store.last_seq == 3  # two are less than three
    hear_other(pair, held=2)
    assert pair.store.last_seq == 4
    hear_other(pair, held=4)
    assert [each.committed.seq for each in asked] == [1, 2, 3, 3, 4, 4]
    # It does not wait for itself to be asked for again.
    assert pair.produce(message(7)).said == "nothing yet"
    hear_other(pair, held=5)
    assert pair.store.last_seq == 5


def test_a_full_group_waits_for_no_other(pair: Driven) -> None:
    pair.produce(*(message(n) for n in range(300)))
    for n in range(255):
        pair.produce(message(300 + n))
    assert pair.store.last_seq == 1
    pair.produce(message(600))
    assert pair.store.last_seq == 2


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.MESSAGES])
def test_only_messages_wait_for_others_and_for_messages_alone(pair: Driven, kind: Kind) -> None:
    pair.produce(*(message(n) for n in range(9)))
    held_up = [pair.ask(message(10)), pair.ask(message(11), kind=kind), pair.ask(message(12))]
    pair.work()
    assert pair.store.last_seq == 2  # of the second one alone
    hear_other(pair, held=2)
    assert pair.store.last_seq == 3
    assert held_up[1].said == "n1.1"
    # Nor do messages wait for what is of another kind.
    hear_other(pair, held=3)
    pair.produce(*(message(n) for n in range(20, 24)), kind=kind)
    pair.produce(message(30))
    assert pair.store.last_seq == 5


def test_what_is_submitted_beside_messages_is_not_held_up_with_them(pair: Driven) -> None:
    pair.produce(*(message(n) for n in range(9)))
    pair.produce(message(10))
    answers: list[RequestOutcome] = []
    both = (message(11), Kind.MESSAGES), (message(12), Kind.CANCELS)
    pair.driver.submit(*(Request(columns_of([each]), kind, answers.append) for each, kind in both))
    pair.work()
    assert pair.store.last_seq == 2
    hear_other(pair, held=2)
    assert len(answers) == 1  # the cancel; the messages are in the next group
    assert pair.store.last_seq == 3


def test_what_is_being_written_counts_as_what_waits_for_mirrors(node: Driven) -> None:
    node.ask(message(1), message(2))
    node.jobs.clear()
    group = node.driver.begin_group()
    assert group is not None
    node.ask(message(3))
    assert not node.jobs
    node.ask(message(4))
    assert list(node.jobs) == [GroupJob()]
    node.driver.finish_group(group)
    node.work()
    node.ask(message(5), message(6))
    node.jobs.clear()
    group = node.driver.begin_group()
    assert group is not None
    node.ask(message(7))
    node.driver.finish_group(group)
    assert list(node.jobs) == [GroupJob()]  # at once: nothing waits for mirrors here


@pytest.mark.parametrize("is_taken", [True, False])
def test_no_group_is_called_for_what_is_held_up_once_other_kinds_are_gone(
    node: Driven, *, is_taken: bool
) -> None:
    node.ask(message(1), kind=Kind.CANCELS)
    if not is_taken:
        node.clock_ms += 2_001
        node.driver.tick()
    node.work()
    node.ask(message(2), message(3))
    group = node.driver.begin_group()
    assert group is not None
    node.jobs.clear()
    node.ask(message(4))
    assert not node.jobs


def test_what_is_pending_behind_a_group_that_is_refused_is_refused_next(pair: Driven) -> None:
    refused = [pair.ask(message(n), kind=kind) for n, kind in enumerate(Kind)]
    pair.driver.drain()
    pair.work()
    assert {each.said for each in refused} == {"DRAINING"}


def test_long_messages_count_for_more(pair: Driven) -> None:
    pair.produce(*(message(n) for n in range(300)))
    pair.produce(message(301, value=bytes(1 << 20)))
    assert pair.store.last_seq == 2


def test_what_is_held_up_is_refused_at_once_if_it_would_be(pair: Driven) -> None:
    pair.produce(message(1), message(2))
    held_up = pair.produce(message(3))
    assert held_up.said == "nothing yet"
    pair.driver.drain()
    pair.work()
    assert held_up.said == "DRAINING"


def test_what_is_held_up_waits_for_no_disk(pair: Driven) -> None:
    pair.produce(message(1), message(2))
    pair.produce(message(3))
    pair.clock_ms += 500
    committer = pair.driver._committer
    assert committer.waits_ms(pair.clock_ms) == 0
    pair.driver.received("n2", Applied(ONE, "s2", "b2", 1))
    pair.clock_ms += 7
    assert committer.waits_ms(pair.clock_ms) == 7


def test_while_the_disk_hangs_mirrors_are_not_to_blame(pair: Driven) -> None:
    pair.produce(message(1), message(2))
    held_up = pair.produce(message(3))
    pair.driver.begins()  # a job that does not end
    pair.tick(2_001)
    assert held_up.said == "DISK_STALLED"


def test_what_waits_too_long_for_other_groups_was_not_written(pair: Driven) -> None:
    written = pair.produce(message(1), message(2))
    held_up = pair.produce(message(3))
    pair.tick(2_001)
    assert (written.said, held_up.said) == ("WHEEL_LOST", "NOT_ENOUGH_REPLICAS")
    assert isinstance(held_up.outcome, Refusal)
    assert "Nothing was written" in held_up.outcome.detail
    assert pair.store.last_seq == 1
    # And no message counts as waiting after that.
    hear_other(pair, held=1)
    pair.tick()
    pair.produce(message(4), message(5))
    pair.produce(message(6))
    assert pair.store.last_seq == 2


def test_what_is_held_up_goes_on_once_those_before_it_are_given_up(pair: Driven) -> None:
    pair.produce(message(1), message(2))
    pair.tick(1_000)
    held_up = pair.produce(message(3))
    pair.tick(1_001)
    refusal = Refusal(Reason.NOT_ENOUGH_REPLICAS)  # as a group is refused that would be written
    assert held_up.outcome == refusal


def test_a_release_is_written_to_the_wheel_of_its_half_or_not_at_all(node: Driven) -> None:
    """In another wheel it would count as another message that is not to come."""
    said: list[RequestOutcome] = []
    named = rows_naming([MessageKey(bytes(16), BASE_SLOT * 1000, "orders")])
    for wheel in (ONE, WheelId("n1", 2), ONE):
        node.driver.submit(Request(named, Kind.RELEASES, said.append, wheel))
    node.work()
    outcomes = [outcome for outcome in said if isinstance(outcome, Committed)]
    assert [dict(outcome.failed) for outcome in outcomes].count({}) == 2
    ((refused,),) = [outcome.failed.values() for outcome in outcomes if outcome.failed]
    assert (refused.reason, refused.reason.outcome_known) == (Reason.NO_WHEEL, True)
    assert node.row.heartbeat.wheels[ONE].applied == 1
