"""What a consumer tells its trace: the outcomes of records, once their transaction is committed.

Columns are taken out of the blocks as they were fetched; no object of a record is made. A record
that came through delaywheel has its id and due in headers, a retry also where its way began:

| root of a retry | its header |
|---|---|
| the id of the record as it was first read | `dw-retry-kept-dw-id` |
| that record's place, if it had no id | `dw-retry-origin` |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from delaywheel import ingress
from delaywheel.consumer.block import RecordBlock
from delaywheel.consumer.book import Cut
from delaywheel.consumer.message import DONE, Outcome, Settlement
from delaywheel.record_headers import (
    RETRY_ATTEMPT,
    RETRY_KEPT,
    RETRY_ORIGIN,
    last_of,
    number_of,
    place_of,
)

if TYPE_CHECKING:  # a program that does not trace imports nothing of it
    from delaywheel.trace.options import TraceOptions

_ID: Final = "dw-id"
_DUE: Final = "dw-due"
_OWN_ID: Final = f"{RETRY_KEPT}{_ID}"
_NO_HEADERS: Final[Mapping[str, bytes | None]] = {}
_FAILED: Final = frozenset({Outcome.RETRIED, Outcome.DEAD, Outcome.EXPIRED})


class CommittedRun(NamedTuple):
    """Records of a block that were committed together, with the outcomes of those not merely done.

    Attributes:
        group: Of the consumer.
        is_check: Whether the records are letters that ask about half messages.
    """

    block: RecordBlock
    begin: int
    end: int
    settlements: Mapping[int, Settlement]
    group: str
    is_check: bool

    def roots(self) -> list[bytes]:
        """Returns where the way of each began: an id, or the text of a place."""
        indexes = range(self.begin, self.end)
        return [
            self._began(index, headers)
            for index, headers in zip(indexes, self._headers(indexes), strict=True)
        ]

    def failed(self) -> list[int]:
        """Returns the rows of those that were not done."""
        return sorted(
            index - self.begin
            for index, settlement in self.settlements.items()
            if self.begin <= index < self.end and settlement.outcome in _FAILED
        )

    def rows(
        self, chosen: Iterable[int] | None, options: TraceOptions, time_ms: int
    ) -> tuple[dict[str, list[Any]], int]:
        """Returns the columns of these rows, and the length of their texts; None: of all."""
        indexes: Sequence[int] = range(self.begin, self.end)
        if chosen is not None:
            indexes = [self.begin + row for row in chosen]
        block, count = self.block, len(indexes)
        found = self._headers(indexes)
        all_keys = block.keys(self.begin, self.end)
        keys, length_bytes = options.keys([all_keys[index - self.begin] for index in indexes])
        tag, none, is_retry = options.tags, [None] * count, block.is_retry
        tags = none if tag is None else [each.get(tag) for each in found]
        return {
            "id": [_id_of(each.get(_ID)) for each in found],
            "due_ms": [_due_of(each.get(_DUE)) for each in found],
            "topic": [block.at.topic] * count,
            "time_ms": [time_ms] * count,
            "key": keys,
            "tags": tags,
            "root": [root and root[0] for root in map(_root_of, found)] if is_retry else none,
            "partition": [block.at.number] * count,
            "offset": [block.offsets[index] for index in indexes],
            "group": [self.group] * count,
            "attempt": [number_of(each.get(RETRY_ATTEMPT), 31) or 1 for each in found]
            if is_retry
            else [1] * count,
            "handler_us": [
                None if took_s < 0 else int(took_s * 1e6)
                for took_s in map(block.took_s.__getitem__, indexes)
            ],
            **self._outcomes(indexes),
        }, length_bytes + sum(map(len, filter(None, tags)))

    def _began(self, index: int, headers: Mapping[str, bytes | None]) -> bytes:
        root = _root_of(headers) if self.block.is_retry else None
        if root is not None:
            return root[1]
        place = self.block.at, self.block.offsets[index]
        return _id_of(headers.get(_ID)) or b"%s/%d" % (str(place[0]).encode(), place[1])

    def _outcomes(self, indexes: Sequence[int]) -> dict[str, list[Any]]:
        """Returns the columns of what became of these records."""
        known, count = self.settlements, len(indexes)
        if not known:
            nothing = [None] * count
            done = [self._status(DONE)] * count
            return {"status": done, "to_ms": nothing, "next_id": nothing, "why": nothing}
        settled = [known.get(index, DONE) for index in indexes]
        return {
            "status": [self._status(one) for one in settled],
            "to_ms": [one.due_ms or None for one in settled],
            "next_id": [_next_id(one) for one in settled],
            "why": [one.why or one.reason or None for one in settled],
        }

    def _headers(self, indexes: Sequence[int]) -> list[Mapping[str, bytes | None]]:
        """Returns the headers of records by name; of several the last, which counts."""
        if not self.block.has_headers:
            return [_NO_HEADERS] * len(indexes)
        headers = self.block.headers
        return [dict(headers[index] or ()) for index in indexes]

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
            ours = (at for at in range(begin, end) if not _is_skipped(known.get(at)))
            parts = [(at, at + 1) for at in ours]
        runs += [CommittedRun(block, *part, known, group, is_check) for part in parts]
    return runs


def _is_skipped(settlement: Settlement | None) -> bool:
    return settlement is not None and settlement.outcome is Outcome.SKIPPED


def _next_id(settlement: Settlement) -> bytes | None:
    """Returns the id under which a record comes back."""
    if settlement.record is None or settlement.outcome is Outcome.DEAD:
        return None
    return _id_of(last_of(settlement.record.headers, ingress.ID))


def _root_of(headers: Mapping[str, bytes | None]) -> tuple[str, bytes] | None:
    """Returns where the way of a retry began, as text and as it is hashed; None: here."""
    origin = headers.get(RETRY_ORIGIN)
    if origin is None or place_of(origin) is None:
        return None
    own = _id_of(headers.get(_OWN_ID))
    return (origin.decode(), origin) if own is None else (own.hex(), own)


def _id_of(value: bytes | None) -> bytes | None:
    if value is None:
        return None
    try:
        id_ = bytes.fromhex(value.decode())
    except ValueError:
        return None
    return id_ if len(id_) == 16 else None


def _due_of(value: bytes | None) -> int | None:
    return int(value) if value and value.isdigit() and len(value) < 19 else None
