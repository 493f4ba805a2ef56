"""Moments of a run at which a fault can be injected: between two consecutive steps.

Faults planned by the clock alone would hit them only by chance.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from enum import StrEnum

Act = Callable[[str], None]
"""Does something to a node."""


class Moment(StrEnum):
    """Moments of the ingress; each concerns a node."""

    ANNOUNCED = "announced"
    """The brokers have committed an announcement; its leader does not know yet."""
    HANDED = "handed"
    """Records have come to the server."""
    ANSWERED = "answered"
    """The server has answered; the cleaner does not know yet."""
    SETTLED = "settled"
    """The brokers have committed that an offset advances."""


class Moments:
    """The actions that wait for moments."""

    def __init__(self) -> None:
        self._waiting: defaultdict[Moment, deque[Act]] = defaultdict(deque)

    def wait_for(self, moment: Moment, act: Act) -> None:
        """Registers an action for the next time a moment occurs, unless one is registered."""
        self._waiting[moment].append(act)

    def happened(self, moment: Moment, node: str) -> None:
        """Runs one of the actions that wait for this moment."""
        if self._waiting[moment]:
            self._waiting[moment].popleft()(node)
