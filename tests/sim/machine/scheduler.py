"""Simulated time: events in order, and blocking code as tasks that wait without a thread.

One greenlet, the *hub*, runs the events; each `Task` is a greenlet of its own, so that real code
which blocks (the cleaner) runs unchanged: when it waits, the hub continues with the next event.

* Time is true time in whole microseconds and moves only from event to event.
* Events of the same microsecond run in the order in which they were asked for.
* Nothing here looks at real time, threads, hashes or addresses: one seed is one run.
* What belongs to a `Process` stops with it. A killed process leaves nothing behind: its events
  are dropped, and no line of its tasks ever runs again, not even a `finally`. A paused one does
  everything that fell due meanwhile when it is resumed, in order.
* An unhandled exception of an event or a task comes out of `run_until`: it is a finding.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from heapq import heappop, heappush
from random import Random
from typing import Any, Self

from greenlet import GreenletExit, getcurrent, greenlet

US_PER_MS = 1_000
US_PER_S = 1_000_000

_DIGEST_MASK = (1 << 64) - 1


class SimulationError(Exception):
    """The simulation itself was used in an impossible way."""


class Timer:
    """One event to come."""

    __slots__ = ("args", "at_us", "fn", "owner")

    def __init__(
        self, at_us: int, fn: Callable[..., object], args: tuple[Any, ...], owner: Process | None
    ) -> None:
        self.at_us = at_us
        self.fn: Callable[..., object] | None = fn
        self.args = args
        self.owner = owner

    def cancel(self) -> None:
        """Cancels it; no harm if it has run."""
        self.fn = None


class Process:
    """What lives and dies together: events and tasks of one life of one process.

    Attributes:
        name: For traces.
        alive: Until it is killed; a new life is a new object.
        paused: As by SIGSTOP.
    """

    __slots__ = ("_deferred", "_scheduler", "alive", "name", "paused")

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self._scheduler = scheduler
        self._deferred: list[Timer] = []
        self.name = name
        self.alive = True
        self.paused = False

    def call_later(self, delay_us: int, fn: Callable[..., object], *args: Any) -> Timer:
        """As `Scheduler.call_later`, for as long as this process lives."""
        scheduler = self._scheduler
        return scheduler.call_at(scheduler.now_us + delay_us, fn, *args, owner=self)

    def spawn(self, name: str, fn: Callable[..., object], *args: Any) -> Task:
        """As `Scheduler.spawn`, for as long as this process lives."""
        return self._scheduler.spawn(name, fn, *args, owner=self)

    def kill(self) -> None:
        """Ends it between two effects; a task of its own that calls this runs no further.

        An event of its own that calls this still runs to its end.
        """
        self.alive = False
        self._deferred.clear()
        current = self._scheduler.current
        if current is not None and current.owner is self:
            self._scheduler.stop_here()

    def pause(self) -> None:
        """Stops it from now on; a task of its own that calls this stops at once."""
        self.paused = True
        current = self._scheduler.current
        if current is not None and current.owner is self:
            self._scheduler.sleep(0)

    def resume(self) -> None:
        """Resumes it: everything that fell due meanwhile runs now, in order."""
        self.paused = False
        deferred, self._deferred = self._deferred, []
        for timer in deferred:
            self._scheduler.push(timer)

    def defer(self, timer: Timer) -> None:
        """Keeps an event until the pause ends."""
        self._deferred.append(timer)


class Task:
    """Blocking code on its own greenlet.

    Attributes:
        name: For traces.
        owner: The process that it belongs to.
        ended: It returned or raised.
        result: What it returned.
        error: What it raised; the scheduler raises it in the hub, unless `on_error` takes it.
        on_error: Takes what the task raises.
    """

    __slots__ = (
        "_greenlet",
        "_killed",
        "_scheduler",
        "_waiters",
        "ended",
        "error",
        "name",
        "on_error",
        "owner",
        "result",
        "wake",
    )

    def __init__(
        self,
        scheduler: Scheduler,
        name: str,
        call: Callable[[], object],
        owner: Process | None,
        hub: greenlet,
    ) -> None:
        self._scheduler = scheduler
        self._killed = False
        self._waiters = Signal(scheduler)
        self._greenlet = greenlet(lambda: self._run(call), parent=hub)
        self.name = name
        self.owner = owner
        self.ended = False
        self.result: object = None
        self.error: BaseException | None = None
        self.on_error: Callable[[BaseException], None] | None = None
        self.wake: Timer | None = None

    @property
    def alive(self) -> bool:
        """Whether a line of it may still run."""
        owner = self.owner
        return not (self.ended or self._killed) and (owner is None or owner.alive)

    def kill(self) -> None:
        """Drops it: no line of it runs again, and no other task is woken."""
        self._killed = True
        if self._scheduler.current is self:
            self._scheduler.stop_here()

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits in another task until it has ended; returns whether it has."""
        return self.ended or self._waiters.wait(timeout_s)

    def step(self) -> None:
        """Resumes it until it waits again. For the scheduler."""
        if not self.alive:
            return
        scheduler = self._scheduler
        scheduler.current = self
        self._greenlet.switch()
        scheduler.current = None
        error = self.error
        if error is None or not self.ended:
            return
        if self.on_error is None:
            error.add_note(f"in task {self.name} at {scheduler.now_us / US_PER_S:.6f} s")
            raise error
        self.on_error(error)

    def unwind(self) -> None:
        """Frees its stack after the run; `finally` blocks run now, and cannot wait."""
        if self._greenlet and not self._greenlet.dead:
            with suppress(BaseException):  # the run is over: its errors no longer count
                self._greenlet.throw(GreenletExit)

    def _run(self, call: Callable[[], object]) -> None:
        try:
            self.result = call()
        except GreenletExit:
            return
        except BaseException as error:  # noqa: BLE001 - raised again in the hub, by `step`
            self.error = error
        self.ended = True
        self._waiters.set()


