"""How many messages a program has sent and consumed, by topic, group and bucket of their due.

| a cell | then |
|---|---|
| changes: it only grows | is written whole within 10 s: of its key the last record counts |
| could not be written | is written again with the next ones |
| is one of more than 10,000 | all are written, and are final: a new part begins, with other keys |
| is new, and 20,000 wait for Kafka | is not there: its messages are counted as lost |

docs/TRACE.md has the format. Sums and hashes do not depend on any order, so the counts of many
reporters add up, and are compared with those of other witnesses: equal counts with unequal hashes
are other messages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from operator import xor
from struct import unpack
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


class CellKey(NamedTuple):
    """What a cell is of; a bucket of None: of messages whose due is not known."""

    direction: Direction
    topic: str
    group: str | None
    bucket_ms: int | None


class Counted(NamedTuple):
    """Messages of one topic that are counted together: columns of equal length.

    Attributes:
        late_ms: How late each was consumed; empty: they were sent.
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

    Example:
        >>> [f"{one:016x}" for one in hashes_of([bytes(range(16))], [1_900_000_000_000])]
        ['d2c52b7851df77ac']
    """
    halves = unpack(f">{2 * len(ids)}Q", b"".join(ids))
    mixed = [
        ((high ^ due_ms * _DUE) * _HIGH + low * _LOW) & _MASK
        for high, low, due_ms in zip(halves[::2], halves[1::2], dues_ms, strict=True)
    ]
    return [one ^ one >> 32 for one in mixed]


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
        self._unsent: dict[bytes, bytes] = {}
        self._part = 0
        self._lost = 0
        self._says_end = False

    @property
    def is_changed(self) -> bool:
        """Whether something is to be written."""
        return bool(self._changed) or bool(self._unsent) or self._says_end

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

    def end(self) -> None:
        """Has it said that the program ends, if it has counted anything."""
        self._says_end = bool(self._cells or self._part)

    def take(self, head: Mapping[str, Any]) -> dict[bytes, bytes]:
        """Takes what is to be written, as the keys and values of records.

        Args:
            head: What all records of the reporter have: `reporter` among it.
        """
        taken, self._unsent = self._unsent, {}
        own = {"v": VERSION, **head, "lost": self._lost, "part": self._part}
        for key in self._changed:
            name = [head["reporter"], self._part, *key]
            taken[_encoded(name)] = _encoded({**own, **_said(key, self._cells[key])})
        if self._says_end:
            self._says_end = False
            taken[_encoded([head["reporter"], "end"])] = _encoded({**own, "direction": "end"})
        self._changed.clear()
        if len(self._cells) > MOST_CELLS:
            self._cells.clear()
            self._part += 1
        return taken

    def failed(self, key: bytes, value: bytes) -> None:
        """Notes that a record was not written; what is taken later under its key has all of it."""
        self._unsent[key] = value


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
