"""Handlers of dead letters in memory: a `DeadLetterConsumer` of what a `MemoryConsumer` gave up.

| decided | then |
|---|---|
| `Replay` | the record appears in its topic at once, as it would be sent to Kafka |
| `Drop` | the letter is dealt with |
| `Keep`, None, no handler | it waits, and is not asked about again |
| the handler raises, `attempts` times | the same; the delays between them pass at once |
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Self

from delaywheel.client.exchange.settings import check_trace
from delaywheel.client.transport.port import finished
from delaywheel.deadletters.handling.aio import AsyncLetterHandler
from delaywheel.deadletters.handling.consumer import (
    LetterHandler,
    checked_decision,
    given_handlers,
)
from delaywheel.deadletters.letter import Letter, LetterPlace
from delaywheel.deadletters.settling import KEEP, Decision, Drop, Replay
from delaywheel.deadletters.tracing import DecidedLetter, DecidedLetters
from delaywheel.functions import check_plain, is_coroutine_function
from delaywheel.testing.consuming import MemoryConsumer
from delaywheel.transactional import Outgoing

if TYPE_CHECKING:
    from delaywheel.testing.service import MemoryService
    from delaywheel.trace.reports import EventReports

_LOG: Final = logging.getLogger("delaywheel.deadletters")


class MemoryDeadLetterConsumer:
    """Gives the letters of one consumer to handlers; ends where a real one would wait."""

    def __init__(
        self,
        service: MemoryService,
        consumer: MemoryConsumer,
        handlers: Mapping[str, LetterHandler | AsyncLetterHandler],
        *,
        otherwise: LetterHandler | AsyncLetterHandler | None,
        attempts: int,
        trace: EventReports | None,
    ) -> None:
        check_trace(trace)
        given = given_handlers(handlers, otherwise)
        self._is_awaited = any(map(is_coroutine_function, given))
        for handle in given:
            if not self._is_awaited:
                check_plain("handler", handle)
            elif not is_coroutine_function(handle):
                raise TypeError(f"{handle!r}: not a coroutine function, and others are")
        self._service = service
        self._consumer = consumer
        self._handlers = dict(handlers)
        self._otherwise = otherwise
        self._attempts = attempts
        self._trace = trace
        self._next = 0
        self.decided: Final[list[tuple[Letter, Decision]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Has nothing to end."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Has nothing to end."""

    def run(self) -> Awaitable[None] | None:
        """Handles the letters that there are and were not handled.

        Coroutine functions do so when the result is awaited.
        """
        running = self._run()
        if self._is_awaited:
            return running
        finished(running)
        return None

    async def _run(self) -> None:
        for letter, of_topic in self._letters():
            handle: Callable[[Letter], Any] | None = self._handlers.get(
                letter.reason, self._otherwise
            )
            if handle is None:
                self._decide(letter, of_topic, KEEP, None)
                continue
            began_s = monotonic()
            for _ in range(self._attempts):
                try:
                    decision = await handle(letter) if self._is_awaited else handle(letter)
                except Exception:  # noqa: BLE001 - it is the program's
                    _LOG.warning("the handler of %s failed", letter.place, exc_info=True)
                else:
                    decided = checked_decision(handle, decision)
                    self._decide(letter, of_topic, decided, monotonic() - began_s)
                    break
            else:
                self._tell(letter, of_topic, "kept", monotonic() - began_s)

    def _letters(self) -> Iterator[tuple[Letter, str]]:
        letters = self._consumer.dead_letters
        while self._next < len(letters):
            self._next += 1
            record = letters[self._next - 1]
            yield self._letter(self._next - 1, record), record.topic

    def _letter(self, offset: int, record: Outgoing) -> Letter:
        place, now_ms = LetterPlace(0, offset), self._service.now_ms
        letter = Letter(place, now_ms, record.key, record.value, tuple(record.headers))
        origin = letter.origin
        if not letter.omitted or origin is None:
            return letter
        for found in self._service.delivered(origin.topic):
            if (found.partition or 0, found.offset) == (origin.partition, origin.offset):
                its = Outgoing(found.topic, found.key, found.value, list(found.headers))
                return letter.completed(its)
        return letter

    def _decide(
        self, letter: Letter, of_topic: str, decision: Decision, took_s: float | None
    ) -> None:
        became = "dropped" if isinstance(decision, Drop) else "kept"
        if isinstance(decision, Replay):
            became = "replayed"
            is_traced = self._trace is not None
            record = letter.again(
                of_topic, to=decision.to, as_new=decision.as_new, is_traced=is_traced
            )
            self._service.write(record)
        self._tell(letter, of_topic, became, took_s)
        self.decided.append((letter, decision))

    def _tell(self, letter: Letter, of_topic: str, became: str, took_s: float | None) -> None:
        if self._trace is not None:
            decided = [DecidedLetter(letter, became, "", took_s)]
            self._trace.processed(DecidedLetters(of_topic, decided))
