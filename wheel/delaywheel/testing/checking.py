"""A program's own half checker, answering letters of the service in memory."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Final

from delaywheel.consumer.book import Counts
from delaywheel.consumer.checking.checker import AsyncHalfChecker, HalfChecker
from delaywheel.consumer.checking.settings import checker_settings
from delaywheel.testing.consuming import MemoryConsumer
from delaywheel.testing.halves import CLUSTER
from delaywheel.transactional import Outgoing

if TYPE_CHECKING:
    from delaywheel.testing.service import MemoryService


class MemoryHalfChecker:
    """Has a program's checker answer what appeared in the topic of letters; ends where it is empty.

    A check that is UNKNOWN is made again when the test has moved the clock so far.
    """

    def __init__(self, service: MemoryService, checker: HalfChecker | AsyncHalfChecker) -> None:
        self._checker: Final = checker
        settings = checker_settings(checker.group, CLUSTER, CLUSTER, checker.options)
        self._consumer: Final = MemoryConsumer(service, settings)

    @property
    def counts(self) -> Counts:
        """The numbers of letters by outcome: `forwarded` are committed, `done` rolled back."""
        return self._consumer.counts

    @property
    def dead_letters(self) -> list[Outgoing]:
        """The letters that are UNDECIDED, as they would be in the group's topic for them."""
        return self._consumer.dead_letters

    def run(self) -> Awaitable[None] | None:
        """Checks what was not checked yet.

        Returns:
            What is to be awaited, if the checker is an `AsyncHalfChecker`. None: all were checked.
        """
        return self._consumer.run(self._checker._answer)  # noqa: SLF001 - as its `run` does
