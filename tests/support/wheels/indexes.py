"""Makers of an index of the trace: its files, as the job writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from delaywheel_trace.index.events import IDENTITY, of_rows, open_writer, write_merged
from delaywheel_trace.index.folder import IndexFolder
from delaywheel_trace.index.layout import (
    HOUR_MS,
    AcceptedFile,
    BatchFile,
    EventFile,
    MergedFile,
    Span,
    seconds_of,
)

QUERY = "0190163d8694"
REPORTER = "7f0c8a5be53c4d0f9d3ee1c6f6a7d915"

Event = Mapping[str, Any]


class IndexMaker:
    """Writes batches of events one after another, and merges them.

    Attributes:
        lacks: Columns that an earlier release did not know: files in which they are null do not
            have them.
    """

    def __init__(self, folder: Path, hour_ms: int) -> None:
        self.folder = IndexFolder(str(folder))
        self.hour_ms = hour_ms // HOUR_MS * HOUR_MS
        self.lacks: Sequence[str] = ()
        self._batches: list[list[Event]] = []
        self._merged: list[int] = []

    def batch(self, *events: Event) -> BatchFile:
        """Adds a batch; what an event does not say of its reporter is filled in."""
        number = len(self._batches)
        filled: list[Event] = [
            {"kind": "sent", "reporter": REPORTER, "number": number + 1, "row": row}
            | {"time_ms": self.hour_ms, "share": 1.0, "dropped": 0, **event}
            for row, event in enumerate(events)
        ]
        self._batches.append(filled)
        file = BatchFile(self.hour_ms, QUERY, number)
        self._put(file, of_rows(filled), merged=False)
        return file

    def merge(self) -> MergedFile:
        """Merges all batches; their own files stay, and count no more."""
        found: dict[tuple[Any, ...], Event] = {}
        for event in (event for batch in self._batches for event in batch):
            found.setdefault(tuple(event[name] for name in IDENTITY), event)
        rows = of_rows(list(found.values())).sort_by(
            [("id", "ascending"), ("time_ms", "ascending")]
        )
        times = [event["time_ms"] for event in found.values()]
        spans = (Span(QUERY, 0, len(self._batches) - 1),)
        seconds = seconds_of(min(times), max(times))
        file = MergedFile(self.hour_ms, spans, 1, 1, *seconds)
        self._put(file, rows, merged=True)
        return file

    def accepted(self, wheel: str, first_seq: int, events: Sequence[Event]) -> AcceptedFile:
        """Adds rows of the ledger, one a seq."""
        rows: list[Event] = [
            {"kind": "accepted", "status": "ACCEPTED", "reporter": wheel, "row": 0}
            | {"number": first_seq + place, "time_ms": self.hour_ms, **event}
            for place, event in enumerate(events)
        ]
        file = AcceptedFile(self.hour_ms, wheel, first_seq, first_seq + len(rows) - 1)
        self._put(file, of_rows(rows).sort_by("id"), merged=True)
        return file

    def _put(self, file: EventFile, rows: pa.Table, *, merged: bool) -> None:
        def write(stream: Any) -> None:
            if merged:
                write_merged(stream, rows)
                return
            with open_writer(stream) as writer:
                writer.write_table(rows)

        lacks = [name for name in self.lacks if rows[name].null_count == len(rows)]
        if lacks:
            write = partial(pq.write_table, rows.drop_columns(lacks))
        self.folder.put(file.path, write)
