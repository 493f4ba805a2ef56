"""Finds messages that their topics would refuse, as far as Kafka described the topics.

All messages of a step are checked at once, so that it costs no time when all is well. What Kafka
did not report is not judged here: the broker will judge it, and trials find out.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from delaywheel_replica.cleaner.delivery.outcomes import DeadReason, forwarded
from delaywheel_replica.cleaner.delivery.topics import Topic
from delaywheel_replica.cleaner.due.rows import DueRows
from delaywheel_replica.cleaner.outside.ports import NOW
from delaywheel_replica.kafka_settings import FORWARD_ROOM_BYTES, KafkaNames
from delaywheel_replica.quantities import counted

Unsuited = dict[int, tuple[DeadReason, str | None]]
"""Number of a row -> why, and a detail."""

CLOCKS_MS = 5_000
"""The broker's clock is not ours: so near to a bound, it decides."""

_UNBOUNDED = 1 << 62


def find_unsuited(
    rows: DueRows, topics: Mapping[str, Topic], names: KafkaNames, *, compresses: bool, now_ms: int
) -> Unsuited:
    """Returns the rows that would be refused; without known sizes if the producers compress."""
    found: Unsuited = {}
    _check_partitions(rows, topics, found)
    _check_keys(rows, topics, found)
    _check_timestamps(rows, topics, now_ms, found)
    if not compresses:
        _check_sizes(rows, topics, names, now_ms, found)
    return found


def _check_partitions(rows: DueRows, topics: Mapping[str, Topic], found: Unsuited) -> None:
    counts = {name: topic.partitions for name, topic in topics.items()}
    for row in np.flatnonzero(rows.partitions >= _of_rows(rows, counts)).tolist():
        name = rows.topics[rows.topic_numbers[row]]
        detail = f"the topic has {counted(counts[name], 'partition')}"
        found[row] = DeadReason.PARTITION_UNKNOWN, detail


def _check_keys(rows: DueRows, topics: Mapping[str, Topic], found: Unsuited) -> None:
    keyed = {name: 0 for name, topic in topics.items() if topic.limits and topic.limits.needs_key}
    if keyed:
        refused = (rows.records["key_length"] < 0) & (_of_rows(rows, keyed) == 0)
        for row in np.flatnonzero(refused).tolist():
            found.setdefault(row, (DeadReason.KEY_MISSING, None))


def _check_timestamps(
    rows: DueRows, topics: Mapping[str, Topic], now_ms: int, found: Unsuited
) -> None:
    given = rows.records["timestamp_ms"]
    if not (given != NOW).any():
        return
    known = {name: topic.limits for name, topic in topics.items() if topic.limits is not None}
    oldest = {name: limits.oldest_ms for name, limits in known.items() if limits.oldest_ms}
    newest = {name: limits.newest_ms for name, limits in known.items() if limits.newest_ms}
    ahead_ms = given - now_ms
    refused = -ahead_ms > _of_rows(rows, oldest) + CLOCKS_MS
    refused |= ahead_ms > _of_rows(rows, newest) + CLOCKS_MS
    refused &= given != NOW
    for row in np.flatnonzero(refused).tolist():
        found.setdefault(row, (DeadReason.TIMESTAMP_REFUSED, f"{int(given[row])}"))


def _check_sizes(
    rows: DueRows, topics: Mapping[str, Topic], names: KafkaNames, now_ms: int, found: Unsuited
) -> None:
    limits = {
        name: topic.limits.max_message_bytes
        for name, topic in topics.items()
        if topic.limits is not None
    }
    allowed = _of_rows(rows, limits)
    perhaps = rows.lengths_bytes > allowed - FORWARD_ROOM_BYTES
    for row in np.flatnonzero(perhaps).tolist():
        (record,) = forwarded(names, rows.take(slice(row, row + 1)), now_ms)
        size = record.batch_bytes
        if size > allowed[row]:
            detail = f"{size} bytes, and the topic takes {allowed[row]}"
            found.setdefault(row, (DeadReason.MESSAGE_TOO_LARGE, detail))


def _of_rows(rows: DueRows, of_topics: Mapping[str, int | None]) -> NDArray[np.int64]:
    """Returns each row's topic limit; unlimited for topics that are not named."""
    table = np.full(len(rows.topics), _UNBOUNDED, dtype=np.int64)
    for number in np.unique(rows.topic_numbers).tolist():
        value = of_topics.get(rows.topics[number])
        if value is not None:
            table[number] = value
    return table[rows.topic_numbers]
