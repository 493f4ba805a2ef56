"""What a consumer tells its trace: the outcomes of records, once their transaction is committed.

Columns are taken out of the blocks as they were fetched; no object of a record is made. A record
that came through delaywheel has its id and due in headers; `ways.roots` says where its way began.
What handlers have written for later is told as sent: by the same transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from delaywheel import ingress
from delaywheel.consumer.block import RecordBlock
from delaywheel.consumer.book import Cut
from delaywheel.consumer.message import DONE, Outcome, Settlement
from delaywheel.record_headers import RETRY_ATTEMPT, RETRY_ROOT, last_of, number_of
from delaywheel.transactional import Outgoing
from delaywheel.ways.columns import HeaderColumns, forwarded_in, ids_in, numbers_in
from delaywheel.ways.records import (
    WrittenRecord,
    WrittenRun,
    counted_cells,
    lengths_of,
    picked,
    tags_in,
    texts,
)
from delaywheel.ways.roots import hashed_of, root_in
from delaywheel.ways.values import id_in

if TYPE_CHECKING:  # a program that does not trace imports nothing of it
    from delaywheel.trace.counts import Cell, CellKey
    from delaywheel.trace.options import TraceOptions

_DUE: Final = "dw-due"
_AGAIN: Final = frozenset({Outcome.RETRIED, Outcome.PARKED, Outcome.FORWARDED})
_FAILED: Final = frozenset({Outcome.RETRIED, Outcome.DEAD, Outcome.EXPIRED})


class CommittedRun:
    """Records of a block that were committed together, with the outcomes of those not merely done.

    Attributes:
        end: The index behind the last.
        settlements: The outcomes, by index.
        is_check: Whether the records are letters that ask about half messages.
    """

    def __init__(
        self,
        block: RecordBlock,
        begin: int,
        end: int,
        settlements: Mapping[int, Settlement],
        group: str,
        *,
        is_check: bool,
    ) -> None:
        self.block: Final = block
        self.begin: Final = begin
        self.end: Final = end
        self.settlements: Final = settlements
        self.group: Final = group
        self.is_check: Final = is_check

    def roots(self) -> list[bytes]:
        """Returns what is hashed of where the way of each began."""
        at, offsets = str(self.block.at).encode(), self.block.offsets[self.begin : self.end]
        return [
            hashed_of(root) if root is not None else id_ or b"%s/%d" % (at, offset)
            for root, id_, offset in zip(self._told_roots, self._ids, offsets, strict=True)
        ]

    def cells(self, time_ms: int) -> dict[CellKey, Cell]:
        """Returns what all of them add to the counts, and the records that bring some back."""
        block, begin, end = self.block, self.begin, self.end
        lengths = lengths_of(block.keys(begin, end), block.values(begin, end))
        own = self._ids, self._dues_ms, lengths, time_ms
        cells = counted_cells("consumed", block.at.topic, self.group, *own)
        again = [
            _written(one.record)
            for index, one in self.settlements.items()
            if begin <= index < end and one.record is not None and one.outcome in _AGAIN
        ]
        return cells | WrittenRun(again).cells(time_ms) if again else cells

    def failed(self) -> list[int]:
        """Returns the rows of those that were not done."""
        return sorted(
            index - self.begin
            for index, settlement in self.settlements.items()
            if self.begin <= index < self.end and settlement.outcome in _FAILED
        )

    def rows(
        self, chosen: Sequence[int] | None, options: TraceOptions, time_ms: int
    ) -> tuple[dict[str, list[Any]], int]:
        """Returns the columns of these rows, and the length of their texts; None: of all."""
        block, headers = self.block, self._headers
        count = self.end - self.begin if chosen is None else len(chosen)
        keys, length_bytes = options.keys(picked(block.keys(self.begin, self.end), chosen))
        tags, tags_bytes = tags_in(headers, chosen, options, count)
        return {
            "id": picked(self._ids, chosen),
            "due_ms": picked(self._dues_ms, chosen),
            "topic": [block.at.topic] * count,
            "time_ms": [time_ms] * count,
            "key": keys,
            "tags": tags,
            "root": texts(picked(self._told_roots, chosen)),
            "partition": [block.at.number] * count,
            "offset": picked(block.offsets[self.begin : self.end], chosen),
            "forwarded_ms": picked(self._forwarded_ms, chosen),
            "group": [self.group] * count,
            "attempt": [
                number_of(each, 31) or 1 for each in picked(headers.column(RETRY_ATTEMPT), chosen)
            ]
            if block.is_retry
            else [1] * count,
            "handler_us": [
                None if took_s < 0 else int(took_s * 1e6)
                for took_s in picked(block.took_s[self.begin : self.end], chosen)
            ],
            **self._outcomes(chosen, count),
        }, length_bytes + tags_bytes

    @cached_property
    def _headers(self) -> HeaderColumns:
        if not self.block.has_headers:
            return HeaderColumns([None] * (self.end - self.begin))
        return HeaderColumns(self.block.headers[self.begin : self.end])

    @cached_property
    def _ids(self) -> list[bytes | None]:
        return ids_in(self._headers.column(ingress.ID))

    @cached_property
    def _dues_ms(self) -> list[int | None]:
        return numbers_in(self._headers.column(_DUE))

    @property
    def _forwarded_ms(self) -> list[int | None]:
        """When each was forwarded; letters that ask about half messages were not."""
        if self.is_check:
            return [None] * (self.end - self.begin)
        times_ms = self.block.timestamps_ms(self.begin, self.end)
        return forwarded_in(self._headers, self._dues_ms, times_ms)

    @cached_property
    def _told_roots(self) -> list[bytes | None]:
        """Where the ways began of those whose did not begin with this record."""
        is_retry = self.block.is_retry
        if not is_retry and not self._headers.has(RETRY_ROOT):
            return [None] * (self.end - self.begin)
        return [root_in(each, is_retry=is_retry) for each in self._headers.mappings()]

    def _outcomes(self, chosen: Sequence[int] | None, count: int) -> dict[str, list[Any]]:
        """Returns the columns of what became of these records."""
        known = self.settlements
        if not known:
            nothing = [None] * count
            done = [self._status(DONE)] * count
            return {"status": done, "to_ms": nothing, "next_id": nothing, "why": nothing}
        rows = range(self.end - self.begin) if chosen is None else chosen
        settled = [known.get(self.begin + row, DONE) for row in rows]
        again = list(map(_coming_again, settled))
        return {
            "status": [self._status(one) for one in settled],
            "to_ms": [due_ms for _, due_ms in again],
            "next_id": [id_ for id_, _ in again],
            "why": [one.why or one.reason or None for one in settled],
        }

    def _status(self, settlement: Settlement) -> str:
        if self.is_check:
            if settlement.outcome is Outcome.FORWARDED:
                return "COMMITTED"
            if settlement.outcome is Outcome.DONE:
                return "ROLLED_BACK"
            if settlement.outcome is Outcome.DEAD:
                return "UNDECIDED"
        return settlement.outcome.name


def committed_runs(cut: Cut, group: str, *, is_check: bool) -> list[CommittedRun]:
    """Returns what a transaction commits; call it while blocks still have it."""
    runs = []
    for block, begin, end in cut.runs:
        known = {index: one for index, one in block.settlements.items() if begin <= index < end}
        parts = [(begin, end)]
        if is_check:  # the letters of all groups are in one topic: others' are skipped
            outcomes = ((at, known.get(at, DONE).outcome) for at in range(begin, end))
            parts = [(at, at + 1) for at, one in outcomes if one is not Outcome.SKIPPED]
        runs += [CommittedRun(block, *part, known, group, is_check=is_check) for part in parts]
    return runs


def written_runs(runs: Sequence[CommittedRun]) -> list[WrittenRun]:
    """Returns what the handlers of these records have written for later."""
    written = [
        _written(record)
        for run in runs
        for one in run.settlements.values()
        if one.writes is not None
        for record in one.writes.records
        if record.headers and last_of(record.headers, ingress.TOPIC) is not None
    ]
    return [WrittenRun(written)] if written else []


def _written(record: Outgoing) -> WrittenRecord:
    due_ms = number_of(last_of(record.headers, ingress.DELIVER_AT))
    length_bytes = len(record.key or b"") + len(record.value or b"")
    return WrittenRecord(record.key, record.headers, due_ms, length_bytes=length_bytes)


def _coming_again(settlement: Settlement) -> tuple[bytes | None, int | None]:
    """Returns under which id and due a record comes back, or a half message that is committed."""
    if settlement.record is None or settlement.outcome is Outcome.DEAD:
        return None, None
    headers = settlement.record.headers
    due_ms = number_of(last_of(headers, ingress.DELIVER_AT))
    return id_in(last_of(headers, ingress.ID)), due_ms
