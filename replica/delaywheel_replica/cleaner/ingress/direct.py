"""Turns messages that are forwarded directly into rows beside those of wheels.

A record that is due when it is read, and was handed to no server, is forwarded in the transaction
that settles it. As a row it is checked like any other: topic, size, time to live; and the search
for rows that Kafka refuses covers all rows together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from delaywheel_replica.cleaner.due.rows import (
    ABSENT,
    NO_DUE_ROWS,
    RECORD,
    Direct,
    DueRows,
    MessageSource,
    Records,
    join_rows,
)
from delaywheel_replica.core.ingress.underway import Forwarded


def direct_rows(
    messages: Sequence[Forwarded], accepted_at_ms: int, ttl_header: str = ""
) -> DueRows:
    """Returns rows of these messages, in order; those that may have the TTL header are marked."""
    if not messages:
        return NO_DUE_ROWS
    ttl = ttl_header.encode()
    records: Records = np.zeros(len(messages), RECORD)
    topics: dict[str, int] = {}
    sources: dict[MessageSource, int] = {}
    parts: list[bytes] = []
    start = 0
    for row, (taken, message) in enumerate(messages):
        assert taken.record is not None
        place = taken.record.place
        key, value, headers = message.key, message.value, message.headers
        lengths = _length(key), _length(value), len(headers)
        parts += (key or b"", value or b"", headers)
        low, high = np.frombuffer(message.id, "<u8")
        record = records[row]
        record["due_ms"] = message.due_ms
        record["id_low"], record["id_high"] = low, high
        record["seq"] = place.offset
        record["start"] = start
        record["key_length"], record["value_length"], record["headers_length"] = lengths
        record["topic"] = topics.setdefault(message.topic, len(topics))
        record["wheel"] = sources.setdefault(Direct(place.topic, place.partition), len(sources))
        record["partition"], record["timestamp_ms"] = message.partition, message.timestamp_ms
        record["ttl"] = bool(ttl) and ttl in headers
        start += sum(max(length, 0) for length in lengths)
    records["accepted_at_ms"] = accepted_at_ms
    return DueRows(records, tuple(topics), tuple(sources), [b"".join(parts)])


def joined_with(rows: DueRows, more: DueRows) -> DueRows:
    """Returns the rows of wheels, followed by those of ingress topics."""
    if not len(more):
        return rows
    joined = join_rows((rows, more), [*rows.wheels, *more.wheels])
    joined.records["wheel"][len(rows) :] += len(rows.wheels)
    return joined


def _length(content: bytes | None) -> int:
    return ABSENT if content is None else len(content)
