"""asyncio on simulated time: a loop whose callbacks are events of a process, and threads its tasks.

Real code of the server's event loop runs on it unchanged. What it asks of a `ThreadPoolExecutor` is
done by one task, in order, which can wait for slow files as a thread would. A callback that raises
is a finding; of a process that died nothing runs any more, and no `finally`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from math import ceil
from typing import Any, TypeVar, cast

from sim.machine.clocks import SimClock
from sim.machine.scheduler import US_PER_S, Process

T = TypeVar("T")
NS_PER_MS = 1_000_000

_OF_THREAD: contextvars.ContextVar[SimLoop] = contextvars.ContextVar("_OF_THREAD")
"""The loop that a thread works for: each task has variables of its own."""

_Job = tuple[Callable[..., Any], tuple[Any, ...], "asyncio.Future[Any]"]


class SimLoop:
    """The event loop of one life of a process.

    Attributes:
        clock: of its node.
    """

    def __init__(
        self,
        process: Process,
        clock: SimClock,
        *,
        run: Callable[..., None],
        spawn: Callable[[str, Callable[[], None]], None],
    ) -> None:
        """Begins with nothing to do.

        Args:
            process: What it lives and dies with.
            clock: Of its node.
            run: Runs a callback, and what follows from it.
            spawn: Runs what a thread does.
        """
        self.clock = clock
        self._asyncios = cast("asyncio.AbstractEventLoop", self)
        self._process = process
        self._run = run
        self._spawn = spawn
        self._threads: dict[int, deque[_Job]] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Makes it the running loop."""
        asyncio._set_running_loop(self._asyncios)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    # --- what asyncio asks of a loop

    def time(self) -> float:
        """The monotonic clock, in seconds."""
        return self.clock.monotonic()

    def get_debug(self) -> bool:
        """It checks nothing besides."""
        return False

    def is_running(self) -> bool:
        """It runs while the process lives."""
        return self._process.alive

    def is_closed(self) -> bool:
        """It ends with the process."""
        return not self._process.alive

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """See asyncio."""
        handle = asyncio.Handle(callback, args, self._asyncios, context)
        self._process.call_later(0, self._run, self._turn, handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """See asyncio."""
        return self._at(self.time() + delay, delay, callback, args, context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """See asyncio."""
        return self._at(when, when - self.time(), callback, args, context)

    def create_future(self) -> asyncio.Future[Any]:
        """See asyncio."""
        return asyncio.Future(loop=self._asyncios)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        """See asyncio. What it has done by `asyncio.to_thread` knows the loop, too."""
        variables = context or contextvars.copy_context()
        variables.run(_OF_THREAD.set, self)
        return asyncio.Task(coro, loop=self._asyncios, name=name, context=variables)

    def run_in_executor(
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Runs a function behind those that were given to the same executor before."""
        future: asyncio.Future[T] = self.create_future()
        jobs = self._threads.setdefault(id(executor), deque())
        jobs.append((func, args, future))
        if len(jobs) == 1:
            self._spawn("reads", lambda: self._work(jobs))
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Raises what a callback has raised; what is left behind by a dead process is nothing."""
        if "handle" in context:
            raise context["exception"]

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when its time comes."""

    # --- inside

    def _at(
        self,
        when: float,
        delay_s: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self._asyncios, context)
        # However short it is, time passes: who waits for the rest of a wait would wait for ever.
        local_us = max(0, ceil(delay_s * US_PER_S))
        self._process.call_later(self.clock.true_us(local_us), self._run, self._turn, handle)
        return handle

    def _turn(self, handle: asyncio.Handle) -> None:
        if handle.cancelled():
            return
        asyncio._set_running_loop(self._asyncios)  # as `entered`: of each event a call less
        try:
            handle._run()
        finally:
            asyncio._set_running_loop(None)

    def _work(self, jobs: deque[_Job]) -> None:
        _OF_THREAD.set(self)
        while jobs:
            func, args, future = jobs[0]
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - raised where it is awaited
                self.call_soon(_settle, future, None, error)
            else:
                self.call_soon(_settle, future, result, None)
            jobs.popleft()


class SimExecutor:
    """What modules see as `ThreadPoolExecutor`."""

    def __init__(self, *_: object, **__: object) -> None:
        """Begins without work."""

    def submit(self, func: Callable[[], object]) -> None:
        """Runs a function on a thread of the node whose event loop runs."""
        _running().run_in_executor(self, func)


class LoopTime:
    """What modules see as `time`: the clocks of the node whose event loop, or thread, runs."""

    @staticmethod
    def time_ns() -> int:
        """The wall clock."""
        return _running().clock.wall_ms() * NS_PER_MS

    @staticmethod
    def monotonic_ns() -> int:
        """The monotonic clock."""
        return _running().clock.monotonic_ms() * NS_PER_MS

    @staticmethod
    def monotonic() -> float:
        """The same in seconds."""
        return _running().time()


def _running() -> SimLoop:
    """The loop that runs, or that of the thread; where neither does, a coroutine is collected.

    Of a process that died it may be: closing it passes over the error that ends its `finally`.
    """
    loop = asyncio._get_running_loop() or _OF_THREAD.get(None)
    if loop is None:
        raise GeneratorExit
    return cast("SimLoop", loop)


def _settle(future: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if future.done():  # whoever asked has left
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
