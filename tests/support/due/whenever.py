"""Loads in parallel with forwarding, at the moment that a test chooses."""

from collections.abc import Callable
from concurrent.futures import Future

from delaywheel_replica.cleaner.due.loading import Loaded


class Whenever:
    """An executor that does its work on request."""

    def __init__(self, *_: object) -> None:
        self._work: list[tuple[Future[Loaded], Callable[[], Loaded]]] = []

    def submit(
        self, work: Callable[..., Loaded], *arguments: object, **options: object
    ) -> Future[Loaded]:
        future: Future[Loaded] = Future()
        self._work.append((future, lambda: work(*arguments, **options)))
        return future

    def run(self) -> None:
        for future, work in self._work:
            future.set_result(work())
        self._work.clear()

    def is_idle(self) -> bool:
        return not self._work

    def shutdown(self, **_: object) -> None:
        self._work.clear()
