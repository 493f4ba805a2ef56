"""Selection of due messages, one situation at a time; the model in this folder mixes them all."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from delaywheel.identity import WheelId
from delaywheel.record_headers import HALF_GROUP
from delaywheel.storage.folder.disk import PosixFile
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.cleaner.due import loading, tail, window
from delaywheel_replica.cleaner.due import reader as selection
from delaywheel_replica.cleaner.due.kept_seconds import Bound
from delaywheel_replica.cleaner.due.rows import DueMessage, MessageOutcome
from delaywheel_replica.cleaner.due.steps import Step
from support.due.leader import EMPTY, START_MS, Leader, message, numbers, until
from support.due.oracle import as_message, verdicts
from support.due.wheels import Wheels
from support.due.whenever import Whenever

A1, A2, B1, C1 = WheelId("a", 1), WheelId("a", 2), WheelId("b", 1), WheelId("c", 1)


def expected(wheels: Wheels, step: Step) -> list[DueMessage]:
    found = verdicts(wheels.frames, (), step.before, step.after)
    return [as_message(verdict.row) for verdict in found if verdict.outcome is None]


def test_thousands_in_one_millisecond_are_split_and_new_leaders_go_on(wheels: Wheels) -> None:
    due_ms = START_MS + 500
    rows = [message(due_ms, number, value=b"v" * (number % 7)) for number in range(6000)]
    for wheel, part in ((B1, rows[:3000]), (A1, rows[3000:4500]), (A2, rows[4500:])):
        for begin in range(0, len(part), 400):
            wheels.write(wheel, part[begin : begin + 400])
    wheels.write(A1, [message(due_ms - 1, 9001), message(due_ms + 1, 9002)])
    wheels.write(A2, rows[3000:3010])  # again, behind the first in order
    wheels.write(A1, rows[:10])  # again, before the first in order
    wheels.cancel(B1, rows[100:120])
    progress = EMPTY
    taken: list[DueMessage] = []
    leaders = 0
    while progress.due_ms < due_ms + 1:
        leaders += 1
        with Leader(wheels, progress) as leader:
            for _ in range(3):
                step = leader.look(due_ms + 1, cap_messages=700)
                assert len(step.messages) + len(step.dropped) <= 700
                assert list(step.messages) == expected(wheels, step)
                leader.commit(step)
            taken += leader.messages
            progress = leader.progress
    assert leaders > 3
    assert sorted(numbers(taken)) == [*range(100), *range(120, 6000), 9001, 9002]


NOTHING = Bound(0, 0, 0)


@pytest.mark.parametrize("kept", [NOTHING, window.PAST])
def test_a_retry_of_a_done_message_is_dropped(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch, kept: Bound
) -> None:
    monkeypatch.setattr(window, "PAST", kept)
    first = message(START_MS + 100, 1, value=b"one")
    wheels.write(A1, [first, message(START_MS + 200, 2), message(START_MS + 2_000, 9)])
    wheels.cancel(A1, [message(START_MS + 200, 2)])
    with Leader(wheels) as leader:
        leader.forward(START_MS + 5000)
        wheels.write(B1, [first, replace(first, value=b"two"), message(START_MS + 200, 2)])
        wheels.write(A1, [message(START_MS + 300, 3)])
        leader.forward(START_MS + 5000)
        assert numbers(leader.messages) == [1, 9, 3]
        outcomes = [(drop.outcome, drop.content_differs) for drop in leader.dropped]
        assert outcomes == [
            (MessageOutcome.CANCELLED, False),
            (MessageOutcome.DUPLICATE, False),
            (MessageOutcome.DUPLICATE, True),
            (MessageOutcome.DUPLICATE, False),
        ]


def test_a_late_frame_holds_up_only_its_wheel_while_its_second_is_loaded(wheels: Wheels) -> None:
    with Leader(wheels, replace(EMPTY, due_ms=START_MS + 60_000), preload_thread=True) as leader:
        now_ms = START_MS + 60_000
        wheels.write(A1, [message(START_MS, 1)])
        wheels.write(A1, [message(now_ms + 10, 2)])
        wheels.write(B1, [message(now_ms + 10, 3)])
        until(lambda: leader.forward(now_ms + 20) > 0 and len(leader.messages) == 3)
        assert sorted(numbers(leader.messages)) == [1, 2, 3]


@pytest.fixture
def whenever(monkeypatch: pytest.MonkeyPatch) -> Whenever:
    executor = Whenever()
    monkeypatch.setattr(loading, "ThreadPoolExecutor", lambda *_: executor)
    monkeypatch.setattr(selection, "_WAIT_FOR_LOADING_S", 0)
    return executor


SHOPS = ((HALF_GROUP, b"shop"),)


def write_backlog(wheels: Wheels, seconds: int) -> None:
    """For each second a plain message, and a half that was released while it was held."""
    for number in range(seconds):
        at_ms = START_MS + 1000 * number + 500
        half = message(at_ms + 3_000, 1_000 + number, headers=SHOPS)
        wheels.write(A1, [half])
        wheels.cancel(A1, [half], kind=Kind.RELEASES)
        wheels.write(B1, [message(at_ms, number)])


def test_what_is_due_goes_on_while_releases_wait_for_their_seconds(
    wheels: Wheels, whenever: Whenever
) -> None:
    write_backlog(wheels, 20)
    with Leader(wheels, preload_thread=True) as leader:
        for _ in range(10):  # one second is loaded between two steps
            leader.commit(leader.look(START_MS + 20_000))
            whenever.run()
        found = numbers(leader.messages)
        assert {0, 1, 2} < set(found)
        assert {1_000, 1_001, 1_002} < set(found)


def test_a_wheel_that_lags_gets_its_seconds_though_another_wants_new_ones(
    wheels: Wheels, whenever: Whenever
) -> None:
    now_ms = START_MS + 60_000
    write_backlog(wheels, 10)
    with Leader(wheels, replace(EMPTY, due_ms=now_ms), preload_thread=True) as leader:
        for number in range(40):
            half = message(now_ms + 3_000 + 1000 * number, number, headers=SHOPS)
            wheels.write(C1, [half])
            wheels.cancel(C1, [half], kind=Kind.RELEASES)
            leader.commit(leader.look(now_ms))
            whenever.run()
        assert {1_000 + number for number in range(10)} <= set(numbers(leader.messages))


def test_what_is_due_does_not_wait_for_a_second_that_is_wanted_early(
    wheels: Wheels, whenever: Whenever, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is wanted each second where halves are committed: each of them would be a delay."""
    waits: list[float] = []
    monkeypatch.setattr(loading, "wait_for_futures", lambda _, wait_s: waits.append(wait_s))
    half = message(START_MS + 5_000, 1, headers=SHOPS)
    wheels.write(A1, [half])
    wheels.write(B1, [message(START_MS + 500, 2)])
    with Leader(wheels, preload_thread=True) as leader:
        for _ in range(3):  # what is near is in memory
            leader.commit(leader.look(START_MS + 400))
            whenever.run()
        monkeypatch.setattr(selection, "_WAIT_FOR_LOADING_S", 60)
        waits.clear()
        wheels.cancel(A1, [half], kind=Kind.RELEASES)
        leader.commit(leader.look(START_MS + 500))
        assert (numbers(leader.messages), waits) == ([2], [])
        leader.commit(leader.look(START_MS + 501))
        assert len(waits) == 1, "nothing is due"
        whenever.run()
        leader.commit(leader.look(START_MS + 502))
        assert numbers(leader.messages) == [2, 1]


