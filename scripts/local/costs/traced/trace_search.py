"""What a search of the trace costs: an index of many events, and how long answers take.

    python -m local.costs.traced.trace_search [--events N] [--folder DIR] [--rounds N]

Two fifths of the events are `sent`, one fifth `processed`, two fifths `accepted`. An hour has up to
8.3 million; of several hours the last one is not merged yet. Written is what the job writes, by its
own writers; a folder that has an index already is searched as it is. Then the command's process
searches all of it for an id, the id of another way's root, a place, a key, an id that is not there,
and the last hour that is merged for a tag and a status. Printed are the shortest time of the
rounds, from starting the process to its last row, and the least CPU of the process.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from delaywheel_trace.index.events import SCHEMA, open_writer, write_merged
from delaywheel_trace.index.folder import IndexFolder
from delaywheel_trace.index.layout import (
    HOUR_MS,
    AcceptedFile,
    BatchFile,
    MergedFile,
    Span,
    seconds_of,
)
from delaywheel_trace.search.indexes import search_indexes

BEGAN_MS: Final = 1_900_000_800_000 // HOUR_MS * HOUR_MS
MERGED_EVENTS: Final = 5_000_000
QUERY: Final = "0190163d8694"
REPORTERS: Final = [f"{n:032x}" for n in range(64)]
BATCH_EVENTS: Final = 20_000


def ids_of(times_ms: npt.NDArray[np.int64], random: np.random.Generator) -> Any:
    """Returns ids as clients make them: their time, then what is random."""
    count = len(times_ms)
    made = np.empty((count, 16), np.uint8)
    made[:, :6] = times_ms.astype(">u8").view(np.uint8).reshape(count, 8)[:, 2:]
    made[:, 6:] = random.integers(0, 256, (count, 10), np.uint8)
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(16), count, [None, pa.py_buffer(made.tobytes())]
    )


def hour_of(messages: int, hour: int) -> tuple[pa.Table, pa.Table]:
    """Returns events of the trace and rows of the ledger, of messages that are sent in an hour."""
    random = np.random.default_rng(hour)
    began_ms = BEGAN_MS + hour * HOUR_MS
    times_ms = np.sort(random.integers(0, HOUR_MS, messages)) + began_ms
    ids = ids_of(times_ms, random)
    keys = pa.array([f"key-{n}" for n in random.integers(0, 10**9, messages)])
    numbers = np.arange(messages)
    reporters = taken(REPORTERS, numbers % 64)
    due_ms = times_ms + 600_000
    common = {"id": ids, "due_ms": due_ms, "key": keys}
    sent = table(
        messages,
        kind="sent",
        status="ACCEPTED",
        time_ms=times_ms,
        cost_us=random.integers(1_000, 30_000, messages),
        attempts=1,
        node="n1",
        tags=taken(["eu", "us", None, "eu,retry-me"], random.integers(0, 4, messages)),
        reporter=reporters,
        number=numbers // 2_000 + 1,
        row=numbers % 2_000,
        topic="orders",
        **common,
    )
    seen = numbers[::2]
    count = len(seen)
    processed = table(
        count,
        kind="processed",
        status=taken(["DONE", "RETRIED"], (random.random(count) < 0.01).astype(int)),
        time_ms=due_ms[seen] + 40,
        partition=seen % 12,
        offset=seen // 12 + hour * 1_000_000,
        forwarded_ms=due_ms[seen] + 20,
        group="billing",
        topic="orders",
        attempt=1,
        handler_us=random.integers(1_000, 30_000, count),
        root=pa.array([ids[n - 2].as_py().hex() if n % 100 == 2 else None for n in seen]),
        reporter=taken(reporters, seen),
        number=seen // 2_000 + 1_000_000,
        row=seen % 2_000,
        **{name: taken(column, seen) for name, column in common.items()},
    )
    accepted = table(
        messages,
        kind="accepted",
        status="ACCEPTED",
        time_ms=times_ms - 1,
        reporter="n1.7",
        number=numbers + hour * messages + 1,
        row=0,
        id=ids,
        due_ms=due_ms,
        topic="orders",
    )
    return pa.concat_tables([sent, processed]), accepted


def taken(values: Any, places: npt.NDArray[Any]) -> Any:
    """Returns the values at these places."""
    return pa.array(values).take(pa.array(places))


def table(count: int, **columns: Any) -> pa.Table:
    """Returns events by their columns; a column of one value may be given as that."""
    same = {"cluster": "shop", "client": "web", "host": "h7", "ip": "10.0.0.7", "share": 1.0}
    given = {**same, "release": "0.3.0", "dropped": 0, **columns}
    arrays = []
    for field in SCHEMA:
        value = given.get(field.name)
        if value is None:
            arrays.append(pa.nulls(count, field.type))
        elif isinstance(value, pa.Array | np.ndarray):
            arrays.append(taken(value, np.arange(count)).cast(field.type))
        else:
            arrays.append(pa.repeat(pa.scalar(value, field.type), count))
    return pa.table(arrays, schema=SCHEMA)


def write_index(place: Path, events: int) -> int:
    """Writes an index of at least this many events; returns how many hours it has."""
    folder = IndexFolder(str(place))
    an_hour = min(events, MERGED_EVENTS * 5 // 3)
    hours = -(-events // an_hour)
    messages = an_hour * 2 // 5
    for hour in range(hours):
        told, accepted = hour_of(messages, hour)
        hour_ms = BEGAN_MS + hour * HOUR_MS
        seqs = hour * messages + 1, (hour + 1) * messages
        put(folder, AcceptedFile(hour_ms, "n1.7", *seqs).path, accepted, merged=True)
        if hour < hours - 1 or hours == 1:
            told = told.sort_by([("id", "ascending"), ("time_ms", "ascending")])
            span = Span(QUERY, hour * 1_000, hour * 1_000 + 999)
            times = told["time_ms"].to_numpy()
            seconds = seconds_of(int(times.min()), int(times.max()))
            put(folder, MergedFile(hour_ms, (span,), 1, 1, *seconds).path, told, merged=True)
            continue
        for number, begin in enumerate(range(0, len(told), BATCH_EVENTS)):
            file = BatchFile(hour_ms, QUERY, hour * 1_000 + number)
            put(folder, file.path, told.slice(begin, BATCH_EVENTS), merged=False)
    return hours


def put(folder: IndexFolder, path: str, rows: pa.Table, *, merged: bool) -> None:
    """Writes a file as the job does."""

    def write(stream: Any) -> None:
        if merged:
            write_merged(stream, rows)
            return
        with open_writer(stream) as writer:
            writer.write_table(rows)

    folder.put(path, write)


def questions(place: Path) -> dict[str, tuple[Mapping[str, Any], tuple[int, int] | None]]:
    """Returns what is searched for, of a message in the middle of an index."""
    layout = IndexFolder(str(place)).listing()
    merged = [file for file in layout.counting if isinstance(file, MergedFile)]
    middle = pq.ParquetFile(place / merged[len(merged) // 2].path)
    rows = middle.read_row_group(middle.num_row_groups // 2).to_pylist()
    one = next(row for row in rows if row["root"] is not None)
    window = merged[-1].hour_ms, merged[-1].hour_ms + HOUR_MS
    times = dict(zip(("from_ms", "to_ms"), window, strict=True))
    return {
        "id": ({"id": one["id"].hex()}, None),
        "root": ({"id": one["root"]}, None),
        "place": ({"place": [one[name] for name in ("topic", "partition", "offset")]}, None),
        "key": ({"having": {"key": one["key"]}}, None),
        "absent": ({"id": (one["id"][:8] + bytes(8)).hex()}, None),
        "tag, an hour": ({"having": {"tag": "retry-me", **times}}, window),
        "status, an hour": ({"having": {"status": "RETRIED", **times}}, window),
    }


def measure(place: Path, rounds: int) -> None:
    """Prints what each search takes."""
    for name, (question, window) in questions(place).items():
        took_s, cpu_s = [], []
        for _ in range(rounds):
            began_s, before_s = time.monotonic(), _children_s()
            found = search_indexes([str(place)], question, window=window, limit=100, timeout_s=600)
            took_s.append(time.monotonic() - began_s)
            cpu_s.append(_children_s() - before_s)
        files = found.indexes[0].files
        print(
            f"{name:16} {min(took_s):6.2f} s  {min(cpu_s):6.2f} CPU s  "
            f"{len(found.events):,} events of {files:,} files{found.cut}",
            flush=True,
        )


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the index, and measures."""
    parser = argparse.ArgumentParser(description="What a search of the trace costs.")
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, help="where the index is kept; absent: nowhere")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        place = asked.folder or Path(scratch)
        if not IndexFolder(str(place)).listing().counting:
            print(f"writing {asked.events:,} events")
            write_index(place, asked.events)
        files = list(place.rglob("*.parquet"))
        print(f"{sum(file.stat().st_size for file in files) / 1e9:.2f} GB, {len(files):,} files")
        measure(place, asked.rounds)


if __name__ == "__main__":
    main()
