"""The jobs that senders do, and their results.

Each message of a job has a stamp: its due or, where Kafka sends at once, the time of sending (see
`consuming`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from local.bench.consuming import STAMP, topic_names
from local.bench.workloads import Accept, Senders, Topics

VALUE_BYTES: Final = 200
TICK_S: Final = 0.01
TIMEOUT_S: Final = 60.0
_FILLER: Final = random.Random(1).randbytes(VALUE_BYTES - STAMP.size)  # noqa: S311 - no secret


@dataclass(frozen=True, slots=True)
class Paced:
    """A job: messages at a rate, due `ahead_ms` later.

    Attributes:
        rate_per_s: Of all programs that do it at the same time.
        seconds: How long it lasts.
        ahead_ms: Between which times ahead the dues are.
        topics: Where messages go.
        senders: Who sends them.
    """

    rate_per_s: int
    seconds: float
    ahead_ms: tuple[int, int]
    topics: Topics = Topics()  # noqa: RUF009 - frozen
    senders: Senders = Senders()  # noqa: RUF009 - frozen

    @property
    def program_per_s(self) -> float:
        """The rate of one program."""
        return self.rate_per_s / self.senders.programs

    @property
    def lead_s(self) -> float:
        """Returns seconds until as many messages are due as are sent; 0 if never."""
        return self.ahead_ms[1] / 1000 if self.seconds > self.ahead_ms[1] / 1000 else 0.0


@dataclass(frozen=True, slots=True)
class At:
    """A job: messages due in the second that begins at `from_ms`."""

    messages: int
    from_ms: int


@dataclass(frozen=True, slots=True)
class Bulk:
    """A job: as many messages as are accepted in a time."""

    how: Accept
    seconds: float


Job = Paced | At | Bulk


class Targets:
    """Chooses where each message of a job goes."""

    def __init__(self, family: str, topics: Topics) -> None:
        """Prepares for a family of topics."""
        self._names = topic_names(family, topics.count)
        self._keyed = topics.keyed
        self._chance = random.Random(4)  # noqa: S311 - no secret

    def next(self) -> tuple[str, bytes | None]:
        """Returns a topic and a key."""
        topic = self._names[0] if len(self._names) == 1 else self._chance.choice(self._names)
        return topic, self._chance.randbytes(8) if self._keyed else None


@dataclass(frozen=True, slots=True)
class Sent:
    """The result of a job in which every message was acknowledged.

    Attributes:
        messages: The number of messages.
        seconds: How long sending took; it includes the last acknowledgement only for `Bulk`.
        transactions: The number of committed transactions.
        cancelled: How many of the messages were cancelled, and never arrive.
    """

    messages: int
    seconds: float
    transactions: int = 0
    cancelled: int = 0

    @property
    def per_s(self) -> float:
        """The rate in messages a second."""
        return self.messages / self.seconds

    @classmethod
    def of_all(cls, parts: Sequence[Sent]) -> Sent:
        """Returns what several programs sent at the same time."""
        return cls(
            sum(each.messages for each in parts),
            max(each.seconds for each in parts),
            sum(each.transactions for each in parts),
            sum(each.cancelled for each in parts),
        )


def paced(rate_per_s: float, seconds: float) -> Iterator[int]:
    """Yields how many messages to send at each tick, to keep the rate."""
    started_at = time.monotonic()
    sent, total = 0, int(rate_per_s * seconds)
    while sent < total:
        due = min(int((time.monotonic() - started_at) * rate_per_s), total)
        if due > sent:
            yield due - sent
            sent = due
        time.sleep(TICK_S)


def value_of(stamp_us: int) -> bytes:
    """Returns a value that contains its stamp."""
    return STAMP.pack(stamp_us) + _FILLER
