"""Threads whose work is done in turns, by who asks for it."""

from asyncio import wrap_future
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, Final, TypeVar

_Made = TypeVar("_Made")


class Turns:
    """One thread. What one sharer asks for is done in order, and sharers have turns.

    A sharer is a principal; all that have no name are one. So whoever asks for much waits for
    itself, and others for one turn of each sharer: what is done in a turn should not take long.
    """

    def __init__(self, name: str) -> None:
        """Begins without work.

        Args:
            name: What the thread is called.
        """
        self._thread: Final = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock: Final = Lock()
        self._queues: Final = OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]]()

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)

    async def take(self, sharer: str, work: Callable[[], _Made]) -> _Made:
        """Does some work once it is its turn."""
        made = Future[_Made]()
        with self._lock:
            self._queues.setdefault(sharer, deque()).append((made, work))
        self._thread.submit(self._do_next)
        return await wrap_future(made)

    def _do_next(self) -> None:
        with self._lock:
            sharer, queue = self._queues.popitem(last=False)
            made, work = queue.popleft()
            if queue:
                self._queues[sharer] = queue
        if not made.set_running_or_notify_cancel():  # nobody waits for it any more
            return
        try:
            made.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised to who waits
            made.set_exception(error)
