"""The ids of messages and cancels of many seconds, each with its place.

Rows lie in *runs*, each ascending by the first half of its ids. What is added becomes a run of its
own, and runs of similar length are merged, so that there are few of them, and a row is moved few
times. Ids are compared as a whole, as two numbers: no other id is ever taken for the one that is
sought. So are topics. Any number of ids is looked up with the same few calls of numpy.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.decoding import IdBatch

ROW_LENGTH_BYTES: Final = 40
_NEW_ROWS: Final = 1 << 16  # at most so many wait to be sorted
_RUNS_APART: Final = 4  # a run is at least this many times as long as the next one
_COMPARED: Final = 1 << 18  # so many rows are compared at once

# Of a row: its number in the frame, its kind, its due within the second.
_DUE_BITS: Final = 10
_KIND_BITS: Final = 2
_ROW_SHIFT: Final = _DUE_BITS + _KIND_BITS
_DUE_MASK: Final = (1 << _DUE_BITS) - 1
_KIND_MASK: Final = (1 << _KIND_BITS) - 1

_Numbers = NDArray[np.uint64]
_Named = TypeVar("_Named", WheelId, str)


class SoughtIds(NamedTuple):
    """What is sought: ids of messages for some topic each, and beginnings of ids."""

    ids: _Numbers
    """Ids as two numbers each: (n, 2)."""
    topics: Sequence[str]
    """The topic of each."""
    begins: _Numbers
    """First halves of ids."""

    @classmethod
    def of(
        cls, ids: Iterable[bytes] = (), topics: Sequence[str] = (), begins: Iterable[bytes] = ()
    ) -> Self:
        """Builds it from ids of 16 bytes and their topics, and from beginnings of 8."""
        halves = np.frombuffer(b"".join(ids), np.uint64).reshape(-1, 2)
        return cls(halves, topics, np.frombuffer(b"".join(begins), np.uint64))


class IdRow(NamedTuple):
    """One row of a frame: a message, or what names one."""

    wheel: WheelId
    seq: int
    row: int
    kind: Kind
    id: bytes
    due_ms: int


@dataclass(frozen=True, slots=True, eq=False)
class FoundIds:
    """Rows that have sought ids, as columns of the same length.

    Attributes:
        numbers: Which of the sought ids each row has.
        wheels: Of their frames, like the seqs.
        rows: Their numbers within the frames.
        kinds: Values of `Kind`.
        due_ms: Of the message, or of what a cancel names.
    """

    numbers: NDArray[np.int64]
    wheels: NDArray[np.object_]
    seqs: NDArray[np.int64]
    rows: NDArray[np.int64]
    kinds: NDArray[np.int64]
    due_ms: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.seqs)

    def each(self) -> Iterator[tuple[int, WheelId, int, int, Kind, int]]:
        """Yields the rows, each as a tuple in the order of the columns."""
        return zip(
            self.numbers.tolist(),
            self.wheels.tolist(),
            self.seqs.tolist(),
            self.rows.tolist(),
            map(Kind, self.kinds.tolist()),
            self.due_ms.tolist(),
            strict=True,
        )

    @staticmethod
    def joined(parts: Sequence["FoundIds"]) -> "FoundIds":
        """Joins rows; they keep their order."""
        parts = [part for part in parts if len(part)]
        if len(parts) < 2:
            return parts[0] if parts else NONE_FOUND
        return FoundIds(
            np.concatenate([part.numbers for part in parts]),
            np.concatenate([part.wheels for part in parts]),
            np.concatenate([part.seqs for part in parts]),
            np.concatenate([part.rows for part in parts]),
            np.concatenate([part.kinds for part in parts]),
            np.concatenate([part.due_ms for part in parts]),
        )


_NONE = np.empty(0, np.int64)
NONE_FOUND: Final = FoundIds(_NONE, np.empty(0, np.object_), _NONE, _NONE, _NONE, _NONE)


@dataclass(frozen=True, slots=True, eq=False)
class _IdRows:
    firsts: _Numbers  # the first half of each id
    lasts: _Numbers  # the last half
    slots: NDArray[np.uint32]
    seqs: NDArray[np.int64]
    wheels: NDArray[np.uint32]  # numbers of wheels
    topics: NDArray[np.uint32]  # numbers of topics
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
            self.topics[rows],
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
            np.concatenate([part.topics for part in parts]),
            np.concatenate([part.details for part in parts]),
        )
        return joined.take(np.argsort(joined.firsts, kind="stable"))


class Ids:
    """Ids that can be looked up. For one thread."""

    def __init__(self) -> None:
        self._runs: list[_IdRows] = []
        self._new: list[_IdRows] = []
        self._new_rows = 0
        self._count = 0
        self._wheels: dict[WheelId, int] = {}  # each with its number, in order
        self._topics: dict[str, int] = {}  # likewise

    def __len__(self) -> int:
        return self._count

    def add(self, batch: IdBatch, only: SoughtIds | None = None) -> None:
        """Adds frames, none of which was added before; with `only`, at least the rows that fit."""
        rows = self._rows_of(batch)
        self._take_in(rows if only is None else rows.among(only))
        if self._new_rows >= _NEW_ROWS:
            self._sort()

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
        self._topics.clear()

    def move_to(self, other: "Ids") -> None:
        """Gives all rows to others, which share their numbers from then on."""
        wheels = _numbers_in(other._wheels, self._wheels)  # noqa: SLF001
        topics = _numbers_in(other._topics, self._topics)  # noqa: SLF001
        for rows in (*self._runs, *self._new):
            other._take_in(replace(rows, wheels=wheels[rows.wheels], topics=topics[rows.topics]))  # noqa: SLF001
        self.clear()

    def find(self, sought: SoughtIds) -> FoundIds:
        """Returns the rows that have one of these ids and its topic, in no order."""
        self._sort()
        ids = sought.ids
        topics = np.array([self._topics.get(topic, -1) for topic in sought.topics], np.int64)
        parts = []
        for run in self._runs:
            for rows, numbers in _in_ranges(run.firsts, ids[:, 0]):
                fits = (run.lasts[rows] == ids[numbers, 1]) & (run.topics[rows] == topics[numbers])
                parts.append(self._located(run.take(rows[fits]), numbers[fits]))
        return FoundIds.joined(parts)

    def find_beginning(self, begins: _Numbers) -> Iterator[IdRow]:
        """Yields the rows whose ids have one of these beginnings, in no order."""
        self._sort()
        for run in self._runs:
            for rows, numbers in _in_ranges(run.firsts, begins):
                taken = run.take(rows)
                ids = np.column_stack([taken.firsts, taken.lasts]).tobytes()
                located = self._located(taken, numbers)
                for at, (_, wheel, seq, row, kind, due_ms) in enumerate(located.each()):
                    yield IdRow(wheel, seq, row, kind, ids[at * 16 : at * 16 + 16], due_ms)

    def _located(self, rows: _IdRows, numbers: NDArray[np.int64]) -> FoundIds:
        wheels = np.fromiter(self._wheels, np.object_, len(self._wheels))
        details = rows.details.astype(np.int64)
        return FoundIds(
            numbers,
            wheels[rows.wheels],
            rows.seqs,
            details >> _ROW_SHIFT,
            (details >> _DUE_BITS & _KIND_MASK) + 1,
            rows.slots.astype(np.int64) * 1000 + (details & _DUE_MASK),
        )

    def _rows_of(self, batch: IdBatch) -> _IdRows:
        """Returns the rows of some frames, in no order."""
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
            np.full(len(halves), _number_in(self._wheels, batch.wheel), np.uint32),
            _numbers_in(self._topics, batch.topics)[batch.topic_numbers],
            details.astype(np.uint32),
        )

    def _take_in(self, rows: _IdRows) -> None:
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


def _number_in(numbers: dict[_Named, int], name: _Named) -> int:
    """Returns the number of a name; a new one has the next."""
    return numbers.setdefault(name, len(numbers))


def _numbers_in(numbers: dict[_Named, int], names: Iterable[_Named]) -> NDArray[np.uint32]:
    return np.array([_number_in(numbers, name) for name in names], np.uint32)


def _in_ranges(
    firsts: _Numbers, wanted: _Numbers
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yields rows whose number is wanted, and which of the wanted ones it is, some at a time."""
    if not len(wanted):
        return
    begins = firsts.searchsorted(wanted)
    lengths = firsts.searchsorted(wanted, side="right") - begins
    there = np.flatnonzero(lengths)
    if not len(there):
        return
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
