"""Moments of a run at which something can be done: between two steps that follow at once.

What is planned by the clock alone meets them by luck.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from enum import StrEnum

Act = Callable[[str], None]
"""Does something to a node."""


class Moment(StrEnum):
    """Of the ingress; each has a node to which it happens."""

    ANNOUNCED = "announced"
    """The brokers have committed an announcement; its leader has not heard of it yet."""
    HANDED = "handed"
    """Records have come to the server."""
    ANSWERED = "answered"
    """The server has answered; the cleaner has not heard it yet."""
    SETTLED = "settled"
    """The brokers have committed that an offset moves."""


class Moments:
    """Who waits for what."""

    def __init__(self) -> None:
        self._waiting: defaultdict[Moment, deque[Act]] = defaultdict(deque)

    def wait_for(self, moment: Moment, act: Act) -> None:
        """Does something when this happens next, and nobody waited for it before."""
        self._waiting[moment].append(act)

    def happened(self, moment: Moment, node: str) -> None:
        """It did; one of those who wait acts."""
        if self._waiting[moment]:
            self._waiting[moment].popleft()(node)
