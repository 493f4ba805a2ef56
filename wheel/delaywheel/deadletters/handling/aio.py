"""The consumer of letters whose handlers are coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from delaywheel.deadletters.handling.consumer import DeadLetterConsumer, given_handlers
from delaywheel.deadletters.handling.figures import LetterFigures
from delaywheel.deadletters.letter import Letter
from delaywheel.deadletters.settling import Decision
from delaywheel.functions import is_coroutine_function
from delaywheel.levels import Duration

if TYPE_CHECKING:
    from delaywheel.trace.reports import EventReports

AsyncLetterHandler: TypeAlias = Callable[[Letter], Awaitable[Decision | None]]


class AsyncDeadLetterConsumer:
    """`DeadLetterConsumer` for the coroutines of one loop: one after another, as there.

    Kafka is asked on a thread, so that the loop goes on meanwhile. The arguments are the same, but
    handlers are coroutine functions.
    """

    def __init__(
        self,
        topic: str,
        client: Mapping[str, Any],
        handlers: Mapping[str, AsyncLetterHandler],
        *,
        otherwise: AsyncLetterHandler | None = None,
        retry: tuple[Duration, ...] = ("1s", "10s", "1m"),
        takeover_after: Duration = "10s",
        trace: EventReports | None = None,
    ) -> None:
        for handle in given_handlers(handlers, otherwise):
            if not is_coroutine_function(handle):
                raise TypeError(f"{handle!r}: not a coroutine function; use DeadLetterConsumer")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._at_work: asyncio.Task[Decision | None] | None = None
        self._is_cancelled = False
        self._letters = DeadLetterConsumer(
            topic,
            client,
            {reason: self._on_loop(handle) for reason, handle in handlers.items()},
            otherwise=None if otherwise is None else self._on_loop(otherwise),
            retry=retry,
            takeover_after=takeover_after,
            trace=trace,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(asyncio.to_thread(self._letters.close))

    @property
    def topic(self) -> str:
        """The topic of letters."""
        return self._letters.topic

    @property
    def figures(self) -> LetterFigures:
        """This consumer in figures, all of one moment: for metrics."""
        return self._letters.figures

    def stop(self) -> None:
        """Ends `run` after the letter in hand. Signal handlers may call it."""
        self._letters.stop()

    async def run(self) -> None:
        """Handles letters until `stop`; if it is cancelled, so is the handler at work."""
        self._loop = asyncio.get_running_loop()
        running = asyncio.ensure_future(asyncio.to_thread(self._letters.run))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self.stop()
            self._is_cancelled = True
            if self._at_work is not None:
                self._at_work.cancel()
            await asyncio.wait([running])
            raise

    def _on_loop(self, handle: AsyncLetterHandler) -> Callable[[Letter], Decision | None]:
        async def decided(letter: Letter) -> Decision | None:
            # Who is at work is known on the loop alone: the thread that asks may hear of its task
            # only after that has begun, and was to be cancelled.
            if self._is_cancelled:
                raise asyncio.CancelledError
            self._at_work = asyncio.current_task()
            try:
                return await handle(letter)
            finally:
                self._at_work = None

        def ask(letter: Letter) -> Decision | None:
            assert self._loop is not None
            return asyncio.run_coroutine_threadsafe(decided(letter), self._loop).result()

        return ask
