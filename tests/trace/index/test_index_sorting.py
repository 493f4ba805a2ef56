"""Sorting more rows than are held at once: against sorting them all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from delaywheel_trace.index.events import of_rows
from delaywheel_trace.job import sorting
from delaywheel_trace.job.sorting import Unsorted, sorted_parts


def unsorted(tables: list[pa.Table]) -> Unsorted:
    def ids() -> Iterator[Any]:
        return (table["id"].combine_chunks() for table in tables)

    return Unsorted(sum(map(len, tables)), ids, lambda: iter(tables))


def event(draw: random.Random, number: int) -> dict[str, Any]:
    """One of few ids, some of them alike in their first 15 bytes; some have none."""
    ids = [None, bytes(16), bytes(15) + b"\1", bytes([draw.randrange(256)]) * 16]
    event = {"id": draw.choice(ids), "time_ms": draw.randrange(1_000), "kind": "sent"}
    return event | {"reporter": f"r{number % 2}", "number": number // 100, "row": number % 100}


@pytest.mark.parametrize("seed", range(5))
def test_all_rows_come_out_once_and_in_order(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorting, "GROUP_ROWS", 64)
    monkeypatch.setattr(sorting, "RANGE_ROWS", 48)
    monkeypatch.setattr(sorting, "_AT_ONCE_ROWS", 1_000)
    monkeypatch.setattr(sorting, "PART_ROWS", 400)
    monkeypatch.setattr(sorting, "_SAMPLED", 3)
    draw = random.Random(seed)
    events = [event(draw, number) for number in range(1_000)]
    doubled = events + draw.sample(events, 100)
    tables = [of_rows(doubled[at : at + 37]) for at in range(0, len(doubled), 37)]
    parts = sorted_parts(unsorted(tables), tmp_path)
    assert len(parts) == 3
    found = [pq.read_table(part.file).to_pylist() for part in parts]
    for rows, part in zip(found, parts, strict=True):
        times = [row["time_ms"] for row in rows]
        assert (part.earliest_ms, part.latest_ms) == (min(times), max(times))
    rows = [row for part in found for row in part]
    with_id = [(row["id"], row["time_ms"]) for row in rows if row["id"] is not None]
    assert with_id == sorted(with_id)
    assert [row["id"] for row in rows[len(with_id) :]] == [None] * (len(rows) - len(with_id))

    def identity(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["reporter"], row["number"], row["row"], row["id"], row["time_ms"]

    assert sorted(map(identity, rows), key=str) == sorted(map(identity, events), key=str)


def test_nothing_is_a_part_without_rows(tmp_path: Path) -> None:
    (part,) = sorted_parts(unsorted([]), tmp_path)
    assert (part.earliest_ms, len(pq.read_table(part.file))) == (None, 0)


def test_a_row_without_a_time_may_be_of_any(tmp_path: Path) -> None:
    rows = [
        {**event(random.Random(1), number), "time_ms": time} for number, time in ((0, None), (1, 5))
    ]
    (part,) = sorted_parts(unsorted([of_rows(rows)]), tmp_path)
    assert (part.earliest_ms, part.latest_ms) == (None, None)
