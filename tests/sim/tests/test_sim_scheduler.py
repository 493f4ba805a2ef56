"""Simulated time, tasks, processes and clocks."""

from __future__ import annotations

from asyncio import sleep

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.machine.clocks import EPOCH_MS, SimClock
from sim.machine.event_loop import LoopTime
from sim.machine.scheduler import US_PER_S, Process, Scheduler, Signal, SimulationError, Task


@given(st.lists(st.integers(0, 20), max_size=30))
@settings(deadline=None)
def test_events_run_by_time_and_then_in_the_order_they_were_asked_for(times: list[int]) -> None:
    seen: list[tuple[int, int]] = []
    with Scheduler() as scheduler:
        for number, at_us in enumerate(times):
            scheduler.call_at(at_us, lambda number=number: seen.append((scheduler.now_us, number)))
        scheduler.run_until()
    assert seen == sorted((at_us, number) for number, at_us in enumerate(times))


def test_an_event_of_the_past_runs_now() -> None:
    with Scheduler() as scheduler:
        scheduler.run_until(100)
        seen: list[int] = []
        scheduler.call_at(5, lambda: seen.append(scheduler.now_us))
        scheduler.run_until()
        assert seen == [100]


def test_a_cancelled_event_does_not_run() -> None:
    with Scheduler() as scheduler:
        scheduler.call_later(5, pytest.fail, "ran").cancel()
        scheduler.run_until(10)


def test_a_run_ends_at_its_time_and_goes_on_from_there() -> None:
    seen: list[int] = []
    with Scheduler() as scheduler:
        for at_us in (10, 11):
            scheduler.call_at(at_us, seen.append, at_us)
        assert not scheduler.run_until(10)
        assert (seen, scheduler.now_us) == ([10], 10)
        assert scheduler.run_until(predicate=lambda: 11 in seen)


def test_tasks_wait_without_holding_others_up() -> None:
    seen: list[tuple[str, int]] = []
    with Scheduler() as scheduler:

        def work(name: str, seconds: float) -> str:
            for _ in range(2):
                scheduler.sleep(seconds)
                seen.append((name, scheduler.now_us))
            return name

        slow, fast = (scheduler.spawn(n, work, n, s) for n, s in (("slow", 3), ("fast", 1)))
        scheduler.run_until()
        assert seen == [
            ("fast", 1_000_000),
            ("fast", 2_000_000),
            ("slow", 3_000_000),
            ("slow", 6_000_000),
        ]
        assert (slow.result, fast.result) == ("slow", "fast")


def test_a_signal_wakes_all_who_wait_and_a_time_out_those_it_did_not_reach() -> None:
    seen: list[tuple[str, bool, int]] = []
    with Scheduler() as scheduler:
        signal = Signal(scheduler)

        def wait(name: str, timeout_s: float | None) -> None:
            seen.append((name, signal.wait(timeout_s), scheduler.now_us))

        for name, timeout_s in (("short", 1.0), ("long", 3.0), ("ever", None)):
            scheduler.spawn(name, wait, name, timeout_s)
        scheduler.call_at(2 * US_PER_S, signal.set)
        scheduler.run_until()
        scheduler.spawn("late", wait, "late", None)
        scheduler.run_until()
    assert seen == [
        ("short", False, 1_000_000),
        ("long", True, 2_000_000),
        ("ever", True, 2_000_000),
        ("late", True, 3_000_000),
    ]


def test_joining_waits_for_the_end_of_another_task() -> None:
    with Scheduler() as scheduler:
        worker = scheduler.spawn("worker", scheduler.sleep, 2.0)
        found: list[bool] = []

        def wait() -> None:
            found.extend([worker.join(1.0), worker.join(), worker.join()])

        scheduler.spawn("waiter", wait)
        scheduler.run_until()
        assert found == [False, True, True]


def _stubborn(scheduler: Scheduler, seen: list[str]) -> None:
    try:
        scheduler.sleep(1.0)
    except BaseException:
        seen.append("except")
        raise
    finally:
        seen.append("finally")


