"""What records of ingress topics ask for: the only rows that go through Python.

Executors run this, with what `ship_packages` sends them and numpy: so it imports nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from delaywheel_replica.core.ingress.place import NO_TIMESTAMP, IngressPlace
from delaywheel_replica.core.ingress.reading import CommittedRecord, Delayed, IngressRules, read

if TYPE_CHECKING:
    from pyspark.sql import Row

COLUMNS = ("topic", "partition", "offset", "timestamp_ms", "headers")
"""What of a record is read."""

SCHEMA = "id binary, due_ms long, topic string, origin string, offset long, sent_ms long"

Ends: TypeAlias = Mapping[tuple[str, int], tuple[int, Mapping[str, int]]]
"""By partition: how far it is settled, and the levels that its records may name."""

_RequestRow: TypeAlias = tuple[bytearray, int, str, str, int, int]

_NOTHING_TOO_LARGE = 1 << 62


def requests(ends: Ends, rows: Iterable[Row]) -> Iterator[_RequestRow]:
    """Yields a row of `SCHEMA` for each settled record that asks for a message."""
    for row in rows:
        next_offset, levels_ms = ends.get((row["topic"], row["partition"]), (0, {}))
        if row["offset"] < next_offset:
            yield from _request_of(row, levels_ms)


def _request_of(row: Row, levels_ms: Mapping[str, int]) -> Iterator[_RequestRow]:
    place = IngressPlace(row["topic"], row["partition"], row["offset"])
    sent_ms = NO_TIMESTAMP if row["timestamp_ms"] is None else row["timestamp_ms"]
    headers = [
        (each["name"], None if each["value"] is None else bytes(each["value"]))
        for each in row["headers"]
    ]
    rules = IngressRules(levels_ms, _NOTHING_TOO_LARGE, frozenset())
    request = read(CommittedRecord(place, sent_ms, None, None, headers), rules)
    if isinstance(request, Delayed):
        at = str(place), place.offset, sent_ms
        yield bytearray(request.id), request.due_ms, request.topic, *at
