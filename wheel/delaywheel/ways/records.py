"""Single records with their headers, as the columns of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

from delaywheel import ingress
from delaywheel.record_headers import RETRY_ROOT
from delaywheel.ways.columns import HeaderColumns, forwarded_in, ids_in, numbers_in
from delaywheel.ways.roots import hashed_of, own_root, root_in

if TYPE_CHECKING:  # a program that does not trace imports nothing of it
    from delaywheel.trace.counts import Cell, CellKey
    from delaywheel.trace.options import TraceOptions

PairsOfHeaders = Sequence[tuple[str, bytes | None]]
_T = TypeVar("_T")


class WrittenRecord(NamedTuple):
    """A record of an ingress topic, and what became of it.

    `cost_us` is from the call until that was known; None: it was part of a transaction. The length
    is of key and value.
    """

    key: bytes | None
    headers: PairsOfHeaders
    due_ms: int | None
    status: str = "WRITTEN"
    cost_us: int | None = None
    length_bytes: int = 0


class WrittenRun:
    """Records of ingress topics that were written, or not: an `EventRun` of what is sent."""

    def __init__(self, records: Sequence[WrittenRecord]) -> None:
        self._records: Final = records
        self._headers: Final = HeaderColumns([record.headers for record in records])

    def roots(self) -> list[bytes]:
        """Returns what is hashed of where the way of each began."""
        roots = (own_root(each, None) for each in self._headers.mappings())
        return [b"" if root is None else hashed_of(root) for root in roots]

    def cells(self, _time_ms: int) -> dict[CellKey, Cell]:
        """Returns what all of them add to the counts."""
        from delaywheel.trace.counts import Cell, sent_key  # noqa: PLC0415 - only if it traces

        cells: dict[CellKey, Cell] = {}
        written: dict[str, list[int]] = {}
        topics = texts(self._headers.column(ingress.TOPIC))
        for row, (one, topic) in enumerate(zip(self._records, topics, strict=True)):
            if one.status == "WRITTEN":
                written.setdefault(topic or "", []).append(row)
            else:
                cell = cells.setdefault(sent_key(topic or "", one.due_ms), Cell())
                cell.unknown += one.status == "UNKNOWN"
                cell.refused += one.status != "UNKNOWN"
        ids = ids_in(self._headers.column(ingress.ID))
        for topic, rows in written.items():
            own = picked(ids, rows), [self._records[row].due_ms for row in rows]
            lengths = [self._records[row].length_bytes for row in rows]
            for key, cell in counted_cells("sent", topic, None, *own, lengths).items():
                cells.setdefault(key, Cell()).add(cell)
        return cells

    def failed(self) -> list[int]:
        """Returns the rows of those that are not written."""
        return [row for row, one in enumerate(self._records) if one.status != "WRITTEN"]

    def rows(
        self, chosen: Sequence[int] | None, options: TraceOptions, time_ms: int
    ) -> tuple[dict[str, list[Any]], int]:
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
    """A record as a consumer has read it; its length is that of key and value."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    headers: PairsOfHeaders
    length_bytes: int


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

    def cells(self, time_ms: int) -> dict[CellKey, Cell]:
        """Returns what all of them add to the counts."""
        ids = ids_in(self._headers.column(ingress.ID))
        dues_ms = numbers_in(self._headers.column("dw-due"))
        by_topic: dict[str, list[int]] = {}
        for row, one in enumerate(self._records):
            by_topic.setdefault(one.topic, []).append(row)
        cells: dict[CellKey, Cell] = {}
        for topic, rows in by_topic.items():
            own = picked(ids, rows), picked(dues_ms, rows)
            lengths = [self._records[row].length_bytes for row in rows]
            cells |= counted_cells("consumed", topic, self._group, *own, lengths, time_ms)
        return cells

    def failed(self) -> list[int]:
        """Returns nothing."""
        return []

    def rows(
        self, chosen: Sequence[int] | None, options: TraceOptions, time_ms: int
    ) -> tuple[dict[str, list[Any]], int]:
        """Returns the columns of these rows, and the length of their texts; None: of all."""
        headers, records = self._headers, picked(self._records, chosen)
        keys, length_bytes = options.keys([one.key for one in records])
        tags, tags_bytes = tags_in(headers, chosen, options, len(records))
        count, nothing = len(records), [None] * len(records)
        roots = [root_in(each, is_retry=False) for each in picked(headers.mappings(), chosen)]
        dues_ms = numbers_in(headers.column("dw-due"))
        times_ms = [one.timestamp_ms for one in self._records]
        return {
            "id": picked(ids_in(headers.column(ingress.ID)), chosen),
            "due_ms": picked(dues_ms, chosen),
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
            "forwarded_ms": picked(forwarded_in(headers, dues_ms, times_ms), chosen),
            "group": [self._group] * count,
            "attempt": nothing,
            "handler_us": nothing,
            "why": nothing,
        }, length_bytes + tags_bytes


def counted_cells(
    direction: Literal["sent", "consumed"],
    topic: str,
    group: str | None,
    ids: Sequence[bytes | None],
    dues_ms: Sequence[int | None],
    lengths_bytes: Sequence[int],
    time_ms: int | None = None,
) -> dict[CellKey, Cell]:
    """Returns what messages of one topic add to the counts; who has no id or due is no message."""
    from delaywheel.trace.counts import Counted, Direction, folded  # noqa: PLC0415 - as above

    if None in ids or None in dues_ms:
        own = zip(ids, dues_ms, lengths_bytes, strict=True)
        known = [each for each in own if each[0] is not None and each[1] is not None]
        ids, dues_ms, lengths_bytes = zip(*known, strict=True) if known else ((), (), ())
    late_ms = () if time_ms is None else [time_ms - (due_ms or 0) for due_ms in dues_ms]
    of = Direction(direction), topic, group
    return folded(Counted(*of, ids, dues_ms, lengths_bytes, late_ms))  # type: ignore[arg-type] # none is None


def lengths_of(keys: Sequence[bytes | None], values: Sequence[bytes | None]) -> list[int]:
    """Returns the lengths of keys and values together."""
    return [len(key or b"") + len(value or b"") for key, value in zip(keys, values, strict=True)]


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