def test_a_killed_process_leaves_nothing_behind() -> None:
    seen: list[str] = []
    scheduler = Scheduler()
    process = scheduler.process("node")
    task = process.spawn("stubborn", _stubborn, scheduler, seen)
    process.call_later(2 * US_PER_S, seen.append, "event")
    scheduler.call_at(US_PER_S // 2, process.kill)
    scheduler.run_until()
    assert not task.alive
    assert not seen
    scheduler.close()


def test_a_task_that_kills_its_own_process_goes_no_further() -> None:
    seen: list[str] = []
    with Scheduler() as scheduler:
        process = scheduler.process("node")

        def fall() -> None:
            process.kill()
            seen.append("after")

        process.spawn("falls", fall)
        scheduler.run_until()
        assert not seen


def test_a_killed_task_alone_goes_no_further() -> None:
    with Scheduler() as scheduler:
        task = scheduler.spawn("sleeper", scheduler.sleep, 1.0)
        scheduler.call_at(1, task.kill)
        scheduler.run_until()
        assert not task.alive
        assert not task.ended


def test_closing_frees_stacks_and_lets_nothing_wait_any_more() -> None:
    seen: list[str] = []
    scheduler = Scheduler()

    def clean_up() -> None:
        try:
            scheduler.sleep(9.0)
        finally:
            seen.append("begins")
            scheduler.sleep(1.0)
            seen.append("never")

    scheduler.spawn("tidy", clean_up)
    scheduler.run_until(1)
    scheduler.close()
    assert seen == ["begins"]


def test_a_coroutine_that_is_collected_outside_its_loop_is_told_no_time() -> None:
    async def work() -> None:
        try:
            await sleep(0)
        finally:
            LoopTime.monotonic()

    left = work()
    left.send(None)
    left.close()


def _log_every_second(process: Process, scheduler: Scheduler, seen: list[str]) -> None:
    def work() -> None:
        for turn in range(3):
            scheduler.sleep(1.0)
            seen.append(f"task {turn} {scheduler.now_us // US_PER_S}")

    process.spawn("task", work)
    for second in (1, 2, 3):
        process.call_later(second * US_PER_S + 1, seen.append, f"event {second}")


def test_a_paused_process_does_everything_when_it_is_resumed() -> None:
    seen: list[str] = []
    with Scheduler() as scheduler:
        process = scheduler.process("node")
        _log_every_second(process, scheduler, seen)
        scheduler.call_at(US_PER_S + 2, process.pause)
        scheduler.call_at(5 * US_PER_S, process.resume)
        scheduler.run_until()
    assert seen == ["task 0 1", "event 1", "task 1 5", "event 2", "event 3", "task 2 6"]


def test_a_wait_that_timed_out_during_a_pause_may_still_be_answered() -> None:
    found: list[bool] = []
    with Scheduler() as scheduler:
        process, signal = scheduler.process("node"), Signal(scheduler)
        process.spawn("asks", lambda: found.append(signal.wait(1.0)))
        scheduler.call_at(1, process.pause)
        scheduler.call_at(2 * US_PER_S, signal.set)
        scheduler.call_at(3 * US_PER_S, process.resume)
        scheduler.run_until()
    assert found == [True]


def test_what_nobody_takes_comes_out_of_the_run() -> None:
    with Scheduler() as scheduler:
        scheduler.spawn("bad", divmod, 1, 0)
        with pytest.raises(ZeroDivisionError) as caught:
            scheduler.run_until()
    assert "in task bad" in caught.value.__notes__[0]


def test_an_error_may_be_taken() -> None:
    taken: list[BaseException] = []
    with Scheduler() as scheduler:
        task = scheduler.spawn("bad", divmod, 1, 0)
        task.on_error = taken.append
        scheduler.run_until()
    assert isinstance(taken[0], ZeroDivisionError)


def test_only_a_task_waits_and_only_the_hub_runs_events() -> None:
    with Scheduler() as scheduler:
        scheduler.call_later(0, scheduler.sleep, 1.0)
        with pytest.raises(SimulationError):
            scheduler.run_until()
        scheduler.spawn("runs", scheduler.run_until)
        with pytest.raises(SimulationError):
            scheduler.run_until()


def test_streams_differ_by_name_and_by_seed_and_by_nothing_else() -> None:
    drawn = {
        (seed, name): Scheduler(seed).stream(name).random() for seed in (1, 2) for name in "ab"
    }
    assert len(set(drawn.values())) == 4
    assert drawn[2, "b"] == Scheduler(2).stream("b").random()


def test_the_digest_knows_when_something_happened() -> None:
    digests = set()
    for at_us in (5, 5, 6):
        with Scheduler() as scheduler:
            scheduler.call_at(at_us, list)
            scheduler.run_until(10)
            digests.add(scheduler.digest)
    assert len(digests) == 2


def test_ended_tasks_are_not_kept() -> None:
    with Scheduler() as scheduler:
        for _ in range(2_000):
            scheduler.spawn("short", list)
            scheduler.run_until()
        assert len(scheduler._tasks) < 512
        assert isinstance(scheduler._tasks[-1], Task)


def test_clocks_follow_true_time() -> None:
    with Scheduler() as scheduler:
        clock = SimClock(scheduler, offset_ms=7, uptime_ms=50)
        scheduler.run_until(2_500_900)
        assert clock.wall_ms() == EPOCH_MS + 7 + 2_500
        assert clock.monotonic_ms() == 2_550
        assert clock.monotonic() == 2.5509


def test_setting_the_wall_clock_leaves_the_monotonic_one_alone() -> None:
    with Scheduler() as scheduler:
        clock = SimClock(scheduler, uptime_ms=0)
        clock.step(-3_600_000)
        assert clock.wall_ms() == EPOCH_MS - 3_600_000
        assert clock.monotonic_ms() == 0


def test_a_reboot_begins_the_monotonic_clock_anew() -> None:
    with Scheduler() as scheduler:
        clock = SimClock(scheduler)
        scheduler.run_until(5 * US_PER_S)
        clock.reboot()
        scheduler.run_until(6 * US_PER_S)
        assert clock.monotonic_ms() == 1_000
        assert clock.wall_ms() == EPOCH_MS + 6_000


@given(st.lists(st.tuples(st.integers(-900, 900), st.integers(0, 10**9)), max_size=8))
@settings(deadline=None)
def test_drift_bends_both_clocks_and_turns_neither_back(drifts: list[tuple[int, int]]) -> None:
    with Scheduler() as scheduler:
        clock = SimClock(scheduler)
        expected_us = 60_000_000.0
        for ppm, for_us in drifts:
            clock.drift(ppm)
            before = clock.monotonic()
            scheduler.run_until(scheduler.now_us + for_us)
            assert clock.monotonic() >= before
            expected_us += for_us * (1 + ppm / 1_000_000)
        assert abs(clock.monotonic() * US_PER_S - expected_us) <= len(drifts) + 1


def test_a_fast_clock_reaches_its_time_early() -> None:
    with Scheduler() as scheduler:
        clock = SimClock(scheduler, uptime_ms=0, drift_ppm=1_000)
        scheduler.run_until(clock.true_us(2 * US_PER_S))
        assert clock.monotonic() >= 2.0
        assert scheduler.now_us < 2 * US_PER_S
