"""A program's own half checker, answering letters of the service in memory."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Final

from delaywheel.consumer.book import Counts
from delaywheel.consumer.checking.checker import AsyncHalfChecker, HalfChecker
from delaywheel.consumer.checking.settings import checker_settings
from delaywheel.testing.engine import MemoryEngine
from delaywheel.testing.halves import CLUSTER
from delaywheel.transactional import Outgoing

if TYPE_CHECKING:
    from delaywheel.testing.service import MemoryService


class MemoryHalfChecker:
    """Has a program's checker answer what appeared in the topic of letters; ends where it is empty.

    A check that is UNKNOWN is made again when the test has moved the clock so far.
    """

    def __init__(self, service: MemoryService, checker: HalfChecker | AsyncHalfChecker) -> None:
        settings = checker_settings(checker.group, CLUSTER, CLUSTER, checker.options)
        self._engine: Final = MemoryEngine(service, settings)
        self._checker: Final = checker
        # It was made for an address and a cluster that are not used.
        checker._engine = self._engine  # noqa: SLF001
        if isinstance(checker, AsyncHalfChecker):
            self._engine.listen(checker._ready.set)  # noqa: SLF001

    @property
    def counts(self) -> Counts:
        """The numbers of letters by outcome: `forwarded` are committed, `done` rolled back."""
        return self._engine.counts

    @property
    def dead_letters(self) -> list[Outgoing]:
        """The letters that are UNDECIDED, as they would be in the group's topic for them."""
        return self._engine.written(dead=True)

    def run(self) -> Awaitable[None] | None:
        """Checks what was not checked yet.

        An `AsyncHalfChecker` does so when the result is awaited.
        """
        return self._checker.run()
