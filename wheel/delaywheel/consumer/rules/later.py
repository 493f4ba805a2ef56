"""Records that handlers have put back for later. No clock, no lock."""

from __future__ import annotations

import heapq
from itertools import count

from delaywheel.consumer.message import ReceivedMessage, State


class Later:
    """What waits for its time, here and not in Kafka."""

    def __init__(self) -> None:
        """Begins empty."""
        self._heap: list[tuple[float, int, ReceivedMessage, ReceivedMessage]] = []
        self._again: dict[ReceivedMessage, ReceivedMessage] = {}
        self._numbers = count()

    def add(self, message: ReceivedMessage, again: ReceivedMessage, due: float) -> None:
        """Takes in a record that was put back, as it was and as it will be, and when."""
        heapq.heappush(self._heap, (due, next(self._numbers), message, again))
        self._again[message] = again

    def turn_of(self, message: ReceivedMessage) -> ReceivedMessage | None:
        """Returns what comes later in place of this one, if it is still to come."""
        again = self._again.get(message)
        return again if again is not None and again.state is State.WAITING else None

    def is_due(self, now: float) -> bool:
        """Whether anything is due."""
        return bool(self._heap) and self._heap[0][0] <= now

    def take_due(self, now: float) -> list[ReceivedMessage]:
        """Returns what is due and still waits; the rest of it is no longer ours."""
        found: list[ReceivedMessage] = []
        while self.is_due(now):
            _, _, message, again = heapq.heappop(self._heap)
            del self._again[message]
            if again.state is State.WAITING:
                found.append(again)
        return sorted(found, key=lambda one: one.place)
