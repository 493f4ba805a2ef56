"""The service in memory, as tests of clients see it."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from delaywheel.testing import MemoryService


class Arrived(NamedTuple):
    """A message in its topic, without what delaywheel adds."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


class World:
    """Where messages are sent and appear; time passes where a test waits."""

    topic = "orders"

    def __init__(self, service: MemoryService) -> None:
        self._service = service

    def now(self) -> datetime:
        """The time that dues count from."""
        return self._service.now

    def arrived(self, at_least: int) -> list[Arrived]:
        """What has appeared, once so many have."""
        for _ in range(600):
            found = self._service.delivered(self.topic)
            if len(found) >= at_least:
                break
            self._service.advance("100ms")
        return [Arrived(record.key, record.value, record.headers) for record in found]
