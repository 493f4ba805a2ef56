"""Work that is done in turns, by who asks for it: on one thread, or so many at once.

A sharer is a principal, or a connection without one (`CallOrigin.sharer`). So whoever asks for much
waits for itself, and others for one turn of each sharer: what is done in a turn should not take
long.
"""

import asyncio
from asyncio import wrap_future
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from threading import Lock
from typing import Any, Final, TypeVar

from delaywheel_replica.process.round_robin import RoundRobin

_Made = TypeVar("_Made")


def start(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
    """Begins some work at once; it is among the tasks until it ends, as the loop keeps none."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


class Turns:
    """One thread. What one sharer asks for is done in order, and sharers have turns."""

    def __init__(self, name: str) -> None:
        self._thread: Final = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock: Final = Lock()
        self._waiting: Final = RoundRobin[tuple[Future[Any], Callable[[], Any]]]()

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)

    async def take(self, sharer: Hashable, work: Callable[[], _Made]) -> _Made:
        """Does some work once it is its turn."""
        made = Future[_Made]()
        with self._lock:
            self._waiting.add(sharer, (made, work))
        self._thread.submit(self._do_next)
        return await wrap_future(made)

    def _do_next(self) -> None:
        with self._lock:
            made, work = self._waiting.take()
        if not made.set_running_or_notify_cancel():  # nobody waits for it any more
            return
        try:
            made.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised to who waits
            made.set_exception(error)


class TurnsAtOnce:
    """So many have a turn at once; the others wait for theirs. For the event loop's thread."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._waiting: Final = RoundRobin[asyncio.Future[None]]()

    @asynccontextmanager
    async def turn(self, sharer: Hashable) -> AsyncIterator[None]:
        """Waits for a turn, which lasts until the context is left."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.add(sharer, turn)
        self._go_on()
        try:
            await turn
            yield
        finally:
            self._waiting.discard(sharer, turn)
            if not turn.cancelled():  # else it was none
                self._free += 1
            self._go_on()

    def _go_on(self) -> None:
        while self._free and self._waiting:
            turn = self._waiting.take()
            if not turn.done():  # else its caller has left, and does not know yet
                self._free -= 1
                turn.set_result(None)
