"""The engine of a consumer in memory: the real one, without its thread.

Whoever asks it for anything makes its steps, until nothing more happens by itself. So what a
handler's outcome leads to has happened when a test looks, and loops end where they would wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from delaywheel.consumer.book import Counts
from delaywheel.consumer.engine import Engine
from delaywheel.consumer.engine.handler_threads import HandlerThreads
from delaywheel.consumer.engine.state import EngineState
from delaywheel.consumer.records import Partition
from delaywheel.consumer.settings import ConsumerSettings
from delaywheel.consumer.watching.figures import Figures
from delaywheel.consumer.watching.health import ConsumerHealth
from delaywheel.testing.kafka import MemoryBroker
from delaywheel.transactional import Outgoing

if TYPE_CHECKING:
    from delaywheel.testing.service import MemoryService


class MemoryState(EngineState):
    """`EngineState` of an engine that has also ended, for now, while it has nothing to hand out."""

    engine: MemoryEngine | None = None
    is_closed = False

    @property
    def has_ended(self) -> bool:
        """See `EngineState`."""
        return self.is_closed or (self.engine is not None and not self.engine.has_more())

    @has_ended.setter
    def has_ended(self, has_ended: bool) -> None:
        self.is_closed = has_ended


class MemoryEngine(Engine):
    """`Engine` in memory; it joins its group when it is first asked for something."""

    def __init__(self, service: MemoryService, settings: ConsumerSettings) -> None:
        # Nobody can settle anything while it makes a step.
        settings = replace(settings, commit_every_ms=0, drain_ms=0)
        self.broker = MemoryBroker(service, settings)
        self._memory = MemoryState(
            settings,
            self.broker,
            clock_ns=service.clock_ns,
            clock_s=lambda: service.now_ms / 1000,
        )
        super().__init__(self._memory)
        self._service = service
        self.has_begun = False
        self._memory.engine = self
        service.engines.append(self)

    @property
    def is_over(self) -> bool:
        """Whether a `with` block was left, or `stop` called: it hands out nothing any more."""
        return self._state.is_stopping or self._memory.is_closed

    def again(self) -> MemoryEngine:
        """Ends; returns one in its place, as of a program that was started again."""
        self.join_quietly()
        self._service.engines.remove(self)
        made = MemoryEngine(self._service, self._state.settings)
        made.broker.written.extend(self.broker.written)
        return made

    def start(self) -> None:
        """Does nothing: it runs when it is asked for something."""

    def has_more(self) -> bool:
        """Lets happen what happens by itself; returns whether there is a record to handle."""
        with self._changed:
            self.run_on()
            self._state.raise_error()
            return self.desk.has_some

    def run_on(self) -> None:
        """Lets happen what happens by itself."""
        with self._changed:
            if not (self._state.is_own_thread or self._state.is_stopping or self._memory.is_closed):
                self._as_its_thread(self._run_until_still)

    def check_runs(self) -> None:
        """Wakes who is about to wait: there is something, or they would not wait."""
        self._state.check_may_wait("messages cannot be waited for")
        with self._changed:
            self._state.notify()

    def run_handlers(self, handlers: HandlerThreads, concurrency: int) -> None:
        """See `Engine`: one alone is the caller's thread, as a test's database may be of it."""
        if concurrency == 1:
            handlers.run_here()
        else:
            handlers.run()

    def join_quietly(self) -> None:
        """Ends, as the thread would."""
        with self._changed:
            if self.has_begun and not self._memory.is_closed:
                self._as_its_thread(self._end)
                self._close()

    def written(self, *, dead: bool) -> list[Outgoing]:
        """Returns the dead letters, or else what handlers have written, in that order."""
        self.run_on()
        topics = list(self._state.settings.topics)
        letters, own = {one.dead for one in topics}, {name for one in topics for name in one.own}
        written = self.broker.written
        return [one for one in written if (one.topic in letters if dead else one.topic not in own)]

    def _as_its_thread(self, call: Callable[[], None]) -> None:
        self._state.thread_id = threading.get_ident()
        with self._noting_errors():
            call()
        self._state.thread_id = None
        if self._state.error is not None and not self._memory.is_closed:
            self._close()

    def _run_until_still(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._begin()
        events = -1
        while events != self.broker.events or self._book.has_ended_records or self._seeks:
            events = self.broker.events
            self._look()
            self.broker.rebalance()
            self._run_once()

    @property
    def counts(self) -> Counts:
        """See `Engine`."""
        self.run_on()
        return super().counts

    @property
    def health(self) -> ConsumerHealth:
        """See `Engine`."""
        self.run_on()
        return super().health

    @property
    def partitions(self) -> list[Partition]:
        """See `Engine`."""
        self.run_on()
        return super().partitions

    def figures(self) -> Figures:
        """See `Engine`."""
        self.run_on()
        return super().figures()
