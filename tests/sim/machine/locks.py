"""Locks of the code under test, for tasks instead of threads.

A real lock held by a waiting task would stop all others: they share one thread.
"""

from __future__ import annotations

from sim.machine.scheduler import Scheduler, Signal, SimulationError


class SimLock:
    """A lock for tasks, as `threading.Lock`.

    An event of the hub never waits. An event that finds the lock held stands for a thread that must
    never wait for a disk, but would: that is a finding.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held = False
        self._freed: Signal | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Waits until the lock is free."""
        while self._held:
            if not blocking:
                return False
            if self._scheduler.current is None:
                raise SimulationError("what must not wait comes upon a lock that is held")
            self._freed = self._freed or Signal(self._scheduler)
            self._freed.clear()
            if not self._freed.wait(None if timeout < 0 else timeout):
                return False
        self._held = True
        return True

    def release(self) -> None:
        """Lets the next task have it."""
        self._held = False
        if self._freed is not None:
            self._freed.set()

    def locked(self) -> bool:
        """Whether a task holds it."""
        return self._held

    def __enter__(self) -> bool:
        if self._held:
            return self.acquire()
        self._held = True  # nearly always: a call less
        return True

    def __exit__(self, *_: object) -> None:
        self._held = False  # as `release`: likewise
        if self._freed is not None:
            self._freed.set()
