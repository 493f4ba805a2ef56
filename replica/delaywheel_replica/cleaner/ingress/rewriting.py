"""Gives messages other contents than they were accepted with, where they go elsewhere first."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delaywheel import ingress
from delaywheel.headers import encode_headers
from delaywheel_replica.cleaner.due.rows import ABSENT, DueMessage, DueRows, HalfState
from delaywheel_replica.cleaner.ingress.half_letters import HeaderPairs


class AsSent(NamedTuple):
    """A message as it is sent."""

    topic: str
    headers: HeaderPairs
    partition: int
    timestamp_ms: int
    state: HalfState
    has_ttl: bool
    early_ms: int = 0


def rewritten(
    rows: DueRows, numbers: NDArray[np.intp], sent: Callable[[DueMessage], AsSent]
) -> DueRows:
    """Returns these rows with some of them as they are sent."""
    if not len(numbers):
        return rows
    records = rows.records.copy()
    topics = {topic: number for number, topic in enumerate(rows.topics)}
    parts: list[bytes] = []
    start = 0
    for number, message in zip(numbers.tolist(), rows.take(numbers), strict=True):
        what = sent(message)
        headers = encode_headers(what.headers)
        content = (message.key or b"", message.value or b"", headers)
        record = records[number]
        record["blob"], record["start"] = len(rows.blobs), start
        record["headers_length"] = len(headers)
        record["topic"] = topics.setdefault(what.topic, len(topics))
        record["partition"], record["timestamp_ms"] = what.partition, what.timestamp_ms
        record["half"], record["early_ms"] = what.state, what.early_ms
        record["ttl"] &= what.has_ttl
        parts += content
        start += sum(map(len, content))
    return DueRows(records, tuple(topics), rows.wheels, [*rows.blobs, b"".join(parts)])


def requested(message: DueMessage, deliver_at_ms: int) -> HeaderPairs:
    """Returns the headers by which a record of the ingress topic is a message, due then."""
    asked: HeaderPairs = [
        (ingress.TOPIC, message.topic.encode()),
        (ingress.DELIVER_AT, b"%d" % deliver_at_ms),
    ]
    if message.partition != ABSENT:
        asked.append((ingress.PARTITION, b"%d" % message.partition))
    if message.timestamp_ms != ABSENT:
        asked.append((ingress.TIMESTAMP, b"%d" % message.timestamp_ms))
    return asked
