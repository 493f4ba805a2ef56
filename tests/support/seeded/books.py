"""The expected books of a run, written down while it is played.

Nothing here looks at the service, its ledger or Kafka: what was done to each message is entered
by hand, as its sender and the one who broke things know it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

INTERVAL_MS = 1_000


@dataclass(frozen=True, slots=True)
class Sent:
    """A message that was acknowledged.

    Attributes:
        topic: where to.
        id: of it.
        due_ms: of it.
        wheel: that took it.
    """

    topic: str
    id: bytes
    due_ms: int
    wheel: str

    @property
    def handle(self) -> str:
        """The handle, as the service gave it."""
        return f"{self.wheel}:{self.due_ms // 1000}:{self.id.hex()}:{self.topic}"


class Found(NamedTuple):
    """A finding that must be there."""

    kind: str
    topic: str
    id: str


class Expected:
    """Counts per topic and bucket, and findings.

    Attributes:
        buckets: by topic and the begin of the bucket: how often each column counts.
        findings: that must be there, and no other.
    """

    def __init__(self) -> None:
        """Nothing was sent."""
        self.buckets: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)
        self.findings: set[Found] = set()

    def count(self, message: Sent, **columns: int) -> None:
        """Enters what became of a message."""
        bucket_ms = message.due_ms - message.due_ms % INTERVAL_MS
        self.buckets[message.topic, bucket_ms].update(columns)

    def accepted(self, message: Sent, outcome: str) -> None:
        """Enters a message that was accepted once, and had this outcome."""
        self.count(message, accepted=1, acknowledged=1, **{outcome: 1})

    def find(self, kind: str, message: Sent) -> None:
        """Enters a finding."""
        self.findings.add(Found(kind, message.topic, message.id.hex()))

    def total(self, topic: str, column: str) -> int:
        """A column of one topic, over all buckets."""
        return sum(counts[column] for (name, _), counts in self.buckets.items() if name == topic)

    def of(self, topic: str) -> dict[int, dict[str, int]]:
        """The buckets of a topic, without columns that are zero."""
        return {
            bucket_ms: {column: count for column, count in counts.items() if count}
            for (name, bucket_ms), counts in self.buckets.items()
            if name == topic
        }
