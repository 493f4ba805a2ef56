"""Letters about half messages, as docs/PROTOCOL.md has them."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

from delaywheel.consumer.records import RecordHeaders


@dataclass
class SentHalf:
    """A half as its sender made it."""

    topic: str
    value: bytes = b"cancel it"
    key: bytes | None = b"42"
    own: RecordHeaders = field(default_factory=list)
    group: str = "g"
    delay_ms: int = 0
    partition: int | None = None
    timestamp_ms: int | None = None
    id: bytes = field(default_factory=lambda: uuid.uuid4().bytes)
    due_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)

    @property
    def deliver_at_ms(self) -> int:
        return self.due_ms + 1 + self.delay_ms

    def letter_headers(self) -> RecordHeaders:
        """Returns the headers of the letter that asks about it."""
        headers: RecordHeaders = [
            *self.own,
            ("dw-id", self.id.hex().encode()),
            ("dw-due", b"%d" % self.due_ms),
            ("dw-accepted", b"%d" % (self.due_ms - 3_000)),
            ("dw-wheel", b"n1-1"),
            ("dw-half", self.group.encode()),
            ("dw-half-topic", self.topic.encode()),
            ("dw-half-deliver-at", b"%d" % self.deliver_at_ms),
        ]
        if self.partition is not None:
            headers.append(("dw-half-partition", b"%d" % self.partition))
        if self.timestamp_ms is not None:
            headers.append(("dw-half-timestamp", b"%d" % self.timestamp_ms))
        return headers