def test_a_second_that_is_ready_ends_a_rest_before_one_that_was_wanted_early(
    wheels: Wheels, whenever: Whenever
) -> None:
    half = message(START_MS + 5_000, 1, headers=SHOPS)
    wheels.write(A1, [half, message(START_MS + 5_500, 2)])
    wheels.cancel(A1, [half], kind=Kind.RELEASES)
    wheels.write(B1, [message(START_MS + 2_500, 3)])
    with Leader(wheels, preload_thread=True) as leader:
        for _ in range(4):
            leader.commit(leader.look(START_MS + 400))
            whenever.run()
        leader.commit(leader.look(START_MS + 401))
        assert numbers(leader.messages) == [1]
        assert leader.reader.next_due_ms() == START_MS + 5_500
        leader.commit(leader.look(START_MS + 600))
        whenever.run()
        assert leader.reader.next_due_ms() == START_MS + 2_500


def test_what_is_due_does_not_wait_for_a_second_that_is_past(
    wheels: Wheels, whenever: Whenever, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever repeats old messages, each of another second, would delay all others."""
    waits: list[float] = []
    now_ms = START_MS + 60_000
    wheels.write(B1, [message(now_ms + 500, 2)])
    with Leader(wheels, replace(EMPTY, due_ms=now_ms), preload_thread=True) as leader:
        for _ in range(3):
            leader.commit(leader.look(now_ms + 400))
            whenever.run()
        monkeypatch.setattr(loading, "wait_for_futures", lambda _, wait_s: waits.append(wait_s))
        monkeypatch.setattr(selection, "_WAIT_FOR_LOADING_S", 60)
        wheels.write(A1, [message(START_MS, 1)])
        leader.commit(leader.look(now_ms + 500))
        assert (numbers(leader.messages), waits) == ([2], [])
        leader.commit(leader.look(now_ms + 501))
        assert len(waits) == 1, "nothing is due"


def test_a_leader_that_was_idle_waits_no_longer_than_until_the_next_due(
    wheels: Wheels, whenever: Whenever, monkeypatch: pytest.MonkeyPatch
) -> None:
    """w is seconds behind the clock then, without any backlog."""
    waits: list[float] = []
    now_ms = START_MS + 60_000
    wheels.write(B1, [message(now_ms + 405, 2)])
    with Leader(wheels, replace(EMPTY, due_ms=now_ms - 5_000), preload_thread=True) as leader:
        for _ in range(3):  # nothing is done: w stays
            leader.look(now_ms)
            whenever.run()
        monkeypatch.setattr(loading, "wait_for_futures", lambda _, wait_s: waits.append(wait_s))
        monkeypatch.setattr(selection, "_WAIT_FOR_LOADING_S", 60)
        monkeypatch.setattr(selection, "monotonic", lambda: 0.0)
        wheels.write(A1, [message(START_MS, 1)])
        leader.look(now_ms + 400)
    assert waits == [0.005]


def test_a_step_waits_for_all_seconds_that_are_due(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_WAIT_FOR_LOADING_S", 60)
    write_backlog(wheels, 20)
    with Leader(wheels, preload_thread=True) as leader:
        leader.commit(leader.look(START_MS))  # the first second is in memory, and has a message
        leader.commit(leader.look(START_MS + 20_000))
        assert set(numbers(leader.messages)) >= {*range(20)}


def test_a_backlog_with_releases_is_not_all_in_memory(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "AHEAD", Bound(4, 1_000, 1 << 20))
    write_backlog(wheels, 20)
    with Leader(wheels) as leader:
        most, steps = 0, 0
        while leader.progress.due_ms < START_MS + 24_000:
            leader.commit(leader.look(START_MS + 24_000))
            most, steps = max(most, len([*leader.reader._window.present()])), steps + 1
        assert most <= 2 * 4 + 1
        assert steps <= 20
        assert sorted(numbers(leader.messages)) == [*range(20), *range(1_000, 1_020)]
        assert not leader.dropped


def test_no_release_holds_up_what_is_due_though_much_is_due_within_holds(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a wheel nothing is admitted behind a release whose second is not in memory."""
    monkeypatch.setattr(window, "AHEAD", Bound(4, 1_000, 1 << 20))
    for number in range(2, 10):
        half = message(START_MS + 1_000 * number, number, headers=((HALF_GROUP, b"shop"),))
        wheels.write(A1, [half])
        wheels.cancel(A1, [half], kind=Kind.RELEASES)
    wheels.write(A1, [message(START_MS + 1_200, 1)])
    with Leader(wheels) as leader:
        leader.forward(START_MS + 1_200)
        assert sorted(numbers(leader.messages)) == [*range(1, 10)]


def test_a_lack_of_descriptors_is_no_lost_frame(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels.write(A1, [message(START_MS + 1, 1)])
    open_read = wheels.disk.open_read

    def open_no_slot(path: Path) -> PosixFile:
        if path.suffix == ".slot":
            raise OSError(errno.EMFILE, "too many open files")
        return open_read(path)

    with Leader(wheels) as leader:
        with monkeypatch.context() as patch:
            patch.setattr(wheels.disk, "open_read", open_no_slot)
            with pytest.raises(OSError, match="too many open files"):
                leader.look(START_MS + 5)
        leader.reader.start(leader.progress)
        leader.forward(START_MS + 5)
        assert numbers(leader.messages) == [1]


def test_only_the_last_step_can_be_done(wheels: Wheels) -> None:
    with Leader(wheels) as leader:
        step = leader.look(START_MS + 5)
        leader.look(START_MS + 6)
        with pytest.raises(ValueError, match="last step"):
            leader.reader.done(step)


def test_an_unregistered_wheel_is_forgotten(wheels: Wheels) -> None:
    wheels.write(A1, [message(START_MS + 1, 1)])
    wheels.write(A2, [message(START_MS + 1, 2)])
    with Leader(wheels) as leader:
        step = leader.look(START_MS + 5)
        leader.reader.done(step, step.after.without([A1]))
        leader.reader.update({A2: 1})
        assert leader.reader.next_step(START_MS + 6, 10, 10).after.seqs == {A2: 1}


def test_days_without_messages_cost_few_steps(wheels: Wheels) -> None:
    day_ms = 86_400_000
    wheels.write(A1, [message(START_MS + 1, 1), message(START_MS + 3 * day_ms, 2)])
    with Leader(wheels) as leader:
        assert leader.forward(START_MS + 4 * day_ms) < 4
        assert numbers(leader.messages) == [1, 2]


def test_a_catch_up_holds_a_few_seconds_at_a_time(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "AHEAD", Bound(1_000, 20, 1 << 30))
    monkeypatch.setattr(window, "PAST", Bound(1_000, 30, 1 << 30))
    wheels.write(A1, [message(START_MS + 100 * number, number) for number in range(1, 3000)])
    with Leader(wheels) as leader:
        most = 0
        while leader.progress.due_ms < START_MS + 400_000:
            leader.commit(leader.look(START_MS + 400_000, cap_messages=25))
            most = max(most, sum(map(len, leader.reader._window._seconds.from_slot(0))))
        assert numbers(leader.messages) == list(range(1, 3000))
        assert most <= 100


@pytest.mark.parametrize(
    "bound", [Bound(4, 1_000, 1 << 30), Bound(1_000, 4, 1 << 30), Bound(1_000, 1_000, 4 << 20)]
)
def test_seconds_are_kept_by_number_messages_and_bytes(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch, bound: Bound
) -> None:
    monkeypatch.setattr(window, "AHEAD", bound)
    monkeypatch.setattr(window, "PAST", bound)
    large = bytes(1 << 20)
    wheels.write(A1, [message(START_MS + 1_000 * n, n, value=large) for n in range(40)])
    with Leader(wheels) as leader:
        most = 0
        while leader.progress.due_ms < START_MS + 60_000:
            leader.commit(leader.look(START_MS + 60_000, cap_messages=1))
            most = max(most, len([*leader.reader._window._seconds.from_slot(0)]))
        assert numbers(leader.messages) == list(range(40))
        assert most <= 9  # four ahead, the one where progress stands, four past


def test_seconds_below_the_floor_are_freed(wheels: Wheels) -> None:
    wheels.write(A1, [message(START_MS + 1_000 * n, n) for n in range(20)])
    with Leader(wheels) as leader:
        leader.forward(START_MS + 30_000)
        floor = START_MS // 1_000 + 15
        step = leader.look(START_MS + 30_001)
        leader.reader.done(step, replace(step.after, floor=floor))
        assert [second.slot for second in leader.reader._window._seconds.from_slot(0)] == [
            *range(floor, floor + 5)
        ]


def test_late_frames_for_more_seconds_than_are_kept_are_all_taken(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "PAST", NOTHING)
    monkeypatch.setattr(tail, "LATE_MESSAGES", 3)
    dues_ms = [START_MS + 1_000 * n for n in range(12)]
    wheels.write(A1, [message(due_ms, n) for n, due_ms in enumerate(dues_ms)])
    with Leader(wheels) as leader:
        leader.forward(START_MS + 20_000)
        for wheel in (A1, B1, A2):
            wheels.write(wheel, [message(due_ms, n) for n, due_ms in enumerate(dues_ms)])
        for _ in range(36):  # each time some more are admitted
            leader.forward(START_MS + 20_000)
        assert len(leader.dropped) == 36
        assert all(drop.outcome == MessageOutcome.DUPLICATE for drop in leader.dropped)


@pytest.mark.parametrize("bound", ["LATE_MESSAGES", "LATE_BYTES"])
def test_late_messages_beyond_the_bound_wait_in_their_files(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(tail, bound, 20 if bound == "LATE_MESSAGES" else 20_000)
    value = bytes(1_000)
    for number in range(100):
        wheels.write(A1, [message(START_MS - number, 2 * number + n, value=value) for n in (0, 1)])
    with Leader(wheels) as leader:
        assert len(leader.look(START_MS + 5).messages) in {18, 20}
        leader.forward(START_MS + 5, cap_messages=7)
        assert sorted(numbers(leader.messages)) == list(range(200))


def test_the_next_due_is_reported_for_the_timer(wheels: Wheels) -> None:
    wheels.write(A1, [message(START_MS + 700, 1), message(START_MS + 400, 2)])
    with Leader(wheels) as leader:
        leader.commit(leader.look(START_MS))
        assert leader.reader.next_due_ms() == START_MS + 400
        wheels.write(A1, [message(START_MS + 300, 3)])
        leader.look(START_MS)
        assert leader.reader.next_due_ms() == START_MS + 300
        leader.commit(leader.look(START_MS + 400))
        assert leader.reader.next_due_ms() == START_MS + 700
        leader.forward(START_MS + 700)
        assert leader.reader.next_due_ms() is None


def test_the_timer_waits_for_no_half_that_was_let_go(wheels: Wheels) -> None:
    """A leader would look again and again for what is done, and say that it is late."""
    halves = [
        message(START_MS + 300, number, headers=((HALF_GROUP, b"shop"),)) for number in range(1_500)
    ]
    wheels.write(A1, [*halves, message(START_MS + 400, 8_000), message(START_MS + 500, 9_000)])
    with Leader(wheels) as leader:
        leader.forward(START_MS)
        wheels.cancel(A1, [*halves, message(START_MS + 400, 8_000)], kind=Kind.RELEASES)
        leader.forward(START_MS)
        assert len(leader.messages) == len(halves)
        assert leader.reader.next_due_ms() == START_MS + 400
        leader.forward(START_MS + 450)
        assert leader.reader.next_due_ms() == START_MS + 500
