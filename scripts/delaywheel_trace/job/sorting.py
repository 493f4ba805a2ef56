"""Sorts rows that are more than memory takes, by id and time, each identity once, into parts.

Rows are cut into ranges of ids, as many as make each range some 130,000 rows: by a sample. Each
chunk of the input is sorted and appended to the ranges' files, and one range after another is read
again, sorted, and written as a row group. Rows without an id are ranges of their own, behind all.
What is in memory is a chunk and a range, whatever the input is.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import ipc

from delaywheel_trace.index.events import (
    BLOOMS,
    GROUP_ROWS,
    IDENTITY,
    SCHEMA,
    open_writer,
    values_of,
)

_Ids: TypeAlias = npt.NDArray[np.bytes_]
_ID: Final = np.dtype("S16")

PART_ROWS: Final = 5_000_000
RANGE_ROWS: Final = GROUP_ROWS * 3 // 4
"""Of a range, about: few are more than a row group."""
_MOST_RANGES: Final = 400
"""Each is an open file."""
_AT_ONCE_ROWS: Final = 4 * GROUP_ROWS
"""A range of one id may be larger: it is written in pieces."""
_SAMPLED: Final = 64
"""Of the ids one in so many decides where ranges end."""
_ORDER: Final[list[tuple[str, Literal["ascending", "descending"]]]] = [
    ("id", "ascending"),
    ("time_ms", "ascending"),
]


@dataclass(frozen=True, slots=True)
class Unsorted:
    """Rows of any order, which may be read twice.

    Attributes:
        rows: How many.
        ids: Reads the ids.
        tables: Reads the rows, some at once.
    """

    rows: int
    ids: Callable[[], Iterator[Any]]
    tables: Callable[[], Iterator[pa.Table]]


@dataclass(frozen=True, slots=True)
class Part:
    """A file of sorted rows.

    Attributes:
        file: Where it is.
        earliest_ms: Its first time; None: some row has none.
        latest_ms: Its last.
    """

    file: Path
    earliest_ms: int | None
    latest_ms: int | None


def sorted_parts(unsorted: Unsorted, folder: Path) -> list[Part]:
    """Sorts rows into files in an empty folder; at least one, and as many as there are rows for."""
    bounds, nulls = _bounds(unsorted)
    ranges = len(bounds) + 1 + nulls
    spilled = folder / "ranges"
    spilled.mkdir()
    values = dict.fromkeys(BLOOMS, 0)
    with _Ranges(spilled, ranges) as files:
        for chunk in _chunks(unsorted.tables()):
            for number, piece in _cut(chunk, bounds, nulls):
                files.add(number, piece)
        for of_range in files.values:
            values = {name: max(values[name], of_range.get(name, 0)) for name in values}
    parts = max(1, -(-unsorted.rows // PART_ROWS))
    made = []
    for part in range(parts):
        mine = range(part * ranges // parts, (part + 1) * ranges // parts)
        made.append(_write(folder / f"part-{part}", [spilled / str(n) for n in mine], values))
    shutil.rmtree(spilled)
    return made


def _bounds(unsorted: Unsorted) -> tuple[_Ids, int]:
    """Returns where ranges of ids begin, but for the first, and how many ranges have none."""
    sampled, valid, nulls = [np.array([], _ID)], 0, 0
    for ids in unsorted.ids():
        there = ids.drop_null()
        sampled.append(_ids(there)[valid % _SAMPLED :: _SAMPLED])
        valid, nulls = valid + len(there), nulls + len(ids) - len(there)
    sample = np.sort(np.concatenate(sampled))
    ranges = min(_MOST_RANGES, max(1, -(-valid // RANGE_ROWS)))
    places = np.arange(1, ranges) * len(sample) // ranges
    return np.unique(sample[places]), min(_MOST_RANGES, -(-nulls // RANGE_ROWS))


def _ids(ids: Any) -> _Ids:
    """Returns ids without nulls; numpy compares them as bytes."""
    (_, content), width = ids.buffers(), _ID.itemsize
    if not len(ids):
        return np.array([], _ID)
    found: _Ids = np.frombuffer(content, _ID, len(ids), ids.offset * width)
    return found


def _chunks(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Returns them as large as is sorted at once."""
    kept: list[pa.Table] = []
    for table in tables:
        kept.append(table)
        if sum(map(len, kept)) >= GROUP_ROWS:
            yield pa.concat_tables(kept)
            kept = []
    if kept:
        yield pa.concat_tables(kept)


