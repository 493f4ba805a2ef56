"""Accounts for the demo: what was accepted against what a consumer received.

Every accepted message must arrive once, not before its due, with the same bytes. What was
refused, or whose outcome is unknown, may arrive once or not at all; it is counted apart.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from delaywheel.record_headers import FIRST_DUE, OF_DEFERRAL
from local.stage.gaps import longest_gap
from local.stage.observer import Record

OWN_HEADERS = ("dw-id", "dw-due", "dw-accepted", "dw-wheel")

Header = tuple[str, bytes | None]


class Content(NamedTuple):
    """The parts of a message that must arrive unchanged."""

    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]


_CANCELLED: Final = "CANCELLED"
UNKNOWN: Final = "UNKNOWN"
"""The outcome of a cancel whose call failed: the message may come, or not."""
NOT_CANCELLED: Final = "NOT_CANCELLED"
"""The call failed, and its error says that it had no effect: the message must come."""
_NUMBERS: Final = re.compile(r"\d[\d,.]*")


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of times in milliseconds; all zero if there are none."""

    messages: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, times_ms: Sequence[float]) -> Spread:
        """Summarises single values."""
        if not times_ms:
            return cls(0, 0.0, 0.0, 0.0)
        p50, p99, most = np.percentile(np.asarray(times_ms), (50, 99, 100)).tolist()
        return cls(len(times_ms), p50, p99, most)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a run.

    Attributes:
        accepted: Messages acknowledged.
        not_accepted: Messages refused, or with an unknown outcome.
        delivered: Acknowledged messages that arrived at least once.
        lost: Acknowledged messages that did not arrive.
        duplicated: Copies beyond the first, of any message.
        early: Records visible before their due.
        altered: Acknowledged messages that arrived with other bytes.
        strangers: Records that no caller sent.
        cancels: How many cancels had each outcome; UNKNOWN: the call failed, and may have had an
            effect; NOT_CANCELLED: it had none.
        cancels_failed: What the errors of cancels said, with N for each number, and how often.
        cancels_resolved: How many were unknown, and had their outcome once they were asked again.
        cancelled_delivered: Messages that arrived although their cancel was answered CANCELLED.
        acks: From handing a message to the SDK to its acknowledgement.
        in_health: Lateness apart from the disturbance.
        across_kill: Lateness of what the disturbance touched; absent without one.
        silence_ms: The longest time after the kill in which nothing arrived; absent without one.
    """

    accepted: int
    not_accepted: int
    delivered: int
    lost: int
    duplicated: int
    early: int
    altered: int
    strangers: int
    acks: Spread
    in_health: Spread
    across_kill: Spread | None
    silence_ms: float | None
    cancels: Mapping[str, int] = field(default_factory=dict)
    cancels_failed: Mapping[str, int] = field(default_factory=dict)
    cancels_resolved: int = 0
    cancelled_delivered: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether every promise was kept, and everything was accepted."""
        faults = (self.lost, self.duplicated, self.early, self.altered, self.strangers)
        others = (self.not_accepted, self.cancelled_delivered)
        return self.accepted > 0 and not any((*faults, *others))


class Asked(NamedTuple):
    """What the sender requested."""

    due_ms: int
    content: Content
    at_s: float


