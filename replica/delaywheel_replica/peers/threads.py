"""Threads that serve the streams of peers."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class StreamThreads(Executor):
    """One daemon thread for each piece of work: streams are few, and last.

    The pool of the standard library is no choice: at its end the interpreter waits for such a
    pool's threads, which wait for their peers. A server whose main thread failed would stay, say
    nothing, and never be started again.
    """

    def __init__(self) -> None:
        """No thread yet; how many there are is bounded by whoever submits."""
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()

    def submit(
        self,
        fn: Callable[_Parameters, _Result],
        /,
        *args: _Parameters.args,
        **kwargs: _Parameters.kwargs,
    ) -> Future[_Result]:
        """Starts the work on a thread of its own."""
        future: Future[_Result] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - it is handed on, as futures do
                future.set_exception(error)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="peer-stream", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Waits for the work; there is none that has not begun."""
        del cancel_futures
        with self._lock:
            threads = list(self._threads)
        for thread in threads if wait else ():
            thread.join()