def _cut(chunk: pa.Table, bounds: _Ids, nulls: int) -> Iterator[tuple[int, pa.Table]]:
    """Returns a chunk's rows by ranges."""
    rows = chunk.sort_by(_ORDER).combine_chunks()
    valid = len(rows) - rows["id"].null_count
    ids = _ids(rows["id"].combine_chunks().slice(0, valid))
    ends = [0, *np.searchsorted(ids, bounds).tolist(), valid]
    for number, (begin, end) in enumerate(pairwise(ends)):
        if begin < end:
            yield number, rows.slice(begin, end - begin)
    rest = rows.slice(valid)
    if len(rest):
        numbers = rest["number"].to_numpy() * 31 + rest["row"].to_numpy()
        for number in range(nulls):
            if len(piece := rest.filter(pa.array(numbers % nulls == number))):
                yield len(bounds) + 1 + number, piece


class _Ranges:
    """A file each range; what is added lies one behind another."""

    def __init__(self, folder: Path, count: int) -> None:
        options = ipc.IpcWriteOptions(compression="lz4")
        self._writers = [
            ipc.new_stream(str(folder / str(number)), SCHEMA, options=options)
            for number in range(count)
        ]
        self.values: list[dict[str, int]] = [{} for _ in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for writer in self._writers:
            writer.close()

    def add(self, number: int, rows: pa.Table) -> None:
        self._writers[number].write_table(rows)
        known = self.values[number]
        for name, count in values_of(rows).items():
            known[name] = known.get(name, 0) + count


def _write(file: Path, ranges: Iterable[Path], values: Mapping[str, int]) -> Part:
    """Writes ranges, sorted, one behind another."""
    times: list[tuple[int | None, int | None]] = []
    fitting = {name: min(count, GROUP_ROWS) for name, count in values.items() if count}
    with file.open("wb") as sink, open_writer(sink, fitting) as writer:
        for one in ranges:
            for rows in _pieces(one):
                writer.write_table(rows, row_group_size=2 * GROUP_ROWS)
                column = rows["time_ms"]
                some: tuple[int | None, int | None] = (None, None)
                if not column.null_count:
                    known: Any = pc.min_max(column).as_py()
                    some = known["min"], known["max"]
                times.append(some)
            one.unlink()
    earliest = [first for first, _ in times if first is not None]
    latest = [last for _, last in times if last is not None]
    if len(earliest) < len(times) or not times:
        return Part(file, None, None)
    return Part(file, min(earliest), max(latest))


def _pieces(file: Path) -> Iterator[pa.Table]:
    """Reads a range, sorted, each identity once; one that is too large in pieces."""
    kept: list[pa.RecordBatch] = []
    with pa.OSFile(str(file), "rb") as source, ipc.open_stream(source) as stream:
        for batch in stream:
            kept.append(batch)
            if sum(map(len, kept)) >= _AT_ONCE_ROWS:
                yield _once(pa.Table.from_batches(kept)).sort_by(_ORDER)
                kept = []
    if kept:
        yield _once(pa.Table.from_batches(kept)).sort_by(_ORDER)


def _once(rows: pa.Table) -> pa.Table:
    """Returns rows without those whose identity one before has."""
    reporter, number, row = (rows[name].combine_chunks() for name in IDENTITY)
    keys = reporter.dictionary_encode().indices.to_numpy(), number.to_numpy(), row.to_numpy()
    order = np.lexsort(keys)
    is_same = np.ones(len(rows) - 1, bool)
    for key in keys:
        is_same &= np.diff(key[order]) == 0
    if not is_same.any():
        return rows
    return rows.take(np.sort(np.delete(order, np.flatnonzero(is_same) + 1)))
