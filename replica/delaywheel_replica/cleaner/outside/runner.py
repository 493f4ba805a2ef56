"""Runs blocking calls in the background, as a port, since a simulation has its own."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

_T = TypeVar("_T")


class Runner(Protocol):
    """Runs one job at a time in the background, and several calls at once within a job."""

    def start(self, job: Callable[[], None]) -> None:
        """Queues a job behind those that were started before."""

    def together(self, calls: Iterable[Callable[[], _T]]) -> list[_T]:
        """Runs calls concurrently; returns their results in order once all have ended."""

    def pause(self, seconds: float) -> None:
        """Sleeps within a job."""

    def close(self) -> None:
        """Starts nothing more; running calls are left to their timeouts."""


class ThreadRunner:
    """Runs jobs on threads."""

    def __init__(self, calls: int, *, job: str, call: str) -> None:
        """Makes no thread before the first job; the two names are those of its threads."""
        self._jobs = ThreadPoolExecutor(1, thread_name_prefix=job)
        self._calls = ThreadPoolExecutor(calls, thread_name_prefix=call)

    def start(self, job: Callable[[], None]) -> None:
        """Queues a job behind those that were started before."""
        self._jobs.submit(job)

    def together(self, calls: Iterable[Callable[[], _T]]) -> list[_T]:
        """Runs calls concurrently; returns their results in order once all have ended."""
        return list(self._calls.map(lambda call: call(), calls))

    def pause(self, seconds: float) -> None:
        """Sleeps within a job."""
        time.sleep(seconds)

    def close(self) -> None:
        """Starts nothing more; running calls are left to their timeouts."""
        self._jobs.shutdown(wait=False, cancel_futures=True)
        self._calls.shutdown(wait=False, cancel_futures=True)
