"""How many messages a program has sent and consumed, by topic, group and bucket of their due.

| a cell | then |
|---|---|
| changes: it only grows | is written whole within 10 s: of its key the last record counts |
| could not be written | is written again with the next ones |
| is one of more than 10,000, and those | all are written, and are final: a new part begins, with |
| before are written | other keys |
| is new, and 20,000 wait for Kafka | is not there: its messages are counted as lost |

What a consumer commits is counted in its own transaction: `ExactCounts`. docs/TRACE.md has the
format. Sums and hashes do not depend on any order, so the counts of many reporters add up,
and are compared with those of other witnesses: equal counts with unequal hashes are other messages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from operator import xor
from struct import pack, unpack
from typing import Any, Final, NamedTuple

VERSION: Final = 1
BUCKET_MS: Final = 60_000
MOST_CELLS: Final = 10_000

_MASK: Final = (1 << 64) - 1
_DUE: Final = 0x9E3779B97F4A7C15
_HIGH: Final = 0xBF58476D1CE4E5B9
_LOW: Final = 0x94D049BB133111EB


class Direction(StrEnum):
    """Which end counts."""

    SENT = "sent"
    CONSUMED = "consumed"


class Sign(StrEnum):
    """What a reporter says of itself, in a record without a cell."""

    LIVE = "live"
    END = "end"


class CellKey(NamedTuple):
    """What a cell is of; a bucket of None: of messages whose due is not known."""

    direction: Direction
    topic: str
    group: str | None
    bucket_ms: int | None


class Counted(NamedTuple):
    """Messages of one topic that are counted together: columns of equal length.

    `late_ms` is how late each was consumed; empty: they were sent.
    """

    direction: Direction
    topic: str
    group: str | None
    ids: Sequence[bytes]
    dues_ms: Sequence[int]
    lengths_bytes: Sequence[int]
    late_ms: Sequence[int] = ()


@dataclass(slots=True)
class Cell:
    """The counts of some messages; `sum` and `xor` are those of their hashes."""

    messages: int = 0
    bytes: int = 0
    refused: int = 0
    unknown: int = 0
    sum: int = 0
    xor: int = 0
    late: Counter[int] = field(default_factory=Counter)

    def add(self, other: Cell) -> None:
        """Adds other messages."""
        self.messages += other.messages
        self.bytes += other.bytes
        self.refused += other.refused
        self.unknown += other.unknown
        self.sum = (self.sum + other.sum) & _MASK
        self.xor ^= other.xor
        self.late.update(other.late)


def hashes_of(ids: Sequence[bytes], dues_ms: Sequence[int]) -> list[int]:
    """Returns a number of 64 bits for each message, by its id and due.

    All are computed at once, as lanes of 128 bits of one integer: a product of 64 bits by 64 fits,
    what is carried between products is masked, and only the lower half of a lane counts.

    Example:
        >>> [f"{one:016x}" for one in hashes_of([bytes(range(16))], [1_900_000_000_000])]
        ['d2c52b7851df77ac']
    """
    count = len(ids)
    lanes = [0] * (2 * count)
    lanes[1::2] = dues_ms
    columns = f">{2 * count}Q"
    dues = int.from_bytes(pack(columns, *lanes))
    both = int.from_bytes(b"".join(ids))
    lower = int.from_bytes((bytes(8) + b"\xff" * 8) * count)
    high = both >> 64 & lower ^ dues * _DUE & lower
    low = both & lower
    mixed = (high * _HIGH & lower) + (low * _LOW & lower) & lower
    return list(unpack(columns, (mixed ^ mixed >> 32).to_bytes(16 * count))[1::2])


def sent_key(topic: str, due_ms: int | None) -> CellKey:
    """Returns the cell of a message that was not accepted."""
    bucket_ms = None if due_ms is None else due_ms // BUCKET_MS * BUCKET_MS
    return CellKey(Direction.SENT, topic, None, bucket_ms)


def folded(counted: Counted) -> dict[CellKey, Cell]:
    """Returns what messages add to each cell."""
    direction, topic, group, ids, dues_ms, lengths, late_ms = counted
    if not ids:
        return {}
    hashes = hashes_of(ids, dues_ms)
    first = min(dues_ms) // BUCKET_MS
    if max(dues_ms) // BUCKET_MS == first:  # as most records of a consumer's batch
        key = CellKey(direction, topic, group, first * BUCKET_MS)
        return {key: _cell(hashes, lengths, late_ms)}
    rows: dict[int, list[int]] = {}
    for row, due_ms in enumerate(dues_ms):
        rows.setdefault(due_ms // BUCKET_MS, []).append(row)
    return {
        CellKey(direction, topic, group, bucket * BUCKET_MS): _cell(
            [hashes[row] for row in some],
            [lengths[row] for row in some],
            [late_ms[row] for row in some] if late_ms else (),
        )
        for bucket, some in rows.items()
    }


def _cell(hashes: Sequence[int], lengths: Sequence[int], late_ms: Sequence[int]) -> Cell:
    late = Counter(max(0, one).bit_length() for one in late_ms)
    summed = sum(hashes) & _MASK
    return Cell(len(hashes), sum(lengths), 0, 0, summed, reduce(xor, hashes), late)


class EndCounts:
    """All cells of one reporter; not thread-safe."""

    def __init__(self) -> None:
        self._cells: dict[CellKey, Cell] = {}
        self._changed: set[CellKey] = set()
        self._under_way: dict[bytes, bytes] = {}
        self._unsent: dict[bytes, bytes] = {}
        self._part = 0
        self._parts = 1
        self._lost = 0
        self._says: Sign | None = None

    @property
    def is_changed(self) -> bool:
        """Whether something is to be written."""
        return bool(self._changed) or bool(self._unsent) or self._says is not None

    @property
    def has_any(self) -> bool:
        """Whether anything was counted, here or in a part that somebody else writes."""
        return bool(self._cells) or self._parts > 1

    def begin_part(self) -> int:
        """Returns a new part; its keys are those of whom it is given to, and of nobody else."""
        self._parts += 1
        return self._parts - 1

    def add(self, cells: Mapping[CellKey, Cell]) -> None:
        """Adds messages."""
        for key, cell in cells.items():
            known = self._cells.get(key)
            if known is None:
                if len(self._cells) >= 2 * MOST_CELLS:
                    self._lost += cell.messages + cell.refused + cell.unknown
                    continue
                known = self._cells[key] = Cell()
            known.add(cell)
            self._changed.add(key)

    def say(self, sign: Sign) -> None:
        """Has it said that the program lives, or ends, if anything was counted."""
        if self.has_any:
            self._says = sign

    def take(self, head: Mapping[str, Any]) -> dict[bytes, bytes]:
        """Takes what is to be written, as keys and values of records, which have this head."""
        is_behind = bool(self._under_way or self._unsent)
        taken, self._unsent = self._unsent, {}
        own = {**head, "lost": self._lost}
        taken |= records_of(own, self._part, {key: self._cells[key] for key in self._changed})
        if self._says is not None:
            said = {"v": VERSION, **own, "direction": self._says}
            taken[_encoded([head["reporter"], "end"])] = _encoded(said)
            self._says = None
        self._changed.clear()
        self._under_way |= taken
        if len(self._cells) > MOST_CELLS and not is_behind:
            self._cells.clear()
            self._part = self.begin_part()
        return taken

    def ended(self, key: bytes, value: bytes, *, is_written: bool) -> None:
        """Takes in whether a record was written; one that was taken later has all of it."""
        if self._under_way.get(key) is value:
            del self._under_way[key]
            if not is_written:
                self._unsent[key] = value


class CountsPart(NamedTuple):
    """Where counts are written: the topic, what their records have in common, and the part."""

    topic: str
    head: Mapping[str, Any]
    part: int


class ExactCounts:
    """The cells of one consumer, in the transactions that commit what they are of.

    | a transaction | has | and then |
    |---|---|---|
    | is tried | each cell that it changes, whole | |
    | is committed | | those are the cells |
    | has failed, or perhaps | | a new part begins, with other keys: of each of the old ones the |
    |   | | last record that was committed counts, whichever that is |

    So what is counted is what is committed, whoever is killed, and when. Not thread-safe.
    """

    def __init__(self, begin: Callable[[], CountsPart | None]) -> None:
        """Begins with none; `begin` returns a part of the reporter, if it knows where it writes."""
        self._begin: Final = begin
        self._part: CountsPart | None = None
        self._cells: dict[CellKey, Cell] = {}
        self._changed: dict[CellKey, Cell] = {}

    def topic(self) -> str | None:
        """Returns where the records go; None: that is not known yet."""
        if self._part is None:
            self._part = self._begin()
        return None if self._part is None else self._part.topic

    def records(self, cells: Mapping[CellKey, Cell], time_ms: int) -> dict[bytes, bytes]:
        """Returns the keys and values of a transaction; its end is told next."""
        assert self._part is not None
        self._changed = {}
        for key, cell in cells.items():
            whole = self._changed[key] = Cell()
            whole.add(self._cells.get(key, Cell()))
            whole.add(cell)
        head = {**self._part.head, "at_ms": time_ms, "lost": 0}
        return records_of(head, self._part.part, self._changed, is_exact=True)

    def committed(self) -> None:
        """Takes in that the transaction is committed."""
        self._cells |= self._changed
        if len(self._cells) > MOST_CELLS:
            self.failed()

    def failed(self) -> None:
        """Takes in that it is not, or that nobody knows."""
        self._cells, self._part = {}, None


def records_of(
    head: Mapping[str, Any], part: int, cells: Mapping[CellKey, Cell], *, is_exact: bool = False
) -> dict[bytes, bytes]:
    """Returns cells as the keys and values of records."""
    own = {"v": VERSION, **head, "exact": is_exact, "part": part}
    return {
        _encoded([head["reporter"], part, *key]): _encoded({**own, **_said(key, cell)})
        for key, cell in cells.items()
    }


def _said(key: CellKey, cell: Cell) -> dict[str, Any]:
    return {
        **key._asdict(),
        "messages": cell.messages,
        "bytes": cell.bytes,
        "refused": cell.refused,
        "unknown": cell.unknown,
        "sum": f"{cell.sum:016x}",
        "xor": f"{cell.xor:016x}",
        "late": {str(bits): count for bits, count in sorted(cell.late.items())},
    }


def _encoded(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
