"""Single records with their headers, as the columns of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from delaywheel import ingress
from delaywheel.record_headers import RETRY_ROOT
from delaywheel.ways.columns import HeaderColumns, ids_in, numbers_in
from delaywheel.ways.roots import hashed_of, own_root, root_in

if TYPE_CHECKING:  # a program that does not trace imports nothing of it
    from delaywheel.trace.options import TraceOptions

RecordHeaders = Sequence[tuple[str, bytes | None]]
Rows = tuple[dict[str, list[Any]], int]
_T = TypeVar("_T")


class WrittenRecord(NamedTuple):
    """A record of an ingress topic, and what became of it.

    Attributes:
        due_ms: None: unknown.
        cost_us: From the call until that was known; None: it was part of a transaction.
    """

    key: bytes | None
    headers: RecordHeaders
    due_ms: int | None
    status: str = "WRITTEN"
    cost_us: int | None = None


class WrittenRun:
    """Records of ingress topics that were written, or not: an `EventRun` of what is sent."""

    def __init__(self, records: Sequence[WrittenRecord]) -> None:
        self._records: Final = records
        self._headers: Final = HeaderColumns([record.headers for record in records])

    def roots(self) -> list[bytes]:
        """Returns what is hashed of where the way of each began."""
        roots = (own_root(each, None) for each in self._headers.mappings())
        return [b"" if root is None else hashed_of(root) for root in roots]

    def failed(self) -> list[int]:
        """Returns the rows of those that are not written."""
        return [row for row, one in enumerate(self._records) if one.status != "WRITTEN"]

    def rows(self, chosen: Sequence[int] | None, options: TraceOptions, time_ms: int) -> Rows:
        """Returns the columns of these rows, and the length of their texts; None: of all."""
        headers, records = self._headers, picked(self._records, chosen)
        keys, length_bytes = options.keys([one.key for one in records])
        tags, tags_bytes = tags_in(headers, chosen, options, len(records))
        nothing = [None] * len(records)
        return {
            "id": picked(ids_in(headers.column(ingress.ID)), chosen),
            "due_ms": [one.due_ms for one in records],
            "topic": texts(picked(headers.column(ingress.TOPIC), chosen)),
            "time_ms": [time_ms] * len(records),
            "status": [one.status for one in records],
            "key": keys,
            "tags": tags,
            "root": texts(picked(headers.column(RETRY_ROOT), chosen)),
            "cost_us": [one.cost_us for one in records],
            "attempts": nothing,
            "node": nothing,
        }, length_bytes + tags_bytes


class ReadRecord(NamedTuple):
    """A record as a consumer has read it."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    headers: RecordHeaders


class ReadRun:
    """Records that a plain consumer is done with: an `EventRun` of what is processed."""

    def __init__(self, records: Sequence[ReadRecord], group: str) -> None:
        self._records: Final = records
        self._headers: Final = HeaderColumns([record.headers for record in records])
        self._group: Final = group

    def roots(self) -> list[bytes]:
        """Returns what is hashed of where the way of each began."""
        roots = (
            own_root(headers, b"%s/%d/%d" % (one.topic.encode(), one.partition, one.offset))
            for one, headers in zip(self._records, self._headers.mappings(), strict=True)
        )
        return [b"" if root is None else hashed_of(root) for root in roots]

    def failed(self) -> list[int]:
        """Returns nothing."""
        return []

    def rows(self, chosen: Sequence[int] | None, options: TraceOptions, time_ms: int) -> Rows:
        """Returns the columns of these rows, and the length of their texts; None: of all."""
        headers, records = self._headers, picked(self._records, chosen)
        keys, length_bytes = options.keys([one.key for one in records])
        tags, tags_bytes = tags_in(headers, chosen, options, len(records))
        count, nothing = len(records), [None] * len(records)
        roots = [root_in(each, is_retry=False) for each in picked(headers.mappings(), chosen)]
        return {
            "id": picked(ids_in(headers.column(ingress.ID)), chosen),
            "due_ms": picked(numbers_in(headers.column("dw-due")), chosen),
            "topic": [one.topic for one in records],
            "time_ms": [time_ms] * count,
            "status": ["DONE"] * count,
            "key": keys,
            "tags": tags,
            "root": texts(roots),
            "to_ms": nothing,
            "next_id": nothing,
            "partition": [one.partition for one in records],
            "offset": [one.offset for one in records],
            "group": [self._group] * count,
            "attempt": nothing,
            "handler_us": nothing,
            "why": nothing,
        }, length_bytes + tags_bytes


def tags_in(
    headers: HeaderColumns, chosen: Sequence[int] | None, options: TraceOptions, count: int
) -> tuple[list[bytes | None], int]:
    """Returns the tags of these rows, and their length."""
    if options.tags is None:
        return [None] * count, 0
    tags = picked(headers.column(options.tags), chosen)
    return tags, sum(map(len, filter(None, tags)))


def picked(column: Sequence[_T], chosen: Sequence[int] | None) -> list[_T]:
    """Returns the values of these rows; None: of all."""
    return list(column) if chosen is None else [column[row] for row in chosen]


def texts(column: Sequence[bytes | None]) -> list[str | None]:
    """Returns bytes as text."""
    return [None if each is None else each.decode(errors="replace") for each in column]
