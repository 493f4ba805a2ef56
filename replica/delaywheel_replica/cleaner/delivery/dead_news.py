"""Reports dead letters to the server, in small messages, as the link has room.

What waits is bounded: beyond that, the oldest are never reported. The server notices by the counts,
and treats what was done meanwhile as unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from delaywheel_replica.link import LETTERS_AT_MOST, DeadLetter, DeadLettered

UNREPORTED_AT_MOST = 20_000
"""Two transactions of nothing but dead letters."""


class DeadNews:
    """Dead letters that were not reported to the server yet."""

    def __init__(self, send: Callable[[DeadLettered], bool], *, cleaner_ms: int) -> None:
        """Begins with nothing to report.

        Args:
            send: Sends to the server; False: the link is full.
            cleaner_ms: When this process started, as its row says.
        """
        self._send = send
        self._cleaner_ms = cleaner_ms
        self._before = 0
        self._unreported: list[DeadLetter] = []

    def add(self, letters: Iterable[DeadLetter]) -> None:
        """Adds committed dead letters."""
        self._unreported.extend(letters)
        self._drop(len(self._unreported) - UNREPORTED_AT_MOST)

    def report(self) -> None:
        """Reports as many as the link accepts."""
        while self._unreported:
            letters = tuple(islice(self._unreported, LETTERS_AT_MOST))
            if not self._send(DeadLettered(self._cleaner_ms, self._before, letters)):
                return
            self._drop(len(letters))

    def _drop(self, count: int) -> None:
        if count > 0:
            del self._unreported[:count]
            self._before += count
