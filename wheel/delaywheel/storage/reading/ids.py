"""The ids of messages and cancels of many seconds, each with its place.

Rows lie in *runs*, each ascending by the first half of its ids. What is added becomes a run of its
own, and runs of similar length are merged, so that there are few of them, and a row is moved few
times. Ids are compared as a whole, as two numbers: no other id is ever taken for the one that is
sought. Any number of ids is looked up with the same few calls of numpy.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.decoding import FrameBatch, IdBatch

ROW_LENGTH_BYTES: Final = 36
_NEW_ROWS: Final = 1 << 16  # at most so many wait to be sorted
_RUNS_APART: Final = 4  # a run is at least this many times as long as the next one
_COMPARED: Final = 1 << 18  # so many rows are compared at once

# Of a row: its number in the frame, its kind, its due within the second.
_DUE_BITS: Final = 10
_KIND_BITS: Final = 2
_ROW_SHIFT: Final = _DUE_BITS + _KIND_BITS
_DUE_MASK: Final = (1 << _DUE_BITS) - 1
_KIND_MASK: Final = (1 << _KIND_BITS) - 1
_KINDS: Final = tuple(Kind)

_Numbers = NDArray[np.uint64]


class SoughtIds(NamedTuple):
    """What is sought: ids, and beginnings of ids."""

    ids: _Numbers
    """Ids as two numbers each: (n, 2)."""
    begins: _Numbers
    """First halves of ids."""

    @classmethod
    def of(cls, ids: Iterable[bytes] = (), begins: Iterable[bytes] = ()) -> Self:
        """Builds it from ids of 16 bytes, and from beginnings of 8."""
        halves = np.frombuffer(b"".join(ids), np.uint64).reshape(-1, 2)
        return cls(halves, np.frombuffer(b"".join(begins), np.uint64))


class IdRow(NamedTuple):
    """One row of a frame: a message, or a cancel."""

    wheel: WheelId
    seq: int
    row: int
    kind: Kind
    id: bytes
    due_ms: int


@dataclass(frozen=True, slots=True, eq=False)
class _IdRows:
    """Rows as columns of the same length."""

    firsts: _Numbers  # the first half of each id
    lasts: _Numbers  # the last half
    slots: NDArray[np.uint32]
    seqs: NDArray[np.int64]
    wheels: NDArray[np.uint32]  # numbers of wheels
    details: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.seqs)

    def take(self, rows: NDArray[Any]) -> "_IdRows":
        return _IdRows(
            self.firsts[rows],
            self.lasts[rows],
            self.slots[rows],
            self.seqs[rows],
            self.wheels[rows],
            self.details[rows],
        )

    def among(self, sought: SoughtIds) -> "_IdRows":
        """Returns the rows that fit, and perhaps a few others."""
        fits = np.isin(self.firsts, sought.ids[:, 0]) & np.isin(self.lasts, sought.ids[:, 1])
        return self.take(np.flatnonzero(fits | np.isin(self.firsts, sought.begins)))

    @staticmethod
    def run(parts: Sequence["_IdRows"]) -> "_IdRows":
        """Joins rows in any order; fast if each part is a run, or ascends by id anyway."""
        joined = _IdRows(
            np.concatenate([part.firsts for part in parts]),
            np.concatenate([part.lasts for part in parts]),
            np.concatenate([part.slots for part in parts]),
            np.concatenate([part.seqs for part in parts]),
            np.concatenate([part.wheels for part in parts]),
            np.concatenate([part.details for part in parts]),
        )
        return joined.take(np.argsort(joined.firsts, kind="stable"))


class Ids:
    """Ids that can be looked up. For one thread."""

    def __init__(self) -> None:
        """Begins without rows."""
        self._runs: list[_IdRows] = []
        self._new: list[_IdRows] = []
        self._new_rows = 0
        self._count = 0
        self._wheels: list[WheelId] = []
        self._numbers: dict[WheelId, int] = {}

    def __len__(self) -> int:
        """The number of rows."""
        return self._count

    def add(self, batch: FrameBatch | IdBatch, only: SoughtIds | None = None) -> int:
        """Adds frames, none of which was added before; returns how many rows were added.

        Args:
            batch: The frames.
            only: Adds at least the rows that fit.
        """
        rows = self._rows_of(batch)
        if only is not None:
            rows = rows.among(only)
        self._count += len(rows)
        self._new.append(rows)
        self._new_rows += len(rows)
        if self._new_rows >= _NEW_ROWS:
            self._sort()
        return len(rows)

    def reduce(self, only: SoughtIds) -> None:
        """Drops rows that are not sought."""
        self._apply(lambda rows: rows.among(only))

    def drop(self, slots: Iterable[int]) -> None:
        """Drops all rows of these seconds."""
        dropped = np.fromiter(slots, np.uint32)
        self._apply(lambda rows: rows.take(np.isin(rows.slots, dropped, invert=True)))

    def clear(self) -> None:
        """Drops everything."""
        self._runs.clear()
        self._new.clear()
        self._new_rows = self._count = 0
        self._wheels.clear()
        self._numbers.clear()

    def move_to(self, other: "Ids") -> None:
        """Gives all rows to others, which share the numbers of wheels from then on."""
        numbers = np.array([other._number(wheel) for wheel in self._wheels], np.uint32)  # noqa: SLF001
        for rows in (*self._runs, *self._new):
            other._take_in(rows, numbers)  # noqa: SLF001
        self.clear()

    def find(self, sought: SoughtIds) -> Collection[IdRow]:
        """Returns the rows that have one of these ids, or beginnings of ids, in no order."""
        self._sort()
        rows = [row for found in self._found(sought) for row in self._made(found)]
        # What has both a sought id and a sought beginning would come twice.
        is_both = np.isin(sought.begins, sought.ids[:, 0]).any()
        return set(rows) if is_both else rows

    def _found(self, sought: SoughtIds) -> Iterator[_IdRows]:
        for run in self._runs:
            for rows, numbers in _in_ranges(run.firsts, sought.ids[:, 0]):
                fits = run.lasts[rows] == sought.ids[numbers, 1]
                yield run.take(rows[fits])
            for rows, _ in _in_ranges(run.firsts, sought.begins):
                yield run.take(rows)

    def _made(self, rows: _IdRows) -> Iterator[IdRow]:
        ids = np.column_stack([rows.firsts, rows.lasts]).tobytes()
        dues_ms = rows.slots.astype(np.int64) * 1000 + (rows.details & _DUE_MASK)
        return map(
            IdRow,
            [self._wheels[number] for number in rows.wheels.tolist()],
            rows.seqs.tolist(),
            (rows.details >> _ROW_SHIFT).tolist(),
            [_KINDS[kind] for kind in (rows.details >> _DUE_BITS & _KIND_MASK).tolist()],
            [ids[at : at + 16] for at in range(0, len(ids), 16)],
            dues_ms.tolist(),
        )

    def _rows_of(self, batch: FrameBatch | IdBatch) -> _IdRows:
        """Returns the rows of some frames, in no order."""
        if isinstance(batch, FrameBatch):
            batch = batch.ids()
        halves = np.ascontiguousarray(batch.ids).view(np.uint64).reshape(-1, 2)
        slots = batch.due_ms // 1000
        details = (batch.rows << _ROW_SHIFT) | (batch.due_ms - slots * 1000)
        details |= (batch.kinds.astype(np.int64) - 1) << _DUE_BITS
        # Copies: a view would keep the bytes of the frames in memory.
        return _IdRows(
            halves[:, 0].copy(),
            halves[:, 1].copy(),
            slots.astype(np.uint32),
            batch.seqs,
            np.full(len(halves), self._number(batch.wheel), np.uint32),
            details.astype(np.uint32),
        )

    def _number(self, wheel: WheelId) -> int:
        number = self._numbers.setdefault(wheel, len(self._wheels))
        if number == len(self._wheels):
            self._wheels.append(wheel)
        return number

    def _take_in(self, rows: _IdRows, numbers: NDArray[np.uint32]) -> None:
        wheels = numbers[rows.wheels]
        rows = _IdRows(rows.firsts, rows.lasts, rows.slots, rows.seqs, wheels, rows.details)
        self._count += len(rows)
        self._new.append(rows)
        self._new_rows += len(rows)

    def _apply(self, change: Callable[[_IdRows], _IdRows]) -> None:
        """Replaces all rows by some of them, in the same order."""
        runs = sorted(map(change, self._runs), key=len, reverse=True)
        self._runs = [run for run in runs if len(run)]
        self._new = [change(rows) for rows in self._new]
        self._new_rows = sum(map(len, self._new))
        self._count = self._new_rows + sum(map(len, self._runs))

    def _sort(self) -> None:
        """Makes a run of the new rows, and merges it with those that are not much longer."""
        if not self._new_rows:
            return
        parts, rows = self._new, self._new_rows
        self._new, self._new_rows = [], 0
        while self._runs and len(self._runs[-1]) < _RUNS_APART * rows:
            parts.append(self._runs.pop())
            rows += len(parts[-1])
        self._runs.append(_IdRows.run(parts))


def _in_ranges(
    firsts: _Numbers, wanted: _Numbers
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yields rows whose number is wanted, and which of the wanted ones it is, some at a time."""
    begins = firsts.searchsorted(wanted)
    lengths = firsts.searchsorted(wanted, side="right") - begins
    there = np.flatnonzero(lengths)
    ends = np.cumsum(lengths[there])
    first, done = 0, 0
    while first < len(there):
        # One of the wanted alone may be more than is compared at once.
        last = max(first + 1, int(ends.searchsorted(done + _COMPARED, side="right")))
        some = there[first:last]
        counts = lengths[some]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        yield np.repeat(begins[some], counts) + within, np.repeat(some, counts)
        first, done = last, int(ends[last - 1])
