"""Running blocking calls in the background, as a port: a simulation has its own."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

_T = TypeVar("_T")


class Runner(Protocol):
    """Runs one job at a time in the background, and within it several calls at once."""

    def start(self, job: Callable[[], None]) -> None:
        """Runs a job, behind those that were started before."""

    def together(self, calls: Iterable[Callable[[], _T]]) -> list[_T]:
        """Runs calls at the same time; returns when all have ended, their results in order."""

    def pause(self, seconds: float) -> None:
        """Waits, within a job."""

    def close(self) -> None:
        """Starts nothing more; what still runs is left to its time-outs."""


class ThreadRunner:
    """On threads."""

    def __init__(self, calls: int, *, job: str, call: str) -> None:
        """Makes no thread before the first job.

        Args:
            calls: so many may run at the same time.
            job: what the thread of the jobs is called.
            call: what those of the calls are called.
        """
        self._jobs = ThreadPoolExecutor(1, thread_name_prefix=job)
        self._calls = ThreadPoolExecutor(calls, thread_name_prefix=call)

    def start(self, job: Callable[[], None]) -> None:
        """Runs a job, behind those that were started before."""
        self._jobs.submit(job)

    def together(self, calls: Iterable[Callable[[], _T]]) -> list[_T]:
        """Runs calls at the same time; returns when all have ended, their results in order."""
        return list(self._calls.map(lambda call: call(), calls))

    def pause(self, seconds: float) -> None:
        """Waits, within a job."""
        time.sleep(seconds)

    def close(self) -> None:
        """Starts nothing more; what still runs is left to its time-outs."""
        self._jobs.shutdown(wait=False, cancel_futures=True)
        self._calls.shutdown(wait=False, cancel_futures=True)
