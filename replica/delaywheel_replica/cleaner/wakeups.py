"""What wakes the cleaner's main thread: other threads, and the server.

| what has come | the main thread runs |
|---|---|
| another thread has called `wake` | at once |
| a request of the server, or its answer to a hand-over | at once |
| the server's notice of a new status, and nothing else | at once, or as soon as a transaction may |
|   | begin |

Under load there are as many new statuses as transactions, and each would cost an iteration that
can do nothing.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable

from delaywheel_replica.cleaner.outside.clocks import Clock
from delaywheel_replica.link import Link, LinkMessage, Wake


class Wakeups:
    """Waits for wake-ups. For the main thread only; `wake` may be called on any thread."""

    def __init__(self, link: Link, take: Callable[[LinkMessage], object], clock: Clock) -> None:
        self._link = link
        self._take = take
        self._clock = clock
        self._called = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._answers: int | None = None
        self._poller = select.poll()
        self._poller.register(link.fileno(), select.POLLIN)
        self._poller.register(self._called, select.POLLIN)

    def wake(self) -> None:
        """Wakes the main thread; for any thread."""
        os.eventfd_write(self._called, 1)

    def watch(self, answers: int | None) -> None:
        """Sets the socket on which the server answers hand-overs; None: there is none."""
        if answers == self._answers:
            return
        if self._answers is not None:
            self._poller.unregister(self._answers)
        if answers is not None:
            self._poller.register(answers, select.POLLIN)
        self._answers = answers

    def wait(self, wait_s: float, pause_s: float) -> None:
        """Waits until it is time to run, `wait_s` at most, and takes the messages that have come.

        For `pause_s` no transaction may begin. EOFError: the server is gone.
        """
        now_s = self._clock.monotonic()
        until_s, paused_until_s = now_s + wait_s, now_s + pause_s
        # Rounded up: a message must not be taken before it is due.
        while self._poller.poll(max(0, int((until_s - now_s) * 1000 + 0.999))):
            is_news = self._receive()
            now_s = self._clock.monotonic()
            if is_news or now_s >= paused_until_s:
                return
            until_s = min(until_s, paused_until_s)

    def close(self) -> None:
        """Closes what it has opened."""
        os.close(self._called)

    def _receive(self) -> bool:
        """Takes what has come; returns whether it is more than notice of a new status."""
        is_news, messages = False, 0
        for message in self._link.receive():
            messages += 1
            is_news = is_news or not isinstance(message, Wake)
            self._take(message)
        try:
            os.eventfd_read(self._called)
        except BlockingIOError:
            return is_news or not messages  # without any, the server has answered a hand-over
        return True
