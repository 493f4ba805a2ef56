"""The driver under real threads: callers, ticks, and a disk that takes its time."""

from __future__ import annotations

import threading
import time

from delaywheel.identity import WheelId
from delaywheel.storage.frames.bundle import WrittenGroup
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.reader import WheelReader
from delaywheel_replica.core.protocol.seal import Seal
from delaywheel_replica.server.commit.committer import Committed, Request, RequestOutcome
from delaywheel_replica.server.commit.outside import Job
from delaywheel_replica.server.commit.runtime import StoreThread
from sim.machine.disk import SimulatedDisk
from support.server.driven import DATA, LATE_WINDOW_S, Driven
from support.wheels.messages import Message, columns_of, message

ONE = WheelId("n1", 1)
MOVES, MESSAGES = 75, 50
"""Minimum number of seals, and of accepted messages: with fewer the run proves nothing."""
ENOUGH_WITHIN_S = 60
TICK_S = 0.004
WRITING_S = 0.003
CALLERS = 3


class Threaded(Driven):
    """Starts a store thread; a group takes its time between the files and the machine."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.store_thread: StoreThread | None = None
        super().__init__(disk)

    def enqueue(self, job: Job) -> None:
        """Leaves jobs to the thread, once it runs."""
        if self.store_thread is None:
            super().enqueue(job)
        else:
            self.store_thread.put(job)

    def do_jobs(self, *, may_wait: bool) -> None:
        """Carries out the jobs, once there is a thread."""
        if self.store_thread is not None:
            self.store_thread.do_jobs(may_wait=may_wait)

    def enter(
        self,
        wheel: WheelId,
        columns: Columns | None,
        group: WrittenGroup,
        accepted_at_ms: int,
    ) -> None:
        """Enters frames slowly."""
        super().enter(wheel, columns, group, accepted_at_ms)
        time.sleep(WRITING_S)

    def pass_a_second(self) -> Seal:
        """Steps as the heartbeat thread does; returns the reported seal.

        By the wall clock alone: whoever waits has not waited for a second.
        """
        self.clock_ms += 1
        self.clock_wall_ms += 1_000
        self._report_again()
        self.driver.tick()
        return self.row.heartbeat.wheels[ONE].seal


class Caller(threading.Thread):
    """Sends one message after another, for the first seconds that may still be written."""

    def __init__(self, node: Threaded, number: int) -> None:
        super().__init__(name=f"caller {number}")
        self.node = node
        self.number = number
        self.is_over = threading.Event()
        self.accepted: list[Message] = []
        self.refused = 0

    def run(self) -> None:
        """Runs until the test is over."""
        sent = 0
        while not self.is_over.is_set():
            sent += 1
            slot = self.node.clock_wall_ms // 1000 - LATE_WINDOW_S + sent % 3
            one = message(self.number * 1_000_000 + sent, slot=slot)
            answered = threading.Event()
            outcomes: list[RequestOutcome] = []

            def on_answer(
                outcome: RequestOutcome,
                outcomes: list[RequestOutcome] = outcomes,
                answered: threading.Event = answered,
            ) -> None:
                outcomes.append(outcome)
                answered.set()

            self.node.driver.submit(Request(columns_of([one]), Kind.MESSAGES, on_answer))
            assert answered.wait(60), "nobody answers"
            (outcome,) = outcomes
            if isinstance(outcome, Committed) and not outcome.failed:
                self.accepted.append(one)
            else:
                self.refused += 1


def test_what_is_reported_holds_whoever_steps_meanwhile() -> None:
    node = Threaded(SimulatedDisk())
    node.hear(w1=None)
    node.store_thread = StoreThread()
    node.store_thread.start(node.driver)
    callers = [Caller(node, number) for number in range(1, CALLERS + 1)]
    for caller in callers:
        caller.start()
    seals: list[Seal] = []

    def is_enough() -> bool:
        """Seals have moved all the time, and every caller has reached the boundary."""
        accepted = sum(len(caller.accepted) for caller in callers)
        has_moved = len({seal.slot for seal in seals}) > MOVES
        return has_moved and accepted > MESSAGES and all(caller.refused for caller in callers)

    deadline_s = time.monotonic() + ENOUGH_WITHIN_S
    while not is_enough() and time.monotonic() < deadline_s:
        seals.append(node.pass_a_second())
        time.sleep(TICK_S)
    for caller in callers:
        caller.is_over.set()
    for caller in callers:
        caller.join()
    node.store_thread.stop()
    reader = WheelReader(node.disk, DATA, ONE)
    frames = [reader.frame(seq) for seq in range(1, reader.last_seq() + 1)]
    slots = [frame.slot for frame in frames if isinstance(frame, Frame)]
    assert is_enough()
    # No frame beyond q lies below s.
    broken = [seal for seal in seals if any(slot < seal.slot for slot in slots[seal.seq :])]
    assert broken == []
    accepted = [one for caller in callers for one in caller.accepted]
    assert sorted(node.stored(ONE), key=lambda one: one.id) == sorted(
        accepted, key=lambda one: one.id
    )