class Tally:
    """Collects both sides; `verdict` compares them.

    Spread counts from the due that was asked for: while the node is away the SDK holds back
    messages, and may move a due that is past by then.
    """

    def __init__(self) -> None:
        self._sent: dict[bytes, Asked] = {}
        self._accepted: dict[bytes, int] = {}
        self._cancels: dict[bytes, str] = {}
        self._cancels_failed: Counter[str] = Counter()
        self._resolved = 0
        self._acks_ms: list[float] = []
        self._not_accepted = 0

    @property
    def accepted(self) -> int:
        """The number of messages acknowledged so far."""
        return len(self._accepted)

    @property
    def cancelled(self) -> int:
        """The number of messages that never arrive, by the answers to their cancels."""
        return sum(outcome == _CANCELLED for outcome in list(self._cancels.values()))

    @property
    def not_accepted(self) -> int:
        """The number of messages refused or given up so far."""
        return self._not_accepted

    @property
    def is_settled(self) -> bool:
        """Whether the outcome of every sent message is known."""
        return self.accepted + self._not_accepted == len(self._sent)

    def sent(self, message_id: bytes, due_ms: int, content: Content) -> None:
        """Notes a message that is sent."""
        self._sent[message_id] = Asked(due_ms, content, time.monotonic())

    def acknowledged(self, message_id: bytes, due_ms: int) -> None:
        """Notes an acknowledgement, and its due."""
        self._acks_ms.append((time.monotonic() - self._sent[message_id].at_s) * 1000)
        self._accepted[message_id] = due_ms

    def not_acknowledged(self) -> None:
        """Notes a message that was refused or given up."""
        self._not_accepted += 1

    def answered(self, message_id: bytes, outcome: str, error: str = "") -> None:
        """Notes the answer to a cancel, or what its error says."""
        self._resolved += self._cancels.get(message_id) == UNKNOWN
        self._cancels[message_id] = outcome
        if error:
            self._cancels_failed[_NUMBERS.sub("N", error)] += 1

    def lateness_ms(self, record: Record) -> float:
        """Returns the time from the requested due until the consumer had the message."""
        return record.received_ms - self._due_ms(record)

    def verdict(self, records: Sequence[Record], *, killed_at_ms: float | None = None) -> Verdict:
        """Compares what was accepted with what arrived."""
        copies = Counter(map(id_of, records))
        silence_ms, back_ms = _silence(records, killed_at_ms)
        health, across = self._split(records, killed_at_ms, back_ms)
        return Verdict(
            accepted=len(self._accepted),
            not_accepted=self._not_accepted,
            delivered=sum(message_id in copies for message_id in self._accepted),
            lost=sum(
                message_id not in copies
                for message_id in self._accepted
                if self._cancels.get(message_id) not in {_CANCELLED, UNKNOWN}
            ),
            duplicated=sum(count - 1 for count in copies.values()),
            early=sum(self.lateness_ms(record) < 0 for record in records),
            altered=sum(map(self._is_altered, records)),
            strangers=sum(message_id not in self._sent for message_id in copies),
            acks=Spread.of(self._acks_ms),
            in_health=Spread.of(health),
            across_kill=Spread.of(across) if killed_at_ms is not None else None,
            silence_ms=silence_ms if killed_at_ms is not None else None,
            cancels=dict(Counter(self._cancels.values())),
            cancels_failed=dict(self._cancels_failed.most_common(5)),
            cancels_resolved=self._resolved,
            cancelled_delivered=sum(
                outcome == _CANCELLED and message_id in copies
                for message_id, outcome in self._cancels.items()
            ),
        )

    def _due_ms(self, record: Record) -> int:
        asked = self._sent.get(id_of(record))
        return due_of(record) if asked is None else asked.due_ms

    def _is_altered(self, record: Record) -> bool:
        """Whether one of our messages has other bytes, or another due than acknowledged."""
        message_id = id_of(record)
        if message_id not in self._sent:
            return False
        acknowledged_ms = self._accepted.get(message_id, due_of(record))
        same = _content_of(record) == self._sent[message_id].content
        return not same or due_of(record) != acknowledged_ms

    def _split(
        self, records: Sequence[Record], killed_at_ms: float | None, back_ms: float
    ) -> tuple[list[float], list[float]]:
        """Returns the lateness in health, and that of messages affected by the kill.

        These are messages that were not visible when it happened and were due before forwarding
        resumed: before the arrival that ended the longest silence after the kill.
        """
        if killed_at_ms is None:
            return list(map(self.lateness_ms, records)), []
        health: list[float] = []
        across: list[float] = []
        for record in records:
            touched = record.received_ms >= killed_at_ms and self._due_ms(record) <= back_ms
            (across if touched else health).append(self.lateness_ms(record))
        return health, across


def _silence(records: Sequence[Record], killed_at_ms: float | None) -> tuple[float, float]:
    """Returns the longest silence after the kill, and when it ended."""
    if killed_at_ms is None:
        return 0.0, 0.0
    after = (record.received_ms for record in records if record.received_ms >= killed_at_ms)
    return longest_gap([killed_at_ms, *sorted(after)])


def id_of(record: Record) -> bytes:
    """Returns the id in the service's own header; empty if it is missing."""
    return bytes.fromhex(_text(record, "dw-id"))


def due_of(record: Record) -> int:
    """Returns the due in the service's own headers, the first one if it was deferred; 0: none."""
    return int(_text(record, FIRST_DUE) or _text(record, "dw-due") or 0)


def _text(record: Record, header: str) -> str:
    return (record.header(header) or b"").decode()


def _content_of(record: Record) -> Content:
    """Returns the sender's content, without the headers that the service appends."""
    given = record.headers[: -len(OWN_HEADERS)]
    if tuple(name for name, _ in record.headers[-len(OWN_HEADERS) :]) != OWN_HEADERS:
        given = record.headers
    sent = (header for header in given if header[0] not in OF_DEFERRAL)
    return Content(record.key, record.value, tuple(sent))
