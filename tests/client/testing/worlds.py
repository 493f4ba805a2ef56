"""One interface to a real node with Kafka and to the service in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

from delaywheel.testing import MemoryService
from support.kafka.read_committed import CommittedReader, headers_of

PATIENCE_S = 60.0


class Arrived(NamedTuple):
    """A message in its topic, without what delaywheel adds."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


class World(Protocol):
    """Where messages are sent and appear."""

    topic: str

    def now(self) -> datetime:
        """The time that dues count from."""
        ...

    def arrived(self, at_least: int) -> list[Arrived]:
        """What has appeared, once so many have: time passes meanwhile, a minute at most."""
        ...


class RealWorld:
    """A node and a broker; time passes by itself."""

    def __init__(self, reader: CommittedReader, topic: str) -> None:
        self.topic = topic
        self._reader = reader

    def now(self) -> datetime:
        return datetime.now(UTC)

    def arrived(self, at_least: int) -> list[Arrived]:
        if at_least:
            self._reader.wait_for(at_least)
        return [
            Arrived(
                message.key(),
                message.value(),
                tuple(pair for pair in headers_of(message) if not pair[0].startswith("dw-")),
            )
            for message in self._reader.read_to_end()
        ]


class MemoryWorld:
    """The service in memory; time passes where a test waits."""

    def __init__(self, service: MemoryService) -> None:
        self.topic = "orders"
        self._service = service

    def now(self) -> datetime:
        return self._service.now

    def arrived(self, at_least: int) -> list[Arrived]:
        for _ in range(600):
            found = self._service.delivered(self.topic)
            if len(found) >= at_least:
                break
            self._service.advance("100ms")
        return [Arrived(record.key, record.value, record.headers) for record in found]


def repeated_until(wanted: Callable[[Any], bool], ask: Callable[[], Any]) -> Any:
    """Asks until the answer is one that a real node gives a moment later than one in memory."""
    deadline = time.monotonic() + PATIENCE_S
    while not wanted(answer := ask()):
        assert time.monotonic() < deadline, answer
        time.sleep(0.05)
    return answer
