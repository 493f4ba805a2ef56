"""Handlers on several threads; `rules/turns.py` says which records they handle at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from delaywheel.consumer.engine.dispatcher import Dispatcher
from delaywheel.consumer.message import ReceivedMessage

WAIT_S = 0.5
"""What a signal handler asks for is noticed this soon.

Python runs it on the main thread, and the signal may have reached another one, which does not wake
the main thread: it never waits longer than this.
"""


class HandlerThreads:
    """Threads that handle what one consumer hands out."""

    def __init__(
        self,
        handle: Callable[[ReceivedMessage], object],
        concurrency: int,
        take: Callable[[], list[ReceivedMessage]],
        desk: Dispatcher,
    ) -> None:
        """Starts nothing yet; `take` waits a moment for messages whose turn it is."""
        if concurrency < 1:
            raise ValueError(f"concurrency={concurrency}: at least 1")
        self._handle = handle
        self._take = take
        self._desk = desk
        self._is_over = False
        self._raised: SimpleQueue[BaseException] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"handler-{n}", daemon=True)
            for n in range(concurrency)
        ]

    def run(self) -> None:
        """Handles what can be taken until the end; raises what means neither retry nor dead."""
        try:
            for thread in self._threads:
                thread.start()
            for thread in self._threads:
                while thread.is_alive():
                    thread.join(WAIT_S)
        finally:
            self._is_over = True  # what comes here may be of a signal
            for thread in self._threads:
                thread.join()
            self._desk.end_parking()
        self._raise()

    def run_here(self) -> None:
        """Handles on the caller's thread what can be taken until the end; raises as `run`."""
        self._work()
        self._desk.end_parking()
        self._raise()

    def _raise(self) -> None:
        if not self._raised.empty():
            raise self._raised.get()

    def _work(self) -> None:
        try:
            while not (self._is_over or self._desk.has_ended):
                for message in self._take():
                    self._handle_one(message)
        except BaseException as error:  # noqa: BLE001 - it is raised where the caller waits
            self._is_over = True
            self._raised.put(error)

    def _handle_one(self, message: ReceivedMessage) -> None:
        try:
            with message:
                self._handle(message)
        finally:
            self._desk.end_turn(message)
