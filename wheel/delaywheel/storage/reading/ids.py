"""The ids of one second's messages and cancels, sorted, each with its place.

Rows lie in *runs*, each ascending by id. What is added becomes a run of its own, and runs of
similar length are merged, so that a second has few of them, and a row is moved few times. Ids
are compared as a whole, as two numbers: no other id is ever taken for the one that is sought.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.frames.format import Kind
from delaywheel.storage.reading.decoding import FrameBatch

ROW_LENGTH_BYTES: Final = 32
_SECOND_BYTES: Final = 4096  # about what a second takes in memory beside its rows
_NEW_ROWS: Final = 1 << 16  # at most so many wait to be sorted
_RUNS_APART: Final = 4  # a run is at least this many times as long as the next one

# Of a row: its number in the frame, whether it is a cancel, its due within the second.
_DUE_BITS: Final = 10
_CANCEL_BIT: Final = 1 << _DUE_BITS
_ROW_SHIFT: Final = _DUE_BITS + 1

_Numbers = NDArray[np.uint64]


class Sought(NamedTuple):
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

    def among(self, run: "_Run") -> "_Run":
        """Returns the rows that fit, and perhaps a few others."""
        fits = np.isin(run.firsts, self.ids[:, 0]) & np.isin(run.lasts, self.ids[:, 1])
        return run.take(np.flatnonzero(fits | np.isin(run.firsts, self.begins)))


class IdRow(NamedTuple):
    """One row of a frame: a message, or a cancel."""

    wheel: WheelId
    seq: int
    row: int
    kind: Kind
    id: bytes
    due_ms: int


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Rows ascending by id; all arrays have the same length."""

    firsts: _Numbers  # the first half of each id
    lasts: _Numbers  # the last half
    seqs: NDArray[np.int64]
    wheels: NDArray[np.uint32]  # numbers of wheels
    details: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.seqs)

    def take(self, rows: NDArray[Any]) -> "_Run":
        return _Run(
            self.firsts[rows],
            self.lasts[rows],
            self.seqs[rows],
            self.wheels[rows],
            self.details[rows],
        )

    @staticmethod
    def joined(parts: Sequence["_Run"]) -> "_Run":
        """Joins rows in any order."""
        joined = _Run(
            np.concatenate([part.firsts for part in parts]),
            np.concatenate([part.lasts for part in parts]),
            np.concatenate([part.seqs for part in parts]),
            np.concatenate([part.wheels for part in parts]),
            np.concatenate([part.details for part in parts]),
        )
        return joined.take(np.lexsort((joined.lasts, joined.firsts)))


class SecondIds:
    """The ids of one second. For one thread.

    Attributes:
        slot: The second.
        damaged: Frames of this second that could not be read: wheel and seq.
        length_bytes: About what it takes in memory.
        only: What the rows were reduced to; None: all are here.
    """

    def __init__(self, slot: int) -> None:
        """Begins without rows."""
        self.slot = slot
        self.damaged: set[tuple[WheelId, int]] = set()
        self.length_bytes = _SECOND_BYTES
        self.only: Sought | None = None
        self._runs: list[_Run] = []
        self._new: list[_Run] = []
        self._new_rows = 0
        self._wheels: list[WheelId] = []

    def add(self, batch: FrameBatch) -> None:
        """Adds frames of this second, none of which was added before."""
        run = self._run_of(batch)
        if self.only is not None:
            run = self.only.among(run)
        self._new.append(run)
        self._new_rows += len(run)
        self.length_bytes += len(run) * ROW_LENGTH_BYTES
        if self._new_rows >= _NEW_ROWS:
            self._sort()

    def reduce(self, only: Sought) -> None:
        """Drops all rows that are not sought; of later ones too."""
        self._sort()
        self.only = only
        runs = [only.among(run) for run in self._runs]
        self._runs = [run for run in runs if len(run)]
        self.length_bytes = _SECOND_BYTES + sum(map(len, self._runs)) * ROW_LENGTH_BYTES

    def find(self, sought: Sought) -> Iterator[IdRow]:
        """Yields the rows that have one of these ids, or beginnings of ids, in no order."""
        self._sort()
        for run in self._runs:
            for number, begin, end in _ranges(run.firsts, sought.ids[:, 0]):
                among, last = run.lasts[begin:end], sought.ids[number, 1]
                first_row = begin + int(among.searchsorted(last))
                end_row = begin + int(among.searchsorted(last, side="right"))
                yield from self._rows(run, first_row, end_row)
            for _, begin, end in _ranges(run.firsts, sought.begins):
                yield from self._rows(run, begin, end)

    def _rows(self, run: _Run, begin: int, end: int) -> Iterator[IdRow]:
        for at in range(begin, end):
            detail = int(run.details[at])
            yield IdRow(
                self._wheels[int(run.wheels[at])],
                int(run.seqs[at]),
                detail >> _ROW_SHIFT,
                Kind.CANCELS if detail & _CANCEL_BIT else Kind.MESSAGES,
                run.firsts[at].tobytes() + run.lasts[at].tobytes(),
                self.slot * 1000 + (detail & (_CANCEL_BIT - 1)),
            )

    def _run_of(self, batch: FrameBatch) -> _Run:
        """Returns the rows of some frames, in no order."""
        counts, columns = batch.counts, batch.columns
        halves = np.ascontiguousarray(columns.ids).view(np.uint64).reshape(-1, 2)
        rows = np.arange(len(columns)) - np.repeat(np.cumsum(counts) - counts, counts)
        details = (rows << _ROW_SHIFT) | (columns.due_ms - self.slot * 1000)
        if batch.kind is Kind.CANCELS:
            details |= _CANCEL_BIT
        # Copies: a view would keep the bytes of the frames in memory.
        return _Run(
            halves[:, 0].copy(),
            halves[:, 1].copy(),
            np.repeat(batch.seqs, counts),
            np.full(len(columns), self._number(batch.wheel), np.uint32),
            details.astype(np.uint32),
        )

    def _number(self, wheel: WheelId) -> int:
        if wheel not in self._wheels:
            self._wheels.append(wheel)
        return self._wheels.index(wheel)

    def _sort(self) -> None:
        """Makes a run of the new rows, and merges it with those that are not much longer."""
        if not self._new_rows:
            return
        parts, rows = self._new, self._new_rows
        self._new, self._new_rows = [], 0
        while self._runs and len(self._runs[-1]) < _RUNS_APART * rows:
            parts.append(self._runs.pop())
            rows += len(parts[-1])
        self._runs.append(_Run.joined(parts))


def _ranges(firsts: _Numbers, wanted: _Numbers) -> Iterator[tuple[int, int, int]]:
    """Yields which of the wanted numbers are there, and from where to where."""
    begins, ends = firsts.searchsorted(wanted), firsts.searchsorted(wanted, side="right")
    for number in np.flatnonzero(begins < ends).tolist():
        yield number, int(begins[number]), int(ends[number])