class Signal:
    """An event that tasks wait for, as threading.Event."""

    __slots__ = ("_scheduler", "_waiting", "is_set")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: list[Task] = []
        self.is_set = False

    def set(self) -> None:
        """Wakes all waiting tasks; later ones need not wait."""
        self.is_set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._scheduler.wake(task)

    def clear(self) -> None:
        """Makes later tasks wait again."""
        self.is_set = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits in the calling task; False: it was not set in time."""
        if self.is_set:
            return True
        scheduler = self._scheduler
        task = scheduler.calling_task()
        self._waiting.append(task)
        if timeout_s is None:
            scheduler.park()
        else:
            scheduler.sleep(timeout_s)
        if task in self._waiting:
            self._waiting.remove(task)
            return False
        return True


class Scheduler:
    """The hub. Close it at the end, or use it as a context: tasks hold their stacks until then.

    Attributes:
        now_us: True time since the run began.
        seed: The seed of this run.
        random: For parts without a stream of their own (see `stream`).
        current: The task that is running; None while an event runs.
        events_run: How many events there were.
    """

    def __init__(self, seed: int = 0) -> None:
        self.now_us = 0
        self.seed = seed
        self.random = self.stream("main")
        self.current: Task | None = None
        self.events_run = 0
        self._heap: list[tuple[int, int, Timer]] = []
        self._count = 0
        self._digest = seed & _DIGEST_MASK
        self._tasks: list[Task] = []
        self._closed = False
        self._hub = getcurrent()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def digest(self) -> int:
        """A digest that differs between runs in which anything happened at different times."""
        return self._digest

    def stream(self, name: str) -> Random:
        """Returns a random stream for one part, so that parts do not shift each other's numbers."""
        return Random(f"{self.seed}/{name}")

    def note(self, number: int) -> None:
        """Adds a number to the digest."""
        self._digest = (self._digest * 1_000_003 ^ number) & _DIGEST_MASK

    def process(self, name: str) -> Process:
        """Creates a process."""
        return Process(self, name)

    def call_at(
        self, at_us: int, fn: Callable[..., object], *args: Any, owner: Process | None = None
    ) -> Timer:
        """Runs `fn(*args)` in the hub at that time, or now if that has passed.

        Args:
            at_us: True time.
            fn: Must not block; it may spawn a task.
            args: The arguments of the call.
            owner: The process without which it does not run.
        """
        timer = Timer(max(at_us, self.now_us), fn, args, owner)
        self._count += 1
        heappush(self._heap, (timer.at_us, self._count, timer))
        return timer

    def call_later(
        self, delay_us: int, fn: Callable[..., object], *args: Any, owner: Process | None = None
    ) -> Timer:
        """Runs `fn(*args)` in the hub after that time."""
        return self.call_at(self.now_us + delay_us, fn, *args, owner=owner)

    def push(self, timer: Timer) -> None:
        """Runs an event that was kept back now."""
        self._count += 1
        timer.at_us = self.now_us
        heappush(self._heap, (timer.at_us, self._count, timer))

    def spawn(
        self, name: str, fn: Callable[..., object], *args: Any, owner: Process | None = None
    ) -> Task:
        """Runs blocking code as a task, beginning with an event of now."""
        task = Task(self, name, lambda: fn(*args), owner, self._hub)
        self._tasks.append(task)
        if len(self._tasks) % 256 == 0:
            self._tasks = [kept for kept in self._tasks if not kept.ended]
        self.call_at(self.now_us, task.step, owner=owner)
        return task

    def sleep(self, seconds: float) -> None:
        """Waits in the calling task; others run meanwhile, even if `seconds` is 0."""
        task = self.calling_task()
        delay_us = max(0, round(seconds * US_PER_S))
        task.wake = self.call_at(self.now_us + delay_us, task.step, owner=task.owner)
        self.park()

    def wake(self, task: Task) -> None:
        """Ends the wait of a task now."""
        if task.wake is not None:
            task.wake.cancel()
        task.wake = self.call_at(self.now_us, task.step, owner=task.owner)

    def park(self) -> None:
        """Waits in the calling task until another wakes it."""
        self.calling_task()
        self._hub.switch()
        if self._closed:
            raise GreenletExit

    def stop_here(self) -> None:
        """Leaves the calling task for ever."""
        self.park()
        raise SimulationError("a task that was killed went on")

    def calling_task(self) -> Task:
        """The task that is running."""
        if self._closed:
            raise GreenletExit
        if self.current is None:
            raise SimulationError("only a task can wait")
        return self.current

    def run_until(
        self, until_us: int | None = None, predicate: Callable[[], object] | None = None
    ) -> bool:
        """Runs events, in the hub.

        Args:
            until_us: Up to and including this time, which it then is.
            predicate: Checked before and after each event; ends the run when true.

        Returns:
            Whether the predicate held; False when time or events ran out.
        """
        if getcurrent() is not self._hub:
            raise SimulationError("only the hub runs events")
        if predicate is not None and predicate():
            return True
        heap = self._heap
        while heap and (until_us is None or heap[0][0] <= until_us):
            at_us, _, timer = heappop(heap)
            self.now_us = at_us
            fn = timer.fn
            if fn is None:
                continue
            owner = timer.owner
            if owner is not None and (owner.paused or not owner.alive):
                if owner.alive:
                    owner.defer(timer)
                continue
            self.events_run += 1
            self._digest = (self._digest * 1_000_003 ^ at_us) & _DIGEST_MASK
            fn(*timer.args)
            if predicate is not None and predicate():
                return True
        if until_us is not None:
            self.now_us = max(self.now_us, until_us)
        return False

    def run_for(self, seconds: float, predicate: Callable[[], bool] | None = None) -> bool:
        """As `run_until`, for this long from now."""
        return self.run_until(self.now_us + round(seconds * US_PER_S), predicate)

    def close(self) -> None:
        """Frees the stacks of tasks that have not ended. Nothing runs afterwards."""
        self._closed = True
        self.current = None
        self._heap.clear()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.unwind()
