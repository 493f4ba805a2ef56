"""A program's own half checker, answering letters of the service in memory."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

from delaywheel.consumer.book import Counts
from delaywheel.consumer.checking.checker import AsyncHalfChecker, HalfChecker, answer
from delaywheel.consumer.checking.letters import half_of
from delaywheel.consumer.checking.settings import checker_settings
from delaywheel.consumer.message import ReceivedMessage
from delaywheel.consumer.records import Outgoing
from delaywheel.ingress import ingress_topic
from delaywheel.testing.consuming import MemoryConsumer, Source
from delaywheel.testing.halves import CLUSTER

_INGRESS: Final = ingress_topic(CLUSTER)


class MemoryHalfChecker:
    """Has a program's checker answer what appeared in the topic of letters; ends where it is empty.

    A check that is UNKNOWN is made again when the test has moved the clock so far.
    """

    def __init__(self, source: Source, checker: HalfChecker | AsyncHalfChecker) -> None:
        self._checker: Final = checker
        settings = checker_settings(checker.group, CLUSTER, CLUSTER, checker.options)
        self._consumer: Final = MemoryConsumer(source, settings)

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
        checker = self._checker
        if isinstance(checker, AsyncHalfChecker):

            async def check_awaited(letter: ReceivedMessage) -> None:
                answer(letter, await checker.check(half_of(letter)), _INGRESS)

            return self._consumer.run(check_awaited)

        def check(letter: ReceivedMessage) -> None:
            answer(letter, checker.check(half_of(letter)), _INGRESS)

        self._consumer.run(check)
        return None
